/*
 * The mesh of a group, and its communicators. Names of mesh dims give the dims their roles; several dims of
 * one role become one dim of a mesh of the group's own. Connecting is collective over the world: every rank
 * asks for the communicators of all sets of ranks, in one order.
 */
#include "runtime/group/group_internal.h"
#include "statedict/sd/layout_internal.h"

#include <stdio.h>
#include <string.h>

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
static fsdp_status parse_dims(const fsdp_mesh *mesh, const char *unit, const char *names,
                              unsigned *dims_out, fsdp_error *err)
{
    *dims_out = 0;
    for (const char *at = names; *at;) {
        size_t size = strcspn(at, ",");
        int dim = find_dim(mesh, at, size);
        if (dim < 0)
            return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s: its mesh has no dim '%.*s'", unit,
                             (int)size, at);
        *dims_out |= 1u << dim;
        at += size + (at[size] == ',');
    }
    return FSDP_OK;
}

/* Without names, a mesh of one dim shards; of more dims, the first replicates and the second shards. Dims
 * without a role are tensor parallel. */
static fsdp_status choose_dims(const fsdp_mesh *mesh, const fsdp_dim_names *names,
                               unsigned *shard_out, unsigned *replicate_out, fsdp_error *err)
{
    if (!names->shard && !names->replicate) {
        bool is_line = fsdp_mesh_ndim(mesh) == 1;
        *shard_out = is_line ? 1 : 2;
        *replicate_out = is_line ? 0 : 1;
        return FSDP_OK;
    }
    const char *shard = names->shard ? names->shard : "";
    const char *replicate = names->replicate ? names->replicate : "";
    FSDP_TRY(parse_dims(mesh, names->unit, shard, shard_out, err));
    FSDP_TRY(parse_dims(mesh, names->unit, replicate, replicate_out, err));
    if (*shard_out & *replicate_out)
        return fsdp_fail(err, FSDP_ERR_USAGE, "unit %s: a mesh dim both shards and replicates",
                         names->unit);
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

/* The row-major position in the mesh of the index-th coordinate of a set of dims, the other dims being 0. */
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
static int64_t local_index(const fsdp_mesh *mesh, unsigned dims, int rank)
{
    int64_t coord[FSDP_MAX_MESH_DIMS], index = 0;
    if (!fsdp_mesh_coord(mesh, rank, coord))
        return 0;
    for (int i = 0; i < fsdp_mesh_ndim(mesh); i++)
        if (dims >> i & 1)
            index = index * fsdp_mesh_dim_size(mesh, i) + coord[i];
    return index;
}

/* Connects runs of `each` ranks along some dims, for every coordinate of the others; *ordered_out is that
 * of this rank's run. */
static fsdp_status connect(fsdp_group *group, unsigned dims, int64_t each, bool is_separate,
                           fsdp_ordered_comm **ordered_out, fsdp_error *err)
{
    fsdp_world *world = group->context->world;
    const fsdp_mesh *mesh = group->roles.mesh;
    unsigned others = ((1u << fsdp_mesh_ndim(mesh)) - 1) & ~dims;
    int64_t along = product(mesh, dims), across = product(mesh, others);
    for (int64_t o = 0; o < across; o++)
        for (int64_t i = 0; i < along; i++)
            group->ranks[o * along + i] =
                fsdp_mesh_rank_at(mesh, position(mesh, others, o) + position(mesh, dims, i));
    const fsdp_rank_groups groups = {
        .ranks = group->ranks, .size = (int)each, .count = (int)(along * across / each)};
    return fsdp_world_ordered_comm(world, &groups, is_separate, ordered_out, err);
}

/* --- checking --------------------------------------------------------------------------------- */

fsdp_status fsdp_mesh_check_dims(const fsdp_mesh *mesh, const fsdp_dim_names *names,
                                 int reshard_after_forward, fsdp_error *err)
{
    unsigned shard, replicate, all = (1u << fsdp_mesh_ndim(mesh)) - 1;
    int k = reshard_after_forward;
    FSDP_TRY(choose_dims(mesh, names, &shard, &replicate, err));
    if (k <= FSDP_RESHARD_ALWAYS)
        return FSDP_OK;
    int64_t ranks = product(mesh, shard);
    if (ranks % k != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s: reshard_after_forward is %d, which does not divide the %lld "
                         "ranks that share its parameters",
                         names->unit, k, (long long)ranks);
    if (product(mesh, all & ~shard & ~replicate) > 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "unit %s: reshard_after_forward is a number, which cannot be combined "
                         "with tensor parallelism",
                         names->unit);
    return FSDP_OK;
}

/* --- one mesh for the group ------------------------------------------------------------------- */

/* Each dim of the group's own mesh is a set of dims of the given one. */
typedef struct dim_sets {
    unsigned dims[FSDP_MAX_MESH_DIMS];
    int count;
} dim_sets;

/* Returns the dims that replicate, those that shard, then each other dim by itself. */
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
                             "unit %s: the names of mesh dims that are combined have more than %d "
                             "bytes together",
                             group->name, FSDP_MAX_MESH_NAME);
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

