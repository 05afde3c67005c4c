/*
 * The copies by which a load fills a device's memory, in a stream of their own: a root's fsdp_read_device
 * (statedict/sd/read_device.h).
 */
#ifndef FSDP_LOAD_COPIES_H
#define FSDP_LOAD_COPIES_H

#include <pthread.h>

#include "runtime/step/step.h"
#include "statedict/sd/read_device.h"

/* Zero-initialise. */
typedef struct fsdp_load_copies {
    fsdp_read_device device;   /* for the load; its context is NULL when all memory is the host's */
    fsdp_root *root;
    fsdp_stream *stream;
    pthread_mutex_t lock;      /* of the stream, which workers of all ranks of the process use */
} fsdp_load_copies;

/* Waits for all earlier work on the root's state, and for copies of it that saves make. Release it also when
 * this failed. */
fsdp_status fsdp_load_copies_begin(fsdp_load_copies *copies, fsdp_root *root, fsdp_error *err);
/* The load has waited for all copies. */
void fsdp_load_copies_release(fsdp_load_copies *copies);

#endif
