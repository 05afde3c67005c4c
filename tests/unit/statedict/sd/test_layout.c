/*
 * Layouts against a model that deals out elements one by one and knows no boxes: every element must
 * be held by exactly the ranks the model says.
 */
#include "statedict/sd/layout_internal.h"
#include "tests/support/sample_state.h"
#include <fsdp/layout.h>

#include <criterion/criterion.h>
#include <limits.h>
#include <string.h>

enum { MOST_ROWS = 17 };

static const char *const dim_names[] = {"a", "b", "c", "d"};

static fsdp_mesh *make_mesh(int ndim, const int64_t *shape, const int *ranks)
{
    fsdp_mesh *mesh = NULL;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_mesh_create(ndim, shape, dim_names, ranks, &mesh, &err), FSDP_OK, "%s",
                 err.text);
    return mesh;
}

static fsdp_placement shard(int dim)
{
    return (fsdp_placement){.kind = FSDP_SHARD, .dim = dim};
}

static fsdp_placement strided(int dim, int64_t split)
{
    return (fsdp_placement){.kind = FSDP_STRIDED_SHARD, .dim = dim, .split = split};
}

static const fsdp_placement replicate = {.kind = FSDP_REPLICATE};

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

/* --- the chunk rule ----------------------------------------------------------------------------- */

static void expect_chunks(int64_t n, int parts, const int64_t *sizes)
{
    int64_t next = 0;
    for (int i = 0; i < parts; i++) {
        int64_t lo, len;
        fsdp_chunk(n, parts, i, &lo, &len);
        cr_assert_eq(len, sizes[i], "part %d of %d of %lld rows", i, parts, (long long)n);
        cr_assert_eq(lo, len > 0 ? next : n);
        next += len;
    }
    cr_assert_eq(next, n);
}

Test(layout, chunks_are_those_of_torch)
{
    expect_chunks(9, 4, (int64_t[]){3, 3, 3, 0});
    expect_chunks(5, 2, (int64_t[]){3, 2});
    expect_chunks(5, 4, (int64_t[]){2, 2, 1, 0});
    expect_chunks(7, 4, (int64_t[]){2, 2, 2, 1});
    expect_chunks(10, 8, (int64_t[]){2, 2, 2, 2, 2, 0, 0, 0});
    expect_chunks(3, 4, (int64_t[]){1, 1, 1, 0});
    expect_chunks(6, 4, (int64_t[]){2, 2, 2, 0});
    expect_chunks(0, 3, (int64_t[]){0, 0, 0});
    int64_t sizes[128] = {0};
    for (int i = 0; i < 17; i++)
        sizes[i] = 1;
    expect_chunks(17, 128, sizes);
}

Test(layout, chunks_of_huge_dims_do_not_overflow)
{
    int64_t lo, len, n = ((int64_t)1 << 62) - 1;
    fsdp_chunk(n, INT_MAX, INT_MAX - 1, &lo, &len);
    cr_assert_eq(lo + len, n);
    cr_assert_geq(len, 0);
}

/* --- the model ---------------------------------------------------------------------------------- */

/* Which part of mesh dim i an element of one tensor dim lies in; -1 when i does not cut that dim. */
typedef struct dealt {
    int64_t part[FSDP_MAX_MESH_DIMS];
} dealt;

typedef struct model {
    int ndim, mesh_ndim;
    int64_t mesh_shape[FSDP_MAX_MESH_DIMS];
    fsdp_placement placement[FSDP_MAX_MESH_DIMS];
    dealt deals[3][MOST_ROWS];
} model;

/* Deals a list of elements out over one mesh dim: the first ceil(n / parts) to part 0 and so on. */
static void deal_list(const model *m, dealt *deals, const int *elements, int n, int mesh_dim)
{
    int parts = (int)m->mesh_shape[mesh_dim];
    int each = (n + parts - 1) / parts;
    for (int i = 0; i < n; i++)
        deals[elements[i]].part[mesh_dim] = i / each;
}

