/*
 * Blocks of quantized numbers as f32: see quants.h. A block is a scale (f16), for some types an
 * offset and scales of its groups, and small integers; the layouts are those of ggml-common.h.
 * Every product and sum is rounded to f32, in the order of ggml's reference code.
 */
#include "kernels/quants.h"

#include "kernels/cast/f16.h"
#include "kernels/kernels.h"

#include <math.h>
#include <string.h>

enum { SMALL = 32, LARGE = 256, HALF = SMALL / 2, SCALE_BYTES = 12 };

/* --- blocks of 32 ----------------------------------------------------------------------------- */

static void decode_q4_0(const uint8_t *block, float *out)
{
    float scale = from_f16(block);
    const uint8_t *low = block + 2;
    for (int i = 0; i < HALF; i++) {
        out[i] = scale * (float)((low[i] & 15) - 8);
        out[i + HALF] = scale * (float)((low[i] >> 4) - 8);
    }
}

static void decode_q4_1(const uint8_t *block, float *out)
{
    float scale = from_f16(block), least = from_f16(block + 2);
    const uint8_t *low = block + 4;
    for (int i = 0; i < HALF; i++) {
        out[i] = scale * (float)(low[i] & 15) + least;
        out[i + HALF] = scale * (float)(low[i] >> 4) + least;
    }
}

/* The five bits of number i: four from `low`, the top one from a bit of `high`. */
static int five_bits(const uint8_t *high, const uint8_t *low, int i)
{
    int four = i < HALF ? low[i] & 15 : low[i - HALF] >> 4;
    return four | (high[i / 8] >> i % 8 & 1) << 4;
}

static void decode_q5_0(const uint8_t *block, float *out)
{
    float scale = from_f16(block);
    for (int i = 0; i < SMALL; i++)
        out[i] = scale * (float)(five_bits(block + 2, block + 6, i) - 16);
}

static void decode_q5_1(const uint8_t *block, float *out)
{
    float scale = from_f16(block), least = from_f16(block + 2);
    for (int i = 0; i < SMALL; i++)
        out[i] = scale * (float)five_bits(block + 4, block + 8, i) + least;
}

static void decode_q8_0(const uint8_t *block, float *out)
{
    float scale = from_f16(block);
    for (int i = 0; i < SMALL; i++)
        out[i] = (float)(int8_t)block[2 + i] * scale;
}

/* --- blocks of 256 ---------------------------------------------------------------------------- */

/* Two bits of number i: each run of 32 bytes holds four runs of 32 numbers. */
static int two_bits(const uint8_t *bytes, int i)
{
    return bytes[i / 128 * 32 + i % 32] >> 2 * (i % 128 / 32) & 3;
}

static void decode_q2_k(const uint8_t *block, float *out)
{
    const uint8_t *scales = block, *low = block + 16;
    float scale = from_f16(block + 80), offset = from_f16(block + 82);
    for (int i = 0; i < LARGE; i++) {
        float part = scale * (float)(scales[i / 16] & 15);
        float least = offset * (float)(scales[i / 16] >> 4);
        out[i] = part * (float)two_bits(low, i) - least;
    }
}

static void decode_q3_k(const uint8_t *block, float *out)
{
    const uint8_t *high = block, *low = block + 32, *scales = block + 96;
    float scale = from_f16(block + 108);
    for (int i = 0; i < LARGE; i++) {
        int group = i / 16;
        int bits = (scales[group % 8] >> 4 * (group / 8) & 15) |
                   (scales[8 + group % 4] >> 2 * (group / 4) & 3) << 4;
        int lowered = high[i % 32] >> i / 32 & 1 ? 0 : 4;
        out[i] = scale * (float)(bits - 32) * (float)(two_bits(low, i) - lowered);
    }
}

/* The six-bit scale and offset of a group of 32 numbers. */
static void group_scales(const uint8_t *scales, int group, float *scale_out, float *offset_out)
{
    int j = group % 4, scale = scales[j] & 63, offset = scales[4 + j] & 63;
    if (group >= 4) {
        scale = (scales[8 + j] & 15) | (scales[j] >> 2 & 48);
        offset = scales[8 + j] >> 4 | (scales[4 + j] >> 2 & 48);
    }
    *scale_out = (float)scale;
    *offset_out = (float)offset;
}

