/*
 * Sets a state dict: matches it by name with the live dict (state_get.c), checks all of it, and then copies
 * everything into the live memory. Whole tensors are cut here, or come from rank 0. A load reads a checkpoint
 * into that memory instead.
 */
#include "runtime/state/state_internal.h"
#include "base/core/given.h"
#include "base/text.h"
#include "runtime/staging/load_copies.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/manifest/large_value.h"
#include "statedict/manifest/manifest.h"
#include "statedict/save/load_internal.h"
#include "statedict/sd/layout_internal.h"

#include <string.h>

/* === a dict of rank 0 ========================================================================= */

/*
 * Sets a dict that only rank 0 has. Rank 0 first broadcasts its description as one text: names, dtypes,
 * shapes, values, and the contents of 0-d tensors. Every rank matches it with its own live dict, and all
 * agree that it matches before anything changes. Then the tensors follow one after the other through one
 * bounded buffer, of which each rank keeps its part. The inverse is state_get.c.
 */

/* Rank 0's description of its dict, received by all: names, shapes, values, 0-d tensors. */
typedef struct fsdp_state_message {
    fsdp_sd *sd; /* the entries of rank 0's dict; whole tensors without memory */
    char *bytes; /* the data of 0-d tensors */
} fsdp_state_message;

/* The source of a live entry in sd, or in a dict with the same entries; for an alias, its target. */
static const fsdp_entry *source_of(const fsdp_state_match *match, const fsdp_sd *sd, size_t live)
{
    const fsdp_entry *entry = fsdp_sd_at(sd, (size_t)match->source[live]);
    return entry->kind == FSDP_ENTRY_ALIAS ? fsdp_sd_at(sd, entry->target) : entry;
}

/* --- description: rank 0 ---------------------------------------------------------------------- */

static fsdp_status check_whole(const fsdp_entry *entry, fsdp_error *err)
{
    fsdp_box box, whole = fsdp_box_whole(entry->ndim, entry->shape);
    if (fsdp_entry_bytes(entry) == 0)
        return FSDP_OK;
    if (fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, 0) == 1 && entry->data) {
        fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, 0, 0, &box);
        if (fsdp_box_equal(&box, &whole))
            return FSDP_OK;
    }
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' is not whole in rank 0's memory, as broadcast_from_rank0 requires",
                     entry->name);
}

static fsdp_status describe_entry(const fsdp_sd *sd, const fsdp_entry *entry,
                                  const fsdp_mesh *alone, fsdp_sd *described, fsdp_text *bytes,
                                  fsdp_error *err)
{
    const fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = alone};
    if (entry->kind == FSDP_ENTRY_VALUE && fsdp_value_is_large(&entry->value))
        FSDP_TRY(fsdp_value_pack(&entry->value, bytes, err));
    if (entry->kind == FSDP_ENTRY_TENSOR)
        FSDP_TRY(check_whole(entry, err));
    if (entry->kind == FSDP_ENTRY_TENSOR && entry->ndim == 0)
        fsdp_text_add(bytes, entry->data, fsdp_dtype_size(entry->dtype));
    return fsdp_state_add_entry(sd, entry, &layout, NULL, described, err);
}

static fsdp_status describe_all(const fsdp_sd *sd, fsdp_sd *described, fsdp_text *bytes,
                                fsdp_error *err)
{
    fsdp_mesh *alone = NULL;
    const int64_t one = 1;
    FSDP_TRY(fsdp_mesh_create(1, &one, (const char *[]){"rank"}, NULL, &alone, err));
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < fsdp_sd_count(sd) && status == FSDP_OK; i++)
        status = describe_entry(sd, fsdp_sd_at(sd, i), alone, described, bytes, err);
    fsdp_mesh_free(alone);
    return status;
}

/* Encodes the description as a manifest, followed by the bytes of large values and 0-d tensors. */
static fsdp_status encode(const fsdp_sd *sd, fsdp_text *text, fsdp_text *bytes, fsdp_error *err)
{
    fsdp_manifest_file none = {0};
    fsdp_manifest manifest = {
        .kind = FSDP_FULL, .step = FSDP_NO_STEP, .world = 1, .files = &none, .file_count = 1};
    FSDP_TRY(fsdp_sd_create(&manifest.sd, err));
    fsdp_status status = describe_all(sd, manifest.sd, bytes, err);
    if (status == FSDP_OK && bytes->failed)
        status = fsdp_fail_memory(err, "the description of a state dict");
    if (status == FSDP_OK)
        status = fsdp_manifest_encode(&manifest, text, err);
    fsdp_sd_free(manifest.sd);
    return status;
}

/* --- description: all ranks ------------------------------------------------------------------- */

