/*
 * The control plane over TCP between threads, so that ThreadSanitizer can watch it: random calls, ranks
 * that give up, ranks in different calls.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "statedict/ctl/ctl_backend.h"
#include "tests/support/rounds/ctl_rounds.h"
#include "tests/support/ranks/rank_sockets.h"

enum { DEADLINE_MS = 20000 };

static int failures;

static void expect(bool holds, const char *what, int n, const fsdp_error *err)
{
    if (holds)
        return;
    failures++;
    fprintf(stderr, "%s, %d ranks: status %d, '%s'\n", what, n, (int)err->status, err->text);
}

static void run_random_calls(void)
{
    static const int sizes[] = {1, 2, 3, 4, 7, 12};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        ctl_rounds rounds = {.seed = i, .rounds = 40, .max_size = 40000};
        fsdp_error err = {0};
        fsdp_status status = run_rank_sockets(sizes[i], DEADLINE_MS, run_ctl_rounds, &rounds, &err);
        expect(status == FSDP_OK, "random calls", sizes[i], &err);
    }
    ctl_rounds large = {.seed = 1, .rounds = 10, .max_size = 5 << 20};
    fsdp_error err = {0};
    expect(run_rank_sockets(3, DEADLINE_MS, run_ctl_rounds, &large, &err) == FSDP_OK, "large data",
           3, &err);
    expect(run_rank_sockets(2, DEADLINE_MS, send_to_busy_rank, NULL, &err) == FSDP_OK, "busy", 2,
           &err);
}

/* One rank gives up after some rounds; no rank hangs, whatever call it is in. */
static fsdp_status give_up(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    ctl_rounds rounds = *(const ctl_rounds *)user;
    int n = fsdp_ctl_size(ctl);
    if (fsdp_ctl_rank(ctl) != (int)(rounds.seed % (uint64_t)n))
        return run_ctl_rounds(&rounds, ctl, err);
    rounds.rounds = (int)(rounds.seed % 17);
    FSDP_TRY(run_ctl_rounds(&rounds, ctl, err));
    return fsdp_fail(err, FSDP_ERR_CANCELLED, "gave up");
}

static void run_ranks_that_give_up(void)
{
    for (int i = 0; i < 24; i++) {
        int n = 2 + i % 5;
        ctl_rounds rounds = {.seed = (uint64_t)i, .rounds = 40, .max_size = 4000};
        fsdp_error err = {0};
        fsdp_status status = run_rank_sockets(n, 1000, give_up, &rounds, &err);
        expect(status == FSDP_ERR_CANCELLED && strcmp(err.text, "gave up") == 0, "giving up", n,
               &err);
    }
}

/* Every rank in another call: each must end with an error of the control plane. */
static fsdp_status call_by_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    char data[64] = "";
    (void)user;
    switch (fsdp_ctl_rank(ctl)) {
    case 0: return fsdp_ctl_barrier(ctl, err);
    case 1: return fsdp_ctl_allgather(ctl, data, 4, data, err);
    case 2: return fsdp_ctl_recv(ctl, 1, data, 4, err);
    default: return fsdp_ctl_broadcast(ctl, 3, data, 4, err);
    }
}

static void run_different_calls(void)
{
    for (int i = 0; i < 5; i++) {
        fsdp_error err = {0};
        fsdp_status status = run_rank_sockets(4, 500, call_by_rank, NULL, &err);
        expect(status == FSDP_ERR_USAGE && strstr(err.text, "same calls"), "mismatch", 4, &err);
    }
}

int main(void)
{
    run_random_calls();
    run_ranks_that_give_up();
    run_different_calls();
    printf("control plane over TCP: %d failures\n", failures);
    return failures != 0;
}
