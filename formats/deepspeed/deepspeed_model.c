/*
 * Model files: the shapes of the parameters in their flat order, frozen weights, buffers, tied names and the
 * values that the engine and its program keep. See deepspeed.h.
 */
#include "formats/deepspeed/deepspeed.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* --- numbers -------------------------------------------------------------------------------------- */

/* Members that the engine itself writes. Members of a program may differ between its ranks. */
static const char *const model_facts[] = {"global_steps",
                                          "global_samples",
                                          "skipped_steps",
                                          "dp_world_size",
                                          "mp_world_size",
                                          "ds_version",
                                          NULL};

static void read_count(const torch_archive *archive, fsdp_node dict, const char *key,
                       int64_t *count)
{
    fsdp_node node = ds_member(archive, dict, key);
    int64_t found;
    if (fsdp_pickle_int(&archive->pickle, node, &found) && found >= 0)
        *count = found;
}

/* Compares the numbers of the engine with those of the files before. */
static fsdp_status agree_numbers(ds_set *set, torch_archive *archive, fsdp_error *err)
{
    FSDP_TRY(ds_note_facts(set, archive, archive->pickle.root, model_facts, err));
    if (set->model_file)
        return FSDP_OK;
    fsdp_node root = archive->pickle.root;
    set->global_steps = -1;
    set->skipped_steps = 0;
    set->tensor_ranks = 1;
    set->data_ranks = 0;
    read_count(archive, root, "global_steps", &set->global_steps);
    read_count(archive, root, "skipped_steps", &set->skipped_steps);
    read_count(archive, root, "mp_world_size", &set->tensor_ranks);
    read_count(archive, root, "dp_world_size", &set->data_ranks);
    read_count(archive, ds_member(archive, root, "checkpoint_parallel_dimensions"), "tp_degree",
               &set->tensor_ranks);
    const char *path = ds_path(set, archive);
    set->model_file = fsdp_arena_strndup(&set->arena, path, strlen(path));
    return set->model_file ? FSDP_OK : fsdp_fail_memory(err, path);
}

/* --- shapes --------------------------------------------------------------------------------------- */

static fsdp_status read_param(ds_set *set, const torch_archive *archive, fsdp_node name,
                              fsdp_node shape, ds_param *param_out, fsdp_error *err)
{
    int64_t sizes[FSDP_MAX_DIMS];
    int ndim;
    size_t size;
    const char *text = ds_text(archive, name, &size);
    if (!text)
        return ds_bad(archive, "the name of a parameter is not a string", err);
    FSDP_TRY(torch_read_sizes(archive, shape, "sizes", &ndim, sizes, err));
    FSDP_TRY(torch_check_shape(archive, ndim, sizes, FSDP_F32, err));
    fsdp_box whole = fsdp_box_whole(ndim, sizes);
    *param_out = (ds_param){.name = fsdp_arena_strndup(&set->arena, text, size),
                            .name_size = size,
                            .ndim = ndim,
                            .shape = fsdp_arena_alloc(&set->arena, (size_t)ndim, sizeof *sizes),
                            .count = fsdp_box_count(&whole)};
    if (!param_out->name || !param_out->shape)
        return fsdp_fail_memory(err, "the parameters of a checkpoint");
    if (ndim > 0)
        memcpy(param_out->shape, sizes, (size_t)ndim * sizeof *sizes);
    param_out->is_copy = fsdp_source_has(set->source, text, size);
    return FSDP_OK;
}

/* Reads a dict of shapes. */
static fsdp_status read_shapes(ds_set *set, const torch_archive *archive, fsdp_node dict,
                               ds_param *params, size_t *count, fsdp_error *err)
{
    ds_members members = ds_members_of(archive, dict);
    for (size_t i = 0; i < members.count; i += 2)
        FSDP_TRY(read_param(set, archive, members.items[i], members.items[i + 1],
                            &params[(*count)++], err));
    return FSDP_OK;
}

static size_t count_shapes(const torch_archive *archive, ds_members groups)
{
    size_t count = 0;
    for (size_t i = 0; i < groups.count; i++)
        count += ds_members_of(archive, groups.items[i]).count / 2;
    return count;
}