/* Points 0-d tensors and large values to their bytes, in the order of the entries. */
static fsdp_status place_bytes(const fsdp_manifest *manifest, char *bytes, fsdp_error *err)
{
    size_t next = 0;
    for (size_t i = 0; i < fsdp_sd_count(manifest->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(manifest->sd, i);
        if (entry->kind == FSDP_ENTRY_TENSOR && entry->ndim == 0) {
            fsdp_sd_set_data(manifest->sd, i, bytes);
            bytes += fsdp_dtype_size(entry->dtype);
        } else if (next < manifest->stored_count && manifest->stored[next].entry == i) {
            const fsdp_stored_value *stored = &manifest->stored[next++];
            fsdp_value value;
            FSDP_TRY(fsdp_value_unpack(stored->kind, bytes, (size_t)stored->size, entry->name,
                                       &value, err));
            fsdp_sd_set_value(manifest->sd, i, &value);
            bytes += stored->size;
        }
    }
    return FSDP_OK;
}

static fsdp_status decode(const char *text, size_t size, fsdp_state_message *message,
                          fsdp_error *err)
{
    fsdp_manifest manifest;
    FSDP_TRY(fsdp_manifest_decode(text, size, "rank 0's state dict", &manifest, err));
    fsdp_status status = place_bytes(&manifest, message->bytes, err);
    message->sd = manifest.sd;
    manifest.sd = NULL;
    fsdp_manifest_release(&manifest);
    return status;
}

static fsdp_status share(fsdp_ctl *ctl, void *data, size_t size, fsdp_error *err)
{
    return size > 0 ? fsdp_ctl_broadcast(ctl, 0, data, size, err) : FSDP_OK;
}

static fsdp_status tell(fsdp_ctl *ctl, const fsdp_text *text, const fsdp_text *bytes,
                        fsdp_state_message *message, fsdp_error *err)
{
    size_t sizes[] = {text->size, bytes->size};
    FSDP_TRY(share(ctl, sizes, sizeof sizes, err));
    char *copy = fsdp_alloc(sizes[0], 1);
    message->bytes = fsdp_alloc(sizes[1], 1);
    fsdp_status status =
        copy && message->bytes ? FSDP_OK : fsdp_fail_memory(err, "rank 0's state dict");
    if (status == FSDP_OK && fsdp_ctl_rank(ctl) == 0) {
        memcpy(copy, text->data, sizes[0]);
        memcpy(message->bytes, bytes->size > 0 ? bytes->data : "", sizes[1]);
    }
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = share(ctl, copy, sizes[0], err);
    if (status == FSDP_OK)
        status = share(ctl, message->bytes, sizes[1], err);
    if (status == FSDP_OK)
        status = fsdp_ctl_agree(ctl, decode(copy, sizes[0], message, err), err);
    fsdp_free(copy);
    return status;
}

/* Collective. Only rank 0's `sd` counts. Release the message also when this failed. */
static fsdp_status state_send_description(fsdp_root *root, const fsdp_sd *sd,
                                          fsdp_state_message *message_out, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    fsdp_text text = {0}, bytes = {0};
    fsdp_status status = root->world->rank == 0 ? encode(sd, &text, &bytes, err) : FSDP_OK;
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = tell(ctl, &text, &bytes, message_out, err);
    fsdp_text_release(&text);
    fsdp_text_release(&bytes);
    return status;
}

static void state_message_release(fsdp_state_message *message)
{
    fsdp_sd_free(message->sd);
    fsdp_free(message->bytes);
    *message = (fsdp_state_message){0};
}

/* --- tensors ---------------------------------------------------------------------------------- */

static fsdp_status bring(const fsdp_state_match *match, fsdp_state_mover *mover, size_t i,
                         const fsdp_sd *data, fsdp_error *err)
{
    const fsdp_entry *live = fsdp_sd_at(match->live, i);
    const fsdp_entry *told = source_of(match, match->sd, i);
    const fsdp_box whole = fsdp_box_whole(live->ndim, live->shape);
    bool has_data = mover->root->world->rank == 0;
    if (live->ndim == 0) {
        (void)fsdp_state_set_number(live, told);
        return FSDP_OK;
    }
    return fsdp_state_move(mover, 0, &whole, has_data ? source_of(match, data, i)->data : NULL,
                           live, err);
}

static fsdp_status bring_all(const fsdp_state_match *match, fsdp_state_mover *mover,
                             const fsdp_sd *data, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(match->live); i++)
        if (match->source[i] >= 0)
            FSDP_TRY(bring(match, mover, i, data, err));
    return fsdp_state_move_end(mover, err);
}

/* Collective. data: rank 0's dict, of which match->sd is the description. */
static fsdp_status state_broadcast(const fsdp_state_match *match, const fsdp_sd *data,
                                   fsdp_error *err)
{
    fsdp_root *root = match->scope->root;
    fsdp_state_mover mover = {0};
    fsdp_status status =
        fsdp_state_mover_init(&mover, root, fsdp_sd_tensor_bytes(match->live), FSDP_OK, err);
    if (status == FSDP_OK)
        status =
            fsdp_root_done(root, "fsdp_root_set_state", bring_all(match, &mover, data, err), err);
    fsdp_state_mover_release(&mover);
    return status;
}

/* === setting ================================================================================== */

/* --- between steps only ----------------------------------------------------------------------- */

static bool has_gradients(const fsdp_root *root)
{
    for (size_t i = 0; i < root->model->count; i++)
        if (root->model->params[i]->shard_grad || root->model->params[i]->kept)
            return true;
    for (size_t i = 0; i < root->group_count; i++)
        if (root->groups[i]->partial.block)
            return true;
    return false;
}

/* Fails while gradients wait for a step. The root is settled. */
static fsdp_status refuse_gradients(const fsdp_root *root, fsdp_error *err)
{
    if (root->context->finalizing || has_gradients(root))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "state is set before backward or after the optimizer's step, and there "
                         "are gradients: make the step, or drop them by fsdp_root_zero_grad");
    return FSDP_OK;
}

/* --- names ------------------------------------------------------------------------------------ */

static bool sets_optims(const fsdp_state_scope *scope)
{
    return scope->optim_count > 0 && scope->opts.part != FSDP_STATE_MODEL;
}

/* True for names below the optimizers' prefix; others are the model's or the caller's extra entries. */
static bool is_optim_name(const fsdp_state_scope *scope, const fsdp_entry *entry)
{
    const char *prefix = scope->opts.optim_prefix;
    size_t rest;
    return fsdp_state_behind(entry->name, entry->name_size, prefix, "state.", &rest) ||
           fsdp_state_behind(entry->name, entry->name_size, prefix, "param_groups", &rest);
}

