/*
 * A CUDA runtime on the host, for tests that are linked with it in place of the real one: streams are
 * threads, device memory is memory that only these threads may touch. It is as late, and as little helpful,
 * as CUDA may be:
 *
 *   order      by the seed each stream does its work at once, after delays, or when somebody waits for it
 *   memory     fresh memory is garbage, freed memory faults, a block ends before a page that faults; a thread
 *              of the host that touches device memory faults, where the processor has protection keys
 *   copies     of pinned memory happen later, and make their target garbage first; of pageable memory the
 *              host waits for them, or the source is read at once
 *   failures   the n-th call of a function fails, or the n-th work of a stream, as a fault of a kernel does
 *   misuse     destroyed streams and events, pointers of nobody, kernels on pageable or another GPU's memory
 *
 * fake_cudart.c has CUDA's functions, fake_cudart_memory.c the blocks, fake_cudart_streams.c streams and
 * events.
 */
#ifndef FSDP_FAKE_CUDART_H
#define FSDP_FAKE_CUDART_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fake_cudart_plan {
    uint64_t seed;             /* of the order; 0: all streams work at once */
    int devices;               /* 0: one; negative: none */
    int major, minor;          /* compute capability; 0: 9.0 */
    int driver;                /* 0: as new as the toolkit; negative: no driver; else its version: 12040 */
    bool takes_any_driver;     /* as runtimes of 12 take one of 12.0; else those of its major version */
    const char *fail_call;     /* "cudaMalloc"; NULL: none */
    int fail_at;               /* 1: its first call */
    int fail_work_at;          /* 1: the first work of all streams; 0: none */
    int fail_code;             /* a cudaError_t */
    const char *ignore_call;   /* calls of this function succeed and do nothing; NULL: none */
    bool is_hidden;            /* each process has a GPU of its own, and sees no other one */
    int parts;                 /* of a GPU (MIG), each a device with the address of the whole; 0: one */
    bool is_open;              /* the host may touch device memory, as managed memory */
} fake_cudart_plan;

/* For all that follows in this process, which has no stream now. */
void fake_cudart_begin(const fake_cudart_plan *plan);
/* Ends a test: the first misuse, or what was not given back; NULL: none. Valid until the next call. */
const char *fake_cudart_end(void);
int fake_cudart_version(void);         /* of the toolkit: 13000 */
int fake_cudart_calls(const char *function);   /* since begin */
int fake_cudart_calls_here(const char *function);      /* of this thread, which began since then */
size_t fake_cudart_pinned(void);       /* bytes of pinned memory now */
size_t fake_cudart_to_host(void);      /* bytes that were copied from device memory to the host's */
int fake_cudart_gpu(void);             /* that this thread has chosen */
/* The host faults when it touches device memory. */
bool fake_cudart_is_guarded(void);

/* For kernels that are host functions: run(closure) on the stream's thread, and drop(closure) after it, also
 * when the work is skipped. A cudaError_t. */
int fake_cudart_enqueue(void *stream, void (*run)(void *), void *closure, void (*drop)(void *));
/* Notes a misuse unless these bytes are staging memory or that of this GPU: a kernel would fault. */
bool fake_cudart_reaches(const void *data, size_t size);

#endif
