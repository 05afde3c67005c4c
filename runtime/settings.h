/*
 * Types of the settings that unit.h takes: when gathered parameters are given back, and the caller's own
 * collectives, buffers and hooks.
 */
#ifndef FSDP_SETTINGS_H
#define FSDP_SETTINGS_H

#include <fsdp/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* When the gathered parameters are given back; k >= 2: resharded to groups of k ranks after forward. */
enum {
    FSDP_RESHARD_AUTO = 0,             /* always, but never for the root */
    FSDP_RESHARD_ALWAYS = 1,
    FSDP_RESHARD_NEVER = -1
};

/* Called with the reduced gradients of the unit, flat, in the reduce dtype, in place: after the all-reduce
 * (HSDP) or the reduce-scatter, before the last division. On the stream's thread. */
typedef fsdp_status (*fsdp_all_reduce_hook)(void *context, void *data, fsdp_dtype dtype, int64_t count,
                                            fsdp_error *err);

/*
 * A collective and its buffers in place of the library's. Of a gather the flat buffer that `run` gets as
 * call->out, with call->in inside it; of a reduction its input and its output, two buffers.
 *
 * Who owns what: a buffer is the root's from `alloc` to `dealloc`. It is used again for steps to come, by
 * collectives with the same context, alloc and dealloc only; so alloc is called a few times, not in every
 * step. A reduction's output may stay as the sharded gradient until that is dropped. Buffers that hold
 * nothing go back when another collective is set, every other one before fsdp_root_free returns: `context`
 * must live until then.
 *
 * Threads and order: alloc and dealloc are called by the thread that calls the hooks; run on the stream's
 * thread, maybe at the same time. dealloc comes after all work with the buffer, also run's own.
 *
 * A group of one rank has buffers, but no run.
 */
typedef struct fsdp_custom_collective {
    void *context;
    /* size > 0 bytes that the device can use, aligned like malloc's; need not be zeroed. When it returns
     * NULL, what is not in use goes back and it is asked once more; then the hook fails with FSDP_ERR_LIMIT
     * and names the unit. alloc NULL: the buffers are the library's, or the communicator's if that was set
     * before. */
    void *(*alloc)(void *context, size_t size);
    /* NULL: the buffers are the user's to free, after fsdp_root_free. Not called without alloc. */
    void (*dealloc)(void *context, void *data);
    fsdp_status (*run)(void *context, fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err);
} fsdp_custom_collective;

#ifdef __cplusplus
}
#endif
#endif
