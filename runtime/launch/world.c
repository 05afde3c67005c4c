/*
 * Worlds: the ranks of one program and the communicators between them. A communicator is created
 * once per set of ranks, by all ranks in the same order, and kept until the world ends. See
 * world.h.
 */
#include "runtime/launch/world_internal.h"
#include "base/core/clock.h"
#include "base/core/fnv.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/core/reported.h"
#include "base/io/process.h"
#include "runtime/bootstrap/ctl_tcp.h"
#include "runtime/bootstrap/rendezvous.h"
#include "runtime/comm_message/message_transport.h"
#include "runtime/comm_message/p2p_tcp.h"
#include "runtime/comm_nccl/transport_nccl.h"
#include "runtime/comm_shared/shared_transports.h"
#include "runtime/device/numa.h"
#include "runtime/launch/launch_internal.h"
#include "runtime/launch/mpi_library.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/sd/layout_internal.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* === a second control plane =================================================================== */

/*
 * A second control plane of a world, for a thread of its own next to the training: another group of the
 * threads, a second rendezvous over TCP, or a duplicate of MPI's communicator.
 */

/* --- over TCP --------------------------------------------------------------------------------- */

/* The rendezvous of ranks that are connected already: rank 0 has sent its port. */
typedef struct second_job {
    fsdp_ctl *ctl;
    int32_t port;
    int listener; /* of rank 0 */
    bool is_one_host;
    char id[2 * FSDP_SHA256_SIZE + 8];
} second_job;

static void describe_job(second_job *job)
{
    uint8_t digest[FSDP_SHA256_SIZE] = {0};
    char host[FSDP_HOST_SIZE];
    int rank = fsdp_ctl_rank(job->ctl);
    job->is_one_host = true;
    for (int i = 0; i < fsdp_ctl_size(job->ctl); i++)
        job->is_one_host &= i == rank || (fsdp_ctl_tcp_find(job->ctl, i, host, digest) &&
                                          fsdp_host_is_loopback(host));
    for (int i = 0; i < FSDP_SHA256_SIZE; i++)
        snprintf(job->id + 2 * i, 3, "%02x", digest[i]);
    memcpy(job->id + 2 * FSDP_SHA256_SIZE, "/second", sizeof "/second");
}

static fsdp_status find_rank_0(void *context, char host_out[FSDP_HOST_SIZE], int *port_out,
                               int64_t until_ms, fsdp_error *err)
{
    const second_job *job = context;
    uint8_t digest[FSDP_SHA256_SIZE];
    (void)until_ms;
    (void)err;
    (void)fsdp_ctl_tcp_find(job->ctl, 0, host_out, digest);
    *port_out = job->port;
    return FSDP_OK;
}

static fsdp_status rendezvous_again(fsdp_ctl *ctl, int deadline_ms, fsdp_ctl **ctl_out,
                                    fsdp_error *err)
{
    second_job job = {.ctl = ctl, .listener = -1};
    fsdp_status status = FSDP_OK;
    describe_job(&job);
    if (fsdp_ctl_rank(ctl) == 0)
        status = fsdp_socket_listen(job.is_one_host ? FSDP_LOOPBACK : NULL, 0, &job.listener, err);
    if (job.listener >= 0)
        job.port = fsdp_socket_port(job.listener);
    status = fsdp_ctl_agree_broadcast(ctl, status, 0, &job.port, sizeof job.port, err);
    if (status != FSDP_OK) {
        fsdp_socket_close(&job.listener);
        return status;
    }
    const fsdp_rendezvous_spec spec = {.rank = fsdp_ctl_rank(ctl),
                                       .size = fsdp_ctl_size(ctl),
                                       .job = job.id,
                                       .is_one_host = job.is_one_host,
                                       .deadline_ms = deadline_ms,
                                       .listener = job.listener,
                                       .find = find_rank_0,
                                       .context = &job};
    return fsdp_rendezvous(&spec, ctl_out, err);
}

/* --- any back end ----------------------------------------------------------------------------- */

