/*
 * Derived tensors that compute numbers of several tensors, next to a plain computation of the whole: products
 * of thin matrices, rows of given lengths, scales of blocks, MXFP4.
 */
#include "statedict/derive/derived_product.h"
#include "statedict/derive/element_types.h"
#include "tests/unit/statedict/derive/whole_pair.h"

#include <math.h>

/* --- products --------------------------------------------------------------------------------- */

/* b [rows, rank] and a [rank, columns] as nodes of their own checkpoint, with their numbers. */
typedef struct factor_pairs {
    whole_pair weight, b, a;
    fsdp_derivation *derivation;
} factor_pairs;

static factor_pairs make_factors(int64_t rows, int64_t columns, int64_t rank, fsdp_dtype dtype)
{
    factor_pairs made = {.weight = {.ndim = 2, .dtype = dtype, .shape = {rows, columns}},
                         .b = {.ndim = 2, .dtype = FSDP_F32, .shape = {rows, rank}},
                         .a = {.ndim = 2, .dtype = FSDP_F32, .shape = {rank, columns}}};
    whole_pair *pairs[] = {&made.weight, &made.b, &made.a};
    static const char *const names[] = {"w", "b", "a"};
    stored_tensor tensors[3];
    fsdp_error none = {0};
    for (int i = 0; i < 3; i++) {
        whole_pair plain = *pairs[i];
        plain.dtype = FSDP_F32;
        give_room(&plain);
        give_room(pairs[i]);
        fill((float *)plain.data, count_of(&plain));
        fsdp_kernels_get()->cast(pairs[i]->data, pairs[i]->dtype, plain.data, FSDP_F32,
                                 (size_t)count_of(&plain), FSDP_OVERFLOW_INF);
        free(plain.data);
        tensors[i] = (stored_tensor){names[i], pairs[i]->dtype, 2, {0}, pairs[i]->data};
        memcpy(tensors[i].shape, pairs[i]->shape, 2 * sizeof(int64_t));
    }
    fsdp_checkpoint *base = stored_open(tensors, 3);
    cr_assert_eq(fsdp_derivation_begin(base, &made.derivation, &none), FSDP_OK);
    for (int i = 0; i < 3; i++) {
        size_t entry = (size_t)fsdp_sd_find(fsdp_checkpoint_sd(base), names[i], 1);
        MAKE(pairs[i]->node,
             fsdp_derive_stored(fsdp_derivation_arena(made.derivation), base, entry, &out, &err));
    }
    return made;
}

static void free_factors(const factor_pairs *factors)
{
    free(factors->weight.data);
    free(factors->b.data);
    free(factors->a.data);
}

/* The numbers have few bits, so sums in any order are the same. */
static whole_pair summed(const factor_pairs *factors, double factor)
{
    whole_pair new = pair_like(&factors->weight);
    int64_t rows = new.shape[0], columns = new.shape[1], rank = factors->b.shape[1];
    const float *b = (const float *)factors->b.data, *a = (const float *)factors->a.data;
    const fsdp_kernels *kernels = fsdp_kernels_get();
    fsdp_low_rank low = {factors->b.node, factors->a.node, factor};
    size_t count = (size_t)count_of(&new);
    float *sums = room_for(rows * columns, sizeof *sums);
    give_room(&new);
    kernels->cast(sums, FSDP_F32, factors->weight.data, new.dtype, count, FSDP_OVERFLOW_INF);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            float sum = 0;
            for (int64_t k = 0; k < rank; k++)
                sum += b[i * rank + k] * a[k * columns + j];
            sums[i * columns + j] += (float)factor * sum;
        }
    kernels->cast(new.data, new.dtype, sums, FSDP_F32, count, FSDP_OVERFLOW_INF);
    free(sums);
    MAKE(new.node, fsdp_derive_low_rank(fsdp_derivation_arena(factors->derivation),
                                        factors->weight.node, &low, &out, &err));
    return new;
}

static void check_product(int64_t rows, int64_t columns, int64_t rank, fsdp_dtype dtype)
{
    factor_pairs factors = make_factors(rows, columns, rank, dtype);
    whole_pair new = summed(&factors, 0.25);
    check_pair(factors.derivation, &new, 4);
    free_factors(&factors);
    free(new.data);
}

Test(derived, a_sum_with_a_low_rank_product)
{
    check_product(5, 7, 1, FSDP_F32);
    check_product(33, 18, 4, FSDP_BF16);
    check_product(9, 40, 16, FSDP_F64);
}

