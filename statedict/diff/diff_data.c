/*
 * Comparing the elements of two buffers: by bits, by value, within tolerances. A complex element is
 * two components of a real type, and a quantized block is its numbers as f32; everything below is
 * said of components.
 */
#include "statedict/diff/diff_internal.h"

#include "kernels/kernels.h"
#include "kernels/quants.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 1024 };

static fsdp_dtype component_of(fsdp_dtype dtype, int *per_element_out)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    *per_element_out = info && info->values > 1 ? (int)info->values : 2;
    if (info && info->values > 1)
        return FSDP_F32;
    switch (dtype) {
    case FSDP_C128: return FSDP_F64;
    case FSDP_C64: return FSDP_F32;
    case FSDP_COMPLEX32: return FSDP_F16;
    case FSDP_BCOMPLEX32: return FSDP_BF16;
    default: *per_element_out = 1; return dtype;
    }
}

static bool is_signed_integer(fsdp_dtype dtype)
{
    return dtype == FSDP_I64 || dtype == FSDP_I32 || dtype == FSDP_I16 || dtype == FSDP_I8;
}

static uint64_t read_bits(const uint8_t *from, size_t size)
{
    uint64_t bits = 0;
    memcpy(&bits, from, size);
    return bits;
}

static int64_t read_integer(const uint8_t *from, size_t size)
{
    int unused = 64 - 8 * (int)size;
    return (int64_t)(read_bits(from, size) << unused) >> unused;
}

/* Floating types go through the kernel; integers and packed types are converted here. */
static void widen(fsdp_dtype dtype, const uint8_t *from, size_t count, double *to)
{
    if (fsdp_dtype_describe(dtype)->is_float) {
        fsdp_kernels_get()->cast(to, FSDP_F64, from, dtype, count, FSDP_OVERFLOW_INF);
        return;
    }
    size_t size = fsdp_dtype_size(dtype);
    bool is_signed = is_signed_integer(dtype);
    for (size_t i = 0; i < count; i++, from += size)
        to[i] = is_signed ? (double)read_integer(from, size) : (double)read_bits(from, size);
}

/* |a - b|; 64-bit integers may be too large for a double, their difference need not be. */
static double distance(fsdp_dtype dtype, const uint8_t *from, const uint8_t *to, double a, double b)
{
    if (dtype == FSDP_I64 || dtype == FSDP_U64) {
        uint64_t x = read_bits(from, 8), y = read_bits(to, 8);
        bool less = dtype == FSDP_I64 ? (int64_t)x < (int64_t)y : x < y;
        return (double)(less ? y - x : x - y);
    }
    if (a == b)
        return 0;
    return isnan(a) || isnan(b) ? INFINITY : fabs(a - b);
}

/* Steps of the type between two codes of a float: codes in order of value are sign and
 * magnitude. */
static uint64_t steps_between(fsdp_dtype dtype, const uint8_t *from, const uint8_t *to)
{
    size_t size = fsdp_dtype_size(dtype);
    uint64_t sign = dtype == FSDP_F8_E8M0FNU ? 0 : UINT64_C(1) << (8 * size - 1);
    uint64_t x = read_bits(from, size), y = read_bits(to, size);
    uint64_t far_x = x & ~sign, far_y = y & ~sign;
    if ((x & sign) != (y & sign))
        return far_x + far_y;
    return far_x > far_y ? far_x - far_y : far_y - far_x;
}

static bool is_close(const fsdp_diff_rule *rule, const uint8_t *from, const uint8_t *to, double a,
                     double b, double apart)
{
    bool same_type = rule->a == rule->b;
    if (isnan(a) || isnan(b))
        return !same_type && isnan(a) && isnan(b);
    if (!same_type && a == b)
        return true;
    if ((rule->atol > 0 || rule->rtol > 0) && apart <= rule->atol + rule->rtol * fabs(b))
        return true;
    return rule->ulp > 0 && same_type && fsdp_dtype_describe(rule->a)->is_float &&
           steps_between(rule->a, from, to) <= (uint64_t)rule->ulp;
}

static double relative(double apart, double a, double b)
{
    double larger = fmax(fabs(a), fabs(b));
    return apart == 0 ? 0 : isfinite(apart) && larger > 0 ? apart / larger : INFINITY;
}

void fsdp_diff_merge(fsdp_diff_found *into, const fsdp_diff_found *found)
{
    if (found->differing == 0)
        return;
    bool worse = into->differing == 0 || found->max_abs > into->max_abs ||
                 (found->max_abs == into->max_abs && found->at < into->at);
    int64_t differing = into->differing + found->differing;
    double max_rel = fmax(into->max_rel, found->max_rel);
    if (worse)
        *into = *found;
    into->differing = differing;
    into->max_rel = max_rel;
}

/* The rule of comparison: `rule` is of the components; complex elements have two. */
typedef struct component_rule {
    fsdp_diff_rule rule;
    fsdp_dtype dtype; /* of the elements of a */
    int per_element;
} component_rule;

