/*
 * Failures over the fake NCCL: every rank ends, each with an error that names the rank at fault, and nothing
 * is left. Deadlines of a minute mean that the end does not come from the deadline.
 *
 * usage: nccl_failures [hosts|old] [CASE], where with `hosts` beats go through one rank per host, and with
 * `old` cases that depend on the version run over an NCCL that aborts one communicator at a time
 */
#include "tests/nccl/nccl_ranks.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/core/clock.h"
#include "runtime/comm_nccl/comm_nccl.h"

enum {
    RANKS = 3,
    LONG_MS = 60000,
    SHORT_MS = 1000,
    PATIENT_MS = 8000,
    SYSTEM_ERROR = 2,
    CALLS = 3,
    OLD_VERSION = 22105
};

static fake_nccl_control *fake;
static bool has_hosts;
static int version; /* the library is opened once */

static void plan(fake_nccl_plan wanted)
{
    fake->plan = wanted;
    if (wanted.version == 0)
        fake->plan.version = version;
}

/* Each rank's status, and a text that its error has. */
static void expect_end(const nccl_world *world, fsdp_status status, int at_fault,
                       const char *const *texts)
{
    nccl_rank ranks[NCCL_MOST_RANKS];
    char wrong[200];
    int64_t begin_ms = fsdp_now_ms();
    nccl_world placed = *world;
    placed.has_hosts = has_hosts;
    run_nccl_world(&placed, ranks);
    for (int i = 0; i < world->size; i++) {
        const fsdp_error *err = &ranks[i].err;
        snprintf(wrong, sizeof wrong, "rank %d ends with %d, by rank %d, with '%s'", i, (int)status,
                 at_fault, texts[i]);
        bool is_at_fault = at_fault < 0 || err->rank == at_fault;
        if (ranks[i].status != status || !is_at_fault || !strstr(err->text, texts[i])) {
            fprintf(stderr, "status %d, rank %d\n", (int)ranks[i].status, err->rank);
            expect(false, wrong, err->text);
        }
    }
    expect(fsdp_now_ms() - begin_ms < LONG_MS / 2, "it ends before a long deadline", "later");
}

static void expect_all(const nccl_world *world, fsdp_status status, int at_fault, const char *text)
{
    const char *texts[NCCL_MOST_RANKS];
    for (int i = 0; i < NCCL_MOST_RANKS; i++)
        texts[i] = text;
    expect_end(world, status, at_fault, texts);
}

/* Calls until one fails, or the group has: a host that runs ahead. */
static fsdp_status call_and_wait(nccl_rank *rank, fsdp_error *err)
{
    for (int i = 0; i < CALLS; i++)
        FSDP_TRY(give_call(rank, err));
    return await_failure(rank, err);
}

/* --- NCCL fails ---------------------------------------------------------------------------------- */

static void fails_at_a_call(void)
{
    const char *const texts[] = {
        "rank 1: all_reduce of 8 f32 for layers.1 (call 2): NCCL 2.28.9: unhandled system error: a "
        "cable",
        "all_reduce of 8 f32 for layers.1 (call 2): NCCL 2.28.9: unhandled system error: a cable",
        "rank 1: all_reduce of 8 f32 for layers.1 (call 2): NCCL 2.28.9: unhandled system error: a "
        "cable"};
    for (int polls = 0; polls < 3; polls += 2) {
        plan((fake_nccl_plan){.rank = 1,
                              .polls = polls,
                              .fail_at = 2,
                              .fail_code = SYSTEM_ERROR,
                              .last_error = "a cable"});
        expect_end(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = call_and_wait},
                   FSDP_ERR_PEER, 1, texts);
    }
}

