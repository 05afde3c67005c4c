/* Collectives that are started and waited for later: order, errors, leftovers. */
#include <criterion/criterion.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/core/mem.h"
#include "tests/support/ranks/rank_threads.h"

enum { LONG_MS = 60000, CALLS = 5 };

static fsdp_collective sum_of(float *x)
{
    return (fsdp_collective){
        .kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .in = x, .out = x, .count = 1, .unit = "u"};
}

static void expect_well(int n, rank_thread_body body)
{
    fsdp_error err = {0};
    fsdp_status status = run_rank_threads_well(n, body, NULL, &err);
    cr_assert_eq(status, FSDP_OK, "%d ranks: %s", n, err.text);
}

/* --- order ------------------------------------------------------------------------------------ */

/* With blocking calls these two ranks would wait for each other. */
static fsdp_status start_in_two_groups(rank_thread *rank, fsdp_error *err)
{
    const int reversed[] = {1, 0};
    fsdp_comm *other = NULL, *comms[2];
    float x[2] = {1, 2};
    fsdp_comm_handle *handle = NULL;
    FSDP_TRY(rank->transport->ops->comm_create(rank->transport, reversed, 2, 1, &other, err));
    comms[0] = rank->rank == 0 ? rank->comm : other;
    comms[1] = rank->rank == 0 ? other : rank->comm;
    const fsdp_collective first = sum_of(&x[0]), second = sum_of(&x[1]);
    fsdp_status status = fsdp_comm_start(comms[0], &first, &handle, err);
    if (status == FSDP_OK)
        status = fsdp_comm_run(comms[1], &second, err);
    if (status == FSDP_OK)
        status = fsdp_comm_wait(&handle, err);
    fsdp_comm_free(other);
    if (status == FSDP_OK && (x[0] != 3 || x[1] != 3 || handle))
        status =
            fsdp_fail(err, FSDP_ERR_INTERNAL, "sums are %g and %g", (double)x[0], (double)x[1]);
    return status;
}

Test(comm_async, a_call_that_is_started_does_not_hold_its_caller, .timeout = 60)
{
    expect_well(2, start_in_two_groups);
}

/* Rank r starts the calls whose bit is set in r, and runs the others at once. */
static fsdp_status mix_both(rank_thread *rank, fsdp_error *err)
{
    float x[CALLS];
    fsdp_comm_handle *handles[CALLS] = {NULL};
    for (int i = 0; i < CALLS; i++) {
        x[i] = (float)(i + 1);
        const fsdp_collective call = sum_of(&x[i]);
        if (rank->rank >> (i % 3) & 1)
            FSDP_TRY(fsdp_comm_start(rank->comm, &call, &handles[i], err));
        else
            FSDP_TRY(fsdp_comm_run(rank->comm, &call, err));
    }
    for (int i = CALLS - 1; i >= 0; i--) {
        FSDP_TRY(fsdp_comm_wait(&handles[i], err));
        if (x[i] != (float)((i + 1) * rank->size))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "sum %d is %g", i, (double)x[i]);
    }
    return FSDP_OK;
}

Test(comm_async, ranks_mix_calls_that_are_started_and_made, .timeout = 60)
{
    for (int n = 1; n <= 8; n++)
        expect_well(n, mix_both);
}

/* Rank 0 makes its call after rank 1 has seen its own call running. */
static fsdp_status look_at_handle(rank_thread *rank, fsdp_error *err)
{
    const int reversed[] = {1, 0};
    fsdp_comm *other = NULL;
    float x = 1, y = 1;
    const fsdp_collective looked = sum_of(&x), told = sum_of(&y);
    fsdp_comm_handle *handle = NULL;
    FSDP_TRY(rank->transport->ops->comm_create(rank->transport, reversed, 2, 1, &other, err));
    fsdp_status status = FSDP_OK;
    if (rank->rank == 1)
        status = fsdp_comm_start(rank->comm, &looked, &handle, err);
    bool was_done = fsdp_comm_is_done(handle);
    if (status == FSDP_OK)
        status = fsdp_comm_run(other, &told, err);
    if (status == FSDP_OK && rank->rank == 0)
        status = fsdp_comm_run(rank->comm, &looked, err);
    while (!fsdp_comm_is_done(handle))
        usleep(1000);
    if (status == FSDP_OK)
        status = fsdp_comm_wait(&handle, err);
    fsdp_comm_free(other);
    if (status == FSDP_OK && was_done != (rank->rank == 0))
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "a handle is done too early");
    return status;
}

Test(comm_async, a_handle_says_when_its_call_has_ended, .timeout = 60)
{
    expect_well(2, look_at_handle);
}

/* --- failures --------------------------------------------------------------------------------- */