static fsdp_status check_flat(const fsdp_entry *entry, fsdp_error *err)
{
    static const char flat[] = "_flat_param";
    size_t size = sizeof flat - 1;
    if (entry->name_size < size || memcmp(entry->name + entry->name_size - size, flat, size) != 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' is a flat parameter of FSDP1: that state dict was not made from the "
                     "root; fsdp-convert makes one with the parameters' names",
                     entry->name);
}

static fsdp_status note(fsdp_name_list *list, const fsdp_entry *entry, fsdp_error *err)
{
    return fsdp_names_add(list, entry->name, entry->name_size)
               ? FSDP_OK
               : fsdp_fail_memory(err, "a list of names");
}

/* Handles a name that the live dict lacks. */
static fsdp_status place_unknown(fsdp_state_match *match, const fsdp_entry *entry, fsdp_error *err)
{
    const fsdp_state_scope *scope = match->scope;
    size_t rest;
    if (match->extra && fsdp_sd_find(match->extra, entry->name, entry->name_size) >= 0)
        return FSDP_OK;
    if (is_optim_name(scope, entry)) {
        bool is_group = !fsdp_state_behind(entry->name, entry->name_size, scope->opts.optim_prefix,
                                           "state.", &rest);
        return !sets_optims(scope) || is_group ? FSDP_OK : note(&match->unexpected, entry, err);
    }
    const char *name =
        fsdp_state_behind(entry->name, entry->name_size, scope->opts.model_prefix, "", &rest);
    if (!name || scope->opts.part == FSDP_STATE_OPTIM)
        return FSDP_OK;
    FSDP_TRY(check_flat(entry, err));
    match->model_count++;
    const fsdp_state_param *param = fsdp_state_find(scope, name, rest);
    if (param && !fsdp_state_has(scope, param))
        return FSDP_OK; /* a frozen parameter, which is ignored */
    match->model_unexpected++;
    return note(&match->unexpected, entry, err);
}

/* Finds the live entry of entry i: first by its name, then by other names of its parameter. */
static fsdp_status place(fsdp_state_match *match, size_t i, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(match->sd, i);
    int64_t at = fsdp_sd_find(match->live, entry->name, entry->name_size);
    bool is_own = at >= 0 && fsdp_sd_at(match->live, (size_t)at)->kind == FSDP_ENTRY_TENSOR;
    const fsdp_state_param *param;
    if (at < 0)
        FSDP_TRY(fsdp_state_find_state(match, entry, &param, &at, err));
    if (at < 0)
        return place_unknown(match, entry, err);
    const fsdp_entry *live = fsdp_sd_at(match->live, (size_t)at);
    match->model_count += !is_optim_name(match->scope, live);
    if (live->kind == FSDP_ENTRY_ALIAS)
        at = (int64_t)live->target;
    if (live->kind != FSDP_ENTRY_VALUE && (is_own || match->source[at] < 0))
        match->source[at] = (int64_t)i;
    return FSDP_OK;
}

/* True for AdamW's `step`, recognised by the moments beside it. */
static bool is_of_adamw(const fsdp_state_match *match, const fsdp_entry *step, size_t param_size)
{
    fsdp_text moment = {0};
    fsdp_text_add(&moment, step->name, param_size);
    fsdp_text_addf(&moment, ".exp_avg");
    bool is_there = moment.failed || fsdp_sd_find(match->live, moment.data, moment.size) >= 0;
    fsdp_text_release(&moment);
    return is_there;
}

static bool ends_with(const fsdp_entry *entry, const char *end, size_t *before_out)
{
    size_t size = strlen(end);
    if (entry->name_size <= size || memcmp(entry->name + entry->name_size - size, end, size) != 0)
        return false;
    *before_out = entry->name_size - size;
    return true;
}

/* True for optimizer state that PyTorch lacks: masters, which are then set from their parameter, and the
 * steps of SGD, which are then 1 at least if there is a momentum (finish_state). */
static bool may_be_missing(const fsdp_state_match *match, const fsdp_entry *live)
{
    size_t param_size;
    if (!is_optim_name(match->scope, live))
        return false;
    return ends_with(live, ".master", &param_size) ||
           (ends_with(live, ".step", &param_size) && !is_of_adamw(match, live, param_size));
}

static fsdp_status match_extra(fsdp_state_match *match, fsdp_error *err)
{
    for (size_t i = 0; match->extra && i < fsdp_sd_count(match->extra); i++) {
        const fsdp_entry *extra = fsdp_sd_at(match->extra, i);
        bool is_there = fsdp_sd_find(match->sd, extra->name, extra->name_size) >= 0;
        if (extra->kind != FSDP_ENTRY_ALIAS && !is_there)
            FSDP_TRY(note(&match->missing, extra, err));
    }
    return FSDP_OK;
}

static fsdp_status match_names(fsdp_state_match *match, fsdp_error *err)
{
    const fsdp_state_scope *scope = match->scope;
    if (sets_optims(scope))
        FSDP_TRY(fsdp_state_take_groups(scope, match->sd, &match->missing, &match->unexpected,
                                        &match->groups, err));
    for (size_t i = 0; i < fsdp_sd_count(match->live); i++)
        match->source[i] = -1;
    for (size_t i = 0; i < fsdp_sd_count(match->sd); i++)
        FSDP_TRY(place(match, i, err));
    for (size_t i = 0; i < fsdp_sd_count(match->live); i++) {
        const fsdp_entry *live = fsdp_sd_at(match->live, i);
        if (live->kind == FSDP_ENTRY_TENSOR && match->source[i] < 0 && !may_be_missing(match, live))
            FSDP_TRY(note(&match->missing, live, err));
    }
    return match_extra(match, err);
}

