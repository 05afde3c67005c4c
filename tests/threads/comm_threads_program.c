/*
 * Collectives between threads as a plain program, so that ThreadSanitizer can watch them: random
 * calls on 1 to 8 ranks, and ranks that fail, leave or abort in the middle of them, whose buffers
 * are freed at once. With "tcp" the ranks share no memory, but are connected over TCP.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/rounds/comm_rounds.h"
#include "tests/support/ranks/rank_threads.h"

enum { RANKS = 4, COUNT = 200000 };

static int failures;

static void expect(bool holds, const char *what, int n, const fsdp_error *err)
{
    if (holds)
        return;
    failures++;
    fprintf(stderr, "%s, %d ranks: status %d, '%s'\n", what, n, (int)err->status, err->text);
}

static fsdp_status run_rounds(rank_thread *rank, fsdp_error *err)
{
    return run_comm_rounds(rank->comm, rank->user, err);
}

static void run_random_calls(void)
{
    for (int n = 1; n <= 8; n++) {
        comm_rounds rounds = {.seed = (uint64_t)n, .rounds = 20, .max_count = 6000};
        fsdp_error err = {0};
        expect(run_rank_threads_well(n, run_rounds, &rounds, &err) == FSDP_OK, "random calls", n,
               &err);
    }
}

/* A fault in the middle of collectives: the rank, its way to fail, and the round. */
typedef struct trouble {
    int rank, how, at;
} trouble;

static void *abort_soon(void *user)
{
    const fsdp_error why = {.status = FSDP_ERR_CANCELLED, .text = "enough"};
    usleep(300);
    fsdp_comm_abort(user, &why);
    return NULL;
}

static fsdp_status reduce(fsdp_comm *comm, int64_t count, fsdp_error *err)
{
    float *in = calloc((size_t)count + 1, sizeof *in),
          *out = calloc((size_t)count + 1, sizeof *out);
    fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                            .dtype = FSDP_F32,
                            .in = in,
                            .out = out,
                            .count = count,
                            .unit = "layers.0"};
    fsdp_comm_handle *handle = NULL;
    fsdp_status status = fsdp_comm_rank(comm) % 2 ? fsdp_comm_start(comm, &call, &handle, err)
                                                  : fsdp_comm_run(comm, &call, err);
    if (status == FSDP_OK)
        status = fsdp_comm_wait(&handle, err);
    free(in);
    free(out);
    return status;
}

static fsdp_status run_into_trouble(rank_thread *rank, fsdp_error *err)
{
    const trouble *now = rank->user;
    pthread_t thread;
    bool has_thread = false;
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < 200 && status == FSDP_OK; i++) {
        bool is_now = rank->rank == now->rank && i == now->at;
        if (is_now && now->how == 0)
            return fsdp_fail(err, FSDP_ERR_CANCELLED, "left");
        if (is_now && now->how == 1)
            has_thread = pthread_create(&thread, NULL, abort_soon, rank->comm) == 0;
        status = reduce(rank->comm, is_now && now->how == 2 ? 5 : COUNT, err);
    }
    if (has_thread)
        pthread_join(thread, NULL);
    fsdp_error again = {0};
    if (reduce(rank->comm, 1, &again) != status || strcmp(again.text, err->text) != 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "then '%.400s'", again.text);
    return status;
}

static void run_troubles(void)
{
    static const char *const texts[] = {"has left", "enough", "layers.0"};
    for (int i = 0; i < 18; i++) {
        trouble now = {.rank = i % RANKS, .how = i % 3, .at = i / 3};
        rank_thread ranks[RANKS];
        fsdp_error err = {0};
        if (!run_rank_threads(RANKS, 20000, run_into_trouble, &now, ranks, &err))
            expect(false, "a world", RANKS, &err);
        for (int r = 0; r < RANKS; r++)
            expect(strstr(ranks[r].err.text, texts[now.how]) != NULL ||
                       (now.how == 0 && r == now.rank),
                   texts[now.how], RANKS, &ranks[r].err);
    }
}

/* Groups of two next to the group of all, each used by another thread at the same time. */
typedef struct comm_run {
    fsdp_comm *comm;
    comm_rounds rounds;
    fsdp_error err;
    fsdp_status status;
} comm_run;

static void *run_comm(void *user)
{
    comm_run *mine = user;
    mine->status = run_comm_rounds(mine->comm, &mine->rounds, &mine->err);
    return NULL;
}

static fsdp_status run_two_comms(rank_thread *rank, fsdp_error *err)
{
    comm_run all = {.comm = rank->comm, .rounds = {.seed = 5, .rounds = 20, .max_count = 3000}};
    comm_run pair = {.rounds = {.seed = 6, .rounds = 20, .max_count = 3000}};
    pthread_t thread;
    for (int first = 0; first < RANKS; first += 2) {
        fsdp_comm *made = NULL;
        const int ranks[] = {first + 1, first}; /* not in the order of the world */
        FSDP_TRY(rank->transport->ops->comm_create(rank->transport, ranks, 2, 1, &made, err));
        if (made)
            pair.comm = made;
    }
    if (pthread_create(&thread, NULL, run_comm, &pair) != 0)
        abort();
    run_comm(&all);
    pthread_join(thread, NULL);
    fsdp_comm_free(pair.comm);
    *err = all.status != FSDP_OK ? all.err : pair.err;
    return all.status != FSDP_OK ? all.status : pair.status;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "tcp") == 0)
        connect_rank_threads_over_tcp();
    run_random_calls();
    run_troubles();
    fsdp_error err = {0};
    expect(run_rank_threads_well(RANKS, run_two_comms, NULL, &err) == FSDP_OK, "two comms", RANKS,
           &err);
    printf("collectives between threads: %d failures\n", failures);
    return failures != 0;
}
