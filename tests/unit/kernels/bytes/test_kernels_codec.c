/* The codec: decoding gives the data back, frames are plain zstd, damaged and hostile frames are
 * errors. */
#include "base/core/mem.h"
#include "kernels/kernels.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { FLOATS = 50000, SIZE = 4 * FLOATS };

static fsdp_codec *codec_of(int level)
{
    fsdp_error err = {0};
    fsdp_codec *codec = NULL;
    cr_assert_eq(fsdp_codec_create(level, &codec, &err), FSDP_OK, "%s", err.text);
    return codec;
}

static void fill_like_weights(float *values, size_t count)
{
    srand(9);
    for (size_t i = 0; i < count; i++)
        values[i] = 0.02f * ((float)rand() + (float)rand() - (float)RAND_MAX) / (float)RAND_MAX;
}

static size_t encode(fsdp_codec *codec, const void *from, size_t size, size_t element_size,
                     uint8_t *to)
{
    fsdp_error err = {0};
    size_t made = 0;
    fsdp_status status = fsdp_codec_encode(
        codec, &(fsdp_coding){from, size, to, fsdp_codec_bound(size), element_size}, &made, &err);
    cr_assert_eq(status, FSDP_OK, "%s", err.text);
    cr_assert_leq(made, fsdp_codec_bound(size));
    return made;
}

Test(kernels_codec, everything_comes_back_at_every_level_and_element_size)
{
    static const int levels[] = {FSDP_CODEC_HUFFMAN, 1, 3, 9};
    static const size_t counts[] = {0, 1, 7, 100, 4001, 12000};
    static const size_t element_sizes[] = {1, 2, 4, 8, 16};
    static float values[FLOATS];
    static uint8_t frame[SIZE * 2], back[SIZE];
    fill_like_weights(values, FLOATS);
    for (size_t l = 0; l < 4; l++) {
        fsdp_codec *codec = codec_of(levels[l]);
        for (size_t i = 0; i < 30; i++) {
            size_t element_size = element_sizes[i % 5], size = counts[i / 5] * element_size;
            size_t made = encode(codec, values, size, element_size, frame);
            fsdp_error err = {0};
            memset(back, 0xa5, size);
            cr_assert_eq(fsdp_codec_decode(
                             codec, &(fsdp_coding){frame, made, back, size, element_size}, &err),
                         FSDP_OK, "%s", err.text);
            cr_assert_arr_eq(back, values, size);
        }
        fsdp_codec_free(codec);
    }
}

/* Noise, but for the last byte of each element, which has three bits of it. */
static void fill_with_noise(uint8_t *values, size_t size, size_t element_size)
{
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < size; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        values[i] = (uint8_t)(state >> (i % element_size == element_size - 1 ? 61 : 40));
    }
}

/* Planes of noise go into the frame as they are; sizes around those where its header changes. */
Test(kernels_codec, floats_with_noise_in_their_low_bytes_come_back)
{
    static const size_t counts[] = {65535, 65536, 65791, 65792, 131072, 131073, 262144};
    static const size_t element_sizes[] = {2, 4, 8};
    enum { MOST = 262144 * 8 };
    uint8_t *values = malloc(MOST), *back = malloc(MOST), *frame = malloc(2 * MOST);
    fsdp_codec *codec = codec_of(FSDP_CODEC_HUFFMAN);
    for (size_t i = 0; i < 21; i++) {
        size_t element_size = element_sizes[i % 3], size = counts[i / 3] * element_size;
        fill_with_noise(values, size, element_size);
        size_t made = encode(codec, values, size, element_size, frame);
        fsdp_error err = {0};
        cr_assert(counts[i / 3] < 65536 || made < size - counts[i / 3] / 2, "%zu of %zu", made,
                  size);
        memset(back, 0xa5, size);
        cr_assert_eq(
            fsdp_codec_decode(codec, &(fsdp_coding){frame, made, back, size, element_size}, &err),
            FSDP_OK, "%s", err.text);
        cr_assert_arr_eq(back, values, size);
    }
    fsdp_codec_free(codec);
    free(values);
    free(back);
    free(frame);
}

Test(kernels_codec, entropy_coding_alone_makes_weights_smaller)
{
    static float values[FLOATS];
    static uint8_t frame[SIZE * 2];
    fill_like_weights(values, FLOATS);
    fsdp_codec *huffman = codec_of(FSDP_CODEC_HUFFMAN), *one = codec_of(1);
    size_t by_huffman = encode(huffman, values, SIZE, 4, frame);
    size_t by_one = encode(one, values, SIZE, 4, frame);
    cr_assert_lt(by_huffman, SIZE * 9 / 10);
    cr_assert_lt(by_huffman, by_one + by_one / 50, "%zu against %zu", by_huffman, by_one);
    fsdp_codec_free(huffman);
    fsdp_codec_free(one);
}

