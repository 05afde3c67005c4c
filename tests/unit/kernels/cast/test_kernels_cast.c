/*
 * Casts against a reference that shares nothing with them: every target type is a sorted list of
 * its values as long double, and the expected code is found by searching the nearest one. All
 * codes of the 8- and 16-bit types are tried against every target; f32 and f64 at the targets'
 * values, at the points half-way between them, one step next to those, and at random.
 */
#include "kernels/kernels.h"

#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const fsdp_dtype floats[] = {
    FSDP_F64,     FSDP_F32,         FSDP_F16,         FSDP_BF16,       FSDP_F8_E4M3FN,
    FSDP_F8_E5M2, FSDP_F8_E4M3FNUZ, FSDP_F8_E5M2FNUZ, FSDP_F8_E8M0FNU,
};
static const fsdp_on_overflow policies[] = {FSDP_OVERFLOW_INF, FSDP_OVERFLOW_CLAMP,
                                            FSDP_OVERFLOW_FAIL};
enum { FLOATS = 9, POLICIES = 3, SMALL_CODES = 65536 };

/* --- values of codes, by the types' definitions --- */

static long double ieee_value(unsigned code, int exponent_bits, int mantissa_bits, int bias)
{
    unsigned sign = code >> (exponent_bits + mantissa_bits) & 1;
    int exponent = (int)(code >> mantissa_bits & ((1u << exponent_bits) - 1));
    long double fraction =
        ldexpl((long double)(code & ((1u << mantissa_bits) - 1)), -mantissa_bits);
    long double value =
        exponent == 0 ? ldexpl(fraction, 1 - bias) : ldexpl(1.0L + fraction, exponent - bias);
    return sign ? -value : value;
}

static long double ieee_with_infinity(unsigned code, int exponent_bits, int mantissa_bits)
{
    unsigned top = ((1u << exponent_bits) - 1) << mantissa_bits;
    unsigned sign_bit = 1u << (exponent_bits + mantissa_bits);
    if ((code & (sign_bit - 1)) > top)
        return NAN;
    if ((code & (sign_bit - 1)) == top)
        return code & sign_bit ? -INFINITY : INFINITY;
    return ieee_value(code, exponent_bits, mantissa_bits, (1 << (exponent_bits - 1)) - 1);
}

static long double small_value(fsdp_dtype type, unsigned code)
{
    switch (type) {
    case FSDP_F16: return ieee_with_infinity(code, 5, 10);
    case FSDP_BF16: return ieee_with_infinity(code, 8, 7);
    case FSDP_F8_E5M2: return ieee_with_infinity(code, 5, 2);
    case FSDP_F8_E4M3FN: return (code & 0x7f) == 0x7f ? NAN : ieee_value(code, 4, 3, 7);
    case FSDP_F8_E4M3FNUZ: return code == 0x80 ? NAN : ieee_value(code, 4, 3, 8);
    case FSDP_F8_E5M2FNUZ: return code == 0x80 ? NAN : ieee_value(code, 5, 2, 16);
    case FSDP_F8_E8M0FNU: return code == 0xff ? NAN : ldexpl(1.0L, (int)code - 127);
    default: return NAN;
    }
}

static long double value_of(fsdp_dtype type, const void *data)
{
    double f64;
    float f32;
    uint16_t two;
    switch (fsdp_dtype_size(type)) {
    case 8: memcpy(&f64, data, sizeof f64); return f64;
    case 4: memcpy(&f32, data, sizeof f32); return f32;
    case 2: memcpy(&two, data, sizeof two); return small_value(type, two);
    default: return small_value(type, *(const uint8_t *)data);
    }
}

/* --- the nearest value of a small type --- */

typedef struct value_list {
    fsdp_dtype type;
    unsigned count; /* of finite values >= 0; value[i] belongs to code i */
    long double value[SMALL_CODES / 2];
    long double overflows_at; /* the point half-way from the largest to the value after it */
    bool has_infinity, has_sign, has_minus_zero;
} value_list;

