/*
 * Saves while training continues. A saver copies the state of a root into memory that it keeps, and its own
 * thread writes the copy: the training stops for one copy of this rank's shards. On a GPU a stream makes
 * the copy, and the training stops only before it changes the state.
 *
 *   FSDP_TRY(fsdp_async_saver_create(root, NULL, &saver, err));             after the optimizers
 *   ...
 *   fsdp_root_save_opts opts = {.save.step = &step, .into_run = true, .extra = extra};
 *   FSDP_TRY(fsdp_async_save(saver, "run", &opts, err));                    returns when the copy is made
 *   ...                                                                     steps
 *   FSDP_TRY(fsdp_async_save_wait(saver, &report, err));
 *   fsdp_async_saver_free(saver);
 *
 * At most one save is in flight. The next fsdp_async_save or fsdp_async_save_wait returns its failure, once
 * and with the same status on every rank; a saver that is freed before that reports it to watch.notice. The
 * save has a separate control plane, so that it does not disturb that of the training, and completes if the
 * training fails but all ranks live. After a rank was lost, the save in flight and all later ones fail with
 * FSDP_ERR_PEER, and no incomplete checkpoint is published.
 *
 * Calls are local unless they are marked collective. A saver may be freed after its root (root.h). It belongs
 * to one rank and is used by the thread that uses the root. Callbacks of save.watch are called from the
 * saver's threads.
 */
#ifndef FSDP_ASYNC_SAVE_H
#define FSDP_ASYNC_SAVE_H

#include <fsdp/state.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_async_saver fsdp_async_saver;

/* All zero: the default. Equal on all ranks, but for pool_bytes. The threads of saves have nice value 19. */
typedef struct fsdp_async_opts {
    int deadline_ms;           /* of the saves' control plane; 0: the world's */
    bool allow_equal;          /* false: a save of another step whose model has the values of the previous
                                * save is FSDP_ERR_USAGE, and is not written: the program probably trains
                                * or saves another copy of the model. The report's is_stale is set in both
                                * cases. Saves without step are not compared */
    int64_t pool_bytes;        /* limit on the bytes of a GPU's state in the host's memory; 0: none. The state
                                * is copied in waves, and the next call that changes or frees it (an
                                * optimizer's step) waits until the copy of the last wave has begun and the
                                * others are written. The pool may be larger, since it must hold the largest
                                * tensor twice, and all that is copied at once (state in host memory, and
                                * buffers) */
} fsdp_async_opts;

/* The outcome of the last save that was started. */
typedef struct fsdp_async_report {
    const char *path;          /* of the checkpoint; NULL: none was started. The saver owns it until the next
                                * fsdp_async_save */
    int64_t step;              /* FSDP_NO_STEP if it has none */
    int64_t bytes;             /* copied by this rank */
    int64_t pool_bytes;        /* kept by the saver for copies */
    double wait_ms;            /* in which fsdp_async_save waited for the previous save */
    double stall_ms;           /* the rest of that call: the copy, and one round of the ranks */
    double write_ms;           /* in the background, up to the published checkpoint */
    bool is_stale;             /* see allow_equal */
} fsdp_async_report;

/* Creates a saver, which the caller frees; call it between steps, after the optimizers are created. Allocates
 * and touches memory for the present state, so that later copies cause no page faults; the memory grows with
 * the state. opts NULL: all zero. FSDP_ERR_USAGE under MPI without MPI_THREAD_SERIALIZED, where
 * fsdp_root_save works. Collective. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_async_saver_create(fsdp_root *root, const fsdp_async_opts *opts,
                                                          fsdp_async_saver **saver_out, fsdp_error *err);
/* Waits for the save in flight, which ends within the deadline if it makes no progress, and frees the saver.
 * The end of the world does this for savers that were not freed. Accepts NULL. */
FSDP_API void fsdp_async_saver_free(fsdp_async_saver *saver);

/*
 * Copies the state, between steps, and starts the save of the copy. opts are those of fsdp_root_save and are
 * copied, but the data that watch and access point to must live until the save has ended; save.threads 0 is 1
 * here. Waits for the previous save; if that failed, returns its failure and saves nothing: call again.
 * Otherwise returns after the copy is made on all ranks, or issued to a GPU's stream, or returns the failure
 * that prevents the save. Collective.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_async_save(fsdp_async_saver *saver, const char *dir,
                                                  const fsdp_root_save_opts *opts, fsdp_error *err);

/* Waits for the end of the save in flight and returns its status; FSDP_OK if there is none or its status was
 * returned before. Fills in *report_out also after a failure; report_out may be NULL. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_async_save_wait(fsdp_async_saver *saver, fsdp_async_report *report_out,
                                                       fsdp_error *err);
/* Returns false while a save is in flight. Accepts NULL. */
FSDP_API bool fsdp_async_save_is_done(fsdp_async_saver *saver);

#ifdef __cplusplus
}
#endif
#endif
