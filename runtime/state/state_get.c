/*
 * Gets a state dict: a dict of this rank's live memory, without copies or communication; then, if the
 * options say so, whole or copied. A save writes the live dict. The inverse is state_set.c.
 */
#include "runtime/state/state_internal.h"
#include "base/core/given.h"
#include "base/data/box_internal.h"
#include "base/text.h"
#include "runtime/staging/snapshot.h"
#include "runtime/step/step.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/save/save_call.h"
#include "statedict/sd/layout_internal.h"

#include <string.h>

/* === whole values ============================================================================= */

/*
 * Makes the tensors of a live dict whole: on every rank, one tensor after the other through one bounded
 * buffer; or on rank 0 only, streamed over the control plane. All ranks first compare their requests, so
 * that a rank with another dict causes an error that names it, not a timeout. The inverse is
 * state_set.c.
 */

/* --- every rank ------------------------------------------------------------------------------- */

/* Makes a dict with the live one's names and memory for whole tensors. */
static fsdp_status make_whole(const fsdp_root *root, const fsdp_sd *live, fsdp_sd *full,
                              fsdp_error *err)
{
    const fsdp_mesh *mesh = root->unit->opts.mesh;
    for (size_t i = 0; i < fsdp_sd_count(live); i++) {
        const fsdp_entry *entry = fsdp_sd_at(live, i);
        const fsdp_layout whole = {.kind = FSDP_LAYOUT_MESH,
                                   .mesh = entry->layout.mesh ? entry->layout.mesh : mesh};
        FSDP_TRY(fsdp_state_add_entry(live, entry, &whole, NULL, full, err));
        if (entry->path)
            FSDP_TRY(fsdp_sd_set_path(full, i, entry->path, entry->path_count, err));
    }
    return fsdp_sd_allocate(full, root->world->rank, err);
}

static bool is_whole_everywhere(const fsdp_entry *entry, int rank)
{
    return entry->layout.kind == FSDP_LAYOUT_MESH &&
           fsdp_layout_copies(&entry->layout, rank, 0) == fsdp_mesh_size(entry->layout.mesh);
}

/* Moves the boxes of a tensor of which `owner` holds the first copy. */
static fsdp_status gather_part(fsdp_state_mover *mover, const fsdp_entry *live,
                               const fsdp_entry *full, int owner, fsdp_error *err)
{
    size_t n = fsdp_layout_box_count(&live->layout, live->ndim, live->shape, owner);
    const char *data = live->data;
    for (size_t i = 0; i < n; i++) {
        fsdp_box box;
        fsdp_layout_box_at(&live->layout, live->ndim, live->shape, owner, i, &box);
        if (fsdp_layout_copy(&live->layout, owner, i) == 0)
            FSDP_TRY(fsdp_state_move(mover, owner, &box, data, full, err));
        if (owner == mover->root->world->rank)
            data += (size_t)fsdp_box_count(&box) * fsdp_dtype_size(live->dtype);
    }
    return FSDP_OK;
}

/* Moves all tensors of one owner before the next owner's, so that small tensors share a broadcast. */
static fsdp_status gather_from(fsdp_state_mover *mover, const fsdp_sd *live, const fsdp_sd *full,
                               int owner, fsdp_error *err)
{
    int rank = mover->root->world->rank;
    for (size_t i = 0; i < fsdp_sd_count(live); i++) {
        const fsdp_entry *entry = fsdp_sd_at(live, i);
        if (entry->kind == FSDP_ENTRY_TENSOR && !is_whole_everywhere(entry, rank))
            FSDP_TRY(gather_part(mover, entry, fsdp_sd_at(full, i), owner, err));
    }
    return FSDP_OK;
}

static fsdp_status gather_tensors(fsdp_state_mover *mover, const fsdp_sd *live, const fsdp_sd *full,
                                  fsdp_error *err)
{
    const fsdp_world *world = mover->root->world;
    for (size_t i = 0; i < fsdp_sd_count(live); i++) {
        const fsdp_entry *entry = fsdp_sd_at(live, i);
        if (entry->kind == FSDP_ENTRY_TENSOR && entry->data &&
            is_whole_everywhere(entry, world->rank))
            memcpy(fsdp_sd_at(full, i)->data, entry->data, (size_t)fsdp_entry_bytes(entry));
    }
    for (int owner = 0; owner < world->size; owner++)
        FSDP_TRY(gather_from(mover, live, full, owner, err));
    return fsdp_state_move_end(mover, err);
}