/* Makes the groups; in stage 3 one of all parameters, because its sub-groups follow one another. */
static fsdp_status read_groups(ds_set *set, const torch_archive *archive, ds_members groups,
                               fsdp_error *err)
{
    size_t all = count_shapes(archive, groups), count = 0;
    ds_param *params = fsdp_arena_alloc(&set->arena, all, sizeof *params);
    set->group_count = set->is_split ? 1 : groups.count;
    set->groups = fsdp_arena_alloc(&set->arena, set->group_count, sizeof *set->groups);
    set->ends = fsdp_arena_alloc(&set->arena, groups.count, sizeof *set->ends);
    if (!params || !set->groups || !set->ends)
        return fsdp_fail_memory(err, "the parameters of a checkpoint");
    for (size_t g = 0; g < groups.count; g++) {
        size_t first = count;
        FSDP_TRY(read_shapes(set, archive, groups.items[g], params, &count, err));
        set->ends[g] = count;
        if (!set->is_split)
            FSDP_TRY(ds_group_begin(set, &set->groups[g], params + first, count - first, err));
    }
    return set->is_split ? ds_group_begin(set, set->groups, params, count, err) : FSDP_OK;
}

/* --- buffers ------------------------------------------------------------------------- */

static fsdp_status note_buffers(ds_set *set, const torch_archive *archive, fsdp_node names,
                                fsdp_error *err)
{
    ds_members items = ds_items_of(archive, names);
    for (size_t i = 0; i < items.count; i++) {
        size_t size;
        const char *text = ds_text(archive, items.items[i], &size);
        const char *name = text ? fsdp_arena_strndup(&set->arena, text, size) : NULL;
        if (!text)
            return ds_bad(archive, "the name of a buffer is not a string", err);
        if (!name || !fsdp_name_table_enter(&set->buffers, name, size, 0))
            return fsdp_fail_memory(err, "buffers");
    }
    return FSDP_OK;
}

/* Adds a tensor when it is a buffer that was not found yet. */
static fsdp_status add_buffer(ds_set *set, torch_archive *archive, const char *name, size_t size,
                              fsdp_node node, fsdp_error *err)
{
    uint64_t *is_found = fsdp_name_table_find(&set->buffers, name, size);
    torch_tensor tensor;
    char shown[200];
    if (!is_found || *is_found || torch_tensor_kind(archive, node) != TORCH_KIND_TENSOR)
        return FSDP_OK;
    *is_found = 1;
    FSDP_TRY(ds_read_tensor(archive, node, fsdp_printable(name, size, shown, sizeof shown), &tensor,
                            err));
    return ds_add_buffer(set, archive, name, size, &tensor, err);
}

static fsdp_status add_buffers(ds_set *set, torch_archive *archive, fsdp_node module,
                               const char *prefix, fsdp_error *err)
{
    ds_members members = ds_members_of(archive, module);
    fsdp_text name = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < members.count && st == FSDP_OK; i += 2) {
        size_t size;
        const char *text = ds_text(archive, members.items[i], &size);
        name.size = 0;
        fsdp_text_addf(&name, "%s", prefix);
        fsdp_text_add(&name, text ? text : "", text ? size : 0);
        st = name.failed ? fsdp_fail_memory(err, "a name") : FSDP_OK;
        if (st == FSDP_OK && text)
            st = add_buffer(set, archive, name.data ? name.data : "", name.size,
                            members.items[i + 1], err);
    }
    fsdp_text_release(&name);
    return st;
}

/* --- frozen weights ------------------------------------------------------------------------------- */

/* A frozen weight is stored whole, or in stage 3 as this rank's part: 1-D and padded. */
static fsdp_status add_fragment(ds_set *set, torch_archive *archive, ds_param *param,
                                fsdp_node node, fsdp_error *err)
{
    torch_tensor tensor;
    char shown[200];
    FSDP_TRY(ds_read_tensor(archive, node,
                            fsdp_printable(param->name, param->name_size, shown, sizeof shown),
                            &tensor, err));
    if (!set->is_split)
        return ds_add_model_tensor(set, archive, param->name, param->name_size, &tensor, err);
    int64_t part = param->count / set->world + (param->count % set->world != 0), first;
    if (tensor.ndim != 1 || tensor.shape[0] != part)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "%s: its part of '%s' does not have %" PRId64
                         " elements, the share of each of %" PRId64 " ranks",
                         archive->where, shown, part, set->world);
    if (fsdp_mul_overflow(part, set->rank, &first) || first >= param->count)
        return FSDP_OK;
    int64_t left = param->count - first;
    const ds_run run = {first, 0, left < part ? left : part};
    FSDP_TRY(ds_print_add(set, &tensor, true, err));
    return ds_place(set, param, DS_MASTER, &tensor, &run, err);
}