/* A collective with uneven parts is a group of calls, of which one fails. */
static fsdp_status call_in_parts(nccl_rank *rank, fsdp_error *err)
{
    static float in[RANKS][16], out[RANKS][16];
    static const int64_t uneven[] = {2, 3, 5}, even[] = {4, 4, 4};
    const fsdp_collective_kind *kind = rank->context;
    const bool is_even = *kind == FSDP_ALL_TO_ALL;
    const fsdp_collective call = {.kind = *kind,
                                  .dtype = FSDP_F32,
                                  .in = in[rank->rank],
                                  .out = out[rank->rank],
                                  .counts = is_even ? even : uneven,
                                  .out_counts = is_even ? even : NULL,
                                  .unit = "layers.1",
                                  .stream = rank->stream};
    FSDP_TRY(fsdp_comm_run(rank->comm, &call, err));
    return await_failure(rank, err);
}

static void fails_in_a_part(void)
{
    const fsdp_collective_kind kinds[] = {FSDP_ALL_GATHER, FSDP_REDUCE_SCATTER, FSDP_ALL_TO_ALL};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        for (int part = 0; part < RANKS; part++) {
            fsdp_collective_kind kind = kinds[i];
            plan((fake_nccl_plan){.rank = 1,
                                  .polls = part,
                                  .fail_at = 1,
                                  .fail_part = part,
                                  .fail_code = SYSTEM_ERROR,
                                  .last_error = "a cable"});
            expect_all(&(nccl_world){.size = RANKS,
                                     .deadline_ms = PATIENT_MS,
                                     .body = call_in_parts,
                                     .context = &kind},
                       FSDP_ERR_PEER, 1, "unhandled system error: a cable");
        }
}

static void fails_later(void)
{
    plan((fake_nccl_plan){.rank = 2, .async_at = 1, .async_code = SYSTEM_ERROR});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = call_and_wait},
               FSDP_ERR_PEER, 2, "NCCL 2.28.9: unhandled system error");
}

static void notices_a_lost_rank(void)
{
    plan((fake_nccl_plan){.rank = 0, .async_at = 1, .async_code = FSDP_NCCL_REMOTE_ERROR});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = call_and_wait},
               FSDP_ERR_PEER, 0, "remote process exited");
}

/* The call of a rank whose connection broke does not succeed meanwhile. */
static fsdp_status notices_in_its_call(nccl_rank *rank, fsdp_error *err)
{
    fsdp_status status = give_call(rank, err);
    if (rank->rank == 0)
        return status;
    return await_failure(rank, err);
}

static void notices_a_lost_rank_at_once(void)
{
    plan((fake_nccl_plan){.rank = 0, .fail_at = 1, .fail_code = FSDP_NCCL_REMOTE_ERROR});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = notices_in_its_call},
               FSDP_ERR_PEER, 0, "remote process exited");
}

/* Rank 1 dies a moment after NCCL of the other ranks has noticed that a rank is gone, without its number. */
static fsdp_status die_slowly(nccl_rank *rank, fsdp_error *err)
{
    const fsdp_error why = {.status = FSDP_ERR_PEER, .rank = 1, .text = "rank 1 died"};
    const struct timespec moment = {.tv_nsec = 300000000};
    FSDP_TRY(give_call(rank, err));
    if (rank->rank == 1) {
        nanosleep(&moment, NULL);
        end_beats(rank, &why);
    }
    return call_and_wait(rank, err);
}

static void names_a_lost_rank(void)
{
    for (int noticed_by = 0; noticed_by < RANKS; noticed_by += 2) {
        plan((fake_nccl_plan){
            .rank = noticed_by, .async_at = 1, .async_code = FSDP_NCCL_REMOTE_ERROR});
        expect_all(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = die_slowly},
                   FSDP_ERR_PEER, 1, "rank 1 died");
    }
}

/* --- ranks fail ---------------------------------------------------------------------------------- */

static fsdp_status stay_away(nccl_rank *rank, fsdp_error *err)
{
    FSDP_TRY(give_call(rank, err));
    if (rank->rank != 1)
        FSDP_TRY(give_call(rank, err));
    return await_failure(rank, err);
}

static void never_comes(void)
{
    plan((fake_nccl_plan){.rank = -1, .polls = 1});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = SHORT_MS, .body = stay_away},
               FSDP_ERR_PEER, 1,
               "rank 1 did not come within 1 s to all_reduce of 8 f32 for layers.1 (call 2)");
}

