/*
 * Worlds: the ranks of one program and the communicators between them. A communicator is created
 * once per set of ranks, by all ranks in the same order, and kept until the world ends. See
 * world.h.
 */
#include "runtime/launch/world_internal.h"

#include <stdio.h>
#include <string.h>

#include "base/core/fnv.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/sd/layout_internal.h"

/* --- making one ------------------------------------------------------------------------------- */

void fsdp_world_parts_release(const fsdp_world_parts *parts)
{
    if (parts->transport)
        parts->transport->ops->close(parts->transport);
    fsdp_ctl_free(parts->ctl);
    fsdp_device_close(parts->device);
    (void)!fsdp_trace_close(parts->trace, NULL);
}

fsdp_status fsdp_world_create(const fsdp_world_parts *parts, fsdp_world **world_out,
                              fsdp_error *err)
{
    fsdp_world *world = fsdp_alloc(1, sizeof *world);
    if (!world) {
        fsdp_world_parts_release(parts);
        return fsdp_fail_memory(err, "a world");
    }
    world->parts = *parts;
    world->rank = fsdp_ctl_rank(parts->ctl);
    world->size = fsdp_ctl_size(parts->ctl);
    fsdp_ctl_set_deadline(parts->ctl, parts->deadline_ms);
    *world_out = world;
    return FSDP_OK;
}

static void free_comm(fsdp_ordered_comm *ordered)
{
    if (!ordered)
        return;
    fsdp_comm_free(ordered->comm);
    fsdp_free(ordered->ranks);
    fsdp_free(ordered);
}

void fsdp_world_free(fsdp_world *world)
{
    if (!world)
        return;
    fsdp_world_end_children(world);
    for (size_t i = 0; i < world->comm_count; i++)
        free_comm(world->comms[i]);
    fsdp_free(world->comms);
    fsdp_world_parts_release(&world->parts);
    fsdp_free(world);
}

void fsdp_world_trace(fsdp_world *world, const char *event, int64_t bytes)
{
    fsdp_trace_add(
        world->parts.trace,
        &(fsdp_trace_event){.event = event, .unit = "", .state = "idle", .bytes = bytes});
}

void fsdp_world_mark(fsdp_world *world, const char *event)
{
    if (world && event)
        fsdp_trace_add(world->parts.trace,
                       &(fsdp_trace_event){.event = "mark", .unit = event, .bytes = -1});
}

int fsdp_world_rank(const fsdp_world *world)
{
    if (!world)
        return 0;
    return world->rank;
}

int fsdp_world_size(const fsdp_world *world)
{
    if (!world)
        return 0;
    return world->size;
}

int fsdp_world_local_rank(const fsdp_world *world)
{
    if (!world)
        return 0;
    return world->parts.local_rank;
}

int fsdp_world_local_size(const fsdp_world *world)
{
    if (!world)
        return 0;
    return world->parts.local_size;
}

fsdp_ctl *fsdp_world_ctl(fsdp_world *world)
{
    if (!world)
        return NULL;
    return world->parts.ctl;
}

/* --- communicators ---------------------------------------------------------------------------- */

static fsdp_ordered_comm *find_comm(const fsdp_world *world, const int *ranks, int size,
                                    bool is_separate)
{
    for (size_t i = 0; i < world->comm_count; i++) {
        fsdp_ordered_comm *ordered = world->comms[i];
        if (ordered->size == size && ordered->is_separate == is_separate &&
            memcmp(ordered->ranks, ranks, (size_t)size * sizeof *ranks) == 0)
            return ordered;
    }
    return NULL;
}

static fsdp_ordered_comm *make_comm(const int *ranks, int size, bool is_separate)
{
    fsdp_ordered_comm *ordered = fsdp_alloc(1, sizeof *ordered);
    int *copy = fsdp_alloc((size_t)size, sizeof *copy);
    if (!ordered || !copy) {
        fsdp_free(ordered);
        fsdp_free(copy);
        return NULL;
    }
    memcpy(copy, ranks, (size_t)size * sizeof *ranks);
    *ordered = (fsdp_ordered_comm){.ranks = copy, .size = size, .is_separate = is_separate};
    return ordered;
}

/* All ranks agree before they begin, so that none waits for a rank without memory. */
static fsdp_status add_comm(fsdp_world *world, const int *ranks, int size, bool is_separate,
                            fsdp_ordered_comm **ordered_out, fsdp_error *err)
{
    fsdp_transport *transport = world->parts.transport;
    bool has_room = fsdp_grow(&world->comms, &world->comm_room, world->comm_count + 1,
                              sizeof(fsdp_ordered_comm *));
    fsdp_ordered_comm *ordered = has_room ? make_comm(ranks, size, is_separate) : NULL;
    fsdp_status status = ordered ? FSDP_OK : fsdp_fail_memory(err, "a group of ranks");
    status = fsdp_ctl_agree(world->parts.ctl, status, err);
    if (status == FSDP_OK)
        status = transport->ops->comm_create(transport, ranks, size, &ordered->comm, err);
    if (status != FSDP_OK) {
        free_comm(ordered);
        return status;
    }
    world->comms[world->comm_count++] = ordered;
    *ordered_out = ordered;
    return FSDP_OK;
}