static fsdp_status check_names(const fsdp_state_match *match, fsdp_error *err)
{
    const fsdp_state_opts *opts = &match->scope->opts;
    if (opts->part != FSDP_STATE_OPTIM && !opts->partial && !opts->submodules &&
        !opts->ignore_frozen && match->model_count == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "state of the model is to be set, and the state dict has none: no name "
                         "begins with '%s'",
                         opts->model_prefix);
    if (opts->partial || (match->missing.count == 0 && match->model_unexpected == 0))
        return FSDP_OK;
    fsdp_text text = {0};
    bool is_all = fsdp_names_append(&match->missing, "missing", &text);
    is_all = fsdp_names_append(&match->unexpected, "unexpected", &text) && is_all;
    fsdp_status status =
        fsdp_fail(err, FSDP_ERR_USAGE, "the state dict does not fit%s%s",
                  text.data ? text.data : "", is_all ? "" : "; a report is given each name");
    fsdp_text_release(&text);
    return status;
}

/* --- tensors ---------------------------------------------------------------------------------- */

static bool rank_holds_same(const fsdp_entry *a, const fsdp_entry *b, int rank)
{
    size_t n = fsdp_layout_box_count(&a->layout, a->ndim, a->shape, rank);
    if (n != fsdp_layout_box_count(&b->layout, b->ndim, b->shape, rank))
        return false;
    for (size_t i = 0; i < n; i++) {
        fsdp_box x, y;
        fsdp_layout_box_at(&a->layout, a->ndim, a->shape, rank, i, &x);
        fsdp_layout_box_at(&b->layout, b->ndim, b->shape, rank, i, &y);
        if (!fsdp_box_equal(&x, &y))
            return false;
    }
    return true;
}

static bool is_same_layout(const fsdp_layout *a, const fsdp_layout *b)
{
    return a->kind == FSDP_LAYOUT_MESH && b->kind == FSDP_LAYOUT_MESH &&
           fsdp_mesh_equal(a->mesh, b->mesh) &&
           memcmp(a->placement, b->placement, sizeof a->placement) == 0;
}

/* Compares the layouts of all ranks, so that all ranks come to the same result. */
static bool lies_the_same(const fsdp_entry *a, const fsdp_entry *b, int world)
{
    if (is_same_layout(&a->layout, &b->layout))
        return true;
    for (int rank = 0; rank < world; rank++)
        if (!rank_holds_same(a, b, rank))
            return false;
    return true;
}

static bool holds_whole(const fsdp_entry *entry, int rank)
{
    const fsdp_box whole = fsdp_box_whole(entry->ndim, entry->shape);
    fsdp_box box;
    if (fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, rank) != 1)
        return false;
    fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, rank, 0, &box);
    return fsdp_box_equal(&box, &whole);
}

/* A dict from another world may name other ranks: an entry that is whole on all of them is whole
 * here, too. */
static bool is_whole(const fsdp_entry *entry, int rank)
{
    int ranks = fsdp_layout_world(&entry->layout);
    if (holds_whole(entry, rank))
        return true;
    for (int i = 0; i < ranks; i++)
        if (!holds_whole(entry, i))
            return false;
    return ranks > 0;
}

static fsdp_status check_layout(const fsdp_state_match *match, const fsdp_entry *live,
                                const fsdp_entry *from, fsdp_error *err)
{
    const fsdp_world *world = match->scope->root->world;
    bool takes_whole = match->scope->opts.full_state_dict;
    if (match->is_description || lies_the_same(live, from, world->size) ||
        (takes_whole && is_whole(from, world->rank)))
        return FSDP_OK;
    if (takes_whole)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is neither whole on rank %d, as full_state_dict requires, nor laid "
                         "out as the parameter",
                         from->name, world->rank);
    if (is_whole(from, world->rank))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is a whole tensor, and the parameter is sharded: set "
                         "full_state_dict, and each rank takes its part of it",
                         from->name);
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "'%s' is cut differently than the parameter: save it, and load it with fsdp_root_load",
        from->name);
}

static fsdp_status check_dtype(const fsdp_state_match *match, const fsdp_entry *live,
                               const fsdp_entry *from, fsdp_error *err)
{
    bool is_castable =
        fsdp_dtype_describe(live->dtype)->is_float && fsdp_dtype_describe(from->dtype)->is_float;
    if (live->dtype == from->dtype || (match->casts && is_castable))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is %s here and %s in the state dict", from->name,
                     fsdp_dtype_name(live->dtype), fsdp_dtype_name(from->dtype));
}

static fsdp_status check_tensor(const fsdp_state_match *match, const fsdp_entry *live,
                                const fsdp_entry *from, fsdp_error *err)
{
    double number;
    char here[200], there[200];
    bool is_scalar = from->kind == FSDP_ENTRY_TENSOR && from->ndim == 0;
    if (live->ndim == 0 &&
        (fsdp_state_number(from, &number) || (is_scalar && match->is_description)))
        return FSDP_OK;
    if (from->kind != FSDP_ENTRY_TENSOR)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is a tensor here and a value in the state dict",
                         from->name);
    if (live->ndim != from->ndim ||
        memcmp(live->shape, from->shape, (size_t)live->ndim * sizeof *live->shape) != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has shape %s here and %s in the state dict",
                         from->name, fsdp_shape_text(live->ndim, live->shape, here, sizeof here),
                         fsdp_shape_text(from->ndim, from->shape, there, sizeof there));
    FSDP_TRY(check_dtype(match, live, from, err));
    FSDP_TRY(check_layout(match, live, from, err));
    int rank = match->scope->root->world->rank;
    if (!match->is_description && !from->data && fsdp_entry_local_bytes(live, rank) > 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no memory on rank %d", from->name, rank);
    return FSDP_OK;
}

static fsdp_status check_tensors(const fsdp_state_match *match, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(match->live); i++)
        if (match->source[i] >= 0)
            FSDP_TRY(check_tensor(match, fsdp_sd_at(match->live, i), source_of(match, match->sd, i),
                                  err));
    return FSDP_OK;
}