static void list_values(value_list *list, fsdp_dtype type)
{
    unsigned codes = fsdp_dtype_size(type) == 2 ? 32768 : type == FSDP_F8_E8M0FNU ? 256 : 128;
    list->type = type;
    list->count = 0;
    while (list->count < codes && isfinite(small_value(type, list->count))) {
        list->value[list->count] = small_value(type, list->count);
        list->count++;
    }
    long double largest = list->value[list->count - 1];
    long double gap = largest - list->value[list->count - 2];
    list->overflows_at = type == FSDP_F8_E8M0FNU ? largest * 1.5L : largest + gap / 2;
    list->has_infinity = type == FSDP_F16 || type == FSDP_BF16 || type == FSDP_F8_E5M2;
    list->has_sign = type != FSDP_F8_E8M0FNU;
    list->has_minus_zero = type != FSDP_F8_E4M3FNUZ && type != FSDP_F8_E5M2FNUZ;
}

/* Ties go to the even code; in e8m0, whose every significand is an odd 1, to the larger power. */
static unsigned nearest_code(const value_list *list, long double magnitude)
{
    unsigned low = 0, high = list->count - 1;
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        if (list->value[middle] <= magnitude)
            low = middle;
        else
            high = middle;
    }
    long double halfway = (list->value[low] + list->value[high]) / 2;
    if (magnitude == halfway)
        return !list->has_sign || low % 2 ? high : low;
    return magnitude > halfway ? high : low;
}

static bool overflows(const value_list *list, long double magnitude)
{
    bool largest_is_odd = !list->has_sign || (list->count - 1) % 2 == 1;
    return magnitude > list->overflows_at || (magnitude == list->overflows_at && largest_is_odd);
}

typedef struct expectation {
    bool is_nan;
    bool misfits;
    unsigned code;
} expectation;

static expectation expect_small(const value_list *list, long double value, fsdp_on_overflow policy)
{
    if (isnan(value))
        return (expectation){.is_nan = true};
    expectation expected = {0};
    long double magnitude = fabsl(value);
    unsigned sign =
        signbit(value) && list->has_sign ? 1u << (8 * fsdp_dtype_size(list->type) - 1) : 0;
    bool too_large = overflows(list, magnitude);
    expected.misfits = isfinite(value) && (too_large || (!list->has_sign && value < 0));
    if (!too_large)
        expected.code = nearest_code(list, magnitude);
    else if (policy == FSDP_OVERFLOW_CLAMP)
        expected.code = list->count - 1;
    else if (list->has_infinity)
        expected.code = list->count;
    else
        expected.is_nan = true;
    if (expected.code != 0 || list->has_minus_zero)
        expected.code |= sign;
    return expected;
}

/* --- comparing --- */

static unsigned small_code(fsdp_dtype type, const uint8_t *data, size_t index)
{
    uint16_t two;
    if (fsdp_dtype_size(type) == 1)
        return data[index];
    memcpy(&two, data + 2 * index, sizeof two);
    return two;
}

static void check_small_target(const fsdp_kernels *kernels, const value_list *list,
                               fsdp_dtype from_type, const void *from, size_t count,
                               fsdp_on_overflow policy)
{
    uint8_t *to = malloc(2 * count);
    size_t misfits = kernels->cast(to, list->type, from, from_type, count, policy);
    size_t expected_misfits = 0;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *source = (const uint8_t *)from + i * fsdp_dtype_size(from_type);
        long double value = value_of(from_type, source);
        expectation expected = expect_small(list, value, policy);
        unsigned code = small_code(list->type, to, i);
        expected_misfits += expected.misfits;
        if (expected.is_nan ? isnan(small_value(list->type, code)) : code == expected.code)
            continue;
        cr_assert_fail("%s: %s %La to %s, policy %d: %#x, expected %#x%s", kernels->name,
                       fsdp_dtype_name(from_type), value, fsdp_dtype_name(list->type), policy, code,
                       expected.code, expected.is_nan ? " (NaN)" : "");
    }
    cr_assert_eq(misfits, expected_misfits, "%s: %s to %s, policy %d: %zu misfits, expected %zu",
                 kernels->name, fsdp_dtype_name(from_type), fsdp_dtype_name(list->type), policy,
                 misfits, expected_misfits);
    free(to);
}

