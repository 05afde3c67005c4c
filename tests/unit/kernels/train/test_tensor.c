/*
 * kernels/train/tensor.h against models that take one element at a time, in the order that the header gives;
 * they must agree bit for bit. Registered twice, the second time with FSDP_KERNELS=c, so that all variants
 * agree. Models cast single elements with the plain cast, which test_kernels_cast.c proves.
 */
#include "kernels/kernels.h"
#include "kernels/train/tensor.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOST = 3000,
    TAILS = 70,
    ROOM = 8 * MOST + 64,
    BLOCK = 1024,
    LANES = 64,
    GROUP = 128,
    GUARD = 0xa5
};

static const fsdp_dtype floats[] = {FSDP_F64,         FSDP_F32,         FSDP_F16,
                                    FSDP_BF16,        FSDP_F8_E4M3FN,   FSDP_F8_E5M2,
                                    FSDP_F8_E4M3FNUZ, FSDP_F8_E5M2FNUZ, FSDP_F8_E8M0FNU};
static const fsdp_dtype folded[] = {FSDP_F64, FSDP_F32, FSDP_F16, FSDP_BF16, FSDP_I64, FSDP_I32,
                                    FSDP_I16, FSDP_I8,  FSDP_U64, FSDP_U32,  FSDP_U16, FSDP_U8};
enum { FLOATS = sizeof floats / sizeof *floats, FOLDED = sizeof folded / sizeof *folded };

/* --- numbers --- */

static uint64_t random_state = 20;

static uint64_t next_random(void)
{
    random_state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t x = random_state;
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static void cast_one(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type)
{
    const fsdp_kernels *plain;
    fsdp_kernels_all(&plain, 1);
    plain->cast(to, to_type, from, from_type, 1, FSDP_OVERFLOW_INF);
}

static void *at(void *data, fsdp_dtype dtype, size_t index)
{
    return (char *)data + index * fsdp_dtype_size(dtype);
}

static double number_at(const void *data, fsdp_dtype dtype, size_t index)
{
    double number;
    cast_one(&number, FSDP_F64, (const char *)data + index * fsdp_dtype_size(dtype), dtype);
    return number;
}

static void put_number(void *data, fsdp_dtype dtype, size_t index, double number)
{
    cast_one(at(data, dtype, index), dtype, &number, FSDP_F64);
}

/* A quarter random codes, among them NaNs, infinities and subnormals; else usual numbers. */
static void fill(void *data, fsdp_dtype dtype, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t code = next_random();
        if (next_random() % 4 == 0 || !fsdp_dtype_describe(dtype)->is_float)
            memcpy(at(data, dtype, i), &code, fsdp_dtype_size(dtype));
        else
            put_number(data, dtype, i, ldexp((double)(int64_t)code, -60));
    }
}

/* Numbers as weights and gradients are. */
static void fill_usual(void *data, fsdp_dtype dtype, size_t count, double scale)
{
    for (size_t i = 0; i < count; i++)
        put_number(data, dtype, i, scale * ldexp((double)(int64_t)next_random(), -63));
}

/* One rounding of what the type computes with, NaNs made one. */
static double as_real(double x, bool wide)
{
    double rounded = wide ? x : (double)(float)x;
    return isnan(rounded) ? (double)NAN : rounded;
}

static bool is_wide(fsdp_dtype dtype)
{
    return dtype == FSDP_F64;
}

/* --- folds --- */

static double model_fold_float(const void *const *from, int n, fsdp_dtype dtype, size_t i,
                               fsdp_fold fold, double multiply, double divide)
{
    bool wide = is_wide(dtype);
    double total = as_real(number_at(from[0], dtype, i) * as_real(multiply, wide), wide);
    for (int k = 1; k < n; k++) {
        double x = as_real(number_at(from[k], dtype, i) * as_real(multiply, wide), wide);
        if (fold == FSDP_FOLD_SUM)
            total = as_real(total + x, wide);
        else if (isnan(x) || x > total)
            total = x;
    }
    return as_real(total / as_real(divide, wide), wide);
}

static int64_t integer_at(const void *data, fsdp_dtype dtype, size_t i)
{
    uint64_t code = 0;
    size_t size = fsdp_dtype_size(dtype);
    memcpy(&code, (const char *)data + i * size, size);
    switch (dtype) {
    case FSDP_I32: return (int32_t)code;
    case FSDP_I16: return (int16_t)code;
    case FSDP_I8: return (int8_t)code;
    default: return (int64_t)code;
    }
}

static uint64_t model_fold_integer(const void *const *from, int n, fsdp_dtype dtype, size_t i,
                                   fsdp_fold fold)
{
    int64_t total = integer_at(from[0], dtype, i);
    for (int k = 1; k < n; k++) {
        int64_t x = integer_at(from[k], dtype, i);
        bool is_larger = dtype == FSDP_U64 ? (uint64_t)x > (uint64_t)total : x > total;
        if (fold == FSDP_FOLD_SUM)
            total = (int64_t)((uint64_t)total + (uint64_t)x);
        else if (is_larger)
            total = x;
    }
    return (uint64_t)total;
}

