/* Blocks of quantized numbers. tests/peers/gguf_blocks.py compares random ones with gguf-py. */
#include "kernels/kernels.h"
#include "kernels/quants.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const fsdp_dtype types[] = {FSDP_Q4_0, FSDP_Q4_1, FSDP_Q5_0, FSDP_Q5_1, FSDP_Q8_0,
                                   FSDP_Q2_K, FSDP_Q3_K, FSDP_Q4_K, FSDP_Q5_K, FSDP_Q6_K};

Test(kernels_quants, the_limits_hold_for_every_type)
{
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        const fsdp_dtype_info *info = fsdp_dtype_describe(types[i]);
        cr_assert_leq(info->size, FSDP_QUANT_BYTES);
        cr_assert_leq(info->values, FSDP_QUANT_VALUES);
    }
}

Test(kernels_quants, a_block_of_each_small_type_has_its_numbers)
{
    uint8_t block[FSDP_QUANT_BYTES] = {0x00, 0x38}; /* 0.5 */
    float out[FSDP_QUANT_VALUES];
    block[2] = 0x80;
    fsdp_blocks_to_f32(FSDP_Q8_0, block, 1, out);
    cr_assert(out[0] == -64 && out[1] == 0);
    block[2] = 0x3F;
    fsdp_blocks_to_f32(FSDP_Q4_0, block, 1, out);
    cr_assert(out[0] == 3.5F && out[16] == -2.5F && out[1] == -4);
}

Test(kernels_quants, several_blocks_follow_each_other)
{
    enum { COUNT = 3 };
    uint8_t blocks[COUNT * FSDP_QUANT_BYTES];
    float all[COUNT * FSDP_QUANT_VALUES], one[FSDP_QUANT_VALUES];
    for (size_t i = 0; i < sizeof blocks; i++)
        blocks[i] = (uint8_t)(i * 37 % 59);
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        const fsdp_dtype_info *info = fsdp_dtype_describe(types[t]);
        fsdp_blocks_to_f32(types[t], blocks, COUNT, all);
        for (size_t i = 0; i < COUNT; i++) {
            fsdp_blocks_to_f32(types[t], blocks + i * info->size, 1, one);
            cr_assert_arr_eq(one, all + i * info->values, info->values * sizeof *one, "%s",
                             info->name);
        }
    }
}

static uint32_t next_number(uint32_t *state)
{
    return *state = *state * 1664525U + 1013904223U;
}

/* Checksums of what gguf-py makes of the same bytes. */
Test(kernels_quants, all_bits_of_a_block_count)
{
    enum { COUNT = 4 };
    static const struct {
        size_t scales[2]; /* where f16 numbers lie; this test has no infinities and NaNs */
        uint32_t crc;
    } rows[] = {{{0, 0}, 0xc30bfee9},     {{0, 2}, 0x2fbae509}, {{0, 0}, 0x09154e56},
                {{0, 2}, 0x536acc6c},     {{0, 0}, 0xe0e696e2}, {{80, 82}, 0x77300a3e},
                {{108, 108}, 0xba5731f3}, {{0, 2}, 0x9d0258e0}, {{0, 2}, 0x161e5e25},
                {{208, 208}, 0x9fd71e0e}};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        const fsdp_dtype_info *info = fsdp_dtype_describe(types[t]);
        uint8_t blocks[COUNT * FSDP_QUANT_BYTES];
        float out[COUNT * FSDP_QUANT_VALUES];
        uint32_t state = 1;
        for (size_t i = 0; i < COUNT * info->size; i++)
            blocks[i] = (uint8_t)(next_number(&state) >> 24);
        for (size_t i = 0; i < COUNT * 2; i++)
            blocks[i / 2 * info->size + rows[t].scales[i % 2] + 1] &= 0xBF;
        fsdp_blocks_to_f32(types[t], blocks, COUNT, out);
        cr_assert_eq(fsdp_crc32(0, out, COUNT * info->values * sizeof *out), rows[t].crc, "%s",
                     info->name);
    }
}

Test(kernels_quants, numbers_are_encoded_as_gguf_py_does)
{
    enum { COUNT = 64 };
    static float values[COUNT * 32];
    static uint8_t blocks[COUNT * 34];
    uint32_t state = 1;
    for (size_t i = 0; i < COUNT * 32; i++)
        values[i] = (float)((int32_t)(next_number(&state) >> 8) - (1 << 23)) / 65536;
    fsdp_blocks_from_f32(FSDP_Q8_0, values, COUNT, blocks);
    cr_assert_eq(fsdp_crc32(0, blocks, COUNT * 34), 0x4b961696);
    fsdp_blocks_from_f32(FSDP_Q4_0, values, COUNT, blocks);
    cr_assert_eq(fsdp_crc32(0, blocks, COUNT * 18), 0x1e0ba9e1);
}

/* Every code of the scale is the number that the cast of f16 says, times the integer 1. */
Test(kernels_quants, scales_are_f16)
{
    for (unsigned code = 0; code < 65536; code++) {
        uint8_t block[34] = {(uint8_t)code, (uint8_t)(code >> 8), 1};
        float out[32], expected;
        fsdp_blocks_to_f32(FSDP_Q8_0, block, 1, out);
        fsdp_kernels_get()->cast(&expected, FSDP_F32, block, FSDP_F16, 1, FSDP_OVERFLOW_INF);
        cr_assert(isnan(expected) ? isnan(out[0]) : memcmp(out, &expected, sizeof expected) == 0,
                  "%04x", code);
    }
}

