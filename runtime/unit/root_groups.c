/*
 * The parameters of a unit become groups: those of one mesh each, with the communicators they need.
 * Collective over the world: every rank asks for all sets of ranks in one order.
 */
#include "runtime/unit/root_internal.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"

/* --- dims by name ----------------------------------------------------------------------------- */

static int find_dim(const fsdp_mesh *mesh, const char *name, size_t size)
{
    for (int i = 0; i < fsdp_mesh_ndim(mesh); i++)
        if (strlen(fsdp_mesh_dim_name(mesh, i)) == size &&
            memcmp(fsdp_mesh_dim_name(mesh, i), name, size) == 0)
            return i;
    return -1;
}

/* The dims that "a,b" names, as bits. */
static fsdp_status parse_dims(const fsdp_unit *unit, const fsdp_mesh *mesh, const char *names,
                              unsigned *dims_out, fsdp_error *err)
{
    *dims_out = 0;
    for (const char *at = names; *at;) {
        size_t size = strcspn(at, ",");
        int dim = find_dim(mesh, at, size);
        if (dim < 0)
            return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s: its mesh has no dim '%.*s'", unit->name,
                             (int)size, at);
        *dims_out |= 1u << dim;
        at += size + (at[size] == ',');
    }
    return FSDP_OK;
}

/* Of one dim: it shards. Of more: the first replicates, the second shards, the others are the
 * tensors'. */
static fsdp_status choose_dims(const fsdp_unit *unit, const fsdp_mesh *mesh, unsigned *shard_out,
                               unsigned *replicate_out, fsdp_error *err)
{
    const fsdp_unit_opts *opts = &unit->opts;
    if (!opts->shard_dims && !opts->replicate_dims) {
        bool is_line = fsdp_mesh_ndim(mesh) == 1;
        *shard_out = is_line ? 1 : 2;
        *replicate_out = is_line ? 0 : 1;
        return FSDP_OK;
    }
    FSDP_TRY(parse_dims(unit, mesh, opts->shard_dims ? opts->shard_dims : "", shard_out, err));
    FSDP_TRY(parse_dims(unit, mesh, opts->replicate_dims ? opts->replicate_dims : "", replicate_out,
                        err));
    if (*shard_out & *replicate_out)
        return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s: a mesh dim both shards and replicates",
                         unit->name);
    return FSDP_OK;
}

/* --- sets of ranks ---------------------------------------------------------------------------- */

static int64_t product(const fsdp_mesh *mesh, unsigned dims)
{
    int64_t size = 1;
    for (int i = 0; i < fsdp_mesh_ndim(mesh); i++)
        if (dims >> i & 1)
            size *= fsdp_mesh_dim_size(mesh, i);
    return size;
}

/* Coordinates in the dims of a set, row-major, as a step in the mesh's row-major positions. */
static int64_t position(const fsdp_mesh *mesh, unsigned dims, int64_t index)
{
    int64_t at = 0, stride = 1;
    for (int i = fsdp_mesh_ndim(mesh) - 1; i >= 0; i--) {
        int64_t size = fsdp_mesh_dim_size(mesh, i);
        if (dims >> i & 1) {
            at += index % size * stride;
            index /= size;
        }
        stride *= size;
    }
    return at;
}

/* This rank's index among the coordinates of a set of dims. */
static int64_t own_index(const fsdp_mesh *mesh, unsigned dims, int rank)
{
    int64_t coord[FSDP_MAX_MESH_DIMS], index = 0;
    if (!fsdp_mesh_coord(mesh, rank, coord))
        return 0;
    for (int i = 0; i < fsdp_mesh_ndim(mesh); i++)
        if (dims >> i & 1)
            index = index * fsdp_mesh_dim_size(mesh, i) + coord[i];
    return index;
}

/* Runs of `each` ranks along some dims, for every coordinate of the others; *ordered_out: the run
 * that this rank is in. */