Test(derived, a_product_of_several_tiles)
{
    check_product(1300, 1001, 3, FSDP_F32);
    check_product(1, 1100000, 2, FSDP_F32);
    check_product(1100000, 1, 2, FSDP_BF16);
    check_product(3, 5, 300000, FSDP_F32);
}

/* The largest sums round to more than bf16 holds. Rows after them, of which a tile has fewer, fit. */
Test(derived, a_sum_that_does_not_fit_is_an_error_of_the_read)
{
    enum { ROWS = 1300, BEHIND = 16 };
    factor_pairs factors = make_factors(ROWS, 1, 1, FSDP_BF16);
    const float *b = (const float *)factors.b.data, a = *(const float *)factors.a.data;
    uint16_t data[ROWS];
    fsdp_error none = {0};
    float largest = 0;
    int end = 0, behind = -1;
    for (int i = 0; i < ROWS; i++)
        largest = fmaxf(largest, fabsf(b[i] * a));
    for (; end < ROWS && behind < BEHIND; end++)
        behind = fabsf(b[end] * a) == largest ? 0 : behind < 0 ? -1 : behind + 1;
    cr_assert_eq(behind, BEHIND);
    const fsdp_low_rank low = {factors.b.node, factors.a.node, 3.399e38 / largest};
    whole_pair new = pair_like(&factors.weight);
    MAKE(new.node, fsdp_derive_low_rank(fsdp_derivation_arena(factors.derivation),
                                        factors.weight.node, &low, &out, &err));
    fsdp_checkpoint *checkpoint = finish(factors.derivation, &new);
    fsdp_box box = {.ndim = 2, .len = {end, 1}};
    cr_assert_eq(fsdp_checkpoint_read(checkpoint, 0, &box, data, FSDP_CHECK_OFF, &none),
                 FSDP_ERR_DAMAGED);
    cr_expect(strstr(none.text, "a sum does not fit in bf16"), "%s", none.text);
    box.lo[0] = end - BEHIND;
    box.len[0] = BEHIND;
    cr_assert_eq(fsdp_checkpoint_read(checkpoint, 0, &box, data, FSDP_CHECK_OFF, &none), FSDP_OK);
    fsdp_checkpoint_close(checkpoint);
    free_factors(&factors);
}

/* --- rows of given lengths -------------------------------------------------------------------- */

static void check_row_lengths(int64_t rows, int64_t columns)
{
    factor_pairs factors = make_factors(rows, columns, 1, FSDP_F32);
    whole_pair new = pair_like(&factors.weight);
    const float *magnitudes = (const float *)factors.b.data;
    give_room(&new);
    for (int64_t i = 0; i < rows; i++) {
        const float *row = (const float *)factors.weight.data + i * columns;
        double square = 0;
        for (int64_t j = 0; j < columns; j++)
            square += (double)row[j] * row[j];
        for (int64_t j = 0; j < columns; j++)
            ((float *)new.data)[i * columns + j] = row[j] * (magnitudes[i] / (float)sqrt(square));
    }
    MAKE(new.node, fsdp_derive_row_lengths(fsdp_derivation_arena(factors.derivation),
                                           factors.weight.node, factors.b.node, &out, &err));
    check_pair(factors.derivation, &new, 4);
    free_factors(&factors);
    free(new.data);
}

Test(derived, rows_get_the_lengths_that_are_given)
{
    check_row_lengths(5, 12);
    check_row_lengths(1300, 1001);
    check_row_lengths(2, 1000000);
}

/* --- quantized weights ------------------------------------------------------------------------ */

static int64_t cover(int64_t rows, int64_t block)
{
    return (rows + block - 1) / block;
}

