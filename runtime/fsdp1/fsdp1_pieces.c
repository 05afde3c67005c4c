/*
 * The FSDP1 face: one flat tensor, which is a flat parameter or a tensor of its optimizer's state. It is
 * gathered, declared in a state dict parameter by parameter, and taken from one.
 */
#include "runtime/fsdp1/fsdp1_internal.h"

#include <string.h>

#include "base/core/mem.h"

/* --- gathering -------------------------------------------------------------------------------- */

static int shard_size(const fsdp_v1_flat *flat)
{
    return flat->param->group->shard_size;
}

bool fsdp_v1_is_whole(const fsdp_v1_flat *flat)
{
    return shard_size(flat) == 1;
}

int64_t fsdp_v1_gathered_count(const fsdp_v1_flat *flat)
{
    return flat->param->padded * shard_size(flat);
}

fsdp_status fsdp_v1_gather(const fsdp_v1_piece *piece, void *whole, fsdp_error *err)
{
    const fsdp_param *param = piece->flat->param;
    const fsdp_group *group = param->group;
    size_t size = fsdp_dtype_size(piece->dtype), own = (size_t)param->rows * size;
    size_t chunk = (size_t)param->padded * size;
    unsigned char *mine = (unsigned char *)whole + (size_t)group->shard_rank * chunk;
    const fsdp_collective call = {.kind = FSDP_ALL_GATHER,
                                  .dtype = piece->dtype,
                                  .in = mine,
                                  .out = whole,
                                  .count = param->padded,
                                  .unit = group->name};
    memcpy(mine, piece->own, own);
    memset(mine + own, 0, chunk - own);
    if (shard_size(piece->flat) == 1)
        return FSDP_OK;
    FSDP_TRY(group->context->device->ops->sync(group->shard->last, err));
    return fsdp_comm_run(group->shard->comm, &call, err);
}

/* --- names ------------------------------------------------------------------------------------ */

fsdp_status fsdp_v1_spell(fsdp_text *text, const fsdp_v1_naming *naming, const char *name,
                          fsdp_error *err)
{
    text->size = 0;
    fsdp_text_addf(text, "%s%s%s", naming->prefix, name, naming->suffix);
    return text->failed ? fsdp_fail_memory(err, name) : FSDP_OK;
}

const fsdp_entry *fsdp_v1_find(const fsdp_sd *sd, const fsdp_text *name)
{
    int64_t at = fsdp_sd_find(sd, name->data, name->size);
    const fsdp_entry *entry = at < 0 ? NULL : fsdp_sd_at(sd, (size_t)at);
    return entry && entry->kind == FSDP_ENTRY_ALIAS ? fsdp_sd_at(sd, entry->target) : entry;
}

bool fsdp_v1_piece_has(const fsdp_v1_piece *piece, const fsdp_param *param)
{
    size_t group;
    return !piece->optim || fsdp_v1_group_of(piece->optim, param, &group);
}

/* --- declaring -------------------------------------------------------------------------------- */

fsdp_status fsdp_v1_add_whole(fsdp_v1 *v1, fsdp_sd *sd, const fsdp_param *param, fsdp_dtype dtype,
                              const fsdp_v1_naming *naming, void *data, fsdp_error *err)
{
    const fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = v1->mesh};
    fsdp_text name = {0};
    fsdp_status status = fsdp_v1_spell(&name, naming, param->name, err);
    if (status == FSDP_OK)
        status = fsdp_sd_add_tensor(sd, name.data, name.size, dtype, param->ndim, param->shape,
                                    &layout, data, err);
    fsdp_text_release(&name);
    return status;
}

static unsigned char *at_element(void *data, int64_t element, fsdp_dtype dtype)
{
    return data ? (unsigned char *)data + (size_t)element * fsdp_dtype_size(dtype) : NULL;
}

static fsdp_status add_wholes(fsdp_v1 *v1, fsdp_sd *sd, const fsdp_v1_piece *piece,
                              const fsdp_v1_naming *naming, bool is_live, fsdp_error *err)
{
    for (size_t i = 0; i < piece->flat->view_count; i++) {
        const fsdp_param *param = piece->flat->views[i];
        void *data = is_live ? at_element(piece->own, param->flat_at, piece->dtype) : NULL;
        if (fsdp_v1_piece_has(piece, param))
            FSDP_TRY(fsdp_v1_add_whole(v1, sd, param, piece->dtype, naming, data, err));
    }
    return FSDP_OK;
}