/* high is NULL, or a byte with the fifth bit of one number of each group. */
static void decode_groups(const uint8_t *block, const uint8_t *high, const uint8_t *low, float *out)
{
    float scale = from_f16(block), offset = from_f16(block + 2);
    for (int group = 0; group < LARGE / SMALL; group++, out += SMALL) {
        float part, least;
        group_scales(block + 4, group, &part, &least);
        part = scale * part;
        least = offset * least;
        for (int i = 0; i < SMALL; i++) {
            int number = low[group / 2 * SMALL + i] >> 4 * (group % 2) & 15;
            if (high)
                number |= (high[i] >> group & 1) << 4;
            out[i] = part * (float)number - least;
        }
    }
}

static void decode_q4_k(const uint8_t *block, float *out)
{
    decode_groups(block, NULL, block + 4 + SCALE_BYTES, out);
}

static void decode_q5_k(const uint8_t *block, float *out)
{
    const uint8_t *high = block + 4 + SCALE_BYTES;
    decode_groups(block, high, high + SMALL, out);
}

static void decode_q6_k(const uint8_t *block, float *out)
{
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    float scale = from_f16(block + 208);
    for (int i = 0; i < LARGE; i++) {
        int four = low[i / 128 * 64 + i % 64] >> 4 * (i % 128 / 64) & 15;
        float part = scale * (float)(int8_t)scales[i / 16];
        out[i] = part * (float)((four | two_bits(high, i) << 4) - 32);
    }
}

typedef void decode_block(const uint8_t *block, float *out);

static decode_block *decoder_of(fsdp_dtype dtype)
{
    switch (dtype) {
    case FSDP_Q4_0: return decode_q4_0;
    case FSDP_Q4_1: return decode_q4_1;
    case FSDP_Q5_0: return decode_q5_0;
    case FSDP_Q5_1: return decode_q5_1;
    case FSDP_Q8_0: return decode_q8_0;
    case FSDP_Q2_K: return decode_q2_k;
    case FSDP_Q3_K: return decode_q3_k;
    case FSDP_Q4_K: return decode_q4_k;
    case FSDP_Q5_K: return decode_q5_k;
    case FSDP_Q6_K: return decode_q6_k;
    default: return NULL;
    }
}

void fsdp_blocks_to_f32(fsdp_dtype dtype, const void *blocks, size_t count, float *out)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    decode_block *decode = decoder_of(dtype);
    const uint8_t *block = blocks;
    for (size_t i = 0; decode && i < count; i++, block += info->size, out += info->values)
        decode(block, out);
}

/* --- encoding --------------------------------------------------------------------------------- */

static float inverse_of(float scale)
{
    return scale == 0 ? 0 : 1 / scale;
}

/* A number outside the range (the inverse of a tiny scale is infinity) becomes 0. */
static int to_int(float value, int most)
{
    return value >= (float)-most && value <= (float)most ? (int)value : 0;
}

static float encode_q4_0(const float *values, uint8_t *block)
{
    float most = values[0];
    for (int i = 1; i < SMALL; i++)
        most =
            fabsf(values[i]) > fabsf(most) || (isnan(values[i]) && !isnan(most)) ? values[i] : most;
    float scale = most / -8, inverse = inverse_of(scale);
    uint8_t numbers[SMALL];
    for (int i = 0; i < SMALL; i++) {
        int number = to_int(values[i] * inverse + 8.5F, 255);
        numbers[i] = (uint8_t)(number > 15 ? 15 : number);
    }
    for (int i = 0; i < HALF; i++)
        block[2 + i] = (uint8_t)(numbers[i] | numbers[i + HALF] << 4);
    to_f16(scale, block);
    return scale;
}

bool fsdp_blocks_can_encode(fsdp_dtype dtype)
{
    return dtype == FSDP_Q8_0 || dtype == FSDP_Q4_0;
}

size_t fsdp_blocks_from_f32(fsdp_dtype dtype, const float *values, size_t count, void *blocks_out)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    uint8_t *block = blocks_out;
    size_t overflows = 0;
    if (!fsdp_blocks_can_encode(dtype))
        return 0;
    if (dtype == FSDP_Q8_0)
        return fsdp_kernels_get()->encode_q8_0(values, count, blocks_out);
    for (size_t i = 0; i < count; i++, block += info->size, values += SMALL) {
        float scale = encode_q4_0(values, block);
        overflows += isfinite(scale) && isinf(from_f16(block));
    }
    return overflows;
}
