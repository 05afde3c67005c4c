/* Shared by the files of this room: members of dicts, values, what several files say, kinds of moments,
 * tensors. See deepspeed.h. */
#include "formats/deepspeed/deepspeed.h"
#include "base/data/value_internal.h"
#include "kernels/kernels.h"

#include <string.h>

/* === values =================================================================================== */

/* Members of an optimizer's dict that are not settings: flat tensors, and how they are laid out. */
static const char *const not_settings[] = {"single_partition_of_fp32_groups",
                                           "fp32_flat_groups",
                                           "fp32_groups",
                                           "fp32_groups_flat",
                                           "base_optimizer_state",
                                           "optimizer_state_dict",
                                           "state",
                                           "param_groups",
                                           "group_paddings",
                                           "param_slice_mappings",
                                           "param_alignment_paddings",
                                           "ds_zero_partition_groups",
                                           "ds_config",
                                           "ds_version",
                                           NULL};

const char *const ds_model_members[] = {"module",
                                        "buffer_names",
                                        "optimizer",
                                        "param_shapes",
                                        "frozen_param_shapes",
                                        "frozen_param_fragments",
                                        "shared_params",
                                        "sparse_tensor_module_names",
                                        "ds_config",
                                        NULL};

/* --- members ------------------------------------------------------------------------------------- */

ds_members ds_members_of(const torch_archive *archive, fsdp_node dict)
{
    const fsdp_pickle_node *node =
        torch_node(archive, torch_is_dict(archive, dict) ? torch_dict_items(archive, dict) : 0);
    return node->kind == FSDP_NODE_DICT ? (ds_members){node->as.items, node->count & ~(size_t)1}
                                        : (ds_members){NULL, 0};
}

fsdp_node ds_member(const torch_archive *archive, fsdp_node dict, const char *key)
{
    ds_members members = ds_members_of(archive, dict);
    size_t size = strlen(key);
    for (size_t i = members.count; i >= 2; i -= 2)
        if (fsdp_pickle_has_text(torch_node(archive, members.items[i - 2]), key, size))
            return members.items[i - 1];
    return 0;
}

ds_members ds_items_of(const torch_archive *archive, fsdp_node list)
{
    const fsdp_pickle_node *node = torch_node(archive, list);
    return node->kind == FSDP_NODE_LIST || node->kind == FSDP_NODE_TUPLE
               ? (ds_members){node->as.items, node->count}
               : (ds_members){NULL, 0};
}

const char *ds_text(const torch_archive *archive, fsdp_node node, size_t *size_out)
{
    const fsdp_pickle_node *text = torch_node(archive, node);
    *size_out = text->count;
    return text->kind == FSDP_NODE_STR ? text->as.text : NULL;
}

fsdp_status ds_bad(const torch_archive *archive, const char *why, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: %s", archive->where, why);
}

fsdp_status ds_read_tensor(const torch_archive *archive, fsdp_node node, const char *what,
                           torch_tensor *tensor_out, fsdp_error *err)
{
    torch_wrapper wrapper;
    torch_kind kind;
    FSDP_TRY(torch_tensor_read(archive, node, &kind, tensor_out, &wrapper, err));
    bool is_plain = kind == TORCH_KIND_TENSOR && !tensor_out->data;
    torch_tensor_release(tensor_out);
    return is_plain ? FSDP_OK
                    : fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: %s is not a plain tensor",
                                archive->where, what);
}

/* --- values -------------------------------------------------------------------------------------- */

/* The number of an enum: a call of its class with one int. 0: it is none. */
static fsdp_node enum_number(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *call = torch_node(archive, node);
    bool is_call = call->kind == FSDP_NODE_CALL && call->flags & FSDP_NODE_OPAQUE &&
                   !(call->flags & FSDP_NODE_OBJECT) && call->as.call->state == 0;
    fsdp_node args = is_call ? call->as.call->args : 0;
    fsdp_node number = torch_element(archive, args, 0);
    return is_call && torch_node(archive, args)->count == 1 &&
                   torch_node(archive, number)->kind == FSDP_NODE_INT
               ? number
               : 0;
}