/* Rank 0 waits for rank 1, which waits in another group for rank 2: that one is at fault. */
static fsdp_status wait_in_a_chain(nccl_rank *rank, fsdp_error *err)
{
    fsdp_comm *pair = NULL, *all = rank->comm;
    FSDP_TRY(rank->transport->ops->comm_create(rank->transport, (int[]){1, 2}, 2, 1, &pair, err));
    nccl_rank in_pair = *rank;
    in_pair.comm = pair;
    fsdp_status status = FSDP_OK;
    if (rank->rank == 0)
        status = give_call(rank, err);
    if (rank->rank == 1)
        status = give_call(&in_pair, err);
    in_pair.comm = pair ? pair : all;
    if (status == FSDP_OK)
        status = await_failure(&in_pair, err);
    fsdp_comm_abort(all, err); /* as the runtime does with all groups of a root */
    fsdp_comm_free(pair);
    return status;
}

static void finds_the_end_of_a_chain(void)
{
    plan((fake_nccl_plan){.rank = -1});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = SHORT_MS, .body = wait_in_a_chain},
               FSDP_ERR_PEER, -1,
               "rank 2 did not come within 1 s to all_reduce of 8 f32 for layers.1");
}

static fsdp_status call_differently(nccl_rank *rank, fsdp_error *err)
{
    static float data[RANKS][64];
    const fsdp_collective call = {.kind = rank->rank == 2 ? FSDP_ALL_GATHER : FSDP_ALL_REDUCE,
                                  .dtype = FSDP_F32,
                                  .in = data[rank->rank],
                                  .out = data[rank->rank] + 8,
                                  .count = 8,
                                  .unit = "layers.1",
                                  .stream = rank->stream};
    FSDP_TRY(fsdp_comm_run(rank->comm, &call, err));
    return await_failure(rank, err);
}

static void makes_another_call(void)
{
    const char *text =
        "rank 2 makes all_gather of 8 f32 for layers.1 (call 1), rank 0 all_reduce of 8 f32 for "
        "layers.1 (call 1)";
    plan((fake_nccl_plan){.rank = -1});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = SHORT_MS, .body = call_differently},
               FSDP_ERR_USAGE, 2, text);
    expect_all(
        &(nccl_world){
            .size = RANKS, .deadline_ms = LONG_MS, .check = true, .body = call_differently},
        FSDP_ERR_USAGE, 2, text);
}

static fsdp_status give_up(nccl_rank *rank, fsdp_error *err)
{
    if (rank->rank != 2)
        return call_and_wait(rank, err);
    const fsdp_error why = {.status = FSDP_ERR_NO_SPACE, .text = "the disk is full"};
    FSDP_TRY(give_call(rank, err));
    fsdp_comm_abort(rank->comm, &why);
    return await_failure(rank, err);
}

static void aborts(void)
{
    plan((fake_nccl_plan){.rank = -1});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = give_up},
               FSDP_ERR_NO_SPACE, 2, "the disk is full");
}

/* The host waits for the stream, in which NCCL's work waits for a rank that gives up. */
static fsdp_status wait_for_the_stream(nccl_rank *rank, fsdp_error *err)
{
    const fsdp_error why = {.status = FSDP_ERR_NO_SPACE, .text = "the disk is full"};
    const fsdp_device_ops *ops = rank->device->ops;
    const struct timespec moment = {.tv_nsec = 300000000};
    if (rank->rank == 2) {
        nanosleep(&moment, NULL); /* the others have given their work by now */
        fsdp_comm_abort(rank->comm, &why);
        return await_failure(rank, err);
    }
    FSDP_TRY(give_call(rank, err));
    (void)!ops->sync(ops->record(rank->stream), NULL);
    return await_failure(rank, err);
}

static void ends_work_that_waits(void)
{
    plan((fake_nccl_plan){.rank = -1});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = wait_for_the_stream},
               FSDP_ERR_NO_SPACE, 2, "the disk is full");
}

