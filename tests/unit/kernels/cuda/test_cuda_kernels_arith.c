/* kernels/cuda/arith.cu, run by the host, against kernels/train/tensor.h: every bit agrees. */
#include "tests/cuda/shim.h"
#include "tests/unit/kernels/cuda/cuda_cases.h"

#include <criterion/criterion.h>
#include <string.h>

enum { MOST_SOURCES = 9, MOST_SPANS = 6 };

static double random_factor(void)
{
    static const double factors[] = {1, 2, 0.5, 3, 0.1, 1.0 / 3};
    return factors[case_below(6)];
}

static size_t random_count(void)
{
    return case_count(case_below(4) == 0 ? 20000 : 500);
}

/* Ranks in order; sometimes the sum goes to where a source is. */
static void try_fold(uint64_t seed)
{
    case_buffer from[MOST_SOURCES];
    const void *sources[MOST_SOURCES], *references[MOST_SOURCES];
    case_seed(seed);
    fsdp_dtype dtype = case_folded[case_below(CASE_FOLDED)];
    bool is_float = fsdp_dtype_describe(dtype)->is_float, is_usual = is_float && case_below(2) == 0;
    int n = 1 + (int)case_below(MOST_SOURCES);
    size_t count = random_count();
    for (int i = 0; i < n; i++) {
        from[i] = case_tensor(dtype, count, true);
        if (is_usual)
            case_fill_usual(from[i].data, dtype, count, 1);
        sources[i] = references[i] = from[i].data;
    }
    case_buffer to = case_tensor(dtype, count, true), expected = case_buffer_copy(&to);
    if (case_below(3) == 0) {
        int same = (int)case_below((size_t)n);
        memcpy(to.data, from[same].data, count * fsdp_dtype_size(dtype));
        memcpy(expected.data, from[same].data, count * fsdp_dtype_size(dtype));
        sources[same] = to.data;
        references[same] = expected.data;
    }
    const fsdp_reduction how = {case_below(2) == 0 ? FSDP_FOLD_SUM : FSDP_FOLD_MAX,
                                is_float ? random_factor() : 1, is_float ? random_factor() : 1};
    const fsdp_cuda_span target = {to.data, dtype, count};
    case_expect_success(fsdp_cuda_fold(&target, sources, n, how, NULL));
    fsdp_tensor_fold(expected.data, references, n, dtype, count, how);
    case_expect_equal(&to, &expected, fsdp_dtype_name(dtype));
    for (int i = 0; i < n; i++)
        case_buffer_free(&from[i]);
    case_buffer_free(&to);
    case_buffer_free(&expected);
}

Test(cuda_kernels_arith, folds_are_those_of_c)
{
    for (uint64_t seed = 0; seed < 200; seed++)
        try_fold(seed);
}

static const fsdp_dtype plain[] = {FSDP_F32, FSDP_BF16, FSDP_F16};
enum { PLAIN = 3, WHOLE = 3 * 4096 + 77 /* tiles, and a part of one */ };

/* Up to three groups of sources, the last one partial. */
Test(cuda_kernels_arith, folds_of_whole_tiles_are_those_of_c)
{
    for (uint64_t seed = 0; seed < 90; seed++) {
        case_buffer from[MOST_SOURCES];
        const void *sources[MOST_SOURCES];
        fsdp_dtype dtype = plain[seed % PLAIN];
        int n = 1 + (int)(seed / PLAIN % MOST_SOURCES);
        size_t skew = seed % 4;
        case_seed(seed);
        for (int i = 0; i < n; i++) {
            from[i] = case_tensor_at(dtype, WHOLE, skew);
            sources[i] = from[i].data;
        }
        case_buffer to = case_tensor_at(dtype, WHOLE, skew), expected = case_buffer_copy(&to);
        const fsdp_reduction how = {case_below(2) == 0 ? FSDP_FOLD_SUM : FSDP_FOLD_MAX,
                                    random_factor(), random_factor()};
        const fsdp_cuda_span target = {to.data, dtype, WHOLE};
        case_expect_success(fsdp_cuda_fold(&target, sources, n, how, NULL));
        fsdp_tensor_fold(expected.data, sources, n, dtype, WHOLE, how);
        case_expect_equal(&to, &expected, fsdp_dtype_name(dtype));
        for (int i = 0; i < n; i++)
            case_buffer_free(&from[i]);
        case_buffer_free(&to);
        case_buffer_free(&expected);
    }
}

/* As many as a process can have threads that are ranks. */
Test(cuda_kernels_arith, a_thousand_sources_are_one_fold)
{
    enum { SOURCES = 1024 };
    static int32_t numbers[SOURCES];
    const void *from[SOURCES];
    int32_t sum = 0, expected = 0;
    const fsdp_cuda_span to = {&sum, FSDP_I32, 1};
    for (int i = 0; i < SOURCES; i++) {
        numbers[i] = i * i;
        expected += numbers[i];
        from[i] = &numbers[i];
    }
    case_seed(5);
    case_expect_success(
        fsdp_cuda_fold(&to, from, SOURCES, (fsdp_reduction){FSDP_FOLD_SUM, 1, 1}, NULL));
    cr_assert_eq(sum, expected);
}

Test(cuda_kernels_arith, a_fold_of_few_has_small_parameters)
{
    enum { SOURCES = 10, FEW = 8, SMALL = 1024 };
    static const int32_t numbers[SOURCES] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    for (int n = 1; n <= SOURCES; n++) {
        const void *from[SOURCES];
        int32_t sum = 0;
        const fsdp_cuda_span to = {&sum, FSDP_I32, 1};
        for (int i = 0; i < n; i++)
            from[i] = &numbers[i];
        case_expect_success(
            fsdp_cuda_fold(&to, from, n, (fsdp_reduction){FSDP_FOLD_SUM, 1, 1}, NULL));
        cr_assert_eq(fsdp_shim_parameters() <= SMALL, n <= FEW);
        cr_assert_eq(sum, n * (n + 1) / 2);
    }
}