static const char optim_prefix[] = "optimizer_state.";
enum { OPTIM_PREFIX = sizeof optim_prefix - 1 };

/* Adds a value below optimizer_state, or next to it. */
static fsdp_status add_value(ds_set *set, const char *name, size_t size, fsdp_value *value,
                             fsdp_error *err)
{
    bool is_below = size > OPTIM_PREFIX && memcmp(name, optim_prefix, OPTIM_PREFIX) == 0;
    const int32_t below[] = {OPTIM_PREFIX - 1, (int32_t)(size - OPTIM_PREFIX)};
    const int32_t whole = (int32_t)size;
    fsdp_source_nest(set->source, is_below ? below : &whole, is_below ? 2 : 1);
    fsdp_status st = fsdp_source_add_value(set->source, name, size, value, NULL, err);
    fsdp_source_nest(set->source, NULL, 0);
    return st;
}

/* The attributes of an object that are plain data: those of a loss scaler, whose class another program does
 * not have. */
static fsdp_status read_attributes(torch_archive *archive, fsdp_node node, fsdp_value *value_out,
                                   fsdp_error *err)
{
    size_t kept = 0;
    FSDP_TRY(torch_value_read(archive, torch_node(archive, node)->as.call->state, value_out, err));
    fsdp_value *items = value_out->as.list.items;
    for (size_t i = 0; i + 1 < value_out->as.list.count; i += 2) {
        if (fsdp_value_is_opaque(&items[i + 1])) {
            fsdp_value_release(&items[i]);
            fsdp_value_release(&items[i + 1]);
            continue;
        }
        fsdp_value key = items[i], item = items[i + 1];
        items[i] = items[i + 1] = (fsdp_value){0};
        items[kept++] = key;
        items[kept++] = item;
    }
    value_out->as.list.count = kept;
    return FSDP_OK;
}

static bool has_attributes(const torch_archive *archive, fsdp_node node)
{
    const fsdp_pickle_node *call = torch_node(archive, node);
    return call->kind == FSDP_NODE_CALL && call->flags & FSDP_NODE_OPAQUE &&
           torch_node(archive, call->as.call->state)->kind == FSDP_NODE_DICT;
}

static fsdp_status read_and_add(ds_set *set, torch_archive *archive, fsdp_node node,
                                const char *name, size_t size, fsdp_error *err)
{
    fsdp_value value;
    fsdp_node number = enum_number(archive, node);
    fsdp_status st = set->is_as_stored || number != 0 || !has_attributes(archive, node)
                         ? torch_value_read(archive, number != 0 ? number : node, &value, err)
                         : read_attributes(archive, node, &value, err);
    if (st == FSDP_OK)
        st = add_value(set, name, size, &value, err);
    fsdp_value_release(&value);
    return st;
}

/* A member of a program's own state may be a tensor. */
static fsdp_status add_member(ds_set *set, torch_archive *archive, fsdp_node node,
                              const fsdp_text *name, fsdp_error *err)
{
    torch_tensor tensor;
    size_t number;
    if (name->failed)
        return fsdp_fail_memory(err, "a name");
    if (torch_tensor_kind(archive, node) != TORCH_KIND_TENSOR)
        return read_and_add(set, archive, node, name->data, name->size, err);
    FSDP_TRY(ds_read_tensor(archive, node, name->data, &tensor, err));
    return torch_tensor_add(archive, name->data, name->size, &tensor, &number, err);
}

static bool is_listed(const char *const *list, const fsdp_pickle_node *key)
{
    for (; *list; list++)
        if (fsdp_pickle_has_text(key, *list, strlen(*list)))
            return true;
    return false;
}

