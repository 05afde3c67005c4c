/* The control plane over threads: values, mismatches, silent and leaving ranks, poison, the
 * window. */
#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/mem.h"
#include "statedict/ctl/ctl_backend.h"
#include "tests/support/sample_state.h"

enum { MAX_RANKS = 16, SHORT_MS = 400, SLACK_MS = 6000 };
#define HINTED "; " FSDP_DEADLINE_HINT

/* Shared by the ranks of one test: its parameters, and the results of each rank. */
typedef struct test_group {
    size_t size;
    int special; /* the rank that behaves differently */
    fsdp_error errors[MAX_RANKS];
    int64_t waited_ms[MAX_RANKS];
    atomic_int reached, told;
} test_group;

static unsigned char pattern(int rank, size_t at)
{
    return (unsigned char)((size_t)rank * 131 + at * 7 + (at >> 8));
}

static fsdp_status check_pattern(const unsigned char *data, int rank, size_t size, fsdp_error *err)
{
    for (size_t i = 0; i < size; i++) {
        if (data[i] != pattern(rank, i))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "byte %zu of rank %d's data is wrong", i,
                             rank);
    }
    return FSDP_OK;
}

static unsigned char *make_pattern(int rank, size_t size)
{
    unsigned char *data = fsdp_alloc(size, 1);
    for (size_t i = 0; data && i < size; i++)
        data[i] = pattern(rank, i);
    return data;
}

static void expect_group(int n, fsdp_rank_body body, test_group *group)
{
    fsdp_error err = {0};
    fsdp_status status = fsdp_ctl_run_threads(n, body, group, &err);
    cr_assert_eq(status, FSDP_OK, "%d ranks: %s", n, err.text);
}

static const size_t sizes[] = {0, 1, 8, 1000, 65536, FSDP_CTL_PIECE, FSDP_CTL_PIECE * 2 + 17};

/* --- values ----------------------------------------------------------------------------------- */

static fsdp_status gather_patterns(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const test_group *group = user;
    int n = fsdp_ctl_size(ctl), rank = fsdp_ctl_rank(ctl);
    unsigned char *mine = make_pattern(rank, group->size);
    unsigned char *all = fsdp_alloc((size_t)n, group->size);
    fsdp_status status = fsdp_ctl_allgather(ctl, mine, group->size, all, err);
    for (int i = 0; status == FSDP_OK && i < n; i++)
        status = check_pattern(all + (size_t)i * group->size, i, group->size, err);
    fsdp_free(all);
    fsdp_free(mine);
    return status;
}

Test(ctl, allgather_brings_every_part_to_every_rank_in_rank_order)
{
    test_sampler sampler = {.every = test_sample_at_most(8)};
    for (int n = 1; n <= MAX_RANKS; n++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            test_group group = {.size = sizes[i]};
            if ((size_t)n * group.size <= 16 << 20 && test_sampler_takes(&sampler))
                expect_group(n, gather_patterns, &group);
        }
    }
}

static fsdp_status broadcast_from_each(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const test_group *group = user;
    fsdp_status status = FSDP_OK;
    for (int root = 0; root < fsdp_ctl_size(ctl) && status == FSDP_OK; root++) {
        unsigned char *data = make_pattern(fsdp_ctl_rank(ctl), group->size);
        status = fsdp_ctl_broadcast(ctl, root, data, group->size, err);
        if (status == FSDP_OK)
            status = check_pattern(data, root, group->size, err);
        fsdp_free(data);
    }
    return status;
}

Test(ctl, broadcast_brings_the_root_s_bytes_to_every_rank)
{
    test_sampler sampler = {.every = test_sample_at_most(3)};
    for (int n = 1; n <= MAX_RANKS; n += n < 4 ? 1 : 4) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            test_group group = {.size = sizes[i] / (n > 4 ? 4 : 1)};
            if (test_sampler_takes(&sampler))
                expect_group(n, broadcast_from_each, &group);
        }
    }
}

static fsdp_status broadcast_large(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const test_group *group = user;
    unsigned char *data = make_pattern(fsdp_ctl_rank(ctl), group->size);
    fsdp_status status = fsdp_ctl_broadcast(ctl, 1, data, group->size, err);
    if (status == FSDP_OK)
        status = check_pattern(data, 1, group->size, err);
    fsdp_free(data);
    return status;
}

Test(ctl, broadcast_larger_than_the_window_arrives_whole)
{
    expect_group(3, broadcast_large, &(test_group){.size = 3 * (size_t)FSDP_CTL_WINDOW + 5});
}