static fsdp_status connect_again(fsdp_world *world, fsdp_ctl **ctl_out, fsdp_error *err)
{
    const fsdp_mpi_functions *mpi = NULL;
    fsdp_ctl *ctl = world->parts.ctl;
    if (world->size == 1)
        return fsdp_ctl_self(ctl_out, err);
    if (strcmp(ctl->ops->name, "threads") == 0)
        return fsdp_ctl_threads_again(ctl, ctl_out, err);
    if (strcmp(ctl->ops->name, "tcp") == 0)
        return rendezvous_again(ctl, world->parts.deadline_ms, ctl_out, err);
    fsdp_status status = fsdp_mpi_library_open(&mpi, err);
    FSDP_TRY(fsdp_ctl_agree(ctl, status, err));
    return mpi->ctl_again(ctl, ctl_out, err);
}

fsdp_status fsdp_world_second_ctl(fsdp_world *world, fsdp_ctl **ctl_out, fsdp_error *err)
{
    fsdp_ctl *made = NULL;
    fsdp_status status = connect_again(world, &made, err);
    status = fsdp_ctl_agree(world->parts.ctl, status, err);
    if (status != FSDP_OK) {
        fsdp_ctl_free(made);
        return status;
    }
    fsdp_ctl_set_deadline(made, world->parts.deadline_ms);
    *ctl_out = made;
    return FSDP_OK;
}

/* --- what ends with the world ----------------------------------------------------------------- */

void fsdp_world_adopt(fsdp_world *world, fsdp_world_child *child)
{
    child->next = world->children;
    world->children = child;
}

void fsdp_world_disown(fsdp_world *world, fsdp_world_child *child)
{
    fsdp_world_child **at = &world->children;
    while (*at && *at != child)
        at = &(*at)->next;
    if (*at)
        *at = child->next;
}

static void world_end_children(fsdp_world *world)
{
    while (world->children) {
        fsdp_world_child *child = world->children;
        world->children = child->next;
        child->end(child);
    }
}

/* === values of all ranks ====================================================================== */

/*
 * Values that all ranks combine, the time that a rank needs, and its reason to fail, which go to the other
 * ranks.
 */

/* --- sums ------------------------------------------------------------------------------------- */

typedef double (*combine_values)(double a, double b);

static double add(double a, double b)
{
    return a + b;
}

static double larger(double a, double b)
{
    return isnan(a) || a > b ? a : b; /* NaN wins */
}

static fsdp_status make_room(const fsdp_world *world, const char *call, const double *values,
                             size_t count, double **all_out, fsdp_error *err)
{
    const size_t ranks = (size_t)world->size;
    if (!values && count > 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s: 'values' is NULL", call);
    if (count <= SIZE_MAX / sizeof(double) / ranks)
        *all_out = fsdp_alloc(count > 0 ? count * ranks : 1, sizeof **all_out);
    return *all_out ? FSDP_OK : fsdp_fail_memory(err, "the values of all ranks");
}

/* In rank order, so that the bits depend on no timing. */
static fsdp_status combine(fsdp_world *world, const char *call, double *values, size_t count,
                           combine_values how, fsdp_error *err)
{
    double *all = NULL;
    fsdp_ctl *ctl = world->parts.ctl;
    const char *outer = fsdp_ctl_begin_public(ctl, call);
    fsdp_status status = make_room(world, call, values, count, &all, err);
    status = fsdp_ctl_agree_allgather(ctl, status, values, count * sizeof *values, all, err);
    fsdp_ctl_end_public(ctl, outer);
    for (size_t i = 0; status == FSDP_OK && i < count; i++) {
        double result = all[i];
        for (int rank = 1; rank < world->size; rank++)
            result = how(result, all[(size_t)rank * count + i]);
        values[i] = result;
    }
    fsdp_free(all);
    return status;
}

fsdp_status fsdp_world_sum(fsdp_world *world, double *values, size_t count, fsdp_error *err)
{
    FSDP_NEED(err, world);
    return combine(world, "fsdp_world_sum", values, count, add, err);
}

fsdp_status fsdp_world_max(fsdp_world *world, double *values, size_t count, fsdp_error *err)
{
    FSDP_NEED(err, world);
    return combine(world, "fsdp_world_max", values, count, larger, err);
}

fsdp_status fsdp_world_mean(fsdp_world *world, double *value, fsdp_error *err)
{
    FSDP_NEED(err, world, value);
    FSDP_TRY(combine(world, "fsdp_world_mean", value, 1, add, err));
    *value /= world->size;
    return FSDP_OK;
}

/* --- time ------------------------------------------------------------------------------------- */

fsdp_status fsdp_world_set_deadline(fsdp_world *world, int milliseconds, fsdp_error *err)
{
    const fsdp_mpi_functions *mpi = NULL;
    FSDP_NEED(err, world);
    if (milliseconds < 1)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot set a deadline of %d ms: the minimum is 1 ms",
                         milliseconds);
    if (strcmp(world->parts.ctl->ops->name, "mpi") == 0) {
        FSDP_TRY(fsdp_mpi_library_open(&mpi, err));
        mpi->set_deadline(milliseconds);
    }
    world->parts.deadline_ms = milliseconds;
    world->parts.transport->deadline_ms = milliseconds;
    fsdp_ctl_set_deadline(world->parts.ctl, milliseconds);
    return FSDP_OK;
}

