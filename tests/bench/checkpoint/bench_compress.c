/*
 * Row compress: f32 weights and Adam moments of one rank, compressed into one file on all cores,
 * next to libhdf5's own filter path. That side is a program of the tests, hdf5_filter_peer, since
 * tools do not use libhdf5.
 */
#include "tests/bench/rows.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct compress_job {
    const row_options *opts;
    const char *dir;
    fsdp_ctl *ctl;
    fsdp_sd *sd;
    char peer[BENCH_PATH]; /* "" when there is none */
    char values[BENCH_PATH], ours[BENCH_PATH], theirs[BENCH_PATH];
    int64_t bytes, stored, stored_by_peer;
} compress_job;

/* --- the two sides ---------------------------------------------------------------------------- */

static fsdp_status look_at_ours(compress_job *job, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint = NULL;
    FSDP_TRY(fsdp_checkpoint_open(job->ours, &(fsdp_open_opts){.access = *cli_access()},
                                  &checkpoint, err));
    job->stored = fsdp_checkpoint_describe(checkpoint)->file_bytes;
    job->bytes = fsdp_checkpoint_describe(checkpoint)->tensor_bytes;
    fsdp_checkpoint_close(checkpoint);
    return bench_prove_path(job->ours, job->opts->seed, err);
}

static fsdp_status run_ours(compress_job *job, bench_times *times, fsdp_error *err)
{
    static const int64_t step = BENCH_STEP;
    fsdp_save_opts save = {0};
    save.compress = true;
    save.skip_fsync = true;
    save.step = &step;
    save.threads = job->opts->common.jobs;
    save.memory = job->opts->common.memory;
    FSDP_TRY(cli_check_stop(err));
    FSDP_TRY(bench_settle(job->dir, err));
    bench_clock began = bench_now();
    FSDP_TRY(fsdp_sd_save(job->sd, job->ctl, job->ours, &save, err));
    bench_add_time(times, &began);
    FSDP_TRY(look_at_ours(job, err));
    return bench_remove(job->ours, err);
}

static fsdp_status run_peer(compress_job *job, bench_times *times, fsdp_error *err)
{
    char output[80], *argv[] = {job->peer, job->values, job->theirs, NULL};
    double seconds, cpu;
    if (!job->peer[0])
        return FSDP_OK;
    FSDP_TRY(cli_check_stop(err));
    FSDP_TRY(bench_settle(job->dir, err));
    FSDP_TRY(bench_run_program(argv, output, sizeof output, err));
    if (sscanf(output, "%lf %lf %" SCNd64, &seconds, &cpu, &job->stored_by_peer) != 3)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' printed '%s'", job->peer, output);
    times->cpu[times->count] = cpu;
    times->seconds[times->count++] = seconds;
    return bench_remove(job->theirs, err);
}

/* --- the row ---------------------------------------------------------------------------------- */

static fsdp_status print_outcome(const compress_job *job, const bench_times *ours,
                                 const bench_times *plain, fsdp_error *err)
{
    bool has_peer = plain->count > 0;
    bench_row row = {.work = "compress",
                     .ours = ours,
                     .plain = has_peer ? plain : NULL,
                     .peak_kib = bench_peak_kib()};
    (void)err;
    bench_want_ratio(&row, 4);
    snprintf(row.goal, sizeof row.goal, "ratio >= 4.00, stored no more");
    row.met = row.met && job->stored <= job->stored_by_peer;
    if (has_peer)
        snprintf(row.against, sizeof row.against,
                 "HDF5's zstd filter, level 1: stored %.3f, ours %.3f",
                 (double)job->stored_by_peer / (double)job->bytes,
                 (double)job->stored / (double)job->bytes);
    else
        snprintf(row.against, sizeof row.against, "no hdf5_filter_peer: --peer PROGRAM");
    fsdp_text_addf(&row.more, ", \"bytes\": %" PRId64 ", \"stored_bytes\": %" PRId64, job->bytes,
                   job->stored);
    if (has_peer)
        fsdp_text_addf(&row.more, ", \"against_stored_bytes\": %" PRId64, job->stored_by_peer);
    return bench_print_row(job->opts, &row);
}

static fsdp_status measure(compress_job *job, fsdp_error *err)
{
    bench_times ours = {0}, plain = {0};
    for (int round = -1; round < job->opts->rounds; round++) {
        FSDP_TRY(run_ours(job, &ours, err));
        FSDP_TRY(run_peer(job, &plain, err));
        if (round < 0) /* the round that does not count */
            ours.count = plain.count = 0;
    }
    return print_outcome(job, &ours, &plain, err);
}

/* --- setting up ------------------------------------------------------------------------------- */

/* The peer, and HDF5's plugin in the build tree. */
static void find_peer(compress_job *job)
{
    char plugin[BENCH_PATH];
    bench_find_peer("../plugin", plugin);
    setenv("HDF5_PLUGIN_PATH", plugin, 0);
    if (job->opts->peer)
        snprintf(job->peer, sizeof job->peer, "%s", job->opts->peer);
    else
        bench_find_peer("hdf5_filter_peer", job->peer);
    if (!job->opts->peer && access(job->peer, X_OK) != 0)
        job->peer[0] = '\0';
}

static fsdp_status prepare(compress_job *job, fsdp_error *err)
{
    bench_model model;
    bench_state_opts state = {
        .world = 1, .no_groups = true, .seed = job->opts->seed, .step = BENCH_STEP};
    find_peer(job);
    bench_path(job->values, job->dir, "values");
    bench_path(job->ours, job->dir, "ours");
    bench_path(job->theirs, job->dir, "theirs.h5");
    FSDP_TRY(bench_model_init_plain(&model, BENCH_TENSORS / 3, job->opts->size / 3, err));
    fsdp_status st = bench_make_shards(&model, &state, 0, &job->sd, err);
    bench_model_release(&model);
    if (st == FSDP_OK)
        st = bench_write_plain(job->sd, 0, job->values, 4 << 20, false, err);
    return st == FSDP_OK ? fsdp_ctl_self(&job->ctl, err) : st;
}

fsdp_status bench_compress_rows(const row_options *opts, const char *dir, fsdp_error *err)
{
    compress_job job = {.opts = opts, .dir = dir};
    fsdp_status st = prepare(&job, err);
    if (st == FSDP_OK)
        st = measure(&job, err);
    fsdp_ctl_free(job.ctl);
    fsdp_sd_free(job.sd);
    return st;
}