static fsdp_status gather_everywhere(const fsdp_state_scope *scope, const fsdp_sd *live,
                                     fsdp_sd *full, fsdp_error *err)
{
    fsdp_root *root = scope->root;
    fsdp_state_mover mover = {0};
    fsdp_status status = make_whole(root, live, full, err);
    status = fsdp_state_mover_init(&mover, root, fsdp_sd_tensor_bytes(live), status, err);
    if (status == FSDP_OK)
        status = fsdp_root_done(root, "fsdp_root_get_state",
                                gather_tensors(&mover, live, full, err), err);
    fsdp_state_mover_release(&mover);
    return status;
}

/* --- both ways -------------------------------------------------------------------------------- */

/* Collective. A local failure (`mine`) fails it on all ranks. */
static fsdp_status state_gather(const fsdp_state_scope *scope, const fsdp_sd *live,
                                fsdp_status mine, fsdp_sd **full_out, fsdp_error *err)
{
    bool on_rank0 = scope->opts.cpu_offload;
    fsdp_sd *full = NULL;
    const char *call = on_rank0 ? "gets whole state on rank 0" : "gets whole state";
    FSDP_TRY(fsdp_state_agree(scope, live, call, true, mine, err));
    if (on_rank0) {
        /* rank 0 gets the whole dict; the other ranks send their parts and get an empty one */
        fsdp_ctl *ctl = fsdp_world_ctl(scope->root->world);
        FSDP_TRY(fsdp_sd_gather_full(live, ctl, full_out, err));
        return *full_out ? FSDP_OK : fsdp_sd_create(full_out, err);
    }
    fsdp_status status = fsdp_sd_create(&full, err);
    status = fsdp_ctl_agree(fsdp_world_ctl(scope->root->world), status, err);
    if (status == FSDP_OK)
        status = gather_everywhere(scope, live, full, err);
    if (status == FSDP_OK)
        *full_out = full;
    else
        fsdp_sd_free(full);
    return status;
}

/* === parameters inside flat ones ============================================================== */

/*
 * Declared parameters inside flat ones (wrap.h) as tensors of a state dict: with their own names and shapes,
 * in the memory of the flat tensor. A flat tensor is the flat parameter or a tensor of its optimizer's
 * state.
 */

/* A tensor of a parameter that lies in a flat one. */
typedef struct fsdp_state_view {
    const fsdp_state_scope *scope;
    const fsdp_state_param *param;
    const fsdp_mesh *mesh; /* for tensors that are whole on every rank */
    fsdp_state_naming naming;
    bool is_optim; /* a tensor of optimizer state, which some parameters lack */
    fsdp_dtype dtype;
    void *data; /* this rank's part of the flat tensor; NULL: memory comes later */
} fsdp_state_view;

/* --- whole on every rank ---------------------------------------------------------------------- */

static fsdp_status add_whole(const fsdp_state_view *view, const fsdp_text *name, fsdp_sd *sd,
                             fsdp_error *err)
{
    const fsdp_param *param = view->param->param;
    const fsdp_layout whole = {.kind = FSDP_LAYOUT_MESH, .mesh = view->mesh};
    size_t offset = (size_t)param->flat_at * fsdp_dtype_size(view->dtype);
    return fsdp_sd_add_tensor(sd, name->data, name->size,
                              &(fsdp_tensor){view->dtype, param->ndim, param->shape, whole,
                                             view->data ? (char *)view->data + offset : NULL},
                              err);
}

/* --- one flat buffer -------------------------------------------------------------------------- */

static bool is_in(const fsdp_state_view *view, const fsdp_state_param *param)
{
    return param->param->flat == view->param->param->flat && fsdp_state_has(view->scope, param) &&
           (!view->is_optim || param->state);
}

static fsdp_status list_parts(const fsdp_state_view *view, fsdp_flat_part *parts, fsdp_arena *names,
                              fsdp_text *name, fsdp_error *err)
{
    for (size_t i = 0, n = 0; i < view->scope->count; i++) {
        const fsdp_state_param *param = &view->scope->params[i];
        if (!is_in(view, param))
            continue;
        FSDP_TRY(fsdp_state_spell(name, &view->naming, param->names[0], err));
        const char *copy = fsdp_arena_strndup(names, name->data, name->size);
        if (!copy)
            return fsdp_fail_memory(err, param->names[0]);
        parts[n++] = (fsdp_flat_part){.name = copy,
                                      .name_size = name->size,
                                      .ndim = param->param->ndim,
                                      .shape = param->param->shape,
                                      .offset = param->param->flat_at};
    }
    return FSDP_OK;
}

