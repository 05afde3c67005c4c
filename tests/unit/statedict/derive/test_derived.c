/*
 * Derived tensors next to a plain computation of the whole tensor: random trees of operations that move
 * elements, operations on several pieces, powers and logarithms, shapes that do not fit, and failing memory.
 */
#include "kernels/quants.h"
#include "statedict/derive/derived_product.h"
#include "statedict/derive/element_types.h"
#include "tests/unit/statedict/derive/whole_pair.h"

#include <math.h>

/* --- operations of random trees --------------------------------------------------------------- */

static whole_pair sliced(fsdp_arena *arena, const whole_pair *old)
{
    whole_pair new = pair_like(old);
    int dim = (int)draw(old->ndim);
    int64_t at[FSDP_MAX_DIMS], from[FSDP_MAX_DIMS], range[2];
    range[1] = 1 + draw(old->shape[dim]);
    range[0] = draw(old->shape[dim] - range[1] + 1);
    new.shape[dim] = range[1];
    give_room(&new);
    for (int64_t i = 0; i < count_of(&new); i++) {
        place_of(&new, i, at);
        memcpy(from, at, sizeof from);
        from[dim] += range[0];
        copy_element(&new, at, old, from);
    }
    MAKE(new.node, fsdp_derive_slice(arena, old->node, dim, range, &out, &err));
    return new;
}

/* Two dims become one, or one becomes two. */
static whole_pair reshaped(fsdp_arena *arena, const whole_pair *old)
{
    whole_pair new = pair_like(old);
    if (old->ndim > 1 && draw(2)) {
        int dim = (int)draw(old->ndim - 1);
        new.shape[dim] *= old->shape[dim + 1];
        new.ndim--;
        for (int d = dim + 1; d < new.ndim; d++)
            new.shape[d] = old->shape[d + 1];
    } else {
        int dim = (int)draw(old->ndim);
        int64_t by = old->shape[dim] % 3 == 0 ? 3 : old->shape[dim] % 2 == 0 ? 2 : 1;
        for (int d = new.ndim++; d > dim; d--)
            new.shape[d] = new.shape[d - 1];
        new.shape[dim] = by;
        new.shape[dim + 1] = old->shape[dim] / by;
    }
    give_room(&new);
    memcpy(new.data, old->data, (size_t)count_of(old) * fsdp_dtype_size(old->dtype));
    MAKE(new.node, fsdp_derive_reshape(arena, old->node, new.ndim, new.shape, &out, &err));
    return new;
}

static whole_pair permuted_by(fsdp_arena *arena, const whole_pair *old, const int *order)
{
    whole_pair new = pair_like(old);
    int64_t at[FSDP_MAX_DIMS], from[FSDP_MAX_DIMS];
    for (int d = 0; d < old->ndim; d++)
        new.shape[d] = old->shape[order[d]];
    give_room(&new);
    for (int64_t i = 0; i < count_of(&new); i++) {
        place_of(&new, i, at);
        for (int d = 0; d < old->ndim; d++)
            from[order[d]] = at[d];
        copy_element(&new, at, old, from);
    }
    MAKE(new.node, fsdp_derive_permute(arena, old->node, order, &out, &err));
    return new;
}

static whole_pair permuted(fsdp_arena *arena, const whole_pair *old)
{
    int order[FSDP_MAX_DIMS];
    for (int d = 0; d < old->ndim; d++)
        order[d] = d;
    for (int d = old->ndim - 1; d > 0; d--) {
        int other = (int)draw(d + 1), mine = order[d];
        order[d] = order[other];
        order[other] = mine;
    }
    return permuted_by(arena, old, order);
}