/* A flat buffer of a state dict: its layout says all, in a few bytes. */
static fsdp_status add_buffer(fsdp_sd *sd, const fsdp_v1_piece *piece, const fsdp_v1_naming *naming,
                              bool is_live, fsdp_text *names, fsdp_flat_part *parts,
                              fsdp_error *err)
{
    const fsdp_v1_flat *flat = piece->flat;
    fsdp_text *own = &names[flat->view_count];
    size_t n = 0;
    for (size_t i = 0; i < flat->view_count; i++) {
        const fsdp_param *param = flat->views[i];
        if (!fsdp_v1_piece_has(piece, param))
            continue;
        FSDP_TRY(fsdp_v1_spell(&names[i], naming, param->name, err));
        parts[n++] = (fsdp_flat_part){.name = names[i].data,
                                      .name_size = names[i].size,
                                      .ndim = param->ndim,
                                      .shape = param->shape,
                                      .offset = param->flat_at};
    }
    FSDP_TRY(fsdp_v1_spell(own, naming, flat->param->name, err));
    return fsdp_sd_add_flat(sd, own->data, own->size, piece->dtype, flat->param->group->roles.mesh,
                            flat->param->model->world->rank, fsdp_v1_gathered_count(flat), parts, n,
                            is_live ? piece->own : NULL, err);
}

static fsdp_status add_flat(fsdp_sd *sd, const fsdp_v1_piece *piece, const fsdp_v1_naming *naming,
                            bool is_live, fsdp_error *err)
{
    size_t n = piece->flat->view_count;
    fsdp_text *names = fsdp_alloc(n + 1, sizeof *names);
    fsdp_flat_part *parts = fsdp_alloc(n, sizeof *parts);
    fsdp_status status = names && parts ? add_buffer(sd, piece, naming, is_live, names, parts, err)
                                        : fsdp_fail_memory(err, piece->flat->param->name);
    for (size_t i = 0; names && i <= n; i++)
        fsdp_text_release(&names[i]);
    fsdp_free(names);
    fsdp_free(parts);
    return status;
}

/* --- replicas --------------------------------------------------------------------------------- */

/* Boxes of a parameter on every rank of the mesh: with replicas, no flat layout says it. */
typedef struct box_list {
    fsdp_rank_box *items;
    size_t count, room;
} box_list;

static fsdp_status add_boxes(box_list *list, const fsdp_v1_flat *flat, const fsdp_param *param,
                             int rank, fsdp_error *err)
{
    const fsdp_group *group = flat->param->group;
    const fsdp_box whole = fsdp_box_whole(param->ndim, param->shape);
    int64_t coord[FSDP_MAX_MESH_DIMS], begin, len;
    fsdp_box pieces[FSDP_BOX_PIECES];
    fsdp_mesh_coord(group->roles.mesh, rank, coord);
    fsdp_chunk(flat->count, shard_size(flat), coord[group->roles.shard_dim], &begin, &len);
    int64_t at = param->flat_at, behind = at + fsdp_v1_count(param), end = begin + len;
    int64_t lo = at > begin ? at : begin, hi = behind < end ? behind : end;
    int n = lo < hi ? fsdp_box_cut(&whole, lo - at, hi - lo, pieces) : 0;
    if (!fsdp_grow(&list->items, &list->room, list->count + (size_t)n, sizeof *list->items))
        return fsdp_fail_memory(err, param->name);
    for (int i = 0; i < n; i++)
        list->items[list->count++] = (fsdp_rank_box){.rank = rank, .box = pieces[i]};
    return FSDP_OK;
}