/* Adds all parameters of the flat one as a flat buffer, whose layouts take a few bytes each. */
static fsdp_status add_buffer(const fsdp_state_view *view, fsdp_text *name, fsdp_sd *sd,
                              fsdp_error *err)
{
    const fsdp_param *flat = view->param->param->flat;
    size_t n = 0;
    fsdp_arena names = {0};
    for (size_t i = 0; i < view->scope->count; i++)
        n += is_in(view, &view->scope->params[i]);
    fsdp_flat_part *parts = fsdp_alloc(n, sizeof *parts);
    fsdp_status status =
        parts ? list_parts(view, parts, &names, name, err) : fsdp_fail_memory(err, flat->name);
    if (status == FSDP_OK)
        status = fsdp_state_spell(name, &view->naming, flat->name, err);
    if (status == FSDP_OK)
        status =
            fsdp_sd_add_flat(sd, name->data, name->size,
                             &(fsdp_flat_buffer){.dtype = view->dtype,
                                                 .mesh = flat->group->roles.mesh,
                                                 .rank = flat->model->world->rank,
                                                 .count = flat->padded * flat->group->shard_size,
                                                 .parts = parts,
                                                 .part_count = n,
                                                 .data = view->data},
                             err);
    fsdp_arena_release(&names);
    fsdp_free(parts);
    return status;
}

/* --- replicas --------------------------------------------------------------------------------- */

/* The boxes of a parameter on every rank of the mesh; a flat layout cannot describe replicas. */
typedef struct box_list {
    fsdp_rank_box *items;
    size_t count, room;
} box_list;

static fsdp_status list_boxes(box_list *list, const fsdp_param *param, int rank, fsdp_error *err)
{
    const fsdp_group *group = param->flat->group;
    const fsdp_box whole = fsdp_box_whole(param->ndim, param->shape);
    int64_t coord[FSDP_MAX_MESH_DIMS], begin, len;
    fsdp_box pieces[FSDP_BOX_PIECES];
    if (!fsdp_mesh_coord(group->roles.mesh, rank, coord))
        return FSDP_OK;
    fsdp_chunk(param->flat->shape[0], group->shard_size, coord[group->roles.shard_dim], &begin,
               &len);
    int64_t at = param->flat_at, behind = at + fsdp_box_count(&whole), end = begin + len;
    int64_t lo = at > begin ? at : begin, hi = behind < end ? behind : end;
    int n = lo < hi ? fsdp_box_cut(&whole, lo - at, hi - lo, pieces) : 0;
    if (!fsdp_grow(&list->items, &list->room, list->count + (size_t)n, sizeof *list->items))
        return fsdp_fail_memory(err, param->name);
    for (int i = 0; i < n; i++)
        list->items[list->count++] = (fsdp_rank_box){.rank = rank, .box = pieces[i]};
    return FSDP_OK;
}

static fsdp_status add_boxes(const fsdp_state_view *view, const fsdp_text *name, fsdp_sd *sd,
                             fsdp_error *err)
{
    const fsdp_param *param = view->param->param;
    const fsdp_flat_run run = fsdp_param_flat_run(param);
    size_t offset = (size_t)run.at * fsdp_dtype_size(view->dtype);
    bool has_data = view->data && run.count > 0;
    box_list list = {0};
    fsdp_status status = FSDP_OK;
    for (int rank = 0; rank < param->model->world->size && status == FSDP_OK; rank++)
        status = list_boxes(&list, param, rank, err);
    const fsdp_layout layout = {
        .kind = FSDP_LAYOUT_BOXES, .boxes = list.items, .box_count = list.count};
    if (status == FSDP_OK)
        status = fsdp_sd_add_tensor(sd, name->data, name->size,
                                    &(fsdp_tensor){view->dtype, param->ndim, param->shape, layout,
                                                   has_data ? (char *)view->data + offset : NULL},
                                    err);
    fsdp_free(list.items);
    return status;
}

/* --- all views -------------------------------------------------------------------------------- */

