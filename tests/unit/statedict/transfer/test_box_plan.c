/*
 * Plans as pure functions: every element is stored exactly once, readers find what writers decided,
 * bytes are balanced, slabs follow the order of the tensor and of every box in it.
 */
#include "statedict/transfer/box_plan.h"
#include "base/data/box_internal.h"
#include <criterion/criterion.h>

#include <stdio.h>
#include <string.h>

static fsdp_sd *new_sd(void)
{
    fsdp_sd *sd = NULL;
    cr_assert_eq(fsdp_sd_create(&sd, NULL), FSDP_OK);
    return sd;
}

static fsdp_mesh *new_mesh(int ndim, const int64_t *shape)
{
    static const char *const names[] = {"a", "b", "c", "d"};
    fsdp_mesh *mesh = NULL;
    cr_assert_eq(fsdp_mesh_create(ndim, shape, names, NULL, &mesh, NULL), FSDP_OK);
    return mesh;
}

static void add(fsdp_sd *sd, const char *name, int ndim, const int64_t *shape,
                const fsdp_mesh *mesh, const fsdp_placement *placements)
{
    fsdp_error err = {0};
    fsdp_layout layout = {.mesh = mesh};
    for (int i = 0; i < fsdp_mesh_ndim(mesh); i++)
        layout.placement[i] = placements[i];
    cr_assert_eq(fsdp_sd_add_tensor(sd, name, strlen(name),
                                    &(fsdp_tensor){FSDP_F32, ndim, shape, layout, NULL}, &err),
                 FSDP_OK, "%s", err.text);
}

/* Adds one to every element of the tensor that lies in the box. */
static void mark(unsigned char *marks, const int64_t *shape, const fsdp_box *box)
{
    for (int64_t i = 0; i < fsdp_box_count(box); i++) {
        int64_t left = i, lo[FSDP_MAX_DIMS] = {0};
        for (int d = box->ndim - 1; d >= 0; d--) {
            lo[d] = box->lo[d] + left % box->len[d];
            left /= box->len[d];
        }
        marks[fsdp_box_position(box->ndim, shape, lo)]++;
    }
}

static void check_stored_once(const fsdp_sd *sd, fsdp_kind kind, fsdp_owner_policy policy,
                              int world)
{
    const fsdp_entry *entry = fsdp_sd_at(sd, 0);
    fsdp_box whole = fsdp_box_whole(entry->ndim, entry->shape);
    unsigned char marks[400] = {0};
    int owner;
    cr_assert_eq(fsdp_box_plan_owners(sd, policy, &owner, NULL), FSDP_OK);
    for (int rank = 0; rank < world; rank++) {
        fsdp_save_plan plan;
        fsdp_box_plan_input input = {sd, kind, false, &owner, rank};
        cr_assert_eq(fsdp_box_plan_save(&input, &plan, NULL), FSDP_OK);
        for (size_t i = 0; i < plan.box_count; i++) {
            fsdp_box box = fsdp_shard_box_box(&plan.boxes[i]);
            mark(marks, entry->shape, &box);
        }
        fsdp_save_plan_release(&plan);
    }
    for (int64_t i = 0; i < fsdp_box_count(&whole); i++)
        cr_assert_eq(marks[i], 1, "element %lld is stored %d times", (long long)i, marks[i]);
}

typedef struct found_boxes {
    const fsdp_entry *entry;
    const fsdp_box *wanted;
    unsigned char marks[400];
} found_boxes;

static fsdp_status note_box(void *user, int rank, size_t part, const fsdp_box *box, fsdp_error *err)
{
    found_boxes *found = user;
    fsdp_box real, shared;
    (void)err;
    fsdp_layout_box_at(&found->entry->layout, found->entry->ndim, found->entry->shape, rank, part,
                       &real);
    cr_assert(fsdp_box_equal(&real, box), "the plan and the layout disagree about rank %d", rank);
    cr_assert(fsdp_box_intersect(box, found->wanted, &shared));
    mark(found->marks, found->entry->shape, box);
    return FSDP_OK;
}

