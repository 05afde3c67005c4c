/*
 * Types of the settings that unit.h takes: when gathered parameters are resharded, and the caller's own
 * collectives, buffers and hooks.
 */
#ifndef FSDP_SETTINGS_H
#define FSDP_SETTINGS_H

#include <fsdp/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether post_forward reshards the gathered parameters; k >= 2: to groups of k ranks. */
enum {
    FSDP_RESHARD_AUTO = 0,             /* always, but never for the root */
    FSDP_RESHARD_ALWAYS = 1,
    FSDP_RESHARD_NEVER = -1
};

/* Gets the reduced gradients of the unit, flat, in the reduce dtype, in place: after the all-reduce
 * (HSDP) or the reduce-scatter, before the last division. On the stream's thread. On a GPU a backward refuses
 * it, because it gets no stream. */
typedef fsdp_status (*fsdp_all_reduce_hook)(void *context, void *data, fsdp_dtype dtype, int64_t count,
                                            fsdp_error *err);

/*
 * Replaces a collective of the library, and its buffers. A gather has one flat buffer, which `run` gets as
 * call->out, with call->in inside it; a reduction has two buffers, its input and its output.
 *
 * Ownership: the root owns a buffer from `alloc` to `dealloc`, and uses it again in later steps, for
 * collectives with the same context, alloc and dealloc only; so alloc is called a few times, not in every
 * step. The output of a reduction may stay as the sharded gradient until that is dropped. Setting another
 * collective frees the buffers that hold nothing, the end of the root the others: `context` lives until
 * root, optimizers and savers were freed.
 *
 * Threads and order: alloc and dealloc are called by the thread that calls the hooks; run on the stream's
 * thread, maybe at the same time. dealloc comes after all work with the buffer, also run's own. On a GPU the
 * thread that calls the hooks also calls run, and run gives its work to call->stream: a call of fsdp_comm_run
 * with that stream.
 *
 * A group of one rank has buffers, but no run.
 */
typedef struct fsdp_custom_collective {
    void *context;
    /* size > 0 bytes that the device can use, aligned like malloc's; need not be zeroed. After a NULL the
     * root frees the buffers that are not in use and calls alloc once more; after a second one the hook fails
     * with FSDP_ERR_LIMIT and names the unit. alloc NULL: the buffers are the library's, or the
     * communicator's if that was set before. */
    void *(*alloc)(void *context, size_t size);
    /* NULL: the buffers are the user's to free, after the root's end. Not called without alloc. */
    void (*dealloc)(void *context, void *data);
    fsdp_status (*run)(void *context, fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err);
} fsdp_custom_collective;

#ifdef __cplusplus
}
#endif
#endif
