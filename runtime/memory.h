/*
 * Bytes that the training state of a rank takes, by class. fsdp_root_memory (root.h) gives them.
 */
#ifndef FSDP_MEMORY_H
#define FSDP_MEMORY_H

#include <fsdp/status.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_memory_class {
    FSDP_MEMORY_SHARD,         /* parameters' shards and buffers */
    FSDP_MEMORY_UNSHARDED,     /* gathered parameters */
    FSDP_MEMORY_ALL_GATHER,    /* flat buffers of gathers, and the slices that are kept when
                                * parameters are resharded to groups of k ranks */
    FSDP_MEMORY_REDUCE,        /* flat buffers of reductions */
    FSDP_MEMORY_GRAD,          /* gradients, whole and sharded */
    FSDP_MEMORY_OPTIM,         /* moments and masters */
    FSDP_MEMORY_CLASSES
} fsdp_memory_class;

typedef struct fsdp_memory {
    int64_t now[FSDP_MEMORY_CLASSES], peak[FSDP_MEMORY_CLASSES];
    int64_t total_now, total_peak;
} fsdp_memory;

#ifdef __cplusplus
}
#endif
#endif