static bool same_parts(const dealt *a, const dealt *b, int from)
{
    for (int i = from; i < FSDP_MAX_MESH_DIMS; i++) {
        if (a->part[i] != b->part[i])
            return false;
    }
    return true;
}

/*
 * Deals elements out over mesh dims from .. end. A plain shard deals its list out and hands each
 * part on to the dims on its right; a strided shard lets those go first and then deals out every
 * group that they made.
 */
static void deal(const model *m, dealt *deals, int dim, const int *elements, int n, int from)
{
    while (from < m->mesh_ndim &&
           (m->placement[from].kind == FSDP_REPLICATE || m->placement[from].dim != dim))
        from++;
    if (from == m->mesh_ndim || n == 0)
        return;
    bool is_strided = m->placement[from].kind == FSDP_STRIDED_SHARD;
    if (is_strided)
        deal(m, deals, dim, elements, n, from + 1);
    else
        deal_list(m, deals, elements, n, from);
    bool done[MOST_ROWS] = {false};
    for (int i = 0; i < n; i++) {
        int group[MOST_ROWS], size = 0;
        for (int k = i; k < n; k++) {
            const dealt *a = &deals[elements[i]], *b = &deals[elements[k]];
            bool together =
                is_strided ? same_parts(a, b, from + 1) : a->part[from] == b->part[from];
            if (together && !done[k]) {
                done[k] = true;
                group[size++] = elements[k];
            }
        }
        if (is_strided)
            deal_list(m, deals, group, size, from);
        else
            deal(m, deals, dim, group, size, from + 1);
    }
}

static void deal_all(model *m, int ndim, const int64_t *shape)
{
    m->ndim = ndim;
    for (int d = 0; d < ndim; d++) {
        int elements[MOST_ROWS];
        for (int e = 0; e < (int)shape[d]; e++) {
            elements[e] = e;
            for (int i = 0; i < FSDP_MAX_MESH_DIMS; i++)
                m->deals[d][e].part[i] = -1;
        }
        deal(m, m->deals[d], d, elements, (int)shape[d], 0);
    }
}

static bool model_holds(const model *m, const int64_t *coord, const int64_t *element)
{
    for (int d = 0; d < m->ndim; d++) {
        for (int i = 0; i < m->mesh_ndim; i++) {
            int64_t part = m->deals[d][element[d]].part[i];
            if (part >= 0 && part != coord[i])
                return false;
        }
    }
    return true;
}

/* --- mesh layouts against the model ------------------------------------------------------------- */

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

static bool has_elements(int ndim, const int64_t *shape)
{
    fsdp_box whole = fsdp_box_whole(ndim, shape);
    return fsdp_box_count(&whole) > 0;
}

static void check_box_shape(const fsdp_layout *layout, int ndim, const int64_t *shape, int rank,
                            const fsdp_box *box)
{
    cr_assert_eq(box->ndim, ndim);
    for (int d = 0; d < ndim; d++) {
        if (box->len[d] == 0)
            cr_assert_eq(box->lo[d], shape[d]);
    }
    bool is_empty = fsdp_box_count(box) == 0;
    cr_assert_eq(fsdp_layout_box_count(layout, ndim, shape, rank), is_empty ? 0 : 1);
    fsdp_box same = {0};
    fsdp_layout_box_at(layout, ndim, shape, rank, 0, &same);
    cr_assert(fsdp_box_equal(box, &same));
}

/*
 * Every rank holds the model's elements and no other, and the holders of an element have the copy
 * numbers 0 .. copies - 1: so boxes of different shards are disjoint, and nothing is missing.
 */