static void model_fold(void *to, const void *const *from, int n, fsdp_dtype dtype, size_t count,
                       fsdp_fold fold, double multiply, double divide)
{
    for (size_t i = 0; i < count; i++) {
        if (fsdp_dtype_describe(dtype)->is_float) {
            put_number(to, dtype, i, model_fold_float(from, n, dtype, i, fold, multiply, divide));
        } else {
            uint64_t code = model_fold_integer(from, n, dtype, i, fold);
            memcpy(at(to, dtype, i), &code, fsdp_dtype_size(dtype));
        }
    }
}

enum { MOST_SOURCES = 9 };
static uint8_t sources[MOST_SOURCES][ROOM], result[ROOM], expected[ROOM];

/* in_place: -1, or the source that the result overwrites. */
static void check_fold(fsdp_dtype dtype, int n, size_t count, size_t shift, int in_place,
                       fsdp_fold fold, double multiply, double divide)
{
    const void *from[MOST_SOURCES];
    size_t bytes = count * fsdp_dtype_size(dtype);
    for (int k = 0; k < n; k++) {
        from[k] = sources[k] + shift;
        fill(sources[k] + shift, dtype, count);
    }
    memset(expected, GUARD, shift + bytes + 64);
    memset(result, GUARD, shift + bytes + 64);
    model_fold(expected + shift, from, n, dtype, count, fold, multiply, divide);
    uint8_t *to = in_place < 0 ? result : sources[in_place];
    memset(to + shift + bytes, GUARD, 64);
    fsdp_tensor_fold(to + shift, from, n, dtype, count, (fsdp_reduction){fold, multiply, divide});
    cr_assert_arr_eq(to + shift, expected + shift, bytes + 64,
                     "%d of %zu %s at %zu, times %g, by %g", n, count, fsdp_dtype_name(dtype),
                     shift, multiply, divide);
}

Test(tensor, folds_are_in_rank_order_with_one_rounding_for_all_types_and_tails)
{
    const double factors[] = {1, 1, 1.0 / 3, 0.5};
    const double divisors[] = {1, 2, 3, 4, 2.5, 0x1p-130, -2};
    for (size_t type = 0; type < FOLDED; type++) {
        bool is_float = fsdp_dtype_describe(folded[type])->is_float;
        size_t size = fsdp_dtype_size(folded[type]);
        for (size_t count = 0; count <= TAILS; count++) {
            int n = 1 + (int)(next_random() % MOST_SOURCES);
            fsdp_fold fold = next_random() % 4 == 0 ? FSDP_FOLD_MAX : FSDP_FOLD_SUM;
            size_t shift = count % 5 == 4 ? 1 : next_random() % 4 * size;
            int in_place = (int)(next_random() % (uint64_t)(n + 1)) - 1;
            check_fold(folded[type], n, count, shift, in_place, fold,
                       is_float ? factors[next_random() % 4] : 1,
                       is_float ? divisors[next_random() % 7] : 1);
        }
    }
}

Test(tensor, every_number_of_sources_folds_in_place_and_apart)
{
    for (size_t type = 0; type < FOLDED; type++) {
        for (int n = 1; n <= MOST_SOURCES; n++) {
            for (int in_place = -1; in_place < n; in_place++)
                check_fold(folded[type], n, 37, 0, in_place, FSDP_FOLD_SUM, 1, 1);
            check_fold(folded[type], n, 1100, 0, n - 1, FSDP_FOLD_MAX, 1, 1);
        }
        check_fold(folded[type], 3, MOST, 0, 2, FSDP_FOLD_SUM, 1, 1);
        check_fold(folded[type], 6, MOST, 0, 5, FSDP_FOLD_SUM, 1, 1);
    }
}

/* Pieces of odd sizes, as chunks and shards have them. */
static size_t piece_size(size_t first, size_t count)
{
    size_t n = 1 + next_random() % 97;
    return n < count - first ? n : count - first;
}

Test(tensor, a_fold_cut_into_pieces_has_the_same_bits)
{
    const double divisors[] = {1, 3, 4};
    for (size_t type = 0; type < FOLDED; type++) {
        size_t size = fsdp_dtype_size(folded[type]);
        double divide = type < 4 ? divisors[type % 3] : 1;
        const void *from[5];
        for (int k = 0; k < 5; k++) {
            from[k] = sources[k];
            fill(sources[k], folded[type], MOST);
        }
        fsdp_reduction how = {FSDP_FOLD_SUM, 1, divide};
        fsdp_tensor_fold(expected, from, 5, folded[type], MOST, how);
        for (size_t first = 0, n; first < MOST; first += n) {
            const void *part[5];
            n = piece_size(first, MOST);
            for (int k = 0; k < 5; k++)
                part[k] = sources[k] + first * size;
            fsdp_tensor_fold(result + first * size, part, 5, folded[type], n, how);
        }
        cr_assert_arr_eq(result, expected, MOST * size);
    }
}

