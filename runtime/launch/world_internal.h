/* The inside of a world: fsdp_launch creates it, and units use its communicators.
 * See world.h. */
#ifndef FSDP_WORLD_INTERNAL_H
#define FSDP_WORLD_INTERNAL_H

#include "runtime/comm/comm_backend.h"
#include "runtime/device/device.h"
#include "runtime/launch/trace.h"
#include <fsdp/world.h>

/* The parts of a world, which takes all of them, also when its creation fails. */
typedef struct fsdp_world_parts {
    int local_rank, local_size;
    uint64_t host;             /* equal on ranks of one host */
    uint64_t *hosts;           /* of all ranks, where they have GPUs; else NULL */
    fsdp_ctl *ctl;
    fsdp_transport *transport;
    fsdp_device *device;
    fsdp_trace *trace;         /* NULL: none */
    bool check;
    int deadline_ms;
    void (*warn)(const char *text);    /* NULL: nobody reads warnings */
} fsdp_world_parts;

/* A communicator that several streams share: its collectives run in the order in which the host issues them,
 * because each waits for the event of the one before. */
typedef struct fsdp_ordered_comm {
    fsdp_comm *comm;           /* NULL: this rank is not a member */
    int *ranks, size;
    bool is_separate;
    fsdp_event last;
} fsdp_ordered_comm;

/* Groups that have no rank in common. */
typedef struct fsdp_rank_groups {
    const int *ranks;          /* `size` of each, one group after the other */
    int size, count;
} fsdp_rank_groups;

/* An object with a thread, which the world ends when the program did not. */
typedef struct fsdp_world_child {
    struct fsdp_world_child *next;
    void (*end)(struct fsdp_world_child *child);   /* ends the thread and frees the child */
} fsdp_world_child;

struct fsdp_world {
    int rank, size;
    fsdp_world_parts parts;
    fsdp_ordered_comm **comms; /* one per set of ranks, in the order of creation */
    size_t comm_count, comm_room;
    fsdp_error reason;         /* this rank's own failure, if it ends with one; FSDP_OK: none is known */
    bool is_reason_given;      /* by fsdp_world_fail */
    bool has_noted_hosts;
    fsdp_world_child *children;
};

/* Local. An event of no unit, in the trace; bytes -1: none. */
void fsdp_world_trace(fsdp_world *world, const char *event, int64_t bytes);

/* Local. This rank's own failure, of which the other ranks get the text when this one leaves; the first
 * counts, and none of another rank (FSDP_ERR_PEER). */
void fsdp_world_note_failure(fsdp_world *world, const fsdp_error *why);

/* For parts that no world took; all but ctl may be NULL. */
void fsdp_world_parts_release(const fsdp_world_parts *parts);
fsdp_status fsdp_world_create(const fsdp_world_parts *parts, fsdp_world **world_out, fsdp_error *err);
void fsdp_world_free(fsdp_world *world);       /* accepts NULL */

/* Collective: a control plane for another thread than the one that trains, with the world's deadline; the
 * caller frees it. FSDP_ERR_USAGE where MPI serves one thread only. */
fsdp_status fsdp_world_second_ctl(fsdp_world *world, fsdp_ctl **ctl_out, fsdp_error *err);
/* A line on standard error, with what --check found: a finding, and the names that it is about. */
void fsdp_launch_note(int rank, const char *finding, const char *names);

/* Local: rank 0 warns once where a group of GPUs that shards a unit has ranks on several hosts. */
void fsdp_world_note_hosts(fsdp_world *world, const fsdp_rank_groups *groups, const char *unit);

/* Local. */
void fsdp_world_adopt(fsdp_world *world, fsdp_world_child *child);
void fsdp_world_disown(fsdp_world *world, fsdp_world_child *child);

/* Collective over the world: this rank's communicator among the groups; NULL on ranks that are in none. Those
 * that are not there yet are created together, and kept as long as the world. is_separate: second
 * communicators of the same ranks, so that reductions overlap gathers. */
fsdp_status fsdp_world_ordered_comm(fsdp_world *world, const fsdp_rank_groups *groups, bool is_separate,
                                    fsdp_ordered_comm **ordered_out, fsdp_error *err);
/* Local: what fsdp_world_comm returns the fsdp_comm of; NULL when it was not created. */
fsdp_ordered_comm *fsdp_world_find_comm(fsdp_world *world, const fsdp_mesh *mesh, int dim, int last_dim);

#endif