/* The tensor before itself and zeros. */
static whole_pair joined_in(fsdp_arena *arena, const whole_pair *old, int dim, int64_t zeros)
{
    whole_pair new = pair_like(old);
    int64_t at[FSDP_MAX_DIMS], from[FSDP_MAX_DIMS], shape[FSDP_MAX_DIMS];
    const fsdp_derived *parts[3] = {old->node, old->node};
    memcpy(shape, old->shape, sizeof shape);
    shape[dim] = zeros;
    MAKE(parts[2], fsdp_derive_zeros(arena, old->dtype, old->ndim, shape, &out, &err));
    new.shape[dim] = 2 * old->shape[dim] + zeros;
    give_room(&new);
    for (int64_t i = 0; i < count_of(&new); i++) {
        place_of(&new, i, at);
        memcpy(from, at, sizeof from);
        from[dim] %= old->shape[dim];
        if (at[dim] < 2 * old->shape[dim])
            copy_element(&new, at, old, from);
    }
    MAKE(new.node, fsdp_derive_join(arena, parts, 3, dim, &out, &err));
    return new;
}

static whole_pair joined(fsdp_arena *arena, const whole_pair *old)
{
    return joined_in(arena, old, (int)draw(old->ndim), draw(3));
}

static whole_pair scaled(fsdp_arena *arena, const whole_pair *old)
{
    static const double factors[] = {0.5, -3, 1.0 / 3, 1};
    whole_pair new = pair_like(old);
    double factor = factors[draw(4)];
    const fsdp_kernels *kernels = fsdp_kernels_get();
    give_room(&new);
    for (int64_t i = 0; i < count_of(&new); i++) {
        float value;
        size_t size = fsdp_dtype_size(old->dtype), at = (size_t)i * size;
        kernels->cast(&value, FSDP_F32, old->data + at, old->dtype, 1, FSDP_OVERFLOW_INF);
        value *= (float)factor;
        kernels->cast(new.data + at, old->dtype, &value, FSDP_F32, 1, FSDP_OVERFLOW_INF);
    }
    MAKE(new.node, fsdp_derive_scale(arena, old->node, factor, &out, &err));
    return new;
}

/* bf16 and f16 become f32, so that the sum keeps their digits. */
static whole_pair added(fsdp_arena *arena, const whole_pair *old)
{
    static const double numbers[] = {1, -1, 0.375};
    double number = numbers[draw(3)];
    whole_pair new = pair_like(old);
    new.dtype = FSDP_F32;
    give_room(&new);
    for (int64_t i = 0; i < count_of(old); i++) {
        float value;
        fsdp_kernels_get()->cast(&value, FSDP_F32,
                                 old->data + (size_t)i * fsdp_dtype_size(old->dtype), old->dtype, 1,
                                 FSDP_OVERFLOW_INF);
        value += (float)number;
        memcpy(new.data + (size_t)i * sizeof value, &value, sizeof value);
    }
    MAKE(new.node, fsdp_derive_add(arena, old->node, number, &out, &err));
    return new;
}

static whole_pair raised(fsdp_arena *arena, const whole_pair *old)
{
    whole_pair new = pair_like(old);
    new.dtype = FSDP_F32;
    give_room(&new);
    fsdp_kernels_get()->cast(new.data, FSDP_F32, old->data, old->dtype, (size_t)count_of(old),
                             FSDP_OVERFLOW_INF);
    for (int64_t i = 0; i < count_of(old); i++)
        ((float *)new.data)[i] = (float)exp((double)((float *)new.data)[i]);
    MAKE(new.node, fsdp_derive_exp(arena, old->node, &out, &err));
    return new;
}

static whole_pair cast_to(fsdp_arena *arena, const whole_pair *old, fsdp_dtype dtype)
{
    whole_pair new = pair_like(old);
    new.dtype = dtype;
    give_room(&new);
    fsdp_kernels_get()->cast(new.data, dtype, old->data, old->dtype, (size_t)count_of(old),
                             FSDP_OVERFLOW_INF);
    MAKE(new.node, fsdp_derive_cast(arena, old->node, dtype, &out, &err));
    return new;
}