static void check_layout(const fsdp_layout *layout, int ndim, const int64_t *shape)
{
    model m = {.mesh_ndim = fsdp_mesh_ndim(layout->mesh)};
    for (int i = 0; i < m.mesh_ndim; i++) {
        m.mesh_shape[i] = fsdp_mesh_dim_size(layout->mesh, i);
        m.placement[i] = layout->placement[i];
    }
    deal_all(&m, ndim, shape);
    static uint32_t copies_seen[MOST_ROWS * MOST_ROWS];
    memset(copies_seen, 0, sizeof copies_seen);
    int64_t copies = 1, wrong = 0;
    for (int64_t p = 0; p < fsdp_mesh_size(layout->mesh); p++) {
        int rank = fsdp_mesh_rank_at(layout->mesh, p);
        int64_t coord[FSDP_MAX_MESH_DIMS], element[3] = {0};
        fsdp_box box = {0};
        cr_assert(fsdp_layout_mesh_box(layout, ndim, shape, rank, &box));
        check_box_shape(layout, ndim, shape, rank, &box);
        fsdp_mesh_coord(layout->mesh, rank, coord);
        copies = fsdp_layout_copies(layout, rank, 0);
        uint32_t bit = 1u << fsdp_layout_copy(layout, rank, 0);
        for (bool more = has_elements(ndim, shape); more;
             more = next_element(ndim, shape, element)) {
            bool held = box_holds(&box, element);
            uint32_t *seen = &copies_seen[fsdp_box_position(ndim, shape, element)];
            wrong += held != model_holds(&m, coord, element) || (held && *seen & bit);
            *seen |= held ? bit : 0;
        }
    }
    fsdp_box whole = fsdp_box_whole(ndim, shape);
    for (int64_t e = 0; e < fsdp_box_count(&whole); e++)
        wrong += copies_seen[e] != (1u << copies) - 1;
    cr_assert_eq(wrong, 0, "%lld elements", (long long)wrong);
}

/* Placement number `choice` of 1 + 2 * ndim: replicate, shards, strided shards. */
static void set_placements(fsdp_layout *layout, int ndim, int choice)
{
    int mesh_ndim = fsdp_mesh_ndim(layout->mesh), options = 1 + 2 * ndim;
    for (int i = mesh_ndim - 1; i >= 0; i--, choice /= options) {
        int option = choice % options;
        if (option == 0)
            layout->placement[i] = replicate;
        else if (option <= ndim)
            layout->placement[i] = shard(option - 1);
        else
            layout->placement[i] = strided(option - 1 - ndim, 1);
    }
    for (int i = 0; i < mesh_ndim; i++) {
        fsdp_placement *placement = &layout->placement[i];
        for (int right = i + 1; right < mesh_ndim; right++) {
            const fsdp_placement *other = &layout->placement[right];
            if (other->kind != FSDP_REPLICATE && other->dim == placement->dim)
                placement->split *= fsdp_mesh_dim_size(layout->mesh, right);
        }
    }
}

static int choice_count(int mesh_ndim, int ndim)
{
    int count = 1;
    for (int i = 0; i < mesh_ndim; i++)
        count *= 1 + 2 * ndim;
    return count;
}

typedef struct mesh_shape {
    int ndim;
    int64_t shape[FSDP_MAX_MESH_DIMS];
} mesh_shape;

/* Meshes up to 4x4 and up to 2x2x3, in the order of their number; false after the last. */
static bool numbered_mesh(int number, mesh_shape *out)
{
    if (number < 4)
        *out = (mesh_shape){1, {number + 1}};
    else if (number < 20)
        *out = (mesh_shape){2, {(number - 4) / 4 + 1, (number - 4) % 4 + 1}};
    else
        *out = (mesh_shape){
            3, {(number - 20) / 6 + 1, (number - 20) / 3 % 2 + 1, (number - 20) % 3 + 1}};
    return number < 32;
}

/* All placements of tensors of ndim dims on a mesh; every `step`-th shape up to MOST_ROWS a dim. */
static void check_mesh(const mesh_shape *shape_of_mesh, int ndim, int step)
{
    fsdp_mesh *mesh = make_mesh(shape_of_mesh->ndim, shape_of_mesh->shape, NULL);
    int shapes = 1;
    for (int d = 0; d < ndim; d++)
        shapes *= MOST_ROWS + 1;
    for (int choice = 0; choice < choice_count(shape_of_mesh->ndim, ndim); choice++) {
        fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = mesh};
        set_placements(&layout, ndim, choice);
        for (int i = choice % step; i < shapes; i += step) {
            int64_t shape[] = {i % (MOST_ROWS + 1), i / (MOST_ROWS + 1)};
            accept_layout(&layout, ndim, shape);
            check_layout(&layout, ndim, shape);
        }
    }
    fsdp_mesh_free(mesh);
}

