/* Boxes against element-by-element models: small enough to try everything. */
#include "base/data/box_internal.h"
#include <fsdp/box.h>

#include <criterion/criterion.h>
#include <string.h>

static fsdp_box box_1d(int64_t lo, int64_t len)
{
    return (fsdp_box){.ndim = 1, .lo = {lo}, .len = {len}};
}

static fsdp_box box_2d(int64_t lo0, int64_t lo1, int64_t len0, int64_t len1)
{
    return (fsdp_box){.ndim = 2, .lo = {lo0, lo1}, .len = {len0, len1}};
}

static bool holds(const fsdp_box *box, const int64_t *element)
{
    for (int d = 0; d < box->ndim; d++) {
        if (element[d] < box->lo[d] || element[d] >= box->lo[d] + box->len[d])
            return false;
    }
    return true;
}

Test(box, a_scalar_has_one_element)
{
    fsdp_box scalar = fsdp_box_whole(0, NULL);
    fsdp_box out;
    cr_assert_eq(fsdp_box_count(&scalar), 1);
    cr_assert(fsdp_box_equal(&scalar, &scalar));
    cr_assert(fsdp_box_contains(&scalar, &scalar));
    cr_assert(fsdp_box_intersect(&scalar, &scalar, &out));
    cr_assert_eq(out.ndim, 0);
    cr_assert_eq(fsdp_box_position(0, NULL, NULL), 0);
}

Test(box, whole_covers_the_shape)
{
    int64_t shape[] = {3, 0, 5};
    fsdp_box box = fsdp_box_whole(3, shape);
    cr_assert_eq(box.ndim, 3);
    for (int d = 0; d < 3; d++) {
        cr_assert_eq(box.lo[d], 0);
        cr_assert_eq(box.len[d], shape[d]);
    }
    cr_assert_eq(fsdp_box_count(&box), 0);
    shape[1] = 7;
    box = fsdp_box_whole(3, shape);
    cr_assert_eq(fsdp_box_count(&box), 105);
}

Test(box, equal_compares_dims_offsets_and_lengths)
{
    fsdp_box a = box_2d(1, 2, 3, 4);
    fsdp_box same = box_2d(1, 2, 3, 4), moved = box_2d(1, 1, 3, 4), longer = box_2d(1, 2, 4, 4);
    fsdp_box flat = box_1d(1, 3);
    cr_assert(fsdp_box_equal(&a, &same));
    cr_assert_not(fsdp_box_equal(&a, &moved));
    cr_assert_not(fsdp_box_equal(&a, &longer));
    cr_assert_not(fsdp_box_equal(&a, &flat));
}

static void check_pair(const fsdp_box *a, const fsdp_box *b)
{
    fsdp_box both = {0};
    bool meet = fsdp_box_intersect(a, b, &both);
    int64_t shared = 0, outside = 0;
    for (int64_t i = 0; i < 5; i++) {
        for (int64_t k = 0; k < 5; k++) {
            int64_t element[] = {i, k};
            bool in_both = holds(a, element) && holds(b, element);
            shared += in_both;
            outside += holds(b, element) && !holds(a, element);
            if (meet)
                cr_assert_eq(holds(&both, element), in_both);
        }
    }
    cr_assert_eq(meet, shared > 0);
    if (meet)
        cr_assert_eq(fsdp_box_count(&both), shared);
    if (fsdp_box_count(b) > 0)
        cr_assert_eq(fsdp_box_contains(a, b), outside == 0);
}

Test(box, intersect_and_contains_agree_with_the_elements)
{
    enum { RANGES = 15 }; /* of lo 0..4, end lo..4 */
    int64_t lo[RANGES], len[RANGES];
    int n = 0;
    for (int64_t first = 0; first < 5; first++) {
        for (int64_t end = first; end < 5; end++, n++) {
            lo[n] = first;
            len[n] = end - first;
        }
    }
    cr_assert_eq(n, RANGES);
    for (int i = 0; i < RANGES * RANGES; i++) {
        fsdp_box a = box_2d(lo[i / RANGES], lo[i % RANGES], len[i / RANGES], len[i % RANGES]);
        for (int k = 0; k < RANGES * RANGES; k++) {
            fsdp_box b = box_2d(lo[k / RANGES], lo[k % RANGES], len[k / RANGES], len[k % RANGES]);
            check_pair(&a, &b);
        }
    }
}