Test(cuda_kernels_arith, too_many_sources_are_refused)
{
    float number = 0;
    const void *from[1] = {&number};
    const fsdp_cuda_span to = {&number, FSDP_F32, 1};
    const fsdp_reduction sum = {FSDP_FOLD_SUM, 1, 1};
    cr_assert_neq(fsdp_cuda_fold(&to, from, FSDP_CUDA_FOLD_SOURCES + 1, sum, NULL), 0);
    cr_assert_neq(fsdp_cuda_fold(&to, from, 0, sum, NULL), 0);
}

Test(cuda_kernels_arith, sums_of_two_are_those_of_c)
{
    for (uint64_t seed = 0; seed < 100; seed++) {
        case_seed(seed);
        fsdp_dtype to_type = case_float(), from_type = case_float();
        size_t count = random_count();
        case_buffer to = case_tensor(to_type, count, true),
                    from = case_tensor(from_type, count, true);
        case_buffer expected = case_buffer_copy(&to);
        const fsdp_cuda_span target = {to.data, to_type, count};
        case_expect_success(fsdp_cuda_add(&target, from.data, from_type, NULL));
        fsdp_tensor_add(expected.data, to_type, from.data, from_type, count);
        case_expect_equal(&to, &expected, fsdp_dtype_name(to_type));
        case_buffer_free(&to);
        case_buffer_free(&from);
        case_buffer_free(&expected);
    }
}

Test(cuda_kernels_arith, products_and_quotients_are_those_of_c)
{
    for (uint64_t seed = 0; seed < 100; seed++) {
        case_buffer found[MOST_SPANS], expected[MOST_SPANS];
        fsdp_cuda_span spans[MOST_SPANS];
        case_seed(seed);
        size_t n = case_below(MOST_SPANS + 1);
        for (size_t i = 0; i < n; i++) {
            spans[i] = (fsdp_cuda_span){.dtype = case_float(), .count = random_count()};
            found[i] = case_tensor(spans[i].dtype, spans[i].count, true);
            expected[i] = case_buffer_copy(&found[i]);
            spans[i].data = found[i].data;
        }
        double by = random_factor();
        bool divides = case_below(2) == 0;
        case_expect_success((divides ? fsdp_cuda_divide : fsdp_cuda_multiply)(spans, n, by, NULL));
        for (size_t i = 0; i < n; i++) {
            (divides ? fsdp_tensor_divide : fsdp_tensor_multiply)(expected[i].data, spans[i].dtype,
                                                                  spans[i].count, by);
            case_expect_equal(&found[i], &expected[i], fsdp_dtype_name(spans[i].dtype));
            case_buffer_free(&found[i]);
            case_buffer_free(&expected[i]);
        }
    }
}

/* Sums of each two types, products and quotients of each one. */
Test(cuda_kernels_arith, edits_of_whole_tiles_are_those_of_c)
{
    for (uint64_t seed = 0; seed < 4 * PLAIN * PLAIN; seed++) {
        fsdp_dtype to_type = plain[seed % PLAIN], from_type = plain[seed / PLAIN % PLAIN];
        size_t skew = seed / (PLAIN * PLAIN);
        case_seed(seed);
        case_buffer to = case_tensor_at(to_type, WHOLE, skew),
                    from = case_tensor_at(from_type, WHOLE, skew);
        case_buffer expected = case_buffer_copy(&to);
        const fsdp_cuda_span target = {to.data, to_type, WHOLE};
        case_expect_success(fsdp_cuda_add(&target, from.data, from_type, NULL));
        case_expect_success(fsdp_cuda_multiply(&target, 1, 0.7, NULL));
        case_expect_success(fsdp_cuda_divide(&target, 1, 0.9, NULL));
        fsdp_tensor_add(expected.data, to_type, from.data, from_type, WHOLE);
        fsdp_tensor_multiply(expected.data, to_type, WHOLE, 0.7);
        fsdp_tensor_divide(expected.data, to_type, WHOLE, 0.9);
        case_expect_equal(&to, &expected, fsdp_dtype_name(to_type));
        case_buffer_free(&to);
        case_buffer_free(&from);
        case_buffer_free(&expected);
    }
}

/* --- streams ---------------------------------------------------------------------------------- */

typedef struct held_launch {
    void (*run)(void *closure);
    void (*drop)(void *closure);
    void *closure, *stream;
} held_launch;

static held_launch held;

static void hold(void *stream, void (*run)(void *), void *closure, void (*drop)(void *))
{
    held = (held_launch){run, drop, closure, stream};
}

Test(cuda_kernels_arith, a_runtime_runs_launches_when_it_wants)
{
    int number = 7, stream = 0;
    const fsdp_cuda_span span = {&number, FSDP_I32, 1};
    const void *from[] = {&number, &number};
    const fsdp_reduction sum = {FSDP_FOLD_SUM, 1, 1};
    fsdp_shim_enqueue = hold;
    case_expect_success(fsdp_cuda_fold(&span, from, 2, sum, &stream));
    fsdp_shim_enqueue = NULL;
    cr_assert_eq(number, 7);
    cr_assert_eq(held.stream, &stream);
    held.run(held.closure);
    held.drop(held.closure);
    cr_assert_eq(number, 14);
}
