/* The inside of a world: what fsdp_launch puts together, and what meshes and units take from it. See world.h. */
#ifndef FSDP_WORLD_INTERNAL_H
#define FSDP_WORLD_INTERNAL_H

#include "runtime/comm_backend.h"
#include "runtime/device.h"
#include "runtime/trace.h"
#include <fsdp/world.h>

/* What a world is made of; all of it becomes the world's, also when creating fails. */
typedef struct fsdp_world_parts {
    int local_rank, local_size;
    fsdp_ctl *ctl;
    fsdp_fabric *fabric;
    fsdp_device *device;
    fsdp_trace *trace;         /* NULL: none */
    bool check;
    int deadline_ms;
} fsdp_world_parts;

struct fsdp_world {
    int rank, size;
    fsdp_world_parts parts;
    fsdp_comm **comms;         /* one per set of ranks, in the order of their making */
    size_t comm_count, comm_room;
};

fsdp_status fsdp_world_create(const fsdp_world_parts *parts, fsdp_world **world_out, fsdp_error *err);
void fsdp_world_free(fsdp_world *world);       /* accepts NULL */

/* Collective over the world: the communicator of these ranks, made when there is none; NULL on ranks that are not
 * among them. is_separate: a second one of the same ranks, for reductions beside gathers. */
fsdp_status fsdp_world_comm_of(fsdp_world *world, const int *ranks, int size, bool is_separate, fsdp_comm **comm_out,
                               fsdp_error *err);

#endif