static fsdp_status connect(fsdp_group *group, unsigned dims, int64_t each, bool is_separate,
                           fsdp_ordered_comm **ordered_out, fsdp_error *err)
{
    fsdp_world *world = group->unit->model->world;
    const fsdp_mesh *mesh = group->mesh;
    unsigned others = ((1u << fsdp_mesh_ndim(mesh)) - 1) & ~dims;
    int64_t along = product(mesh, dims), across = product(mesh, others);
    for (int64_t o = 0; o < across; o++)
        for (int64_t first = 0; first < along; first += each) {
            fsdp_ordered_comm *ordered = NULL;
            for (int64_t i = 0; i < each; i++)
                group->ranks[i] = fsdp_mesh_rank_at(mesh, position(mesh, others, o) +
                                                              position(mesh, dims, first + i));
            FSDP_TRY(fsdp_world_ordered_comm(world, group->ranks, (int)each, is_separate, &ordered,
                                             err));
            if (ordered)
                *ordered_out = ordered;
        }
    return FSDP_OK;
}

/* --- what a unit asks of a mesh
 * ---------------------------------------------------------------- */

static fsdp_status check_mesh(const fsdp_unit *unit, const fsdp_mesh *mesh, fsdp_error *err)
{
    unsigned shard, replicate, all = (1u << fsdp_mesh_ndim(mesh)) - 1;
    int k = unit->reshard_after_forward;
    FSDP_TRY(choose_dims(unit, mesh, &shard, &replicate, err));
    if (k <= FSDP_RESHARD_ALWAYS)
        return FSDP_OK;
    int64_t ranks = product(mesh, shard);
    if (ranks % k != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s: reshard_after_forward is %d, which does not divide the %lld "
                         "ranks that share its parameters",
                         unit->name, k, (long long)ranks);
    if (product(mesh, all & ~shard & ~replicate) > 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s: reshard_after_forward is a number, which is not possible beside "
                         "tensor parallelism",
                         unit->name);
    return FSDP_OK;
}

fsdp_status fsdp_unit_check_meshes(const fsdp_unit *unit, fsdp_error *err)
{
    for (size_t i = 0; i < unit->param_count; i++)
        FSDP_TRY(check_mesh(unit, unit->params[i]->cut.mesh, err));
    return unit->param_count == 0 ? check_mesh(unit, unit->opts.mesh, err) : FSDP_OK;
}

/* --- one mesh for the group ------------------------------------------------------------------- */

/* The dims of a mesh of the group's own, each a set of those of the given one. */
typedef struct dim_sets {
    unsigned dims[FSDP_MAX_MESH_DIMS];
    int count;
} dim_sets;

/* Replicas, shards, then the others one by one. */
static dim_sets sets_of(const fsdp_mesh *mesh, unsigned replicate, unsigned shard)
{
    dim_sets sets = {.count = 0};
    if (replicate)
        sets.dims[sets.count++] = replicate;
    if (shard)
        sets.dims[sets.count++] = shard;
    for (int i = 0; i < fsdp_mesh_ndim(mesh); i++)
        if (!((replicate | shard) >> i & 1))
            sets.dims[sets.count++] = 1u << i;
    return sets;
}

static fsdp_status join_names(const fsdp_group *group, const fsdp_mesh *mesh, unsigned dims,
                              char *name_out, fsdp_error *err)
{
    size_t used = 0;
    for (int i = 0; i < fsdp_mesh_ndim(mesh); i++) {
        if (!(dims >> i & 1))
            continue;
        used += (size_t)snprintf(name_out + used, FSDP_MAX_MESH_NAME + 1 - used, "%s%s",
                                 used > 0 ? "_" : "", fsdp_mesh_dim_name(mesh, i));
        if (used > FSDP_MAX_MESH_NAME)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "unit %s: the names of mesh dims that are seen as one have more than "
                             "%d bytes together",
                             group->unit->name, FSDP_MAX_MESH_NAME);
    }
    return FSDP_OK;
}