static fsdp_status add_fragments(ds_set *set, torch_archive *archive, fsdp_error *err)
{
    ds_members fragments =
        ds_members_of(archive, ds_member(archive, archive->pickle.root, "frozen_param_fragments"));
    fsdp_name_table found = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < set->frozen_count && st == FSDP_OK; i++)
        if (!fsdp_name_table_enter(&found, set->frozen[i].name, set->frozen[i].name_size, i))
            st = fsdp_fail_memory(err, "frozen weights");
    for (size_t i = 0; i < fragments.count && st == FSDP_OK; i += 2) {
        size_t size;
        const char *name = ds_text(archive, fragments.items[i], &size);
        const uint64_t *number = name ? fsdp_name_table_find(&found, name, size) : NULL;
        st = number ? add_fragment(set, archive, &set->frozen[*number], fragments.items[i + 1], err)
                    : ds_bad(archive, "frozen_param_fragments and frozen_param_shapes differ", err);
    }
    fsdp_name_table_release(&found);
    return st == FSDP_OK ? ds_print_end(set, "frozen weights", archive, err) : st;
}

/* A model file of stage 3 next to that of rank 0. */
fsdp_status ds_read_other_model(ds_set *set, torch_archive *archive, fsdp_error *err)
{
    FSDP_TRY(agree_numbers(set, archive, err));
    return add_fragments(set, archive, err);
}

static fsdp_status read_frozen(ds_set *set, torch_archive *archive, fsdp_error *err)
{
    fsdp_node shapes = ds_member(archive, archive->pickle.root, "frozen_param_shapes");
    size_t count = ds_members_of(archive, shapes).count / 2;
    set->frozen_count = 0;
    set->frozen = fsdp_arena_alloc(&set->arena, count, sizeof *set->frozen);
    if (!set->frozen)
        return fsdp_fail_memory(err, "frozen weights");
    FSDP_TRY(read_shapes(set, archive, shapes, set->frozen, &set->frozen_count, err));
    return add_fragments(set, archive, err);
}

/* --- tied weights --------------------------------------------------------------------------------- */

static fsdp_status read_tied(ds_set *set, const torch_archive *archive, fsdp_error *err)
{
    ds_members members =
        ds_members_of(archive, ds_member(archive, archive->pickle.root, "shared_params"));
    for (size_t i = 0; i < members.count; i += 2) {
        ds_tied tied = {0};
        tied.name = ds_text(archive, members.items[i], &tied.name_size);
        tied.stored = ds_text(archive, members.items[i + 1], &tied.stored_size);
        if (!tied.name || !tied.stored)
            return ds_bad(archive, "shared_params is not a dict of names", err);
        FSDP_TRY(ds_note_tied(set, &tied, err));
    }
    return FSDP_OK;
}

/* --- weights that only the module has ------------------------------------------------------------- */

/* Names of the module: those of parameters, and of the others those of one tensor with a parameter. */
typedef struct module_names {
    ds_members members;
    fsdp_name_table known;  /* names -> number of the parameter, or 0 */
    fsdp_name_table places; /* of tensors of parameters -> number of the member */
} module_names;

static fsdp_status note_known(ds_set *set, module_names *names, fsdp_error *err)
{
    bool is_noted = true;
    uint64_t number = 0; /* of the parameters, from 1 */
    for (size_t g = 0; g < set->group_count; g++)
        for (size_t i = 0; i < set->groups[g].lanes->count; i++) {
            const ds_param *param = &set->groups[g].lanes->params[i];
            is_noted &= fsdp_name_table_enter(&names->known, param->name, param->name_size,
                                              ++number) != NULL;
        }
    for (size_t i = 0; i < set->frozen_count; i++)
        is_noted &= fsdp_name_table_enter(&names->known, set->frozen[i].name,
                                          set->frozen[i].name_size, 0) != NULL;
    for (size_t i = 0; i < set->tied_count; i++)
        is_noted &= fsdp_name_table_enter(&names->known, set->tied[i].name, set->tied[i].name_size,
                                          0) != NULL;
    return is_noted ? FSDP_OK : fsdp_fail_memory(err, "the weights of a model");
}

/* A member's tensor; false for what is not a tensor with elements. */
static bool read_weight(const torch_archive *archive, fsdp_node node, torch_tensor *tensor_out)
{
    fsdp_error why = {0}; /* nothing else reads the module's tensors, which may be of any kind */
    if (torch_tensor_kind(archive, node) != TORCH_KIND_TENSOR ||
        ds_read_tensor(archive, node, "a weight", tensor_out, &why) != FSDP_OK)
        return false;
    fsdp_box whole = fsdp_box_whole(tensor_out->ndim, tensor_out->shape);
    return fsdp_box_count(&whole) > 0;
}

