/* Ranks: the processes that mpirun started, else threads of this process. */
#include "tools/bench/bench.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int bench_mpi_world(void)
{
    return cli_mpi_find().size;
}

int bench_mpi_local_world(void)
{
    const cli_mpi mpi = cli_mpi_find();
    return mpi.local_size > 0 ? mpi.local_size : mpi.size;
}

typedef struct rank_job {
    int deadline_ms;
    fsdp_rank_body body;
    void *context;
} rank_job;

static fsdp_status run_rank(void *context, fsdp_ctl *ctl, fsdp_error *err)
{
    const rank_job *job = context;
    if (job->deadline_ms > 0)
        fsdp_ctl_set_deadline(ctl, job->deadline_ms);
    return job->body(job->context, ctl, err);
}

/* Otherwise each process would be a world of its own, and all would write the same files. */
static fsdp_status check_world(const fsdp_ctl *ctl, fsdp_error *err)
{
    const cli_mpi mpi = cli_mpi_find();
    if (fsdp_ctl_size(ctl) == mpi.size)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%s is %d, but MPI itself has %d ranks; use mpirun of the MPI that fsdp-bench "
                     "was built with; inside a job, run it with 'env -u %s fsdp-bench ...'",
                     mpi.size_name, mpi.size, fsdp_ctl_size(ctl), mpi.size_name);
}

static fsdp_status run_mpi_rank(rank_job *job, fsdp_error *err)
{
    fsdp_ctl *ctl = NULL;
    FSDP_TRY(bench_mpi_begin(job->deadline_ms, &ctl, err));
    fsdp_status st = check_world(ctl, err);
    if (st == FSDP_OK)
        st = run_rank(job, ctl, err);
    fsdp_ctl_free(ctl);
    return st;
}

fsdp_status bench_run_ranks(int deadline_ms, int world, fsdp_rank_body body, void *context,
                            fsdp_error *err)
{
    rank_job job = {deadline_ms, body, context};
    return bench_mpi_world() > 0 ? run_mpi_rank(&job, err)
                                 : fsdp_ctl_run_threads(world, run_rank, &job, err);
}

static bool has_items;

void bench_begin_item(fsdp_text *text, const char *list)
{
    if (has_items)
        fsdp_text_addf(text, ",\n ");
    else
        fsdp_text_addf(text, "{\"schema\": 1, \"%s\": [\n ", list);
    has_items = true;
}

static void end_items(fsdp_status status, const fsdp_error *err)
{
    fsdp_text text = {0};
    if (!has_items)
        return;
    fsdp_text_addf(&text, "]");
    if (status != FSDP_OK) {
        fsdp_text_addf(&text, ", ");
        cli_add_json_error(&text, status, err);
    }
    fsdp_text_addf(&text, "}\n");
    (void)cli_put_end(&text);
}

/* Rank 0 reports a failure for all ranks. After a lost rank each reports its error, as they may differ. */
int bench_end_rank(int rank, fsdp_status status, const fsdp_error *err)
{
    if (rank == 0) {
        end_items(status, err);
        return cli_end(status, err);
    }
    if (status == FSDP_ERR_PEER)
        return fsdp_error_report(err);
    return cli_stopped() ? 128 + cli_stopped() : (int)status;
}

_Noreturn void bench_exit(fsdp_status status, const fsdp_error *err)
{
    int code = bench_end_rank(cli_mpi_find().rank, status, err);
    fflush(NULL);
    if (bench_mpi_world() > 0 && !bench_mpi_end())
        _exit(code);
    exit(code);
}

int bench_cores(void)
{
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) != 0)
        return (int)sysconf(_SC_NPROCESSORS_ONLN);
    return CPU_COUNT(&cores);
}