/* Rank 1 makes no call: it aborts while the others are in the first of theirs. */
static fsdp_status abort_what_was_started(rank_thread *rank, fsdp_error *err)
{
    const fsdp_error why = {.status = FSDP_ERR_NO_SPACE, .text = "the disk is full"};
    float x[CALLS] = {0};
    fsdp_comm_handle *handles[CALLS] = {NULL};
    for (int i = 0; i < CALLS && rank->rank != 1; i++) {
        const fsdp_collective call = sum_of(&x[i]);
        FSDP_TRY(fsdp_comm_start(rank->comm, &call, &handles[i], err));
    }
    if (rank->rank == 1) {
        usleep(20000);
        fsdp_comm_abort(rank->comm, &why);
    }
    for (int i = 0; i < CALLS; i++) {
        fsdp_status status = fsdp_comm_wait(&handles[i], err);
        if (status != (rank->rank == 1 ? FSDP_OK : FSDP_ERR_NO_SPACE) || handles[i])
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "call %d ends with %d", i, (int)status);
        FSDP_TRY(fsdp_comm_wait(&handles[i], err)); /* again */
    }
    const fsdp_collective late = sum_of(&x[0]);
    FSDP_TRY(fsdp_comm_start(rank->comm, &late, &handles[0], err));
    return fsdp_comm_wait(&handles[0], err);
}

Test(comm_async, an_abort_ends_what_is_under_way_and_all_behind_it, .timeout = 60)
{
    rank_thread ranks[3];
    fsdp_error err = {0};
    cr_assert(run_rank_threads(3, LONG_MS, abort_what_was_started, NULL, ranks, &err));
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(ranks[i].status, FSDP_ERR_NO_SPACE, "%s", ranks[i].err.text);
        cr_assert(strstr(ranks[i].err.text, "the disk is full"), "%s", ranks[i].err.text);
        cr_assert_eq(ranks[i].err.rank, 1);
    }
}

/* Rank 0 starts two calls and leaves before the others make the first one. *user: it has left. */
static fsdp_status leave_without_waiting(rank_thread *rank, fsdp_error *err)
{
    atomic_bool *is_gone = rank->user;
    float x[2] = {0};
    fsdp_comm_handle *handle;
    const fsdp_collective calls[] = {sum_of(&x[0]), sum_of(&x[1])};
    for (int i = 0; i < 2 && rank->rank == 0; i++)
        FSDP_TRY(fsdp_comm_start(rank->comm, &calls[i], &handle, err));
    if (rank->rank == 0) {
        fsdp_comm_free(rank->comm); /* before the buffers of the calls end */
        rank->comm = NULL;
        atomic_store(is_gone, true);
        return FSDP_OK;
    }
    while (!atomic_load(is_gone))
        usleep(1000);
    return fsdp_comm_run(rank->comm, &calls[0], err);
}

Test(comm_async, a_rank_that_does_not_wait_is_named, .timeout = 60)
{
    rank_thread ranks[3];
    fsdp_error err = {0};
    atomic_bool is_gone = false;
    cr_assert(run_rank_threads(3, LONG_MS, leave_without_waiting, &is_gone, ranks, &err));
    cr_assert_eq(ranks[0].status, FSDP_OK);
    for (int i = 1; i < 3; i++) {
        cr_assert_eq(ranks[i].status, FSDP_ERR_PEER, "%s", ranks[i].err.text);
        cr_assert_str_eq(
            ranks[i].err.text,
            "rank 0: left with exit code 0, without waiting for a call it had started");
    }
}

static fsdp_status differ(rank_thread *rank, fsdp_error *err)
{
    float x[2] = {0};
    fsdp_collective call = sum_of(x);
    fsdp_comm_handle *handle;
    call.count = rank->rank == 1 ? 2 : 1;
    FSDP_TRY(fsdp_comm_start(rank->comm, &call, &handle, err));
    return fsdp_comm_wait(&handle, err);
}

Test(comm_async, different_calls_are_told_by_wait, .timeout = 60)
{
    rank_thread ranks[2];
    fsdp_error err = {0};
    cr_assert(run_rank_threads(2, LONG_MS, differ, NULL, ranks, &err));
    for (int i = 0; i < 2; i++)
        cr_assert_str_eq(ranks[i].err.text, "rank 1 makes all_reduce of 2 f32 for u (call 1), rank "
                                            "0 all_reduce of 1 f32 for u (call 1)");
}

/* *user: the number of rank 0's allocation that fails. */
static fsdp_status start_without_memory(rank_thread *rank, fsdp_error *err)
{
    float x = 0;
    const fsdp_collective call = sum_of(&x);
    fsdp_comm_handle *handle = NULL;
    if (rank->rank != 0)
        return fsdp_comm_run(rank->comm, &call, err);
    (void)fsdp_mem_fail_after(*(const int *)rank->user, false);
    fsdp_status status = fsdp_comm_start(rank->comm, &call, &handle, err);
    (void)fsdp_mem_fail_after(-1, false);
    cr_assert_eq(status == FSDP_OK, handle != NULL);
    return status == FSDP_OK ? fsdp_comm_wait(&handle, err) : status;
}

Test(comm_async, without_memory_all_ranks_are_told, .timeout = 60)
{
    int failures = 0;
    for (int n = 0; n < 6; n++) {
        rank_thread ranks[2];
        fsdp_error err = {0};
        cr_assert(run_rank_threads(2, LONG_MS, start_without_memory, &n, ranks, &err));
        cr_assert_eq(ranks[0].status, ranks[1].status, "%s", ranks[1].err.text);
        failures += ranks[0].status == FSDP_ERR_LIMIT;
    }
    cr_assert_eq(failures, 4); /* queue, device, stream, handle */
}