/* Adds the view's tensor, or all tensors of its flat parameter if they are one buffer. name: scratch text. */
static fsdp_status state_add_view(const fsdp_state_view *view, fsdp_text *name, fsdp_sd *sd,
                                  fsdp_error *err)
{
    const fsdp_group *group = view->param->param->flat->group;
    FSDP_TRY(fsdp_state_spell(name, &view->naming, view->param->names[0], err));
    if (!group || group->shard_size == 1)
        return add_whole(view, name, sd, err);
    if (group->replicate_size > 1)
        return add_boxes(view, name, sd, err);
    if (fsdp_sd_find(sd, name->data, name->size) >= 0)
        return FSDP_OK; /* added with the first parameter of the flat one */
    return add_buffer(view, name, sd, err);
}

/* === getting ================================================================================== */

/* --- names and tensors ------------------------------------------------------------------------ */

typedef struct state_build {
    const fsdp_state_scope *scope;
    fsdp_sd *sd;
    bool copies;   /* no tensor has memory yet */
    bool has_cast; /* some tensors are casts of stored ones, and must be filled */
    fsdp_text name;
} state_build;

bool fsdp_state_is_cast(const fsdp_param *param)
{
    return param->flat && !param->flat->group && param->flat->dtype != param->dtype;
}

/* Buffers and ignored parameters are whole on every rank. */
static fsdp_layout layout_of(const fsdp_state_scope *scope, const fsdp_param *param)
{
    if (param->mesh)
        return param->layout;
    return (fsdp_layout){.kind = FSDP_LAYOUT_MESH, .mesh = scope->root->unit->opts.mesh};
}

/* tensor: the parameter's, or that of the flat one that it lies in. Sets `what` of the naming. */
static fsdp_status add_tensor(state_build *build, const fsdp_state_param *param,
                              const fsdp_state_naming *naming, const fsdp_optim_tensor *tensor,
                              fsdp_error *err)
{
    const fsdp_state_scope *scope = build->scope;
    void *data = build->copies        ? NULL
                 : scope->is_unviewed ? tensor->data
                                      : fsdp_root_view(scope->root, tensor->data);
    if (param->param->flat && tensor->ndim > 0) {
        const fsdp_state_view view = {.scope = scope,
                                      .param = param,
                                      .mesh = scope->root->unit->opts.mesh,
                                      .naming = *naming,
                                      .is_optim = naming->what != NULL,
                                      .dtype = tensor->dtype,
                                      .data = data};
        return state_add_view(&view, &build->name, build->sd, err);
    }
    int rank = scope->root->world->rank;
    bool has_part = fsdp_layout_box_count(&tensor->layout, tensor->ndim, tensor->shape, rank) > 0;
    FSDP_TRY(fsdp_state_spell(&build->name, naming, param->names[0], err));
    return fsdp_sd_add_tensor(build->sd, build->name.data, build->name.size,
                              &(fsdp_tensor){tensor->dtype, tensor->ndim, tensor->shape,
                                             tensor->layout, has_part ? data : NULL},
                              err);
}

/* --- the model -------------------------------------------------------------------------------- */

static fsdp_status add_aliases(state_build *build, const fsdp_state_param *param,
                               const fsdp_state_naming *naming, fsdp_error *err)
{
    for (size_t i = 1; i < param->count; i++) {
        fsdp_text target = {0};
        fsdp_status status = fsdp_state_spell(&target, naming, param->names[0], err);
        if (status == FSDP_OK)
            status = fsdp_state_spell(&build->name, naming, param->names[i], err);
        if (status == FSDP_OK)
            status = fsdp_sd_add_alias(build->sd, build->name.data, build->name.size, target.data,
                                       target.size, err);
        fsdp_text_release(&target);
        FSDP_TRY(status);
    }
    return FSDP_OK;
}

static fsdp_status add_param(state_build *build, const fsdp_state_param *param, fsdp_error *err)
{
    const fsdp_state_scope *scope = build->scope;
    const fsdp_state_naming naming = {.prefix = scope->opts.model_prefix, .more = ""};
    const fsdp_param *of = param->param;
    bool is_cast = fsdp_state_is_cast(of);
    const fsdp_optim_tensor tensor = {.dtype = of->dtype,
                                      .ndim = of->ndim,
                                      .shape = of->shape,
                                      .layout = layout_of(scope, of),
                                      .data = is_cast    ? NULL
                                              : of->flat ? of->flat->shard
                                                         : of->shard};
    build->has_cast |= is_cast;
    FSDP_TRY(add_tensor(build, param, &naming, &tensor, err));
    return add_aliases(build, param, &naming, err);
}

