/*
 * Contexts: what the units of a root share, and several roots may (pipeline stages). Streams, the memory pool
 * (memory_pool.h), buffers in flight, the order of forwards, and the trace; work.h gives streams their work.
 *
 * In: a world, its device and its trace. Out: streams and blocks for runtime/group and runtime/optim, which
 * issue work and never wait on the host; fsdp_context_sync is the one wait of the hooks.
 * Callers: runtime/group, runtime/step and the rooms above. Groups and roots are only pointers here; a
 * context is used by one thread at a time, as its world.
 */
#ifndef FSDP_CONTEXT_H
#define FSDP_CONTEXT_H

#include "runtime/context/memory_pool.h"
#include "runtime/launch/world_internal.h"
#include "base/text.h"

typedef struct fsdp_group fsdp_group;
typedef struct fsdp_root fsdp_root;

enum {
    FSDP_STREAM_COMPUTE,
    FSDP_STREAM_COPY_IN,
    FSDP_STREAM_ALL_GATHER,
    FSDP_STREAM_REDUCE,
    FSDP_STREAM_ALL_REDUCE,
    FSDP_STREAMS
};

enum { FSDP_MOST_GATHERS = 2 };

/* A block that work on another stream still uses. */
typedef struct fsdp_used_block {
    fsdp_block *block;                 /* NULL: none */
    fsdp_event event;                  /* the last use */
} fsdp_used_block;

typedef struct fsdp_context {
    fsdp_root *roots;                  /* that share it, by next_sharing (root.c) */
    fsdp_world *world;
    fsdp_device *device;
    fsdp_stream *streams[FSDP_STREAMS];
    fsdp_memory_pool memory;
    fsdp_used_block deferred;          /* the last gather of a forward; the next gives it back */
    fsdp_used_block *inputs;           /* of reductions, oldest first */
    int input_count, max_inputs, input_room;
    fsdp_used_block all_reduced;       /* the buffer of the last all-reduce, when gradients are cast */
    fsdp_group **order;                /* groups in the order of their forwards */
    size_t order_count, order_room;
    fsdp_root *finalizing;             /* its asynchronous end of backward was not waited for yet */
    bool limits_gathers;               /* at most FSDP_MOST_GATHERS in flight */
    int gather_count;                  /* issued, and their parameters not made yet */
    fsdp_event freed[FSDP_MOST_GATHERS];       /* the last reshards, oldest first */
    int freed_count;
} fsdp_context;

/* *context_out is set also when this fails; fsdp_context_free ends it. */
fsdp_status fsdp_context_create(fsdp_world *world, fsdp_context **context_out, fsdp_error *err);
void fsdp_context_free(fsdp_context *context); /* drains it; all blocks but those in flight were given back */

/* The host waits until every stream has done what was issued. */
void fsdp_context_drain(fsdp_context *context);
/* The host waits for the compute stream, where the device is the host: it may read and write what that stream
 * has made so far. */
fsdp_status fsdp_context_sync(fsdp_context *context, fsdp_error *err);
/* The first failure of a communicator, which leaves undefined data in streams of a device with memory of its
 * own: before such data is kept, after a wait for its stream. */
fsdp_status fsdp_context_check_comms(const fsdp_context *context, fsdp_error *err);
/* The first error of any stream. */
fsdp_status fsdp_context_check(const fsdp_context *context, fsdp_error *err);

/* Gives a flat buffer back. The stream of copy-ins waits for its last use, and the stream of gathers follows
 * each copy-in: the next gather may take the block. */
void fsdp_context_give_gather(fsdp_context *context, fsdp_used_block *gather);
/* Gives back the deferred gather. */
void fsdp_context_flush_gather(fsdp_context *context);

/* Memory for `most` inputs of reductions in flight. */
fsdp_status fsdp_context_size_inputs(fsdp_context *context, int most, fsdp_error *err);
/* Waits, in the compute stream, until no more than `most` inputs of reductions are in flight. */
void fsdp_context_limit_inputs(fsdp_context *context, int most);
void fsdp_context_give_all_reduced(fsdp_context *context);

/* An event of the trace. events: the root's list, which --check compares between ranks; or NULL. */
void fsdp_context_trace(fsdp_context *context, fsdp_text *events, const fsdp_trace_event *event);

#endif