/* The stored boxes that are found hold each wanted element exactly once. */
static void check_found(const fsdp_sd *sd, fsdp_owner_policy policy)
{
    int owner;
    const fsdp_entry *entry = fsdp_sd_at(sd, 0);
    cr_assert_eq(fsdp_box_plan_owners(sd, policy, &owner, NULL), FSDP_OK);
    for (int64_t lo = 0; lo < entry->shape[0]; lo += 2)
        for (int64_t len = 1; lo + len <= entry->shape[0]; len += 3) {
            fsdp_box wanted = fsdp_box_whole(entry->ndim, entry->shape);
            wanted.lo[0] = lo;
            wanted.len[0] = len;
            found_boxes found = {.entry = entry, .wanted = &wanted};
            unsigned char expected[400] = {0};
            mark(expected, entry->shape, &wanted);
            cr_assert_eq(fsdp_box_plan_stored(entry, owner, &wanted, note_box, &found, NULL),
                         FSDP_OK);
            for (size_t i = 0; i < sizeof expected; i++)
                cr_assert(found.marks[i] >= expected[i] && found.marks[i] <= 1);
        }
}

static void each_layout(void (*check)(const fsdp_sd *sd, int world))
{
    static const fsdp_placement choices[] = {
        {FSDP_REPLICATE, 0, 0}, {FSDP_SHARD, 0, 0}, {FSDP_SHARD, 1, 0}, {FSDP_STRIDED_SHARD, 0, 3}};
    fsdp_mesh *mesh = new_mesh(2, (int64_t[]){4, 3});
    for (int64_t rows = 1; rows <= 17; rows++)
        for (int a = 0; a < 4; a++)
            for (int b = 0; b < 3; b++) {
                fsdp_placement placements[2] = {choices[a], choices[b]};
                if (a == 3 && (b != 1))
                    continue;
                fsdp_sd *sd = new_sd();
                add(sd, "w", 2, (int64_t[]){rows, 7}, mesh, placements);
                check(sd, 12);
                fsdp_sd_free(sd);
            }
    fsdp_mesh_free(mesh);
}

static void check_writers(const fsdp_sd *sd, int world)
{
    check_stored_once(sd, FSDP_SHARDED, FSDP_OWNERS_BALANCED, world);
    check_stored_once(sd, FSDP_SHARDED, FSDP_OWNERS_LOWEST, world);
    check_stored_once(sd, FSDP_FULL, FSDP_OWNERS_BALANCED, world);
}

Test(box_plan, every_element_is_stored_exactly_once)
{
    each_layout(check_writers);
}

static void check_readers(const fsdp_sd *sd, int world)
{
    (void)world;
    check_found(sd, FSDP_OWNERS_BALANCED);
    check_found(sd, FSDP_OWNERS_LOWEST);
}

Test(box_plan, readers_find_what_writers_decided)
{
    each_layout(check_readers);
}

Test(box_plan, replicas_are_written_once_by_ranks_with_about_equal_bytes)
{
    enum { TENSORS = 100, WORLD = 8 };
    fsdp_sd *sd = new_sd();
    fsdp_mesh *mesh = new_mesh(1, (int64_t[]){WORLD});
    fsdp_placement whole = {FSDP_REPLICATE, 0, 0};
    int64_t total = 0, least = INT64_MAX, most = 0;
    for (int i = 0; i < TENSORS; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        add(sd, name, 1, (int64_t[]){1 + i * i}, mesh, &whole);
        total += (1 + i * i) * 4;
    }
    int owners[TENSORS];
    cr_assert_eq(fsdp_box_plan_owners(sd, FSDP_OWNERS_BALANCED, owners, NULL), FSDP_OK);
    for (int rank = 0; rank < WORLD; rank++) {
        fsdp_save_plan plan;
        fsdp_box_plan_input input = {sd, FSDP_SHARDED, false, owners, rank};
        cr_assert_eq(fsdp_box_plan_save(&input, &plan, NULL), FSDP_OK);
        least = plan.bytes < least ? plan.bytes : least;
        most = plan.bytes > most ? plan.bytes : most;
        total -= plan.bytes;
        fsdp_save_plan_release(&plan);
    }
    cr_assert_eq(total, 0);
    cr_assert_lt(most - least, most / 20, "from %lld to %lld bytes", (long long)least,
                 (long long)most);
    cr_assert_eq(fsdp_box_plan_owners(sd, FSDP_OWNERS_LOWEST, owners, NULL), FSDP_OK);
    for (int i = 0; i < TENSORS; i++)
        cr_assert_eq(owners[i], 0);
    fsdp_mesh_free(mesh);
    fsdp_sd_free(sd);
}