Test(tensor, which_nan_came_first_does_not_show)
{
    const uint32_t one[2] = {0x7fc00001, 0xffc12345}, other[2] = {0xffc12345, 0x7f800001};
    const uint32_t the_nan[2] = {0x7fc00000, 0x7fc00000};
    uint32_t forth[2], back[2];
    const fsdp_reduction sum = {FSDP_FOLD_SUM, 1, 1};
    fsdp_tensor_fold(forth, (const void *[]){one, other}, 2, FSDP_F32, 2, sum);
    fsdp_tensor_fold(back, (const void *[]){other, one}, 2, FSDP_F32, 2, sum);
    cr_assert_arr_eq(forth, the_nan, sizeof the_nan);
    cr_assert_arr_eq(back, the_nan, sizeof the_nan);
}

Test(tensor, floats_and_integers_fold_others_do_not)
{
    int count = 0;
    for (int dtype = 0; dtype <= FSDP_DTYPE_COUNT; dtype++)
        count += fsdp_tensor_can_fold((fsdp_dtype)dtype);
    cr_assert_eq(count, FOLDED);
    for (size_t i = 0; i < FOLDED; i++)
        cr_assert(fsdp_tensor_can_fold(folded[i]));
}

/* --- arithmetic in place --- */

static void check_add(fsdp_dtype to_type, fsdp_dtype from_type, size_t count, size_t shift)
{
    bool wide = is_wide(to_type) || is_wide(from_type);
    size_t bytes = count * fsdp_dtype_size(to_type);
    fill(result + shift, to_type, count);
    fill(sources[0] + shift, from_type, count);
    memset(result + shift + bytes, GUARD, 64);
    memcpy(expected, result, shift + bytes + 64);
    for (size_t i = 0; i < count; i++)
        put_number(expected + shift, to_type, i,
                   as_real(number_at(result + shift, to_type, i) +
                               number_at(sources[0] + shift, from_type, i),
                           wide));
    fsdp_tensor_add(result + shift, to_type, sources[0] + shift, from_type, count);
    cr_assert_arr_eq(result, expected, shift + bytes + 64, "%zu %s += %s", count,
                     fsdp_dtype_name(to_type), fsdp_dtype_name(from_type));
}

Test(tensor, add_rounds_once_for_all_pairs_of_types)
{
    for (size_t pair = 0; pair < FLOATS * FLOATS; pair++) {
        fsdp_dtype to = floats[pair / FLOATS], from = floats[pair % FLOATS];
        for (size_t count = 0; count <= TAILS; count += 1 + pair % 3)
            check_add(to, from, count, count % 4 == 0 ? 3 : 8 * (count % 3));
        check_add(to, from, 1500, 0);
    }
}

Test(tensor, a_tensor_is_added_to_itself)
{
    for (size_t type = 0; type < 4; type++) {
        size_t bytes = 1500 * fsdp_dtype_size(floats[type]);
        fill_usual(result, floats[type], 1500, 1);
        memcpy(expected, result, bytes);
        fsdp_tensor_add(result, floats[type], result, floats[type], 1500);
        fsdp_tensor_multiply(expected, floats[type], 1500, 2);
        cr_assert_arr_eq(result, expected, bytes);
    }
}

static void check_scale(fsdp_dtype dtype, size_t count, size_t shift, double by, bool divides)
{
    bool wide = is_wide(dtype);
    double factor = as_real(by, wide);
    size_t bytes = count * fsdp_dtype_size(dtype);
    fill(result + shift, dtype, count);
    memset(result + shift + bytes, GUARD, 64);
    memcpy(expected, result, shift + bytes + 64);
    for (size_t i = 0; i < count; i++) {
        double x = number_at(result + shift, dtype, i);
        put_number(expected + shift, dtype, i, as_real(divides ? x / factor : x * factor, wide));
    }
    if (divides)
        fsdp_tensor_divide(result + shift, dtype, count, by);
    else
        fsdp_tensor_multiply(result + shift, dtype, count, by);
    cr_assert_arr_eq(result, expected, shift + bytes + 64, "%zu %s by %g", count,
                     fsdp_dtype_name(dtype), by);
}

Test(tensor, multiply_and_divide_round_once)
{
    const double by[] = {1.0 / 3, 3, 65536, 1e-30, 0, -7.5};
    for (size_t type = 0; type < FLOATS; type++) {
        for (size_t count = 0; count <= TAILS; count++)
            check_scale(floats[type], count, count % 3 == 0 ? 5 : 8 * (count % 4), by[count % 6],
                        count % 2);
        check_scale(floats[type], 1500, 0, 3, true);
    }
}