/* Makes the group's own mesh. */
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
    return fsdp_mesh_create(sets.count, shape, names, group->ranks, &group->made_mesh, err);
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

fsdp_status fsdp_group_choose_mesh(fsdp_group *group, const fsdp_mesh *mesh,
                                   const fsdp_dim_names *names, fsdp_error *err)
{
    fsdp_mesh_roles *roles = &group->roles;
    unsigned shard, replicate, all = (1u << fsdp_mesh_ndim(mesh)) - 1;
    FSDP_TRY(choose_dims(mesh, names, &shard, &replicate, err));
    if (is_one_dim(shard) && is_one_dim(replicate)) {
        *roles = (fsdp_mesh_roles){.mesh = mesh,
                                   .shard_dim = dim_of(shard),
                                   .replicate_dim = dim_of(replicate),
                                   .tensor_dims = all & ~shard & ~replicate};
        return FSDP_OK;
    }
    FSDP_TRY(flatten(group, mesh, replicate, shard, err));
    roles->mesh = group->made_mesh;
    roles->replicate_dim = replicate ? 0 : -1;
    roles->shard_dim = shard ? roles->replicate_dim + 1 : -1;
    unsigned used = (shard ? 1u << roles->shard_dim : 0) | (replicate ? 1u : 0);
    roles->tensor_dims = ((1u << fsdp_mesh_ndim(roles->mesh)) - 1) & ~used;
    return FSDP_OK;
}

/* --- communicators ---------------------------------------------------------------------------- */

static unsigned bit_of(int dim)
{
    return dim < 0 ? 0 : 1u << dim;
}

static fsdp_status connect_again(fsdp_group *group, int k, fsdp_error *err)
{
    unsigned dims = bit_of(group->roles.replicate_dim) | bit_of(group->roles.shard_dim);
    group->again_size = k;
    group->again_rank = group->shard_rank % k;
    return connect(group, dims, k, false, &group->again, err);
}

/* group->ranks has the shard groups. */
static void note_hosts(const fsdp_group *group)
{
    const int64_t ranks = fsdp_mesh_size(group->roles.mesh);
    const fsdp_rank_groups groups = {.ranks = group->ranks,
                                     .size = group->shard_size,
                                     .count = (int)(ranks / group->shard_size)};
    if (group->shard_size > 1)
        fsdp_world_note_hosts(group->context->world, &groups, group->name);
}

fsdp_status fsdp_group_connect(fsdp_group *group, fsdp_error *err)
{
    const fsdp_mesh *mesh = group->roles.mesh;
    unsigned shard = bit_of(group->roles.shard_dim), replicate = bit_of(group->roles.replicate_dim);
    group->shard_size = (int)product(mesh, shard);
    group->replicate_size = (int)product(mesh, replicate);
    group->shard_rank = (int)local_index(mesh, shard, group->context->world->rank);
    if (group->shard_size > 1)
        FSDP_TRY(connect(group, shard, group->shard_size, false, &group->shard, err));
    note_hosts(group);
    group->reduce = group->shard;
    if (group->shard_size > 1 && group->settings->is_separate)
        FSDP_TRY(connect(group, shard, group->shard_size, true, &group->reduce, err));
    if (group->replicate_size > 1)
        FSDP_TRY(connect(group, replicate, group->replicate_size, false, &group->replicate, err));
    int k = group->settings->reshard_after_forward;
    bool is_part = k > FSDP_RESHARD_ALWAYS && k < group->shard_size;
    return is_part ? connect_again(group, k, err) : FSDP_OK;
}

fsdp_status fsdp_group_separate_reduce(fsdp_group *group, fsdp_error *err)
{
    group->reduce = group->shard;
    if (group->shard_size == 1 || !group->settings->is_separate)
        return FSDP_OK;
    return connect(group, bit_of(group->roles.shard_dim), group->shard_size, true, &group->reduce,
                   err);
}

/* --- memory ----------------------------------------------------------------------------------- */

fsdp_allocator fsdp_group_allocator(const fsdp_group *group, const fsdp_custom_collective *custom,
                                    const fsdp_ordered_comm *ordered)
{
    if (custom && custom->alloc)
        return fsdp_allocator_of_custom(custom);
    bool has_memory = group->context->device->ops->is_host ||
                      (ordered && fsdp_comm_abilities(ordered->comm) & FSDP_COMM_DEVICE_MEMORY);
    bool uses_comm = group->settings->takes_comm_memory && ordered && has_memory;
    return fsdp_allocator_of_comm(uses_comm ? ordered->comm : NULL);
}
