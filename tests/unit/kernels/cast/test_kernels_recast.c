/*
 * Casts that count what they do, against a model that looks at one element at a time: all codes of the 8- and
 * 16-bit types, and of f32 and f64 what lies at and around the targets' values. test_kernels_cast.c
 * shows that the elements themselves are right.
 */
#include "kernels/kernels.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const fsdp_dtype floats[] = {
    FSDP_F64,     FSDP_F32,         FSDP_F16,         FSDP_BF16,       FSDP_F8_E4M3FN,
    FSDP_F8_E5M2, FSDP_F8_E4M3FNUZ, FSDP_F8_E5M2FNUZ, FSDP_F8_E8M0FNU,
};
enum { FLOATS = 9, MOST = 1 << 17 };

static double value_of(fsdp_dtype type, const void *code)
{
    double value;
    fsdp_kernels_get()->cast(&value, FSDP_F64, code, type, 1, FSDP_OVERFLOW_INF);
    return value;
}

/* --- the model -------------------------------------------------------------------------------- */

static void model_element(fsdp_dtype to, fsdp_dtype from, const void *code,
                          fsdp_on_overflow overflow, fsdp_cast_tally *tally, uint8_t made[8])
{
    size_t misfits = fsdp_kernels_get()->cast(made, to, code, from, 1, overflow);
    double old = value_of(from, code), new = value_of(to, made);
    tally->overflows += misfits;
    tally->nans += isnan(new) != 0;
    if (misfits > 0 || !isfinite(old) || old == 0)
        return;
    if (new == 0) {
        tally->underflows++;
        tally->max_underflow = fmax(tally->max_underflow, fabs(old));
        return;
    }
    long double moved = fabsl((long double)new - old) / fabsl(old);
    tally->max_rounding = fmax(tally->max_rounding, (double)moved);
}

static void check(fsdp_dtype to, fsdp_dtype from, const void *codes, size_t count,
                  fsdp_on_overflow overflow)
{
    static uint8_t made[8 * MOST], expected[8 * MOST];
    fsdp_cast_tally tally = {0}, model = {0};
    size_t size = fsdp_dtype_size(to);
    double misfit;
    for (size_t i = 0; i < count; i++)
        model_element(to, from, (const uint8_t *)codes + i * fsdp_dtype_size(from), overflow,
                      &model, expected + i * size);
    cr_assert_eq(fsdp_cast_measured(&(fsdp_counted_cast){made, to, codes, from, count, overflow},
                                    &tally, &misfit),
                 count);
    const char *a = fsdp_dtype_name(from), *b = fsdp_dtype_name(to);
    cr_assert_arr_eq(made, expected, count * size, "%s to %s", a, b);
    cr_assert_eq(tally.overflows, model.overflows, "%s to %s", a, b);
    cr_assert_eq(tally.nans, model.nans, "%s to %s", a, b);
    cr_assert_eq(tally.underflows, model.underflows, "%s to %s", a, b);
    cr_assert_eq(tally.max_underflow, model.max_underflow, "%s to %s", a, b);
    cr_assert(fabs(tally.max_rounding - model.max_rounding) <= 1e-7 * model.max_rounding,
              "%s to %s: %.17g, expected %.17g", a, b, tally.max_rounding, model.max_rounding);
}

/* All codes at once, and a few at a time: the largest error of all hides what happens to the others. */
static void check_pairs(fsdp_dtype from, const uint8_t *codes, size_t count)
{
    size_t size = fsdp_dtype_size(from);
    for (int t = 0; t < FLOATS; t++) {
        for (int policy = FSDP_OVERFLOW_CLAMP; policy <= FSDP_OVERFLOW_INF; policy++) {
            check(floats[t], from, codes, count, (fsdp_on_overflow)policy);
            for (size_t first = 0; first + 37 <= count; first += 37 * (1 + count / 8192))
                check(floats[t], from, codes + first * size, 37, (fsdp_on_overflow)policy);
        }
    }
}