/* --- copying ---------------------------------------------------------------------------------- */

static void copy_tensor(const fsdp_entry *live, const fsdp_entry *from, int rank)
{
    size_t size = (size_t)fsdp_entry_local_bytes(live, rank);
    if (live->ndim == 0) {
        (void)fsdp_state_set_number(live, from);
    } else if (size > 0 && live->data != from->data && is_whole(from, rank)) {
        const fsdp_box whole = fsdp_box_whole(from->ndim, from->shape);
        const fsdp_state_range all = {whole, 0, fsdp_box_count(&whole), from->data};
        fsdp_state_copy_into(&all, live, rank);
    } else if (size > 0 && live->data != from->data) {
        memcpy(live->data, from->data, size);
    }
}

static void copy_all(const fsdp_state_match *match)
{
    int rank = match->scope->root->world->rank;
    for (size_t i = 0; i < fsdp_sd_count(match->live); i++)
        if (match->source[i] >= 0)
            copy_tensor(fsdp_sd_at(match->live, i), source_of(match, match->sd, i), rank);
}

/* The live entry of a parameter if the dict sets it; else -1. */
static fsdp_status find_set(const fsdp_state_match *match, const fsdp_state_param *param,
                            const fsdp_state_naming *naming, int64_t *at_out, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_status status = fsdp_state_spell(&text, naming, param->names[0], err);
    int64_t at = status == FSDP_OK ? fsdp_sd_find(match->live, text.data, text.size) : -1;
    *at_out = at >= 0 && match->source[at] >= 0 ? at : -1;
    fsdp_text_release(&text);
    return status;
}

static fsdp_status find_state_set(const fsdp_state_match *match, const fsdp_state_param *param,
                                  const char *what, int64_t *at_out, fsdp_error *err)
{
    const fsdp_state_naming naming = {match->scope->opts.optim_prefix, "state.", what};
    return find_set(match, param, &naming, at_out, err);
}

/* Writes to live memory, a device's without the host's view of it, too. */
static fsdp_status write_live(const fsdp_state_scope *scope, void *to, const void *from,
                              size_t size, fsdp_error *err)
{
    fsdp_stream *compute = scope->root->context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_device_ops *ops = compute->device->ops;
    if (!scope->is_unviewed)
        to = fsdp_root_view(scope->root, to);
    if (!scope->is_unviewed || !fsdp_host_view_find(&scope->root->view, to)) {
        memcpy(to, from, size);
        return FSDP_OK;
    }
    ops->kernels->copy(compute, to, from, size);
    return ops->sync(ops->record(compute), err);
}

/* Casts to the stored dtype: the live entry of such a parameter is a copy. */
static fsdp_status take_cast(const fsdp_state_scope *scope, const fsdp_param *param,
                             const fsdp_entry *live, fsdp_error *err)
{
    size_t count = (size_t)fsdp_shape_count(param->ndim, param->shape);
    size_t size = count * fsdp_dtype_size(param->flat->dtype);
    void *cast = fsdp_alloc_pages(size);
    if (!cast)
        return fsdp_fail_memory(err, param->name);
    fsdp_cast(cast, param->flat->dtype, live->data, param->dtype, count);
    fsdp_status status = write_live(scope, param->flat->shard, cast, size, err);
    fsdp_free(cast);
    return status;
}

static fsdp_status refresh_masters(const fsdp_state_scope *scope, const fsdp_param *param,
                                   fsdp_error *err)
{
    if (scope->is_unviewed)
        return fsdp_root_refresh_unviewed(scope->root, param, err);
    fsdp_root_refresh_masters(scope->root, param);
    return FSDP_OK;
}

static fsdp_status refresh_master(const fsdp_state_scope *scope, fsdp_optim_state *state,
                                  fsdp_error *err)
{
    if (scope->is_unviewed)
        return fsdp_optim_refresh_unviewed(state, err);
    fsdp_optim_refresh_master(state);
    return FSDP_OK;
}

/* Notes that a parameter which was set has values; a master that was not set is set from it. refreshed: the
 * state whose master was set last, which is that of all parameters in a flat one. */
static fsdp_status finish_param(const fsdp_state_match *match, const fsdp_state_param *param,
                                const fsdp_optim_state **refreshed, fsdp_error *err)
{
    const fsdp_state_naming naming = {match->scope->opts.model_prefix, "", NULL};
    fsdp_param *of = param->param;
    int64_t came, master;
    FSDP_TRY(find_set(match, param, &naming, &came, err));
    if (came >= 0 && fsdp_state_is_cast(of))
        FSDP_TRY(take_cast(match->scope, of, fsdp_sd_at(match->live, (size_t)came), err));
    if (came >= 0)
        of->lacks_value = false;
    if (came >= 0 && !param->state)
        FSDP_TRY(refresh_masters(match->scope, of->flat ? of->flat : of, err));
    if (!param->state || !param->state->master)
        return FSDP_OK;
    FSDP_TRY(find_state_set(match, param, "master", &master, err));
    if (came < 0 || master >= 0 || param->state == *refreshed)
        return FSDP_OK;
    *refreshed = param->state;
    return refresh_master(match->scope, param->state, err);
}

/* A momentum without a count of steps, as in PyTorch's SGD, means that there was a step. */
static fsdp_status count_step(const fsdp_state_match *match, const fsdp_state_param *param,
                              fsdp_error *err)
{
    int64_t step, momentum;
    FSDP_TRY(find_state_set(match, param, "step", &step, err));
    FSDP_TRY(find_state_set(match, param, "momentum_buffer", &momentum, err));
    if (momentum >= 0 && step < 0 && param->state->step < 1)
        param->state->step = 1;
    return FSDP_OK;
}