static fsdp_status add_model(state_build *build, bool buffers, fsdp_error *err)
{
    const fsdp_state_scope *scope = build->scope;
    for (size_t i = 0; i < scope->count; i++)
        if (scope->params[i].param->is_buffer == buffers &&
            fsdp_state_has(scope, &scope->params[i]))
            FSDP_TRY(add_param(build, &scope->params[i], err));
    return FSDP_OK;
}

/* Casts buffers that are stored in another dtype to their declared one. */
static fsdp_status fill_cast(state_build *build, fsdp_error *err)
{
    const fsdp_state_scope *scope = build->scope;
    const fsdp_state_naming naming = {.prefix = scope->opts.model_prefix, .more = ""};
    FSDP_TRY(fsdp_sd_allocate(build->sd, scope->root->world->rank, err));
    if (scope->is_unviewed)
        FSDP_TRY(fsdp_root_load_buffers(scope->root, err));
    for (size_t i = 0; i < scope->count; i++) {
        const fsdp_param *param = scope->params[i].param;
        if (!fsdp_state_has(scope, &scope->params[i]) || !fsdp_state_is_cast(param))
            continue;
        FSDP_TRY(fsdp_state_spell(&build->name, &naming, scope->params[i].names[0], err));
        int64_t at = fsdp_sd_find(build->sd, build->name.data, build->name.size);
        fsdp_cast(fsdp_sd_at(build->sd, (size_t)at)->data, param->dtype,
                  fsdp_root_view(scope->root, param->flat->shard), param->flat->dtype,
                  (size_t)fsdp_shape_count(param->ndim, param->shape));
    }
    return FSDP_OK;
}

/* --- optimizers ------------------------------------------------------------------------------- */

static fsdp_status add_state(state_build *build, const fsdp_state_param *param, fsdp_error *err)
{
    fsdp_optim_tensor tensors[FSDP_OPTIM_TENSORS];
    size_t n = fsdp_optim_state_tensors(param->optim, param->state, tensors);
    for (size_t i = 0; i < n; i++) {
        const fsdp_state_naming naming = {build->scope->opts.optim_prefix, "state.",
                                          tensors[i].name};
        FSDP_TRY(add_tensor(build, param, &naming, &tensors[i], err));
    }
    return FSDP_OK;
}

static fsdp_status add_optims(state_build *build, fsdp_error *err)
{
    const fsdp_state_scope *scope = build->scope;
    for (size_t i = 0; i < scope->count; i++)
        if (scope->params[i].state && fsdp_state_has(scope, &scope->params[i]))
            FSDP_TRY(add_state(build, &scope->params[i], err));
    return fsdp_state_put_groups(scope, build->sd, err);
}

/* --- the live dict ---------------------------------------------------------------------------- */

static fsdp_status add_all(state_build *build, fsdp_error *err)
{
    const fsdp_state_opts *opts = &build->scope->opts;
    if (opts->part != FSDP_STATE_OPTIM) {
        FSDP_TRY(add_model(build, false, err));
        FSDP_TRY(add_model(build, true, err));
    }
    if (build->scope->optim_count > 0 && opts->part != FSDP_STATE_MODEL)
        FSDP_TRY(add_optims(build, err));
    if (build->copies)
        return fsdp_sd_allocate(build->sd, build->scope->root->world->rank, err);
    return build->has_cast ? fill_cast(build, err) : FSDP_OK;
}

fsdp_status fsdp_state_build(const fsdp_state_scope *scope, bool copies, fsdp_sd **sd_out,
                             fsdp_error *err)
{
    state_build build = {.scope = scope, .copies = copies};
    *sd_out = NULL;
    FSDP_TRY(fsdp_sd_create(&build.sd, err));
    fsdp_status status = add_all(&build, err);
    fsdp_text_release(&build.name);
    if (status == FSDP_OK)
        *sd_out = build.sd;
    else
        fsdp_sd_free(build.sd);
    return status;
}

/* --- getting ---------------------------------------------------------------------------------- */