static fsdp_status leave_with_code(nccl_rank *rank, fsdp_error *err)
{
    if (rank->rank != 0)
        return call_and_wait(rank, err);
    rank->transport->exit_code = FSDP_ERR_NOT_FOUND;
    rank->transport->exit_reason = "no corpus";
    return fsdp_fail(err, FSDP_ERR_PEER, "rank 0 has left with exit code 3 (not found): no corpus");
}

static void leaves_with_a_failure(void)
{
    plan((fake_nccl_plan){.rank = -1});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = leave_with_code},
               FSDP_ERR_PEER, 0, "rank 0 has left with exit code 3 (not found): no corpus");
}

/* That is not a failure until another rank needs it. */
static fsdp_status leave_early(nccl_rank *rank, fsdp_error *err)
{
    FSDP_TRY(give_call(rank, err));
    if (rank->rank == 1)
        return fsdp_fail(err, FSDP_ERR_PEER, "rank 1 has left the group: it takes no part in");
    FSDP_TRY(give_call(rank, err));
    return await_failure(rank, err);
}

static void leaves_early(void)
{
    plan((fake_nccl_plan){.rank = -1});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = SHORT_MS, .body = leave_early},
               FSDP_ERR_PEER, -1, "rank 1 has left the group: it takes no part in");
}

/* A rank that dies fails the exchange of beats. */
static fsdp_status lose_watch(nccl_rank *rank, fsdp_error *err)
{
    const fsdp_error why = {.status = FSDP_ERR_PEER, .rank = 1, .text = "rank 1 died"};
    FSDP_TRY(give_call(rank, err));
    if (rank->rank == 1)
        end_beats(rank, &why);
    else
        FSDP_TRY(give_call(rank, err));
    return await_failure(rank, err);
}

static void dies(void)
{
    const char *const texts[] = {
        "in all_reduce of 8 f32 for layers.1 (call 2): rank 1: rank 1 died", "rank 1 died",
        "in all_reduce of 8 f32 for layers.1 (call 2): rank 1: rank 1 died"};
    plan((fake_nccl_plan){.rank = -1});
    expect_end(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = lose_watch},
               FSDP_ERR_PEER, 1, texts);
}

static fsdp_status call_twice(nccl_rank *rank, fsdp_error *err)
{
    FSDP_TRY(give_call(rank, err));
    FSDP_TRY(give_call(rank, err));
    return await_failure(rank, err);
}

/* The first rank whose deadline is over says so. */
static void hangs_in_a_call(void)
{
    plan((fake_nccl_plan){.rank = 1, .async_at = 2, .async_code = FSDP_NCCL_SUCCESS});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = SHORT_MS, .body = call_twice},
               FSDP_ERR_PEER, -1,
               "got no result from NCCL within 1 s, though all ranks came to all_reduce "
               "of 8 f32 for "
               "layers.1 (call 2)");
}

/* A call that NCCL does not return from ends with its communicator, and with the group's failure. */
static void blocks_in_a_call(void)
{
    plan((fake_nccl_plan){.rank = 1, .hang_at = 2});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = SHORT_MS, .body = call_twice},
               FSDP_ERR_PEER, -1,
               "got no result from NCCL within 1 s, though all ranks came to all_reduce "
               "of 8 f32 for "
               "layers.1 (call 2)");
}

static void *free_memory(void *context)
{
    nccl_rank *rank = context;
    const struct timespec moment = {.tv_nsec = 200000000};
    nanosleep(&moment, NULL); /* rank 1 is in its call by now */
    fsdp_comm_dealloc(rank->comm, rank->context);
    return NULL;
}

/* Another thread gives memory back, for which NCCL waits until the call has ended. */
static fsdp_status call_and_free(nccl_rank *rank, fsdp_error *err)
{
    pthread_t thread;
    rank->context = fsdp_comm_alloc(rank->comm, 64);
    expect(rank->context != NULL, "memory of NCCL", "none");
    expect(pthread_create(&thread, NULL, free_memory, rank) == 0, "a thread", "none");
    fsdp_status status = call_twice(rank, err);
    pthread_join(thread, NULL);
    return status;
}