Test(layout, vectors_on_every_mesh_agree_with_the_model)
{
    mesh_shape mesh;
    for (int number = 0; numbered_mesh(number, &mesh); number++)
        check_mesh(&mesh, 1, 1);
    check_mesh(&(mesh_shape){4, {2, 2, 2, 2}}, 1, 1);
    check_mesh(&(mesh_shape){4, {1, 3, 2, 2}}, 1, 1);
}

Test(layout, matrices_on_every_mesh_agree_with_the_model)
{
    mesh_shape mesh;
    for (int number = 0; numbered_mesh(number, &mesh); number++)
        check_mesh(&mesh, 2,
                   (int)test_sample(7)); /* every 7th shape, another one for each placement */
}

Test(layout, three_dims_agree_with_the_model)
{
    const int64_t lengths[] = {0, 1, 2, 3, 5, 7};
    fsdp_mesh *mesh = make_mesh(3, (int64_t[]){2, 2, 3}, NULL);
    for (int choice = 0; choice < choice_count(3, 3); choice++) {
        fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = mesh};
        set_placements(&layout, 3, choice);
        for (int i = choice % 7; i < 6 * 6 * 6; i += 7) {
            int64_t shape[] = {lengths[i / 36], lengths[i / 6 % 6], lengths[i % 6]};
            if (shape[0] * shape[1] * shape[2] > MOST_ROWS * MOST_ROWS)
                continue;
            accept_layout(&layout, 3, shape);
            check_layout(&layout, 3, shape);
        }
    }
    fsdp_mesh_free(mesh);
}

/* --- the examples of the semantics, literally ----------------------------------------------------- */

static void expect_rows(const fsdp_layout *layout, int64_t n, int rank, int64_t lo, int64_t len)
{
    fsdp_box box = {0};
    accept_layout(layout, 1, &n);
    cr_assert(fsdp_layout_mesh_box(layout, 1, &n, rank, &box));
    cr_assert_eq(box.lo[0], lo, "rank %d begins at row %lld", rank, (long long)box.lo[0]);
    cr_assert_eq(box.len[0], len, "rank %d holds %lld rows", rank, (long long)box.len[0]);
}

Test(layout, fsdp_over_tp_and_plain_shards_of_8_rows)
{
    fsdp_mesh *mesh = make_mesh(2, (int64_t[]){2, 2}, NULL);
    fsdp_layout fsdp_tp = {
        .kind = FSDP_LAYOUT_MESH, .mesh = mesh, .placement = {strided(0, 2), shard(0)}};
    fsdp_layout plain = {.kind = FSDP_LAYOUT_MESH, .mesh = mesh, .placement = {shard(0), shard(0)}};
    const int64_t strided_rows[] = {0, 4, 2, 6};
    for (int rank = 0; rank < 4; rank++) {
        expect_rows(&fsdp_tp, 8, rank, strided_rows[rank], 2);
        expect_rows(&plain, 8, rank, 2 * rank, 2);
    }
    fsdp_mesh_free(mesh);
}

/* Expects these rows in one dp rank when tp is gathered: the rows of its tp ranks, in tp order. */
static void expect_gathered(const fsdp_layout *layout, int64_t n, int dp, int tp_size,
                            const int64_t *rows, int count)
{
    int at = 0;
    for (int tp = 0; tp < tp_size; tp++) {
        fsdp_box box = {0};
        cr_assert(fsdp_layout_mesh_box(layout, 1, &n, dp * tp_size + tp, &box));
        for (int64_t i = 0; i < box.len[0]; i++, at++) {
            cr_assert_lt(at, count);
            cr_assert_eq(box.lo[0] + i, rows[at], "row %d of dp rank %d", at, dp);
        }
    }
    cr_assert_eq(at, count);
}

