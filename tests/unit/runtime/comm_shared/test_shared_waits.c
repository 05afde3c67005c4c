/* Waits over shared memory: which rank is named when waits form a chain, and what moves the deadline. */
#include "base/core/clock.h"
#include "runtime/comm_shared/comm_shared.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RANKS = 3, DEADLINE_MS = 1000 };

/* Ranks without threads of their own: only the block and one transport per rank. */
static const int ranks[RANKS] = {0, 1, 2};
static shared_transport transports[RANKS];
static shared_block *block;

static void begin(void)
{
    size_t size = (fsdp_shared_world_size(RANKS) + FSDP_SHARED_LINE - 1) / FSDP_SHARED_LINE;
    block = aligned_alloc(FSDP_SHARED_LINE, size * FSDP_SHARED_LINE);
    cr_assert(block);
    memset(block, 0, size * FSDP_SHARED_LINE);
    for (int i = 0; i < RANKS; i++) {
        transports[i] = (shared_transport){
            .base = {.rank = i, .size = RANKS, .deadline_ms = DEADLINE_MS},
            .world = {.transport = &transports[i],
                      .block = block,
                      .rank = i,
                      .size = RANKS,
                      .ranks = ranks,
                      .header = {.kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .count = 1}}};
    }
}

static void end(void)
{
    free(block);
}

TestSuite(shared_waits, .init = begin, .fini = end, .timeout = 60);

/* --- the rank that all wait for --------------------------------------------------------------- */

static void wait_for(int rank, int other, int64_t age_ms)
{
    fsdp_shared_note_wait(&transports[rank].world, other, fsdp_now_ms() - age_ms);
}

static void expect_missing(int wanted, const char *words)
{
    char text[FSDP_WAIT_TEXT];
    int found = fsdp_shared_find_missing(&transports[0].world, 1, false, text);
    cr_expect_eq(found, wanted, "rank %d %s", found, text);
    cr_expect(strstr(text, words), "%s", text);
}

Test(shared_waits, the_end_of_the_chain_is_named)
{
    expect_missing(1, "is stuck, or stopped: it did not come");
    wait_for(1, 2, 0);
    expect_missing(2, "is stuck, or stopped: rank 1 waits for it");
    fsdp_shared_end_wait(&transports[1].world);
    expect_missing(1, "is stuck, or stopped: it did not come");
}

/* A waiting rank updates its slot, so that an old one is that of a stopped rank. */
Test(shared_waits, a_rank_that_stopped_while_it_waited_is_named)
{
    wait_for(1, 2, DEADLINE_MS);
    expect_missing(1, "is stuck, or stopped: it did not come");
}

Test(shared_waits, ranks_that_wait_for_each_other_have_no_end)
{
    wait_for(1, 2, 0);
    wait_for(2, 1, 0);
    expect_missing(1, "waits for rank 2 in all_reduce");
}

/* --- ranks that left -------------------------------------------------------------------------- */

/* The text is in the world's block once a rank, not in every group's. */
Test(shared_waits, the_reason_of_a_rank_that_left_is_told_and_takes_no_room_in_groups)
{
    fsdp_error err = {0};
    transports[1].base.exit_code = 3;
    transports[1].base.exit_reason = "cannot read 'corpus'";
    fsdp_shared_leave(&transports[1].world);
    fsdp_shared_arrive(&transports[0].world);
    cr_expect_eq(fsdp_shared_await(&transports[0].world, &err), FSDP_ERR_PEER);
    cr_expect(strstr(err.text, "; its error: cannot read 'corpus'"), "%s", err.text);
    cr_expect_eq(err.rank, 1);
    size_t more = fsdp_shared_block_size(RANKS) - fsdp_shared_block_size(RANKS - 1);
    cr_expect_lt(more, FSDP_ERROR_TEXT, "%zu bytes for one member more", more);
}

/* --- the deadline ----------------------------------------------------------------------------- */

static void *arrive_late(void *beats)
{
    for (int ms = 0; ms < 2 * DEADLINE_MS; ms += DEADLINE_MS / 20) {
        usleep(DEADLINE_MS / 20 * 1000);
        if (beats)
            cr_expect(fsdp_shared_heartbeat(&transports[1].world));
    }
    fsdp_shared_arrive(&transports[1].world);
    return NULL;
}

static fsdp_status await_late_rank(bool beats, fsdp_error *err)
{
    pthread_t late;
    cr_assert_eq(pthread_create(&late, NULL, arrive_late, beats ? block : NULL), 0);
    fsdp_shared_arrive(&transports[2].world);
    fsdp_shared_arrive(&transports[0].world);
    fsdp_status status = fsdp_shared_await(&transports[0].world, err);
    cr_assert_eq(pthread_join(late, NULL), 0);
    return status;
}

Test(shared_waits, a_rank_in_long_work_is_awaited)
{
    fsdp_error err = {0};
    cr_expect_eq(await_late_rank(true, &err), FSDP_OK, "%s", err.text);
}

Test(shared_waits, a_silent_rank_is_awaited_until_the_deadline)
{
    fsdp_error err = {0};
    cr_expect_eq(await_late_rank(false, &err), FSDP_ERR_PEER);
    cr_expect_eq(err.rank, 1, "%s", err.text);
}