static void list_ranks(const fsdp_mesh *mesh, const dim_sets *sets, int *ranks)
{
    for (int64_t at = 0; at < fsdp_mesh_size(mesh); at++) {
        int64_t left = at, from = 0;
        for (int i = sets->count - 1; i >= 0; i--) {
            from += position(mesh, sets->dims[i], left % product(mesh, sets->dims[i]));
            left /= product(mesh, sets->dims[i]);
        }
        ranks[at] = fsdp_mesh_rank_at(mesh, from);
    }
}

/* Several dims that shard, or replicate, are one dim of a mesh of the group's own. */
static fsdp_status flatten(fsdp_group *group, const fsdp_mesh *mesh, unsigned replicate,
                           unsigned shard, fsdp_error *err)
{
    const dim_sets sets = sets_of(mesh, replicate, shard);
    int64_t shape[FSDP_MAX_MESH_DIMS];
    char joined[FSDP_MAX_MESH_DIMS][FSDP_MAX_MESH_NAME + 1];
    const char *names[FSDP_MAX_MESH_DIMS];
    for (int i = 0; i < sets.count; i++) {
        shape[i] = product(mesh, sets.dims[i]);
        names[i] = joined[i];
        FSDP_TRY(join_names(group, mesh, sets.dims[i], joined[i], err));
    }
    list_ranks(mesh, &sets, group->ranks);
    return fsdp_mesh_create(sets.count, shape, names, group->ranks, &group->own_mesh, err);
}

static bool is_one_dim(unsigned dims)
{
    return (dims & (dims - 1)) == 0;
}

static int dim_of(unsigned bit)
{
    int dim = -1;
    for (; bit; bit >>= 1)
        dim++;
    return dim;
}

static fsdp_status choose_mesh(fsdp_group *group, const fsdp_mesh *mesh, fsdp_error *err)
{
    unsigned shard, replicate, all = (1u << fsdp_mesh_ndim(mesh)) - 1;
    FSDP_TRY(choose_dims(group->unit, mesh, &shard, &replicate, err));
    if (is_one_dim(shard) && is_one_dim(replicate)) {
        group->mesh = mesh;
        group->shard_dim = dim_of(shard);
        group->replicate_dim = dim_of(replicate);
        group->tensor_dims = all & ~shard & ~replicate;
        return FSDP_OK;
    }
    FSDP_TRY(flatten(group, mesh, replicate, shard, err));
    group->mesh = group->own_mesh;
    group->replicate_dim = replicate ? 0 : -1;
    group->shard_dim = shard ? group->replicate_dim + 1 : -1;
    unsigned used = (shard ? 1u << group->shard_dim : 0) | (replicate ? 1u : 0);
    group->tensor_dims = ((1u << fsdp_mesh_ndim(group->mesh)) - 1) & ~used;
    return FSDP_OK;
}

/* --- communicators ---------------------------------------------------------------------------- */

static unsigned bit_of(int dim)
{
    return dim < 0 ? 0 : 1u << dim;
}

static fsdp_status connect_again(fsdp_group *group, int k, fsdp_error *err)
{
    unsigned dims = bit_of(group->replicate_dim) | bit_of(group->shard_dim);
    group->again_size = k;
    group->again_rank = group->shard_rank % k;
    return connect(group, dims, k, false, &group->again, err);
}

static fsdp_status connect_group(fsdp_group *group, fsdp_error *err)
{
    fsdp_unit *unit = group->unit;
    fsdp_world *world = unit->model->world;
    unsigned shard = bit_of(group->shard_dim), replicate = bit_of(group->replicate_dim);
    group->shard_size = (int)product(group->mesh, shard);
    group->replicate_size = (int)product(group->mesh, replicate);
    group->shard_rank = (int)own_index(group->mesh, shard, world->rank);
    if (group->shard_size > 1)
        FSDP_TRY(connect(group, shard, group->shard_size, false, &group->shard, err));
    group->reduce = group->shard;
    if (group->shard_size > 1 && unit->is_separate)
        FSDP_TRY(connect(group, shard, group->shard_size, true, &group->reduce, err));
    if (group->replicate_size > 1)
        FSDP_TRY(connect(group, replicate, group->replicate_size, false, &group->replicate, err));
    int k = unit->reshard_after_forward;
    bool is_part = k > FSDP_RESHARD_ALWAYS && k < group->shard_size;
    return is_part ? connect_again(group, k, err) : FSDP_OK;
}

