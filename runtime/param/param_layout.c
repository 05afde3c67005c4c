/*
 * This rank's part of a parameter, as boxes in the tensor and sizes of padded shards. Tensor parallelism
 * cuts first. Then the unit's mesh cuts one dim of the rest into equal chunks of rows; the last ones are
 * shorter or empty. docs/runtime.md, "What a rank holds of a parameter".
 */
#include "runtime/param/param.h"
#include "statedict/sd/layout_internal.h"

#include <inttypes.h>
#include <string.h>

int64_t fsdp_param_count(const fsdp_param *param)
{
    return param->outer * param->n * param->rest;
}

int64_t fsdp_param_local_count(const fsdp_param *param)
{
    return param->outer * param->rows * param->rest;
}

int64_t fsdp_param_padded_count(const fsdp_param *param, int parts)
{
    return param->padded * parts;
}

fsdp_flat_run fsdp_param_flat_run(const fsdp_param *param)
{
    const fsdp_box whole = fsdp_box_whole(param->ndim, param->shape);
    const fsdp_param *flat = param->flat;
    int64_t count = fsdp_box_count(&whole);
    if (!flat->group)
        return (fsdp_flat_run){.count = count};
    int64_t begin = flat->shard_box.lo[0], end = begin + flat->shard_box.len[0];
    int64_t lo = param->flat_at > begin ? param->flat_at : begin;
    int64_t hi = param->flat_at + count < end ? param->flat_at + count : end;
    if (lo >= hi)
        return (fsdp_flat_run){0};
    return (fsdp_flat_run){.first = lo - param->flat_at, .count = hi - lo, .at = lo - begin};
}

/* The placement on a mesh dim that the unit does not use itself. */
static fsdp_placement placement_of(const fsdp_param *param, const char *dim)
{
    for (int i = 0; i < param->place_count; i++)
        if (strcmp(param->places[i].dim, dim) == 0)
            return param->places[i].placement;
    return (fsdp_placement){.kind = FSDP_REPLICATE};
}

static bool cuts(const fsdp_placement *placement, int dim)
{
    return placement->kind != FSDP_REPLICATE && placement->dim == dim;
}

/* The number of parts into which tensor parallelism cuts a dim. */
static int64_t tensor_parts(const fsdp_layout *layout, unsigned tensor_dims, int dim)
{
    int64_t parts = 1;
    for (int i = 0; i < fsdp_mesh_ndim(layout->mesh); i++)
        if ((tensor_dims >> i & 1) && cuts(&layout->placement[i], dim))
            parts *= fsdp_mesh_dim_size(layout->mesh, i);
    return parts;
}

static fsdp_status check_places(const fsdp_param *param, const fsdp_mesh_roles *roles,
                                const char *unit, fsdp_error *err)
{
    for (int i = 0; i < param->place_count; i++) {
        bool found = false;
        for (int dim = 0; dim < fsdp_mesh_ndim(roles->mesh) && !found; dim++)
            found = strcmp(fsdp_mesh_dim_name(roles->mesh, dim), param->places[i].dim) == 0 &&
                    (roles->tensor_dims >> dim & 1);
        if (!found)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "'%s' has a placement on '%s', which is not a mesh dim of unit %s, or "
                             "which the unit itself shards or replicates",
                             param->name, param->places[i].dim, unit);
    }
    return FSDP_OK;
}

/* Sets the layout, and the data box: the tensor without the unit's own cuts. */
static void place(fsdp_param *param, const fsdp_mesh_roles *roles, int rank)
{
    fsdp_layout *layout = &param->layout;
    *layout = (fsdp_layout){.kind = FSDP_LAYOUT_MESH, .mesh = roles->mesh};
    for (int i = 0; i < fsdp_mesh_ndim(roles->mesh); i++)
        if (roles->tensor_dims >> i & 1)
            layout->placement[i] = placement_of(param, fsdp_mesh_dim_name(roles->mesh, i));
    fsdp_layout_mesh_box(layout, param->ndim, param->shape, rank, &param->data_box);
    int64_t parts = tensor_parts(layout, roles->tensor_dims, param->cut.dim);
    if (roles->shard_dim >= 0)
        layout->placement[roles->shard_dim] =
            parts > 1 ? (fsdp_placement){FSDP_STRIDED_SHARD, param->cut.dim, parts}
                      : (fsdp_placement){FSDP_SHARD, param->cut.dim, 0};
}

static void measure(fsdp_param *param, int64_t ranks)
{
    const int64_t *len = param->data_box.len;
    param->outer = param->rest = 1;
    param->n = len[param->cut.dim];
    for (int i = 0; i < param->ndim; i++)
        if (i != param->cut.dim)
            *(i < param->cut.dim ? &param->outer : &param->rest) *= len[i];
    param->chunk = (param->n + ranks - 1) / ranks;
    param->rows = param->shard_box.len[param->cut.dim];
    param->padded = param->outer * param->chunk * param->rest;
}

fsdp_status fsdp_param_lay_out(fsdp_param *param, const fsdp_mesh_roles *roles, const char *unit,
                               fsdp_error *err)
{
    int rank = fsdp_world_rank(param->model->world);
    int64_t ranks = roles->shard_dim < 0 ? 1 : fsdp_mesh_dim_size(roles->mesh, roles->shard_dim);
    FSDP_TRY(check_places(param, roles, unit, err));
    place(param, roles, rank);
    fsdp_status status = fsdp_layout_check(&param->layout, param->ndim, param->shape, err);
    if (status != FSDP_OK) {
        fsdp_error_prefix(err, "'%s'", param->name);
        return status;
    }
    param->mesh = roles->mesh;
    fsdp_layout_mesh_box(&param->layout, param->ndim, param->shape, rank, &param->shard_box);
    measure(param, ranks);
    if (param->cut.dim > 0 && param->n % ranks != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot shard '%s' evenly along dim %d: %" PRId64 " elements over %" PRId64
                         " ranks; only dim 0 may be uneven",
                         param->name, param->cut.dim, param->n, ranks);
    return FSDP_OK;
}
