/* kernels/cuda/rects.cu, run by the host, against fsdp_rects_copy: every byte agrees. */
#include "tests/cuda/shim.h"
#include "tests/unit/kernels/cuda/cuda_cases.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

enum { MOST_RECTS = 8, CODES = 256 };

/* Every type to every other: all codes of small types, random ones and edges of large types. */
Test(cuda_kernels_rects, casts_are_those_of_c)
{
    for (int pair = 0; pair < CASE_FLOATS * CASE_FLOATS; pair++) {
        fsdp_dtype from_type = case_floats[pair % CASE_FLOATS],
                   to_type = case_floats[pair / CASE_FLOATS];
        size_t count = fsdp_dtype_size(from_type) == 1 ? CODES : 6000;
        case_seed((uint64_t)pair);
        case_buffer from = case_tensor(from_type, count, false);
        for (size_t i = 0; i < count && fsdp_dtype_size(from_type) == 1; i++)
            from.data[i] = (char)i;
        case_buffer to = case_buffer_create(count * fsdp_dtype_size(to_type), 1);
        case_buffer expected = case_buffer_copy(&to);
        fsdp_rect rect = fsdp_rect_line(to.data, to_type, from.data, from_type, (int64_t)count);
        case_expect_success(fsdp_cuda_rects(&rect, 1, NULL));
        rect.to = expected.data;
        fsdp_rects_copy(&rect, 1);
        char what[64];
        snprintf(what, sizeof what, "%s to %s", fsdp_dtype_name(from_type),
                 fsdp_dtype_name(to_type));
        case_expect_equal(&to, &expected, what);
        case_buffer_free(&from);
        case_buffer_free(&to);
        case_buffer_free(&expected);
    }
}

/* All codes of f16, bf16 and the types of 8 bits; f32 random, and its neighbours of each code of f16. */
static void fill_codes(case_buffer *from, fsdp_dtype dtype, size_t count)
{
    size_t size = fsdp_dtype_size(dtype);
    for (size_t i = 0; i < count && size < 4; i++)
        memcpy(from->data + i * size, &(uint32_t){(uint32_t)i}, size);
    for (size_t i = 0; i + 3 < count && size == 4; i += 4) {
        uint16_t code = (uint16_t)(i / 4);
        uint32_t bits;
        fsdp_kernels_get()->cast(from->data + i * size, dtype, &code, FSDP_F16, 1,
                                 FSDP_OVERFLOW_INF);
        memcpy(&bits, from->data + i * size, sizeof bits);
        memcpy(from->data + (i + 1) * size, &(uint32_t){bits + 0x1000}, size); /* the middle */
        memcpy(from->data + (i + 2) * size, &(uint32_t){bits + 0x1001}, size);
    }
}

/* Rows that consist of whole vectors, and a last tile that is not whole. */
Test(cuda_kernels_rects, casts_of_whole_tiles_are_those_of_c)
{
    static const fsdp_dtype types[] = {FSDP_F32,       FSDP_BF16,    FSDP_F16,
                                       FSDP_F8_E4M3FN, FSDP_F8_E5M2, FSDP_F64};
    enum { TYPES = 6, ROWS = 260, WIDTH = 1012, PITCH = 1024, COUNT = ROWS * PITCH };
    for (int pair = 0; pair < TYPES * TYPES; pair++) {
        fsdp_dtype from_type = types[pair % TYPES], to_type = types[pair / TYPES];
        case_seed((uint64_t)pair);
        case_buffer from = case_tensor_at(from_type, COUNT, 0);
        case_buffer to = case_tensor_at(to_type, COUNT, 0), expected = case_buffer_copy(&to);
        fill_codes(&from, from_type, COUNT);
        fsdp_rect rect = {to.data, from.data, to_type, from_type, ROWS, WIDTH, PITCH, PITCH};
        if (pair % 2 == 0)
            rect = fsdp_rect_line(to.data, to_type, from.data, from_type, COUNT - 5);
        case_expect_success(fsdp_cuda_rects(&rect, 1, NULL));
        rect.to = expected.data;
        fsdp_rects_copy(&rect, 1);
        case_expect_equal(&to, &expected, fsdp_dtype_name(to_type));
        case_buffer_free(&from);
        case_buffer_free(&to);
        case_buffer_free(&expected);
    }
}