static whole_pair cast(fsdp_arena *arena, const whole_pair *old)
{
    static const fsdp_dtype dtypes[] = {FSDP_F32, FSDP_BF16, FSDP_F16};
    return cast_to(arena, old, dtypes[draw(3)]);
}

/* --- random trees ----------------------------------------------------------------------------- */

typedef whole_pair (*operation)(fsdp_arena *arena, const whole_pair *old);

static void check_random_tree(void)
{
    static const operation operations[] = {sliced, reshaped, permuted, joined, scaled, added, cast};
    const int64_t shape[] = {1 + draw(6), 1 + draw(6), 1 + draw(12)};
    fsdp_derivation *derivation = NULL;
    whole_pair now = stored(&derivation, 3, shape);
    for (int steps = 1 + (int)draw(8); steps > 0; steps--) {
        whole_pair next = operations[draw(7)](fsdp_derivation_arena(derivation), &now);
        free(now.data);
        now = next;
        cr_assert_eq(now.node->ndim, now.ndim);
        cr_assert_arr_eq(now.node->shape, now.shape, (size_t)now.ndim * sizeof *now.shape);
        cr_assert_eq(now.node->dtype, now.dtype);
    }
    check_pair(derivation, &now, 5);
    free(now.data);
}

Test(derived, random_trees_are_what_the_whole_tensor_gives)
{
    for (uint64_t i = 0; i < 300; i++) {
        seed = i * 1000;
        check_random_tree();
    }
}

/* --- more than a piece ------------------------------------------------------------------------ */

Test(derived, a_permute_of_several_pieces)
{
    fsdp_derivation *derivation = NULL;
    whole_pair old = stored(&derivation, 3, (const int64_t[]){1201, 7, 190});
    whole_pair new = permuted_by(fsdp_derivation_arena(derivation), &old, (const int[]){2, 0, 1});
    cr_assert_gt(count_of(&new) * 4, FSDP_DERIVED_PIECE);
    check_pair(derivation, &new, 3);
    free(old.data);
    free(new.data);
}

Test(derived, a_join_across_the_last_dim_of_several_pieces)
{
    fsdp_derivation *derivation = NULL;
    whole_pair old = stored(&derivation, 2, (const int64_t[]){1300, 1001});
    whole_pair new = joined_in(fsdp_derivation_arena(derivation), &old, 1, 5);
    check_pair(derivation, &new, 3);
    free(old.data);
    free(new.data);
}

Test(derived, a_cast_and_a_scale_of_several_pieces)
{
    fsdp_derivation *derivation = NULL;
    whole_pair old = stored(&derivation, 2, (const int64_t[]){1300, 1001});
    whole_pair half = cast_to(fsdp_derivation_arena(derivation), &old, FSDP_BF16);
    whole_pair new = scaled(fsdp_derivation_arena(derivation), &half);
    check_pair(derivation, &new, 3);
    free(old.data);
    free(half.data);
    free(new.data);
}

Test(derived, powers_of_e_of_several_pieces)
{
    fsdp_derivation *derivation = NULL;
    whole_pair old = stored(&derivation, 2, (const int64_t[]){1300, 1001});
    whole_pair half = cast_to(fsdp_derivation_arena(derivation), &old, FSDP_BF16);
    whole_pair new = raised(fsdp_derivation_arena(derivation), &half);
    check_pair(derivation, &new, 3);
    free(old.data);
    free(half.data);
    free(new.data);
}

/* --- powers of e and logarithms ----------------------------------------------------------------- */

enum { POWERS = 200000 };

typedef fsdp_status (*function)(fsdp_arena *arena, const fsdp_derived *part,
                                const fsdp_derived **out, fsdp_error *err);