Test(tensor, one_infinity_or_nan_anywhere_is_found)
{
    for (size_t type = 0; type < FLOATS; type++) {
        fsdp_dtype dtype = floats[type];
        double largest = type == 0 ? 0x1.fffffffffffffp1023 : type == 1 ? 0x1.fffffep127 : 4;
        for (size_t count = 0; count <= TAILS; count++) {
            for (size_t i = 0; i < count; i++)
                put_number(result, dtype, i, i % 2 ? largest : -largest);
            cr_assert(fsdp_tensor_is_finite(result, dtype, count), "%zu %s", count,
                      fsdp_dtype_name(dtype));
            for (size_t i = 0; i < count; i++) {
                double kept = number_at(result, dtype, i);
                put_number(result, dtype, i, i % 3 == 0 ? NAN : i % 3 == 1 ? INFINITY : -INFINITY);
                cr_assert(!fsdp_tensor_is_finite(result, dtype, count));
                put_number(result, dtype, i, kept);
            }
        }
        memset(result, 0x11, ROOM);
        cr_assert(fsdp_tensor_is_finite(result, dtype, 2500));
        put_number(result, dtype, 2499, NAN);
        cr_assert(!fsdp_tensor_is_finite(result, dtype, 2500));
    }
}

/* --- norms --- */

static double model_power_sum(const void *data, fsdp_dtype dtype, size_t count, double p)
{
    double total = 0, group = 0;
    for (size_t first = 0; first < count; first += BLOCK) {
        double lane[LANES] = {0};
        if (first % (GROUP * (size_t)BLOCK) == 0) {
            total += group;
            group = 0;
        }
        for (size_t i = 0; i < BLOCK && first + i < count; i++)
            lane[i % LANES] += pow(fabs(number_at(data, dtype, first + i)), p);
        for (size_t half = LANES / 2; half > 0; half /= 2)
            for (size_t l = 0; l < half; l++)
                lane[l] += lane[l + half];
        group += lane[0];
    }
    return total + group;
}

Test(tensor, power_sums_of_large_tensors_are_added_by_groups)
{
    enum { COUNT = 2 * GROUP * BLOCK + 3 * BLOCK + 5 };
    float *data = malloc(COUNT * sizeof *data);
    cr_assert(data);
    fill_usual(data, FSDP_F32, COUNT, 3);
    cr_assert_eq(fsdp_tensor_power_sum(data, FSDP_F32, COUNT, 2),
                 model_power_sum(data, FSDP_F32, COUNT, 2));
    free(data);
}

static void check_power_sum(fsdp_dtype dtype, size_t count, double p)
{
    long double exact = 0;
    fill_usual(result, dtype, count, 3);
    for (size_t i = 0; i < count; i++)
        exact += powl(fabsl((long double)number_at(result, dtype, i)), p);
    double found = fsdp_tensor_power_sum(result, dtype, count, p);
    cr_assert_eq(found, model_power_sum(result, dtype, count, p), "%zu %s, p = %g", count,
                 fsdp_dtype_name(dtype), p);
    cr_assert_leq(fabsl((long double)found - exact), 1e-13L * exact);
}

Test(tensor, power_sums_are_added_in_the_order_that_is_written_down)
{
    const double powers[] = {2, 1, 3.5, 0};
    for (size_t type = 0; type < FLOATS; type++) {
        for (size_t count = 0; count <= TAILS; count++)
            check_power_sum(floats[type], count, powers[count % 4]);
        for (size_t i = 0; i < 4; i++)
            check_power_sum(floats[type], 2500, powers[i]);
    }
}

Test(tensor, the_infinite_norm_is_the_largest_magnitude_and_nan_wins)
{
    for (size_t type = 0; type < 4; type++) {
        for (size_t count = 1; count <= TAILS; count++) {
            size_t place = next_random() % count;
            fill_usual(result, floats[type], count, 1);
            put_number(result, floats[type], place, -7);
            cr_assert_eq(fsdp_tensor_power_sum(result, floats[type], count, INFINITY), 7);
            put_number(result, floats[type], place, NAN);
            cr_assert(isnan(fsdp_tensor_power_sum(result, floats[type], count, INFINITY)));
            cr_assert(isnan(fsdp_tensor_power_sum(result, floats[type], count, 2)));
        }
        cr_assert_eq(fsdp_tensor_power_sum(result, floats[type], 0, INFINITY), 0);
    }
}

/* --- rectangles --- */

