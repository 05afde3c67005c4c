/*
 * Rows load-same, load-same-off, load-dim-4, load-dim-8 and load-dim-4-off: what four ranks saved,
 * cut along dim 0, is loaded by ranks that are threads, into memory they had before, next to as many
 * threads that read the same bytes of the same files into the same memory.
 */
#include "tests/bench/rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SAVED_BY = 4 };

typedef struct load_case {
    const char *work;
    int world, shard_dim;
    fsdp_check_mode check;
    double goal;
    bool exact_reads; /* at most 1.02 of the needed bytes may be read */
} load_case;

static const load_case cases[] = {
    {"load-same", 4, 0, FSDP_CHECK_BLOCKS, 0.70, false},
    {"load-same-off", 4, 0, FSDP_CHECK_OFF, 0.90, false},
    {"load-dim-4", 4, 1, FSDP_CHECK_BLOCKS, 0.50, true},
    {"load-dim-8", 8, 1, FSDP_CHECK_BLOCKS, 0.50, true},
    {"load-dim-4-off", 4, 1, FSDP_CHECK_OFF, 0.60, true},
};

typedef struct load_job {
    const row_options *opts;
    const bench_model *model;
    const load_case *kind;
    const char *checkpoint;
    char *files[SAVED_BY];
} load_job;

/* One rank's view of a row. */
typedef struct load_rank {
    const load_job *job;
    fsdp_ctl *ctl;
    fsdp_sd *sd;
    int rank;
} load_rank;

/* --- the two sides ---------------------------------------------------------------------------- */

/* Overwrites every element, so that only a load can make it right. */
static fsdp_status spoil(void *context, fsdp_error *err)
{
    const load_rank *r = context;
    (void)err;
    for (size_t i = 0; i < fsdp_sd_count(r->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(r->sd, i);
        if (entry->kind == FSDP_ENTRY_TENSOR && entry->data)
            memset(entry->data, 0xA5, (size_t)fsdp_entry_local_bytes(entry, r->rank));
    }
    return FSDP_OK;
}

static fsdp_status load_ours(void *context, fsdp_error *err)
{
    const load_rank *r = context;
    fsdp_load_opts load = {.check = r->job->kind->check,
                           .access = *cli_access(),
                           .threads = r->job->opts->common.jobs,
                           .memory = r->job->opts->common.memory};
    return fsdp_sd_load(r->sd, r->ctl, r->job->checkpoint, &load, err);
}

static fsdp_status prove_ours(void *context, fsdp_error *err)
{
    const load_rank *r = context;
    return bench_state_compare(r->sd, r->rank, r->job->opts->seed, BENCH_STEP, err);
}

static int64_t local_bytes(const fsdp_sd *sd, int rank)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        if (fsdp_sd_at(sd, i)->kind == FSDP_ENTRY_TENSOR)
            bytes += fsdp_entry_local_bytes(fsdp_sd_at(sd, i), rank);
    return bytes;
}

/* Each thread reads its part of the files. */
static fsdp_status read_plain(void *context, int64_t piece, fsdp_error *err)
{
    const load_rank *r = context;
    bench_file_row files = {.paths = r->job->files, .count = SAVED_BY};
    for (int rank = 0; rank < r->rank; rank++)
        files.first += local_bytes(r->sd, rank);
    return bench_read_plain(r->sd, r->rank, &files, piece, err);
}

/* --- rows ------------------------------------------------------------------------------------- */

static int64_t needed_bytes(const load_rank *r)
{
    int64_t bytes = 0;
    for (int rank = 0; rank < r->job->kind->world; rank++)
        bytes += local_bytes(r->sd, rank);
    return bytes;
}

static fsdp_status print_outcome(const load_rank *r, const bench_outcome *outcome)
{
    const load_case *kind = r->job->kind;
    int best = bench_best_piece(outcome);
    bench_row row = {.ours = &outcome->ours,
                     .plain = &outcome->plain[best],
                     .bytes_read = outcome->bytes_read,
                     .bytes_needed = needed_bytes(r),
                     .peak_kib = bench_peak_kib()};
    snprintf(row.work, sizeof row.work, "%s", kind->work);
    snprintf(row.against, sizeof row.against, "pread, %d threads, pieces of %d KiB", kind->world,
             (int)(bench_pieces[best] >> 10));
    bench_want_ratio(&row, kind->goal);
    if (kind->exact_reads) {
        size_t size = strlen(row.goal);
        snprintf(row.goal + size, sizeof row.goal - size, ", read <= 1.02 x needed");
        row.met = row.met && (double)row.bytes_read <= 1.02 * (double)row.bytes_needed;
    }
    return bench_print_row(r->job->opts, &row);
}

static fsdp_status measure_row(load_rank *r, fsdp_error *err)
{
    bench_outcome *outcome = calloc(1, sizeof *outcome);
    bench_contest contest = {.ctl = r->ctl,
                             .rounds = r->job->opts->rounds,
                             .context = r,
                             .prepare = spoil,
                             .ours = load_ours,
                             .prove = prove_ours,
                             .plain = read_plain};
    if (!outcome)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for times");
    fsdp_status st = bench_contest_run(&contest, outcome, err);
    if (st == FSDP_OK && r->rank == 0)
        st = print_outcome(r, outcome);
    free(outcome);
    return fsdp_ctl_agree(r->ctl, st, err);
}

static fsdp_status run_rank(void *context, fsdp_ctl *ctl, fsdp_error *err)
{
    load_rank r = {.job = context, .ctl = ctl, .rank = fsdp_ctl_rank(ctl)};
    bench_state_opts state = {.world = r.job->kind->world,
                              .shard_dim = r.job->kind->shard_dim,
                              .weights_only = true,
                              .seed = r.job->opts->seed,
                              .step = BENCH_STEP};
    fsdp_status st = bench_make_shards(r.job->model, &state, r.rank, &r.sd, err);
    st = fsdp_ctl_agree(ctl, st, err);
    if (st == FSDP_OK)
        st = measure_row(&r, err);
    fsdp_sd_free(r.sd);
    return st;
}

static fsdp_status measure_cases(load_job *job, fsdp_error *err)
{
    bench_state_opts state = {
        .world = SAVED_BY, .weights_only = true, .seed = job->opts->seed, .step = BENCH_STEP};
    FSDP_TRY(bench_save_model(job->opts, job->model, &state, job->checkpoint, err));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        job->kind = &cases[i];
        FSDP_TRY(bench_run_ranks(job->opts->deadline_ms, cases[i].world, run_rank, job, err));
    }
    return FSDP_OK;
}

fsdp_status bench_load_rows(const row_options *opts, const char *dir, fsdp_error *err)
{
    bench_model model;
    char checkpoint[BENCH_PATH], files[SAVED_BY][BENCH_PATH];
    load_job job = {.opts = opts, .model = &model, .checkpoint = checkpoint};
    bench_path(checkpoint, dir, "saved");
    for (int i = 0; i < SAVED_BY; i++) {
        char name[40];
        snprintf(name, sizeof name, "shard-%05d-of-%05d.h5", i, SAVED_BY);
        bench_path(files[i], checkpoint, name);
        job.files[i] = files[i];
    }
    FSDP_TRY(bench_model_init_plain(&model, BENCH_TENSORS, opts->size, err));
    fsdp_status st = measure_cases(&job, err);
    bench_model_release(&model);
    return st;
}
