/*
 * Read targets: where get (pipeline.h) puts what it reads, memory of the host or of a device.
 *
 * The host cannot write a device's memory (statedict/sd/read_device.h). A worker therefore has two slots of
 * staging memory: it reads a block into one, checks it, and gives the device copies of it; while these are
 * made, it reads the next block into the other. So a block that is damaged does not reach a device. Elements
 * that are cast, or that were decoded in other memory, take one more step, through the other slot.
 */
#ifndef FSDP_READ_TARGET_H
#define FSDP_READ_TARGET_H

#include "formats/shard.h"
#include "statedict/sd/read_device.h"

/* A box of a tensor, and the packed row-major memory for it. */
typedef struct fsdp_read_target {
    fsdp_box box;
    fsdp_dtype dtype;
    char *data;
    const fsdp_read_device *device;    /* whose memory it is; NULL: the host's */
} fsdp_read_target;

/* Elements [first, first + count) of a box in row-major order, packed in data. */
typedef struct fsdp_read_range {
    const fsdp_box *box;
    int64_t first, count;
    fsdp_dtype dtype;
    const char *data;
} fsdp_read_range;

/* Casts what was read; fails for values that do not fit. */
fsdp_status fsdp_read_cast(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                           int64_t count, fsdp_error *err);

/* --- devices --- */

/* FSDP_BLOCK_BYTES of staging memory, and the last copy that each device was given of it. */
typedef struct fsdp_read_slot {
    char *data;
    struct fsdp_given_copy *given;
    size_t count, room;
} fsdp_read_slot;

/* One worker's. Zero-initialise. */
enum { FSDP_READ_SLOTS = 2, FSDP_READ_SLOTS_BYTES = FSDP_READ_SLOTS * FSDP_BLOCK_BYTES };
typedef struct fsdp_read_slots {
    const fsdp_read_device *device;    /* of the staging memory; NULL: none was needed */
    fsdp_read_slot slots[FSDP_READ_SLOTS];
    int last;                          /* that was taken */
} fsdp_read_slots;

/* The slot that was not taken last, for what the device's targets get: waits for the copies of it. */
fsdp_status fsdp_read_slots_take(fsdp_read_slots *slots, const fsdp_read_device *device, char **data_out,
                                 fsdp_error *err);
/* Gives the target's device copies of the elements that lie in the target: from the slot that they are in, or
 * through another one. */
fsdp_status fsdp_read_slots_place(fsdp_read_slots *slots, const fsdp_read_range *range,
                                  const fsdp_read_target *target, fsdp_error *err);
/* Waits for all copies. */
fsdp_status fsdp_read_slots_finish(fsdp_read_slots *slots, fsdp_error *err);
void fsdp_read_slots_release(fsdp_read_slots *slots);  /* waits, too */

#endif
