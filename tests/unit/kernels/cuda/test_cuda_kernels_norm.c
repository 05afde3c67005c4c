/* kernels/cuda/norm.cu, run by the host, against fsdp_tensor_power_sum and
 * fsdp_tensor_is_finite. */
#include "tests/unit/kernels/cuda/cuda_cases.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SPANS = 6, GROUP = 128 * 1024 /* elements */, WORKSPACE = 64 };

static size_t random_spans(fsdp_cuda_span *spans, case_buffer *buffers)
{
    size_t n = case_below(MOST_SPANS + 1);
    bool is_usual = case_below(3) > 0;
    for (size_t i = 0; i < n; i++) {
        size_t count = case_count(case_below(4) == 0 ? 5000 : 300);
        fsdp_dtype dtype = case_float();
        if (case_below(12) == 0)
            count += GROUP - 2000;
        buffers[i] = case_tensor(dtype, count, true);
        if (is_usual)
            case_fill_usual(buffers[i].data, dtype, count, 1);
        spans[i] = (fsdp_cuda_span){buffers[i].data, dtype, count};
    }
    return n;
}

static void free_all(case_buffer *buffers, size_t n)
{
    for (size_t i = 0; i < n; i++)
        case_buffer_free(&buffers[i]);
}

/* The bits agree also for other powers, since the shim takes the power of the C library. */
Test(cuda_kernels_norm, sums_of_powers_are_those_of_c)
{
    static const double powers[] = {2, 1, INFINITY, 3.5, 0};
    for (uint64_t seed = 0; seed < 60; seed++) {
        fsdp_cuda_span spans[MOST_SPANS];
        case_buffer buffers[MOST_SPANS];
        double partials[WORKSPACE], sums[MOST_SPANS + 1];
        case_seed(seed);
        size_t n = random_spans(spans, buffers), used = fsdp_cuda_power_partials(spans, n);
        double p = powers[seed % 5];
        cr_assert_lt(used, WORKSPACE);
        memset(partials, 0xa5, sizeof partials);
        memset(sums, 0xa5, sizeof sums);
        const double garbage = sums[n];
        case_expect_success(fsdp_cuda_power_sums(spans, n, p, partials, sums, NULL));
        for (size_t i = 0; i < n; i++) {
            double expected =
                fsdp_tensor_power_sum(spans[i].data, spans[i].dtype, spans[i].count, p);
            cr_assert(memcmp(&sums[i], &expected, sizeof expected) == 0,
                      "%s, %zu elements, p %g: %a, not %a", fsdp_dtype_name(spans[i].dtype),
                      spans[i].count, p, sums[i], expected);
        }
        cr_assert(memcmp(&sums[n], &garbage, sizeof garbage) == 0);
        cr_assert(memcmp(&partials[used], &garbage, sizeof garbage) == 0);
        free_all(buffers, n);
    }
}

/* The tensor has whole groups and a part of one; all pieces but the last are taken by vectors. */
static void try_groups(fsdp_dtype dtype, size_t skew, double p)
{
    enum { COUNT = 3 * GROUP + 17 };
    case_buffer buffer = case_tensor_at(dtype, COUNT, skew);
    case_fill_usual(buffer.data, dtype, COUNT, 1);
    const fsdp_cuda_span span = {buffer.data, dtype, COUNT};
    double partials[4], sum, expected = fsdp_tensor_power_sum(buffer.data, dtype, COUNT, p);
    cr_assert_eq(fsdp_cuda_power_partials(&span, 1), 4);
    case_expect_success(fsdp_cuda_power_sums(&span, 1, p, partials, &sum, NULL));
    cr_assert_eq(sum, expected);
    case_buffer_free(&buffer);
}

Test(cuda_kernels_norm, groups_are_added_in_order)
{
    static const fsdp_dtype types[] = {FSDP_F32, FSDP_BF16, FSDP_F16};
    static const double powers[] = {2, 1, INFINITY};
    case_seed(1);
    for (int i = 0; i < 9; i++)
        for (size_t skew = 0; skew < 3; skew++)
            try_groups(types[i % 3], skew, powers[i / 3]);
}

/* More groups than a block of threads adds at once, each with another sum. */
Test(cuda_kernels_norm, many_groups_are_added_in_order)
{
    enum { GROUPS = 256 + 2, COUNT = (GROUPS - 1) * GROUP + 17 };
    float *data = calloc(COUNT, sizeof *data);
    double *partials = calloc(GROUPS + 1, sizeof *partials), sum;
    cr_assert(data && partials);
    case_seed(4);
    for (size_t group = 0; group < GROUPS; group++)
        case_fill_usual(data + group * GROUP, FSDP_F32, 17, 1);
    const fsdp_cuda_span span = {data, FSDP_F32, COUNT};
    cr_assert_eq(fsdp_cuda_power_partials(&span, 1), GROUPS);
    case_expect_success(fsdp_cuda_power_sums(&span, 1, 1, partials, &sum, NULL));
    cr_assert_eq(sum, fsdp_tensor_power_sum(data, FSDP_F32, COUNT, 1));
    free(data);
    free(partials);
}