/* Readers repeat the choice, so it is part of the format: largest first, of equals the first, each to
 * the least loaded copy, of equals the lowest. */
static void check_owners(const fsdp_sd *sd, int copies)
{
    enum { MOST = 64 };
    int owners[MOST], order[MOST] = {0}, count = (int)fsdp_sd_count(sd);
    int64_t load[MOST] = {0};
    cr_assert_eq(fsdp_box_plan_owners(sd, FSDP_OWNERS_BALANCED, owners, NULL), FSDP_OK);
    for (int i = 0; i < count; i++) {
        int at = i;
        int64_t bytes = fsdp_entry_bytes(fsdp_sd_at(sd, (size_t)i));
        for (; at > 0 && fsdp_entry_bytes(fsdp_sd_at(sd, (size_t)order[at - 1])) < bytes; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    for (int i = 0; i < count; i++) {
        int least = 0;
        for (int copy = 1; copy < copies; copy++)
            least = load[copy] < load[least] ? copy : least;
        cr_assert_eq(owners[order[i]], least);
        load[least] += fsdp_entry_bytes(fsdp_sd_at(sd, (size_t)order[i]));
    }
}

Test(box_plan, owners_are_chosen_as_the_format_says)
{
    fsdp_placement whole = {FSDP_REPLICATE, 0, 0};
    unsigned random = 1;
    for (int copies = 1; copies <= 40; copies++) {
        fsdp_sd *sd = new_sd();
        fsdp_mesh *mesh = new_mesh(1, (int64_t[]){copies});
        for (int i = 0; i < 64; i++) {
            char name[16];
            random = random * 1664525 + 1013904223;
            snprintf(name, sizeof name, "t%d", i);
            add(sd, name, 1, (int64_t[]){1 + (random >> 16) % (i % 2 ? 5 : 900)}, mesh, &whole);
        }
        check_owners(sd, copies);
        fsdp_mesh_free(mesh);
        fsdp_sd_free(sd);
    }
}

Test(box_plan, local_checkpoints_keep_every_copy)
{
    fsdp_sd *sd = new_sd();
    fsdp_mesh *mesh = new_mesh(1, (int64_t[]){3});
    fsdp_placement whole = {FSDP_REPLICATE, 0, 0};
    int owner = 0;
    add(sd, "w", 1, (int64_t[]){10}, mesh, &whole);
    for (int rank = 0; rank < 3; rank++) {
        fsdp_save_plan plan;
        fsdp_box_plan_input input = {sd, FSDP_LOCAL, false, &owner, rank};
        cr_assert_eq(fsdp_box_plan_save(&input, &plan, NULL), FSDP_OK);
        cr_assert_eq(plan.box_count, 1);
        fsdp_save_plan_release(&plan);
    }
    fsdp_mesh_free(mesh);
    fsdp_sd_free(sd);
}

Test(box_plan, slabs_are_runs_of_the_tensor_and_of_every_box)
{
    for (int64_t most = 1; most <= 70; most++) {
        const int64_t shape[] = {3, 4, 5};
        const fsdp_box box = {3, {1, 1, 2}, {2, 3, 2}};
        fsdp_slabs slabs = {0};
        fsdp_box slab, shared;
        int64_t next = 0, next_in_box = 0;
        while (fsdp_slabs_next(&slabs, 3, shape, most, &slab)) {
            cr_assert_leq(fsdp_box_count(&slab), most);
            cr_assert_eq(fsdp_box_position(3, shape, slab.lo), next);
            next += fsdp_box_count(&slab);
            cr_assert_eq(slabs.next, next);
            if (!fsdp_box_intersect(&slab, &box, &shared))
                continue;
            for (int d = 0; d < 3; d++)
                shared.lo[d] -= box.lo[d];
            cr_assert_eq(fsdp_box_position(3, box.len, shared.lo), next_in_box);
            next_in_box += fsdp_box_count(&shared);
        }
        cr_assert_eq(next, 60);
        cr_assert_eq(next_in_box, 12);
    }
}
