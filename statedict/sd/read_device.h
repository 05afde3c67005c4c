/*
 * Memory of a device that the host cannot write, as a load fills it: a GPU's. Workers of the load read into
 * staging memory, check what they have read, and give the device copies of it; while these are made, they
 * read on (statedict/transfer/read_target.h).
 *
 * The room that knows the device fills in the struct; loads (statedict/save) call it, from several threads at
 * once.
 */
#ifndef FSDP_READ_DEVICE_H
#define FSDP_READ_DEVICE_H

#include "kernels/kernels.h"
#include <stdbool.h>

typedef struct fsdp_read_device {
    void *context;
    /* True for memory of the device; a load writes to other memory itself. */
    bool (*holds)(void *context, const void *data);
    /* Staging memory; NULL: none left. Given back with its size, when no copy uses it any more. */
    void *(*alloc)(void *context, size_t size);
    void (*dealloc)(void *context, void *data, size_t size);
    /* Copies from staging memory to the device, after all earlier copies. The description is the caller's
     * again when this returns, the staging memory after `wait` for the number that this returns. */
    uint64_t (*copy)(void *context, const fsdp_strided_copy *copy);
    /* Waits for that copy; fails when it or an earlier one failed. Number 0: only the failures so far. */
    fsdp_status (*wait)(void *context, uint64_t number, fsdp_error *err);
} fsdp_read_device;

#endif
