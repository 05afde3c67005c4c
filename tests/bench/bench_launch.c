/*
 * Commands whose ranks fsdp_launch starts: those that measure training. Options are parsed before;
 * fsdp_launch finds its own in the same command line.
 */
#include "tests/bench/rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATIENCE_MS = 600000 };

typedef struct launched_work {
    const row_options *opts;
    bench_world_body body;
    pid_t starter; /* its lone rank leaves the end of the output to others; 0: none does */
    bool was_alone;
} launched_work;

static int run_rank(void *context, fsdp_world *world, int argc, char **argv)
{
    launched_work *work = context;
    fsdp_error err = {0};
    (void)argc, (void)argv;
    fsdp_ctl_set_deadline(fsdp_world_ctl(world), PATIENCE_MS);
    fsdp_status st = work->body(world, work->opts, &err);
    if (st == FSDP_OK && fsdp_world_size(world) == 1 && work->starter == getpid()) {
        work->was_alone = true;
        return 0;
    }
    (void)fsdp_world_fail(world, &err);
    int code = bench_end_rank(fsdp_world_rank(world), st, &err);
    fflush(NULL);
    return code;
}

_Noreturn void bench_launch(const row_options *opts, bench_world_body body)
{
    launched_work work = {.opts = opts, .body = body};
    exit(fsdp_launch(opts->argc, opts->argv, run_rank, &work));
}

_Noreturn void bench_launch_twice(const row_options *opts, bench_world_body body, int ranks)
{
    launched_work work = {.opts = opts, .body = body};
    char count[16];
    size_t words = (size_t)opts->argc;
    char **argv = calloc(words + 3, sizeof *argv);
    if (!opts->counts_ranks && !getenv("FSDP_NP") && !getenv("FSDP_THREADS"))
        work.starter = getpid();
    fsdp_error err = {0};
    if (!argv)
        exit(cli_end(fsdp_fail(&err, FSDP_ERR_LIMIT, "out of memory"), &err));
    int code = fsdp_launch(opts->argc, opts->argv, run_rank, &work);
    if (code == 0 && work.was_alone) {
        snprintf(count, sizeof count, "%d", ranks);
        argv[0] = opts->argv[0], argv[1] = "--np", argv[2] = count;
        memcpy(argv + 3, opts->argv + 1, (words - 1) * sizeof *argv);
        work.starter = 0;
        code = fsdp_launch(opts->argc + 2, argv, run_rank, &work);
    }
    free(argv);
    exit(code);
}

fsdp_status bench_barrier(fsdp_comm *comm, fsdp_error *err)
{
    uint8_t nothing = 0;
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = FSDP_U8,
                                  .in = &nothing,
                                  .out = &nothing,
                                  .op = FSDP_REDUCE_MAX,
                                  .count = 1};
    return fsdp_comm_run(comm, &call, err);
}

fsdp_status bench_peak_of_ranks(fsdp_ctl *ctl, int64_t *kib_out, fsdp_error *err)
{
    int ranks = fsdp_ctl_size(ctl);
    int64_t mine = bench_peak_kib(), *all = calloc((size_t)ranks, sizeof *all);
    fsdp_status st = all ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    st = fsdp_ctl_agree(ctl, st, err);
    if (st == FSDP_OK)
        st = fsdp_ctl_allgather(ctl, &mine, sizeof mine, all, err);
    *kib_out = mine;
    for (int i = 0; i < ranks && st == FSDP_OK; i++)
        *kib_out = all[i] > *kib_out ? all[i] : *kib_out;
    free(all);
    return st;
}