/* Both functions, one after the other, of numbers of the dtype. */
static fsdp_status read_both(function first, function second, fsdp_dtype dtype, const void *numbers,
                             int64_t count, void *read, fsdp_error *none)
{
    const stored_tensor tensor = {"stored", dtype, 1, {count}, numbers};
    fsdp_checkpoint *base = stored_open(&tensor, 1);
    fsdp_derivation *derivation = NULL;
    whole_pair t = {.ndim = 1, .shape = {count}, .dtype = dtype};
    cr_assert_eq(fsdp_derivation_begin(base, &derivation, none), FSDP_OK);
    fsdp_arena *arena = fsdp_derivation_arena(derivation);
    MAKE(t.node, fsdp_derive_stored(arena, base, 0, &out, &err));
    MAKE(t.node, first(arena, t.node, &out, &err));
    if (second)
        MAKE(t.node, second(arena, t.node, &out, &err));
    fsdp_checkpoint *checkpoint = finish(derivation, &t);
    const fsdp_box whole = fsdp_box_whole(1, t.shape);
    fsdp_status st = fsdp_checkpoint_read(checkpoint, 0, &whole, read, FSDP_CHECK_OFF, none);
    fsdp_checkpoint_close(checkpoint);
    return st;
}

/* docs/maps.md says how exact the way there and back is. */
Test(derived, powers_of_e_and_logarithms_undo_each_other)
{
    static float numbers[POWERS], read[POWERS];
    fsdp_error none = {0};
    for (int i = 1; i < POWERS; i++) {
        double size = exp((double)(i % 1000) / 50 - 15.6); /* up to 80 */
        numbers[i] = (float)((i % 2 ? size : -size) * (1 + (double)draw(1 << 20) / (1 << 20) / 50));
    }
    cr_assert_eq(
        read_both(fsdp_derive_exp, fsdp_derive_log, FSDP_F32, numbers, POWERS, read, &none),
        FSDP_OK, "%s", none.text);
    for (int i = 0; i < POWERS; i++)
        cr_assert(fabsf(numbers[i]) >= 1 || numbers[i] == 0
                      ? read[i] == numbers[i]
                      : fabsf(read[i] - numbers[i]) <= 0x1p-24F,
                  "%a became %a", (double)numbers[i], (double)read[i]);
    for (int i = 0; i < POWERS; i++)
        numbers[i] = expf(numbers[i]);
    cr_assert_eq(
        read_both(fsdp_derive_log, fsdp_derive_exp, FSDP_F32, numbers, POWERS, read, &none),
        FSDP_OK, "%s", none.text);
    for (int i = 0; i < POWERS; i++) {
        double size = fabs(log((double)numbers[i]));
        float unit = nextafterf(numbers[i], INFINITY) - numbers[i];
        cr_assert(size < 1 ? read[i] == numbers[i]
                           : fabsf(read[i] - numbers[i]) <= (float)ceil(size) * unit,
                  "%a became %a", (double)numbers[i], (double)read[i]);
    }
}

Test(derived, a_power_or_a_logarithm_that_is_not_finite_is_an_error_of_the_read)
{
    const float numbers[] = {89, -1, 0}, odd[] = {INFINITY, NAN};
    const double wide[] = {89, 710};
    float read[2];
    double read_wide[2];
    fsdp_error none = {0};
    cr_expect_eq(read_both(fsdp_derive_exp, NULL, FSDP_F32, numbers, 1, read, &none),
                 FSDP_ERR_DAMAGED);
    cr_expect(strstr(none.text, "the exp of 89 is not a finite number of f32"), "%s", none.text);
    cr_expect_eq(read_both(fsdp_derive_log, NULL, FSDP_F32, numbers, 2, read, &none),
                 FSDP_ERR_DAMAGED);
    cr_expect(strstr(none.text, "the log of -1 is not a finite number"), "%s", none.text);
    cr_expect_eq(read_both(fsdp_derive_log, NULL, FSDP_F32, numbers + 2, 1, read, &none),
                 FSDP_ERR_DAMAGED);
    cr_expect(strstr(none.text, "the log of 0 is not a finite number"), "%s", none.text);
    cr_expect_eq(read_both(fsdp_derive_exp, NULL, FSDP_F64, wide, 1, read_wide, &none), FSDP_OK);
    cr_expect_eq(read_wide[0], exp(89));
    cr_expect_eq(read_both(fsdp_derive_exp, NULL, FSDP_F64, wide, 2, read_wide, &none),
                 FSDP_ERR_DAMAGED);
    cr_expect_eq(read_both(fsdp_derive_log, NULL, FSDP_F32, odd, 2, read, &none), FSDP_OK);
    cr_expect(isinf(read[0]) && isnan(read[1]), "they were not finite before");
}

