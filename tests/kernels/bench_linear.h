/* The part of bench_kernels about a linear layer. */
#ifndef FSDP_BENCH_LINEAR_H
#define FSDP_BENCH_LINEAR_H

void bench_linear(int repeats);

#endif
