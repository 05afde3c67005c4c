/* The inside of the fake CUDA runtime. See fake_cudart.h. */
#ifndef FSDP_FAKE_CUDART_PARTS_H
#define FSDP_FAKE_CUDART_PARTS_H

#include "tests/cuda/fake_cudart.h"

#include <cuda_runtime.h>

/* --- failures: fake_cudart.c ------------------------------------------------------------------ */

/* Counts the call; its code, when it is to fail. */
cudaError_t fake_call(const char *function);
/* Whether the call is to do nothing. */
bool fake_ignores(const char *function);
/* All later calls return it, as after a fault of a kernel. */
void fake_break(cudaError_t code);
cudaError_t fake_broken(void);         /* cudaSuccess: it is whole */
/* Keeps the first misuse. */
void fake_misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
uint64_t fake_random(uint64_t *state);
const fake_cudart_plan *fake_plan(void);
void fake_lock(void);
void fake_unlock(void);

/* --- memory: fake_cudart_memory.c --------------------------------------------------------------- */

typedef enum fake_kind { FAKE_PAGEABLE, FAKE_PINNED, FAKE_DEVICE } fake_kind;

void *fake_memory_alloc(size_t size, fake_kind kind);  /* of this thread's GPU; NULL: none left */
/* False: it is not a live block of this kind. */
bool fake_memory_free(void *data, fake_kind kind);
fake_kind fake_memory_kind(const void *data);
/* False: another GPU's. */
bool fake_memory_is_near(const void *data);
/* Whether all bytes lie in one live block, or in none. */
bool fake_memory_is_whole(const void *data, size_t size);
size_t fake_memory_count(void);        /* live blocks */
/* This thread may touch device memory. */
void fake_memory_enter(void);

/* --- streams: fake_cudart_streams.c ------------------------------------------------------------- */

/* NULL: it was destroyed, or never was one; the misuse is noted. */
struct CUstream_st *fake_stream_check(cudaStream_t stream, const char *function);
struct CUevent_st *fake_event_check(cudaEvent_t event, const char *function);

cudaError_t fake_stream_create(cudaStream_t *stream_out, int priority);
void fake_stream_destroy(cudaStream_t stream);
void fake_stream_put(cudaStream_t stream, void (*run)(void *), void *closure, void (*drop)(void *));
void fake_stream_drain(cudaStream_t stream);
void fake_streams_drain(void);         /* all of this thread's GPU */
bool fake_stream_is_idle(cudaStream_t stream);
cudaError_t fake_event_create(cudaEvent_t *event_out);
void fake_event_destroy(cudaEvent_t event);
void fake_event_record(cudaEvent_t event, cudaStream_t stream);
void fake_event_wait(cudaEvent_t event, cudaStream_t stream);
void fake_event_sync(cudaEvent_t event);
bool fake_event_is_reached(cudaEvent_t event);
size_t fake_streams_count(void);       /* of live streams and events */
void fake_streams_forget(void);        /* frees what was destroyed */

#endif
