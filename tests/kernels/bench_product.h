/* The part of bench_kernels about a linear layer. */
#ifndef FSDP_BENCH_PRODUCT_H
#define FSDP_BENCH_PRODUCT_H

void bench_product(int repeats);

#endif