static fsdp_status reshard_all(fsdp_root *root, fsdp_error *err)
{
    fsdp_context_flush_gather(root->context);
    for (size_t i = 0; i < root->group_count; i++) {
        fsdp_group *group = root->groups[i];
        fsdp_group_cancel_gather(group);
        FSDP_TRY(fsdp_group_reshard(group, err));
    }
    return FSDP_OK;
}

fsdp_status fsdp_state_settle(fsdp_root *root, bool is_unviewed, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_ready(root, err));
    if (root->is_in_forward || root->is_in_backward)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the state of a root is got and set between steps");
    if (root->is_summoned)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "full parameters are summoned: call fsdp_wrap_summon_end before getting "
                         "or setting the state of a root");
    FSDP_TRY(reshard_all(root, err));
    FSDP_TRY(fsdp_context_sync(root->context, err));
    return is_unviewed ? FSDP_OK : fsdp_root_load_view(root, err);
}

/* Copies the live dict: equal entries, with this rank's parts in memory of the new dict. */
static fsdp_status get_copies(const fsdp_state_scope *scope, const fsdp_sd *live, fsdp_sd **sd_out,
                              fsdp_error *err)
{
    int rank = scope->root->world->rank;
    FSDP_TRY(fsdp_state_build(scope, true, sd_out, err));
    for (size_t i = 0; i < fsdp_sd_count(live); i++) {
        const fsdp_entry *entry = fsdp_sd_at(live, i);
        if (entry->kind == FSDP_ENTRY_TENSOR && entry->data)
            memcpy(fsdp_sd_at(*sd_out, i)->data, entry->data,
                   (size_t)fsdp_entry_local_bytes(entry, rank));
    }
    return FSDP_OK;
}

static bool has_model(const fsdp_state_scope *scope)
{
    for (size_t i = 0; i < scope->count; i++)
        if (scope->params[i].count > 0)
            return true;
    return false;
}

static fsdp_status get_live(fsdp_state_scope *scope, fsdp_root *root, const fsdp_state_opts *opts,
                            fsdp_sd **live_out, fsdp_error *err)
{
    scope->root = root;
    FSDP_TRY(fsdp_state_settle(root, scope->is_unviewed, err));
    FSDP_TRY(fsdp_state_scope_init(scope, root, opts, err));
    bool has_part = scope->opts.part != FSDP_STATE_OPTIM;
    if (scope->opts.broadcast_from_rank0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "broadcast_from_rank0 is for setting state");
    if (has_part && (scope->opts.full_state_dict || scope->opts.cpu_offload))
        FSDP_TRY(fsdp_root_check_values(root, NULL, "a copy of the state", err));
    if (has_part && !scope->opts.partial && !has_model(scope))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the state of the model was requested, and the model is empty");
    return fsdp_state_build(scope, false, live_out, err);
}

fsdp_status fsdp_state_get_unviewed(fsdp_root *root, const fsdp_state_opts *opts, fsdp_sd **sd_out,
                                    fsdp_error *err)
{
    fsdp_state_scope scope = {.is_unviewed = true};
    fsdp_status status = get_live(&scope, root, opts, sd_out, err);
    fsdp_state_scope_release(&scope);
    return status;
}

fsdp_status fsdp_root_get_state(fsdp_root *root, const fsdp_state_opts *opts, fsdp_sd **sd_out,
                                fsdp_error *err)
{
    FSDP_NEED(err, sd_out);
    *sd_out = NULL;
    FSDP_NEED(err, root);
    fsdp_state_scope scope = {0};
    fsdp_error local = {0};
    fsdp_sd *live = NULL;
    err = err ? err : &local;
    fsdp_status status = get_live(&scope, root, opts, &live, err);
    if (opts && opts->full_state_dict) {
        fsdp_ctl *ctl = fsdp_world_ctl(root->world);
        const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_root_get_state");
        status = state_gather(&scope, live, status, sd_out, err);
        fsdp_ctl_end_public(ctl, outer);
    } else if (status == FSDP_OK && opts && opts->cpu_offload)
        status = get_copies(&scope, live, sd_out, err);
    else if (status == FSDP_OK) {
        *sd_out = live;
        live = NULL;
    }
    fsdp_sd_free(live);
    fsdp_state_scope_release(&scope);
    return status;
}

/* === saving =================================================================================== */

/* The caller's extra entries are saved and loaded next to the state of a root: state.h, "checkpoints". */

