/*
 * A world is the ranks of one program, as one of them sees it. fsdp_launch makes it (launch.h) and ends it.
 *
 * Each rank has one fsdp_world, and no state is global, so that ranks may be threads of one process. A world
 * and all that is made from it are used by one thread at a time; different ranks may run in parallel.
 *
 * All ranks of the world (or of the mesh that is named) make the calls marked collective, in the same order.
 * They end within the deadline; the error names a rank that is missing, and distinguishes a rank that made
 * another call from one that is gone. A rank's deadline begins with its own call. A rank that makes the
 * others wait for longer, because it reads data, announces it (fsdp_world_begin_busy). All other calls are
 * local.
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

/* Returns this rank, from 0. */
FSDP_API int fsdp_world_rank(const fsdp_world *world);
/* Returns the number of ranks. */
FSDP_API int fsdp_world_size(const fsdp_world *world);
/* Returns this rank among the ranks of this host. */
FSDP_API int fsdp_world_local_rank(const fsdp_world *world);
/* Returns the number of ranks of this host. */
FSDP_API int fsdp_world_local_size(const fsdp_world *world);

/* Returns the control plane of saves and loads, which the world owns; its messages never mix with those of
 * the training. */
FSDP_API fsdp_ctl *fsdp_world_ctl(fsdp_world *world);

/* Creates a mesh of all ranks in order, and the communication groups of its dims. Equal sets of ranks share
 * a group. The product of shape is the world's size. The caller frees the mesh (fsdp_mesh_free); the world
 * owns the groups. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_mesh(fsdp_world *world, int ndim, const int64_t *shape,
                                                  const char *const *names, fsdp_mesh **mesh_out,
                                                  fsdp_error *err);

/* Creates the groups of a mesh of fsdp_mesh_create, which may hold a subset of the ranks, or all in another
 * order. All ranks of the world make the call, also those that are not in the mesh. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_connect(fsdp_world *world, const fsdp_mesh *mesh,
                                                     fsdp_error *err);

/* Returns the group of a mesh dim that this rank is in, or of all dims from `dim` to `last_dim` seen as
 * one; NULL when the mesh was not connected or does not hold this rank. Borrowed. */
FSDP_API struct fsdp_comm *fsdp_world_comm(fsdp_world *world, const fsdp_mesh *mesh, int dim, int last_dim);

/* Adds an event of the program's own, such as "batch", to the trace (--trace), between those of the calls
 * around it. Does nothing without a trace. */
FSDP_API void fsdp_world_mark(fsdp_world *world, const char *event);

/* Replaces each of the values (losses, counts, flags) by its sum over the ranks. Adds in rank order, so that
 * all ranks get the same bits in every run. If the call or `count` differs, all ranks get FSDP_ERR_USAGE,
 * which names two of them. Collective, over the control plane, as are the next two calls. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_sum(fsdp_world *world, double *values, size_t count,
                                                 fsdp_error *err);
/* Replaces each of the values by its maximum over the ranks; NaN is larger than any number. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_max(fsdp_world *world, double *values, size_t count,
                                                 fsdp_error *err);
/* Replaces the value by its mean over the ranks. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_mean(fsdp_world *world, double *value, fsdp_error *err);

/* --- time ---------------------------------------------------------------------------------------- */

/* Sets how long collectives and the control plane wait for a rank from now on, instead of --deadline; the
 * same time on all ranks. Savers in the background that already exist keep their deadline. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_world_set_deadline(fsdp_world *world, int milliseconds,
                                                          fsdp_error *err);

/*
 * Announces that this rank works and makes no calls until fsdp_world_end_busy, for at most that time, so that
 * the other ranks wait for it beyond their deadline. A second call replaces the first. Does nothing for 0 or
 * less milliseconds, and for NULL.
 *
 * A rank that dies meanwhile is noticed as usual, and so is another one that is stuck; but if tensors move
 * over TCP or MPI, a stuck rank that misses a call of the control plane is named only after the busy ranks
 * have ended. Over MPI with less than MPI_THREAD_SERIALIZED only the main thread may make this call and the
 * next one; on another thread they do nothing.
 */
FSDP_API void fsdp_world_begin_busy(fsdp_world *world, int milliseconds);
/* Ends what fsdp_world_begin_busy began: from now on the other ranks wait for one deadline. Accepts NULL. */
FSDP_API void fsdp_world_end_busy(fsdp_world *world);

/* --- failures ------------------------------------------------------------------------------------ */

/*
 * Keeps the text of the error with which a body of fsdp_launch ends, and returns its exit code. When the body
 * returns, the calls of the ranks that wait for this one return the text. The call is for programs that print
 * errors by themselves; after `return fsdp_error_report(&err)` it is not needed. If the body used neither,
 * the other ranks get the text of the root's first failure, or else only the exit code.
 */
FSDP_API int fsdp_world_fail(fsdp_world *world, const fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif
