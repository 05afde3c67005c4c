/*
 * Rows reshard-8-6 and reshard-8-6-noverify: an offline conversion, durable, against `cp -r` and an
 * fsync of every file. Each side runs in a child process, so that its peak memory can be measured.
 */
#include "tests/bench/rows.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { FROM = 8, TO = 6 };

typedef struct reshard_job {
    const row_options *opts;
    bool skip_verify;
    char dir[BENCH_PATH], from[BENCH_PATH], to[BENCH_PATH];
    bench_child_result *worst; /* of the conversions: largest peak, bytes read */
} reshard_job;

/* --- work for processes ----------------------------------------------------------------------- */

static fsdp_status save_source(void *context, bench_child_result *result, fsdp_error *err)
{
    const reshard_job *job = context;
    bench_model model;
    bench_state_opts state = {
        .world = FROM, .weights_only = true, .seed = job->opts->seed, .step = BENCH_STEP};
    (void)result;
    FSDP_TRY(bench_model_init_plain(&model, BENCH_TENSORS, job->opts->size, err));
    return bench_save_model(job->opts, &model, &state, job->from, err);
}

static fsdp_status convert(void *context, bench_child_result *result, fsdp_error *err)
{
    const reshard_job *job = context;
    fsdp_convert_opts convert = {.kind = FSDP_SHARDED,
                                 .open.access = *cli_access(),
                                 .world = TO,
                                 .skip_verify = job->skip_verify,
                                 .threads = job->opts->common.jobs,
                                 .memory = job->opts->common.memory};
    int64_t read_before = bench_bytes_read();
    bench_clock began = bench_now();
    FSDP_TRY(fsdp_checkpoint_convert(job->from, job->to, &convert, err));
    bench_add_time(&result->times, &began);
    result->bytes_read = bench_bytes_read() - read_before;
    return FSDP_OK;
}

static fsdp_status prove(void *context, bench_child_result *result, fsdp_error *err)
{
    const reshard_job *job = context;
    (void)result;
    return bench_prove_path(job->to, job->opts->seed, err);
}

static fsdp_status copy(void *context, bench_child_result *result, fsdp_error *err)
{
    const reshard_job *job = context;
    bench_clock began = bench_now();
    FSDP_TRY(bench_copy_plain(job->from, job->to, err));
    bench_add_time(&result->times, &began);
    return FSDP_OK;
}

/* --- rounds ----------------------------------------------------------------------------------- */

static fsdp_status run_side(reshard_job *job, bench_child_work side, bench_times *times,
                            bench_child_result *result, fsdp_error *err)
{
    FSDP_TRY(cli_check_stop(err));
    FSDP_TRY(bench_settle(job->dir, err));
    FSDP_TRY(bench_in_child(side, job, result, err));
    times->cpu[times->count] = result->times.cpu[0];
    times->seconds[times->count++] = result->times.seconds[0];
    if (side == convert) {
        bench_child_result ignored;
        FSDP_TRY(bench_in_child(prove, job, &ignored, err));
    }
    return bench_remove(job->to, err);
}

static void note_worst(bench_child_result *worst, const bench_child_result *result)
{
    if (result->peak_kib > worst->peak_kib)
        worst->peak_kib = result->peak_kib;
    worst->bytes_read = result->bytes_read;
}

static void judge(const row_options *opts, bench_row *row)
{
    int64_t memory = opts->common.memory > 0 ? opts->common.memory : FSDP_MEMORY_DEFAULT;
    int64_t limit_kib = (memory >> 10) + (32 << 10);
    bench_want_ratio(row, 0.80);
    snprintf(row->goal, sizeof row->goal, "ratio >= 0.80, peak <= %" PRId64 " KiB", limit_kib);
    row->met = row->met && row->peak_kib <= limit_kib;
}

static fsdp_status measure_row(reshard_job *job, const char *work, fsdp_error *err)
{
    bench_times ours = {0}, plain = {0};
    bench_child_result result, worst = {0};
    for (int round = -1; round < job->opts->rounds; round++) {
        FSDP_TRY(run_side(job, convert, &ours, &result, err));
        note_worst(&worst, &result);
        FSDP_TRY(run_side(job, copy, &plain, &result, err));
        if (round < 0) /* the round that does not count */
            ours.count = plain.count = 0;
    }
    bench_row row = {.ours = &ours,
                     .plain = &plain,
                     .bytes_read = worst.bytes_read,
                     .bytes_needed = BENCH_TENSORS * (job->opts->size / BENCH_TENSORS),
                     .peak_kib = worst.peak_kib};
    snprintf(row.work, sizeof row.work, "%s", work);
    snprintf(row.against, sizeof row.against, "cp -r + fsync of every file");
    judge(job->opts, &row);
    return bench_print_row(job->opts, &row);
}

fsdp_status bench_reshard_rows(const row_options *opts, const char *dir, fsdp_error *err)
{
    reshard_job job = {.opts = opts};
    bench_child_result ignored;
    snprintf(job.dir, sizeof job.dir, "%s", dir);
    bench_path(job.from, dir, "from");
    bench_path(job.to, dir, "to");
    FSDP_TRY(bench_in_child(save_source, &job, &ignored, err));
    FSDP_TRY(measure_row(&job, "reshard-8-6", err));
    job.skip_verify = true;
    return measure_row(&job, "reshard-8-6-noverify", err);
}