/* --- blocks of quantized numbers ---------------------------------------------------------------- */

static whole_pair encoded(fsdp_arena *arena, const whole_pair *old, fsdp_dtype dtype)
{
    whole_pair new = pair_like(old);
    new.dtype = dtype;
    new.shape[old->ndim - 1] /= 32;
    give_room(&new);
    fsdp_blocks_from_f32(dtype, (const float *)old->data, (size_t)count_of(&new), new.data);
    MAKE(new.node, fsdp_derive_blocks(arena, old->node, dtype, &out, &err));
    return new;
}

static whole_pair decoded(fsdp_arena *arena, const whole_pair *old)
{
    whole_pair new = pair_like(old);
    new.dtype = FSDP_F32;
    new.shape[old->ndim - 1] *= 32;
    give_room(&new);
    fsdp_blocks_to_f32(old->dtype, old->data, (size_t)count_of(old), (float *)new.data);
    MAKE(new.node, fsdp_derive_values(arena, old->node, &out, &err));
    return new;
}

static void check_blocks(fsdp_dtype dtype, int64_t rows, int64_t columns)
{
    fsdp_derivation *derivation = NULL;
    whole_pair old = stored(&derivation, 2, (const int64_t[]){rows, columns});
    fsdp_arena *arena = fsdp_derivation_arena(derivation);
    whole_pair blocks = encoded(arena, &old, dtype), values = decoded(arena, &blocks);
    const fsdp_box all_blocks = fsdp_box_whole(2, blocks.shape);
    char *read = room_for(count_of(&blocks), fsdp_dtype_size(dtype));
    read_guarded(blocks.node, &all_blocks, read);
    cr_assert_arr_eq(read, blocks.data, (size_t)count_of(&blocks) * fsdp_dtype_size(dtype));
    free(read);
    fsdp_checkpoint *checkpoint = finish(derivation, &values);
    const fsdp_box boxes[] = {fsdp_box_whole(2, values.shape),
                              random_box(&values),
                              random_box(&values),
                              {.ndim = 2, .lo = {0, 31}, .len = {rows, 1}},
                              {.ndim = 2, .lo = {0, 31}, .len = {rows, 2}},
                              {.ndim = 2, .lo = {rows - 1, 1}, .len = {1, columns - 2}}};
    for (size_t i = 0; i < sizeof boxes / sizeof *boxes; i++)
        if (boxes[i].lo[1] + boxes[i].len[1] <= columns)
            check_box(checkpoint, &values, &boxes[i]);
    fsdp_checkpoint_close(checkpoint);
    free(values.data);
    free(blocks.data);
    free(old.data);
}

Test(derived, blocks_of_quantized_numbers_are_made_and_read)
{
    for (int i = 0; i < 2; i++) {
        fsdp_dtype dtype = i == 0 ? FSDP_Q8_0 : FSDP_Q4_0;
        check_blocks(dtype, 5, 96);
        check_blocks(dtype, 1, 32);
        check_blocks(dtype, 2, 640000);
        check_blocks(dtype, 1,
                     4800000); /* blocks of more than a buffer, in one row and in narrow ones */
        check_blocks(dtype, 75001, 64);
    }
}