/* A block in which something differs by its bits. first is a component's number. */
static void compare_block(const component_rule *parts, const uint8_t *a, const uint8_t *b,
                          int64_t first, size_t count, fsdp_diff_found *found)
{
    double wide_a[BLOCK], wide_b[BLOCK];
    const fsdp_diff_rule *rule = &parts->rule;
    size_t size_a = fsdp_dtype_size(rule->a), size_b = fsdp_dtype_size(rule->b);
    int64_t last = -1; /* a complex element counts once */
    widen(rule->a, a, count, wide_a);
    widen(rule->b, b, count, wide_b);
    for (size_t i = 0; i < count; i++, a += size_a, b += size_b) {
        if (rule->a == rule->b && memcmp(a, b, size_a) == 0)
            continue;
        double apart = distance(rule->a, a, b, wide_a[i], wide_b[i]);
        if (is_close(rule, a, b, wide_a[i], wide_b[i], apart))
            continue;
        fsdp_diff_found one = {.differing = 1,
                               .at = (first + (int64_t)i) / parts->per_element,
                               .max_abs = apart,
                               .max_rel = relative(apart, wide_a[i], wide_b[i])};
        memcpy(one.from, a, size_a);
        memcpy(one.to, b, size_b);
        fsdp_diff_merge(found, &one);
        found->differing -= one.at == last;
        last = one.at;
    }
}

/* Blocks of one type. Without tolerances a block differs if its bits do, whatever its numbers. */
static void compare_blocks(const component_rule *parts, const uint8_t *a, const uint8_t *b,
                           int64_t first, int64_t count, fsdp_diff_found *found)
{
    float from[FSDP_QUANT_VALUES], to[FSDP_QUANT_VALUES];
    size_t size = fsdp_dtype_size(parts->dtype), values = (size_t)parts->per_element;
    const fsdp_diff_rule *rule = &parts->rule;
    bool is_exact = rule->atol <= 0 && rule->rtol <= 0 && rule->ulp <= 0;
    for (int64_t i = 0; i < count; i++, a += size, b += size) {
        if (memcmp(a, b, size) == 0)
            continue;
        fsdp_diff_found one = {.differing = 0};
        fsdp_blocks_to_f32(parts->dtype, a, 1, from);
        fsdp_blocks_to_f32(parts->dtype, b, 1, to);
        compare_block(parts, (const uint8_t *)from, (const uint8_t *)to,
                      (first + i) * (int64_t)values, values, &one);
        if (one.differing == 0 && is_exact)
            one = (fsdp_diff_found){.differing = 1, .at = first + i};
        fsdp_diff_merge(found, &one);
    }
}

void fsdp_diff_data(const fsdp_diff_rule *rule, const void *a, const void *b, int64_t first,
                    int64_t count, fsdp_diff_found *found)
{
    const uint8_t *from = a, *to = b;
    component_rule parts = {.rule = *rule, .dtype = rule->a};
    parts.rule.a = component_of(rule->a, &parts.per_element);
    parts.rule.b = component_of(rule->b, &parts.per_element);
    if (rule->a == rule->b && parts.per_element > 2) {
        compare_blocks(&parts, a, b, first, count, found);
        return;
    }
    bool same_type = parts.rule.a == parts.rule.b;
    size_t size_a = fsdp_dtype_size(parts.rule.a), size_b = fsdp_dtype_size(parts.rule.b);
    int64_t total = count * parts.per_element;
    if (same_type && memcmp(a, b, (size_t)total * size_a) == 0)
        return;
    for (int64_t done = 0; done < total; done += BLOCK) {
        size_t n = total - done < BLOCK ? (size_t)(total - done) : BLOCK;
        if (!same_type || memcmp(from, to, n * size_a) != 0)
            compare_block(&parts, from, to, first * parts.per_element + done, n, found);
        from += n * size_a;
        to += n * size_b;
    }
}

/* Digits that tell any two numbers of a type apart. */
static int digits_of(fsdp_dtype dtype)
{
    switch (dtype) {
    case FSDP_F64: return 17;
    case FSDP_F32: return 9;
    case FSDP_F16: return 5;
    case FSDP_BF16: return 4;
    default: return 3;
    }
}

/* The fewest digits that come back as the same number. */
static void spell_float(fsdp_dtype dtype, const uint8_t bytes[8], char out[FSDP_DIFF_ELEMENT])
{
    double value, back;
    uint8_t code[8];
    widen(dtype, bytes, 1, &value);
    for (int digits = 1; digits <= digits_of(dtype); digits++) {
        snprintf(out, FSDP_DIFF_ELEMENT, "%.*g", digits, value);
        back = strtod(out, NULL);
        fsdp_kernels_get()->cast(code, dtype, &back, FSDP_F64, 1, FSDP_OVERFLOW_INF);
        if (memcmp(code, bytes, fsdp_dtype_size(dtype)) == 0)
            break;
    }
    if (strspn(out, "-0123456789") == strlen(out))
        strcat(out, ".0");
}

void fsdp_diff_spell(fsdp_dtype dtype, const uint8_t bytes[8], char out[FSDP_DIFF_ELEMENT])
{
    int per_element;
    fsdp_dtype part = component_of(dtype, &per_element);
    size_t size = fsdp_dtype_size(part);
    if (fsdp_dtype_describe(part)->is_float)
        spell_float(part, bytes, out);
    else if (is_signed_integer(part))
        snprintf(out, FSDP_DIFF_ELEMENT, "%" PRId64, read_integer(bytes, size));
    else
        snprintf(out, FSDP_DIFF_ELEMENT, "%" PRIu64, read_bits(bytes, size));
}

int fsdp_diff_bits(const fsdp_diff_rule *rule, const fsdp_diff_found *found)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(rule->a);
    if (rule->a != rule->b || (info && info->values > 1))
        return 0;
    return __builtin_popcountll(read_bits(found->from, 8) ^ read_bits(found->to, 8));
}
