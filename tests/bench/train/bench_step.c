/*
 * bench step: trains, and prints a line per step and the memory used; with --against torch it measures
 * in turns with the same model in PyTorch's FSDP2.
 */
#include "tests/bench/train/bench_step.h"
#include "base/text.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct step_run {
    const row_options *opts;
    step_model model;
    double *losses; /* of this rank's microbatches, then of all ranks */
} step_run;

static bool is_first(const step_run *run)
{
    return fsdp_world_rank(run->model.world) == 0;
}

/* --- one step --------------------------------------------------------------------------------- */

/* *loss_out: the mean over this rank's microbatches. fills: each with values of its own. */
static fsdp_status accumulate(step_run *run, int step, bool fills, double *loss_out,
                              fsdp_error *err)
{
    int count = run->model.opts->accumulate;
    double sum = 0, loss;
    for (int i = 0; i < count; i++) {
        if (fills)
            step_model_fill(&run->model, step, i);
        FSDP_TRY(fsdp_root_begin_microbatch(run->model.root, i, count, err));
        FSDP_TRY(fsdp_mlp_run(run->model.mlp, &loss, err));
        sum += loss;
    }
    *loss_out = sum / count;
    return FSDP_OK;
}

static fsdp_status clip(step_run *run, double *norm_out, fsdp_error *err)
{
    const double most = run->model.opts->clip;
    const fsdp_clip_opts opts = {.max_norm = most > 0 ? most : INFINITY, .norm_type = 2};
    return fsdp_root_clip_grad_norm(run->model.root, &opts, norm_out, err);
}

/* JSON has no nan and no infinities. */
static void add_number(fsdp_text *text, double value)
{
    if (isfinite(value))
        fsdp_text_addf(text, "%.9g", value);
    else
        fsdp_text_addf(text, "null");
}

/* Rank 0 prints; of ranks that share rows it takes the loss of the first. */
static fsdp_status print_step(const step_run *run, int step, double norm)
{
    fsdp_text text = {0};
    const step_model *model = &run->model;
    int parts = model->opts->parts;
    double sum = 0;
    for (int r = 0; r < model->data_ranks; r++)
        sum += run->losses[r * parts];
    fsdp_text_addf(&text, "{\"step\":%d,\"loss\":", step);
    add_number(&text, sum / model->data_ranks);
    fsdp_text_addf(&text, ",\"grad_norm\":");
    add_number(&text, norm);
    fsdp_text_addf(&text, ",\"rank_loss\":[");
    for (int r = 0; r < model->data_ranks; r++) {
        fsdp_text_addf(&text, r > 0 ? "," : "");
        add_number(&text, run->losses[r * parts]);
    }
    fsdp_text_addf(&text, "]}\n");
    fsdp_status st = cli_put_all(&text);
    fflush(stdout);
    return st;
}

static fsdp_status train_step(step_run *run, int step, fsdp_error *err)
{
    double loss, norm;
    FSDP_TRY(cli_check_stop(err));
    FSDP_TRY(accumulate(run, step, true, &loss, err));
    FSDP_TRY(clip(run, &norm, err));
    FSDP_TRY(fsdp_optim_step(run->model.optim, err));
    FSDP_TRY(
        fsdp_ctl_allgather(fsdp_world_ctl(run->model.world), &loss, sizeof loss, run->losses, err));
    return is_first(run) ? print_step(run, step, norm) : FSDP_OK;
}

/* --- memory ----------------------------------------------------------------------------------- */

static void add_classes(fsdp_text *text, const char *name, const int64_t *bytes)
{
    static const struct {
        fsdp_memory_class class;
        const char *name;
    } classes[] = {{FSDP_MEMORY_SHARD, "shard"},
                   {FSDP_MEMORY_UNSHARDED, "unsharded"},
                   {FSDP_MEMORY_ALL_GATHER, "all_gather"},
                   {FSDP_MEMORY_REDUCE, "reduce"},
                   {FSDP_MEMORY_GRAD, "grad"}};
    fsdp_text_addf(text, "\"%s\":{", name);
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++)
        fsdp_text_addf(text, "%s\"%s\":%" PRId64, i > 0 ? "," : "", classes[i].name,
                       bytes[classes[i].class]);
    fsdp_text_addf(text, "}");
}

