/*
 * A second control plane of a world, for a thread of its own beside the training: another group of the
 * threads, a second rendezvous over TCP, or a duplicate of MPI's communicator. See
 * world_internal.h.
 */
#include "runtime/launch/world_internal.h"

#include <stdio.h>
#include <string.h>

#include "runtime/bootstrap/ctl_tcp.h"
#include "runtime/bootstrap/rendezvous.h"
#include "runtime/launch/mpi_library.h"
#include "statedict/ctl/ctl_backend.h"

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

void fsdp_world_end_children(fsdp_world *world)
{
    while (world->children) {
        fsdp_world_child *child = world->children;
        world->children = child->next;
        child->end(child);
    }
}
