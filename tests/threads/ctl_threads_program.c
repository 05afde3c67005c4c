/*
 * The control plane over threads as a plain program, so that ThreadSanitizer can watch it: random
 * calls on 1 to 16 ranks, and ranks that fail, leave or stay silent in the middle of them.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/rounds/ctl_rounds.h"
#include "statedict/ctl/ctl_backend.h"

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
    for (int n = 1; n <= 16; n++) {
        ctl_rounds rounds = {.seed = (uint64_t)n, .rounds = 60, .max_size = 40000};
        fsdp_error err = {0};
        fsdp_status status = fsdp_ctl_run_threads(n, run_ctl_rounds, &rounds, &err);
        expect(status == FSDP_OK, "random calls", n, &err);
    }
    ctl_rounds large = {.seed = 1, .rounds = 12, .max_size = 9 << 20};
    fsdp_error err = {0};
    expect(fsdp_ctl_run_threads(3, run_ctl_rounds, &large, &err) == FSDP_OK, "large data", 3, &err);
    expect(fsdp_ctl_run_threads(2, send_to_busy_rank, NULL, &err) == FSDP_OK, "busy", 2, &err);
}

/* One rank gives up after some rounds; no rank hangs, whatever call it is in. */
static fsdp_status give_up(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    ctl_rounds rounds = *(const ctl_rounds *)user;
    int n = fsdp_ctl_size(ctl);
    fsdp_ctl_set_deadline(ctl, 1000);
    if (fsdp_ctl_rank(ctl) != (int)(rounds.seed % (uint64_t)n))
        return run_ctl_rounds(&rounds, ctl, err);
    rounds.rounds = (int)(rounds.seed % 17);
    FSDP_TRY(run_ctl_rounds(&rounds, ctl, err));
    return fsdp_fail(err, FSDP_ERR_CANCELLED, "gave up");
}

static void run_ranks_that_give_up(void)
{
    for (int i = 0; i < 60; i++) {
        int n = 2 + i % 7;
        ctl_rounds rounds = {.seed = (uint64_t)i, .rounds = 40, .max_size = 4000};
        fsdp_error err = {0};
        fsdp_status status = fsdp_ctl_run_threads(n, give_up, &rounds, &err);
        expect(status == FSDP_ERR_CANCELLED && strcmp(err.text, "gave up") == 0, "giving up", n,
               &err);
    }
}

/* Every rank in another call: each must end with an error of the control plane. */
static fsdp_status call_by_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    char data[64] = "";
    (void)user;
    fsdp_ctl_set_deadline(ctl, 500);
    switch (fsdp_ctl_rank(ctl)) {
    case 0: return fsdp_ctl_barrier(ctl, err);
    case 1: return fsdp_ctl_allgather(ctl, data, 4, data, err);
    case 2: return fsdp_ctl_recv(ctl, 1, data, 4, err);
    default: return fsdp_ctl_broadcast(ctl, 3, data, 4, err);
    }
}

static void run_different_calls(void)
{
    for (int i = 0; i < 20; i++) {
        fsdp_error err = {0};
        fsdp_status status = fsdp_ctl_run_threads(4, call_by_rank, NULL, &err);
        expect(status == FSDP_ERR_USAGE && strstr(err.text, "same calls"), "mismatch", 4, &err);
    }
}

/*
 * Rank 0 is late and rank 2 even later, each within the deadline of the rank that waits for it.
 * Rank 1 waits longer than for a silent rank 0 (deadline and 2 s), since rank 0 reports that it
 * waits.
 */
static fsdp_status come_late(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    static const unsigned late_ms[] = {2500, 0, 5200};
    (void)user;
    fsdp_ctl_set_deadline(ctl, 3000);
    usleep(late_ms[fsdp_ctl_rank(ctl)] * 1000);
    FSDP_TRY(fsdp_ctl_barrier(ctl, err));
    return fsdp_ctl_barrier(ctl, err);
}

static void run_late_ranks(void)
{
    fsdp_error err = {0};
    expect(fsdp_ctl_run_threads(3, come_late, NULL, &err) == FSDP_OK, "late ranks", 3, &err);
}

int main(void)
{
    run_random_calls();
    run_ranks_that_give_up();
    run_different_calls();
    run_late_ranks();
    printf("control plane over threads: %d failures\n", failures);
    return failures != 0;
}