static fsdp_status print_memory(const step_run *run, fsdp_error *err)
{
    const fsdp_memory memory = fsdp_root_memory(run->model.root);
    int64_t expected[FSDP_MEMORY_CLASSES];
    fsdp_text text = {0};
    bool trains = run->model.opts->steps > 0 || run->opts->against;
    FSDP_TRY(step_memory_expect(&run->model, trains, expected, err));
    fsdp_text_addf(&text, "{");
    add_classes(&text, "bytes", memory.now);
    fsdp_text_addf(&text, ",");
    add_classes(&text, "peak", memory.peak);
    fsdp_text_addf(&text, ",");
    add_classes(&text, "formula", expected);
    fsdp_text_addf(&text, "}\n");
    return cli_put_all(&text);
}

/* --- against PyTorch -------------------------------------------------------------------------- */

enum { TIMED_STEPS = 4, SLACK = 48 << 20 };

static fsdp_status start_peer(const step_run *run, bench_peer **peer_out, fsdp_error *err)
{
    const step_options *opts = run->model.opts;
    char path[BENCH_PATH], numbers[4][24];
    const char *program = run->opts->peer;
    if (!program) {
        bench_find_peer("step_peer", path);
        program = path;
    }
    snprintf(numbers[0], sizeof numbers[0], "%d", opts->layers);
    snprintf(numbers[1], sizeof numbers[1], "%" PRId64, opts->width);
    snprintf(numbers[2], sizeof numbers[2], "%" PRId64, opts->out);
    snprintf(numbers[3], sizeof numbers[3], "%" PRId64, opts->rows);
    char *argv[] = {(char *)program, numbers[0], numbers[1], numbers[2], numbers[3], NULL};
    return bench_peer_start(argv, fsdp_world_size(run->model.world), peer_out, err);
}

static fsdp_status time_ours(step_run *run, bench_times *times, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(run->model.world);
    double loss, norm;
    FSDP_TRY(fsdp_ctl_agree(ctl, cli_check_stop(err), err));
    bench_clock began = bench_now();
    for (int i = 0; i < TIMED_STEPS; i++) {
        FSDP_TRY(accumulate(run, 0, false, &loss, err));
        if (run->model.opts->clip > 0)
            FSDP_TRY(clip(run, &norm, err));
        FSDP_TRY(fsdp_optim_step(run->model.optim, err));
    }
    FSDP_TRY(fsdp_ctl_barrier(ctl, err));
    bench_add_time(times, &began);
    times->seconds[times->count - 1] /= TIMED_STEPS;
    times->cpu[times->count - 1] /= TIMED_STEPS;
    return FSDP_OK;
}

static fsdp_status time_theirs(step_run *run, bench_peer *peer, bench_times *times, fsdp_error *err)
{
    char line[24];
    fsdp_status st = FSDP_OK;
    snprintf(line, sizeof line, "%d\n", TIMED_STEPS);
    if (is_first(run))
        st = bench_peer_ask(peer, line, times, err);
    return fsdp_ctl_agree(fsdp_world_ctl(run->model.world), st, err);
}

static fsdp_status take_turns(step_run *run, bench_peer *peer, bench_times *ours,
                              bench_times *theirs, fsdp_error *err)
{
    for (int round = -1; round < run->opts->rounds; round++) {
        FSDP_TRY(time_ours(run, ours, err));
        FSDP_TRY(time_theirs(run, peer, theirs, err));
        if (round < 0) /* the round that does not count */
            ours->count = theirs->count = 0;
    }
    return FSDP_OK;
}