static fsdp_status add_boxed(fsdp_sd *sd, const fsdp_v1_piece *piece, const fsdp_param *param,
                             const fsdp_text *name, bool is_live, box_list *list, fsdp_error *err)
{
    const fsdp_flat_run run = fsdp_param_flat_run(param);
    const fsdp_mesh *mesh = piece->flat->param->group->roles.mesh;
    list->count = 0;
    for (int rank = 0; rank < fsdp_world_size(param->model->world); rank++) {
        int64_t coord[FSDP_MAX_MESH_DIMS];
        if (fsdp_mesh_coord(mesh, rank, coord))
            FSDP_TRY(add_boxes(list, piece->flat, param, rank, err));
    }
    const fsdp_layout layout = {
        .kind = FSDP_LAYOUT_BOXES, .boxes = list->items, .box_count = list->count};
    bool has_data = is_live && run.count > 0;
    return fsdp_sd_add_tensor(sd, name->data, name->size, piece->dtype, param->ndim, param->shape,
                              &layout,
                              has_data ? at_element(piece->own, run.at, piece->dtype) : NULL, err);
}

static fsdp_status add_all_boxed(fsdp_sd *sd, const fsdp_v1_piece *piece,
                                 const fsdp_v1_naming *naming, bool is_live, fsdp_error *err)
{
    box_list list = {0};
    fsdp_text name = {0};
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < piece->flat->view_count && status == FSDP_OK; i++) {
        const fsdp_param *param = piece->flat->views[i];
        if (!fsdp_v1_piece_has(piece, param))
            continue;
        status = fsdp_v1_spell(&name, naming, param->name, err);
        if (status == FSDP_OK)
            status = add_boxed(sd, piece, param, &name, is_live, &list, err);
    }
    fsdp_text_release(&name);
    fsdp_free(list.items);
    return status;
}

bool fsdp_v1_is_live(const fsdp_v1_state_opts *opts)
{
    return opts->type == FSDP_V1_LOCAL_STATE_DICT ||
           (opts->type == FSDP_V1_SHARDED_STATE_DICT && !opts->offload_to_cpu);
}

fsdp_status fsdp_v1_add_runs(fsdp_v1 *v1, fsdp_sd *sd, const fsdp_v1_piece *piece,
                             const fsdp_v1_naming *naming, const fsdp_v1_state_opts *opts,
                             fsdp_error *err)
{
    bool is_live = fsdp_v1_is_live(opts);
    if (opts->type == FSDP_V1_FULL_STATE_DICT || fsdp_v1_is_whole(piece->flat))
        return add_wholes(v1, sd, piece, naming, is_live, err);
    if (piece->flat->param->group->replicate_size > 1)
        return add_all_boxed(sd, piece, naming, is_live, err);
    return add_flat(sd, piece, naming, is_live, err);
}

/* --- filling ---------------------------------------------------------------------------------- */

/* whole NULL: this rank's runs are copied; else whole parameters are. */
static fsdp_status copy_out(fsdp_sd *sd, const fsdp_v1_piece *piece, const fsdp_v1_naming *naming,
                            unsigned char *whole, fsdp_error *err)
{
    fsdp_text name = {0};
    fsdp_status status = FSDP_OK;
    size_t size = fsdp_dtype_size(piece->dtype);
    for (size_t i = 0; i < piece->flat->view_count && status == FSDP_OK; i++) {
        const fsdp_param *param = piece->flat->views[i];
        const fsdp_flat_run run = fsdp_param_flat_run(param);
        if (!fsdp_v1_piece_has(piece, param))
            continue;
        status = fsdp_v1_spell(&name, naming, param->name, err);
        if (status != FSDP_OK)
            break;
        const fsdp_entry *entry = fsdp_v1_find(sd, &name);
        if (whole)
            memcpy(entry->data, at_element(whole, param->flat_at, piece->dtype),
                   (size_t)fsdp_v1_count(param) * size);
        else if (run.count > 0)
            memcpy(entry->data, at_element(piece->own, run.at, piece->dtype),
                   (size_t)run.count * size);
    }
    fsdp_text_release(&name);
    return status;
}

fsdp_status fsdp_v1_fill_runs(fsdp_sd *sd, const fsdp_v1_piece *piece, const fsdp_v1_naming *naming,
                              const fsdp_v1_state_opts *opts, bool keeps, fsdp_error *err)
{
    if (fsdp_v1_is_live(opts))
        return FSDP_OK;
    if (opts->type != FSDP_V1_FULL_STATE_DICT)
        return copy_out(sd, piece, naming, NULL, err);
    void *whole =
        fsdp_alloc((size_t)fsdp_v1_gathered_count(piece->flat), fsdp_dtype_size(piece->dtype));
    if (!whole)
        return fsdp_fail_memory(err, piece->flat->param->name);
    fsdp_status status = fsdp_v1_gather(piece, whole, err);
    if (status == FSDP_OK && keeps)
        status = copy_out(sd, piece, naming, whole, err);
    fsdp_free(whole);
    return status;
}