static fsdp_status pass_around(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const test_group *group = user;
    int n = fsdp_ctl_size(ctl), rank = fsdp_ctl_rank(ctl);
    int next = (rank + 1) % n, before = (rank + n - 1) % n;
    unsigned char *mine = make_pattern(rank, group->size);
    unsigned char *theirs = fsdp_alloc(group->size, 1);
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < 3 && status == FSDP_OK; i++) {
        /* Rank 0 breaks the ring, so that it also works with messages larger than the window. */
        if (rank != 0)
            status = fsdp_ctl_recv(ctl, before, theirs, group->size, err);
        if (status == FSDP_OK)
            status = fsdp_ctl_send(ctl, next, mine, group->size, err);
        if (rank == 0 && status == FSDP_OK)
            status = fsdp_ctl_recv(ctl, before, theirs, group->size, err);
        if (status == FSDP_OK)
            status = check_pattern(theirs, before, group->size, err);
    }
    fsdp_free(theirs);
    fsdp_free(mine);
    return status;
}

Test(ctl, messages_go_round_a_ring_of_ranks)
{
    for (int n = 2; n <= MAX_RANKS; n += 3) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            expect_group(n, pass_around, &(test_group){.size = sizes[i]});
    }
    expect_group(2, pass_around, &(test_group){.size = 2 * (size_t)FSDP_CTL_WINDOW + 3});
}

static fsdp_status count_at_barrier(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    test_group *group = user;
    int n = fsdp_ctl_size(ctl);
    for (int i = 1; i <= 5; i++) {
        atomic_fetch_add(&group->reached, 1);
        FSDP_TRY(fsdp_ctl_barrier(ctl, err));
        if (atomic_load(&group->reached) < i * n)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "left barrier %d early", i);
        FSDP_TRY(fsdp_ctl_barrier(ctl, err));
    }
    return FSDP_OK;
}

Test(ctl, nobody_leaves_a_barrier_before_all_have_come)
{
    for (int n = 1; n <= MAX_RANKS; n++)
        expect_group(n, count_at_barrier, &(test_group){0});
}

Test(ctl, one_rank_alone_needs_nobody)
{
    fsdp_ctl *ctl = NULL;
    fsdp_error err = {0};
    char mine[4] = "abc", all[4] = "";
    cr_assert_eq(fsdp_ctl_self(&ctl, &err), FSDP_OK);
    cr_assert_eq(fsdp_ctl_size(ctl), 1);
    cr_assert_eq(fsdp_ctl_rank(ctl), 0);
    cr_assert(fsdp_ctl_shares_memory(ctl));
    cr_assert_eq(fsdp_ctl_barrier(ctl, &err), FSDP_OK);
    cr_assert_eq(fsdp_ctl_allgather(ctl, mine, 4, all, &err), FSDP_OK);
    cr_assert_str_eq(all, "abc");
    cr_assert_eq(fsdp_ctl_broadcast(ctl, 0, all, 4, &err), FSDP_OK);
    cr_assert_eq(fsdp_ctl_agree(ctl, FSDP_OK, &err), FSDP_OK);
    (void)fsdp_fail(&err, FSDP_ERR_IO, "disk gone");
    cr_assert_eq(fsdp_ctl_agree(ctl, FSDP_ERR_IO, &err), FSDP_ERR_IO);
    cr_assert_str_eq(err.text, "disk gone");
    cr_assert_eq(fsdp_ctl_send(ctl, 0, mine, 4, &err), FSDP_ERR_USAGE);
    cr_assert_eq(fsdp_ctl_barrier(ctl, NULL), FSDP_OK);
    fsdp_ctl_free(ctl);
    fsdp_ctl_free(NULL);
}

/* --- agree ------------------------------------------------------------------------------------ */

/* Ranks from group->special on fail; all must leave with the error of the first of them. */
static fsdp_status agree_on_failure(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const test_group *group = user;
    int rank = fsdp_ctl_rank(ctl);
    fsdp_status mine = rank >= group->special ? FSDP_ERR_NO_SPACE : FSDP_OK;
    fsdp_error theirs = {0};
    if (mine != FSDP_OK)
        (void)fsdp_fail_errno(&theirs, 28, "cannot write 'shard-%d'", rank);
    fsdp_status status = fsdp_ctl_agree(ctl, mine, &theirs);

    char expected[128], prefix[32] = "";
    if (rank != group->special)
        snprintf(prefix, sizeof prefix, "rank %d: ", group->special);
    snprintf(expected, sizeof expected, "%scannot write 'shard-%d': No space left on device",
             prefix, group->special);
    if (status != FSDP_ERR_NO_SPACE || theirs.status != status || theirs.errnum != 28 ||
        theirs.rank != group->special || strcmp(theirs.text, expected) != 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "status %d, rank %d, '%s'", (int)status,
                         theirs.rank, theirs.text);
    /* An agreed failure leaves the control plane usable. */
    return fsdp_ctl_agree(ctl, FSDP_OK, err);
}

Test(ctl, agree_gives_all_ranks_the_lowest_failing_rank_s_error)
{
    for (int n = 1; n <= MAX_RANKS; n += n < 4 ? 1 : 6) {
        for (int special = 0; special < n; special++)
            expect_group(n, agree_on_failure, &(test_group){.special = special});
    }
}