/* To f32 and f64, the compiler's conversion of the exact value is the reference. */
static void check_wide_target(const fsdp_kernels *kernels, fsdp_dtype to_type, fsdp_dtype from_type,
                              const void *from, size_t count, fsdp_on_overflow policy)
{
    size_t size = fsdp_dtype_size(to_type);
    uint8_t *to = malloc(size * count);
    size_t misfits = kernels->cast(to, to_type, from, from_type, count, policy);
    size_t expected_misfits = 0;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *source = (const uint8_t *)from + i * fsdp_dtype_size(from_type);
        long double value = value_of(from_type, source);
        long double expected = to_type == FSDP_F32 ? (long double)(float)value : value;
        expected_misfits += isfinite(value) && isinf(expected);
        if (isinf(expected) && policy == FSDP_OVERFLOW_CLAMP) {
            double largest = to_type == FSDP_F32 ? (double)HUGE_VALF : 0;
            largest = to_type == FSDP_F32 ? (double)nextafterf((float)largest, 0)
                                          : nextafter(HUGE_VAL, 0);
            expected = copysignl(largest, expected);
        }
        long double made = value_of(to_type, to + i * size);
        if (isnan(expected) ? isnan(made)
                            : made == expected && !signbit(made) == !signbit(expected))
            continue;
        cr_assert_fail("%s: %s %La to %s, policy %d: %La, expected %La", kernels->name,
                       fsdp_dtype_name(from_type), value, fsdp_dtype_name(to_type), policy, made,
                       expected);
    }
    cr_assert_eq(misfits, expected_misfits);
    free(to);
}

static void check_against_all_targets(fsdp_dtype from_type, const void *from, size_t count)
{
    const fsdp_kernels *tables[8];
    size_t table_count = fsdp_kernels_all(tables, 8);
    static value_list list;
    for (int t = 0; t < FLOATS; t++) {
        if (floats[t] == from_type)
            continue;
        if (fsdp_dtype_size(floats[t]) <= 2)
            list_values(&list, floats[t]);
        for (size_t i = 0; i < table_count * POLICIES; i++) {
            const fsdp_kernels *kernels = tables[i / POLICIES];
            fsdp_on_overflow policy = policies[i % POLICIES];
            if (fsdp_dtype_size(floats[t]) <= 2)
                check_small_target(kernels, &list, from_type, from, count, policy);
            else
                check_wide_target(kernels, floats[t], from_type, from, count, policy);
        }
    }
}

static void check_all_codes(fsdp_dtype from_type)
{
    static uint16_t two[SMALL_CODES];
    static uint8_t one[256];
    for (unsigned code = 0; code < SMALL_CODES; code++)
        two[code] = (uint16_t)code;
    for (unsigned code = 0; code < 256; code++)
        one[code] = (uint8_t)code;
    if (fsdp_dtype_size(from_type) == 2)
        check_against_all_targets(from_type, two, SMALL_CODES);
    else
        check_against_all_targets(from_type, one, 256);
}

Test(kernels_cast, every_f16_code_goes_to_the_nearest_value)
{
    check_all_codes(FSDP_F16);
}
Test(kernels_cast, every_bf16_code_goes_to_the_nearest_value)
{
    check_all_codes(FSDP_BF16);
}

Test(kernels_cast, every_8_bit_code_goes_to_the_nearest_value)
{
    for (int t = 0; t < FLOATS; t++) {
        if (fsdp_dtype_size(floats[t]) == 1)
            check_all_codes(floats[t]);
    }
}

/* Long arrays of 8-bit codes take another way than the 256 above. */
Test(kernels_cast, long_arrays_of_8_bit_codes_are_cast_like_short_ones)
{
    enum { REPEATS = 40 };
    static uint8_t codes[256 * REPEATS], at_once[8 * 256 * REPEATS], piecewise[8 * 256 * REPEATS];
    for (size_t i = 0; i < sizeof codes; i++)
        codes[i] = (uint8_t)(i * 7);
    for (int pair = 0; pair < FLOATS * FLOATS * POLICIES; pair++) {
        fsdp_dtype from_type = floats[pair % FLOATS], to_type = floats[pair / FLOATS % FLOATS];
        fsdp_on_overflow policy = policies[pair / FLOATS / FLOATS];
        size_t size = fsdp_dtype_size(to_type), sum = 0;
        if (fsdp_dtype_size(from_type) != 1)
            continue;
        size_t misfits =
            fsdp_kernels_get()->cast(at_once, to_type, codes, from_type, sizeof codes, policy);
        for (size_t i = 0; i < REPEATS; i++)
            sum += fsdp_kernels_get()->cast(piecewise + 256 * i * size, to_type, codes + 256 * i,
                                            from_type, 256, policy);
        cr_assert_eq(misfits, sum);
        cr_assert_arr_eq(at_once, piecewise, sizeof codes * size);
    }
}