static fsdp_status finish_state(const fsdp_state_match *match, fsdp_error *err)
{
    const fsdp_optim_state *refreshed = NULL;
    for (size_t i = 0; i < match->scope->count; i++) {
        const fsdp_state_param *param = &match->scope->params[i];
        if (param->count == 0)
            continue;
        FSDP_TRY(finish_param(match, param, &refreshed, err));
        if (param->state)
            FSDP_TRY(count_step(match, param, err));
    }
    return FSDP_OK;
}

/* --- steps of flat parameters ------------------------------------------------------------------ */

/* The first step in the dict for the parameters of a flat one. */
typedef struct first_step {
    const char *name;
    double step;
} first_step;

static bool find_number(const fsdp_state_match *match, const fsdp_sd *numbers, int64_t live,
                        double *number_out)
{
    const fsdp_entry *from = fsdp_sd_at(match->sd, (size_t)match->source[live]);
    int64_t at = fsdp_sd_find(numbers, from->name, from->name_size);
    return fsdp_state_number(at < 0 ? from : fsdp_sd_at(numbers, (size_t)at), number_out);
}

static fsdp_status check_step(const fsdp_state_match *match, const fsdp_sd *numbers,
                              const fsdp_state_param *param, first_step *first, fsdp_error *err)
{
    const char *name = param->param->name;
    int64_t at;
    double step;
    FSDP_TRY(find_state_set(match, param, "step", &at, err));
    if (at < 0 || !find_number(match, numbers, at, &step))
        return FSDP_OK;
    if (first->name && step != first->step)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "'%s' was stepped %g times and '%s' %g times: they lie in one flat parameter",
            first->name, first->step, name, step);
    *first = (first_step){name, step};
    return FSDP_OK;
}

static fsdp_status check_optim_steps(const fsdp_state_match *match, const fsdp_sd *numbers,
                                     const fsdp_optim *optim, fsdp_error *err)
{
    first_step *first = fsdp_alloc(optim->count, sizeof *first);
    fsdp_status status = first ? FSDP_OK : fsdp_fail_memory(err, "the steps of an optimizer");
    for (size_t i = 0; i < match->scope->count && status == FSDP_OK; i++) {
        const fsdp_state_param *param = &match->scope->params[i];
        if (param->optim == optim && param->count > 0)
            status = check_step(match, numbers, param, &first[param->state - optim->states], err);
    }
    fsdp_free(first);
    return status;
}

/* Checks that the steps of parameters in one flat parameter, which has one step, are equal. numbers: a dict
 * with loaded numbers under the names of match->sd; other names take theirs from match->sd. */
static fsdp_status check_steps(const fsdp_state_match *match, const fsdp_sd *numbers,
                               fsdp_error *err)
{
    const fsdp_state_scope *scope = match->scope;
    bool is_flat = scope->root->declared != scope->root->model;
    for (size_t i = 0; is_flat && i < scope->optim_count; i++)
        FSDP_TRY(check_optim_steps(match, numbers, scope->optims[i], err));
    return FSDP_OK;
}

/* --- setting ---------------------------------------------------------------------------------- */

/* A dict of fsdp_root_get_state may have the host's view as its memory, and new values from a load there: the
 * device gets them before the view is loaded over them. */
static void store_viewed(fsdp_root *root, const fsdp_sd *sd)
{
    fsdp_stream *compute = root->context->streams[FSDP_STREAM_COMPUTE];
    if (compute->device->ops->is_host)
        return;
    fsdp_root_wait_copied(root, compute);
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_TENSOR && entry->data)
            fsdp_host_view_store_part(&root->view, compute, entry->data,
                                      (size_t)fsdp_entry_local_bytes(entry, root->world->rank));
    }
}

static fsdp_status prepare(fsdp_state_scope *scope, fsdp_root *root, const fsdp_state_opts *opts,
                           const fsdp_sd *sd, fsdp_sd **live_out, fsdp_error *err)
{
    scope->root = root;
    if (!sd && !(opts && opts->broadcast_from_rank0 && root->world->rank != 0))
        return fsdp_fail(err, FSDP_ERR_USAGE, "there is no state dict to set: 'sd' is NULL");
    FSDP_TRY(fsdp_state_settle(root, true, err));
    FSDP_TRY(refuse_gradients(root, err));
    store_viewed(root, sd);
    FSDP_TRY(fsdp_root_load_view(root, err));
    FSDP_TRY(fsdp_state_scope_init(scope, root, opts, err));
    return fsdp_state_build(scope, false, live_out, err);
}

/* Matches and checks all names and tensors, without changing anything. Release the match also on failure. */
static fsdp_status match_all(fsdp_state_match *match, fsdp_error *err)
{
    match->source = fsdp_alloc(fsdp_sd_count(match->live), sizeof *match->source);
    if (!match->source)
        return fsdp_fail_memory(err, "setting the state of a root");
    FSDP_TRY(match_names(match, err));
    FSDP_TRY(check_names(match, err));
    FSDP_TRY(fsdp_state_check_continues(match, err));
    FSDP_TRY(check_tensors(match, err));
    return check_steps(match, match->sd, err);
}

/* Moves the missing and unexpected names to the report, which may be NULL. */
static void match_release(fsdp_state_match *match, fsdp_load_report *report)
{
    if (report) {
        fsdp_names_move(&match->missing, &report->missing, &report->missing_count);
        fsdp_names_move(&match->unexpected, &report->unexpected, &report->unexpected_count);
    }
    fsdp_names_release(&match->missing);
    fsdp_names_release(&match->unexpected);
    fsdp_state_groups_free(match->groups);
    fsdp_free(match->source);
    *match = (fsdp_state_match){0};
}

/* After the tensors: sets hyper-parameters and masters. */
static fsdp_status finish(const fsdp_state_match *match, fsdp_error *err)
{
    if (match->groups)
        fsdp_state_apply_groups(match->groups);
    FSDP_TRY(finish_state(match, err));
    return match->scope->is_unviewed ? FSDP_OK : fsdp_root_store_view(match->scope->root, err);
}