/* Keeps the module's weight, with which the master is compared. */
static fsdp_status keep_weight(ds_set *set, const torch_archive *archive, uint64_t number,
                               const torch_tensor *tensor, fsdp_error *err)
{
    ds_param *param = &set->groups[0].lanes->params[number - 1]; /* those of all groups follow */
    char shown[200];
    bool has_shape =
        tensor->ndim == param->ndim &&
        (tensor->ndim == 0 ||
         memcmp(tensor->shape, param->shape, (size_t)tensor->ndim * sizeof *tensor->shape) == 0);
    if (!has_shape)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "%s: the weight '%s' of its module does not have the shape in "
                         "param_shapes" FSDP_TWO_SAVES,
                         archive->where,
                         fsdp_printable(param->name, param->name_size, shown, sizeof shown));
    torch_tensor *kept = fsdp_arena_alloc(&set->arena, 1, sizeof *kept);
    if (!kept)
        return fsdp_fail_memory(err, "the weights of a model");
    *kept = *tensor;
    param->weight = kept;
    return FSDP_OK;
}

static fsdp_status add_place(ds_set *set, torch_archive *archive, module_names *names, size_t i,
                             fsdp_error *err)
{
    size_t size;
    const char *text = ds_text(archive, names->members.items[i], &size);
    const uint64_t *known = text ? fsdp_name_table_find(&names->known, text, size) : NULL;
    const ds_tensor_place *place;
    torch_tensor tensor;
    if (!known || !read_weight(archive, names->members.items[i + 1], &tensor))
        return FSDP_OK;
    if (*known > 0)
        FSDP_TRY(keep_weight(set, archive, *known, &tensor, err));
    FSDP_TRY(ds_tensor_place_of(set, &tensor, &place, err));
    return fsdp_name_table_enter(&names->places, (const char *)place, sizeof *place, i)
               ? FSDP_OK
               : fsdp_fail_memory(err, "the weights of a model");
}

static fsdp_status add_other(ds_set *set, torch_archive *archive, const module_names *names,
                             size_t i, fsdp_error *err)
{
    ds_tied tied = {0};
    const ds_tensor_place *place;
    torch_tensor tensor;
    tied.name = ds_text(archive, names->members.items[i], &tied.name_size);
    if (!tied.name || fsdp_name_table_find(&names->known, tied.name, tied.name_size) ||
        fsdp_name_table_find(&set->buffers, tied.name, tied.name_size))
        return FSDP_OK;
    if (!read_weight(archive, names->members.items[i + 1], &tensor))
        return FSDP_OK;
    FSDP_TRY(ds_tensor_place_of(set, &tensor, &place, err));
    const uint64_t *same = fsdp_name_table_find(&names->places, (const char *)place, sizeof *place);
    if (!same)
        fsdp_source_count_rounded(set->source);
    else
        tied.stored = ds_text(archive, names->members.items[*same], &tied.stored_size);
    return same ? ds_note_tied(set, &tied, err) : FSDP_OK;
}

/* DeepSpeed lists no second names of parameters whose whole module has two. Stage 1 stores frozen weights in
 * the module alone, rounded; they are counted. */
static fsdp_status read_others(ds_set *set, torch_archive *archive, fsdp_error *err)
{
    module_names names = {
        .members = ds_members_of(archive, ds_member(archive, archive->pickle.root, "module"))};
    if (set->is_split) /* the module holds nothing */
        return FSDP_OK;
    fsdp_status st = note_known(set, &names, err);
    for (size_t i = 0; i < names.members.count && st == FSDP_OK; i += 2)
        st = add_place(set, archive, &names, i, err);
    for (size_t i = 0; i < names.members.count && st == FSDP_OK; i += 2)
        st = add_other(set, archive, &names, i, err);
    fsdp_name_table_release(&names.known);
    fsdp_name_table_release(&names.places);
    return st;
}

/* The names of the module, by which other folders of a universal checkpoint are known. */
static fsdp_status note_module(ds_set *set, const torch_archive *archive, fsdp_error *err)
{
    ds_members members = ds_members_of(archive, ds_member(archive, archive->pickle.root, "module"));
    for (size_t i = 0; i < members.count && set->is_universal; i += 2) {
        size_t size;
        const char *text = ds_text(archive, members.items[i], &size);
        const char *name = text ? fsdp_arena_strndup(&set->arena, text, size) : NULL;
        if (text && (!name || !fsdp_name_table_enter(&set->module, name, size, 0)))
            return fsdp_fail_memory(err, "the weights of a model");
    }
    return FSDP_OK;
}