static void model_rect(const fsdp_rect *rect)
{
    size_t to_size = fsdp_dtype_size(rect->to_type), from_size = fsdp_dtype_size(rect->from_type);
    for (int64_t row = 0; row < rect->rows; row++) {
        for (int64_t i = 0; i < rect->width; i++) {
            char *to = (char *)rect->to + (size_t)(row * rect->to_pitch + i) * to_size;
            if (rect->from)
                cast_one(to, rect->to_type,
                         (const char *)rect->from +
                             (size_t)(row * rect->from_pitch + i) * from_size,
                         rect->from_type);
            else
                memset(to, 0, to_size);
        }
    }
}

/* The rectangle at byte `shift` of both buffers; gaps must stay what they were. */
static void check_rect(fsdp_rect rect, size_t shift)
{
    memset(result, GUARD, ROOM);
    memset(expected, GUARD, ROOM);
    if (rect.from)
        rect.from = sources[0] + shift;
    rect.to = expected + shift;
    model_rect(&rect);
    rect.to = result + shift;
    fsdp_rects_copy(&rect, 1);
    cr_assert_arr_eq(result, expected, ROOM, "%ld rows of %ld, %s from %s", (long)rect.rows,
                     (long)rect.width, fsdp_dtype_name(rect.to_type),
                     fsdp_dtype_name(rect.from_type));
}

static fsdp_rect random_rect(fsdp_dtype to_type, fsdp_dtype from_type, int64_t width)
{
    fsdp_rect rect = {.from = sources[0], .to_type = to_type, .from_type = from_type};
    int64_t gap = (int64_t)(next_random() % 5), other_gap = (int64_t)(next_random() % 3);
    rect.width = width;
    rect.to_pitch = width + (next_random() % 2 ? gap : 0);
    rect.from_pitch = width + (next_random() % 2 ? other_gap : 0);
    int64_t most = (MOST - 16) / (width + 5);
    rect.rows = (int64_t)(next_random() % (uint64_t)(most < 40 ? most + 1 : 40));
    if (next_random() % 8 == 0)
        rect.from = NULL;
    return rect;
}

Test(tensor, rectangles_are_cast_copied_and_cleared_element_by_element)
{
    const int64_t wide[] = {127, 128, 129, 700, 1100};
    for (size_t pair = 0; pair < FLOATS * FLOATS; pair++) {
        fsdp_dtype to = floats[pair / FLOATS], from = floats[pair % FLOATS];
        fill(sources[0], from, MOST);
        for (int64_t width = 0; width <= TAILS; width += 1 + (int64_t)(next_random() % 3))
            check_rect(random_rect(to, from, width), next_random() % 9);
        for (size_t i = 0; i < 5; i++)
            check_rect(random_rect(to, from, wide[i]), next_random() % 9);
    }
}

Test(tensor, many_short_rows_are_cast_in_several_packs)
{
    fill(sources[0], FSDP_F32, MOST);
    for (int64_t width = 1; width < 8; width++) {
        int64_t rows = (MOST - 16) / (width + 1);
        check_rect((fsdp_rect){.from = sources[0],
                               .to_type = FSDP_BF16,
                               .from_type = FSDP_F32,
                               .rows = rows,
                               .width = width,
                               .to_pitch = width,
                               .from_pitch = width + 1},
                   0);
    }
}

Test(tensor, rectangles_of_any_type_are_copied_bit_for_bit)
{
    for (int type = FSDP_F64; type < FSDP_DTYPE_COUNT; type++) {
        if (fsdp_dtype_size((fsdp_dtype)type) > 8)
            continue;
        for (size_t i = 0; i < ROOM; i++)
            sources[0][i] = (uint8_t)next_random();
        memset(result, GUARD, ROOM);
        fsdp_rect rect = random_rect((fsdp_dtype)type, (fsdp_dtype)type, 7);
        size_t size = fsdp_dtype_size(rect.to_type);
        rect.to = result;
        rect.from = sources[0];
        fsdp_rects_copy(&rect, 1);
        for (int64_t row = 0; row < rect.rows; row++)
            cr_assert_arr_eq(result + (size_t)(row * rect.to_pitch) * size,
                             sources[0] + (size_t)(row * rect.from_pitch) * size, 7 * size);
    }
}

/* Columns of one tensor are copied together: its parts are the rows of `count` packed rectangles, or come
 * from them. */
