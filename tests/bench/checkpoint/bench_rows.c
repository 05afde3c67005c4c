/*
 * Rows of docs/performance.md: printing, and the states that rows are measured with.
 *
 * The room bench_checkpoint takes row_options and measures saves, loads, conversions and checks with the
 * parts of rows.h; out come rows on standard output. bench.c calls it.
 */
#include "tests/bench/rows.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* --- printing --------------------------------------------------------------------------------- */

double bench_ratio(const bench_times *ours, const bench_times *plain)
{
    double seconds = bench_median(ours);
    return seconds > 0 ? bench_median(plain) / seconds : 0;
}

void bench_want_ratio(bench_row *row, double least)
{
    snprintf(row->goal, sizeof row->goal, "ratio >= %.2f", least);
    row->met = row->plain && bench_ratio(row->ours, row->plain) >= least;
}

/* null: it was not measured. */
static void add_times_json(fsdp_text *text, const char *name, const bench_times *times)
{
    if (times->count == 0) {
        fsdp_text_addf(text, ", \"%s_s\": null", name);
        return;
    }
    fsdp_text_addf(text, ", \"%s_s\": %.9f", name, bench_median(times));
}

static void add_range_json(fsdp_text *text, const char *name, const bench_times *times)
{
    fsdp_text_addf(text, ", \"%s_min_s\": %.6f, \"%s_max_s\": %.6f, \"%s_cpu_s\": %.6f", name,
                   bench_shortest(times), name, bench_longest(times), name,
                   bench_median_cpu(times));
}

static void add_row_json(fsdp_text *text, const bench_row *row)
{
    if (!row->stands_alone)
        bench_begin_item(text, "rows");
    fsdp_text_addf(text, "{\"work\": \"%s\"", row->work);
    add_times_json(text, "ours", row->ours);
    fsdp_text_addf(text, ", \"against\": ");
    if (row->against[0])
        fsdp_text_add_json_string(text, row->against, strlen(row->against));
    else
        fsdp_text_addf(text, "null");
    if (row->plain) {
        add_times_json(text, "against", row->plain);
        fsdp_text_addf(text, ", \"ratio\": %.4f", bench_ratio(row->ours, row->plain));
    } else {
        fsdp_text_addf(text, ", \"against_s\": null, \"ratio\": null");
    }
    fsdp_text_addf(text, ", \"goal\": \"%s\", \"met\": %s", row->goal, row->met ? "true" : "false");
    fsdp_text_addf(text,
                   ", \"bytes_read\": %" PRId64 ", \"bytes_needed\": %" PRId64
                   ", \"peak_kib\": %" PRId64,
                   row->bytes_read, row->bytes_needed, row->peak_kib);
    fsdp_text_addf(text, ", \"rounds\": %d", row->ours->count);
    add_range_json(text, "ours", row->ours);
    if (row->plain)
        add_range_json(text, "against", row->plain);
    fsdp_text_add(text, row->more.data ? row->more.data : "", row->more.size);
    fsdp_text_addf(text, row->stands_alone ? "}\n" : "}");
}

static void add_row(fsdp_text *text, const bench_row *row)
{
    fsdp_text_addf(text, "%-26s ", row->work);
    if (row->ours->count > 0)
        fsdp_text_addf(text, "%9.6f s (cpu %9.6f)", bench_median(row->ours),
                       bench_median_cpu(row->ours));
    else
        fsdp_text_addf(text, "%11s %15s", "-", "");
    if (row->plain)
        fsdp_text_addf(text, "  %9.6f s (cpu %9.6f)  ratio %5.2f", bench_median(row->plain),
                       bench_median_cpu(row->plain), bench_ratio(row->ours, row->plain));
    else
        fsdp_text_addf(text, "  %11s %14s  %11s", "-", "", "");
    if (row->goal[0])
        fsdp_text_addf(text, "  %-6s %s", row->met ? "met" : "missed", row->goal);
    if (row->against[0])
        fsdp_text_addf(text, "; %s", row->against);
    fsdp_text_addf(text, "\n");
}

fsdp_status bench_print_row(const row_options *opts, bench_row *row)
{
    fsdp_text text = {0};
    cli_progress_clear();
    if (opts->common.json)
        add_row_json(&text, row);
    else
        add_row(&text, row);
    fsdp_text_release(&row->more);
    fsdp_status st = cli_put_all(&text);
    fflush(stdout);
    return st;
}

/* --- states that rows work with --------------------------------------------------------------- */

fsdp_status bench_make_shards(const bench_model *model, const bench_state_opts *state, int rank,
                              fsdp_sd **sd_out, fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    FSDP_TRY(bench_state_create(model, state, &sd, err));
    fsdp_status st = fsdp_sd_allocate(sd, rank, err);
    if (st == FSDP_OK)
        st = bench_state_fill(sd, rank, state->seed, state->step, err);
    if (st != FSDP_OK)
        fsdp_sd_free(sd);
    else
        *sd_out = sd;
    return st;
}

typedef struct model_save {
    const row_options *opts;
    const bench_model *model;
    const bench_state_opts *state;
    const char *path;
} model_save;

static fsdp_status save_model_rank(void *context, fsdp_ctl *ctl, fsdp_error *err)
{
    const model_save *job = context;
    fsdp_sd *sd = NULL;
    fsdp_save_opts save = {0};
    save.skip_fsync = true;
    save.step = &job->state->step;
    fsdp_status st = bench_make_shards(job->model, job->state, fsdp_ctl_rank(ctl), &sd, err);
    st = fsdp_ctl_agree(ctl, st, err);
    if (st == FSDP_OK)
        st = fsdp_sd_save(sd, ctl, job->path, &save, err);
    fsdp_sd_free(sd);
    return st;
}

fsdp_status bench_save_model(const row_options *opts, const bench_model *model,
                             const bench_state_opts *state, const char *path, fsdp_error *err)
{
    model_save job = {opts, model, state, path};
    return fsdp_ctl_run_threads(state->world, save_model_rank, &job, err);
}

fsdp_status bench_prove_path(const char *path, uint64_t seed, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint = NULL;
    bench_proof proof = {.seed = seed};
    FSDP_TRY(
        fsdp_checkpoint_open(path, &(fsdp_open_opts){.access = *cli_access()}, &checkpoint, err));
    fsdp_status st = bench_prove(checkpoint, &proof, err);
    fsdp_checkpoint_close(checkpoint);
    return st;
}