Test(kernels_recast, every_8_and_16_bit_code_is_counted_as_by_the_model)
{
    static uint16_t two[65536];
    static uint8_t one[256];
    for (unsigned i = 0; i < 65536; i++)
        two[i] = (uint16_t)i;
    for (unsigned i = 0; i < 256; i++)
        one[i] = (uint8_t)i;
    for (int f = 2; f < FLOATS; f++) {
        bool is_two = fsdp_dtype_size(floats[f]) == 2;
        check_pairs(floats[f], is_two ? (void *)two : one, is_two ? 65536 : 256);
    }
}

Test(kernels_recast, long_arrays_of_8_bit_codes_are_counted_like_short_ones)
{
    static uint8_t codes[70000];
    uint32_t state = 5;
    for (size_t i = 0; i < sizeof codes; i++)
        codes[i] = (uint8_t)((state = state * 1664525 + 1013904223) >> 24);
    for (int f = 4; f < FLOATS; f++) {
        for (int t = 0; t < FLOATS; t++) {
            check(floats[t], floats[f], codes, sizeof codes, FSDP_OVERFLOW_INF);
            check(floats[t], floats[f], codes, sizeof codes, FSDP_OVERFLOW_CLAMP);
        }
    }
}

Test(kernels_recast, a_code_far_behind_that_does_not_fit_is_named)
{
    static uint8_t codes[70000], made[70000];
    fsdp_cast_tally tally = {0};
    double misfit = 0;
    codes[50000] = 0x7b; /* 57344 */
    codes[50001] = 0xfb;
    cr_assert_eq(fsdp_cast_measured(&(fsdp_counted_cast){made, FSDP_F8_E4M3FN, codes, FSDP_F8_E5M2,
                                                         70000, FSDP_OVERFLOW_FAIL},
                                    &tally, &misfit),
                 50000);
    cr_assert_eq(misfit, 57344);
}

/* --- f32 and f64: where the targets' values are ----------------------------------------------- */

static size_t append(float *values, size_t count, float value)
{
    const float near[] = {value, nextafterf(value, INFINITY), nextafterf(value, 0)};
    for (int i = 0; i < 3; i++) {
        values[count++] = near[i];
        values[count++] = -near[i];
    }
    return count;
}

/* Values of a target (some of the 16-bit ones), what lies half-way between two, and a step next to both. */
static size_t edges_of(fsdp_dtype target, float *values)
{
    size_t size = fsdp_dtype_size(target), count = 0;
    unsigned codes = size == 2 ? 0x7fff : 0xff, step = size == 2 ? 13 : 1;
    for (unsigned code = 0; code + step <= codes; code += step) {
        uint16_t here = (uint16_t)code, next = (uint16_t)(code + 1);
        float a = (float)value_of(target, &here), b = (float)value_of(target, &next);
        count = append(values, count, a);
        if (isfinite(a) && isfinite(b))
            count = append(values, count, a / 2 + b / 2);
    }
    const uint32_t odd[] = {1,          0x80000001, 0x007fffff, 0x7f7fffff, 0x7f800000, 0xff800000,
                            0x7f800001, 0x7fc12345, 0xffffffff, 0x477fefff, 0x477ff000, 0x7f7f7fff,
                            0x7f7f8000, 0x33000000, 0x33000001, 0x00008000, 0x00008001};
    memcpy(values + count, odd, sizeof odd);
    return count + sizeof odd / sizeof *odd;
}

Test(kernels_recast, f32_and_f64_are_counted_as_by_the_model_at_all_edges)
{
    static float values[MOST];
    static double wide[MOST];
    for (int t = 2; t < FLOATS; t++) {
        size_t count = edges_of(floats[t], values);
        check_pairs(FSDP_F32, (const uint8_t *)values, count);
        for (size_t i = 0; i < count; i++)
            wide[i] = nextafter((double)values[i], i % 2 ? 0 : HUGE_VAL) * (i % 3 ? 1 : 1e3);
        check_pairs(FSDP_F64, (const uint8_t *)wide, count);
    }
}