static fsdp_status bring_bad_argument(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    (void)user;
    char byte = 1, all[8];
    fsdp_error theirs = {0};
    const char *mine = fsdp_ctl_rank(ctl) == 1 ? NULL : &byte;
    if (fsdp_ctl_allgather(ctl, mine, 1, all, &theirs) != FSDP_ERR_USAGE || theirs.rank != 1)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "rank %d, '%s'", theirs.rank, theirs.text);
    return fsdp_ctl_barrier(ctl, err);
}

Test(ctl, a_bad_argument_on_one_rank_is_everybody_s_error_and_breaks_nothing)
{
    expect_group(4, bring_bad_argument, &(test_group){0});
}

/* --- failures of the control plane ------------------------------------------------------------ */

static void expect_all_but_special(int n, const test_group *group, const char *text)
{
    for (int rank = 0; rank < n; rank++) {
        if (rank == group->special)
            continue;
        const fsdp_error *err = &group->errors[rank];
        cr_expect_eq(err->status, FSDP_ERR_PEER, "rank %d: status %d", rank, (int)err->status);
        cr_expect(strstr(err->text, text), "rank %d says '%s', '%s' is missing", rank, err->text,
                  text);
        cr_expect_lt(group->waited_ms[rank], SHORT_MS + SLACK_MS, "rank %d waited %lld ms", rank,
                     (long long)group->waited_ms[rank]);
    }
}

static fsdp_status record(test_group *group, fsdp_ctl *ctl, fsdp_status status,
                          const fsdp_error *found, int64_t start_ms)
{
    int rank = fsdp_ctl_rank(ctl);
    group->errors[rank] = *found;
    group->errors[rank].status = status;
    group->waited_ms[rank] = fsdp_now_ms() - start_ms;
    return FSDP_OK;
}

/* The special rank stays silent until all others have given up. */
static fsdp_status keep_silent(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    test_group *group = user;
    int n = fsdp_ctl_size(ctl), rank = fsdp_ctl_rank(ctl);
    char byte = 0, all[MAX_RANKS];
    fsdp_error found = {0};
    (void)err;
    fsdp_ctl_set_deadline(ctl, SHORT_MS);
    if (rank == group->special) {
        for (int i = 0; i < 1000 && atomic_load(&group->reached) < n - 1; i++)
            usleep(10000);
        return FSDP_OK;
    }
    int64_t start_ms = fsdp_now_ms();
    fsdp_status status = fsdp_ctl_allgather(ctl, &byte, 1, all, &found);
    atomic_fetch_add(&group->reached, 1);
    return record(group, ctl, status, &found, start_ms);
}

Test(ctl, a_silent_rank_is_named_by_all_others_within_the_deadline)
{
    for (int special = 0; special < 4; special += 3) {
        test_group group = {.special = special};
        char text[300];
        snprintf(text, sizeof text,
                 "rank %d did not answer within 0.4 s in fsdp_ctl_allgather: it is gone, stuck, or "
                 "in another call" HINTED,
                 special);
        expect_group(4, keep_silent, &group);
        expect_all_but_special(4, &group, text);
        for (int rank = 0; rank < 4; rank++)
            cr_expect(rank == special || group.errors[rank].rank == special);
    }
}

/* Ranks 2, 3 and 5 of 6 stay silent. */
static fsdp_status keep_three_silent(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    test_group *group = user;
    int rank = fsdp_ctl_rank(ctl);
    fsdp_error found = {0};
    (void)err;
    fsdp_ctl_set_deadline(ctl, SHORT_MS);
    if (rank == 2 || rank == 3 || rank == 5) {
        for (int i = 0; i < 1000 && atomic_load(&group->reached) < 3; i++)
            usleep(10000);
        return FSDP_OK;
    }
    int64_t start_ms = fsdp_now_ms();
    fsdp_status status = fsdp_ctl_barrier(ctl, &found);
    atomic_fetch_add(&group->reached, 1);
    return record(group, ctl, status, &found, start_ms);
}

Test(ctl, all_missing_ranks_are_named)
{
    static const int answering[] = {0, 1, 4};
    test_group group = {0};
    expect_group(6, keep_three_silent, &group);
    for (int i = 0; i < 3; i++)
        cr_expect_str_eq(
            group.errors[answering[i]].text,
            "rank 2 did not answer within 0.4 s in fsdp_ctl_barrier: it is gone, stuck, or in "
            "another call (ranks 2, 3, 5 missing)" HINTED);
}

/* --- ranks that are at work --- */

/* Long enough for a thread that has to wait for a processor. */
enum { PATIENT_MS = 1000 };

static void work_for(fsdp_ctl *ctl, int64_t milliseconds)
{
    int64_t until_ms = fsdp_now_ms() + milliseconds;
    while (fsdp_now_ms() < until_ms) {
        fsdp_ctl_report_working(ctl, PATIENT_MS / 2);
        usleep(20000);
    }
}

