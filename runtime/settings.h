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

/* Changes the reduced gradients of the unit in place. They are flat and in the reduce dtype; the hook runs
 * after the all-reduce (HSDP) or the reduce-scatter and before the last division, on the stream's thread. On
 * a GPU a backward with such a hook fails, because the hook gets no stream. */
typedef fsdp_status (*fsdp_all_reduce_hook)(void *context, void *data, fsdp_dtype dtype, int64_t count,
                                            fsdp_error *err);

/*
 * Replaces a collective of the library, and its buffers. A gather has one flat buffer, which `run` gets as
 * call->out, with call->in inside it; a reduction has two buffers, its input and its output.
 *
 * Ownership: the root owns a buffer from `alloc` to `dealloc`, and uses it again in later steps, but only for
 * collectives with the same context, alloc and dealloc; so alloc is called a few times, not in every step.
 * The output of a reduction may be the sharded gradient until that is dropped. Setting another collective
 * frees the buffers that are not in use, and freeing the root the others; `context` must live until root,
 * optimizers and savers are freed.
 *
 * Threads and order: the thread that calls the hooks calls alloc and dealloc; the stream's thread calls run,
 * possibly at the same time. dealloc is called after all work that uses the buffer, including run. On a GPU
 * the thread that calls the hooks also calls run, and run issues its work to call->stream, by fsdp_comm_run
 * with that stream.
 *
 * A group of one rank has buffers, but no run.
 */
typedef struct fsdp_custom_collective {
    void *context;
    /* Returns size > 0 bytes that the device can use, aligned like malloc's; they need not be zeroed. After a
     * NULL the root frees the buffers that are not in use and calls alloc once more; after a second NULL the
     * hook fails with FSDP_ERR_LIMIT and names the unit. alloc NULL: the buffers are the library's, or the
     * communicator's if that was set before. */
    void *(*alloc)(void *context, size_t size);
    /* Frees a buffer. NULL: the user frees the buffers after the root is freed. It is not called
     * without alloc. */
    void (*dealloc)(void *context, void *data);
    fsdp_status (*run)(void *context, fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err);
} fsdp_custom_collective;

#ifdef __cplusplus
}
#endif
#endif