static void set_busy(fsdp_world *world, int milliseconds)
{
    fsdp_transport *transport = world ? world->parts.transport : NULL;
    if (transport && transport->ops->set_busy)
        transport->ops->set_busy(transport, fsdp_now_ms() + milliseconds);
}

void fsdp_world_begin_busy(fsdp_world *world, int milliseconds)
{
    if (milliseconds > 0)
        set_busy(world, milliseconds);
}

void fsdp_world_end_busy(fsdp_world *world)
{
    set_busy(world, 0);
}

/* --- failures --------------------------------------------------------------------------------- */

void fsdp_world_note_failure(fsdp_world *world, const fsdp_error *why)
{
    bool is_own = why->status != FSDP_OK && why->status != FSDP_ERR_PEER;
    if (is_own && world->reason.status == FSDP_OK)
        world->reason = *why;
}

int fsdp_world_fail(fsdp_world *world, const fsdp_error *err)
{
    if (!err)
        return FSDP_OK;
    if (world && err->status != FSDP_OK) {
        world->reason = *err;
        world->is_reason_given = true;
    }
    return (int)err->status;
}

/* === worlds =================================================================================== */

/* --- making one ------------------------------------------------------------------------------- */

void fsdp_world_parts_release(const fsdp_world_parts *parts)
{
    if (parts->transport)
        parts->transport->ops->close(parts->transport);
    fsdp_ctl_free(parts->ctl);
    fsdp_device_close(parts->device);
    fsdp_free(parts->hosts);
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
    world_end_children(world);
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

/* Local: the ends of groups that this rank will have, without communicators. */
static fsdp_status make_comms(fsdp_world *world, const fsdp_rank_groups *groups, bool is_separate,
                              fsdp_error *err)
{
    bool has_room =
        fsdp_grow(&world->comms, &world->comm_room, world->comm_count + (size_t)groups->count,
                  sizeof(fsdp_ordered_comm *));
    for (int i = 0; i < groups->count && has_room; i++) {
        fsdp_ordered_comm *ordered =
            make_comm(groups->ranks + i * groups->size, groups->size, is_separate);
        has_room = ordered != NULL;
        if (ordered)
            world->comms[world->comm_count++] = ordered;
    }
    return has_room ? FSDP_OK : fsdp_fail_memory(err, "groups of ranks");
}

/* All ranks agree before they begin, so that none waits for a rank without memory. */
static fsdp_status add_comms(fsdp_world *world, const fsdp_rank_groups *groups, bool is_separate,
                             fsdp_error *err)
{
    fsdp_transport *transport = world->parts.transport;
    const size_t before = world->comm_count;
    fsdp_comm *made = NULL;
    fsdp_status status = make_comms(world, groups, is_separate, err);
    status = fsdp_ctl_agree(world->parts.ctl, status, err);
    if (status == FSDP_OK)
        status = transport->ops->comm_create(transport, groups->ranks, groups->size, groups->count,
                                             &made, err);
    if (status != FSDP_OK) {
        while (world->comm_count > before)
            free_comm(world->comms[--world->comm_count]);
        return status;
    }
    for (size_t i = before; made && i < world->comm_count; i++)
        if (world->comms[i]->ranks[0] == made->ranks[0])
            world->comms[i]->comm = made;
    return FSDP_OK;
}

/* This rank's among groups that are all there; NULL: it is in none. */
static fsdp_ordered_comm *find_own(const fsdp_world *world, const fsdp_rank_groups *groups,
                                   bool is_separate)
{
    fsdp_ordered_comm *own = NULL;
    for (int i = 0; i < groups->count && !own; i++) {
        fsdp_ordered_comm *ordered =
            find_comm(world, groups->ranks + i * groups->size, groups->size, is_separate);
        own = ordered->comm ? ordered : NULL;
    }
    return own;
}

fsdp_status fsdp_world_ordered_comm(fsdp_world *world, const fsdp_rank_groups *groups,
                                    bool is_separate, fsdp_ordered_comm **ordered_out,
                                    fsdp_error *err)
{
    const size_t size = (size_t)groups->size;
    int *ranks = fsdp_alloc(size * (size_t)groups->count, sizeof *ranks);
    fsdp_rank_groups missing = {.ranks = ranks, .size = groups->size};
    fsdp_status status = ranks ? FSDP_OK : fsdp_fail_memory(err, "groups of ranks");
    for (int i = 0; i < groups->count && ranks; i++) {
        const int *group = groups->ranks + i * groups->size;
        if (!find_comm(world, group, groups->size, is_separate))
            memcpy(ranks + missing.count++ * groups->size, group, size * sizeof *ranks);
    }
    if (missing.count > 0)
        status = add_comms(world, &missing, is_separate, err);
    if (status == FSDP_OK)
        *ordered_out = find_own(world, groups, is_separate);
    fsdp_free(ranks);
    return status;
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
    const fsdp_rank_groups groups = {
        .ranks = ranks, .size = (int)span.size, .count = (int)(span.blocks * span.step)};
    fsdp_ordered_comm *ordered;
    for (int64_t i = 0; i < fsdp_mesh_size(mesh); i++)
        ranks[i] = rank_in_span(mesh, &span, i / span.size, i % span.size);
    return fsdp_world_ordered_comm(world, &groups, false, &ordered, err);
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
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "rank %d connects a mesh of %s, but rank 0 one of %s%s; all ranks must make "
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
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "the mesh holds rank %d, but the world has %d ranks",
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
        status = fsdp_fail(err, FSDP_ERR_USAGE, "the mesh has %lld ranks, but the world has %d",
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

/* === the memory of GPUs ======================================================================= */

/* Decides whether NCCL moves the memory of ranks' GPUs, or ranks that are threads do it themselves. */

/* What is known of the GPUs of all ranks. */
typedef struct gpu_survey {
    int gpus, most;  /* together; the most ranks that share one */
    fsdp_gpu shared; /* one that so many share */
    int hidden[2];   /* two ranks of a host that see no GPU but their own; equal: there are none */
} gpu_survey;

/* A rank's. */
typedef struct gpu_place {
    uint64_t host;
    fsdp_gpu gpu;
} gpu_place;

static bool is_same_gpu(const gpu_place *a, const gpu_place *b)
{
    return a->host == b->host && strcmp(a->gpu.bus, b->gpu.bus) == 0 &&
           memcmp(a->gpu.uuid, b->gpu.uuid, sizeof a->gpu.uuid) == 0;
}

static bool hide_from_each_other(const gpu_place *a, const gpu_place *b)
{
    return a->host == b->host && !is_same_gpu(a, b) && a->gpu.visible == 1 && b->gpu.visible == 1;
}

static void note_place(const gpu_place *all, int i, int ranks, gpu_survey *out)
{
    int before = 0, same = 0;
    while (!is_same_gpu(&all[before], &all[i]))
        before++;
    out->gpus += before == i;
    for (int j = before; j < ranks; j++) {
        same += is_same_gpu(&all[j], &all[i]);
        if (hide_from_each_other(&all[i], &all[j]) && out->hidden[0] == out->hidden[1])
            out->hidden[0] = i, out->hidden[1] = j;
    }
    if (same <= out->most)
        return;
    out->most = same;
    out->shared = all[i].gpu;
}

/* Collective. Keeps the hosts of all ranks. */
static fsdp_status survey_gpus(fsdp_world_parts *parts, gpu_survey *out, fsdp_error *err)
{
    const int ranks = fsdp_ctl_size(parts->ctl);
    gpu_place mine, *all = fsdp_alloc((size_t)ranks, sizeof *all);
    memset(&mine, 0, sizeof mine);
    mine.host = parts->host;
    mine.gpu = *parts->device->ops->choose_gpu(parts->device);
    parts->hosts = fsdp_alloc((size_t)ranks, sizeof *parts->hosts);
    fsdp_status status =
        all && parts->hosts ? FSDP_OK : fsdp_fail_memory(err, "the GPUs of all ranks");
    status = fsdp_ctl_agree_allgather(parts->ctl, status, &mine, sizeof mine, all, err);
    *out = (gpu_survey){0};
    for (int i = 0; i < ranks && status == FSDP_OK; i++) {
        note_place(all, i, ranks, out);
        parts->hosts[i] = all[i].host;
    }
    fsdp_free(all);
    return status;
}

/* CUDA cannot map memory of a GPU that a cgroup hides from the process, so NCCL takes a slower way. */
static void warn_of_hidden(const fsdp_world_parts *parts, const gpu_survey *gpus)
{
    char text[300];
    if (gpus->hidden[0] == gpus->hidden[1] || !parts->warn || fsdp_ctl_rank(parts->ctl) != 0)
        return;
    snprintf(text, sizeof text,
             "ranks %d and %d are on one host, and each sees no GPU but its own: if cgroups hide "
             "the others, NCCL moves data through the host's memory; show each rank all GPUs of "
             "its host (srun --gpus-per-node, without --gpus-per-task)",
             gpus->hidden[0], gpus->hidden[1]);
    parts->warn(text);
}

static int count_hosts_of(const fsdp_world *world, const int *ranks, int size)
{
    const uint64_t *hosts = world->parts.hosts;
    int count = 0;
    for (int i = 0; i < size; i++) {
        int before = 0;
        while (hosts[ranks[before]] != hosts[ranks[i]])
            before++;
        count += before == i;
    }
    return count;
}

void fsdp_world_note_hosts(fsdp_world *world, const fsdp_rank_groups *groups, const char *unit)
{
    char text[500];
    if (!world->parts.hosts || !world->parts.warn || world->rank != 0 || world->has_noted_hosts)
        return;
    int hosts = 1;
    for (int i = 0; i < groups->count && hosts == 1; i++)
        hosts = count_hosts_of(world, groups->ranks + i * groups->size, groups->size);
    if (hosts == 1)
        return;
    world->has_noted_hosts = true;
    snprintf(text, sizeof text,
             "the %d ranks that shard unit %s are on %d hosts, so each gather goes over the "
             "network; if the GPUs of one host have room for the state, a mesh of hosts and of "
             "the ranks of a host keeps gathers there (docs/gpu.md, \"NCCL\")",
             groups->size, unit, hosts);
    world->parts.warn(text);
}

/* Kernels of a GPU do not reach the memory of another one. */
static fsdp_status decide_threads(const fsdp_launch_options *options, int ranks, int gpus,
                                  bool *uses_nccl_out, fsdp_error *err)
{
    *uses_nccl_out = options->comm == FSDP_COMM_NCCL || gpus > 1;
    if (options->comm != FSDP_COMM_THREADS || gpus == 1)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%s threads: the %d ranks have %d GPUs, but threads can exchange the memory "
                     "of one GPU only; use --comm nccl, or --device cuda:0 for all ranks",
                     options->comm_name, ranks, gpus);
}

const char *fsdp_comm_choice_name(fsdp_comm_choice comm)
{
    static const char *const names[] = {"auto", "self", "threads", "shm", "mpi", "tcp", "nccl"};
    return names[comm];
}

/* Found out before a rank begins to work, and not by its first collective. */
static fsdp_status refuse_host_transport(const fsdp_launch_options *options, fsdp_error *err)
{
    const char *comm = fsdp_comm_choice_name(options->comm);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%s %s: it moves the host's memory only, but device '%s' needs --comm nccl, "
                     "or ranks that are threads and share a GPU (--threads N --device cuda:0)",
                     options->comm_name, comm, options->device);
}

/* NCCL (2.30) calls two ranks on a GPU an experiment, and says that more may hang. */
static fsdp_status refuse_crowd(const gpu_survey *gpus, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%d ranks share the GPU %s, but NCCL serves at most two on one; start as many "
                     "ranks as there are GPUs, or threads that share one (--threads N --device "
                     "cuda:0)",
                     gpus->most, gpus->shared.bus);
}

