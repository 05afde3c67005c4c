/* The parts of transport_shm.c: memory segments that the processes of a host share. */
#ifndef FSDP_TRANSPORT_SHM_H
#define FSDP_TRANSPORT_SHM_H

#include "runtime/bootstrap/process_watch.h"
#include <fsdp/ctl.h>
#include <stddef.h>

/* --- segments: memory without a name that can be passed to other processes ------------------ */

typedef struct shm_segment {
    int fd;                    /* -1 when it is no longer needed: the mapping keeps the memory */
    unsigned char *data;
    size_t size;
    bool is_limited;           /* smaller than wanted, since files may have only so many bytes */
} shm_segment;

/* As large as the host's memory if `ranks` such segments can be mapped; pages exist once touched. */
fsdp_status fsdp_shm_segment_init(int ranks, shm_segment *segment_out, fsdp_error *err);
void fsdp_shm_segment_close_fd(shm_segment *segment);
void fsdp_shm_segment_release(shm_segment *segment); /* zeros are fine */

/* --- the pool: allocates in this rank's segment ------------------------------------------------ */

typedef struct shm_pool shm_pool;
fsdp_status fsdp_shm_pool_create(const shm_segment *segment, shm_pool **pool_out, fsdp_error *err);
void fsdp_shm_pool_free(shm_pool *pool); /* accepts NULL */
/* Page-aligned, not zeroed; NULL: none left. The first one lies at the segment's beginning. Any thread. */
void *fsdp_shm_pool_take(shm_pool *pool, size_t size);
void fsdp_shm_pool_give(shm_pool *pool, void *data);

/* --- passing the segments between processes -------------------------------------- */

typedef struct shm_peer {
    shm_segment segment;
    fsdp_process_watch process;
    bool was_sent, is_here;    /* this rank's hello went there; the other's came */
} shm_peer;

/*
 * Collective, with the same outcome for all. peers has an entry per rank, all zero but for the watches,
 * which are closed (-1).
 */
fsdp_status fsdp_shm_connect(fsdp_ctl *ctl, int deadline_ms, const shm_segment *segment, shm_peer *peers,
                              fsdp_error *err);
#endif