Test(derived, a_number_that_is_too_large_for_a_block_is_an_error_of_the_read)
{
    float numbers[64] = {1, [40] = 1e30F};
    const stored_tensor tensor = {"stored", FSDP_F32, 2, {2, 32}, numbers};
    fsdp_checkpoint *base = stored_open(&tensor, 1);
    fsdp_derivation *derivation = NULL;
    fsdp_error refusal = {0};
    whole_pair pair = {.ndim = 2, .dtype = FSDP_Q8_0, .shape = {2, 1}};
    char read[68];
    cr_assert_eq(fsdp_derivation_begin(base, &derivation, &refusal), FSDP_OK);
    fsdp_arena *arena = fsdp_derivation_arena(derivation);
    MAKE(pair.node, fsdp_derive_stored(arena, base, 0, &out, &err));
    MAKE(pair.node, fsdp_derive_blocks(arena, pair.node, FSDP_Q8_0, &out, &err));
    fsdp_checkpoint *checkpoint = finish(derivation, &pair);
    const fsdp_box box = fsdp_box_whole(2, pair.shape);
    fsdp_status st = fsdp_checkpoint_read(checkpoint, 0, &box, read, FSDP_CHECK_OFF, &refusal);
    cr_assert_eq(st, FSDP_ERR_DAMAGED);
    cr_assert_str_eq(refusal.text, "'result': a value is too large for q8_0");
    fsdp_checkpoint_close(checkpoint);
}

/* A reshape whose boxes are columns: a run of the tensor for each element. */
Test(derived, a_narrow_box_of_another_shape)
{
    fsdp_derivation *derivation = NULL;
    whole_pair old = stored(&derivation, 2, (const int64_t[]){60, 70});
    const int64_t shape[] = {7, 20, 30};
    whole_pair new = pair_like(&old);
    new.ndim = 3;
    memcpy(new.shape, shape, sizeof shape);
    new.data = old.data;
    MAKE(new.node,
         fsdp_derive_reshape(fsdp_derivation_arena(derivation), old.node, 3, shape, &out, &err));
    fsdp_checkpoint *checkpoint = finish(derivation, &new);
    for (int64_t j = 0; j < 30; j++) {
        const fsdp_box column = {.ndim = 3, .lo = {1, 2, j}, .len = {5, 17, 1}};
        check_box(checkpoint, &new, &column);
    }
    fsdp_checkpoint_close(checkpoint);
    free(old.data);
}

/* --- what does not fit ------------------------------------------------------------------------ */

static void refused(fsdp_status st, fsdp_status wanted, const fsdp_error *err, const char *words)
{
    cr_expect_eq(st, wanted, "%s", words);
    cr_expect(strstr(err->text, words), "'%s' lacks '%s'", err->text, words);
}

#define REFUSED_AS(wanted, words, call)   \
    do {                                  \
        fsdp_error err = {0};             \
        const fsdp_derived *out = NULL;   \
        fsdp_status st = call;            \
        refused(st, wanted, &err, words); \
    } while (0)
#define REFUSED(words, call) REFUSED_AS(FSDP_ERR_USAGE, words, call)