/* Longer than anybody would wait for a silent rank: others wait 2 s more for rank 0. */
static fsdp_status work_before_the_call(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const test_group *group = user;
    fsdp_ctl_set_deadline(ctl, PATIENT_MS);
    FSDP_TRY(fsdp_ctl_barrier(ctl, err));
    if (fsdp_ctl_rank(ctl) == group->special)
        work_for(ctl, group->special == 0 ? PATIENT_MS + 2600 : 5 * PATIENT_MS / 2);
    FSDP_TRY(fsdp_ctl_agree(ctl, FSDP_OK, err));
    char byte = (char)fsdp_ctl_rank(ctl), all[MAX_RANKS];
    FSDP_TRY(fsdp_ctl_allgather(ctl, &byte, 1, all, err));
    return fsdp_ctl_barrier(ctl, err);
}

Test(ctl, a_rank_that_says_it_is_at_work_is_waited_for, .timeout = 30)
{
    for (int special = 0; special < 4; special += 3) {
        test_group group = {.special = special};
        expect_group(4, work_before_the_call, &group);
    }
}

/* Everybody at work for different times, and messages between two ranks as well. */
static fsdp_status work_in_turns(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    int rank = fsdp_ctl_rank(ctl);
    char byte = 7;
    (void)user;
    fsdp_ctl_set_deadline(ctl, PATIENT_MS);
    work_for(ctl, rank * 3 * PATIENT_MS / 2);
    FSDP_TRY(fsdp_ctl_barrier(ctl, err));
    if (rank == 2) {
        work_for(ctl, 2 * PATIENT_MS);
        FSDP_TRY(fsdp_ctl_send(ctl, 0, &byte, 1, err));
    } else if (rank == 0) {
        FSDP_TRY(fsdp_ctl_recv(ctl, 2, &byte, 1, err));
    }
    return fsdp_ctl_barrier(ctl, err);
}

Test(ctl, ranks_at_work_for_different_times_are_all_waited_for, .timeout = 30)
{
    test_group group = {0};
    expect_group(3, work_in_turns, &group);
}

static void wait_until_told(test_group *group)
{
    for (int i = 0; i < 1000 && atomic_load(&group->told) == 0; i++)
        usleep(10000);
}

/* The special rank announces SHORT_MS of silence beyond the deadline, and never comes. */
static fsdp_status break_word(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    test_group *group = user;
    fsdp_error found = {0};
    fsdp_ctl_set_deadline(ctl, SHORT_MS);
    FSDP_TRY(fsdp_ctl_barrier(ctl, err));
    if (fsdp_ctl_rank(ctl) == group->special) {
        fsdp_ctl_report_working(ctl, 2 * SHORT_MS);
        atomic_store(&group->told, 1);
        for (int i = 0; i < 1000 && atomic_load(&group->reached) < fsdp_ctl_size(ctl) - 1; i++)
            usleep(10000);
        return FSDP_OK;
    }
    wait_until_told(group);
    int64_t start_ms = fsdp_now_ms();
    fsdp_status status = fsdp_ctl_barrier(ctl, &found);
    atomic_fetch_add(&group->reached, 1);
    return record(group, ctl, status, &found, start_ms);
}

Test(ctl, a_rank_that_is_silent_beyond_its_word_is_missing, .timeout = 30)
{
    for (int special = 0; special < 3; special += 2) {
        test_group group = {.special = special};
        expect_group(3, break_word, &group);
        for (int rank = 0; rank < 3; rank++) {
            if (rank == special)
                continue;
            cr_expect_eq(group.errors[rank].status, FSDP_ERR_PEER);
            cr_expect_eq(group.errors[rank].rank, special, "%s", group.errors[rank].text);
            cr_expect_gt(group.waited_ms[rank], SHORT_MS + SHORT_MS / 2);
        }
    }
}

/* Rank 1 stays silent, rank 2 is at work: only rank 1 is missing. */
static fsdp_status one_silent_one_at_work(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    test_group *group = user;
    fsdp_error found = {0};
    int rank = fsdp_ctl_rank(ctl);
    fsdp_ctl_set_deadline(ctl, SHORT_MS);
    FSDP_TRY(fsdp_ctl_barrier(ctl, err));
    if (rank == 2) {
        fsdp_ctl_report_working(ctl, 2 * SHORT_MS);
        atomic_store(&group->told, 1);
    }
    for (int i = 0; rank != 0 && i < 1000 && atomic_load(&group->reached) < 1; i++)
        usleep(10000);
    if (rank != 0)
        return FSDP_OK;
    wait_until_told(group);
    int64_t start_ms = fsdp_now_ms();
    fsdp_status status = fsdp_ctl_barrier(ctl, &found);
    atomic_fetch_add(&group->reached, 1);
    return record(group, ctl, status, &found, start_ms);
}

Test(ctl, a_rank_at_work_is_not_named_among_the_missing, .timeout = 30)
{
    test_group group = {0};
    expect_group(3, one_silent_one_at_work, &group);
    cr_expect_str_eq(group.errors[0].text,
                     "rank 1 did not answer within 0.4 s in fsdp_ctl_barrier: it is gone, stuck, "
                     "or in another call" HINTED);
}

