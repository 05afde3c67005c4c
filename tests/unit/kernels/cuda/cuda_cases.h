/*
 * Cases for kernels: seeded numbers, buffers with guarded ends, and their comparison. A buffer begins at any
 * address; bytes around it and bytes that no call writes keep what they were.
 */
#ifndef FSDP_CUDA_CASES_H
#define FSDP_CUDA_CASES_H

#include "kernels/cuda/cuda_kernels.h"

#include <stdbool.h>

enum { CASE_FLOATS = 9, CASE_FOLDED = 12 };
extern const fsdp_dtype case_floats[CASE_FLOATS], case_folded[CASE_FOLDED];

void case_seed(uint64_t seed);
uint64_t case_random(void);
/* Less than limit. */
size_t case_below(size_t limit);
fsdp_dtype case_float(void);

/* A size that is often at a boundary: of a unit, of a tile. */
size_t case_count(size_t most);

typedef struct case_buffer {
    char *memory;              /* `size` bytes and guards */
    size_t size;
    char *data;                /* an address in it, aligned to `align`, often to no more */
} case_buffer;

/* Memory full of garbage. */
case_buffer case_buffer_create(size_t size, size_t align);
void case_buffer_free(case_buffer *buffer);
/* Equal bytes at an equal distance from 16. */
case_buffer case_buffer_copy(const case_buffer *from);

/* A quarter random codes, among them NaNs, infinities and subnormals; else numbers around 1. */
void case_fill(void *data, fsdp_dtype dtype, size_t count);
/* Numbers as weights and gradients are. */
void case_fill_usual(void *data, fsdp_dtype dtype, size_t count, double scale);

/* A buffer of so many elements, filled; often not aligned to its elements when `anywhere`. */
case_buffer case_tensor(fsdp_dtype dtype, size_t count, bool anywhere);

/* A filled buffer that begins so many elements after a multiple of 16 bytes. */
case_buffer case_tensor_at(fsdp_dtype dtype, size_t count, size_t skew);

/* Fails the test unless all bytes agree, guards included. */
void case_expect_equal(const case_buffer *found, const case_buffer *expected, const char *what);
/* Launches so far. */
size_t case_launches(void);
/* Fails the test unless the call succeeded and the shim saw no failure. */
void case_expect_success(int error);

#endif