Test(box, intersect_may_write_over_its_input)
{
    fsdp_box a = box_2d(0, 2, 6, 4), b = box_2d(3, 0, 6, 4), expected = box_2d(3, 2, 3, 2);
    cr_assert(fsdp_box_intersect(&a, &b, &a));
    cr_assert(fsdp_box_equal(&a, &expected));
    fsdp_box apart = box_2d(4, 4, 1, 1), kept = apart;
    cr_assert_not(fsdp_box_intersect(&apart, &expected, &apart));
    cr_assert(fsdp_box_equal(&apart, &kept));
}

Test(box, contains_survives_hostile_numbers)
{
    fsdp_box whole = box_1d(0, 10);
    fsdp_box far = box_1d(INT64_MAX, 5), huge = box_1d(1, INT64_MAX), negative = box_1d(3, -1);
    fsdp_box least = box_1d(INT64_MIN, INT64_MIN), end = box_1d(10, 0);
    cr_assert_not(fsdp_box_contains(&whole, &far));
    cr_assert_not(fsdp_box_contains(&whole, &huge));
    cr_assert_not(fsdp_box_contains(&whole, &negative));
    cr_assert_not(fsdp_box_contains(&whole, &least));
    cr_assert(fsdp_box_contains(&whole, &end));
}

Test(box, position_is_row_major)
{
    int64_t shape[] = {3, 4, 5}, strides[3], expected = 0;
    fsdp_box_strides(3, shape, strides);
    for (int64_t i = 0; i < 3; i++) {
        for (int64_t k = 0; k < 4; k++) {
            for (int64_t m = 0; m < 5; m++, expected++) {
                int64_t element[] = {i, k, m};
                cr_assert_eq(fsdp_box_position(3, shape, element), expected);
                cr_assert_eq(i * strides[0] + k * strides[1] + m * strides[2], expected);
            }
        }
    }
}

/* --- cut ---------------------------------------------------------------------------------------- */

/* Walks the elements of a piece in row-major order and checks each one's place in the outer box. */
static int64_t walk_piece(const fsdp_box *box, const fsdp_box *piece, int64_t next)
{
    int64_t index[FSDP_MAX_DIMS] = {0};
    for (;;) {
        int64_t place = 0;
        for (int d = 0; d < box->ndim; d++)
            place = place * box->len[d] + piece->lo[d] + index[d] - box->lo[d];
        cr_assert_eq(place, next, "element %lld comes where %lld was expected", (long long)place,
                     (long long)next);
        next++;
        int d = box->ndim - 1;
        while (d >= 0 && ++index[d] == piece->len[d])
            index[d--] = 0;
        if (d < 0)
            return next;
    }
}

static void check_cut(const fsdp_box *box, int64_t first, int64_t count)
{
    fsdp_box pieces[FSDP_BOX_PIECES];
    int n = fsdp_box_cut(box, first, count, pieces);
    int most = box->ndim > 0 ? 2 * box->ndim - 1 : 1;
    cr_assert_leq(n, most);
    int64_t next = first;
    for (int i = 0; i < n; i++) {
        cr_assert_eq(pieces[i].ndim, box->ndim);
        cr_assert_gt(fsdp_box_count(&pieces[i]), 0);
        cr_assert(fsdp_box_contains(box, &pieces[i]));
        next = walk_piece(box, &pieces[i], next);
    }
    cr_assert_eq(next, first + count);
}

static void check_all_cuts(int ndim, const int64_t *len)
{
    fsdp_box box = fsdp_box_whole(ndim, len);
    for (int d = 0; d < ndim; d++)
        box.lo[d] = 10 * d + 3;
    int64_t total = fsdp_box_count(&box);
    for (int64_t first = 0; first <= total; first++) {
        for (int64_t count = 0; first + count <= total; count++)
            check_cut(&box, first, count);
    }
}

Test(box, cut_gives_every_range_as_few_boxes_in_order)
{
    check_all_cuts(0, NULL);
    for (int64_t a = 0; a <= 17; a++)
        check_all_cuts(1, &a);
    for (int64_t i = 0; i < 6 * 6; i++)
        check_all_cuts(2, (int64_t[]){i / 6, i % 6});
    for (int64_t i = 0; i < 4 * 4 * 4; i++)
        check_all_cuts(3, (int64_t[]){i / 16, i / 4 % 4, i % 4});
    for (int64_t i = 0; i < 16; i++)
        check_all_cuts(4, (int64_t[]){1 + i / 8, 1 + i / 4 % 2, 1 + i / 2 % 2, 1 + i % 2 * 2});
}