/* The parts of 7 ranks in a flat buffer, whose rows and tensors begin at any element. */
static void try_odd_parts(fsdp_dtype to_type, fsdp_dtype from_type, uint64_t seed)
{
    enum { RANKS = 7, WIDTH = 3 * 1531, PITCH = WIDTH + 37 };
    case_seed(seed);
    size_t to_skew = case_below(9), from_skew = case_below(9);
    case_buffer from = case_tensor_at(from_type, RANKS * PITCH, from_skew);
    case_buffer to = case_tensor_at(to_type, RANKS * PITCH, to_skew),
                expected = case_buffer_copy(&to);
    fsdp_rect rect = {to.data, from.data, to_type, from_type, RANKS, WIDTH, PITCH, WIDTH};
    case_expect_success(fsdp_cuda_rects(&rect, 1, NULL));
    rect.to = expected.data;
    fsdp_rects_copy(&rect, 1);
    case_expect_equal(&to, &expected, fsdp_dtype_name(to_type));
    case_buffer_free(&from);
    case_buffer_free(&to);
    case_buffer_free(&expected);
}

Test(cuda_kernels_rects, parts_of_odd_numbers_of_ranks_are_those_of_c)
{
    static const fsdp_dtype types[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F8_E4M3FN};
    enum { TYPES = 4, SEEDS = 8 };
    for (uint64_t seed = 0; seed < SEEDS * TYPES * TYPES; seed++)
        try_odd_parts(types[seed % TYPES], types[seed / TYPES % TYPES], seed);
}

/* Numbers of f64 around the middle between two neighbours of each narrow type. */
Test(cuda_kernels_rects, casts_round_once)
{
    enum { STEPS = 5, COUNT = 65536 * STEPS };
    static double wide[COUNT];
    static uint16_t codes[65536];
    for (unsigned i = 0; i < 65536; i++)
        codes[i] = (uint16_t)i;
    for (int type = 2; type < CASE_FLOATS; type++) {
        size_t n = 0, values = fsdp_dtype_size(case_floats[type]) == 1 ? CODES : 65536;
        for (size_t code = 0; code < values; code += values == CODES ? 1 : 7) {
            double value[2];
            uint8_t bytes[2] = {(uint8_t)code, (uint8_t)(code + 1)};
            const void *from = values == CODES ? (const void *)bytes : (const void *)&codes[code];
            size_t pair = code + 1 < values ? 2 : 1;
            fsdp_kernels_get()->cast(value, FSDP_F64, from, case_floats[type], pair,
                                     FSDP_OVERFLOW_INF);
            uint64_t bits;
            double middle = (value[0] + value[pair - 1]) / 2;
            memcpy(&bits, &middle, sizeof bits);
            for (int step = 0; step < STEPS; step++) {
                static const int64_t around[STEPS] = {-1, 0, 1, 1 << 20, -(1 << 20)};
                uint64_t near = bits + (uint64_t)around[step];
                memcpy(&wide[n++], &near, sizeof near);
            }
        }
        case_seed((uint64_t)type);
        case_buffer to = case_buffer_create(n * 2, 2), expected = case_buffer_copy(&to);
        fsdp_rect rect = fsdp_rect_line(to.data, case_floats[type], wide, FSDP_F64, (int64_t)n);
        case_expect_success(fsdp_cuda_rects(&rect, 1, NULL));
        rect.to = expected.data;
        fsdp_rects_copy(&rect, 1);
        case_expect_equal(&to, &expected, fsdp_dtype_name(case_floats[type]));
        case_buffer_free(&to);
        case_buffer_free(&expected);
    }
}

/* --- lists ------------------------------------------------------------------------------------ */

static int64_t pitch_for(int64_t width)
{
    return case_below(2) == 0 ? width : width + (int64_t)case_below(20);
}

