/*
 * Declared parameters inside flat ones (wrap.h) as tensors of a state dict: with their own names and shapes,
 * in the memory of the flat tensor. A flat tensor is the flat parameter or a tensor of its optimizer's
 * state. state_get.c adds everything else.
 */
#include "runtime/state/state_internal.h"
#include "base/data/box_internal.h"

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

fsdp_status fsdp_state_add_view(const fsdp_state_view *view, fsdp_text *name, fsdp_sd *sd,
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