static void frees_memory_in_a_call(void)
{
    plan((fake_nccl_plan){.rank = 1, .hang_at = 2});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = SHORT_MS, .body = call_and_free},
               FSDP_ERR_PEER, -1, "got no result from NCCL within 1 s, though all ranks came");
}

/* Rank 2 comes to nothing: rank 0 waits for it, and after that work of its stream for rank 1 in another
 * group, which has no deadline of its own yet. */
static fsdp_status wait_in_two_groups(nccl_rank *rank, fsdp_error *err)
{
    fsdp_comm *pair = NULL;
    FSDP_TRY(rank->transport->ops->comm_create(rank->transport, (int[]){0, 1}, 2, 1, &pair, err));
    nccl_rank in_pair = *rank;
    in_pair.comm = pair;
    fsdp_status status = FSDP_OK;
    if (rank->rank != 2)
        status = give_call(rank, err);
    if (rank->rank == 0 && status == FSDP_OK)
        status = give_call(&in_pair, err);
    if (status == FSDP_OK && pair)
        status = await_failure(&in_pair, err);
    if (rank->rank == 2)
        status = await_failure(rank, err);
    fsdp_comm_free(pair);
    return status;
}

static void ends_all_groups_at_once(void)
{
    plan((fake_nccl_plan){.rank = -1});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = SHORT_MS, .body = wait_in_two_groups},
               FSDP_ERR_PEER, 2,
               "rank 2 did not come within 1 s to all_reduce of 8 f32 for layers.1 (call 1)");
}

/* Rank 2 gives up a group: NCCL cannot end it on rank 0 before the other one, which rank 2 does not know. */
static fsdp_status give_up_one_of_two(nccl_rank *rank, fsdp_error *err)
{
    const fsdp_error why = {.status = FSDP_ERR_NO_SPACE, .text = "the disk is full"};
    const struct timespec moment = {.tv_nsec = 500000000};
    if (rank->rank != 2)
        return wait_in_two_groups(rank, err);
    fsdp_comm *none = NULL; /* the pair of the others, which all ranks make */
    FSDP_TRY(rank->transport->ops->comm_create(rank->transport, (int[]){0, 1}, 2, 1, &none, err));
    nanosleep(&moment, NULL); /* the others have given their work by now */
    fsdp_comm_abort(rank->comm, &why);
    return await_failure(rank, err);
}

static void gives_up_one_of_two_groups(void)
{
    plan((fake_nccl_plan){.rank = -1});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = give_up_one_of_two},
               FSDP_ERR_NO_SPACE, 2, "the disk is full");
}

/* With work of two groups on its GPU. */
static fsdp_status leave_two_groups(nccl_rank *rank, fsdp_error *err)
{
    fsdp_comm *pair = NULL;
    FSDP_TRY(rank->transport->ops->comm_create(rank->transport, (int[]){0, 1}, 2, 1, &pair, err));
    nccl_rank in_pair = *rank;
    in_pair.comm = pair;
    fsdp_status status = FSDP_OK;
    if (rank->rank == 0)
        status = give_call(&in_pair, err);
    if (rank->rank == 0 && status == FSDP_OK)
        status = give_call(rank, err);
    if (status == FSDP_OK)
        status = leave_with_code(rank, err);
    fsdp_comm_free(pair);
    return status;
}

/* The others have left before, so that no beat tells anything any more. */
static fsdp_status leave_two_groups_last(nccl_rank *rank, fsdp_error *err)
{
    const struct timespec beats = {.tv_sec = 2, .tv_nsec = 500000000};
    fsdp_comm *pair = NULL;
    FSDP_TRY(rank->transport->ops->comm_create(rank->transport, (int[]){0, 1}, 2, 1, &pair, err));
    nccl_rank in_pair = *rank;
    in_pair.comm = pair;
    fsdp_status status = FSDP_OK;
    if (rank->rank == 0) {
        nanosleep(&beats, NULL);
        status = give_call(&in_pair, err);
        if (status == FSDP_OK)
            status = give_call(rank, err);
        rank->transport->exit_code = FSDP_ERR_NOT_FOUND;
    }
    fsdp_comm_free(pair);
    return status;
}

