/*
 * SHA-256 blocks with the SHA instructions. They keep the state as two registers, {a, b, e, f} and
 * {c, d, g, h} from the high word down, and run two rounds at a time on the message words plus
 * round constants in the low half of a third.
 */
#include "kernels/variants.h"

#include <immintrin.h>

enum { BLOCK = 64, WORDS = 4 };

typedef struct halves {
    __m128i abef;
    __m128i cdgh;
} halves;

static halves load_state(const uint32_t state[8])
{
    __m128i dcba = _mm_loadu_si128((const __m128i *)state);
    __m128i hgfe = _mm_loadu_si128((const __m128i *)(state + 4));
    __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1);
    __m128i efgh = _mm_shuffle_epi32(hgfe, 0x1b);
    return (halves){.abef = _mm_alignr_epi8(cdab, efgh, 8),
                    .cdgh = _mm_blend_epi16(efgh, cdab, 0xf0)};
}

static void store_state(uint32_t state[8], halves now)
{
    __m128i feba = _mm_shuffle_epi32(now.abef, 0x1b);
    __m128i dchg = _mm_shuffle_epi32(now.cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

static inline __m128i load_words(const uint8_t *data)
{
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    return _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)data), big_endian);
}

static inline halves run_four_rounds(halves now, __m128i words, int group)
{
    const __m128i *constants = (const __m128i *)fsdp_sha256_constants;
    __m128i sum = _mm_add_epi32(words, _mm_load_si128(constants + group));
    now.cdgh = _mm_sha256rnds2_epu32(now.cdgh, now.abef, sum);
    now.abef = _mm_sha256rnds2_epu32(now.abef, now.cdgh, _mm_shuffle_epi32(sum, 0x0e));
    return now;
}

/* The next four message words from the last sixteen, oldest group first. */
static inline __m128i next_words(__m128i w0, __m128i w1, __m128i w2, __m128i w3)
{
    __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8(w3, w2, 4));
    return _mm_sha256msg2_epu32(sum, w3);
}

static halves run_block(halves now, const uint8_t *block)
{
    halves before = now;
    __m128i words[WORDS];
    for (int i = 0; i < WORDS; i++) {
        words[i] = load_words(block + 16 * i);
        now = run_four_rounds(now, words[i], i);
    }
    for (int group = WORDS; group < 16; group += WORDS) {
        for (int i = 0; i < WORDS; i++) {
            words[i] = next_words(words[i], words[(i + 1) % WORDS], words[(i + 2) % WORDS],
                                  words[(i + 3) % WORDS]);
            now = run_four_rounds(now, words[i], group + i);
        }
    }
    return (halves){.abef = _mm_add_epi32(now.abef, before.abef),
                    .cdgh = _mm_add_epi32(now.cdgh, before.cdgh)};
}

void fsdp_sha256_blocks_ni(uint32_t state[8], const uint8_t *data, size_t blocks)
{
    halves now = load_state(state);
    for (size_t i = 0; i < blocks; i++)
        now = run_block(now, data + i * BLOCK);
    store_state(state, now);
}