/* Rank 1 is at work until the others have given up, rank 2 is silent: no rank waits for it. */
static fsdp_status work_while_one_is_silent(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    test_group *group = user;
    fsdp_error found = {0};
    int rank = fsdp_ctl_rank(ctl);
    fsdp_ctl_set_deadline(ctl, PATIENT_MS);
    FSDP_TRY(fsdp_ctl_barrier(ctl, err));
    for (int i = 0; rank == 1 && i < 1500 && atomic_load(&group->reached) < 2; i++) {
        fsdp_ctl_report_working(ctl, PATIENT_MS / 2);
        usleep(10000);
    }
    for (int i = 0; rank == 2 && i < 1500 && atomic_load(&group->reached) < 2; i++)
        usleep(10000);
    if (rank == 1 || rank == 2)
        return FSDP_OK;
    int64_t start_ms = fsdp_now_ms();
    fsdp_status status = fsdp_ctl_barrier(ctl, &found);
    atomic_fetch_add(&group->reached, 1);
    return record(group, ctl, status, &found, start_ms);
}

Test(ctl, a_rank_at_work_does_not_hide_a_missing_one, .timeout = 60)
{
    test_group group = {0};
    expect_group(4, work_while_one_is_silent, &group);
    for (int rank = 0; rank < 4; rank += 3) {
        cr_expect_str_eq(group.errors[rank].text,
                         "rank 2 did not answer within 1 s in fsdp_ctl_barrier: it is gone, "
                         "stuck, or in another call" HINTED);
        cr_expect_lt(group.waited_ms[rank], PATIENT_MS + SLACK_MS);
    }
}

static fsdp_status leave_early(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    test_group *group = user;
    fsdp_error found = {0};
    FSDP_TRY(fsdp_ctl_barrier(ctl, err));
    if (fsdp_ctl_rank(ctl) == group->special)
        return FSDP_OK;
    int64_t start_ms = fsdp_now_ms();
    fsdp_status status = fsdp_ctl_agree(ctl, FSDP_OK, &found);
    return record(group, ctl, status, &found, start_ms);
}

Test(ctl, a_rank_that_leaves_is_noticed_at_once)
{
    for (int special = 0; special < 3; special++) {
        test_group group = {.special = special};
        char text[64];
        snprintf(text, sizeof text, "rank %d has left during fsdp_ctl_agree", special);
        expect_group(5, leave_early, &group);
        expect_all_but_special(5, &group, text);
    }
}

/* The special rank says why it leaves. */
static fsdp_status leave_with_reason(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    test_group *group = user;
    fsdp_error found = {0}, why = {.status = FSDP_ERR_PEER, .rank = group->special};
    FSDP_TRY(fsdp_ctl_barrier(ctl, err));
    if (fsdp_ctl_rank(ctl) == group->special) {
        snprintf(why.text, sizeof why.text, "rank %d has left: enough", group->special);
        fsdp_ctl_leave(ctl, &why);
        return FSDP_OK;
    }
    int64_t start_ms = fsdp_now_ms();
    fsdp_status status = fsdp_ctl_agree(ctl, FSDP_OK, &found);
    return record(group, ctl, status, &found, start_ms);
}

Test(ctl, why_a_rank_leaves_is_told_to_all)
{
    for (int special = 0; special < 4; special++) {
        test_group group = {.special = special};
        char text[64];
        snprintf(text, sizeof text, "rank %d has left: enough", special);
        expect_group(4, leave_with_reason, &group);
        expect_all_but_special(4, &group, text);
    }
}

static void say_where(void *user, int rank, char *out, size_t out_size)
{
    const test_group *group = user;
    if (rank == group->special)
        snprintf(out, out_size, "it is in all_gather, and waits for rank 0");
}

/* An observer reports where the special rank is. */
static fsdp_status wait_for_one_elsewhere(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    ctl->observer.find = say_where;
    ctl->observer.context = user;
    return keep_silent(user, ctl, err);
}

Test(ctl, a_rank_that_is_known_to_be_elsewhere_is_not_called_stuck)
{
    test_group group = {.special = 2};
    expect_group(4, wait_for_one_elsewhere, &group);
    expect_all_but_special(4, &group,
                           "rank 2 did not answer within 0.4 s in fsdp_ctl_allgather: it is in "
                           "all_gather, and waits for rank 0" HINTED);
}

static fsdp_status fail_alone(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const test_group *group = user;
    if (fsdp_ctl_rank(ctl) == group->special)
        return fsdp_fail(err, FSDP_ERR_IO, "the disk of rank %d is gone", group->special);
    return fsdp_ctl_barrier(ctl, err);
}

Test(ctl, run_threads_reports_the_cause_and_not_its_echo)
{
    for (int special = 0; special < 4; special++) {
        fsdp_error err = {0};
        char text[64];
        snprintf(text, sizeof text, "the disk of rank %d is gone", special);
        cr_expect_eq(fsdp_ctl_run_threads(4, fail_alone, &(test_group){.special = special}, &err),
                     FSDP_ERR_IO);
        cr_expect_str_eq(err.text, text);
        cr_expect_eq(err.rank, special);
        cr_expect_eq(fsdp_ctl_run_threads(4, fail_alone, &(test_group){.special = special}, NULL),
                     FSDP_ERR_IO);
    }
}