/* Collective: whether collectives of the ranks' device go over NCCL, which processes need, and threads that
 * have several GPUs. FSDP_ERR_USAGE: the --comm that was asked for does not move memory of GPUs. */
static fsdp_status launch_decide_nccl(const fsdp_launch_options *options, fsdp_world_parts *parts,
                                      bool *uses_nccl_out, bool *shares_gpu_out, fsdp_error *err)
{
    const bool is_gpu = parts->device->ops->native, is_asked = options->comm == FSDP_COMM_NCCL;
    const int ranks = fsdp_ctl_size(parts->ctl);
    gpu_survey gpus = {0};
    *uses_nccl_out = is_asked && ranks > 1;
    if (ranks == 1 || !is_gpu)
        return FSDP_OK;
    FSDP_TRY(survey_gpus(parts, &gpus, err));
    warn_of_hidden(parts, &gpus);
    *shares_gpu_out = gpus.most > 1;
    if (options->threads > 0)
        FSDP_TRY(decide_threads(options, ranks, gpus.gpus, uses_nccl_out, err));
    else if (!is_asked && options->comm != FSDP_COMM_AUTO)
        return refuse_host_transport(options, err);
    else
        *uses_nccl_out = true;
    return *uses_nccl_out && gpus.most > 2 ? refuse_crowd(&gpus, err) : FSDP_OK;
}