/* --- taking ----------------------------------------------------------------------------------- */

/* Are the entry's boxes on this rank this very run? */
static bool is_same_run(const fsdp_param *param, const fsdp_entry *entry, const fsdp_flat_run *run)
{
    const fsdp_box whole = fsdp_box_whole(param->ndim, param->shape);
    int rank = param->model->world->rank;
    fsdp_box pieces[FSDP_BOX_PIECES], box;
    int n = run->count > 0 ? fsdp_box_cut(&whole, run->first, run->count, pieces) : 0;
    if (fsdp_layout_box_count(&entry->layout, param->ndim, param->shape, rank) != (size_t)n)
        return false;
    for (int i = 0; i < n; i++) {
        fsdp_layout_box(&entry->layout, param->ndim, param->shape, rank, (size_t)i, &box);
        if (!fsdp_box_equal(&box, &pieces[i]))
            return false;
    }
    return true;
}

/* A dict may come from elsewhere: what is whole on one rank alone is whole where its memory is. */
static bool is_whole_here(const fsdp_param *param, const fsdp_entry *entry)
{
    const fsdp_box whole = fsdp_box_whole(param->ndim, param->shape);
    int64_t all = fsdp_box_count(&whole);
    int ranks = fsdp_layout_world(&entry->layout);
    for (int rank = 0; rank < ranks; rank++) {
        int64_t held = 0;
        fsdp_box box;
        size_t n = fsdp_layout_box_count(&entry->layout, param->ndim, param->shape, rank);
        for (size_t i = 0; i < n; i++) {
            fsdp_layout_box(&entry->layout, param->ndim, param->shape, rank, i, &box);
            held += fsdp_box_count(&box);
        }
        if (held != all)
            return false;
    }
    return ranks > 0;
}

static fsdp_status check_entry(const fsdp_param *param, const fsdp_entry *entry, fsdp_dtype dtype,
                               fsdp_error *err)
{
    if (entry->kind != FSDP_ENTRY_TENSOR)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is no tensor", entry->name);
    if (entry->dtype != dtype)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is %s in the state dict and %s here",
                         entry->name, fsdp_dtype_name(entry->dtype), fsdp_dtype_name(dtype));
    bool has_shape = entry->ndim == param->ndim;
    for (int i = 0; i < param->ndim && has_shape; i++)
        has_shape = entry->shape[i] == param->shape[i];
    return has_shape ? FSDP_OK
                     : fsdp_fail(err, FSDP_ERR_USAGE,
                                 "'%s' has another shape in the state dict than here", entry->name);
}

fsdp_status fsdp_v1_take_run(const fsdp_param *param, const fsdp_entry *entry, fsdp_dtype dtype,
                             void *to, fsdp_error *err)
{
    const fsdp_flat_run run = fsdp_param_flat_run(param);
    const unsigned char *from = entry->data;
    size_t size = fsdp_dtype_size(dtype);
    FSDP_TRY(check_entry(param, entry, dtype, err));
    bool is_whole = is_whole_here(param, entry);
    if (!is_whole && !is_same_run(param, entry, &run))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is cut otherwise in the state dict than here: save it, and load the "
                         "checkpoint",
                         entry->name);
    if (run.count == 0)
        return FSDP_OK;
    if (!from)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no memory in the state dict", entry->name);
    if (to)
        memcpy(to, from + (is_whole ? (size_t)run.first * size : 0), (size_t)run.count * size);
    return FSDP_OK;
}

fsdp_status fsdp_v1_take_whole(const fsdp_param *param, const fsdp_entry *entry, fsdp_dtype dtype,
                               void *to, fsdp_error *err)
{
    FSDP_TRY(check_entry(param, entry, dtype, err));
    if (!is_whole_here(param, entry) || !entry->data)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is not whole in the state dict", entry->name);
    if (to)
        memcpy(to, entry->data, (size_t)fsdp_v1_count(param) * fsdp_dtype_size(dtype));
    return FSDP_OK;
}