static fsdp_status use_after_failure(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    (void)user;
    if (fsdp_ctl_rank(ctl) == 2)
        return FSDP_OK;
    fsdp_error first = {0}, later = {0};
    char byte = 0, all[3];
    fsdp_status status = fsdp_ctl_barrier(ctl, &first);
    if (status != FSDP_ERR_PEER)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the barrier held");
    int64_t start_ms = fsdp_now_ms();
    fsdp_status after[] = {fsdp_ctl_barrier(ctl, &later),
                           fsdp_ctl_allgather(ctl, &byte, 1, all, &later),
                           fsdp_ctl_broadcast(ctl, 0, &byte, 1, &later),
                           fsdp_ctl_agree(ctl, FSDP_OK, &later),
                           fsdp_ctl_send(ctl, 2, &byte, 1, &later),
                           fsdp_ctl_recv(ctl, 2, &byte, 1, &later)};
    for (size_t i = 0; i < sizeof after / sizeof *after; i++) {
        if (after[i] != FSDP_ERR_PEER)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "call %zu after the failure: %d", i,
                             (int)after[i]);
    }
    if (strcmp(first.text, later.text) != 0 || fsdp_now_ms() - start_ms > SLACK_MS)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s', then '%s'", first.text, later.text);
    /* A failure of its own is not hidden by the broken control plane. */
    (void)fsdp_fail(&later, FSDP_ERR_IO, "my own");
    if (fsdp_ctl_agree(ctl, FSDP_ERR_IO, &later) != FSDP_ERR_IO || strcmp(later.text, "my own"))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "lost my own error: '%s'", later.text);
    return FSDP_OK;
}

Test(ctl, after_a_failure_every_call_returns_the_first_error_at_once)
{
    expect_group(3, use_after_failure, &(test_group){0});
}

/* --- mismatches ------------------------------------------------------------------------------- */

typedef enum kind_of_difference {
    OTHER_CALL,
    OTHER_SIZE,
    OTHER_ROOT,
    ONE_CALL_MORE,
    RECV_FROM_ROOT,
    SEND_TO_ROOT,
    DIFFERENCES
} kind_of_difference;

static fsdp_status call_differently(fsdp_ctl *ctl, kind_of_difference difference, fsdp_error *err)
{
    char data[16] = "", all[16 * 4];
    switch (difference) {
    case OTHER_CALL: return fsdp_ctl_allgather(ctl, data, 8, all, err);
    case OTHER_SIZE: return fsdp_ctl_broadcast(ctl, 1, data, 16, err);
    case OTHER_ROOT: return fsdp_ctl_broadcast(ctl, 2, data, 8, err);
    case ONE_CALL_MORE:
        FSDP_TRY(fsdp_ctl_barrier(ctl, err));
        return fsdp_ctl_broadcast(ctl, 1, data, 8, err);
    case RECV_FROM_ROOT: return fsdp_ctl_recv(ctl, fsdp_ctl_rank(ctl) ? 0 : 1, data, 8, err);
    default:
        FSDP_TRY(fsdp_ctl_send(ctl, fsdp_ctl_rank(ctl) ? 0 : 1, data, 8, err));
        return fsdp_ctl_broadcast(ctl, 1, data, 8, err);
    }
}

static fsdp_status differ(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    test_group *group = user;
    char data[8] = "";
    fsdp_error found = {0};
    fsdp_status status;
    (void)err;
    fsdp_ctl_set_deadline(ctl, 2000);
    int64_t start_ms = fsdp_now_ms();
    if (fsdp_ctl_rank(ctl) == group->special)
        status = call_differently(ctl, (kind_of_difference)group->size, &found);
    else
        status = fsdp_ctl_broadcast(ctl, 1, data, sizeof data, &found);
    if (status == FSDP_OK)
        status = fsdp_ctl_barrier(ctl, &found);
    return record(group, ctl, status, &found, start_ms);
}

Test(ctl, different_calls_are_an_error_on_all_ranks_naming_both)
{
    static const char *const names[] = {"allgather of 8 bytes (call 1)",
                                        "broadcast of 16 bytes from rank 1 (call 1)",
                                        "broadcast of 8 bytes from rank 2 (call 1)",
                                        "barrier (call 1)",
                                        "recv of 8 bytes (after call 0)",
                                        "send of 8 bytes (after call 0)"};
    for (int difference = 0; difference < DIFFERENCES; difference++) {
        for (int special = 0; special < 4; special += 3) {
            test_group group = {.special = special, .size = (size_t)difference};
            expect_group(4, differ, &group);
            for (int rank = 0; rank < 4; rank++) {
                const char *text = group.errors[rank].text;
                cr_expect_eq(group.errors[rank].status, FSDP_ERR_USAGE);
                cr_expect(strstr(text, names[difference]), "%d/%d/%d: %s", difference, special,
                          rank, text);
                cr_expect(strstr(text, "broadcast of 8 bytes from rank 1 (call 1)"), "%s", text);
            }
        }
    }
}