Test(kernels_codec, the_same_bytes_give_the_same_frame_from_any_codec)
{
    static float values[FLOATS];
    static uint8_t first[SIZE * 2], second[SIZE * 2];
    fill_like_weights(values, FLOATS);
    for (int level = 0; level < 2; level++) {
        fsdp_codec *used = codec_of(level), *fresh = codec_of(level);
        encode(used, values + 1000, SIZE / 2, 8, first);
        size_t a = encode(used, values, SIZE, 4, first), b = encode(fresh, values, SIZE, 4, second);
        cr_assert_eq(a, b);
        cr_assert_arr_eq(first, second, a);
        fsdp_codec_free(used);
        fsdp_codec_free(fresh);
    }
}

/* --- refused frames --- */

static void expect_damaged(fsdp_codec *codec, const void *frame, size_t frame_size,
                           size_t element_size, size_t size)
{
    static uint8_t back[SIZE + 16];
    fsdp_error err = {0};
    memset(back, 0xa5, sizeof back);
    fsdp_status status =
        fsdp_codec_decode(codec, &(fsdp_coding){frame, frame_size, back, size, element_size}, &err);
    cr_assert_eq(status, FSDP_ERR_DAMAGED, "%s", err.text);
    cr_assert_eq(err.status, FSDP_ERR_DAMAGED);
    cr_assert_neq(err.text[0], 0);
    cr_assert_eq(back[size], 0xa5);
}

typedef struct frame_sample {
    fsdp_codec *codec;
    float values[1000];
    uint8_t frame[16384];
    size_t frame_size;
} frame_sample;

static frame_sample *make_sample(void)
{
    static frame_sample sample;
    sample.codec = codec_of(FSDP_CODEC_HUFFMAN);
    fill_like_weights(sample.values, 1000);
    sample.frame_size = encode(sample.codec, sample.values, 4000, 4, sample.frame);
    return &sample;
}

Test(kernels_codec, truncated_frames_are_damaged)
{
    frame_sample *sample = make_sample();
    for (size_t size = 0; size < sample->frame_size; size++) {
        /* A copy of its own, so that a checker of memory sees reads past the end. */
        uint8_t *cut = malloc(size + 1);
        memcpy(cut, sample->frame, size);
        expect_damaged(sample->codec, cut, size, 4, 4000);
        free(cut);
    }
    fsdp_codec_free(sample->codec);
}

Test(kernels_codec, a_frame_of_another_size_is_damaged)
{
    frame_sample *sample = make_sample();
    expect_damaged(sample->codec, sample->frame, sample->frame_size, 4, 3996);
    expect_damaged(sample->codec, sample->frame, sample->frame_size, 4, 4004);
    expect_damaged(sample->codec, sample->frame, sample->frame_size, 1, 0);
    fsdp_codec_free(sample->codec);
}

Test(kernels_codec, bytes_behind_the_frame_are_damage)
{
    frame_sample *sample = make_sample();
    static const uint8_t empty_skippable[8] = {0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0};
    uint8_t *behind = sample->frame + sample->frame_size;
    memcpy(behind, empty_skippable, 8);
    expect_damaged(sample->codec, sample->frame, sample->frame_size + 8, 4, 4000);
    memset(behind, 0, 1);
    expect_damaged(sample->codec, sample->frame, sample->frame_size + 1, 4, 4000);
    size_t empty = encode(sample->codec, NULL, 0, 1, behind);
    expect_damaged(sample->codec, sample->frame, sample->frame_size + empty, 4, 4000);
    fsdp_codec_free(sample->codec);
}

Test(kernels_codec, frames_of_other_kinds_are_damage)
{
    fsdp_codec *codec = codec_of(1);
    static const uint8_t skippable[12] = {0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0, 1, 2, 3, 4};
    /* A descriptor without content size, a window of 2^41 bytes, one raw last block of 4 bytes. */
    static const uint8_t sizeless[] = {0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xf8, 0x21, 0, 0, 1, 2, 3, 4};
    /* A header with a content size of 2^63, and one of 4 bytes with a dictionary that nobody has. */
    static const uint8_t huge[] = {0x28, 0xb5, 0x2f, 0xfd, 0xc0, 0xf8, 0, 0, 0, 0, 0,
                                   0,    0,    0x80, 0x21, 0,    0,    1, 2, 3, 4};
    static const uint8_t dictionary[] = {0x28, 0xb5, 0x2f, 0xfd, 0x21, 0x77, 4,
                                         0x21, 0,    0,    1,    2,    3,    4};
    expect_damaged(codec, skippable, sizeof skippable, 1, 0);
    expect_damaged(codec, skippable, sizeof skippable, 1, 4);
    expect_damaged(codec, sizeless, sizeof sizeless, 1, 4);
    expect_damaged(codec, huge, sizeof huge, 1, 4);
    expect_damaged(codec, dictionary, sizeof dictionary, 1, 4);
    fsdp_codec_free(codec);
}

