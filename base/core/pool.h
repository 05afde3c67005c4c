/*
 * Worker threads with a bounded queue. Submitting blocks while the queue is full, which is how the
 * memory of an operation stays bounded. One pool belongs to one operation.
 */
#ifndef FSDP_POOL_H
#define FSDP_POOL_H

#include <fsdp/status.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fsdp_pool fsdp_pool;

/* A job fills err like any other function. */
typedef fsdp_status (*fsdp_job)(void *context, fsdp_error *err);

/* threads 0: submit runs the job at once in the caller. */
fsdp_status fsdp_pool_create(int threads, size_t queue, fsdp_pool **pool_out, fsdp_error *err);

/* Blocks while the queue is full. After a job has failed, later jobs are dropped, not run. */
void fsdp_pool_submit(fsdp_pool *pool, fsdp_job job, void *context);

/* Waits until every submitted job has ended; returns the first failure, and clears it. */
fsdp_status fsdp_pool_wait(fsdp_pool *pool, fsdp_error *err);

/* Waits and ends the threads. Accepts NULL. */
void fsdp_pool_free(fsdp_pool *pool);

/* A number of the calling thread, different from those of all other threads alive. */
uintptr_t fsdp_thread_number(void);

/* Cores this process may use (affinity and cgroup quota respected), at least 1. */
int fsdp_pool_cores(void);

/* Runs job(context, i, err) for i in [0, n) on up to `threads` threads (the caller is one of them). */
fsdp_status fsdp_parallel(int threads, size_t n, fsdp_status (*job)(void *context, size_t i, fsdp_error *err),
                          void *context, fsdp_error *err);

#endif