static void leaves_two_groups(void)
{
    plan((fake_nccl_plan){.rank = -1});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = leave_two_groups_last},
               FSDP_OK, 0, "");
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = leave_two_groups},
               FSDP_ERR_PEER, 0, "rank 0 has left with exit code 3 (not found): no corpus");
}

static fsdp_status be_busy(nccl_rank *rank, fsdp_error *err)
{
    const struct timespec busy = {.tv_sec = 1, .tv_nsec = 500000000};
    if (rank->rank == 1) {
        rank->transport->ops->set_busy(rank->transport, fsdp_now_ms() + LONG_MS);
        nanosleep(&busy, NULL);
    }
    FSDP_TRY(give_call(rank, err));
    rank->transport->ops->set_busy(rank->transport, 0);
    return rank->device->ops->sync(rank->device->ops->record(rank->stream), err);
}

static void is_busy(void)
{
    plan((fake_nccl_plan){.rank = -1});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = SHORT_MS, .body = be_busy}, FSDP_OK, 0,
               "");
}

/* --- communicators fail -------------------------------------------------------------------------- */

static fsdp_status never_called(nccl_rank *rank, fsdp_error *err)
{
    (void)rank;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "there is a communicator");
}

static void has_no_gpu(void)
{
    const char *text = "the making of a group of 3 ranks from rank 0 on (call 0): NCCL 2.28.9: "
                       "unhandled cuda error: "
                       "CUDA driver version is insufficient; NCCL needs a GPU with a driver";
    const nccl_world world = {.size = RANKS, .deadline_ms = LONG_MS, .body = never_called};
    plan((fake_nccl_plan){.rank = -1,
                          .init_code = FSDP_NCCL_CUDA_ERROR,
                          .last_error = "CUDA driver version is insufficient"});
    expect_all(&world, FSDP_ERR_USAGE, -1, text);
    fake->plan.rank = 1;
    expect_all(&world, FSDP_ERR_USAGE, 1, text);
}

static void shares_a_gpu(void)
{
    plan((fake_nccl_plan){
        .rank = -1,
        .init_async_code = FSDP_NCCL_INVALID_USAGE,
        .last_error = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = never_called},
               FSDP_ERR_USAGE, -1, "threads that share one (--threads N --device cuda:0)");
}

static void hangs_at_the_start(void)
{
    plan((fake_nccl_plan){.rank = 1, .init_hangs = true});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = SHORT_MS, .body = never_called},
               FSDP_ERR_PEER, -1, "the making of a group of 3 ranks from rank 0 on (call 0)");
}

static fsdp_status call_once(nccl_rank *rank, fsdp_error *err)
{
    FSDP_TRY(give_call(rank, err));
    return rank->device->ops->sync(rank->device->ops->record(rank->stream), err);
}

/* NCCL takes longer than a deadline to make the first communicators, which all ranks have come to. */
static void starts_slowly(void)
{
    plan((fake_nccl_plan){.rank = -1, .polls = 20000});
    expect_all(
        &(nccl_world){
            .size = RANKS, .deadline_ms = SHORT_MS, .creation_ms = LONG_MS, .body = call_once},
        FSDP_OK, 0, "");
}

static fsdp_status call_twice_and_sync(nccl_rank *rank, fsdp_error *err)
{
    FSDP_TRY(give_call(rank, err));
    FSDP_TRY(give_call(rank, err));
    return rank->device->ops->sync(rank->device->ops->record(rank->stream), err);
}

/* NCCL connects for longer than a deadline in a later call, on all ranks or on one for which the others wait
 * in their streams. */