Test(kernels_recast, all_variants_measure_the_same_of_anything)
{
    enum { COUNT = 4096 };
    const fsdp_kernels *tables[8];
    size_t table_count = fsdp_kernels_all(tables, 8);
    static float before[COUNT], after[COUNT];
    uint64_t state = 3;
    for (int round = 0; round < 200; round++) {
        for (size_t i = 0; i < COUNT; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            uint32_t bits = (uint32_t)(state >> 32), mask = i % 7 ? 0xffff0000 : 0x80000000;
            memcpy(&before[i], &bits, 4);
            bits &= i % 11 ? mask : 0x7fffffff;
            memcpy(&after[i], &bits, 4);
            if (!isfinite(before[i])) /* what no cast does is no matter */
                after[i] = before[i];
        }
        size_t count = COUNT - (size_t)round;
        fsdp_cast_measure plain = {.max_rounding = 1e-9F}, other;
        tables[0]->measure(&plain, before, after, count);
        for (size_t t = 1; t < table_count; t++) {
            other = (fsdp_cast_measure){.max_rounding = 1e-9F};
            tables[t]->measure(&other, before, after, count);
            cr_assert_eq(memcmp(&plain, &other, sizeof plain), 0, "%s", tables[t]->name);
        }
    }
}

/* --- in place, and overflow ------------------------------------------------------------------- */

static void check_in_place(fsdp_dtype to, fsdp_dtype from, size_t count)
{
    size_t to_size = fsdp_dtype_size(to), from_size = fsdp_dtype_size(from);
    size_t wider = to_size > from_size ? to_size : from_size;
    uint8_t *room = malloc(count * wider), *apart = malloc(count * wider),
            *made = malloc(count * wider);
    uint8_t *source = room + count * (wider - from_size);
    fsdp_cast_tally tally = {0};
    double misfit;
    for (size_t i = 0; i < count * from_size; i++)
        apart[i] = source[i] = (uint8_t)(i * i * 7 + i / 256);
    fsdp_kernels_get()->cast(made, to, apart, from, count, FSDP_OVERFLOW_CLAMP);
    fsdp_cast_measured(&(fsdp_counted_cast){room, to, source, from, count, FSDP_OVERFLOW_CLAMP},
                       &tally, &misfit);
    cr_assert_arr_eq(room, made, count * to_size, "%s to %s", fsdp_dtype_name(from),
                     fsdp_dtype_name(to));
    free(room);
    free(apart);
    free(made);
}

Test(kernels_recast, memory_may_be_shared)
{
    for (int pair = 0; pair < FLOATS * FLOATS; pair++) {
        check_in_place(floats[pair / FLOATS], floats[pair % FLOATS], 5000);
        check_in_place(floats[pair / FLOATS], floats[pair % FLOATS], 3);
    }
}

Test(kernels_recast, the_first_value_that_does_not_fit_is_named)
{
    static float values[5000];
    static uint16_t made[5000];
    fsdp_cast_tally tally = {0};
    double misfit = 0;
    values[7] = INFINITY;
    values[8] = NAN;
    values[4097] = -65520;
    values[4098] = 1e9F;
    cr_assert_eq(fsdp_cast_measured(&(fsdp_counted_cast){made, FSDP_F16, values, FSDP_F32, 5000,
                                                         FSDP_OVERFLOW_FAIL},
                                    &tally, &misfit),
                 4097);
    cr_assert_eq(misfit, -65520);
    values[4097] = -65519;
    values[4098] = 0;
    tally = (fsdp_cast_tally){0};
    cr_assert_eq(fsdp_cast_measured(&(fsdp_counted_cast){made, FSDP_F16, values, FSDP_F32, 5000,
                                                         FSDP_OVERFLOW_FAIL},
                                    &tally, &misfit),
                 5000);
    cr_assert_eq(tally.overflows, 0);
    cr_assert_eq(tally.nans, 1);
}

Test(kernels_recast, tallies_add_up)
{
    fsdp_cast_tally sum = {1, 2, 3, 0.5, 1e-9};
    const fsdp_cast_tally more = {10, 20, 30, 0.25, 1e-8};
    fsdp_cast_tally_add(&sum, &more);
    cr_assert(sum.overflows == 11 && sum.nans == 22 && sum.underflows == 33);
    cr_assert(sum.max_rounding == 0.5 && sum.max_underflow == 1e-8);
}