/* Our frames carry no checksum of their own: flips either fail or give other bytes, in bounds. */
Test(kernels_codec, flipped_bits_never_write_out_of_bounds_and_are_mostly_told)
{
    frame_sample *sample = make_sample();
    size_t told = 0, flips = 0;
    for (size_t bit = 0; bit < 8 * sample->frame_size; bit += 3, flips++) {
        uint8_t *flipped = malloc(sample->frame_size);
        uint8_t *back = malloc(4000);
        fsdp_error err = {0};
        memcpy(flipped, sample->frame, sample->frame_size);
        flipped[bit / 8] ^= (uint8_t)(1 << bit % 8);
        fsdp_status status = fsdp_codec_decode(
            sample->codec, &(fsdp_coding){flipped, sample->frame_size, back, 4000, 4}, &err);
        cr_assert(status == FSDP_OK || status == FSDP_ERR_DAMAGED, "%s", err.text);
        told += status == FSDP_ERR_DAMAGED;
        free(flipped);
        free(back);
    }
    cr_assert_gt(told, 0);
    cr_assert_lt(told, flips);
    fsdp_codec_free(sample->codec);
}

Test(kernels_codec, a_good_frame_decodes_after_damaged_ones)
{
    frame_sample *sample = make_sample();
    float back[1000];
    fsdp_error err = {0};
    sample->frame[sample->frame_size / 2] ^= 0x55;
    cr_assert_neq(fsdp_codec_decode(
                      sample->codec,
                      &(fsdp_coding){sample->frame, sample->frame_size - 1, back, sizeof back, 4},
                      &err),
                  FSDP_OK);
    sample->frame[sample->frame_size / 2] ^= 0x55;
    cr_assert_eq(fsdp_codec_decode(
                     sample->codec,
                     &(fsdp_coding){sample->frame, sample->frame_size, back, sizeof back, 4}, &err),
                 FSDP_OK, "%s", err.text);
    cr_assert_arr_eq(back, sample->values, sizeof back);
    fsdp_codec_free(sample->codec);
}

Test(kernels_codec, wrong_levels_and_sizes_are_usage_errors)
{
    fsdp_codec *codec = NULL;
    fsdp_error err = {0};
    uint8_t bytes[64] = {0};
    size_t made;
    cr_assert_eq(fsdp_codec_create(-1, &codec, &err), FSDP_ERR_USAGE);
    cr_assert_eq(fsdp_codec_create(20, &codec, &err), FSDP_ERR_USAGE);
    cr_assert_null(codec);
    codec = codec_of(1);
    cr_assert_eq(fsdp_codec_encode(codec, &(fsdp_coding){bytes, 7, bytes, 64, 4}, &made, &err),
                 FSDP_ERR_USAGE);
    cr_assert_eq(fsdp_codec_decode(codec, &(fsdp_coding){bytes, 7, bytes, 7, 4}, &err),
                 FSDP_ERR_USAGE);
    cr_assert_eq(fsdp_codec_decode(codec, &(fsdp_coding){bytes, 7, bytes, 7, 0}, &err),
                 FSDP_ERR_USAGE);
    fsdp_codec_free(codec);
    fsdp_codec_free(NULL);
}

Test(kernels_codec, every_failed_allocation_is_an_error_and_frees_all)
{
    static float values[FLOATS];
    static uint8_t frame[SIZE * 2], back[SIZE];
    fill_like_weights(values, FLOATS);
    fsdp_mem_fail_after(-1, false);
    for (int64_t n = 0;; n++) {
        fsdp_codec *codec = NULL;
        fsdp_error err = {0};
        size_t made = 0;
        fsdp_mem_fail_after(n, false);
        fsdp_status status = fsdp_codec_create(1, &codec, &err);
        if (status == FSDP_OK)
            status = fsdp_codec_encode(codec, &(fsdp_coding){values, SIZE, frame, sizeof frame, 4},
                                       &made, &err);
        if (status == FSDP_OK)
            status = fsdp_codec_decode(codec, &(fsdp_coding){frame, made, back, SIZE, 4}, &err);
        fsdp_mem_fail_after(-1, false);
        fsdp_codec_free(codec);
        if (status == FSDP_OK) {
            cr_assert_geq(n, 4, "only %ld allocations pass through our memory", (long)n);
            break;
        }
        cr_assert_eq(status, FSDP_ERR_LIMIT, "allocation %ld: %s", (long)n, err.text);
    }
}