/* --- files ---------------------------------------------------------------------------------------- */

static bool is_none(const torch_archive *archive, fsdp_node node)
{
    uint8_t kind = torch_node(archive, node)->kind;
    return kind == FSDP_NODE_ABSENT || kind == FSDP_NODE_NONE;
}

static fsdp_status check_model(const torch_archive *archive, fsdp_error *err)
{
    fsdp_node root = archive->pickle.root;
    if (ds_member(archive, root, "buffer_names") == 0 && ds_member(archive, root, "module") == 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s is not a model file of DeepSpeed",
                         archive->where);
    if (!is_none(archive, ds_member(archive, root, "ds_autoep_layers")))
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "%s: its experts are split by AutoEP, which is not supported; gather them "
                         "with DeepSpeed",
                         archive->where);
    return FSDP_OK;
}

fsdp_status ds_read_model(ds_set *set, torch_archive *archive, fsdp_error *err)
{
    fsdp_node root = archive->pickle.root, shapes = ds_member(archive, root, "param_shapes");
    FSDP_TRY(check_model(archive, err));
    FSDP_TRY(agree_numbers(set, archive, err));
    FSDP_TRY(note_module(set, archive, err));
    if (set->part == 0)
        FSDP_TRY(ds_add_values(set, archive, root, "", ds_model_members, err));
    FSDP_TRY(note_buffers(set, archive, ds_member(archive, root, "buffer_names"), err));
    ds_members groups =
        torch_is_dict(archive, shapes) ? (ds_members){&shapes, 1} : ds_items_of(archive, shapes);
    FSDP_TRY(read_groups(set, archive, groups, err));
    FSDP_TRY(add_buffers(set, archive, ds_member(archive, root, "module"), "", err));
    if (is_none(archive, shapes) && !is_none(archive, ds_member(archive, root, "module")))
        return ds_read_plain(set, archive, err);
    FSDP_TRY(read_frozen(set, archive, err));
    FSDP_TRY(read_tied(set, archive, err));
    return read_others(set, archive, err);
}

/* --- weights in files of their own ---------------------------------------------------------------- */

/* A layer's weights have names below its number; those of an expert have their whole names. */
static fsdp_status keep_outside(ds_set *set, const char *prefix, const char *text, size_t size,
                                const torch_tensor *tensor, fsdp_error *err)
{
    fsdp_text name = {0};
    fsdp_text_addf(&name, "%s", prefix);
    fsdp_text_add(&name, text, size);
    const char *kept = name.failed ? NULL : fsdp_arena_strndup(&set->arena, name.data, name.size);
    torch_tensor *weight = fsdp_arena_alloc(&set->arena, 1, sizeof *weight);
    uint64_t *at =
        kept ? fsdp_name_table_enter(&set->outside, kept, name.size, set->weight_count) : NULL;
    bool is_kept =
        at && weight &&
        fsdp_grow(&set->weights, &set->weight_room, set->weight_count + 1, sizeof *set->weights);
    fsdp_text_release(&name);
    if (!is_kept)
        return fsdp_fail_memory(err, "the weights of a model");
    if (*at < set->weight_count)
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED, "'%s' and '%s' both have '%s'" FSDP_TWO_SAVES,
            fsdp_source_file_path(set->source, (size_t)set->weights[*at]->storage.file),
            fsdp_source_file_path(set->source, (size_t)tensor->storage.file), kept);
    *weight = *tensor;
    set->weights[set->weight_count++] = weight;
    return FSDP_OK;
}

fsdp_status ds_note_weights(ds_set *set, torch_archive *archive, fsdp_error *err)
{
    ds_members members = ds_members_of(archive, archive->pickle.root);
    char prefix[16] = "";
    if (set->layer >= 0)
        snprintf(prefix, sizeof prefix, "%d.", set->layer);
    for (size_t i = 0; i < members.count; i += 2) {
        size_t size;
        const char *text = ds_text(archive, members.items[i], &size);
        torch_tensor tensor;
        if (text && read_weight(archive, members.items[i + 1], &tensor))
            FSDP_TRY(keep_outside(set, prefix, text, size, &tensor, err));
    }
    return FSDP_OK;
}

/* --- layers --------------------------------------------------------------------------------------- */

/* The names in a layer's file are those below the layer's number. */
fsdp_status ds_read_layer(ds_set *set, torch_archive *archive, fsdp_error *err)
{
    char prefix[16];
    snprintf(prefix, sizeof prefix, "%d.", set->layer);
    return add_buffers(set, archive, archive->pickle.root, prefix, err);
}
