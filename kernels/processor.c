/* Asks the processor. See processor.h. */
#include "kernels/processor.h"

#if defined(__x86_64__)
#include <cpuid.h>

enum { SHA_IN_EBX_OF_LEAF_7 = 1 << 29 };

/* The registers that the system saves: XCR0. */
static unsigned saved_registers(void)
{
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static bool has_all(unsigned word, unsigned bits)
{
    return (word & bits) == bits;
}

fsdp_processor fsdp_processor_find(void)
{
    enum { SSE_AND_AVX = 6, AND_AVX512 = 0xe6 };
    unsigned eax, ebx, ecx, edx, features, saved = 0;
    fsdp_processor found = {0};
    if (!__get_cpuid(1, &eax, &ebx, &features, &edx))
        return found;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        ebx = 0;
    if (features & bit_OSXSAVE)
        saved = saved_registers();
    found.has_sha = (features & bit_SSE4_1) && (ebx & SHA_IN_EBX_OF_LEAF_7);
    found.has_pclmul = features & bit_PCLMUL;
    if (has_all(saved, SSE_AND_AVX)) {
        found.has_avx2 = (ebx & bit_AVX2) && (features & bit_F16C);
        found.has_fma = features & bit_FMA;
    }
    if (has_all(saved, AND_AVX512))
        found.has_avx512 =
            has_all(ebx, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | (unsigned)bit_AVX512VL);
    return found;
}

#else

fsdp_processor fsdp_processor_find(void)
{
    return (fsdp_processor){0};
}
#endif