Test(derived, shapes_that_do_not_fit_are_named)
{
    fsdp_derivation *derivation = NULL;
    whole_pair t = stored(&derivation, 2, (const int64_t[]){4, 6});
    fsdp_arena *arena = fsdp_derivation_arena(derivation);
    const fsdp_derived *turned, *bytes;
    MAKE(turned, fsdp_derive_permute(arena, t.node, (const int[]){1, 0}, &out, &err));
    MAKE(bytes, fsdp_derive_zeros(arena, FSDP_U8, 2, t.shape, &out, &err));
    const fsdp_derived *parts[] = {t.node, turned};
    const fsdp_low_rank low = {t.node, t.node, 1};

    REFUSED("[4, 6] has no dim 2",
            fsdp_derive_slice(arena, t.node, 2, (const int64_t[]){0, 1}, &out, &err));
    REFUSED("no rows 3 to 5",
            fsdp_derive_slice(arena, t.node, 0, (const int64_t[]){3, 2}, &out, &err));
    REFUSED("no rows",
            fsdp_derive_slice(arena, t.node, 0, (const int64_t[]){1, INT64_MAX - 1}, &out, &err));
    REFUSED("[4, 6] cannot be reshaped to [5, 5]",
            fsdp_derive_reshape(arena, t.node, 2, (const int64_t[]){5, 5}, &out, &err));
    REFUSED("order", fsdp_derive_permute(arena, t.node, (const int[]){1, 1}, &out, &err));
    REFUSED("[4, 6] of f32 and [6, 4] of f32", fsdp_derive_join(arena, parts, 2, 0, &out, &err));
    parts[1] = bytes;
    REFUSED("of u8 cannot be joined", fsdp_derive_join(arena, parts, 2, 0, &out, &err));
    REFUSED("u8 is not a floating type", fsdp_derive_cast(arena, bytes, FSDP_F32, &out, &err));
    REFUSED("u8 is not a floating type", fsdp_derive_cast(arena, t.node, FSDP_U8, &out, &err));
    REFUSED("u8 is not a floating type", fsdp_derive_scale(arena, bytes, 2, &out, &err));
    REFUSED("u8 is not a floating type", fsdp_derive_add(arena, bytes, 1, &out, &err));
    REFUSED("u8 is not a floating type", fsdp_derive_exp(arena, bytes, &out, &err));
    REFUSED("u8 is not a floating type", fsdp_derive_log(arena, bytes, &out, &err));
    REFUSED("the factor 1e+39", fsdp_derive_scale(arena, t.node, 1e39, &out, &err));
    REFUSED("the number 1e+39", fsdp_derive_add(arena, t.node, 1e39, &out, &err));
    REFUSED("the factor 1e-46", fsdp_derive_scale(arena, t.node, 1e-46, &out, &err));
    REFUSED("[4, 6] times [4, 6] does not fit",
            fsdp_derive_low_rank(arena, t.node, &low, &out, &err));
    REFUSED("magnitudes of [4, 6]", fsdp_derive_row_lengths(arena, t.node, t.node, &out, &err));
    REFUSED("scales of [4, 6]",
            fsdp_derive_block_scaled(arena, t.node, t.node, (const int64_t[]){2, 1}, &out, &err));
    REFUSED("scales of [4, 6]",
            fsdp_derive_block_scaled(arena, t.node, t.node, (const int64_t[]){0, 0}, &out, &err));
    REFUSED_AS(FSDP_ERR_DAMAGED, "not MXFP4", fsdp_derive_mxfp4(arena, bytes, bytes, &out, &err));
    fsdp_derivation_cancel(derivation);
    free(t.data);
}

Test(derived, a_value_that_does_not_fit_is_an_error_of_the_read)
{
    fsdp_derivation *derivation = NULL;
    whole_pair t = stored(&derivation, 1, (const int64_t[]){3}), new = pair_like(&t);
    fsdp_arena *arena = fsdp_derivation_arena(derivation);
    fsdp_error none = {0};
    float data[3];
    MAKE(t.node, fsdp_derive_scale(arena, t.node, 1e30, &out, &err));
    MAKE(new.node, fsdp_derive_cast(arena, t.node, FSDP_F16, &out, &err));
    fsdp_checkpoint *checkpoint = finish(derivation, &new);
    const fsdp_box whole = fsdp_box_whole(1, t.shape);
    cr_assert_eq(fsdp_checkpoint_read(checkpoint, 0, &whole, data, FSDP_CHECK_OFF, &none),
                 FSDP_ERR_DAMAGED);
    cr_expect(strstr(none.text, "'result'") && strstr(none.text, "does not fit in f16"), "%s",
              none.text);
    fsdp_checkpoint_close(checkpoint);
    free(t.data);
}