/* === the world ================================================================================ */

enum { HOST_ID = 384 };

/* --- hosts ------------------------------------------------------------------------------------ */

/* Equal for ranks that can share memory: the same boot of the same machine, the same name
 * (containers have their own) and the same network (sockets by which memory is passed).
 * FSDP_HOST_ID stands for all that. */
static void name_this_host(const char *given, char id_out[HOST_ID])
{
    fsdp_process self;
    struct stat network = {0};
    memset(id_out, 0, HOST_ID);
    if (given) {
        snprintf(id_out, HOST_ID, "%s", given);
        return;
    }
    fsdp_process_self(NULL, &self);
    (void)stat("/proc/self/ns/net", &network);
    snprintf(id_out, HOST_ID, "%s %s %llu", self.boot, self.host,
             (unsigned long long)network.st_ino);
}

/* Collective. */
static fsdp_status count_hosts(fsdp_ctl *ctl, const char *host, fsdp_world_parts *parts,
                               fsdp_error *err)
{
    char mine[HOST_ID];
    int rank = fsdp_ctl_rank(ctl), size = fsdp_ctl_size(ctl);
    char *all = fsdp_alloc((size_t)size, HOST_ID);
    name_this_host(host, mine);
    parts->host = fsdp_fnv(FSDP_FNV_BEGIN, mine, HOST_ID);
    fsdp_status status = all ? FSDP_OK : fsdp_fail_memory(err, "the names of all hosts");
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = fsdp_ctl_allgather(ctl, mine, HOST_ID, all, err);
    for (int i = 0; i < size && status == FSDP_OK; i++) {
        bool is_here = memcmp(all + (size_t)i * HOST_ID, mine, HOST_ID) == 0;
        parts->local_size += is_here;
        parts->local_rank += is_here && i < rank;
    }
    fsdp_free(all);
    return status;
}