static void connects_slowly(void)
{
    for (int rank = -1; rank < 2; rank += 2) {
        plan((fake_nccl_plan){.rank = rank, .connect_at = 2, .connect_ms = 5 * SHORT_MS / 2});
        expect_all(&(nccl_world){.size = RANKS,
                                 .deadline_ms = SHORT_MS,
                                 .creation_ms = LONG_MS,
                                 .body = call_twice_and_sync},
                   FSDP_OK, 0, "");
    }
}

/* The root of a broadcast does not wait for a rank that connects for it, but for its next call. */
static fsdp_status run_ahead(nccl_rank *rank, fsdp_error *err)
{
    static float data[RANKS][8];
    const fsdp_collective call = {.kind = FSDP_BROADCAST,
                                  .dtype = FSDP_F32,
                                  .in = data[rank->rank],
                                  .out = data[rank->rank],
                                  .count = 8,
                                  .unit = "layers.1",
                                  .stream = rank->stream};
    FSDP_TRY(fsdp_comm_run(rank->comm, &call, err));
    return call_twice_and_sync(rank, err);
}

static void connects_slowly_behind_the_root(void)
{
    plan((fake_nccl_plan){
        .rank = 1, .connect_at = 1, .connect_ms = 5 * SHORT_MS / 2, .root_runs_ahead = true});
    expect_all(
        &(nccl_world){
            .size = RANKS, .deadline_ms = SHORT_MS, .creation_ms = LONG_MS, .body = run_ahead},
        FSDP_OK, 0, "");
}

/* Rank 1 never comes to a call for which the others have connected. */
static void connects_for_a_missing_rank(void)
{
    plan((fake_nccl_plan){.rank = 0, .connect_at = 2, .connect_ms = LONG_MS});
    expect_all(
        &(nccl_world){
            .size = RANKS, .deadline_ms = SHORT_MS, .creation_ms = LONG_MS, .body = stay_away},
        FSDP_ERR_PEER, 1,
        "rank 1 did not come within 1 s to all_reduce of 8 f32 for layers.1 (call 2)");
}

static void end_destroys(void)
{
    atomic_store(&fake->plan.destroy_hangs, false);
}

/* Ranks leave although NCCL does not end their communicators. */
static void never_ends_a_communicator(void)
{
    plan((fake_nccl_plan){.rank = -1, .destroy_hangs = true});
    expect_all(
        &(nccl_world){
            .size = RANKS, .deadline_ms = SHORT_MS, .body = call_once, .at_end = end_destroys},
        FSDP_OK, 0, "");
}

static void shares_resources(void)
{
    plan((fake_nccl_plan){.rank = -1});
    setenv("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1", 1);
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = never_called},
               FSDP_ERR_USAGE, -1, "NCCL_COMM_SPLIT_SHARE_RESOURCES is 1");
    setenv("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0", 1);
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = call_once}, FSDP_OK, 0,
               "");
    unsetenv("NCCL_COMM_SPLIT_SHARE_RESOURCES");
}

static fsdp_status create_pair(nccl_rank *rank, fsdp_error *err)
{
    fsdp_comm *pair = NULL;
    return rank->transport->ops->comm_create(rank->transport, rank->context, 2, 1, &pair, err);
}

/* The others, members of the new group or not, wait for the group that it is split from. */
static void fails_at_a_split(void)
{
    int pairs[][2] = {{1, 2}, {0, 2}};
    plan((fake_nccl_plan){.rank = 1, .split_at = 2, .split_code = SYSTEM_ERROR});
    for (int i = 0; i < 2; i++)
        expect_all(
            &(nccl_world){
                .size = RANKS, .deadline_ms = LONG_MS, .body = create_pair, .context = pairs[i]},
            FSDP_ERR_PEER, 1,
            i == 0 ? "the making of a group of 2 ranks from rank 1 on (call 2): NCCL 2.28.9"
                   : "the making of a group of 2 ranks from rank 0 on (call 2): NCCL 2.28.9");
}