static void check_columns(fsdp_dtype to_type, fsdp_dtype from_type, int64_t width, bool spreads)
{
    enum { COLUMNS = 3, ROWS = 4 };
    fsdp_rect rects[COLUMNS], wanted[COLUMNS];
    const int64_t widths[COLUMNS] = {width, width + 1, width};
    int64_t at = 0, packed = 0, pitch = 3 * width + 1 + (int64_t)(next_random() % 2);
    memset(result, GUARD, ROOM);
    memset(expected, GUARD, ROOM);
    for (int i = 0; i < COLUMNS; i++) {
        size_t to = (size_t)(spreads ? at : packed) * fsdp_dtype_size(to_type);
        size_t from = (size_t)(spreads ? packed : at) * fsdp_dtype_size(from_type);
        rects[i] = (fsdp_rect){.to = result + to,
                               .from = sources[0] + from,
                               .to_type = to_type,
                               .from_type = from_type,
                               .rows = ROWS,
                               .width = widths[i],
                               .to_pitch = spreads ? pitch : widths[i],
                               .from_pitch = spreads ? widths[i] : pitch};
        wanted[i] = rects[i];
        wanted[i].to = expected + to;
        model_rect(&wanted[i]);
        at += widths[i];
        packed += ROWS * widths[i];
    }
    fsdp_rects_copy(rects, COLUMNS);
    cr_assert_arr_eq(result, expected, ROOM, "columns of %ld, %s from %s", (long)width,
                     fsdp_dtype_name(to_type), fsdp_dtype_name(from_type));
}

Test(tensor, columns_that_are_copied_together_are_those_copied_alone)
{
    const int64_t widths[] = {2, 63, 64, 65, 130, 200};
    for (size_t pair = 0; pair < FLOATS * FLOATS; pair++) {
        fsdp_dtype to = floats[pair / FLOATS], from = floats[pair % FLOATS];
        fill(sources[0], from, MOST);
        for (size_t i = 0; i < 2 * sizeof widths / sizeof *widths; i++)
            check_columns(to, from, widths[i / 2], i % 2 == 0);
    }
}

/* So much that caches are left alone; rows at odd places. */
Test(tensor, long_rows_of_much_data_are_copied_bit_for_bit)
{
    enum { ROWS = 3, WIDTH = (3 << 20) + 77, GAP = 5, BYTES = ROWS * (WIDTH + GAP) + 1 };
    uint8_t *from = malloc(BYTES), *to = malloc(BYTES);
    for (size_t i = 0; i < BYTES; i++)
        from[i] = (uint8_t)(i * 7 + i / 251);
    memset(to, GUARD, BYTES);
    const fsdp_rect rect = {to + 1, from, FSDP_U8, FSDP_U8, ROWS, WIDTH, WIDTH + GAP, WIDTH + 1};
    fsdp_rects_copy(&rect, 1);
    for (size_t row = 0; row < ROWS; row++) {
        cr_assert_arr_eq(to + 1 + row * (WIDTH + GAP), from + row * (WIDTH + 1), WIDTH);
        for (size_t i = 0; i < GAP; i++)
            cr_assert_eq(to[1 + row * (WIDTH + GAP) + WIDTH + i], GUARD);
    }
    cr_assert_eq(to[0], GUARD);
    free(from);
    free(to);
}

/* The worked example of chunk-cat: a is 3x2, b has 3, two ranks. */
Test(tensor, a_list_of_rectangles_is_a_chunk_cat)
{
    const float a[6] = {1, 2, 3, 4, 5, 6}, b[3] = {7, 8, 9};
    const float wanted[12] = {1, 2, 3, 4, 7, 8, 5, 6, 0, 0, 9, 0};
    float packed[12];
    const fsdp_rect rects[] = {
        {packed, a, FSDP_F32, FSDP_F32, 1, 4, 6, 4},
        {packed + 4, b, FSDP_F32, FSDP_F32, 1, 2, 6, 2},
        {packed + 6, a + 4, FSDP_F32, FSDP_F32, 1, 2, 6, 2},
        {packed + 8, NULL, FSDP_F32, FSDP_F32, 1, 2, 6, 0},
        {packed + 10, b + 2, FSDP_F32, FSDP_F32, 1, 1, 6, 1},
        {packed + 11, NULL, FSDP_F32, FSDP_F32, 1, 1, 6, 0},
    };
    memset(packed, GUARD, sizeof packed);
    fsdp_rects_copy(rects, sizeof rects / sizeof *rects);
    cr_assert_arr_eq(packed, wanted, sizeof wanted);
}

/* --- optimizers --- */

typedef struct optimizer_case {
    fsdp_dtype param_type, grad_type, moment_type;
    bool has_master;
} optimizer_case;

static const optimizer_case optimizer_cases[] = {
    {FSDP_F32, FSDP_F32, FSDP_F32, false},    {FSDP_F64, FSDP_F64, FSDP_F64, false},
    {FSDP_F64, FSDP_F32, FSDP_F32, false},    {FSDP_F32, FSDP_BF16, FSDP_F32, false},
    {FSDP_BF16, FSDP_BF16, FSDP_F32, true},   {FSDP_F16, FSDP_F32, FSDP_F32, true},
    {FSDP_BF16, FSDP_BF16, FSDP_BF16, false}, {FSDP_F16, FSDP_F16, FSDP_F32, false},
};
enum { OPTIMIZER_CASES = sizeof optimizer_cases / sizeof *optimizer_cases };