/* Expected bytes of a rank's data: every memory class, the optimizer, and this program's buffers. */
static fsdp_status expect_bytes(const step_run *run, int64_t *bytes_out, fsdp_error *err)
{
    int64_t expected[FSDP_MEMORY_CLASSES];
    FSDP_TRY(step_memory_expect(&run->model, true, expected, err));
    *bytes_out =
        fsdp_mlp_bytes(run->model.mlp) + fsdp_root_memory(run->model.root).peak[FSDP_MEMORY_OPTIM];
    for (int i = 0; i < FSDP_MEMORY_CLASSES; i++)
        *bytes_out += expected[i];
    return FSDP_OK;
}

static fsdp_status print_turns(const step_run *run, bench_row *row, fsdp_error *err)
{
    int64_t most;
    FSDP_TRY(expect_bytes(run, &row->bytes_needed, err));
    most = (row->bytes_needed + SLACK) / 1024;
    double least = run->model.opts->rows < 256 ? 4 : 2;
    snprintf(row->work, sizeof row->work, "step-%d-%" PRId64, fsdp_world_size(run->model.world),
             run->model.opts->rows);
    snprintf(row->against, sizeof row->against, "PyTorch's FSDP2 over gloo");
    bench_want_ratio(row, least);
    row->met = row->met && row->peak_kib <= most;
    snprintf(row->goal, sizeof row->goal, "ratio >= %.2f, peak <= %" PRId64 " KiB", least, most);
    return bench_print_row(run->opts, row);
}

static fsdp_status compete(step_run *run, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(run->model.world);
    bench_times ours = {0}, theirs = {0};
    bench_row row = {.ours = &ours, .plain = &theirs, .stands_alone = true};
    bench_peer *peer = NULL;
    fsdp_status st = is_first(run) ? start_peer(run, &peer, err) : FSDP_OK;
    st = fsdp_ctl_agree(ctl, st, err);
    step_model_fill(&run->model, 0, 0);
    if (st == FSDP_OK)
        st = take_turns(run, peer, &ours, &theirs, err);
    bench_peer_stop(peer);
    if (st == FSDP_OK)
        st = bench_peak_of_ranks(ctl, &row.peak_kib, err);
    return st == FSDP_OK && is_first(run) ? print_turns(run, &row, err) : st;
}

/* --- the whole -------------------------------------------------------------------------------- */

static fsdp_status train(step_run *run, fsdp_error *err)
{
    const step_options *opts = run->model.opts;
    fsdp_status st = FSDP_OK;
    for (int step = 0; step < opts->steps; step++)
        FSDP_TRY(train_step(run, step, err));
    if (opts->save)
        FSDP_TRY(fsdp_root_save(run->model.root, opts->save, NULL, err));
    if (run->opts->against)
        FSDP_TRY(compete(run, err));
    if (is_first(run))
        st = print_memory(run, err);
    return fsdp_ctl_agree(fsdp_world_ctl(run->model.world), st, err);
}

static fsdp_status run_rank(fsdp_world *world, const row_options *opts, fsdp_error *err)
{
    step_run run = {.opts = opts,
                    .model = {.opts = opts->step, .world = world, .seed = opts->seed}};
    run.losses = calloc((size_t)fsdp_world_size(world), sizeof *run.losses);
    fsdp_status st = run.losses ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    st = fsdp_ctl_agree(fsdp_world_ctl(world), st, err);
    if (st == FSDP_OK)
        st = step_model_build(&run.model, err);
    if (st == FSDP_OK)
        st = train(&run, err);
    step_model_free(&run.model);
    free(run.losses);
    return st;
}

fsdp_status bench_step(const row_options *opts, fsdp_error *err)
{
    (void)err;
    (void)fsdp_nn_cpu_products(); /* before threads */
    bench_launch(opts, run_rank);
}