static void hangs_in_a_split(void)
{
    int pair[] = {0, 2};
    plan((fake_nccl_plan){.rank = 1, .split_at = 2, .split_hangs = true});
    expect_all(
        &(nccl_world){.size = RANKS, .deadline_ms = SHORT_MS, .body = create_pair, .context = pair},
        FSDP_ERR_PEER, -1,
        "got no result from NCCL within 1 s, though all ranks came to the making of a group of 2 "
        "ranks");
}

/* --- libraries that do not do ---------------------------------------------------------------------- */

static void is_too_old(void)
{
    plan((fake_nccl_plan){.version = 21207});
    expect_all(&(nccl_world){.size = RANKS, .deadline_ms = LONG_MS, .body = never_called},
               FSDP_ERR_USAGE, 0, "is NCCL 2.12.7, and at least 2.14 is needed");
}

#ifdef __SANITIZE_ADDRESS__
/* A group that NCCL does not end keeps its memory for good (transport_nccl.c:free_group). */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:create_group\n";
}
#endif

#ifdef __SANITIZE_THREAD__
/* The C library frees a finished thread's own variables in the next pthread_create, by a lock that
 * ThreadSanitizer does not see. */
const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void)
{
    return "race:_dl_deallocate_tls\n";
}
#endif

typedef struct test_case {
    const char *name;
    void (*run)(void);
} test_case;

static const test_case cases[] = {
    {"too_old", is_too_old}, /* before a library was taken */
    {"fails_at_a_call", fails_at_a_call},
    {"fails_in_a_part", fails_in_a_part},
    {"fails_later", fails_later},
    {"lost_rank", notices_a_lost_rank},
    {"lost_rank_at_once", notices_a_lost_rank_at_once},
    {"names_a_lost_rank", names_a_lost_rank},
    {"never_comes", never_comes},
    {"chain", finds_the_end_of_a_chain},
    {"another_call", makes_another_call},
    {"aborts", aborts},
    {"ends_work_that_waits", ends_work_that_waits},
    {"leaves_with_a_failure", leaves_with_a_failure},
    {"leaves_early", leaves_early},
    {"dies", dies},
    {"hangs_in_a_call", hangs_in_a_call},
    {"blocks_in_a_call", blocks_in_a_call},
    {"frees_memory_in_a_call", frees_memory_in_a_call},
    {"two_groups", ends_all_groups_at_once},
    {"gives_up_one_of_two", gives_up_one_of_two_groups},
    {"leaves_two_groups", leaves_two_groups},
    {"busy", is_busy},
    {"no_gpu", has_no_gpu},
    {"shares_a_gpu", shares_a_gpu},
    {"hangs_at_the_start", hangs_at_the_start},
    {"starts_slowly", starts_slowly},
    {"connects_slowly", connects_slowly},
    {"connects_slowly_behind_the_root", connects_slowly_behind_the_root},
    {"connects_for_a_missing_rank", connects_for_a_missing_rank},
    {"never_ends", never_ends_a_communicator},
    {"shares_resources", shares_resources},
    {"fails_at_a_split", fails_at_a_split},
    {"hangs_in_a_split", hangs_in_a_split},
};

static bool is_of_old(const test_case *one)
{
    return one->run == ends_all_groups_at_once || one->run == leaves_two_groups ||
           one->run == never_ends_a_communicator || one->run == hangs_in_a_split;
}

int main(int argc, char **argv)
{
    fake = fake_nccl_of();
    has_hosts = argc > 1 && strcmp(argv[1], "hosts") == 0;
    const bool is_old = argc > 1 && strcmp(argv[1], "old") == 0;
    version = is_old ? OLD_VERSION : 0;
    argv += has_hosts || is_old;
    argc -= has_hosts || is_old;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (is_old && !is_of_old(&cases[i]))
            continue;
        if (argc > 1 && strcmp(argv[1], cases[i].name) != 0)
            continue;
        printf("%s\n", cases[i].name);
        fflush(stdout);
        cases[i].run();
    }
    return 0;
}