static fsdp_status set_local(const fsdp_state_scope *scope, const fsdp_sd *live, const fsdp_sd *sd,
                             fsdp_load_report *report, fsdp_error *err)
{
    fsdp_state_match match = {.scope = scope, .live = live, .sd = sd};
    fsdp_status status = match_all(&match, err);
    if (status == FSDP_OK) {
        copy_all(&match);
        status = finish(&match, err);
    }
    match_release(&match, report);
    return status;
}

static fsdp_status set_from_rank0(const fsdp_state_scope *scope, const fsdp_sd *live,
                                  const fsdp_sd *sd, fsdp_load_report *report, fsdp_status mine,
                                  fsdp_error *err)
{
    fsdp_root *root = scope->root;
    fsdp_state_message message = {0};
    FSDP_TRY(fsdp_state_agree(scope, live, "sets state from rank 0", false, mine, err));
    fsdp_status status = state_send_description(root, sd, &message, err);
    fsdp_state_match match = {
        .scope = scope, .live = live, .sd = message.sd, .is_description = true};
    if (status == FSDP_OK)
        status = fsdp_ctl_agree(fsdp_world_ctl(root->world), match_all(&match, err), err);
    if (status == FSDP_OK)
        status = state_broadcast(&match, sd, err);
    if (status == FSDP_OK)
        status = finish(&match, err);
    match_release(&match, report);
    state_message_release(&message);
    return status;
}

fsdp_status fsdp_root_set_state(fsdp_root *root, const fsdp_sd *sd, const fsdp_state_opts *opts,
                                fsdp_load_report *report, fsdp_error *err)
{
    fsdp_state_scope scope = {0};
    fsdp_error local = {0};
    fsdp_sd *live = NULL;
    err = err ? err : &local;
    if (report)
        *report = (fsdp_load_report){0};
    FSDP_NEED(err, root);
    fsdp_status status = prepare(&scope, root, opts, sd, &live, err);
    if (opts && opts->broadcast_from_rank0) {
        fsdp_ctl *ctl = fsdp_world_ctl(root->world);
        const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_root_set_state");
        status = set_from_rank0(&scope, live, sd, report, status, err);
        fsdp_ctl_end_public(ctl, outer);
    } else if (status == FSDP_OK)
        status = set_local(&scope, live, sd, report, err);
    fsdp_sd_free(live);
    fsdp_state_scope_release(&scope);
    return status;
}

/* === loading ================================================================================== */

/* Matches the description of a checkpoint like any other dict, and reads it into the root's own memory
 * (statedict/save/load_internal.h). */

/* Adds to `wanted` the extra entries that are stored; tensors get memory if they lack it. After the load,
 * take_extra copies values to extra. Aliases are skipped, because their target is loaded. */
static fsdp_status want_extra(fsdp_sd *extra, const fsdp_sd *stored, int rank, fsdp_sd *wanted,
                              fsdp_error *err)
{
    if (!extra)
        return FSDP_OK;
    FSDP_TRY(fsdp_sd_allocate(extra, rank, err));
    for (size_t i = 0; i < fsdp_sd_count(extra); i++) {
        const fsdp_entry *entry = fsdp_sd_at(extra, i);
        bool is_stored = fsdp_sd_find(stored, entry->name, entry->name_size) >= 0;
        if (entry->kind != FSDP_ENTRY_ALIAS && is_stored)
            FSDP_TRY(fsdp_state_add_extra(extra, entry, wanted, err));
    }
    return FSDP_OK;
}

/* Copies values only: tensors were loaded into their memory. */
static fsdp_status take_extra(fsdp_sd *extra, const fsdp_sd *loaded, fsdp_error *err)
{
    for (size_t i = 0; extra && i < fsdp_sd_count(extra); i++) {
        const fsdp_entry *entry = fsdp_sd_at(extra, i);
        int64_t at = fsdp_sd_find(loaded, entry->name, entry->name_size);
        fsdp_value value = {0};
        if (entry->kind != FSDP_ENTRY_VALUE || at < 0)
            continue;
        FSDP_TRY(fsdp_value_copy(&fsdp_sd_at(loaded, (size_t)at)->value, &value, err));
        fsdp_sd_set_value(extra, i, &value);
    }
    return FSDP_OK;
}

/* A load: the live dict, matched with a checkpoint's description, and loaded under the stored names. */
typedef struct load_job {
    fsdp_root_load_opts opts;
    fsdp_load_copies copies;
    fsdp_state_scope scope;
    fsdp_sd *live, *wanted;
    fsdp_state_match match; /* of the last checkpoint that was tried */
} load_job;

/* Numbers are loaded into separate memory and converted later, because their stored type may differ. */
static fsdp_status want_entry(load_job *job, size_t i, fsdp_error *err)
{
    const fsdp_entry *live = fsdp_sd_at(job->live, i);
    const fsdp_entry *from = source_of(&job->match, job->match.sd, i);
    const fsdp_entry *named = fsdp_sd_at(job->match.sd, (size_t)job->match.source[i]);
    bool is_number = live->ndim == 0;
    if (from->kind == FSDP_ENTRY_VALUE)
        return FSDP_OK;
    return fsdp_sd_add_tensor(job->wanted, named->name, named->name_size,
                              &(fsdp_tensor){is_number ? from->dtype : live->dtype, live->ndim,
                                             live->shape, live->layout,
                                             is_number ? NULL : live->data},
                              err);
}