static fsdp_status save_or_load(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const test_group *group = user;
    fsdp_error found = {0};
    int seven = 7, all[4];
    (void)err;
    int64_t start_ms = fsdp_now_ms();
    bool is_special = fsdp_ctl_rank(ctl) == group->special;
    const char *outer =
        fsdp_ctl_begin_public(ctl, is_special ? "fsdp_root_load" : "fsdp_root_save");
    const char *inner = fsdp_ctl_begin_public(ctl, "fsdp_sd_gather"); /* inside of it */
    fsdp_status status = fsdp_ctl_allgather(ctl, &seven, sizeof seven, all, &found);
    fsdp_ctl_end_public(ctl, inner);
    fsdp_ctl_end_public(ctl, outer);
    FSDP_TRY(fsdp_ctl_barrier(ctl, err)); /* the ranks agree on it */
    return record(user, ctl, status, &found, start_ms);
}

Test(ctl, different_public_calls_are_told_apart_where_their_messages_are_alike)
{
    for (int special = 0; special < 4; special += 3) {
        test_group group = {.special = special};
        expect_group(4, save_or_load, &group);
        for (int rank = 0; rank < 4; rank++) {
            const char *text = group.errors[rank].text;
            cr_expect_eq(group.errors[rank].status, FSDP_ERR_USAGE);
            cr_expect(!strstr(text, ": rank"), "%s", text);
            cr_expect(strstr(text, "is in fsdp_root_save (allgather of 4 bytes, call 1)"), "%s",
                      text);
            cr_expect(strstr(text, "is in fsdp_root_load (allgather of 4 bytes, call 1)"), "%s",
                      text);
        }
    }
}

static fsdp_status disagree_on_size(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    test_group *group = user;
    char data[16] = "";
    fsdp_error found = {0};
    int rank = fsdp_ctl_rank(ctl);
    (void)err;
    int64_t start_ms = fsdp_now_ms();
    fsdp_status status = rank == 1   ? fsdp_ctl_send(ctl, 2, data, group->size, &found)
                         : rank == 2 ? fsdp_ctl_recv(ctl, 1, data, 8, &found)
                                     : FSDP_OK;
    if (status == FSDP_OK)
        status = fsdp_ctl_barrier(ctl, &found);
    return record(group, ctl, status, &found, start_ms);
}

Test(ctl, a_message_of_another_size_is_an_error_on_all_ranks)
{
    static const size_t wrong[] = {0, 7, 16};
    for (int i = 0; i < 3; i++) {
        test_group group = {.size = wrong[i]};
        char text[64];
        snprintf(text, sizeof text, "send of %zu bytes", wrong[i]);
        expect_group(4, disagree_on_size, &group);
        for (int rank = 0; rank < 4; rank++) {
            cr_expect_eq(group.errors[rank].status, FSDP_ERR_USAGE);
            cr_expect(strstr(group.errors[rank].text, text), "%s", group.errors[rank].text);
            cr_expect(strstr(group.errors[rank].text, "recv of 8 bytes"));
        }
    }
}

/* The message is older than the barrier after which rank 2 expects one. */
static fsdp_status receive_late(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    char data[8] = "";
    fsdp_error found = {0};
    fsdp_status status = FSDP_OK;
    int rank = fsdp_ctl_rank(ctl);
    (void)err;
    int64_t start_ms = fsdp_now_ms();
    if (rank == 1)
        status = fsdp_ctl_send(ctl, 2, data, sizeof data, &found);
    if (status == FSDP_OK)
        status = fsdp_ctl_barrier(ctl, &found);
    if (status == FSDP_OK && rank == 2)
        status = fsdp_ctl_recv(ctl, 1, data, sizeof data, &found);
    if (status == FSDP_OK)
        status = fsdp_ctl_barrier(ctl, &found);
    return record(user, ctl, status, &found, start_ms);
}

Test(ctl, a_message_from_before_another_call_is_an_error_on_all_ranks)
{
    test_group group = {0};
    expect_group(4, receive_late, &group);
    for (int rank = 0; rank < 4; rank++) {
        const char *text = group.errors[rank].text;
        cr_expect_eq(group.errors[rank].status, FSDP_ERR_USAGE);
        cr_expect(strstr(text, "send of 8 bytes (after call 0)"), "%s", text);
        cr_expect(strstr(text, "recv of 8 bytes (after call 1)"), "%s", text);
    }
}

/* --- window ----------------------------------------------------------------------------------- */

enum { WINDOW_MESSAGES = 24 };