/* Adds the caller's extra entries to sd. extra may be NULL. Memory of tensors is borrowed. */
static fsdp_status save_extra(const fsdp_sd *extra, fsdp_sd *sd, fsdp_error *err)
{
    for (size_t i = 0; extra && i < fsdp_sd_count(extra); i++) {
        const fsdp_entry *entry = fsdp_sd_at(extra, i);
        FSDP_TRY(fsdp_state_add_extra(extra, entry, sd, err));
        if (entry->path)
            FSDP_TRY(
                fsdp_sd_set_path(sd, fsdp_sd_count(sd) - 1, entry->path, entry->path_count, err));
    }
    return FSDP_OK;
}

/* A save takes so much staging memory for the copy of a GPU's state. */
enum { POOL_BYTES = 256 << 20 };

/* Kind LOCAL stores flat buffers as they are; replicated flat parameters are not one flat buffer. */
static fsdp_status check_local(const fsdp_root *root, fsdp_error *err)
{
    for (size_t i = 0; root->declared != root->model && i < root->unit_count; i++)
        for (size_t g = 0; g < root->units[i]->group_count; g++) {
            const fsdp_group *group = &root->units[i]->groups[g];
            if (group->roles.shard_dim >= 0 && group->roles.replicate_dim >= 0)
                return fsdp_fail(err, FSDP_ERR_USAGE,
                                 "unit %s: local checkpoints do not go with hybrid strategies, "
                                 "sharded ones do",
                                 root->units[i]->name);
        }
    return FSDP_OK;
}

fsdp_status fsdp_root_saved_state(fsdp_root *root, const fsdp_root_save_opts *opts,
                                  fsdp_sd **sd_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_state_check_stored(&opts->state, err));
    if (opts->save.kind == FSDP_LOCAL)
        FSDP_TRY(check_local(root, err));
    if (opts->state.part != FSDP_STATE_OPTIM)
        FSDP_TRY(fsdp_root_check_values(root, NULL, "saving", err));
    FSDP_TRY(fsdp_state_get_unviewed(root, &opts->state, sd_out, err));
    return save_extra(opts->extra, *sd_out, err);
}

/* Makes the state dict and, of memory that the host cannot read, the copy that a save writes. */
static fsdp_status copy_state(fsdp_root *root, const fsdp_root_save_opts *given, fsdp_sd **sd_out,
                              fsdp_snapshot *snapshot, fsdp_error *err)
{
    const fsdp_snapshot_opts opts = {.view = &root->view, .most = POOL_BYTES, .is_still = true};
    FSDP_TRY(fsdp_root_saved_state(root, given, sd_out, err));
    FSDP_TRY(fsdp_snapshot_open(snapshot, &opts, *sd_out, root->world->rank, err));
    const fsdp_snapshot_take take = {.sd = *sd_out,
                                     .rank = root->world->rank,
                                     .changes = root->context->streams[FSDP_STREAM_COMPUTE]};
    FSDP_TRY(fsdp_snapshot_begin(snapshot, &take, err));
    FSDP_TRY(fsdp_waves_reach(fsdp_snapshot_waves(snapshot), 0, err));
    return fsdp_context_check_comms(root->context, err);
}

fsdp_status fsdp_root_save(fsdp_root *root, const char *dir, const fsdp_root_save_opts *opts,
                           fsdp_error *err)
{
    FSDP_NEED(err, root);
    static const fsdp_root_save_opts none = {0};
    const fsdp_root_save_opts *given = opts ? opts : &none;
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    int64_t step = given->save.step ? *given->save.step : FSDP_NO_STEP;
    fsdp_sd *sd = NULL;
    fsdp_snapshot snapshot = {0};
    fsdp_world_trace(root->world, "save", -1);
    fsdp_status mine = FSDP_GIVEN(err, dir);
    if (mine == FSDP_OK)
        mine = copy_state(root, given, &sd, &snapshot, err);
    const fsdp_save_call call = {sd, ctl, dir, &given->save, mine, fsdp_snapshot_waves(&snapshot)};
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_root_save");
    fsdp_status status =
        given->into_run ? fsdp_run_save_begun(&call, step, err) : fsdp_save_begun(&call, err);
    fsdp_ctl_end_public(ctl, outer);
    fsdp_snapshot_release(&snapshot);
    fsdp_sd_free(sd);
    return status;
}
