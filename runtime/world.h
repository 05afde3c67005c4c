/*
 * A world is the ranks of one program, as one of them sees it. fsdp_launch makes it (launch.h) and ends it.
 *
 * One fsdp_world per rank and nothing global: ranks may be threads of one process. A world and all that
 * is made from it are used by one thread at a time; those of different ranks freely in parallel.
 *
 * Calls marked collective are made by all ranks of the world (or of the mesh that is named) in the same
 * order. They end within the deadline; a rank that is missing is named, and the error distinguishes a rank
 * that made another call from one that is gone. A rank's deadline counts from its own call on: one that
 * makes the others wait for longer, because it reads data, says so (fsdp_world_begin_busy).
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

/* Returns this rank. Every call here that is not marked collective is local. */
FSDP_API int fsdp_world_rank(const fsdp_world *world);
/* Returns the number of ranks. */
FSDP_API int fsdp_world_size(const fsdp_world *world);
/* Returns this rank among the ranks of this host. */
FSDP_API int fsdp_world_local_rank(const fsdp_world *world);
/* Returns the number of ranks of this host. */
FSDP_API int fsdp_world_local_size(const fsdp_world *world);

/* Returns the control plane of saves and loads; its messages never mix with training's. Borrowed. */
FSDP_API fsdp_ctl *fsdp_world_ctl(fsdp_world *world);

/* Creates a mesh of all ranks in order, and the communication groups of its dims, which the world keeps.
 * Equal sets of ranks share a group. The product of shape is the world's size. The mesh is the caller's
 * (fsdp_mesh_free), the groups live as long as the world. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_mesh(fsdp_world *world, int ndim, const int64_t *shape,
                                                  const char *const *names, fsdp_mesh **mesh_out,
                                                  fsdp_error *err);

/* Makes groups for a mesh that was made otherwise: a subset of the ranks, or another order. All ranks of
 * the world take part, also those that are not in the mesh. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_connect(fsdp_world *world, const fsdp_mesh *mesh,
                                                     fsdp_error *err);

/* Returns the group of a mesh dim that this rank is in, or of all dims from `dim` to `last_dim` seen as
 * one; NULL when the mesh was not connected or does not hold this rank. Borrowed. */
FSDP_API struct fsdp_comm *fsdp_world_comm(fsdp_world *world, const fsdp_mesh *mesh, int dim, int last_dim);

/* Adds an event of the program's own, such as "batch", to the trace (--trace), between those of the calls
 * around it. Does nothing without a trace. */
FSDP_API void fsdp_world_mark(fsdp_world *world, const char *event);

/* Replaces each of the values by its sum over the ranks, its maximum (NaN wins), or the only one by its
 * mean: for losses, counts, flags. The call and `count` are equal on all ranks, else FSDP_ERR_USAGE names
 * two of them. Sums are in rank order, so that all ranks get the same bits in every run. Collective, over
 * the control plane. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_sum(fsdp_world *world, double *values, size_t count,
                                                 fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_max(fsdp_world *world, double *values, size_t count,
                                                 fsdp_error *err);
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_mean(fsdp_world *world, double *value, fsdp_error *err);

/* --- time ---------------------------------------------------------------------------------------- */

/* Sets how long collectives and the control plane wait for a rank from now on, instead of --deadline; the
 * same time on all ranks. Savers in the background that exist keep theirs. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_set_deadline(fsdp_world *world, int milliseconds,
                                                          fsdp_error *err);

/*
 * Keep any other rank's deadline from ending because of this one, which is at work and makes no calls:
 * between the two calls, for at most that time. Afterwards the other ranks wait for one deadline more. A
 * second begin replaces the first. begin accepts 0 or less, and both accept NULL; they do nothing then.
 *
 * A rank that dies meanwhile is noticed as usual, and so is another one that is stuck; but where tensors
 * move over TCP or MPI, a stuck rank that misses a call of the control plane is named after the busy ones
 * are done. Over MPI with less than MPI_THREAD_SERIALIZED only the main thread may make these calls; on
 * another one they do nothing.
 */
FSDP_API void fsdp_world_begin_busy(fsdp_world *world, int milliseconds);
FSDP_API void fsdp_world_end_busy(fsdp_world *world);

/* --- failures ------------------------------------------------------------------------------------ */

/*
 * Keeps the text of the error with which a body of fsdp_launch ends, for the ranks that wait for this one,
 * and returns its exit code; their calls return the text as soon as the body returns. It is for programs
 * that print errors by themselves: after `return fsdp_error_report(&err)` they get the text without this
 * call. If nothing was printed either, they get the text of the root's first failure, or else only the
 * exit code.
 */
FSDP_API int fsdp_world_fail(fsdp_world *world, const fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif
