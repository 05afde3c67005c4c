/*
 * Rows save-durable-N, save-N and many-save: a sharded save by N ranks next to N plain writers of the
 * same memory. Ranks are threads on both sides, or under mpirun processes on both sides.
 */
#include "tests/bench/rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct save_job {
    const row_options *opts;
    const bench_model *model;
    const char *dir; /* NULL: rank 0 makes one */
    bool many;
    int world;
} save_job;

/* One rank's view of a row. */
typedef struct save_rank {
    const save_job *job;
    fsdp_ctl *ctl;
    fsdp_sd *sd;
    int rank;
    bool sync;
    char dir[BENCH_PATH], ours[BENCH_PATH], plain[BENCH_PATH];
} save_rank;

/* --- the two sides ---------------------------------------------------------------------------- */

static fsdp_status settle(void *context, fsdp_error *err)
{
    const save_rank *r = context;
    return r->rank == 0 ? bench_settle(r->dir, err) : FSDP_OK;
}

static fsdp_status save_ours(void *context, fsdp_error *err)
{
    const save_rank *r = context;
    static const int64_t step = BENCH_STEP;
    fsdp_save_opts save = {0};
    save.skip_fsync = !r->sync;
    save.step = &step;
    save.threads = r->job->opts->common.jobs;
    save.memory = r->job->opts->common.memory;
    return fsdp_sd_save(r->sd, r->ctl, r->ours, &save, err);
}

static fsdp_status prove_ours(void *context, fsdp_error *err)
{
    const save_rank *r = context;
    return r->rank == 0 ? bench_prove_path(r->ours, r->job->opts->seed, err) : FSDP_OK;
}

static fsdp_status write_plain(void *context, int64_t piece, fsdp_error *err)
{
    const save_rank *r = context;
    return bench_write_plain(r->sd, r->rank, r->plain, piece, r->sync, err);
}

static fsdp_status clean(void *context, fsdp_error *err)
{
    const save_rank *r = context;
    FSDP_TRY(bench_remove(r->plain, err));
    return r->rank == 0 ? bench_remove(r->ours, err) : FSDP_OK;
}

/* --- rows ------------------------------------------------------------------------------------- */

/* The goal for 40,000 objects in each of four files: 1.5 times the plain write, plus 5 seconds. */
static const double many_factor = 1.5, many_seconds = 5;

static void judge_many(bench_row *row)
{
    double limit = many_factor * bench_median(row->plain) + many_seconds;
    snprintf(row->goal, sizeof row->goal, "<= %.1f x against + %.0f s", many_factor, many_seconds);
    row->met = bench_median(row->ours) <= limit;
}

static fsdp_status print_outcome(const save_rank *r, const bench_outcome *outcome)
{
    const save_job *job = r->job;
    int best = bench_best_piece(outcome);
    bench_row row = {.ours = &outcome->ours,
                     .plain = &outcome->plain[best],
                     .bytes_read = outcome->bytes_read,
                     .peak_kib = bench_peak_kib()};
    snprintf(row.against, sizeof row.against, "pwrite%s, %d %s, pieces of %d KiB",
             r->sync ? "+fsync" : "", job->world, bench_mpi_world() > 0 ? "processes" : "threads",
             (int)(bench_pieces[best] >> 10));
    if (job->many) {
        snprintf(row.work, sizeof row.work, "many-save");
        judge_many(&row);
    } else {
        snprintf(row.work, sizeof row.work, "save-%s%d", r->sync ? "durable-" : "", job->world);
        bench_want_ratio(&row, 0.85);
    }
    return bench_print_row(job->opts, &row);
}

static fsdp_status measure_row(save_rank *r, bool sync, fsdp_error *err)
{
    bench_outcome *outcome = calloc(1, sizeof *outcome);
    bench_contest contest = {.ctl = r->ctl,
                             .rounds = r->job->opts->rounds,
                             .context = r,
                             .prepare = settle,
                             .ours = save_ours,
                             .prove = prove_ours,
                             .plain = write_plain,
                             .clean = clean};
    if (!outcome)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for times");
    r->sync = sync;
    fsdp_status st = bench_contest_run(&contest, outcome, err);
    if (st == FSDP_OK && r->rank == 0)
        st = print_outcome(r, outcome);
    free(outcome);
    return fsdp_ctl_agree(r->ctl, st, err);
}

/* --- ranks ------------------------------------------------------------------------------------ */

static fsdp_status name_directory(save_rank *r, fsdp_error *err)
{
    const save_job *job = r->job;
    char plain[40];
    if (job->dir)
        snprintf(r->dir, sizeof r->dir, "%s", job->dir);
    else
        FSDP_TRY(bench_make_directory(r->ctl, job->opts->dir, r->dir, err));
    snprintf(plain, sizeof plain, "plain-%d", r->rank);
    bench_path(r->ours, r->dir, "ours");
    bench_path(r->plain, r->dir, plain);
    return FSDP_OK;
}

static fsdp_status measure_rows(save_rank *r, fsdp_error *err)
{
    const save_job *job = r->job;
    bench_state_opts state = {.world = job->world,
                              .weights_only = !job->many,
                              .no_groups = true,
                              .seed = job->opts->seed,
                              .step = BENCH_STEP};
    fsdp_status st = bench_make_shards(job->model, &state, r->rank, &r->sd, err);
    FSDP_TRY(fsdp_ctl_agree(r->ctl, st, err));
    if (!job->many)
        FSDP_TRY(measure_row(r, true, err));
    return measure_row(r, false, err);
}

static fsdp_status run_rank(void *context, fsdp_ctl *ctl, fsdp_error *err)
{
    save_rank r = {.job = context, .ctl = ctl, .rank = fsdp_ctl_rank(ctl)};
    fsdp_error ignored;
    FSDP_TRY(name_directory(&r, err));
    fsdp_status st = measure_rows(&r, err);
    fsdp_sd_free(r.sd);
    if (r.rank == 0 && !r.job->dir && bench_remove(r.dir, &ignored) != FSDP_OK)
        cli_say("warn", "'%s' could not be removed", r.dir);
    return st;
}

static fsdp_status measure_world(const row_options *opts, const char *dir, int world,
                                 fsdp_error *err)
{
    bench_model model;
    save_job job = {.opts = opts, .model = &model, .dir = dir, .world = world};
    FSDP_TRY(bench_model_init_plain(&model, BENCH_TENSORS, opts->size, err));
    fsdp_status st = bench_run_ranks(opts->deadline_ms, world, run_rank, &job, err);
    bench_model_release(&model);
    return st;
}

fsdp_status bench_save_rows(const row_options *opts, const char *dir, fsdp_error *err)
{
    if (bench_mpi_world() > 0)
        return measure_world(opts, dir, bench_mpi_world(), err);
    FSDP_TRY(measure_world(opts, dir, 2, err));
    return measure_world(opts, dir, 4, err);
}

fsdp_status bench_measure_many_save(const row_options *opts, const bench_model *model,
                                    const char *dir, int world, fsdp_error *err)
{
    save_job job = {.opts = opts, .model = model, .dir = dir, .many = true, .world = world};
    return bench_run_ranks(opts->deadline_ms, world, run_rank, &job, err);
}