/* --- f32 and f64 --- */

typedef struct value_vector {
    double *items;
    size_t count, room;
} value_vector;

static void append(value_vector *values, double value)
{
    if (values->count + 2 > values->room) {
        values->room = 2 * values->room + 64;
        values->items = realloc(values->items, values->room * sizeof *values->items);
    }
    values->items[values->count++] = value;
    values->items[values->count++] = -value;
}

static void append_with_neighbours(value_vector *values, double value, fsdp_dtype from_type)
{
    bool is_f32 = from_type == FSDP_F32;
    append(values, value);
    append(values,
           is_f32 ? (double)nextafterf((float)value, INFINITY) : nextafter(value, INFINITY));
    append(values, is_f32 ? (double)nextafterf((float)value, 0) : nextafter(value, 0));
}

static uint64_t next_random(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15;
    uint64_t z = (*state ^ *state >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/* Random bits, with the exponents of f64 drawn from those that f32 has and some next to them. */
static double random_value(uint64_t *state, fsdp_dtype from_type)
{
    uint64_t bits = next_random(state);
    uint32_t low = (uint32_t)bits;
    float f32;
    double f64;
    memcpy(&f32, &low, sizeof f32);
    if (from_type == FSDP_F32)
        return (double)f32;
    uint64_t exponent = 1023 - 160 + next_random(state) % 320;
    bits = (bits & 0x800fffffffffffff) | exponent << 52;
    memcpy(&f64, &bits, sizeof f64);
    return f64;
}

/* Every 16-bit value would take long; the odd step keeps all significands and exponents in. */
static void append_boundaries(value_vector *values, const value_list *list, fsdp_dtype from_type)
{
    unsigned step = list->count > 1000 ? 7 : 1;
    for (unsigned i = 0; i + 1 < list->count; i += step) {
        append_with_neighbours(values, (double)list->value[i], from_type);
        append_with_neighbours(values, (double)((list->value[i] + list->value[i + 1]) / 2),
                               from_type);
    }
    append_with_neighbours(values, (double)list->value[1] / 2, from_type);
    append_with_neighbours(values, (double)list->value[list->count - 1], from_type);
    append_with_neighbours(values, (double)list->overflows_at, from_type);
}

static void check_wide_source(fsdp_dtype from_type)
{
    static value_list list;
    value_vector values = {0};
    uint64_t random = 7;
    for (int t = 0; t < FLOATS; t++) {
        if (fsdp_dtype_size(floats[t]) > 2)
            continue;
        list_values(&list, floats[t]);
        append_boundaries(&values, &list, from_type);
    }
    for (int i = 0; i < 20000; i++)
        append(&values, random_value(&random, from_type));
    const double special[] = {0,
                              INFINITY,
                              NAN,
                              0x1p-149,
                              0x1p-150,
                              0x1.8p-150,
                              0x1.fffffep127,
                              0x1.ffffffp127,
                              0x1.fffffefffffffp127,
                              0x1p-1074,
                              0x1p1023};
    for (size_t i = 0; i < sizeof special / sizeof *special; i++)
        append(&values, special[i]);
    if (from_type == FSDP_F32) {
        float *f32 = malloc(values.count * sizeof *f32);
        for (size_t i = 0; i < values.count; i++)
            f32[i] = (float)values.items[i];
        check_against_all_targets(FSDP_F32, f32, values.count);
        free(f32);
    } else {
        check_against_all_targets(FSDP_F64, values.items, values.count);
    }
    free(values.items);
}

Test(kernels_cast, f32_boundaries_and_random_values_round_to_the_nearest)
{
    check_wide_source(FSDP_F32);
}

Test(kernels_cast, f64_boundaries_and_random_values_round_to_the_nearest)
{
    check_wide_source(FSDP_F64);
}

/* Just above half-way to the next f16, where rounding to f32 first would land on the tie. */
Test(kernels_cast, f64_is_not_rounded_twice)
{
    const double source[2] = {1.0 + 0x1p-11 + 0x1p-40, 1.0 + 0x1p-8 + 0x1p-40};
    uint16_t code[2];
    fsdp_kernels_get()->cast(&code[0], FSDP_F16, &source[0], FSDP_F64, 1, FSDP_OVERFLOW_INF);
    fsdp_kernels_get()->cast(&code[1], FSDP_BF16, &source[1], FSDP_F64, 1, FSDP_OVERFLOW_INF);
    cr_assert_eq(code[0], 0x3c01);
    cr_assert_eq(code[1], 0x3f81);
}

/* The documented choices that the nearest value does not decide. */
Test(kernels_cast, e8m0_drops_signs_and_has_no_zero)
{
    const float source[] = {0.0f, -0.0f, -4.0f, 1.5f, 3.0f, 0x1p-149f, 0x1p127f, 0x1.8p127f};
    const uint8_t expected[] = {0, 0, 129, 128, 129, 0, 254, 255};
    uint8_t code[8];
    size_t misfits =
        fsdp_kernels_get()->cast(code, FSDP_F8_E8M0FNU, source, FSDP_F32, 8, FSDP_OVERFLOW_INF);
    cr_assert_arr_eq(code, expected, 8);
    cr_assert_eq(misfits, 2, "-4 and 1.5 * 2^127");
}

Test(kernels_cast, nan_stays_a_quiet_nan_of_its_sign_and_payload)
{
    const uint32_t source[2] = {0x7f810000, 0xffc30000};
    uint16_t bf16[2];
    fsdp_kernels_get()->cast(bf16, FSDP_BF16, source, FSDP_F32, 2, FSDP_OVERFLOW_CLAMP);
    cr_assert_eq(bf16[0], 0x7fc1);
    cr_assert_eq(bf16[1], 0xffc3);
}

Test(kernels_cast, the_same_type_is_copied_bit_for_bit)
{
    const uint16_t source[4] = {0x7c01, 0xffff, 0x8000, 0x7c00};
    uint16_t copy[4];
    size_t misfits =
        fsdp_kernels_get()->cast(copy, FSDP_F16, source, FSDP_F16, 4, FSDP_OVERFLOW_CLAMP);
    cr_assert_eq(misfits, 0);
    cr_assert_arr_eq(copy, source, sizeof source);
}

/* Random bits hold NaNs, infinities, subnormals and everything else; all tables must agree. */
static void compare_tables(fsdp_dtype to_type, fsdp_dtype from_type, const uint8_t *random)
{
    enum { MOST = 200, GUARD = 0xa5 };
    const fsdp_kernels *tables[8];
    size_t table_count = fsdp_kernels_all(tables, 8);
    size_t size = fsdp_dtype_size(to_type);
    uint8_t plain[8 * MOST + 16], other[8 * MOST + 16];
    for (size_t i = 0; i < 3 * MOST; i++) {
        size_t count = i % MOST, shift = i % 7;
        fsdp_on_overflow policy = policies[i / MOST];
        memset(plain, GUARD, sizeof plain);
        size_t misfits =
            tables[0]->cast(plain + shift, to_type, random + i, from_type, count, policy);
        for (size_t t = 1; t < table_count; t++) {
            memset(other, GUARD, sizeof other);
            cr_assert_eq(
                tables[t]->cast(other + shift, to_type, random + i, from_type, count, policy),
                misfits);
            cr_assert_arr_eq(other, plain, sizeof plain, "%s: %s to %s", tables[t]->name,
                             fsdp_dtype_name(from_type), fsdp_dtype_name(to_type));
        }
        cr_assert_eq(plain[shift + count * size], GUARD);
    }
}

/* data += factor * values by casts, and by add_scaled of every table, over several of its blocks. The values
 * have no NaNs: which of two NaNs a sum keeps depends on the compiler. Some sums are the largest of f32. */
static void compare_sums(fsdp_dtype type, const uint8_t *random, float factor)
{
    enum { MOST = 2100, SMALL = 200 };
    const fsdp_kernels *tables[8];
    size_t table_count = fsdp_kernels_all(tables, 8), size = fsdp_dtype_size(type);
    for (size_t i = 0; i < SMALL + 8; i++) {
        size_t count = i < SMALL ? i : MOST - i, shift = i % 7 * size;
        float values[MOST], sums[MOST];
        uint8_t expected[8 * MOST + 64], found[8 * MOST + 64];
        for (size_t j = 0; j < count; j++)
            values[j] = j % 37 == 5
                            ? FLT_MAX / 3
                            : ldexpf((float)random[i + j] - 128, random[i + j + 1] % 140 - 20);
        memcpy(expected, random + i, sizeof expected);
        size_t misfits =
            tables[0]->cast(sums, FSDP_F32, expected + shift, type, count, FSDP_OVERFLOW_INF);
        for (size_t j = 0; j < count; j++) {
            bool was_finite = isfinite(sums[j]);
            sums[j] += factor * values[j];
            misfits += was_finite && !isfinite(sums[j]);
        }
        misfits +=
            tables[0]->cast(expected + shift, type, sums, FSDP_F32, count, FSDP_OVERFLOW_FAIL);
        for (size_t t = 0; t < table_count; t++) {
            memcpy(found, random + i, sizeof found);
            cr_assert_eq(tables[t]->add_scaled(found + shift, type, values, factor, count),
                         misfits);
            cr_assert_arr_eq(found, expected, sizeof found, "%s: %zu sums of %s", tables[t]->name,
                             count, fsdp_dtype_name(type));
        }
    }
}

static void fill_random(uint8_t *random, size_t size)
{
    uint64_t state = 11;
    for (size_t i = 0; i < size; i++)
        random[i] = (uint8_t)next_random(&state);
    /* Every fourth float: an exponent of all ones, an exponent of zero. */
    for (size_t i = 0; i + 8 < size; i += 16) {
        random[i + 3] |= 0x7f;
        random[i + 2] |= 0x80;
        random[i + 7] &= 0x80;
        random[i + 6] &= 0x7f;
    }
}

Test(kernels_cast, sums_with_scaled_values_are_rounded_as_by_casts)
{
    static uint8_t random[32768];
    fill_random(random, sizeof random);
    for (int i = 0; i < FLOATS; i++)
        if (floats[i] != FSDP_F8_E8M0FNU)
            for (float factor = 0.75F; factor < 4; factor *= 4)
                compare_sums(floats[i], random, factor);
}

Test(kernels_cast, all_variants_agree_bit_for_bit_at_odd_sizes_and_addresses)
{
    static uint8_t random[8192];
    fill_random(random, sizeof random);
    for (int pair = 0; pair < FLOATS * FLOATS; pair++)
        compare_tables(floats[pair / FLOATS], floats[pair % FLOATS], random);
}

/* The 2^32 f32 codes in steps, so that AVX2 meets every exponent with many significands. */
Test(kernels_cast, f32_codes_in_steps_agree_in_all_variants)
{
    enum { COUNT = 1 << 16 };
    const fsdp_kernels *tables[8];
    size_t table_count = fsdp_kernels_all(tables, 8);
    static uint32_t codes[COUNT];
    static uint16_t plain[COUNT], other[COUNT];
    const fsdp_dtype targets[2] = {FSDP_BF16, FSDP_F16};
    for (uint32_t round = 0; round < 32; round++) {
        for (uint32_t i = 0; i < COUNT; i++)
            codes[i] = (i << 16) + round * 2048 + (i % 3) - 1;
        for (size_t t = 1; t < 2 * table_count; t++) {
            fsdp_dtype target = targets[t % 2];
            const fsdp_kernels *table = tables[t / 2];
            size_t misfits =
                tables[0]->cast(plain, target, codes, FSDP_F32, COUNT, FSDP_OVERFLOW_INF);
            cr_assert_eq(table->cast(other, target, codes, FSDP_F32, COUNT, FSDP_OVERFLOW_INF),
                         misfits);
            cr_assert_arr_eq(plain, other, sizeof plain);
        }
    }
}
