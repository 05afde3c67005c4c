/* Worlds: groups of meshes, equal declarations on all ranks, means, failed allocations. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/core/mem.h"
#include "statedict/ctl/ctl_backend.h"
#include "tests/support/ranks/worlds.h"

static void expect_worlds(int n, world_body body, void *user)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(n, "cpu", body, user, &err), FSDP_OK, "%s", err.text);
}

static fsdp_status expect_text(bool holds, const char *what, fsdp_error *err)
{
    return holds ? FSDP_OK : fsdp_fail(err, FSDP_ERR_INTERNAL, "%s", what);
}

static fsdp_status expect_group(fsdp_world *world, const fsdp_mesh *mesh, int dim, int last,
                                int first, int step, int size, fsdp_error *err)
{
    fsdp_comm *comm = fsdp_world_comm(world, mesh, dim, last);
    FSDP_TRY(expect_text(comm && fsdp_comm_size(comm) == size, "the group's size", err));
    for (int i = 0; i < size; i++)
        FSDP_TRY(expect_text(fsdp_comm_ranks(comm)[i] == first + i * step, "the ranks", err));
    return FSDP_OK;
}

static fsdp_status use_mesh(world_rank *rank, fsdp_error *err)
{
    fsdp_mesh *mesh = NULL, *flat = NULL;
    fsdp_world *world = rank->world;
    int me = fsdp_world_rank(world);
    FSDP_TRY(fsdp_world_mesh(world, 3, (int64_t[]){2, 2, 3}, (const char *[]){"a", "b", "c"}, &mesh,
                             err));
    fsdp_status status = expect_group(world, mesh, 0, 0, me % 6, 6, 2, err);
    if (status == FSDP_OK)
        status = expect_group(world, mesh, 1, 1, me / 6 * 6 + me % 3, 3, 2, err);
    if (status == FSDP_OK)
        status = expect_group(world, mesh, 2, 2, me / 3 * 3, 1, 3, err);
    if (status == FSDP_OK)
        status = expect_group(world, mesh, 0, 1, me % 3, 3, 4, err);
    if (status == FSDP_OK)
        status = expect_group(world, mesh, 1, 2, me / 6 * 6, 1, 6, err);
    if (status == FSDP_OK)
        status = expect_group(world, mesh, 0, 2, 0, 1, 12, err);
    size_t comms = world->comm_count;
    if (status == FSDP_OK)
        status = fsdp_world_mesh(world, 1, (int64_t[]){12}, (const char *[]){"all"}, &flat, err);
    if (status == FSDP_OK)
        status = expect_text(
            world->comm_count == comms &&
                fsdp_world_comm(world, flat, 0, 0) == fsdp_world_comm(world, mesh, 0, 2) &&
                !fsdp_world_comm(world, mesh, 0, 3) && !fsdp_world_comm(world, mesh, -1, 0),
            "equal sets share a group", err);
    fsdp_mesh_free(flat);
    fsdp_mesh_free(mesh);
    return status;
}

Test(world, groups_of_a_mesh_are_its_rows_and_equal_sets_share_one)
{
    expect_worlds(12, use_mesh, NULL);
}

static fsdp_status use_subset(world_rank *rank, fsdp_error *err)
{
    static const int ranks[] = {2, 0};
    fsdp_mesh *mesh = NULL;
    FSDP_TRY(fsdp_mesh_create(1, (int64_t[]){2}, (const char *[]){"x"}, ranks, &mesh, err));
    fsdp_status status = fsdp_world_connect(rank->world, mesh, err);
    fsdp_comm *comm = fsdp_world_comm(rank->world, mesh, 0, 0);
    int me = fsdp_world_rank(rank->world);
    if (status == FSDP_OK && me == 1)
        status = expect_text(!comm, "no group", err);
    if (status == FSDP_OK && me != 1)
        status = expect_text(comm && fsdp_comm_rank(comm) == (me == 2 ? 0 : 1), "its place", err);
    fsdp_mesh_free(mesh);
    return status;
}

Test(world, a_mesh_may_hold_some_ranks_in_any_order)
{
    expect_worlds(3, use_subset, NULL);
}

static fsdp_status make_other_meshes(world_rank *rank, fsdp_error *err)
{
    fsdp_mesh *mesh = NULL;
    bool is_other = fsdp_world_rank(rank->world) == 2;
    fsdp_error why = {0};
    fsdp_status status =
        fsdp_world_mesh(rank->world, 2, is_other ? (int64_t[]){4, 1} : (int64_t[]){2, 2},
                        (const char *[]){"a", "b"}, &mesh, &why);
    if (status == FSDP_OK ||
        !strstr(why.text, "rank 2 connects a mesh of 4x1, but rank 0 one of 2x2"))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "status %d: %.200s", (int)status, why.text);
    status = fsdp_world_mesh(rank->world, 1, (int64_t[]){4}, (const char *[]){is_other ? "b" : "a"},
                             &mesh, &why);
    if (status == FSDP_OK || !strstr(why.text, "rank 0 one of 4 with other names"))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "status %d: %.200s", (int)status, why.text);
    /* the world stays usable */
    FSDP_TRY(fsdp_world_mesh(rank->world, 1, (int64_t[]){4}, (const char *[]){"a"}, &mesh, err));
    fsdp_mesh_free(mesh);
    status = fsdp_world_mesh(rank->world, 1, (int64_t[]){3}, (const char *[]){"a"}, &mesh, &why);
    return expect_text(status == FSDP_ERR_USAGE && strstr(why.text, "the world has 4"), why.text,
                       err);
}