Test(layout, uneven_strided_shards_hold_the_rows_of_torch)
{
    fsdp_mesh *two = make_mesh(2, (int64_t[]){2, 2}, NULL);
    fsdp_mesh *four = make_mesh(2, (int64_t[]){4, 2}, NULL);
    fsdp_layout six = {
        .kind = FSDP_LAYOUT_MESH, .mesh = two, .placement = {strided(0, 2), shard(0)}};
    fsdp_layout nine = {
        .kind = FSDP_LAYOUT_MESH, .mesh = four, .placement = {strided(0, 2), shard(0)}};
    expect_gathered(&six, 6, 0, 2, (int64_t[]){0, 1, 3, 4}, 4);
    expect_gathered(&six, 6, 1, 2, (int64_t[]){2, 5}, 2);
    expect_gathered(&nine, 9, 0, 2, (int64_t[]){0, 1, 5}, 3);
    expect_gathered(&nine, 9, 1, 2, (int64_t[]){2, 3, 6}, 3);
    expect_gathered(&nine, 9, 2, 2, (int64_t[]){4, 7}, 2);
    expect_gathered(&nine, 9, 3, 2, (int64_t[]){8}, 1);
    fsdp_mesh_free(two);
    fsdp_mesh_free(four);
}

Test(layout, hsdp_over_tp_has_one_box_per_replica)
{
    fsdp_mesh *mesh = make_mesh(3, (int64_t[]){2, 2, 2}, NULL);
    fsdp_layout layout = {
        .kind = FSDP_LAYOUT_MESH, .mesh = mesh, .placement = {replicate, strided(0, 2), shard(0)}};
    const int64_t lo[] = {0, 4, 2, 6};
    for (int rank = 0; rank < 8; rank++) {
        expect_rows(&layout, 8, rank, lo[rank % 4], 2);
        cr_assert_eq(fsdp_layout_copies(&layout, rank, 0), 2);
        cr_assert_eq(fsdp_layout_copy(&layout, rank, 0), rank / 4);
    }
    cr_assert_eq(fsdp_layout_world(&layout), 8);
    fsdp_mesh_free(mesh);
}

Test(layout, two_strided_dims_cut_from_right_to_left)
{
    fsdp_mesh *mesh = make_mesh(3, (int64_t[]){2, 2, 2}, NULL);
    fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH,
                          .mesh = mesh,
                          .placement = {strided(0, 4), strided(0, 2), shard(0)}};
    for (int rank = 0; rank < 8; rank++)
        expect_rows(&layout, 8, rank, 4 * (rank % 2) + 2 * (rank / 2 % 2) + rank / 4, 1);
    fsdp_mesh_free(mesh);
}

Test(layout, row_parallel_weights_are_cut_in_both_dims)
{
    fsdp_mesh *mesh = make_mesh(2, (int64_t[]){2, 3}, NULL);
    fsdp_layout layout = {
        .kind = FSDP_LAYOUT_MESH, .mesh = mesh, .placement = {shard(0), shard(1)}};
    int64_t shape[] = {5, 7};
    fsdp_box box = {0}, expected = {.ndim = 2, .lo = {3, 6}, .len = {2, 1}};
    cr_assert(fsdp_layout_mesh_box(&layout, 2, shape, 5, &box));
    cr_assert(fsdp_box_equal(&box, &expected));
    fsdp_mesh_free(mesh);
}

Test(layout, an_empty_shard_keeps_the_other_dims)
{
    fsdp_mesh *mesh = make_mesh(1, (int64_t[]){4}, NULL);
    fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = mesh, .placement = {shard(0)}};
    int64_t shape[] = {9, 5};
    fsdp_box box = {0}, expected = {.ndim = 2, .lo = {9, 0}, .len = {0, 5}};
    cr_assert(fsdp_layout_mesh_box(&layout, 2, shape, 3, &box));
    cr_assert(fsdp_box_equal(&box, &expected));
    cr_assert_eq(fsdp_layout_box_count(&layout, 2, shape, 3), 0);
    fsdp_mesh_free(mesh);
}

