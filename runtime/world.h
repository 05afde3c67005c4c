/*
 * A world: the ranks of one program, as one of them sees it. fsdp_launch makes it (launch.h) and ends it.
 *
 * One fsdp_world per rank and nothing global: ranks may be threads of one process. A world and all that
 * is made from it are used by one thread at a time; those of different ranks freely in parallel.
 *
 * Calls marked collective are made by all ranks of the world (or of the mesh that is named) in the same
 * order. They end within the deadline; a rank that is missing is named, and the error distinguishes a rank
 * that made another call from one that is gone.
 */
#ifndef FSDP_WORLD_H
#define FSDP_WORLD_H

#include <fsdp/ctl.h>
#include <fsdp/layout.h>
#include <fsdp/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_world fsdp_world;
struct fsdp_comm;

/* Local, as all calls here that are not marked collective. */
FSDP_API int fsdp_world_rank(const fsdp_world *world);
FSDP_API int fsdp_world_size(const fsdp_world *world);
/* Among the ranks of this host. */
FSDP_API int fsdp_world_local_rank(const fsdp_world *world);
FSDP_API int fsdp_world_local_size(const fsdp_world *world);

/* The control plane of saves and loads; its messages never mix with training's. Borrowed. */
FSDP_API fsdp_ctl *fsdp_world_ctl(fsdp_world *world);

/*
 * Collective. A mesh of all ranks in order, and the communication groups of its dims, which the world
 * keeps. Equal sets of ranks share a group. The product of shape is the world's size. The mesh is the
 * caller's (fsdp_mesh_free), the groups live as long as the world.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_mesh(fsdp_world *world, int ndim, const int64_t *shape,
                                                  const char *const *names, fsdp_mesh **mesh_out,
                                                  fsdp_error *err);

/* Collective. Groups for a mesh that was made otherwise: a subset of the ranks, or another order. All
 * ranks of the world take part, also those that are not in the mesh. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_connect(fsdp_world *world, const fsdp_mesh *mesh,
                                                     fsdp_error *err);

/* Local. The group of a mesh dim that this rank is in, or of all dims from `dim` to `last_dim` seen as one;
 * NULL when the mesh was not connected or does not hold this rank. Borrowed. */
FSDP_API struct fsdp_comm *fsdp_world_comm(fsdp_world *world, const fsdp_mesh *mesh, int dim, int last_dim);

/* Local. Adds an event of the program's own, such as "batch", to the trace (--trace), between those of the
 * calls around it. Nothing happens without a trace. */
FSDP_API void fsdp_world_mark(fsdp_world *world, const char *event);

/* Collective. *value becomes the mean over all ranks, summed in rank order. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_mean(fsdp_world *world, double *value, fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif
