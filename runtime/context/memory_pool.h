/*
 * Memory of a step: blocks that belong to a stream, counted by class. Giving a block back names the last work
 * that uses it: the block's stream waits for that, so that whoever gets the block next, on the same stream,
 * cannot be too early. The host never waits.
 *
 * Blocks that were given back are kept for their stream and size: the next step wants the same. All blocks
 * together hold little more than was ever in use at once; beyond that the oldest ones go back to where they
 * came from: the device, or a lender.
 */
#ifndef FSDP_MEMORY_H
#define FSDP_MEMORY_H

#include "runtime/device/device.h"
#include <fsdp/comm.h>
#include <fsdp/root.h>

/* Who gives memory in place of the device: a communicator, or a unit's custom collective. Two are the same if
 * all their members are. */
typedef struct fsdp_lender {
    void *user;
    void *(*alloc)(void *user, size_t size);       /* NULL: nobody lends */
    void (*dealloc)(void *user, void *data);       /* NULL: what it gave stays its own until it is gone */
    bool is_obliged;           /* it has no memory: a failure. Otherwise the device gives instead */
} fsdp_lender;
fsdp_lender fsdp_lender_of_comm(fsdp_comm *comm);                              /* accepts NULL */
fsdp_lender fsdp_lender_of_custom(const fsdp_custom_collective *custom);       /* accepts NULL */

typedef struct fsdp_block {
    struct fsdp_block *next;   /* in the list of the free ones */
    void *data;
    size_t size;               /* as asked for: what is counted */
    size_t room;               /* what it really has */
    fsdp_memory_class class;
    fsdp_stream *stream;       /* owner */
    fsdp_lender lender;        /* who was asked: who asks that one again gets it again */
    bool is_lent;              /* and gave; otherwise it is the device's memory */
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

/* Not zeroed. slack: bytes beyond size that are not counted, for alignment. lender: NULL, or who is asked
 * first. what: for the error. */
fsdp_status fsdp_memory_take(fsdp_memory_pool *pool, fsdp_memory_class class, fsdp_stream *stream,
                             const fsdp_lender *lender, size_t size, size_t slack, const char *what,
                             fsdp_block **block_out, fsdp_error *err);
/* last_use: of another stream, or of its own. Accepts NULL. */
void fsdp_memory_give(fsdp_memory_pool *pool, fsdp_block *block, fsdp_event last_use);
/* What lenders gave and nobody has now goes back to them, once the streams are done with it. */
void fsdp_memory_return_lent(fsdp_memory_pool *pool);
/* From now on it is that stream's, and in pool `to`; the host has waited for the one it had. The caller moves
 * the counts. */
void fsdp_memory_pass(fsdp_memory_pool *from, fsdp_memory_pool *to, fsdp_block *block, fsdp_stream *stream);
/* From now on it counts as that. */
void fsdp_memory_move(fsdp_memory_pool *pool, fsdp_block *block, fsdp_memory_class class);
/* It counts no more: its last work is given at once, and then the block. */
void fsdp_memory_uncount(fsdp_memory_pool *pool, fsdp_block *block);
/* Memory that somebody else allocated, or gave back (negative). */
void fsdp_memory_count(fsdp_memory_pool *pool, fsdp_memory_class class, int64_t bytes);

#endif