Test(layout, a_scalar_is_replicated)
{
    fsdp_mesh *mesh = make_mesh(1, (int64_t[]){3}, NULL);
    fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = mesh};
    accept_layout(&layout, 0, NULL);
    check_layout(&layout, 0, NULL);
    layout.placement[0] = shard(0);
    refuse_layout(&layout, 0, NULL, "shards dim 0 of a 0-d tensor");
    fsdp_mesh_free(mesh);
}

Test(layout, a_mesh_over_some_ranks_leaves_the_others_out)
{
    fsdp_mesh *mesh = make_mesh(2, (int64_t[]){2, 2}, (int[]){2, 3, 6, 7});
    fsdp_layout layout = {
        .kind = FSDP_LAYOUT_MESH, .mesh = mesh, .placement = {replicate, shard(0)}};
    int64_t n = 5;
    for (int rank = 0; rank < 8; rank++) {
        bool is_member = rank % 4 >= 2;
        fsdp_box box;
        cr_assert_eq(fsdp_layout_mesh_box(&layout, 1, &n, rank, &box), is_member);
        cr_assert_eq(fsdp_layout_box_count(&layout, 1, &n, rank), is_member ? 1 : 0);
        cr_assert_eq(fsdp_layout_copies(&layout, rank, 0), is_member ? 2 : 0);
        cr_assert_eq(fsdp_layout_copy(&layout, rank, 0), is_member ? rank / 4 : -1);
    }
    expect_rows(&layout, 5, 2, 0, 3);
    expect_rows(&layout, 5, 3, 3, 2);
    expect_rows(&layout, 5, 6, 0, 3);
    expect_rows(&layout, 5, 7, 3, 2);
    check_layout(&layout, 1, &n);
    cr_assert_eq(fsdp_layout_world(&layout), 8);
    fsdp_mesh_free(mesh);
}

Test(layout, placements_that_make_no_sense_are_refused)
{
    fsdp_mesh *mesh = make_mesh(2, (int64_t[]){4, 2}, NULL);
    fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = mesh};
    int64_t shape[] = {8, 8};
    layout.placement[1] = (fsdp_placement){.kind = FSDP_PARTIAL};
    refuse_layout(&layout, 2, shape, "Partial on mesh dim 'b': reduce it");
    layout.placement[1] = shard(2);
    refuse_layout(&layout, 2, shape, "mesh dim 'b' shards dim 2 of a 2-d tensor");
    layout.placement[1] = shard(-1);
    refuse_layout(&layout, 2, shape, "dim -1");
    layout.placement[1] = (fsdp_placement){.kind = (fsdp_placement_kind)9};
    refuse_layout(&layout, 2, shape, "unknown placement 9");
    layout.placement[1] = shard(0);
    for (int64_t split = 0; split < 6; split++) {
        layout.placement[0] = strided(0, split);
        if (split == 2)
            accept_layout(&layout, 2, shape);
        else
            refuse_layout(&layout, 2, shape,
                          "cut dim 0 into 2 parts, the split must be that number");
    }
    layout.placement[0] = strided(1, 2);
    refuse_layout(&layout, 2, shape, "cut dim 1 into 1 parts");
    layout.mesh = NULL;
    refuse_layout(&layout, 2, shape, "no mesh");
    layout.kind = (fsdp_layout_kind)5;
    refuse_layout(&layout, 2, shape, "the layout has the unknown kind 5");
    fsdp_mesh_free(mesh);
}

/* --- flat layouts ------------------------------------------------------------------------------- */

