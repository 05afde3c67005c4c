/* Layouts of explicit boxes: what is accepted is judged element by element. */
#include "statedict/sd/layout_internal.h"
#include <fsdp/layout.h>

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void accept_layout(const fsdp_layout *layout, int ndim, const int64_t *shape)
{
    fsdp_error err = {0};
    cr_assert_eq(fsdp_layout_check(layout, ndim, shape, &err), FSDP_OK, "%s", err.text);
}

static void refuse_layout(const fsdp_layout *layout, int ndim, const int64_t *shape,
                          const char *words)
{
    fsdp_error err = {0};
    cr_assert_eq(fsdp_layout_check(layout, ndim, shape, &err), FSDP_ERR_USAGE);
    cr_assert_eq(err.status, FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, words), "'%s' lacks '%s'", err.text, words);
}

static uint32_t random_state = 12345;

static int64_t random_below(int64_t n)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (int64_t)(random_state >> 8) % n;
}

static bool next_element(int ndim, const int64_t *shape, int64_t *element)
{
    int d = ndim - 1;
    while (d >= 0 && ++element[d] == shape[d])
        element[d--] = 0;
    return d >= 0;
}

static bool box_holds(const fsdp_box *box, const int64_t *element)
{
    for (int d = 0; d < box->ndim; d++) {
        if (element[d] < box->lo[d] || element[d] >= box->lo[d] + box->len[d])
            return false;
    }
    return true;
}

static fsdp_rank_box rank_box(int rank, int64_t lo0, int64_t lo1, int64_t len0, int64_t len1)
{
    return (fsdp_rank_box){rank, {.ndim = 2, .lo = {lo0, lo1}, .len = {len0, len1}}};
}

static fsdp_layout box_layout(const fsdp_rank_box *boxes, size_t count)
{
    return (fsdp_layout){.kind = FSDP_LAYOUT_BOXES, .boxes = boxes, .box_count = count};
}

Test(layout_boxes, boxes_are_found_by_rank_and_number)
{
    const fsdp_rank_box boxes[] = {rank_box(1, 0, 0, 2, 3), rank_box(3, 2, 0, 1, 3),
                                   rank_box(3, 3, 0, 1, 1), rank_box(3, 3, 1, 1, 2),
                                   rank_box(6, 2, 0, 1, 3)};
    fsdp_layout layout = box_layout(boxes, 5);
    int64_t shape[] = {4, 3};
    accept_layout(&layout, 2, shape);
    const size_t counts[] = {0, 1, 0, 3, 0, 0, 1, 0};
    size_t number = 0;
    for (int rank = 0; rank < 8; rank++) {
        cr_assert_eq(fsdp_layout_box_count(&layout, 2, shape, rank), counts[rank]);
        for (size_t i = 0; i < counts[rank]; i++, number++) {
            fsdp_box box = {0};
            fsdp_layout_box_at(&layout, 2, shape, rank, i, &box);
            cr_assert(fsdp_box_equal(&box, &boxes[number].box));
        }
    }
    cr_assert_eq(fsdp_layout_world(&layout), 7);
    cr_assert_eq(fsdp_layout_copies(&layout, 3, 0), 2);
    cr_assert_eq(fsdp_layout_copy(&layout, 3, 0), 0);
    cr_assert_eq(fsdp_layout_copy(&layout, 6, 0), 1);
    cr_assert_eq(fsdp_layout_copies(&layout, 3, 1), 1);
    cr_assert_eq(fsdp_layout_copies(&layout, 3, 3), 0);
    cr_assert_eq(fsdp_layout_copies(&layout, 4, 0), 0);
    cr_assert_eq(fsdp_layout_copy(&layout, 4, 0), -1);
}

Test(layout_boxes, five_boxes_around_a_middle_tile_a_square)
{
    /* No straight cut leaves all of them whole. */
    fsdp_rank_box boxes[] = {rank_box(0, 0, 0, 1, 2), rank_box(1, 0, 2, 2, 1),
                             rank_box(2, 2, 1, 1, 2), rank_box(3, 1, 0, 2, 1),
                             rank_box(4, 1, 1, 1, 1)};
    fsdp_layout layout = box_layout(boxes, 5);
    int64_t shape[] = {3, 3};
    accept_layout(&layout, 2, shape);
    layout.box_count = 4;
    refuse_layout(&layout, 2, shape, "no box holds element [1, 1]");
    layout.box_count = 5;
    boxes[4].box.lo[1] = 0;
    refuse_layout(&layout, 2, shape,
                  "box [1:2, 0:1] of rank 4 and box [1:3, 0:1] of rank 3 overlap");
}

