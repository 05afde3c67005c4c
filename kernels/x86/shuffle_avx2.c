/*
 * Byte shuffle of 2-, 4- and 8-byte elements with AVX2. Each 128-bit lane takes 16 elements, the
 * two lanes 32 neighbouring ones, in as many registers as an element has bytes.
 *
 * Byte b of element e stands at e * n + b and belongs to b * 16 + e (n bytes per element): its
 * index bits rotate. Interleaving the first half of the registers with the second rotates them
 * left by one, so four interleavings shuffle, and log2(n) unshuffle.
 */
#include "kernels/variants.h"

#include <immintrin.h>
#include <string.h>

enum { BLOCK = 32, LANE = 16, MOST = 8 };

static inline void interleave(__m256i *lanes, size_t n)
{
    __m256i before[MOST];
    for (size_t i = 0; i < n; i++)
        before[i] = lanes[i];
    for (size_t i = 0; i < n / 2; i++) {
        lanes[2 * i] = _mm256_unpacklo_epi8(before[i], before[i + n / 2]);
        lanes[2 * i + 1] = _mm256_unpackhi_epi8(before[i], before[i + n / 2]);
    }
}

static inline void shuffle_blocks(uint8_t *to, const uint8_t *from, size_t count, size_t n)
{
    for (size_t first = 0; first + BLOCK <= count; first += BLOCK) {
        const uint8_t *block = from + first * n;
        __m256i lanes[MOST];
        for (size_t i = 0; i < n; i++)
            lanes[i] = _mm256_loadu2_m128i((const __m128i *)(block + (n + i) * LANE),
                                           (const __m128i *)(block + i * LANE));
        for (int round = 0; round < 4; round++)
            interleave(lanes, n);
        for (size_t i = 0; i < n; i++)
            _mm256_storeu_si256((__m256i *)(to + i * count + first), lanes[i]);
    }
}

static inline void unshuffle_blocks(uint8_t *to, const uint8_t *from, size_t count, size_t n)
{
    for (size_t first = 0; first + BLOCK <= count; first += BLOCK) {
        uint8_t *block = to + first * n;
        __m256i lanes[MOST];
        for (size_t i = 0; i < n; i++)
            lanes[i] = _mm256_loadu_si256((const __m256i *)(from + i * count + first));
        for (size_t rounds = n; rounds > 1; rounds /= 2)
            interleave(lanes, n);
        for (size_t i = 0; i < n; i++)
            _mm256_storeu2_m128i((__m128i *)(block + (n + i) * LANE), (__m128i *)(block + i * LANE),
                                 lanes[i]);
    }
}

void fsdp_shuffle_avx2(void *to, const void *from, size_t size, size_t element_size)
{
    size_t count = element_size ? size / element_size : 0;
    switch (element_size) {
    case 2: shuffle_blocks(to, from, count, 2); break;
    case 4: shuffle_blocks(to, from, count, 4); break;
    case 8: shuffle_blocks(to, from, count, 8); break;
    default: fsdp_shuffle_c(to, from, size, element_size); return;
    }
    fsdp_shuffle_rest(to, from, count / BLOCK * BLOCK, count, element_size);
}

void fsdp_unshuffle_avx2(void *to, const void *from, size_t size, size_t element_size)
{
    size_t count = element_size ? size / element_size : 0;
    switch (element_size) {
    case 2: unshuffle_blocks(to, from, count, 2); break;
    case 4: unshuffle_blocks(to, from, count, 4); break;
    case 8: unshuffle_blocks(to, from, count, 8); break;
    default: fsdp_unshuffle_c(to, from, size, element_size); return;
    }
    fsdp_unshuffle_rest(to, from, count / BLOCK * BLOCK, count, element_size);
}