/* Every rank's boxes, walked in order, are the elements that lie in its chunk. */
static void check_flat(const fsdp_layout *layout, int ndim, const int64_t *shape)
{
    int64_t ranks = fsdp_mesh_size(layout->mesh), chunk = layout->flat_count / ranks;
    fsdp_box whole = fsdp_box_whole(ndim, shape);
    int64_t total = fsdp_box_count(&whole), next = 0;
    for (int64_t p = 0; p < ranks; p++) {
        int rank = fsdp_mesh_rank_at(layout->mesh, p);
        size_t count = fsdp_layout_box_count(layout, ndim, shape, rank);
        int64_t held = 0;
        for (size_t i = 0; i < count; i++) {
            fsdp_box box = {0};
            fsdp_layout_box_at(layout, ndim, shape, rank, i, &box);
            cr_assert_eq(fsdp_box_position(ndim, shape, box.lo), next + held);
            int64_t last[3];
            for (int d = 0; d < ndim; d++)
                last[d] = box.lo[d] + box.len[d] - 1;
            held += fsdp_box_count(&box);
            cr_assert_eq(fsdp_box_position(ndim, shape, last), next + held - 1);
        }
        int64_t expected = 0;
        for (int64_t e = 0; e < total; e++)
            expected += (layout->flat_offset + e) / chunk == p;
        cr_assert_eq(held, expected);
        cr_assert_eq(fsdp_layout_copies(layout, rank, 0), 1);
        next += held;
    }
    cr_assert_eq(next, total);
}

Test(layout, flat_buffers_are_cut_by_position)
{
    const int64_t shapes[][3] = {{7, 1, 1}, {3, 4, 1}, {2, 3, 4}, {1, 1, 1}, {5, 0, 2}};
    for (int i = 0; i < 6 * 20 * 5; i++) {
        int64_t ranks = 1 + i / 100, offset = i / 5 % 20;
        fsdp_mesh *mesh = make_mesh(1, &ranks, NULL);
        fsdp_layout layout = {.kind = FSDP_LAYOUT_FLAT, .mesh = mesh, .flat_offset = offset};
        /* 43 elements are the least that hold them all; 60 and 300 leave more padding. */
        const int64_t counts[] = {(43 + ranks - 1) / ranks * ranks, 60, 300};
        for (int k = 0; k < 3; k++) {
            layout.flat_count = counts[k];
            accept_layout(&layout, 3, shapes[i % 5]);
            check_flat(&layout, 3, shapes[i % 5]);
        }
        fsdp_mesh_free(mesh);
    }
}

Test(layout, a_flat_scalar_lies_on_one_rank)
{
    fsdp_mesh *mesh = make_mesh(2, (int64_t[]){2, 2}, (int[]){7, 5, 3, 1});
    fsdp_layout layout = {
        .kind = FSDP_LAYOUT_FLAT, .mesh = mesh, .flat_count = 8, .flat_offset = 5};
    accept_layout(&layout, 0, NULL);
    for (int rank = 0; rank < 8; rank++)
        cr_assert_eq(fsdp_layout_box_count(&layout, 0, NULL, rank), rank == 3 ? 1 : 0);
    cr_assert_eq(fsdp_layout_copies(&layout, 2, 0), 0);
    cr_assert_eq(fsdp_layout_world(&layout), 8);
    fsdp_mesh_free(mesh);
}

Test(layout, flat_layouts_must_fit_their_buffer)
{
    fsdp_mesh *mesh = make_mesh(1, (int64_t[]){4}, NULL);
    fsdp_layout layout = {.kind = FSDP_LAYOUT_FLAT, .mesh = mesh, .flat_count = 10};
    int64_t n = 6;
    refuse_layout(&layout, 1, &n, "10 elements cannot be cut into 4 equal chunks");
    layout.flat_count = 12;
    layout.flat_offset = 6;
    accept_layout(&layout, 1, &n);
    layout.flat_offset = 7;
    refuse_layout(&layout, 1, &n, "6 elements at offset 7 do not lie in a flat buffer of 12");
    layout.flat_offset = -1;
    refuse_layout(&layout, 1, &n, "offset -1");
    layout.flat_offset = INT64_MAX;
    refuse_layout(&layout, 1, &n, "do not lie");
    layout.flat_count = -4;
    refuse_layout(&layout, 1, &n, "cannot be cut");
    fsdp_mesh_free(mesh);
}