fsdp_status fsdp_launch_find_device(const char *name, fsdp_error *err)
{
    FSDP_NEED(err, name);
    return fsdp_device_find(name, err);
}

/* --- the world -------------------------------------------------------------------------------- */

/* Over TCP or MPI, whichever the control plane uses. */
static fsdp_status open_p2p(fsdp_ctl *ctl, int deadline_ms, fsdp_p2p **p2p_out, fsdp_error *err)
{
    const fsdp_mpi_functions *mpi = NULL;
    if (strcmp(ctl->ops->name, "tcp") == 0)
        return fsdp_p2p_tcp(ctl, deadline_ms, p2p_out, err);
    fsdp_status status = fsdp_mpi_library_open(&mpi, err);
    FSDP_TRY(fsdp_ctl_agree(ctl, status, err));
    return mpi->p2p(ctl, p2p_out, err);
}

static fsdp_status open_network(const fsdp_launch_options *options, fsdp_world_parts *parts,
                                fsdp_error *err)
{
    fsdp_p2p *p2p = NULL;
    fsdp_status status = open_p2p(parts->ctl, options->deadline_ms, &p2p, err);
    status = fsdp_ctl_agree(parts->ctl, status, err);
    if (status == FSDP_OK)
        return fsdp_transport_message(parts->ctl, p2p, options->deadline_ms, &parts->transport,
                                      err);
    if (p2p)
        p2p->ops->close(p2p);
    return status;
}