Test(cuda_kernels_norm, a_thousand_norms_are_two_launches)
{
    enum { SPANS = 1000, COUNT = 5 };
    static float data[SPANS][COUNT];
    static fsdp_cuda_span spans[SPANS];
    static double partials[SPANS], sums[SPANS];
    case_seed(2);
    for (int i = 0; i < SPANS; i++) {
        case_fill_usual(data[i], FSDP_F32, COUNT, 1);
        spans[i] = (fsdp_cuda_span){data[i], FSDP_F32, COUNT};
    }
    size_t before = case_launches();
    case_expect_success(fsdp_cuda_power_sums(spans, SPANS, 2, partials, sums, NULL));
    cr_assert_eq(case_launches() - before, 2);
    for (int i = 0; i < SPANS; i++)
        cr_assert_eq(sums[i], fsdp_tensor_power_sum(data[i], FSDP_F32, COUNT, 2));
}

/* Wherever it is in a whole tile, or in a part of one. */
Test(cuda_kernels_norm, one_element_of_whole_tiles_is_found)
{
    enum { COUNT = 3 * 4096 + 77 };
    static const fsdp_dtype types[] = {FSDP_F32, FSDP_BF16, FSDP_F16};
    for (uint64_t seed = 0; seed < 90; seed++) {
        fsdp_dtype dtype = types[seed % 3];
        int all_finite = 0;
        case_seed(seed);
        case_buffer buffer = case_tensor_at(dtype, COUNT, seed % 4);
        case_fill_usual(buffer.data, dtype, COUNT, 1);
        const fsdp_cuda_span span = {buffer.data, dtype, COUNT};
        case_expect_success(fsdp_cuda_are_finite(&span, 1, &all_finite, NULL));
        cr_assert_eq(all_finite, 1);
        const double wrong = seed % 2 == 0 ? INFINITY : NAN;
        fsdp_kernels_get()->cast(buffer.data + case_below(COUNT) * fsdp_dtype_size(dtype), dtype,
                                 &wrong, FSDP_F64, 1, FSDP_OVERFLOW_INF);
        case_expect_success(fsdp_cuda_are_finite(&span, 1, &all_finite, NULL));
        cr_assert_eq(all_finite, 0);
        case_buffer_free(&buffer);
    }
}

/* Fewer sums than threads, as many, and more, with a NaN or an infinity in some of them. */
Test(cuda_kernels_norm, a_norm_and_its_factor_are_those_of_c)
{
    enum { MOST = 700 };
    static const double powers[] = {2, 1, INFINITY, 3.5}, limits[] = {0.5, 1e9, INFINITY, 0};
    static double sums[MOST];
    for (uint64_t seed = 0; seed < 200; seed++) {
        double found[2] = {7, 7}, expected[2] = {7, 7};
        case_seed(seed);
        fsdp_norm_call call = {.sums = sums,
                               .n = case_below(4) == 0 ? 256 : case_below(MOST),
                               .p = powers[seed % 4],
                               .max_norm = limits[case_below(4)],
                               .skips = case_below(2) == 0};
        for (size_t i = 0; i < call.n; i++)
            sums[i] = (double)case_below(1000) / 7;
        if (call.n > 0 && case_below(3) == 0)
            sums[case_below(call.n)] = case_below(2) == 0 ? NAN : INFINITY;
        const bool wants_total = case_below(4) > 0, wants_factor = case_below(4) > 0;
        call.total_out = wants_total ? &found[0] : NULL;
        call.factor_out = wants_factor ? &found[1] : NULL;
        case_expect_success(fsdp_cuda_norm(&call, NULL));
        call.total_out = wants_total ? &expected[0] : NULL;
        call.factor_out = wants_factor ? &expected[1] : NULL;
        fsdp_tensor_norm(&call);
        cr_assert(memcmp(found, expected, sizeof found) == 0, "seed %d: %a %a, not %a %a",
                  (int)seed, found[0], found[1], expected[0], expected[1]);
    }
}

Test(cuda_kernels_norm, one_element_that_is_not_finite_is_found)
{
    static const double wrong[] = {INFINITY, -INFINITY, NAN};
    for (uint64_t seed = 0; seed < 100; seed++) {
        fsdp_cuda_span spans[MOST_SPANS];
        case_buffer buffers[MOST_SPANS];
        int all_finite = (int)0xa5a5a5a5, expected = 1;
        case_seed(seed);
        size_t n = random_spans(spans, buffers), place = n > 0 ? case_below(n) : 0;
        if (n > 0 && spans[place].count > 0 && case_below(2) == 0) {
            size_t at = case_below(spans[place].count);
            fsdp_kernels_get()->cast(buffers[place].data + at * fsdp_dtype_size(spans[place].dtype),
                                     spans[place].dtype, &wrong[case_below(3)], FSDP_F64, 1,
                                     FSDP_OVERFLOW_INF);
        }
        for (size_t i = 0; i < n; i++)
            expected &= fsdp_tensor_is_finite(spans[i].data, spans[i].dtype, spans[i].count);
        case_expect_success(fsdp_cuda_are_finite(spans, n, &all_finite, NULL));
        cr_assert_eq(all_finite, expected);
        free_all(buffers, n);
    }
}