fsdp_status ds_add_values(ds_set *set, torch_archive *archive, fsdp_node dict, const char *prefix,
                          const char *const *but, fsdp_error *err)
{
    ds_members members = ds_members_of(archive, dict);
    fsdp_text name = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < members.count && st == FSDP_OK; i += 2) {
        if (is_listed(but, torch_node(archive, members.items[i])))
            continue;
        name.size = 0;
        fsdp_text_addf(&name, "%s", prefix);
        torch_add_key(archive, members.items[i], &name);
        st = add_member(set, archive, members.items[i + 1], &name, err);
    }
    fsdp_text_release(&name);
    return st;
}

/* --- the step ------------------------------------------------------------------------------------ */

/* A tensor of one element, as a number. */
static fsdp_status read_number(const torch_archive *archive, fsdp_node node, fsdp_value *value_out,
                               fsdp_error *err)
{
    torch_tensor tensor;
    char stored[16];
    double number;
    FSDP_TRY(ds_read_tensor(archive, node, "a step", &tensor, err));
    const fsdp_dtype_info *info = fsdp_dtype_describe(tensor.dtype);
    if (tensor.ndim != 0 || tensor.fix != 0 || tensor.storage.stream >= 0 ||
        !(info->is_float || tensor.dtype == FSDP_I64 || tensor.dtype == FSDP_I32))
        return ds_bad(archive, "a step is not a number", err);
    FSDP_TRY(fsdp_source_pread(archive->source, tensor.storage.file, stored, info->size,
                               tensor.offset, err));
    int64_t whole = 0;
    memcpy(&whole, stored, info->is_float ? 0 : info->size);
    if (tensor.dtype == FSDP_I32)
        whole = (int32_t)whole;
    if (info->is_float)
        fsdp_kernels_get()->cast(&number, FSDP_F64, stored, tensor.dtype, 1, FSDP_OVERFLOW_INF);
    *value_out = info->is_float ? fsdp_value_f64(number) : fsdp_value_i64(whole);
    return FSDP_OK;
}

fsdp_status ds_read_step(torch_archive *archive, fsdp_node node, fsdp_value *value_out,
                         fsdp_error *err)
{
    return torch_tensor_kind(archive, node) == TORCH_KIND_TENSOR
               ? read_number(archive, node, value_out, err)
               : torch_value_read(archive, node, value_out, err);
}

/* Adds the steps that are there, and keeps all of them by the numbers of their states. */
fsdp_status ds_add_step_list(ds_set *set, fsdp_value *steps, fsdp_error *err)
{
    static const char name[] = "optimizer_state.step";
    fsdp_value listed = {0};
    size_t count = 0, at = 0;
    for (size_t i = 0; i < steps->as.list.count; i++)
        count += steps->as.list.items[i].kind != FSDP_VALUE_NULL;
    if (count == 0)
        return FSDP_OK;
    fsdp_status st = fsdp_value_set_items(&listed, FSDP_VALUE_LIST, count, err);
    for (size_t i = 0; i < steps->as.list.count && st == FSDP_OK; i++)
        if (steps->as.list.items[i].kind != FSDP_VALUE_NULL)
            st = fsdp_value_copy(&steps->as.list.items[i], &listed.as.list.items[at++], err);
    if (st == FSDP_OK)
        st = add_value(set, name, sizeof name - 1, &listed, err);
    fsdp_value_release(&listed);
    if (st == FSDP_OK) {
        fsdp_value_release(&set->steps);
        set->steps = *steps;
        *steps = (fsdp_value){0};
    }
    return st;
}

fsdp_status ds_add_steps(ds_set *set, torch_archive *archive, const fsdp_node *states, size_t count,
                         fsdp_error *err)
{
    fsdp_value steps = {0};
    fsdp_status st = fsdp_value_set_items(&steps, FSDP_VALUE_LIST, count, err);
    for (size_t i = 0; i < count && st == FSDP_OK; i++) {
        fsdp_node step = ds_member(archive, states[i], "step");
        if (step != 0)
            st = ds_read_step(archive, step, &steps.as.list.items[i], err);
    }
    if (st == FSDP_OK)
        st = ds_add_step_list(set, &steps, err);
    fsdp_value_release(&steps);
    return st;
}