fsdp_status fsdp_world_ordered_comm(fsdp_world *world, const int *ranks, int size, bool is_separate,
                                    fsdp_ordered_comm **ordered_out, fsdp_error *err)
{
    fsdp_ordered_comm *ordered = find_comm(world, ranks, size, is_separate);
    if (!ordered)
        FSDP_TRY(add_comm(world, ranks, size, is_separate, &ordered, err));
    *ordered_out = ordered->comm ? ordered : NULL;
    return FSDP_OK;
}

/* --- meshes ----------------------------------------------------------------------------------- */

/* The dims from `dim` to `last`, seen as one: runs of ranks at equal steps. */
typedef struct mesh_span {
    int64_t size, step, blocks;
} mesh_span;

static mesh_span span_of(const fsdp_mesh *mesh, int dim, int last)
{
    mesh_span span = {.size = 1, .step = 1, .blocks = 1};
    for (int i = 0; i < fsdp_mesh_ndim(mesh); i++)
        *(i < dim     ? &span.blocks
          : i <= last ? &span.size
                      : &span.step) *= fsdp_mesh_dim_size(mesh, i);
    return span;
}

static int rank_in_span(const fsdp_mesh *mesh, const mesh_span *span, int64_t group, int64_t i)
{
    int64_t first = group / span->step * span->step * span->size + group % span->step;
    return fsdp_mesh_rank_at(mesh, first + i * span->step);
}

static void list_ranks(const fsdp_mesh *mesh, const mesh_span *span, int64_t group, int *ranks)
{
    for (int64_t i = 0; i < span->size; i++)
        ranks[i] = rank_in_span(mesh, span, group, i);
}

static bool is_comm_of(const fsdp_ordered_comm *ordered, const fsdp_mesh *mesh,
                       const mesh_span *span, int64_t group)
{
    if (ordered->size != span->size || ordered->is_separate)
        return false;
    for (int64_t i = 0; i < span->size; i++)
        if (ordered->ranks[i] != rank_in_span(mesh, span, group, i))
            return false;
    return true;
}

static fsdp_status connect_span(fsdp_world *world, const fsdp_mesh *mesh, int dim, int last,
                                int *ranks, fsdp_error *err)
{
    const mesh_span span = span_of(mesh, dim, last);
    fsdp_ordered_comm *ordered;
    for (int64_t group = 0; group < span.blocks * span.step; group++) {
        list_ranks(mesh, &span, group, ranks);
        FSDP_TRY(fsdp_world_ordered_comm(world, ranks, (int)span.size, false, &ordered, err));
    }
    return FSDP_OK;
}

/* A digest of a mesh, which must be equal on all ranks. */
typedef struct mesh_print {
    int64_t ndim, shape[FSDP_MAX_MESH_DIMS];
    uint64_t ranks, names; /* hashes */
} mesh_print;

static mesh_print print_of(const fsdp_mesh *mesh)
{
    mesh_print print = {
        .ndim = fsdp_mesh_ndim(mesh), .ranks = FSDP_FNV_BEGIN, .names = FSDP_FNV_BEGIN};
    for (int i = 0; i < fsdp_mesh_ndim(mesh); i++) {
        const char *name = fsdp_mesh_dim_name(mesh, i);
        print.shape[i] = fsdp_mesh_dim_size(mesh, i);
        print.names = fsdp_fnv(print.names, name, strlen(name) + 1);
    }
    for (int64_t i = 0; i < fsdp_mesh_size(mesh); i++) {
        int rank = fsdp_mesh_rank_at(mesh, i);
        print.ranks = fsdp_fnv(print.ranks, &rank, sizeof rank);
    }
    return print;
}

static void spell_shape(const mesh_print *print, char *out, size_t out_size)
{
    size_t used = 0;
    out[0] = '\0';
    for (int i = 0; i < print->ndim && i < FSDP_MAX_MESH_DIMS && used < out_size; i++)
        used += (size_t)snprintf(out + used, out_size - used, "%s%lld", i > 0 ? "x" : "",
                                 (long long)print->shape[i]);
}

static const char *other_than_shape(const mesh_print *first, const mesh_print *other)
{
    if (first->ndim != other->ndim || memcmp(first->shape, other->shape, sizeof first->shape) != 0)
        return "";
    return first->ranks != other->ranks ? " with other ranks" : " with other names";
}

static fsdp_status compare_prints(const fsdp_world *world, const mesh_print *all, fsdp_error *err)
{
    char first[96], other[96];
    for (int i = 1; i < world->size; i++) {
        if (memcmp(&all[i], &all[0], sizeof *all) == 0)
            continue;
        spell_shape(&all[0], first, sizeof first);
        spell_shape(&all[i], other, sizeof other);
        err->rank = i;
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "rank %d connects a mesh of %s, rank 0 one of %s%s: all ranks must make "
                         "the same meshes in the same order",
                         i, other, first, other_than_shape(&all[0], &all[i]));
    }
    return FSDP_OK;
}