static fsdp_status want_all(load_job *job, fsdp_error *err)
{
    int rank = job->scope.root->world->rank;
    FSDP_TRY(fsdp_sd_create(&job->wanted, err));
    for (size_t i = 0; i < fsdp_sd_count(job->live); i++)
        if (job->match.source[i] >= 0)
            FSDP_TRY(want_entry(job, i, err));
    FSDP_TRY(want_extra(job->opts.extra, job->match.sd, rank, job->wanted, err));
    return fsdp_sd_allocate(job->wanted, rank, err);
}

static void forget_checkpoint(load_job *job)
{
    match_release(&job->match, NULL);
    fsdp_sd_free(job->wanted);
    job->wanted = NULL;
}

static fsdp_status make_wanted(void *context, const fsdp_sd *stored, fsdp_sd **sd_out,
                               fsdp_error *err)
{
    load_job *job = context;
    forget_checkpoint(job);
    job->match = (fsdp_state_match){.scope = &job->scope,
                                    .live = job->live,
                                    .sd = stored,
                                    .is_description = true,
                                    .casts = job->opts.load.cast,
                                    .extra = job->opts.extra};
    FSDP_TRY(match_all(&job->match, err));
    FSDP_TRY(want_all(job, err));
    *sd_out = job->wanted;
    return FSDP_OK;
}

enum { NUMBER_BYTES = 16 }; /* of the largest 0-d tensor */

static fsdp_status take_number(const load_job *job, const fsdp_entry *live, const fsdp_entry *from,
                               fsdp_error *err)
{
    _Alignas(NUMBER_BYTES) unsigned char number[NUMBER_BYTES];
    fsdp_entry to = *live;
    to.data = number;
    if (!fsdp_state_set_number(&to, from))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is no number", from->name);
    return write_live(&job->scope, live->data, number, fsdp_dtype_size(live->dtype), err);
}

static fsdp_status take_numbers(const load_job *job, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(job->live); i++) {
        const fsdp_entry *live = fsdp_sd_at(job->live, i);
        if (job->match.source[i] < 0 || live->ndim > 0)
            continue;
        const fsdp_entry *from = fsdp_sd_at(job->match.sd, (size_t)job->match.source[i]);
        int64_t at = fsdp_sd_find(job->wanted, from->name, from->name_size);
        FSDP_TRY(take_number(job, live, at < 0 ? from : fsdp_sd_at(job->wanted, (size_t)at), err));
    }
    return FSDP_OK;
}

static fsdp_status take(void *context, const fsdp_checkpoint_info *info, fsdp_error *err)
{
    load_job *job = context;
    FSDP_TRY(check_steps(&job->match, job->wanted, err));
    FSDP_TRY(take_numbers(job, err));
    FSDP_TRY(take_extra(job->opts.extra, job->wanted, err));
    if (job->opts.step)
        *job->opts.step = info->step;
    return finish(&job->match, err);
}

static fsdp_status check_load_opts(const fsdp_root_load_opts *opts, fsdp_error *err)
{
    if (opts->load.include || opts->load.exclude)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "include and exclude do not select state of a root: state.submodules and "
                         "state.part do");
    return fsdp_state_check_stored(&opts->state, err);
}

static fsdp_status prepare_load(load_job *job, fsdp_root *root, fsdp_error *err)
{
    job->opts.state.partial |= job->opts.load.partial;
    FSDP_TRY(check_load_opts(&job->opts, err));
    FSDP_TRY(fsdp_state_settle(root, true, err));
    FSDP_TRY(refuse_gradients(root, err));
    FSDP_TRY(fsdp_load_copies_begin(&job->copies, root, err));
    job->scope.is_unviewed = true;
    FSDP_TRY(fsdp_state_scope_init(&job->scope, root, &job->opts.state, err));
    return fsdp_state_build(&job->scope, false, &job->live, err);
}

/* Merges two reports: names come from the match, path and bytes from the load. */
static void report_load(load_job *job, fsdp_load_report *loaded)
{
    fsdp_load_report *report = job->opts.load.report;
    if (!report)
        return;
    match_release(&job->match, report);
    report->path = loaded->path;
    report->bytes_read = loaded->bytes_read;
    report->bytes_needed = loaded->bytes_needed;
    loaded->path = NULL;
}

static fsdp_status load(load_job *job, fsdp_ctl *ctl, const char *path, fsdp_load_report *loaded,
                        fsdp_error *err)
{
    const fsdp_read_device *device = job->copies.device.context ? &job->copies.device : NULL;
    const fsdp_load_hooks hooks = {
        .context = job, .device = device, .make_sd = make_wanted, .take = take};
    fsdp_load_opts opts = job->opts.load;
    opts.partial = true; /* match_all has checked the names */
    opts.report = loaded;
    return fsdp_ctl_agree(ctl, fsdp_load_hooked(&hooks, ctl, path, &opts, err), err);
}

fsdp_status fsdp_root_load(fsdp_root *root, const char *path, const fsdp_root_load_opts *opts,
                           fsdp_error *err)
{
    FSDP_NEED(err, root);
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    fsdp_load_report loaded = {0};
    load_job job = {0};
    if (opts)
        job.opts = *opts;
    if (job.opts.load.report)
        *job.opts.load.report = (fsdp_load_report){0};
    fsdp_world_trace(root->world, "load", -1);
    fsdp_status mine = FSDP_GIVEN(err, path);
    if (mine == FSDP_OK)
        mine = prepare_load(&job, root, err);
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_root_load");
    fsdp_status status = fsdp_ctl_agree(ctl, mine, err);
    if (status == FSDP_OK)
        status = load(&job, ctl, path, &loaded, err);
    fsdp_ctl_end_public(ctl, outer);
    report_load(&job, &loaded);
    fsdp_load_report_release(&loaded);
    forget_checkpoint(&job);
    fsdp_sd_free(job.live);
    fsdp_state_scope_release(&job.scope);
    fsdp_load_copies_release(&job.copies);
    return status;
}