Test(derived, a_product_that_is_not_finite_is_an_error_of_the_read)
{
    fsdp_derivation *derivation = NULL;
    whole_pair t = stored(&derivation, 1, (const int64_t[]){3}), new = pair_like(&t);
    fsdp_arena *arena = fsdp_derivation_arena(derivation);
    const fsdp_box whole = fsdp_box_whole(1, t.shape);
    fsdp_error none = {0};
    float data[3];
    MAKE(t.node, fsdp_derive_scale(arena, t.node, 1e30, &out, &err));
    MAKE(new.node, fsdp_derive_scale(arena, t.node, 1e20, &out, &err));
    fsdp_checkpoint *checkpoint = finish(derivation, &new);
    cr_assert_eq(fsdp_checkpoint_read(checkpoint, 0, &whole, data, FSDP_CHECK_OFF, &none),
                 FSDP_ERR_DAMAGED);
    cr_expect(strstr(none.text, "times 1e+20 does not fit in f32"), "%s", none.text);
    fsdp_checkpoint_close(checkpoint);
    free(t.data);
}

Test(derived, too_many_steps_are_refused_when_they_are_made)
{
    fsdp_derivation *derivation = NULL;
    whole_pair t = stored(&derivation, 1, (const int64_t[]){3});
    fsdp_arena *arena = fsdp_derivation_arena(derivation);
    fsdp_error error = {0};
    for (int i = 0; i < FSDP_DERIVED_LEVELS; i++)
        MAKE(t.node, fsdp_derive_scale(arena, t.node, 2, &out, &err));
    cr_assert_eq(fsdp_derive_scale(arena, t.node, 2, &t.node, &error), FSDP_ERR_LIMIT);
    fsdp_derivation_cancel(derivation);
    free(t.data);
}

/* --- failing memory --------------------------------------------------------------------------- */

/* Makes a node of several kinds and reads it. The base is closed with the derivation. */
static fsdp_status whole_way(fsdp_checkpoint *base, fsdp_error *err)
{
    fsdp_derivation *derivation = NULL;
    fsdp_checkpoint *checkpoint = NULL;
    const fsdp_derived *node = NULL;
    float data[64];
    FSDP_TRY(fsdp_derivation_begin(base, &derivation, err));
    fsdp_arena *arena = fsdp_derivation_arena(derivation);
    fsdp_status st = fsdp_derive_stored(arena, base, 0, &node, err);
    if (st == FSDP_OK)
        st = fsdp_derive_slice(arena, node, 0, (const int64_t[]){1, 3}, &node, err);
    if (st == FSDP_OK)
        st = fsdp_derive_permute(arena, node, (const int[]){1, 0}, &node, err);
    if (st == FSDP_OK)
        st = fsdp_derive_join(arena, (const fsdp_derived *const[]){node, node}, 2, 1, &node, err);
    if (st == FSDP_OK)
        st = fsdp_derive_scale(arena, node, 2, &node, err);
    if (st == FSDP_OK)
        st = fsdp_derivation_add(derivation, (fsdp_derived_name){"x", 1}, node, err);
    if (st != FSDP_OK) {
        fsdp_derivation_cancel(derivation);
        return st;
    }
    FSDP_TRY(fsdp_derivation_finish(derivation, &checkpoint, err));
    const fsdp_box whole = fsdp_box_whole(node->ndim, node->shape);
    st = fsdp_checkpoint_read(checkpoint, 0, &whole, data, FSDP_CHECK_OFF, err);
    fsdp_checkpoint_close(checkpoint);
    return st;
}

Test(derived, every_allocation_may_fail)
{
    float data[24];
    fill(data, 24);
    const stored_tensor tensor = {"t", FSDP_F32, 2, {4, 6}, data};
    int64_t n = 0;
    for (;; n++) {
        fsdp_error err = {0};
        fsdp_checkpoint *base = stored_open(&tensor, 1);
        (void)fsdp_mem_fail_after(n, true);
        fsdp_status st = whole_way(base, &err);
        (void)fsdp_mem_fail_after(-1, false);
        if (st == FSDP_OK)
            break;
        cr_assert_eq(st, FSDP_ERR_LIMIT, "%s", err.text);
        cr_assert_lt(n, 200);
    }
    cr_assert_gt(n, 5);
}