/* In all variants. */
static void check_scale(float most)
{
    const fsdp_kernels *tables[8];
    size_t table_count = fsdp_kernels_all(tables, 8);
    float values[32] = {most}, scale = most / 127;
    uint8_t block[34], expected[2];
    size_t misfits = tables[0]->cast(expected, FSDP_F16, &scale, FSDP_F32, 1, FSDP_OVERFLOW_INF);
    for (size_t t = 0; t < table_count; t++) {
        cr_assert_eq(tables[t]->encode_q8_0(values, 1, block), misfits, "%a", most);
        cr_assert_arr_eq(block, expected, 2, "%a", most);
    }
}

Test(kernels_quants, encoded_scales_are_rounded_as_f16)
{
    /* rounded to infinity, halves that are rounded down and up, and where subnormal numbers begin and end */
    static const float ends[] = {
        65520, 1025.0F / 1024 + 0x1p-11F, 1 + 0x1p-11F, 0x1p-14F, 0x1.8p-24F, 0x1p-25F};
    srand(7);
    for (int i = 0; i < 50000; i++) {
        uint32_t bits = (uint32_t)rand() * 2654435761U & 0x7FFFFFFF;
        float most;
        memcpy(&most, &bits, sizeof bits);
        if (isfinite(most))
            check_scale(most);
    }
    check_scale(INFINITY);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        float most = ends[i] * 127;
        check_scale(nextafterf(most, 0));
        check_scale(most);
        check_scale(nextafterf(most, INFINITY));
    }
}

Test(kernels_quants, values_come_back_within_half_a_step)
{
    static float values[32 * 64], back[32 * 64];
    static uint8_t blocks[34 * 64];
    srand(11);
    for (size_t i = 0; i < 32 * 64; i++)
        values[i] = (float)(rand() % 20001 - 10000) / 997;
    cr_assert_eq(fsdp_blocks_from_f32(FSDP_Q8_0, values, 64, blocks), 0);
    fsdp_blocks_to_f32(FSDP_Q8_0, blocks, 64, back);
    for (size_t i = 0; i < 32 * 64; i++)
        cr_assert_lt(fabsf(values[i] - back[i]), 10.1F / 127 * 0.6F);
    cr_assert_eq(fsdp_blocks_from_f32(FSDP_Q4_0, values, 64, blocks), 0);
    fsdp_blocks_to_f32(FSDP_Q4_0, blocks, 64, back);
    for (size_t i = 0; i < 32 * 64; i++)
        cr_assert_lt(fabsf(values[i] - back[i]), 10.1F / 8 * 1.1F);
}

Test(kernels_quants, odd_values_do_no_harm)
{
    const float odd[] = {NAN, INFINITY, -INFINITY, 1e-44F, 3e38F};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        float values[32] = {1, -1};
        uint8_t block[34];
        values[5] = odd[i];
        cr_assert_eq(fsdp_blocks_from_f32(FSDP_Q8_0, values, 1, block), odd[i] == 3e38F);
        cr_assert_eq(fsdp_blocks_from_f32(FSDP_Q4_0, values, 1, block), odd[i] == 3e38F);
        float back[32];
        fsdp_blocks_to_f32(FSDP_Q4_0, block, 1, back);
        cr_assert(!isnan(odd[i]) || isnan(back[0]), "a NaN is lost");
    }
    cr_assert_not(fsdp_blocks_can_encode(FSDP_Q4_K));
    cr_assert_eq(fsdp_blocks_from_f32(FSDP_F32, odd, 1, NULL), 0);
}

/* Numbers of all sizes, some of them NaNs and infinities, and halves of a scale of 1 and their neighbours. */
static void fill_blocks(float *values, size_t count, int round)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)rand() * 2654435761U ^ (uint32_t)rand();
        float half = (float)(rand() % 254 - 127) + 0.5F;
        const float steps[3] = {half, nextafterf(half, INFINITY), nextafterf(half, -INFINITY)};
        memcpy(&values[i], &bits, sizeof bits);
        if (round % 3 == 1)
            values[i] = i % 32 == 0 ? 127 : steps[rand() % 3];
        else if (round % 3 == 2 || (isnan(values[i]) && i % 5 > 0))
            values[i] = (float)rand() / (float)RAND_MAX - 0.5F;
    }
}

Test(kernels_quants, all_variants_encode_the_same_blocks)
{
    enum { COUNT = 9 };
    const fsdp_kernels *tables[8];
    size_t table_count = fsdp_kernels_all(tables, 8);
    float values[COUNT * 32];
    uint8_t plain[COUNT * 34 + 1], other[COUNT * 34 + 1];
    srand(8);
    for (int round = 0; round < 3000; round++) {
        size_t count = (size_t)(round % (COUNT + 1));
        fill_blocks(values, COUNT * 32, round);
        memset(plain, 0xa5, sizeof plain);
        size_t overflows = tables[0]->encode_q8_0(values, count, plain);
        for (size_t t = 1; t < table_count; t++) {
            memset(other, 0xa5, sizeof other);
            cr_assert_eq(tables[t]->encode_q8_0(values, count, other), overflows);
            cr_assert_arr_eq(other, plain, sizeof plain, "%s, round %d", tables[t]->name, round);
        }
    }
}
