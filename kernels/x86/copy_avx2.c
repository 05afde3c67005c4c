/*
 * Large copies that bypass the caches: whole lines are written without being read before, which saves a
 * third of memcpy's traffic.
 */
#include "kernels/variants.h"

#include <immintrin.h>
#include <string.h>

enum { LINE = 64, AT_ONCE = 2 * LINE };

void fsdp_copy_large_avx2(void *to, const void *from, size_t size)
{
    uint8_t *target = to;
    const uint8_t *source = from;
    size_t head = (LINE - (uintptr_t)target % LINE) % LINE;
    head = head < size ? head : size;
    memcpy(target, source, head);
    size_t end = head + (size - head) / AT_ONCE * AT_ONCE;
    for (size_t i = head; i < end; i += AT_ONCE) {
        __m256i parts[AT_ONCE / sizeof(__m256i)];
        for (size_t k = 0; k < AT_ONCE / sizeof(__m256i); k++)
            parts[k] = _mm256_loadu_si256((const __m256i *)(source + i) + k);
        for (size_t k = 0; k < AT_ONCE / sizeof(__m256i); k++)
            _mm256_stream_si256((__m256i *)(void *)(target + i) + k, parts[k]);
    }
    _mm_sfence();
    memcpy(target + end, source + end, size - end);
}
