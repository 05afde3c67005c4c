/* The part of bench_kernels about a training step's kernels. */
#ifndef FSDP_BENCH_TENSOR_H
#define FSDP_BENCH_TENSOR_H

#include <stddef.h>

/* Each against a memcpy that moves as many bytes (read and written), in turns. */
void bench_tensor(size_t size, int repeats);

#endif
