/*
 * Put and get, the data path of save and load (step 5 of docs/flow_save.md and docs/flow_load.md): put moves
 * a rank's boxes from memory through hash and codec into its file; get moves stored blocks through check and
 * decode into the read targets.
 */
#ifndef FSDP_PIPELINE_H
#define FSDP_PIPELINE_H

#include "formats/shard.h"
#include "statedict/sd/meter.h"
#include "statedict/sd/waves.h"
#include "statedict/transfer/box_plan.h"
#include "statedict/transfer/read_target.h"
#include <fsdp/checkpoint.h>
#include <stdatomic.h>

/* --- put --- */

/* Writes the boxes of a plan that have data: all boxes of a state dict with memory, only the large values of
 * a description. waves: of the state dict, or NULL. */
fsdp_status fsdp_put_plan(fsdp_shard_writer *writer, const fsdp_save_plan *plan, fsdp_waves *waves,
                          fsdp_meter *meter, fsdp_error *err);

/* --- get --- */

/* One worker's buffers and counts. Zero-initialise. */
typedef struct fsdp_block_reader {
    fsdp_check_mode check;
    fsdp_decoder decoder;
    fsdp_hasher *hasher;
    char *piece, *cast;
    int64_t bytes_read;
} fsdp_block_reader;

void fsdp_block_reader_release(fsdp_block_reader *block_reader);

/* Checks two options of every operation: FSDP_ERR_USAGE when one is negative (0: the default). */
fsdp_status fsdp_check_budget(int threads, int64_t memory, fsdp_error *err);

/* The number of workers with a block reader each that fit into `memory` (0: the default): at most `threads`
 * (0: the cores), at least one. */
int fsdp_block_readers_within(int threads, int64_t memory, bool encoded);
/* Bytes of one block reader's buffers. */
int64_t fsdp_block_reader_bytes(bool encoded);

/* A stored box, the shard it lies in, and the targets that share elements with it. */
typedef struct fsdp_box_read {
    fsdp_block_reader *block_reader;
    fsdp_shard_reader *shard;
    const fsdp_stored_box *stored;
    const fsdp_read_target *targets;
    size_t target_count;
    fsdp_read_slots *slots;    /* may be NULL when no target is a device's */
} fsdp_box_read;

/* True when some target shares an element with the block. */
bool fsdp_block_is_wanted(const fsdp_box_read *read, int64_t block);

/* Reads one block and places its parts. Every target must overlap the box. */
fsdp_status fsdp_get_block(const fsdp_box_read *read, int64_t block, fsdp_error *err);

/* Hashes one block and places nothing. */
fsdp_status fsdp_check_block(fsdp_block_reader *block_reader, fsdp_shard_reader *shard,
                             const fsdp_stored_box *stored, int64_t block, fsdp_error *err);

/* Fails for lack of memory for the slab of each thread; names its size and the options that lower it. */
fsdp_status fsdp_fail_slab(int64_t bytes, int threads, fsdp_error *err);

#endif