fsdp_status fsdp_group_separate_reduce(fsdp_group *group, fsdp_error *err)
{
    group->reduce = group->shard;
    if (group->shard_size == 1 || !group->unit->is_separate)
        return FSDP_OK;
    return connect(group, bit_of(group->shard_dim), group->shard_size, true, &group->reduce, err);
}

/* --- all ranks -------------------------------------------------------------------------------- */

/* The largest mesh of the root: it holds the others. */
static const fsdp_mesh *widest_mesh(const fsdp_root *root)
{
    const fsdp_group *widest = NULL;
    for (size_t i = 0; i < root->unit_count; i++)
        for (size_t g = 0; g < root->units[i]->group_count; g++) {
            const fsdp_group *group = &root->units[i]->groups[g];
            if (!widest || fsdp_mesh_size(group->mesh) > fsdp_mesh_size(widest->mesh))
                widest = group;
        }
    return widest ? widest->params[0]->cut.mesh : root->unit->opts.mesh;
}

fsdp_status fsdp_root_widest_comm(fsdp_root *root, fsdp_ordered_comm **ordered_out, fsdp_error *err)
{
    const fsdp_mesh *mesh = widest_mesh(root);
    *ordered_out = fsdp_world_find_comm(root->world, mesh, 0, fsdp_mesh_ndim(mesh) - 1);
    return *ordered_out ? root->context->device->ops->sync((*ordered_out)->last, err) : FSDP_OK;
}

fsdp_status fsdp_root_world_comm(fsdp_root *root, const char *what, fsdp_ordered_comm **ordered_out,
                                 fsdp_error *err)
{
    *ordered_out = NULL;
    if (root->world->size == 1)
        return FSDP_OK;
    FSDP_TRY(fsdp_root_widest_comm(root, ordered_out, err));
    if (*ordered_out && (*ordered_out)->size == root->world->size)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s needs a mesh of all ranks (fsdp_world_connect)",
                     what);
}

int fsdp_ordered_comm_position(const fsdp_ordered_comm *ordered, int rank)
{
    int i = 0;
    while (i < ordered->size && ordered->ranks[i] != rank)
        i++;
    return i;
}

/* --- groups ----------------------------------------------------------------------------------- */

static size_t count_meshes(const fsdp_unit *unit)
{
    size_t count = 0;
    for (size_t i = 0; i < unit->param_count; i++) {
        bool is_new = true;
        for (size_t j = 0; j < i && is_new; j++)
            is_new = !fsdp_mesh_equal(unit->params[i]->cut.mesh, unit->params[j]->cut.mesh);
        count += is_new;
    }
    return count;
}

static fsdp_status plan_group(fsdp_group *group, const fsdp_mesh *mesh, fsdp_error *err)
{
    fsdp_unit *unit = group->unit;
    group->params = fsdp_alloc(unit->param_count, sizeof *group->params);
    group->ranks = fsdp_alloc((size_t)fsdp_mesh_size(mesh), sizeof *group->ranks);
    if (!group->params || !group->ranks)
        return fsdp_fail_memory(err, unit->name);
    for (size_t i = 0; i < unit->param_count; i++) {
        fsdp_param *param = unit->params[i];
        if (param->group || !fsdp_mesh_equal(param->cut.mesh, mesh))
            continue;
        param->group = group;
        group->params[group->count++] = param;
    }
    return choose_mesh(group, mesh, err);
}