/* A weight [3, rows, columns] with scales for blocks of 1 x rows_block x columns_block. */
static void check_blocks(int64_t rows, int64_t columns, int64_t rows_block, int64_t columns_block)
{
    const int64_t blocks[] = {1, rows_block, columns_block};
    whole_pair weight = {.ndim = 3, .dtype = FSDP_F32, .shape = {3, rows, columns}};
    whole_pair scales = {.ndim = 3,
                         .dtype = FSDP_F32,
                         .shape = {3, cover(rows, rows_block), cover(columns, columns_block)}};
    whole_pair new = weight;
    fsdp_derivation *derivation;
    fsdp_error none = {0};
    give_room(&weight);
    give_room(&scales);
    give_room(&new);
    fill((float *)weight.data, count_of(&weight));
    fill((float *)scales.data, count_of(&scales));
    stored_tensor tensors[] = {{"a", FSDP_F32, 3, {3, rows, columns}, weight.data},
                               {"b", FSDP_F32, 3, {0}, scales.data}};
    memcpy(tensors[1].shape, scales.shape, 3 * sizeof(int64_t));
    fsdp_checkpoint *base = stored_open(tensors, 2);
    cr_assert_eq(fsdp_derivation_begin(base, &derivation, &none), FSDP_OK);
    fsdp_arena *arena = fsdp_derivation_arena(derivation);
    MAKE(weight.node, fsdp_derive_stored(arena, base, 0, &out, &err));
    MAKE(scales.node, fsdp_derive_stored(arena, base, 1, &out, &err));
    for (int64_t i = 0; i < count_of(&new); i++) {
        int64_t at[FSDP_MAX_DIMS], scale_at[FSDP_MAX_DIMS];
        place_of(&new, i, at);
        for (int d = 0; d < 3; d++)
            scale_at[d] = at[d] / blocks[d];
        ((float *)new.data)[i] =
            *(float *)element(&weight, at) * *(float *)element(&scales, scale_at);
    }
    MAKE(new.node, fsdp_derive_block_scaled(arena, weight.node, scales.node, blocks, &out, &err));
    check_pair(derivation, &new, 6);
    free(weight.data);
    free(scales.data);
    free(new.data);
}

Test(derived, blocks_times_their_scales)
{
    check_blocks(9, 14, 4, 5);
    check_blocks(8, 10, 1, 10);
    check_blocks(8, 10, 8, 1);
    check_blocks(300, 1800, 128, 128);
    check_blocks(300, 1800, 1, 1);
}

static float four_bits(int code)
{
    static const float sizes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
    return code & 8 ? -sizes[code & 7] : sizes[code & 7];
}

static void check_mxfp4(int64_t rows, int64_t groups)
{
    whole_pair bytes = {.ndim = 3, .dtype = FSDP_U8, .shape = {rows, groups, 16}};
    whole_pair exponents = {.ndim = 2, .dtype = FSDP_U8, .shape = {rows, groups}};
    whole_pair new = {.ndim = 2, .dtype = FSDP_F32, .shape = {rows, 32 * groups}};
    fsdp_derivation *derivation;
    fsdp_error none = {0};
    give_room(&bytes);
    give_room(&exponents);
    give_room(&new);
    for (int64_t i = 0; i < count_of(&bytes); i++)
        bytes.data[i] = (char)draw(256);
    for (int64_t i = 0; i < count_of(&exponents); i++)
        exponents.data[i] = (char)(100 + draw(50));
    for (int64_t i = 0; i < count_of(&new); i++) {
        uint8_t byte = (uint8_t)bytes.data[i / 2], exponent = (uint8_t)exponents.data[i / 32];
        ((float *)new.data)[i] = ldexpf(four_bits(i % 2 ? byte >> 4 : byte & 15), exponent - 127);
    }
    stored_tensor tensors[] = {{"a", FSDP_U8, 3, {rows, groups, 16}, bytes.data},
                               {"b", FSDP_U8, 2, {rows, groups}, exponents.data}};
    fsdp_checkpoint *base = stored_open(tensors, 2);
    cr_assert_eq(fsdp_derivation_begin(base, &derivation, &none), FSDP_OK);
    fsdp_arena *arena = fsdp_derivation_arena(derivation);
    MAKE(bytes.node, fsdp_derive_stored(arena, base, 0, &out, &err));
    MAKE(exponents.node, fsdp_derive_stored(arena, base, 1, &out, &err));
    MAKE(new.node, fsdp_derive_mxfp4(arena, bytes.node, exponents.node, &out, &err));
    fsdp_checkpoint *checkpoint = finish(derivation, &new);
    const fsdp_box boxes[] = {fsdp_box_whole(2, new.shape),
                              random_box(&new),
                              random_box(&new),
                              {.ndim = 2, .lo = {0, 17}, .len = {rows, 1}},
                              {.ndim = 2, .lo = {0, 31}, .len = {rows, 2}},
                              {.ndim = 2, .lo = {rows - 1, 1}, .len = {1, 32 * groups - 2}}};
    for (size_t i = 0; i < sizeof boxes / sizeof *boxes; i++)
        if (boxes[i].lo[1] + boxes[i].len[1] <= new.shape[1])
            check_box(checkpoint, &new, &boxes[i]);
    fsdp_checkpoint_close(checkpoint);
    free(bytes.data);
    free(exponents.data);
    free(new.data);
}

Test(derived, mxfp4_blocks)
{
    check_mxfp4(5, 3);
    check_mxfp4(1, 1);
    check_mxfp4(150000, 2);
    check_mxfp4(1, 200000);
}