static fsdp_status note_fact(ds_set *set, torch_archive *archive, const char *what, fsdp_node node,
                             fsdp_error *err)
{
    fsdp_value value = {0};
    if (torch_node(archive, node)->kind == FSDP_NODE_ABSENT)
        return FSDP_OK;
    fsdp_node number = enum_number(archive, node);
    fsdp_status st = ds_read_step(archive, number != 0 ? number : node, &value, err);
    if (st == FSDP_OK)
        st = fsdp_facts_note(&set->facts, what, strlen(what), ds_path(set, archive), &value, err);
    fsdp_value_release(&value);
    return st;
}

fsdp_status ds_note_facts(ds_set *set, torch_archive *archive, fsdp_node dict,
                          const char *const *names, fsdp_error *err)
{
    for (; *names; names++)
        FSDP_TRY(note_fact(set, archive, *names, ds_member(archive, dict, *names), err));
    return FSDP_OK;
}

/* --- an optimizer's settings ---------------------------------------------------------------------- */

fsdp_node ds_base_state(const torch_archive *archive, fsdp_node optim)
{
    fsdp_node base = ds_member(archive, optim, "base_optimizer_state");
    return base != 0 ? base : ds_member(archive, optim, "optimizer_state_dict");
}

fsdp_status ds_add_optim_values(ds_set *set, torch_archive *archive, fsdp_node optim,
                                fsdp_error *err)
{
    static const char name[] = "optimizer_state.param_groups";
    FSDP_TRY(ds_add_values(set, archive, optim, optim_prefix, not_settings, err));
    fsdp_node groups = ds_member(archive, optim, "param_groups");
    if (groups == 0)
        groups = ds_member(archive, ds_base_state(archive, optim), "param_groups");
    if (groups == 0)
        return FSDP_OK;
    if (!set->is_as_stored)
        FSDP_TRY(torch_value_read(archive, groups, &set->param_groups, err));
    return read_and_add(set, archive, groups, name, sizeof name - 1, err);
}

/* === tensors ================================================================================== */

/* --- moments -------------------------------------------------------------------------------------- */

fsdp_status ds_kind(ds_set *set, const char *name, size_t size, int *kind_out, fsdp_error *err)
{
    char shown[80];
    if (set->kind_count == 0)
        set->kinds[set->kind_count++] = "";
    for (size_t i = 1; i < set->kind_count; i++)
        if (strlen(set->kinds[i]) == size && memcmp(set->kinds[i], name, size) == 0) {
            *kind_out = (int)i;
            return FSDP_OK;
        }
    if (set->kind_count == DS_KINDS || memchr(name, '\0', size))
        return fsdp_fail(
            err, FSDP_ERR_LIMIT, "'%s': its optimizer has over %d moments, of which one is '%s'",
            set->directory, DS_KINDS - 1, fsdp_printable(name, size, shown, sizeof shown));
    set->kinds[set->kind_count] = fsdp_arena_strndup(&set->arena, name, size);
    if (!set->kinds[set->kind_count])
        return fsdp_fail_memory(err, "moments");
    *kind_out = (int)set->kind_count++;
    return FSDP_OK;
}

/* --- tensors of the model ------------------------------------------------------------------------- */

