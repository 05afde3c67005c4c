/*
 * Commands whose ranks fsdp_launch starts: collectives, unshard, and the copies of a step. Options are
 * parsed before; fsdp_launch finds its own in the same command line.
 */
#include "tools/bench/bench.h"

#include <stdio.h>
#include <stdlib.h>

enum { PATIENCE_MS = 600000 };

typedef struct launched_work {
    const bench_options *opts;
    bench_world_body body;
} launched_work;

static int run_rank(void *context, fsdp_world *world, int argc, char **argv)
{
    const launched_work *work = context;
    fsdp_error err = {0};
    (void)argc, (void)argv;
    fsdp_ctl_set_deadline(fsdp_world_ctl(world), PATIENCE_MS);
    fsdp_status st = work->body(world, work->opts, &err);
    (void)fsdp_world_fail(world, &err);
    int code = bench_end_rank(fsdp_world_rank(world), st, &err);
    fflush(NULL);
    return code;
}

_Noreturn void bench_launch(const bench_options *opts, bench_world_body body)
{
    launched_work work = {opts, body};
    exit(fsdp_launch(opts->argc, opts->argv, run_rank, &work));
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