Test(world, ranks_that_make_different_meshes_are_told_so)
{
    expect_worlds(4, make_other_meshes, NULL);
}

static fsdp_status take_mean(world_rank *rank, fsdp_error *err)
{
    double value = fsdp_world_rank(rank->world) == 0 ? 1e16 : 1;
    FSDP_TRY(fsdp_world_mean(rank->world, &value, err));
    return expect_text(value == (1e16 + 1 + 1) / 3, "in rank order", err);
}

Test(world, a_mean_is_summed_in_rank_order)
{
    expect_worlds(3, take_mean, NULL);
}

static fsdp_status combine_values(world_rank *rank, fsdp_error *err)
{
    fsdp_world *world = rank->world;
    const int me = fsdp_world_rank(world);
    double sums[2] = {me == 0 ? 1e16 : 1, me}, largest[3] = {-me, me, me == 1 ? NAN : 9};
    FSDP_TRY(fsdp_world_sum(world, sums, 2, err));
    FSDP_TRY(fsdp_world_max(world, largest, 3, err));
    FSDP_TRY(fsdp_world_sum(world, NULL, 0, err));
    FSDP_TRY(expect_text(sums[0] == 1e16 + 1 + 1 && sums[1] == 3, "sums in rank order", err));
    FSDP_TRY(expect_text(largest[0] == 0 && largest[1] == 2 && isnan(largest[2]), "maxima", err));
    fsdp_error why = {0};
    FSDP_TRY(expect_text(fsdp_world_sum(world, NULL, 1, &why) == FSDP_ERR_USAGE, "no values", err));
    const char *which = strstr(why.text, "fsdp_world_sum: 'values' is NULL");
    FSDP_TRY(expect_text(which != NULL, why.text, err));
    FSDP_TRY(expect_text(fsdp_world_max(NULL, sums, 1, &why) == FSDP_ERR_USAGE, "no world", err));
    fsdp_status status = fsdp_world_sum(world, sums, me == 1 ? 2 : 1, &why);
    const char *words = "rank 1 is in fsdp_world_sum (allgather of 16 bytes, call ";
    return expect_text(status == FSDP_ERR_USAGE && strstr(why.text, words), why.text, err);
}

Test(world, sums_and_maxima_of_arrays_are_equal_on_all_ranks)
{
    expect_worlds(3, combine_values, NULL);
}

static fsdp_status set_times(world_rank *rank, fsdp_error *err)
{
    fsdp_world *world = rank->world;
    fsdp_error why = {0};
    FSDP_TRY(fsdp_world_set_deadline(world, 12345, err));
    FSDP_TRY(expect_text(world->parts.transport->deadline_ms == 12345 &&
                             world->parts.ctl->deadline_ms == 12345,
                         "collectives and the control plane have the deadline", err));
    FSDP_TRY(expect_text(fsdp_world_set_deadline(world, 0, &why) == FSDP_ERR_USAGE, "0 ms", err));
    FSDP_TRY(expect_text(fsdp_world_set_deadline(NULL, 1, &why) == FSDP_ERR_USAGE, "NULL", err));
    fsdp_world_begin_busy(NULL, 1000);
    fsdp_world_end_busy(NULL);
    fsdp_world_begin_busy(world, -1);
    fsdp_world_end_busy(world);
    return expect_text(fsdp_world_fail(world, NULL) == 0 && fsdp_world_fail(NULL, &why) == 2,
                       "the exit code of an error", err);
}

Test(world, times_are_checked)
{
    expect_worlds(2, set_times, NULL);
    expect_worlds(1, set_times, NULL);
}

typedef struct memory_case {
    atomic_bool is_armed;
    int64_t n;
    atomic_int done;
    bool has_failed;
} memory_case;

static fsdp_status lose_memory(world_rank *rank, fsdp_error *err)
{
    memory_case *now = rank->user;
    fsdp_mesh *mesh = NULL;
    double value = 1;
    FSDP_TRY(fsdp_ctl_barrier(fsdp_world_ctl(rank->world), err));
    if (!atomic_exchange(&now->is_armed, true))
        (void)fsdp_mem_fail_after(now->n, false);
    fsdp_status status =
        fsdp_world_mesh(rank->world, 1, (int64_t[]){2}, (const char *[]){"a"}, &mesh, err);
    if (status == FSDP_OK)
        status = fsdp_world_mean(rank->world, &value, err);
    if (atomic_fetch_add(&now->done, 1) == 1)
        now->has_failed = fsdp_mem_fail_after(-1, false) > now->n;
    fsdp_mesh_free(mesh);
    return status;
}

/* One rank lacks memory; no other waits for it until the deadline. */
Test(world, lost_memory_at_any_point_is_every_ranks_error)
{
    bool has_failed = true;
    for (int64_t n = 0; has_failed; n++) {
        memory_case now = {.n = n};
        fsdp_error err = {0};
        fsdp_status status = run_worlds(2, "cpu", lose_memory, &now, &err);
        has_failed = now.has_failed;
        cr_assert_eq(status == FSDP_OK, !has_failed, "allocation %d: %s", (int)n, err.text);
        cr_assert(status == FSDP_OK || !strstr(err.text, "did not answer"), "%s", err.text);
    }
}