/* Collective where there is more than one rank. Shared memory, unless it does not reach all, or
 * another way was asked for. */
static fsdp_status open_transport(const fsdp_launch_options *options, fsdp_world_parts *parts,
                                  fsdp_error *err)
{
    int size = fsdp_ctl_size(parts->ctl);
    bool is_one_host = parts->local_size == size;
    if (size == 1)
        return fsdp_transport_self(&parts->transport, err);
    if (options->comm == FSDP_COMM_SHM && !is_one_host)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "%s shm: only %d of %d ranks are on the host of rank %d, but shared "
                         "memory works on one host only",
                         options->comm_name, parts->local_size, size, fsdp_ctl_rank(parts->ctl));
    if (options->comm == FSDP_COMM_MPI || options->comm == FSDP_COMM_TCP || !is_one_host)
        return open_network(options, parts, err);
    return fsdp_transport_shm(parts->ctl, options->deadline_ms, &parts->transport, err);
}

/* Collective: around the transport of host memory. */
static fsdp_status open_nccl(const fsdp_launch_options *options, fsdp_world_parts *parts,
                             fsdp_error *err)
{
    fsdp_nccl_spec spec = {.ctl = parts->ctl,
                           .inner = parts->transport,
                           .device = parts->device,
                           .check = options->check,
                           .host = parts->host};
    bool uses_nccl;
    FSDP_TRY(launch_decide_nccl(options, parts, &uses_nccl, &spec.shares_gpu, err));
    return uses_nccl ? fsdp_transport_nccl(&spec, &parts->transport, err) : FSDP_OK;
}

/* A build for debugging asserts always what --check looks for in streams. */
static bool is_watched(const fsdp_launch_options *options)
{
#ifdef NDEBUG
    return options->check;
#else
    (void)options;
    return true;
#endif
}

static fsdp_status open_local(const fsdp_launch_options *options, fsdp_world_parts *parts,
                              fsdp_error *err)
{
    const fsdp_device_rank rank = {.rank = fsdp_ctl_rank(parts->ctl),
                                   .local_rank = parts->local_rank};
    FSDP_TRY(fsdp_device_open(options->device, &rank, &parts->device, err));
    if (parts->device->ops->choose_gpu) /* before pinned memory, and before threads of this rank */
        (void)fsdp_numa_bind("/sys", parts->device->ops->choose_gpu(parts->device)->bus);
    if (is_watched(options))
        FSDP_TRY(fsdp_device_watch(&parts->device, err));
    if (!options->trace)
        return FSDP_OK;
    return fsdp_trace_open(options->trace, fsdp_ctl_rank(parts->ctl), &parts->trace, err);
}

static fsdp_status fill_parts(const fsdp_launch_options *options, fsdp_world_parts *parts,
                              fsdp_error *err)
{
    fsdp_ctl_set_deadline(parts->ctl, options->deadline_ms);
    FSDP_TRY(count_hosts(parts->ctl, options->host, parts, err));
    FSDP_TRY(fsdp_ctl_agree(parts->ctl, open_local(options, parts, err), err));
    fsdp_status status = parts->transport ? FSDP_OK : open_transport(options, parts, err);
    FSDP_TRY(fsdp_ctl_agree(parts->ctl, status, err));
    return fsdp_ctl_agree(parts->ctl, open_nccl(options, parts, err), err);
}