Test(box, cut_of_a_whole_box_is_that_box)
{
    fsdp_box box = box_2d(2, 3, 4, 5), pieces[FSDP_BOX_PIECES];
    cr_assert_eq(fsdp_box_cut(&box, 0, 20, pieces), 1);
    cr_assert(fsdp_box_equal(&pieces[0], &box));
}

Test(box, cut_stays_inside_whatever_is_asked)
{
    fsdp_box box = box_2d(0, 0, 3, 3), pieces[FSDP_BOX_PIECES];
    cr_assert_eq(fsdp_box_cut(&box, 9, 1, pieces), 0);
    cr_assert_eq(fsdp_box_cut(&box, -1, 1, pieces), 0);
    cr_assert_eq(fsdp_box_cut(&box, 2, -1, pieces), 0);
    cr_assert_eq(fsdp_box_cut(&box, 3, INT64_MAX, pieces), 1);
    fsdp_box rest = box_2d(1, 0, 2, 3);
    cr_assert(fsdp_box_equal(&pieces[0], &rest));
}

Test(box, cut_of_the_most_dims_fits_its_output)
{
    int64_t len[FSDP_MAX_DIMS], middle = 0;
    for (int d = 0; d < FSDP_MAX_DIMS; d++) {
        len[d] = d < 20 ? 3 : 1;
        middle = d < 20 ? middle * 3 + 1 : middle;
    }
    fsdp_box box = fsdp_box_whole(FSDP_MAX_DIMS, len), pieces[FSDP_BOX_PIECES];
    int64_t total = fsdp_box_count(&box), held = 0;
    int n = fsdp_box_cut(&box, 1, total - 2, pieces);
    cr_assert_eq(n, 39);
    for (int i = 0; i < n; i++)
        held += fsdp_box_count(&pieces[i]);
    cr_assert_eq(held, total - 2);
}

/* --- shapes ------------------------------------------------------------------------------------- */

static void refuse_shape(int ndim, const int64_t *shape, size_t size, const char *words)
{
    fsdp_error err = {0};
    cr_assert_eq(fsdp_shape_check(ndim, shape, size, &err), FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, words), "'%s' lacks '%s'", err.text, words);
    cr_assert_eq(fsdp_shape_check(ndim, shape, size, NULL), FSDP_ERR_USAGE);
}

Test(box, shapes_are_checked)
{
    int64_t most[FSDP_MAX_DIMS];
    for (int d = 0; d < FSDP_MAX_DIMS; d++)
        most[d] = 1;
    cr_assert_eq(fsdp_shape_check(0, NULL, 8, NULL), FSDP_OK);
    cr_assert_eq(fsdp_shape_check(FSDP_MAX_DIMS, most, 8, NULL), FSDP_OK);
    cr_assert_eq(fsdp_shape_check(2, (int64_t[]){0, 5}, 8, NULL), FSDP_OK);
    refuse_shape(-1, NULL, 1, "-1 dims");
    refuse_shape(65, most, 1, "65 dims");
    refuse_shape(1, NULL, 1, "no lengths");
    refuse_shape(2, (int64_t[]){4, -3}, 1, "dim 1 of the shape cannot have length -3");
}

Test(box, shapes_stay_below_two_to_the_62)
{
    const int64_t two_to_60 = (int64_t)1 << 60;
    cr_assert_eq(fsdp_shape_check(1, (int64_t[]){two_to_60 - 1}, 4, NULL), FSDP_OK);
    refuse_shape(1, (int64_t[]){two_to_60}, 4,
                 "1152921504606846976 of 4-byte elements is too large");
    refuse_shape(1, (int64_t[]){INT64_MAX}, 1, "too large");
    refuse_shape(3, (int64_t[]){1 << 30, 1 << 30, 1 << 30}, 1, "too large");
    /* No element, but the strides of its rows overflow. */
    refuse_shape(3, (int64_t[]){0, two_to_60, 4}, 1, "too large");
    cr_assert_eq(fsdp_shape_check(2, (int64_t[]){0, two_to_60}, 16, NULL), FSDP_OK);
}