static fsdp_status widen(ds_set *set, const char *name, size_t size, const torch_tensor *tensor,
                         size_t *number_out, fsdp_error *err)
{
    static const int64_t origin[FSDP_MAX_DIMS];
    const fsdp_source_shape shape = {FSDP_F32, tensor->ndim, tensor->shape};
    const fsdp_source_chunk whole = {.lo = origin,
                                     .len = tensor->shape,
                                     .file = -1,
                                     .origin = tensor->storage.file,
                                     .stream = FSDP_NO_STREAM};
    fsdp_source_chunk chunk;
    size_t stored;
    torch_tensor_chunk(tensor, origin, &chunk);
    FSDP_TRY(fsdp_source_add_inner(set->source, tensor->dtype, tensor->ndim, tensor->shape, &stored,
                                   err));
    FSDP_TRY(fsdp_source_add_chunk(set->source, stored, &chunk, err));
    FSDP_TRY(fsdp_source_add_tensor(set->source, name, size, &shape, number_out, err));
    FSDP_TRY(fsdp_source_add_chunk(set->source, *number_out, &whole, err));
    if (!fsdp_grow(&set->widened, &set->widened_room, set->widened_count + 1, sizeof *set->widened))
        return fsdp_fail_memory(err, "buffers");
    set->widened[set->widened_count++] = (ds_widened){*number_out, stored};
    return FSDP_OK;
}

static fsdp_status keep_name(ds_set *set, const char *name, size_t size, size_t number,
                             fsdp_error *err)
{
    const char *kept = fsdp_arena_strndup(&set->arena, name, size);
    return kept && fsdp_name_table_enter(&set->tensors, kept, size, number)
               ? FSDP_OK
               : fsdp_fail_memory(err, "the names of a checkpoint");
}

fsdp_status ds_add_model_tensor(ds_set *set, torch_archive *archive, const char *name, size_t size,
                                torch_tensor *tensor, fsdp_error *err)
{
    size_t number;
    const int32_t whole = (int32_t)size; /* dots in names of a model are not nesting */
    fsdp_source_nest(set->source, &whole, 1);
    fsdp_status st = torch_tensor_add(archive, name, size, tensor, &number, err);
    fsdp_source_nest(set->source, NULL, 0);
    return st == FSDP_OK ? keep_name(set, name, size, number, err) : st;
}

fsdp_status ds_add_buffer(ds_set *set, torch_archive *archive, const char *name, size_t size,
                          torch_tensor *tensor, fsdp_error *err)
{
    size_t number;
    const int32_t whole = (int32_t)size;
    if (!fsdp_dtype_describe(tensor->dtype)->is_float || tensor->dtype == FSDP_F32)
        return ds_add_model_tensor(set, archive, name, size, tensor, err);
    fsdp_source_nest(set->source, &whole, 1);
    fsdp_status st = widen(set, name, size, tensor, &number, err);
    fsdp_source_nest(set->source, NULL, 0);
    return st == FSDP_OK ? keep_name(set, name, size, number, err) : st;
}

/* --- tied weights --------------------------------------------------------------------------------- */

fsdp_status ds_tensor_place_of(ds_set *set, const torch_tensor *tensor,
                               const ds_tensor_place **place_out, fsdp_error *err)
{
    ds_tensor_place *place = fsdp_arena_alloc(&set->arena, 1, sizeof *place);
    if (!place)
        return fsdp_fail_memory(err, "the weights of a model");
    *place = (ds_tensor_place){tensor->storage.file,
                               tensor->storage.stream,
                               tensor->offset,
                               tensor->ndim,
                               tensor->dtype,
                               {0},
                               {0}};
    if (tensor->ndim > 0) {
        memcpy(place->shape, tensor->shape, (size_t)tensor->ndim * sizeof *place->shape);
        memcpy(place->strides, tensor->strides, (size_t)tensor->ndim * sizeof *place->strides);
    }
    *place_out = place;
    return FSDP_OK;
}

fsdp_status ds_note_tied(ds_set *set, const ds_tied *tied, fsdp_error *err)
{
    ds_tied copy = {.name = fsdp_arena_strndup(&set->arena, tied->name, tied->name_size),
                    .name_size = tied->name_size,
                    .stored = fsdp_arena_strndup(&set->arena, tied->stored, tied->stored_size),
                    .stored_size = tied->stored_size};
    if (!copy.name || !copy.stored ||
        !fsdp_grow(&set->tied, &set->tied_room, set->tied_count + 1, sizeof *set->tied))
        return fsdp_fail_memory(err, "tied weights");
    set->tied[set->tied_count++] = copy;
    return FSDP_OK;
}
