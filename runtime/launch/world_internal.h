/* The inside of a world: what fsdp_launch puts together, and what meshes and units take from it.
 * See world.h. */
#ifndef FSDP_WORLD_INTERNAL_H
#define FSDP_WORLD_INTERNAL_H

#include "runtime/comm/comm_backend.h"
#include "runtime/device/device.h"
#include "runtime/launch/trace.h"
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

/* A communicator as streams use it: collectives run in the order in which the host issues them, on whatever
 * stream, because each waits for the one before. */
typedef struct fsdp_lane {
    fsdp_comm *comm;           /* NULL: this rank is not among them */
    int *ranks, size;
    bool is_separate;
    fsdp_event last;
} fsdp_lane;

struct fsdp_world {
    int rank, size;
    fsdp_world_parts parts;
    fsdp_lane **lanes;         /* one per set of ranks, in the order of their making */
    size_t lane_count, lane_room;
    double *values;            /* room for one of each rank */
};

/* Of parts that no world took; others than ctl may be missing. */
void fsdp_world_parts_release(const fsdp_world_parts *parts);
fsdp_status fsdp_world_create(const fsdp_world_parts *parts, fsdp_world **world_out, fsdp_error *err);
void fsdp_world_free(fsdp_world *world);       /* accepts NULL */

/* Collective over the world: the lane of these ranks, made when there is none; NULL on ranks that are not
 * among them. is_separate: a second one of the same ranks, for reductions beside gathers. It lives as long as
 * the world. */
fsdp_status fsdp_world_lane_of(fsdp_world *world, const int *ranks, int size, bool is_separate,
                               fsdp_lane **lane_out, fsdp_error *err);
/* Local: one that was made before, as fsdp_world_comm finds it; or NULL. */
fsdp_lane *fsdp_world_lane(fsdp_world *world, const fsdp_mesh *mesh, int dim, int last_dim);

#endif