Test(layout_boxes, boxes_that_are_wrong_in_themselves_are_refused)
{
    int64_t shape[] = {4, 4};
    fsdp_rank_box boxes[] = {rank_box(0, 0, 0, 4, 2), rank_box(1, 0, 2, 4, 2)};
    fsdp_layout layout = box_layout(boxes, 2);
    accept_layout(&layout, 2, shape);
    refuse_layout(&layout, 1, shape, "box 0 has 2 dims, but the tensor has 1");
    boxes[0].rank = 2;
    refuse_layout(&layout, 2, shape, "not sorted by rank");
    boxes[0].rank = -1;
    refuse_layout(&layout, 2, shape, "box 0 cannot belong to rank -1");
    boxes[0].rank = 0;
    boxes[1].box.len[1] = 3;
    refuse_layout(&layout, 2, shape, "box 1 of rank 1 is not inside the tensor");
    boxes[1].box.lo[0] = INT64_MAX;
    refuse_layout(&layout, 2, shape, "not inside the tensor");
    boxes[1] = rank_box(1, 4, 0, 0, 4);
    refuse_layout(&layout, 2, shape, "box [4:4, 0:4] of rank 1 is empty");
    boxes[1] = rank_box(0, 0, 0, 4, 2);
    refuse_layout(&layout, 2, shape, "rank 0 has box [0:4, 0:2] twice");
    layout.boxes = NULL;
    refuse_layout(&layout, 2, shape, "no list");
    layout.box_count = FSDP_MAX_LAYOUT_BOXES + 1;
    refuse_layout(&layout, 2, shape, "65537 boxes, at most 65536");
}

Test(layout_boxes, boxes_of_scalars_and_of_empty_tensors)
{
    fsdp_rank_box scalars[] = {{.rank = 2}, {.rank = 5}};
    fsdp_layout layout = box_layout(scalars, 2);
    accept_layout(&layout, 0, NULL);
    cr_assert_eq(fsdp_layout_copies(&layout, 5, 0), 2);
    layout.box_count = 0;
    refuse_layout(&layout, 0, NULL, "no box holds element []");
    int64_t empty[] = {3, 0};
    accept_layout(&layout, 2, empty);
    cr_assert_eq(fsdp_layout_world(&layout), 0);
    fsdp_rank_box nothing = rank_box(0, 0, 0, 3, 0);
    layout = box_layout(&nothing, 1);
    refuse_layout(&layout, 2, empty, "is empty");
}

enum { MOST_BOXES = 200 };

/* Splits a box at random into few or many. */
static size_t split_box(const fsdp_box *box, int depth, fsdp_rank_box *out, size_t n)
{
    int dim = (int)random_below(box->ndim);
    if (depth == 0 || n + 2 > MOST_BOXES / 2 || box->len[dim] < 2 || random_below(5) == 0) {
        out[n] = (fsdp_rank_box){(int)random_below(4), *box};
        return n + 1;
    }
    fsdp_box first = *box, second = *box;
    first.len[dim] = 1 + random_below(box->len[dim] - 1);
    second.lo[dim] += first.len[dim];
    second.len[dim] -= first.len[dim];
    n = split_box(&first, depth - 1, out, n);
    return split_box(&second, depth - 1, out, n);
}

static int compare_ranks(const void *left, const void *right)
{
    const fsdp_rank_box *a = left, *b = right;
    return (a->rank > b->rank) - (a->rank < b->rank);
}

/* Moves, stretches, drops or repeats a box, now and then. */
static size_t spoil_boxes(fsdp_rank_box *boxes, size_t n, const int64_t *shape)
{
    fsdp_rank_box *box = &boxes[random_below((int64_t)n)];
    int dim = (int)random_below(box->box.ndim);
    int64_t end = box->box.lo[dim] + box->box.len[dim];
    switch (random_below(6)) {
    case 0:
        if (end < shape[dim])
            box->box.lo[dim]++;
        return n;
    case 1:
        if (end < shape[dim])
            box->box.len[dim]++;
        return n;
    case 2: *box = boxes[n - 1]; return n - 1;
    case 3:
        boxes[n] = *box;
        boxes[n].rank = (int)random_below(6);
        return n + 1;
    default: return n;
    }
}

/* Elements held by no box (gaps) and by two different ones (clashes), counted one by one. */
static void count_faults(const fsdp_rank_box *boxes, size_t n, const int64_t *shape, int *gaps,
                         int *clashes)
{
    int ndim = boxes[0].box.ndim;
    int64_t element[3] = {0};
    *gaps = *clashes = 0;
    do {
        const fsdp_box *holder = NULL;
        for (size_t i = 0; i < n; i++) {
            if (!box_holds(&boxes[i].box, element))
                continue;
            *clashes += holder && !fsdp_box_equal(holder, &boxes[i].box);
            holder = &boxes[i].box;
        }
        *gaps += !holder;
    } while (next_element(ndim, shape, element));
}

