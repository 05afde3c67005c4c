/*
 * What the processor and the system support, by CPUID. __builtin_cpu_supports reads a table of the compiler's
 * runtime, which not every runtime fills: with zig's no processor would have AVX2.
 */
#ifndef FSDP_PROCESSOR_H
#define FSDP_PROCESSOR_H

#include <stdbool.h>

typedef struct fsdp_processor {
    bool has_sha;           /* and SSE4.1 */
    bool has_pclmul;
    bool has_avx2;          /* and F16C */
    bool has_fma;
    bool has_avx512;        /* F, DQ, BW and VL */
} fsdp_processor;

fsdp_processor fsdp_processor_find(void);

#endif