/* Rank 1 sends 24 x 1 MiB; rank 0 takes nothing until the sender has been stuck for a while. */
static fsdp_status fill_window(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    test_group *group = user;
    size_t size = FSDP_CTL_PIECE;
    unsigned char *data = make_pattern(1, size);
    fsdp_status status = FSDP_OK;
    for (int i = 0; fsdp_ctl_rank(ctl) == 1 && i < WINDOW_MESSAGES && status == FSDP_OK; i++) {
        status = fsdp_ctl_send(ctl, 0, data, size, err);
        atomic_fetch_add(&group->reached, 1);
    }
    if (fsdp_ctl_rank(ctl) == 0) {
        int before = -1;
        while (atomic_load(&group->reached) != before || before < 1) {
            before = atomic_load(&group->reached);
            usleep(100000);
        }
        if (before > FSDP_CTL_WINDOW / FSDP_CTL_PIECE)
            status = fsdp_fail(err, FSDP_ERR_INTERNAL, "%d messages are under way", before);
        for (int i = 0; i < WINDOW_MESSAGES && status == FSDP_OK; i++)
            status = fsdp_ctl_recv(ctl, 1, data, size, err);
    }
    fsdp_free(data);
    return status;
}

Test(ctl, a_sender_waits_when_the_window_is_full)
{
    expect_group(2, fill_window, &(test_group){0});
}

static fsdp_status send_to_nobody(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    test_group *group = user;
    fsdp_error found = {0};
    (void)err;
    fsdp_ctl_set_deadline(ctl, SHORT_MS);
    if (fsdp_ctl_rank(ctl) == 0) {
        for (int i = 0; i < 1000 && atomic_load(&group->reached) == 0; i++)
            usleep(10000);
        return FSDP_OK;
    }
    size_t size = 2 * (size_t)FSDP_CTL_WINDOW;
    unsigned char *data = make_pattern(1, size);
    int64_t start_ms = fsdp_now_ms();
    fsdp_status status = fsdp_ctl_send(ctl, 0, data, size, &found);
    atomic_fetch_add(&group->reached, 1);
    fsdp_free(data);
    return record(group, ctl, status, &found, start_ms);
}

Test(ctl, a_send_that_nobody_takes_fails_at_the_deadline)
{
    test_group group = {.special = 0};
    expect_group(2, send_to_nobody, &group);
    expect_all_but_special(2, &group,
                           "rank 0 did not answer within 0.4 s in fsdp_ctl_send: it is gone, "
                           "stuck, or in another call" HINTED);
}

/* --- resources -------------------------------------------------------------------------------- */

Test(ctl, impossible_numbers_of_threads_are_refused)
{
    fsdp_error err = {0};
    cr_expect_eq(fsdp_ctl_run_threads(0, fail_alone, NULL, &err), FSDP_ERR_USAGE);
    cr_expect_eq(fsdp_ctl_run_threads(-1, fail_alone, NULL, &err), FSDP_ERR_USAGE);
    cr_expect_eq(fsdp_ctl_run_threads(1 << 20, fail_alone, NULL, &err), FSDP_ERR_USAGE);
}

Test(ctl, every_failed_allocation_of_setting_up_is_an_error)
{
    fsdp_ctl *ctls[4] = {0};
    fsdp_error err = {0};
    int failures = 0;
    for (int n = 0;; n++) {
        (void)fsdp_mem_fail_after(n, false);
        fsdp_status status = fsdp_ctl_threads(4, ctls, &err);
        (void)fsdp_mem_fail_after(-1, false);
        if (status == FSDP_OK)
            break;
        cr_expect_eq(status, FSDP_ERR_LIMIT);
        failures++;
    }
    cr_expect_eq(failures, 8, "%d allocations were made", failures);
    for (int i = 0; i < 4; i++)
        fsdp_ctl_free(ctls[i]);
}

static fsdp_status gather_and_agree(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    test_group *group = user;
    char data[8] = "", all[8 * 3];
    FSDP_TRY(fsdp_ctl_allgather(ctl, data, sizeof data, all, err));
    FSDP_TRY(fsdp_ctl_agree(ctl, FSDP_OK, err));
    atomic_fetch_add(&group->reached, 1);
    return FSDP_OK;
}

/* The rank without memory says so; it does not leave the others waiting for their deadline. */
Test(ctl, a_failed_allocation_on_any_rank_at_any_point_is_everybody_s_error)
{
    int64_t start_ms = fsdp_now_ms();
    int failures = 0;
    for (int n = 0;; n++) {
        test_group group = {0};
        fsdp_error err = {0};
        (void)fsdp_mem_fail_after(n, false);
        fsdp_status status = fsdp_ctl_run_threads(3, gather_and_agree, &group, &err);
        (void)fsdp_mem_fail_after(-1, false);
        if (status == FSDP_OK)
            break;
        cr_expect_eq(status, FSDP_ERR_LIMIT, "allocation %d: %s", n, err.text);
        cr_expect_lt(atomic_load(&group.reached), 3);
        failures++;
    }
    cr_expect_gt(failures, 20);
    cr_expect_lt(fsdp_now_ms() - start_ms, FSDP_CTL_DEADLINE_MS);
}