/* Operands of a step: one set for the kernel, one for the model. */
typedef struct tensors {
    double param[MOST], mean[MOST], square[MOST], grad[MOST]; /* as bytes of any type */
    float master[MOST];
} tensors;

static tensors actual, model;

static void fill_tensors(const optimizer_case *types, size_t count)
{
    memset(&actual, GUARD, sizeof actual);
    fill_usual(actual.param, types->param_type, count, 1);
    fill_usual(actual.grad, types->grad_type, count, 0.01);
    fill_usual(actual.mean, types->moment_type, count, 0.01);
    fill_usual(actual.square, types->moment_type, count, 0.001);
    for (size_t i = 0; i < count; i++) {
        double square = number_at(actual.square, types->moment_type, i);
        put_number(actual.square, types->moment_type, i, fabs(square));
        actual.master[i] = (float)number_at(actual.param, types->param_type, i) + 1e-6f;
    }
    if (count > 5) {
        put_number(actual.grad, types->grad_type, 3, NAN);
        put_number(actual.grad, types->grad_type, count - 1, INFINITY);
        put_number(actual.grad, types->grad_type, 4, 0);
        put_number(actual.square, types->moment_type, 4, 0);
    }
    memcpy(&model, &actual, sizeof actual);
}

static double weight_at(const tensors *state, const optimizer_case *types, size_t i)
{
    return types->has_master ? (double)state->master[i]
                             : number_at(state->param, types->param_type, i);
}

static void put_weight(tensors *state, const optimizer_case *types, size_t i, double weight)
{
    put_number(state->param, types->param_type, i, weight);
    if (types->has_master)
        state->master[i] = (float)weight;
}

/* Each operation rounded: f32 in f32, f64 in f64. */
static void model_adamw(const optimizer_case *types, size_t i, const fsdp_adamw_step *step)
{
    bool wide = types->param_type == FSDP_F64;
    double g = as_real(number_at(model.grad, types->grad_type, i) *
                           as_real(step->grad_scale * (step->maximize ? -1 : 1), wide),
                       wide);
    double m = as_real(number_at(model.mean, types->moment_type, i), wide);
    double v = as_real(number_at(model.square, types->moment_type, i), wide);
    double p = weight_at(&model, types, i);
    double weight = as_real(1 - step->beta1, wide);
    double apart = as_real(g - m, wide);
    if (weight < 0.5)
        m = as_real(m + as_real(weight * apart, wide), wide);
    else
        m = as_real(g - as_real(apart * as_real(1 - weight, wide), wide), wide);
    double kept = as_real(v * as_real(step->beta2, wide), wide);
    double added = as_real(as_real(as_real(1 - step->beta2, wide) * g, wide) * g, wide);
    v = as_real(kept + added, wide);
    double bias1 = 1 - pow(step->beta1, (double)step->step);
    double bias2 = sqrt(1 - pow(step->beta2, (double)step->step));
    double spread = as_real(as_real(sqrt(v), wide) / as_real(bias2, wide), wide);
    spread = as_real(spread + as_real(step->eps, wide), wide);
    p = as_real(p * as_real(1 - step->lr * step->weight_decay, wide), wide);
    double change = as_real(as_real(as_real(step->lr / bias1, wide) * m, wide) / spread, wide);
    put_weight(&model, types, i, as_real(p - change, wide));
    put_number(model.mean, types->moment_type, i, m);
    put_number(model.square, types->moment_type, i, v);
}

static fsdp_optim_tensors tensors_of(const optimizer_case *types, size_t first, size_t n)
{
    return (fsdp_optim_tensors){
        .param = at(actual.param, types->param_type, first),
        .param_type = types->param_type,
        .master = types->has_master ? actual.master + first : NULL,
        .grad = at(actual.grad, types->grad_type, first),
        .grad_type = types->grad_type,
        .moments = {at(actual.mean, types->moment_type, first),
                    at(actual.square, types->moment_type, first)},
        .moment_type = types->moment_type,
        .count = n,
    };
}

static void step_adamw(const optimizer_case *types, size_t first, size_t n,
                       const fsdp_adamw_step *step)
{
    fsdp_optim_tensors given = tensors_of(types, first, n);
    fsdp_tensor_adamw(&given, step);
}

static void check_tensors(const optimizer_case *types, size_t count)
{
    const char *name = fsdp_dtype_name(types->param_type);
    cr_assert_arr_eq(actual.param, model.param, sizeof model.param, "%zu %s", count, name);
    cr_assert_arr_eq(actual.master, model.master, sizeof model.master, "%zu %s", count, name);
    cr_assert_arr_eq(actual.mean, model.mean, sizeof model.mean, "%zu %s", count, name);
    cr_assert_arr_eq(actual.square, model.square, sizeof model.square, "%zu %s", count, name);
    cr_assert_arr_eq(actual.grad, model.grad, sizeof model.grad, "%zu %s", count, name);
}