static bool has_twins(const fsdp_rank_box *boxes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        for (size_t k = i + 1; k < n; k++) {
            if (boxes[i].rank == boxes[k].rank && fsdp_box_equal(&boxes[i].box, &boxes[k].box))
                return true;
        }
    }
    return false;
}

static void check_gap_message(const fsdp_error *err, const fsdp_rank_box *boxes, size_t n)
{
    long long named[3] = {0};
    int fields = sscanf(err->text, "no box holds element [%lld, %lld, %lld]", &named[0], &named[1],
                        &named[2]);
    cr_assert_eq(fields, boxes[0].box.ndim, "%s", err->text);
    for (size_t i = 0; i < n; i++)
        cr_assert_not(box_holds(&boxes[i].box, (int64_t[]){named[0], named[1], named[2]}), "%s",
                      err->text);
}

/* Returns whether the boxes were good. */
static bool check_random_boxes(int ndim, const int64_t *shape)
{
    static fsdp_rank_box boxes[MOST_BOXES];
    fsdp_box whole = fsdp_box_whole(ndim, shape);
    size_t n = split_box(&whole, 6, boxes, 0);
    for (int64_t i = random_below(3); i > 0 && n > 1; i--)
        n = spoil_boxes(boxes, n, shape);
    qsort(boxes, n, sizeof *boxes, compare_ranks);
    fsdp_layout layout = box_layout(boxes, n);
    fsdp_error err = {0};
    fsdp_status status = fsdp_layout_check(&layout, ndim, shape, &err);
    int gaps, clashes;
    count_faults(boxes, n, shape, &gaps, &clashes);
    bool twins = has_twins(boxes, n);
    cr_assert_eq(status == FSDP_OK, gaps + clashes == 0 && !twins, "%d gaps, %d clashes, but: '%s'",
                 gaps, clashes, err.text);
    if (strncmp(err.text, "no box", 6) == 0)
        check_gap_message(&err, boxes, n);
    if (strstr(err.text, "overlap"))
        cr_assert_gt(clashes, 0, "%s", err.text);
    if (strstr(err.text, "twice"))
        cr_assert(twins, "%s", err.text);
    return status == FSDP_OK;
}

Test(layout_boxes, random_boxes_are_judged_like_element_by_element)
{
    int good = 0, bad = 0;
    for (int i = 0; i < 20000; i++) {
        int64_t shape[] = {1 + random_below(9), 1 + random_below(9), 1 + random_below(4)};
        bool is_good = check_random_boxes(1 + i % 3, shape);
        good += is_good;
        bad += !is_good;
    }
    cr_assert_gt(good, 5000);
    cr_assert_gt(bad, 3000);
}

static void expect_most_boxes(fsdp_rank_box *boxes, const int64_t *shape)
{
    fsdp_layout layout = box_layout(boxes, FSDP_MAX_LAYOUT_BOXES);
    accept_layout(&layout, 2, shape);
    fsdp_rank_box *victim = &boxes[40000], kept = *victim;
    victim->box.lo[0] -= 1;
    refuse_layout(&layout, 2, shape, "overlap");
    *victim = kept;
    victim->box.len[0] -= 1;
    refuse_layout(&layout, 2, shape, "no box holds element");
    *victim = kept;
}

Test(layout_boxes, the_most_boxes_are_checked_exactly)
{
    fsdp_rank_box *boxes = malloc(FSDP_MAX_LAYOUT_BOXES * sizeof *boxes);
    cr_assert(boxes);
    for (int i = 0; i < FSDP_MAX_LAYOUT_BOXES; i++) /* a grid of 256 x 256 */
        boxes[i] = rank_box(i / 100, i / 256 * 2, i % 256 * 3, 2, 3);
    expect_most_boxes(boxes, (int64_t[]){512, 768});
    for (int i = 0; i < FSDP_MAX_LAYOUT_BOXES; i++) /* stripes, last first */
        boxes[i] = rank_box(i / 100, (FSDP_MAX_LAYOUT_BOXES - 1 - i) * 2, 0, 2, 5);
    expect_most_boxes(boxes, (int64_t[]){FSDP_MAX_LAYOUT_BOXES * 2, 5});
    for (int i = 0; i < FSDP_MAX_LAYOUT_BOXES; i++) /* everybody holds everything */
        boxes[i] = rank_box(i, 0, 0, 5, 5);
    fsdp_layout layout = box_layout(boxes, FSDP_MAX_LAYOUT_BOXES);
    accept_layout(&layout, 2, (int64_t[]){5, 5});
    free(boxes);
}