/* All ranks have the same error: only the rank that failed reports it. */
static int report_failure(fsdp_status status, const fsdp_error *err, int rank)
{
    if (err->rank == rank || status == FSDP_ERR_PEER)
        (void)fsdp_error_report(err);
    return (int)status;
}

/* Sends the reason to the other ranks before they see closed connections. */
static void report_leave(fsdp_world *world, int code)
{
    char exit_code[FSDP_EXIT_TEXT];
    const char *reason = world->reason.text;
    fsdp_error why = {.status = FSDP_ERR_PEER, .rank = world->rank};
    fsdp_comm_describe_exit(code & 0xff, exit_code);
    (void)fsdp_fail(&why, FSDP_ERR_PEER, "rank %d has left with %s%s%s", world->rank, exit_code,
                    reason[0] ? ": " : "", reason);
    world->parts.transport->exit_code = code & 0xff;
    world->parts.transport->exit_reason = reason[0] ? reason : NULL;
    fsdp_ctl_leave(world->parts.ctl, &why);
}

/* A failed write of the trace is this rank's failure, unless it has another one. */
static int end_world(fsdp_world *world, int code)
{
    fsdp_error err = {0};
    fsdp_trace *trace = world->parts.trace;
    world->parts.trace = NULL;
    if (code != 0)
        report_leave(world, code);
    fsdp_world_free(world);
    fsdp_status status = fsdp_trace_close(trace, &err);
    if (status == FSDP_OK)
        return code;
    (void)fsdp_error_report(&err);
    return code != 0 ? code : (int)status;
}

/* An exit code has eight bits: a failure whose lower eight bits are 0 must not look like
 * success. */
static int to_exit_code(int code, int rank)
{
    fsdp_error err = {0};
    if (code == 0 || (code & 0xff) != 0)
        return code;
    (void)fsdp_fail(&err, FSDP_ERR_INTERNAL,
                    "rank %d returned %d, which as an exit code would be 0", rank, code);
    return fsdp_error_report(&err);
}

static int run_body(const fsdp_launch_job *job, fsdp_world *world)
{
    const fsdp_launch_options *options = job->options;
    char **argv = fsdp_alloc((size_t)options->argc + 1, sizeof *argv);
    fsdp_error err = {0};
    if (!argv) {
        (void)fsdp_fail_memory(&err, "the program's arguments");
        return fsdp_error_report(&err);
    }
    memcpy(argv, options->argv, (size_t)options->argc * sizeof *argv);
    (void)fsdp_error_take_reported(); /* of a world before */
    int code = to_exit_code(job->body(job->context, world, options->argc, argv), world->rank);
    const fsdp_error printed = fsdp_error_take_reported();
    if ((int)printed.status == code && !world->is_reason_given)
        world->reason = printed;
    fsdp_free(argv);
    return code;
}

int fsdp_launch_rank(const fsdp_launch_job *job, fsdp_ctl *ctl, fsdp_transport *transport)
{
    fsdp_error err = {0};
    fsdp_world *world = NULL;
    int rank = fsdp_ctl_rank(ctl);
    fsdp_world_parts parts = {.ctl = ctl,
                              .transport = transport,
                              .check = job->options->check,
                              .warn = job->options->warn,
                              .deadline_ms = job->options->deadline_ms};
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_launch");
    fsdp_status status = fill_parts(job->options, &parts, &err);
    fsdp_ctl_end_public(ctl, outer);
    bool is_complete = status == FSDP_OK;
    if (is_complete) {
        status = fsdp_world_create(&parts, &world, &err);
        err.rank = rank;
    }
    int code = world ? run_body(job, world) : report_failure(status, &err, rank);
    if (code != 0 && job->failed)
        job->failed(job->listener, rank, code);
    if (!is_complete)
        fsdp_world_parts_release(&parts);
    return world ? end_world(world, code) : code;
}