static fsdp_adamw_step adamw_step(size_t round)
{
    return (fsdp_adamw_step){.lr = 1e-3,
                             .beta1 = round % 3 == 2 ? 0.3 : 0.9,
                             .beta2 = 0.999,
                             .eps = 1e-8,
                             .weight_decay = round % 2 ? 0.1 : 0,
                             .step = 1 + (int64_t)round,
                             .grad_scale = round % 5 == 4 ? 0.3 : 1,
                             .maximize = round % 7 == 6};
}

Test(tensor, adamw_rounds_as_the_formula_for_all_types_and_tails)
{
    for (size_t types = 0; types < OPTIMIZER_CASES; types++) {
        for (size_t count = 0; count <= TAILS; count++) {
            fsdp_adamw_step step = adamw_step(count);
            fill_tensors(&optimizer_cases[types], count);
            for (size_t i = 0; i < count; i++)
                model_adamw(&optimizer_cases[types], i, &step);
            step_adamw(&optimizer_cases[types], 0, count, &step);
            check_tensors(&optimizer_cases[types], count);
        }
    }
}

static void model_sgd(const optimizer_case *types, size_t i, const fsdp_sgd_step *step)
{
    bool wide = types->param_type == FSDP_F64;
    double momentum = as_real(step->momentum, wide), p = weight_at(&model, types, i);
    double g = as_real(number_at(model.grad, types->grad_type, i) *
                           as_real(step->grad_scale * (step->maximize ? -1 : 1), wide),
                       wide);
    if (step->weight_decay != 0)
        g = as_real(g + as_real(as_real(step->weight_decay, wide) * p, wide), wide);
    if (step->momentum != 0) {
        double buf = as_real(number_at(model.mean, types->moment_type, i), wide);
        double added = as_real(as_real(1 - step->dampening, wide) * g, wide);
        buf = step->is_first ? g : as_real(as_real(buf * momentum, wide) + added, wide);
        put_number(model.mean, types->moment_type, i, buf);
        g = step->nesterov ? as_real(g + as_real(momentum * buf, wide), wide) : buf;
    }
    put_weight(&model, types, i, as_real(p - as_real(as_real(step->lr, wide) * g, wide), wide));
}

static void step_sgd(const optimizer_case *types, size_t first, size_t n, const fsdp_sgd_step *step)
{
    fsdp_optim_tensors given = tensors_of(types, first, n);
    if (step->momentum == 0)
        given.moments[0] = NULL;
    fsdp_tensor_sgd(&given, step);
}

static fsdp_sgd_step sgd_step(size_t round)
{
    return (fsdp_sgd_step){.lr = 0.1,
                           .momentum = round % 2 ? 0.9 : 0,
                           .dampening = round % 8 == 5 ? 0.2 : 0,
                           .weight_decay = round % 3 ? 0.01 : 0,
                           .nesterov = round % 4 == 3,
                           .is_first = round % 5 == 0,
                           .maximize = round % 7 == 6,
                           .grad_scale = round % 6 == 4 ? 0.5 : 1};
}

Test(tensor, sgd_rounds_as_the_formula_for_all_types_and_tails)
{
    for (size_t types = 0; types < OPTIMIZER_CASES; types++) {
        for (size_t count = 0; count <= TAILS; count++) {
            fsdp_sgd_step step = sgd_step(count);
            fill_tensors(&optimizer_cases[types], count);
            for (size_t i = 0; i < count; i++)
                model_sgd(&optimizer_cases[types], i, &step);
            step_sgd(&optimizer_cases[types], 0, count, &step);
            check_tensors(&optimizer_cases[types], count);
        }
    }
}

/* The model is made by one call here: shards of any size step alike. */
Test(tensor, a_step_does_not_depend_on_the_sizes_of_shards)
{
    const fsdp_adamw_step adamw = adamw_step(3);
    const fsdp_sgd_step sgd = sgd_step(3);
    for (size_t round = 0; round < 2 * OPTIMIZER_CASES; round++) {
        static tensors before, whole;
        const optimizer_case *types = &optimizer_cases[round / 2];
        fill_tensors(types, MOST);
        memcpy(&before, &actual, sizeof actual);
        for (size_t first = 0, n; first < MOST; first += n) {
            n = piece_size(first, MOST);
            if (round % 2)
                step_adamw(types, first, n, &adamw);
            else
                step_sgd(types, first, n, &sgd);
        }
        memcpy(&whole, &actual, sizeof actual);
        memcpy(&actual, &before, sizeof actual);
        if (round % 2)
            step_adamw(types, 0, MOST, &adamw);
        else
            step_sgd(types, 0, MOST, &sgd);
        memcpy(&model, &whole, sizeof model);
        check_tensors(types, MOST);
    }
}