/* Collective. Brings this rank's own failure to the others, and compares what they connect. */
static fsdp_status agree_on_mesh(fsdp_world *world, const fsdp_mesh *mesh, fsdp_status status,
                                 fsdp_error *err)
{
    fsdp_error mine = {0};
    const mesh_print print = print_of(mesh);
    mesh_print *all = fsdp_alloc((size_t)world->size, sizeof *all);
    if (status == FSDP_OK && !all)
        status = fsdp_fail_memory(err, "the meshes of all ranks");
    status = fsdp_ctl_agree(world->parts.ctl, status, err);
    if (status == FSDP_OK)
        status = fsdp_ctl_allgather(world->parts.ctl, &print, sizeof print, all, err);
    if (status == FSDP_OK)
        status = compare_prints(world, all, &mine);
    if (mine.status != FSDP_OK && err)
        *err = mine;
    fsdp_free(all);
    return status;
}

static fsdp_status check_ranks(const fsdp_world *world, const fsdp_mesh *mesh, fsdp_error *err)
{
    for (int64_t i = 0; i < fsdp_mesh_size(mesh); i++)
        if (fsdp_mesh_rank_at(mesh, i) >= world->size)
            return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh holds rank %d, the world has %d ranks",
                             fsdp_mesh_rank_at(mesh, i), world->size);
    return FSDP_OK;
}

/* Dims one by one, then neighbouring ones together. */
static fsdp_status connect_mesh(fsdp_world *world, const fsdp_mesh *mesh, fsdp_error *err)
{
    int ndim = fsdp_mesh_ndim(mesh);
    fsdp_status status = check_ranks(world, mesh, err);
    int *ranks = fsdp_alloc((size_t)fsdp_mesh_size(mesh), sizeof *ranks);
    if (status == FSDP_OK && !ranks)
        status = fsdp_fail_memory(err, "the groups of a mesh");
    status = agree_on_mesh(world, mesh, status, err);
    for (int count = 1; count <= ndim; count++)
        for (int dim = 0; dim + count <= ndim && status == FSDP_OK; dim++)
            status = connect_span(world, mesh, dim, dim + count - 1, ranks, err);
    fsdp_free(ranks);
    return status;
}

fsdp_status fsdp_world_connect(fsdp_world *world, const fsdp_mesh *mesh, fsdp_error *err)
{
    FSDP_NEED(err, world, mesh);
    const char *outer = fsdp_ctl_begin_public(world->parts.ctl, "fsdp_world_connect");
    fsdp_status status = connect_mesh(world, mesh, err);
    fsdp_ctl_end_public(world->parts.ctl, outer);
    return status;
}

fsdp_status fsdp_world_mesh(fsdp_world *world, int ndim, const int64_t *shape,
                            const char *const *names, fsdp_mesh **mesh_out, fsdp_error *err)
{
    FSDP_NEED(err, world, mesh_out);
    fsdp_mesh *mesh = NULL;
    fsdp_status status = fsdp_mesh_create(ndim, shape, names, NULL, &mesh, err);
    if (status == FSDP_OK && fsdp_mesh_size(mesh) != world->size)
        status = fsdp_fail(err, FSDP_ERR_USAGE, "the mesh is of %lld ranks, the world has %d",
                           (long long)fsdp_mesh_size(mesh), world->size);
    const char *outer = fsdp_ctl_begin_public(world->parts.ctl, "fsdp_world_mesh");
    status = fsdp_ctl_agree(world->parts.ctl, status, err);
    if (status == FSDP_OK)
        status = connect_mesh(world, mesh, err);
    fsdp_ctl_end_public(world->parts.ctl, outer);
    if (status == FSDP_OK)
        *mesh_out = mesh;
    else
        fsdp_mesh_free(mesh);
    return status;
}

/* Allocates nothing: NULL means only that there is no such communicator. */
fsdp_ordered_comm *fsdp_world_find_comm(fsdp_world *world, const fsdp_mesh *mesh, int dim,
                                        int last_dim)
{
    const mesh_span span = span_of(mesh, dim, last_dim);
    int64_t coord[FSDP_MAX_MESH_DIMS];
    if (dim < 0 || last_dim < dim || last_dim >= fsdp_mesh_ndim(mesh) ||
        !fsdp_mesh_coord(mesh, world->rank, coord))
        return NULL;
    int64_t at = 0;
    for (int i = 0; i < fsdp_mesh_ndim(mesh); i++)
        at = at * fsdp_mesh_dim_size(mesh, i) + coord[i];
    int64_t group = at / (span.step * span.size) * span.step + at % span.step;
    for (size_t i = 0; i < world->comm_count; i++)
        if (is_comm_of(world->comms[i], mesh, &span, group))
            return world->comms[i]->comm ? world->comms[i] : NULL;
    return NULL;
}

fsdp_comm *fsdp_world_comm(fsdp_world *world, const fsdp_mesh *mesh, int dim, int last_dim)
{
    if (!world || !mesh)
        return NULL;
    fsdp_ordered_comm *ordered = fsdp_world_find_comm(world, mesh, dim, last_dim);
    return ordered ? ordered->comm : NULL;
}