/* Rows of every width; types, pitches and addresses by chance. */
static fsdp_rect random_rect(void)
{
    fsdp_rect rect = {.to_type = case_float(), .from_type = case_float()};
    if (case_below(2) == 0)
        rect.to_type = rect.from_type = (fsdp_dtype)(1 + case_below(FSDP_Q4_0 - 1)); /* no blocks */
    rect.width = (int64_t)case_count(case_below(4) == 0 ? 40000 : 300);
    rect.rows = (int64_t)case_below(case_below(4) == 0 ? 200 : 4);
    while (rect.width * rect.rows > 60000)
        rect.rows /= 2;
    rect.to_pitch = pitch_for(rect.width);
    rect.from_pitch = pitch_for(rect.width);
    return rect;
}

static void try_list(uint64_t seed)
{
    fsdp_rect rects[MOST_RECTS];
    case_buffer from[MOST_RECTS], to[MOST_RECTS], expected[MOST_RECTS];
    case_seed(seed);
    size_t n = case_below(MOST_RECTS + 1);
    for (size_t i = 0; i < n; i++) {
        fsdp_rect *rect = &rects[i];
        *rect = random_rect();
        size_t to_size = fsdp_dtype_size(rect->to_type);
        from[i] = case_tensor(rect->from_type, (size_t)(rect->rows * rect->from_pitch), true);
        to[i] = case_buffer_create((size_t)(rect->rows * rect->to_pitch) * to_size,
                                   case_below(4) == 0 ? 1 : to_size);
        expected[i] = case_buffer_copy(&to[i]);
        rect->to = to[i].data;
        rect->from = case_below(8) == 0 ? NULL : from[i].data;
    }
    case_expect_success(fsdp_cuda_rects(rects, n, NULL));
    for (size_t i = 0; i < n; i++)
        rects[i].to = expected[i].data;
    fsdp_rects_copy(rects, n);
    for (size_t i = 0; i < n; i++) {
        case_expect_equal(&to[i], &expected[i], "list");
        case_buffer_free(&from[i]);
        case_buffer_free(&to[i]);
        case_buffer_free(&expected[i]);
    }
}

Test(cuda_kernels_rects, a_thousand_rectangles_are_two_launches)
{
    enum { RECTS = 1000, COUNT = 5 };
    static float from[RECTS][COUNT], to[RECTS][COUNT];
    static fsdp_rect rects[RECTS];
    case_seed(3);
    case_fill(from, FSDP_F32, RECTS * COUNT);
    for (int i = 0; i < RECTS; i++)
        rects[i] = fsdp_rect_line(to[i], FSDP_F32, from[i], FSDP_F32, COUNT);
    size_t before = case_launches();
    case_expect_success(fsdp_cuda_rects(rects, RECTS, NULL));
    cr_assert_eq(case_launches() - before, 2);
    cr_assert(memcmp(from, to, sizeof to) == 0);
}

/* Parameters are copied at each launch: those of a short list are few. */
Test(cuda_kernels_rects, a_short_list_has_small_parameters)
{
    enum { RECTS = 12, COUNT = 5, FEW = 8, SMALL = 1024 };
    for (size_t n = 1; n <= RECTS; n++) {
        float from[RECTS][COUNT], to[RECTS][COUNT];
        fsdp_rect rects[RECTS];
        case_seed(n);
        case_fill(from, FSDP_F32, RECTS * COUNT);
        for (size_t i = 0; i < n; i++)
            rects[i] = fsdp_rect_line(to[i], FSDP_F32, from[i], FSDP_F32, COUNT);
        case_expect_success(fsdp_cuda_rects(rects, n, NULL));
        cr_assert_eq(case_launches(), 1);
        cr_assert_eq(fsdp_shim_parameters() <= SMALL, n <= FEW, "%zu bytes for %zu rectangles",
                     fsdp_shim_parameters(), n);
        cr_assert(memcmp(from, to, n * sizeof to[0]) == 0);
    }
}

Test(cuda_kernels_rects, lists_are_copied_as_by_c)
{
    for (uint64_t seed = 0; seed < 150; seed++)
        try_list(seed);
}
