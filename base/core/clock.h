/* The clock of deadlines: milliseconds of CLOCK_MONOTONIC. */
#ifndef FSDP_CLOCK_H
#define FSDP_CLOCK_H

#include <fsdp/status.h>
#include <stdint.h>
#include <time.h>

FSDP_API int64_t fsdp_now_ms(void);    /* for libfsdp_mpi */
/* A time, or how long, as system calls want it. */
struct timespec fsdp_timespec(int64_t ms);

#endif
