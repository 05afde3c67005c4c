/*
 * The memory of a step: blocks that belong to a stream, counted by class. Giving a block back names the last
 * work that uses it. The block's stream waits for that work, so the next user of the block, on the same
 * stream, cannot come too early, and the host never waits. On a device whose memory is the host's, another
 * stream gets it once it is known that all of that is done.
 *
 * The pool keeps returned blocks, since the next step needs the same sizes. On a device whose memory is the
 * host's, all blocks together hold little more than was ever in use at once; beyond that the oldest free ones
 * go back. Freeing memory of a GPU waits for all its work, so there they go back only when an allocation
 * fails.
 */
#ifndef FSDP_MEMORY_POOL_H
#define FSDP_MEMORY_POOL_H

#include "runtime/device/device.h"
#include <fsdp/memory.h>
#include <fsdp/settings.h>

/* A source of memory in place of the device: a communicator, or a unit's custom collective. Two are equal if
 * all their members are. All zero: the device alone. */
typedef struct fsdp_allocator {
    void *context;
    void *(*alloc)(void *context, size_t size);
    void (*dealloc)(void *context, void *data);       /* NULL: its blocks stay in the pool until that ends */
    bool is_required;          /* a failed alloc is an error; if unset, the device's memory is used */
} fsdp_allocator;
fsdp_allocator fsdp_allocator_of_comm(fsdp_comm *comm);                        /* accepts NULL */
fsdp_allocator fsdp_allocator_of_custom(const fsdp_custom_collective *custom); /* accepts NULL */

typedef struct fsdp_block {
    struct fsdp_block *next;   /* in the list of the free ones */
    void *data;
    size_t size;               /* as asked for: this much is counted */
    size_t room;               /* allocated */
    fsdp_memory_class class;
    fsdp_stream *stream;       /* owner */
    fsdp_allocator allocator;  /* asked first: only requests with an equal one get the block again */
    bool is_external;          /* the allocator gave it; otherwise it is the device's memory */
    bool is_staging;           /* of that, its staging memory, which is the host's */
    fsdp_event given;          /* free: the point of its stream from where on it may be reused */
} fsdp_block;

typedef struct fsdp_memory_pool {
    fsdp_device *device;
    fsdp_block *free;          /* the last that was given first */
    size_t used, most_used, kept;      /* room of blocks in use, now and at most, and of free ones */
    fsdp_memory counts;
} fsdp_memory_pool;

void fsdp_memory_init(fsdp_memory_pool *pool, fsdp_device *device);
void fsdp_memory_release(fsdp_memory_pool *pool);      /* all blocks were given back */

enum { FSDP_MEMORY_ALIGNMENT = 64 };   /* bytes: of parameters that share a block */
static inline size_t fsdp_memory_align(size_t size)
{
    return (size + FSDP_MEMORY_ALIGNMENT - 1) / FSDP_MEMORY_ALIGNMENT * FSDP_MEMORY_ALIGNMENT;
}

typedef struct fsdp_memory_request {
    fsdp_memory_class class;
    fsdp_stream *stream;
    fsdp_allocator allocator;  /* asked first */
    bool is_staging;           /* from the device's staging memory; without an allocator */
    size_t size;
    size_t slack;              /* bytes beyond size that are not counted, for alignment */
    const char *owner;         /* a unit or a parameter, for the error */
} fsdp_memory_request;
/* Not zeroed. */
fsdp_status fsdp_memory_take(fsdp_memory_pool *pool, const fsdp_memory_request *request,
                             fsdp_block **block_out, fsdp_error *err);
/* The host waits until it is zeroed. */
fsdp_status fsdp_memory_take_zeroed(fsdp_memory_pool *pool, const fsdp_memory_request *request,
                                    fsdp_block **block_out, fsdp_error *err);
/* last_use: of another stream, or of its own. Accepts NULL. */
void fsdp_memory_give(fsdp_memory_pool *pool, fsdp_block *block, fsdp_event last_use);
/* Free blocks of allocators go back to them, once the streams are done with them. */
void fsdp_memory_return_external(fsdp_memory_pool *pool);
/* The block belongs to pool `to` and to that stream from now on; the host has waited for the one it had. The
 * caller moves the counts. */
void fsdp_memory_pass(fsdp_memory_pool *from, fsdp_memory_pool *to, fsdp_block *block, fsdp_stream *stream);
/* The block counts in that class from now on. */
void fsdp_memory_move(fsdp_memory_pool *pool, fsdp_block *block, fsdp_memory_class class);
/* Removes the block from the counts; the caller gives it back later. */
void fsdp_memory_uncount(fsdp_memory_pool *pool, fsdp_block *block);
/* Counts memory that others allocated, or freed (negative). */
void fsdp_memory_count(fsdp_memory_pool *pool, fsdp_memory_class class, int64_t bytes);

#endif