fsdp_status fsdp_unit_plan_groups(fsdp_unit *unit, fsdp_error *err)
{
    size_t count = count_meshes(unit);
    unit->groups = fsdp_alloc(count, sizeof *unit->groups);
    if (!unit->groups)
        return fsdp_fail_memory(err, unit->name);
    for (size_t i = 0; i < unit->param_count; i++) {
        if (unit->params[i]->group)
            continue;
        fsdp_group *group = &unit->groups[unit->group_count++];
        group->unit = unit;
        FSDP_TRY(plan_group(group, unit->params[i]->cut.mesh, err));
    }
    bool has_custom = unit->custom_gather || unit->custom_reduce || unit->custom_all_reduce;
    return has_custom ? fsdp_unit_check_custom(unit, err) : FSDP_OK;
}

fsdp_status fsdp_unit_connect_groups(fsdp_unit *unit, fsdp_error *err)
{
    for (size_t g = 0; g < unit->group_count; g++)
        FSDP_TRY(connect_group(&unit->groups[g], err));
    return FSDP_OK;
}

/* --- sizes ------------------------------------------------------------------------------------ */

enum { WIDEST = 16, ALIGNMENT = 64 }; /* bytes of an element; before each parameter */

/* What all ranks bring of a parameter, in whatever it is gathered and reduced; false: beyond all
 * memory. */
static bool add_most_bytes(const fsdp_param *param, int ranks, int64_t *sum)
{
    const fsdp_extension *extension = param->extension;
    int64_t bytes;
    if (fsdp_mul_overflow(param->padded, ranks, &bytes) ||
        fsdp_mul_overflow(bytes, WIDEST, &bytes) || fsdp_add_overflow(*sum, bytes, sum) ||
        fsdp_add_overflow(*sum, ALIGNMENT, sum))
        return false;
    for (size_t i = 0; extension && i < extension->count; i++)
        if (extension->sizes[i] > INT64_MAX ||
            fsdp_mul_overflow((int64_t)extension->sizes[i], ranks, &bytes) ||
            fsdp_add_overflow(*sum, bytes, sum))
            return false;
    return true;
}

/* Sizes of its buffers are sums of these, which nobody needs to check again. */
static fsdp_status check_sizes(const fsdp_group *group, fsdp_error *err)
{
    int64_t sum = 0;
    for (size_t i = 0; i < group->count; i++)
        if (!add_most_bytes(group->params[i], group->shard_size, &sum))
            return fsdp_fail(err, FSDP_ERR_LIMIT,
                             "unit %s is too large: its parameters up to '%s' have more bytes than "
                             "can be counted",
                             group->unit->name, group->params[i]->name);
    return FSDP_OK;
}

fsdp_status fsdp_group_lay_out(fsdp_group *group, fsdp_error *err)
{
    for (size_t i = 0; i < group->count; i++) {
        const fsdp_param *param = group->params[i];
        FSDP_TRY(fsdp_param_lay_out(group->params[i], err));
        bool is_alike = i == 0 || group->wire == param->data_dtype;
        group->wire = is_alike && !param->extension ? param->data_dtype : FSDP_U8;
    }
    return check_sizes(group, err);
}

void fsdp_unit_release_groups(fsdp_unit *unit)
{
    for (size_t i = 0; i < unit->group_count; i++) {
        fsdp_group *group = &unit->groups[i];
        for (size_t p = 0; p < group->count; p++) {
            group->params[p]->group = NULL;
            group->params[p]->mesh = NULL;
            group->params[p]->shard = NULL;
        }
        fsdp_rects_release(&group->rects_in);
        fsdp_rects_release(&group->rects_out);
        fsdp_rects_release(&group->rects_reduce);
        fsdp_free(group->params);
        fsdp_free(group->ranks);
        fsdp_free(group->order);
        fsdp_free(group->grads);
        fsdp_mesh_free(group->own_mesh);
    }
    fsdp_free(unit->groups);
    unit->groups = NULL;
    unit->group_count = 0;
}
