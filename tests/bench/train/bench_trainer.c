/*
 * bench train: steps of fsdp-train's code, in turns with PyTorch and, if it is there, llm.c. Each side
 * takes one step at a time, while the others wait. See bench_trainer.h.
 */
#include "tests/bench/train/bench_trainer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { WARM_UP = 2, RANKS = 2 }; /* turns that do not count */

/* The others: FSDP2 on as many ranks, PyTorch in one process, llm.c in one process. */
typedef enum trainer_side { SIDE_SHARDED, SIDE_WHOLE, SIDE_LLMC, SIDES } trainer_side;

typedef struct trainer_turns {
    bench_times ours, theirs[SIDES];
    bench_peer *peers[SIDES]; /* of rank 0; NULL: not measured */
} trainer_turns;

static bool is_first(const trainer_run *run)
{
    return run->job.rank == 0;
}

/* --- the others ---------------------------------------------------------------------------------- */

/* PROGRAM LAYERS WIDTH HEADS VOCAB BATCH LENGTH THREADS DIR RANKS; more than one rank: FSDP2. */
static fsdp_status start_torch(const trainer_run *run, int ranks, bench_peer **peer_out,
                               fsdp_error *err)
{
    const trainer_options *trainer = run->trainer;
    int threads = bench_trainer_threads(run->opts) / ranks;
    const int64_t numbers[] = {trainer->layers,          trainer->width, trainer->heads,
                               trainer->vocab,           trainer->batch, trainer->length,
                               threads > 0 ? threads : 1};
    enum { NUMBERS = sizeof numbers / sizeof *numbers };
    char path[BENCH_PATH], texts[NUMBERS][24], *argv[NUMBERS + 2] = {(char *)run->opts->peer};
    if (!run->opts->peer) {
        bench_find_peer("train_peer", path);
        argv[0] = path;
    }
    for (int i = 0; i < NUMBERS; i++) {
        snprintf(texts[i], sizeof texts[i], "%" PRId64, numbers[i]);
        argv[i + 1] = texts[i];
    }
    return bench_peer_start(argv, ranks, peer_out, err);
}

static fsdp_status start_llmc(const trainer_run *run, bench_peer **peer_out, fsdp_error *err)
{
    char path[BENCH_PATH], threads[24], tokens[24];
    const trainer_options *trainer = run->trainer;
    bench_find_peer("llmc_peer", path);
    snprintf(threads, sizeof threads, "%d", bench_trainer_threads(run->opts));
    snprintf(tokens, sizeof tokens, "%" PRId64, trainer->batch * trainer->length);
    char *argv[] = {path, (char *)trainer->llmc, threads, tokens, NULL};
    return bench_peer_start(argv, 1, peer_out, err);
}

static fsdp_status start_peers(const trainer_run *run, trainer_turns *turns, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    if (is_first(run) && run->opts->against) {
        st = start_torch(run, 1, &turns->peers[SIDE_WHOLE], err);
        if (st == FSDP_OK && run->job.ranks > 1)
            st = start_torch(run, run->job.ranks, &turns->peers[SIDE_SHARDED], err);
        if (st == FSDP_OK && run->job.ranks > 1 && run->trainer->llmc)
            st = start_llmc(run, &turns->peers[SIDE_LLMC], err);
    }
    return fsdp_ctl_agree(run->job.ctl, st, err);
}

static fsdp_status take_turn(trainer_run *run, trainer_turns *turns, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    FSDP_TRY(bench_trainer_step(run, &turns->ours, err));
    for (int i = 0; i < SIDES && st == FSDP_OK; i++)
        if (turns->peers[i])
            st = bench_peer_ask(turns->peers[i], "1\n", &turns->theirs[i], err);
    return fsdp_ctl_agree(run->job.ctl, st, err);
}

static fsdp_status take_turns(trainer_run *run, trainer_turns *turns, fsdp_error *err)
{
    for (int turn = 0; turn < run->trainer->turns; turn++) {
        if (turn == WARM_UP)
            turns->ours.count = turns->theirs[SIDE_SHARDED].count =
                turns->theirs[SIDE_WHOLE].count = turns->theirs[SIDE_LLMC].count = 0;
        FSDP_TRY(take_turn(run, turns, err));
    }
    return FSDP_OK;
}

/* --- rows ---------------------------------------------------------------------------------------- */

static bool reaches(const bench_times *ours, const bench_times *theirs, double least)
{
    return theirs->count == 0 || bench_ratio(ours, theirs) >= least;
}

static void add_side(fsdp_text *text, const char *name, const bench_times *ours,
                     const bench_times *theirs)
{
    if (theirs->count > 0)
        fsdp_text_addf(text, ", \"%s_s\": %.6f, \"%s_ratio\": %.4f", name, bench_median(theirs),
                       name, bench_ratio(ours, theirs));
    else
        fsdp_text_addf(text, ", \"%s_s\": null, \"%s_ratio\": null", name, name);
}

static double tokens_per_second(const trainer_run *run, const bench_times *times)
{
    const double seconds = bench_median(times);
    return seconds > 0 ? (double)(run->trainer->batch * run->trainer->length) / seconds : 0;
}

/* A lone rank is compared with PyTorch in one process, several with FSDP2 first. */
static fsdp_status print_steps(const trainer_run *run, const trainer_turns *turns, int64_t peak_kib)
{
    const bench_times *sharded = &turns->theirs[SIDE_SHARDED], *whole = &turns->theirs[SIDE_WHOLE];
    const bench_times *llmc = &turns->theirs[SIDE_LLMC], *ours = &turns->ours;
    const bool is_alone = run->job.ranks == 1, has_others = run->opts->against;
    bench_row row = {.ours = ours, .peak_kib = peak_kib};
    snprintf(row.work, sizeof row.work, "train-%d", run->job.ranks);
    fsdp_text_addf(&row.more, ", \"tokens_s\": %.1f", tokens_per_second(run, ours));
    if (is_alone && has_others) {
        row.plain = whole;
        snprintf(row.against, sizeof row.against, "PyTorch, %d threads",
                 bench_trainer_threads(run->opts));
        bench_want_ratio(&row, 1);
    }
    if (!is_alone) {
        add_side(&row.more, "unsharded", ours, whole);
        add_side(&row.more, "llmc", ours, llmc);
    }
    if (!is_alone && has_others) {
        const double least = 1.9, least_unsharded = 0.85, least_llmc = 5;
        row.plain = sharded;
        int used = snprintf(row.goal, sizeof row.goal, "ratio >= %.2f, unsharded >= %.2f", least,
                            least_unsharded);
        if (llmc->count > 0) /* `met` says nothing about a side that was not measured */
            snprintf(row.goal + used, sizeof row.goal - (size_t)used, ", llm.c >= %.2f",
                     least_llmc);
        row.met = reaches(ours, sharded, least) && reaches(ours, whole, least_unsharded) &&
                  reaches(ours, llmc, least_llmc);
        snprintf(row.against, sizeof row.against, "PyTorch's FSDP2 over gloo");
        if (!run->opts->common.json)
            snprintf(row.against, sizeof row.against,
                     "PyTorch's FSDP2 over gloo; unsharded: ratio %.2f", bench_ratio(ours, whole));
    }
    return bench_print_row(run->opts, &row);
}

static fsdp_status print_peak(const trainer_run *run, const trainer_turns *turns, int64_t peak_kib)
{
    const double most = 0.8;
    const int64_t theirs = turns->theirs[SIDE_SHARDED].peak_kib;
    const double ratio = theirs > 0 ? (double)peak_kib / (double)theirs : 0;
    bench_row row = {.ours = &turns->ours, .peak_kib = peak_kib};
    snprintf(row.work, sizeof row.work, "train-peak");
    if (theirs == 0) {
        if (!run->opts->common.json)
            snprintf(row.against, sizeof row.against, "peak %" PRId64 " KiB", peak_kib);
        fsdp_text_addf(&row.more, ", \"against_peak_kib\": null, \"peak_ratio\": null");
        return bench_print_row(run->opts, &row);
    }
    fsdp_text_addf(&row.more, ", \"against_peak_kib\": %" PRId64 ", \"peak_ratio\": %.4f", theirs,
                   ratio);
    snprintf(row.goal, sizeof row.goal, "peak <= %.1f x against", most);
    row.met = ratio <= most;
    snprintf(row.against, sizeof row.against, "PyTorch's FSDP2 over gloo");
    if (!run->opts->common.json)
        snprintf(row.against, sizeof row.against, "peak %" PRId64 " KiB; FSDP2: %" PRId64 " KiB",
                 peak_kib, theirs);
    return bench_print_row(run->opts, &row);
}

static fsdp_status print_rows(const trainer_run *run, const trainer_turns *turns, fsdp_error *err)
{
    int64_t peak_kib;
    fsdp_status st = FSDP_OK;
    FSDP_TRY(bench_peak_of_ranks(run->job.ctl, &peak_kib, err));
    if (is_first(run))
        st = print_steps(run, turns, peak_kib);
    if (is_first(run) && run->job.ranks > 1 && st == FSDP_OK)
        st = print_peak(run, turns, peak_kib);
    return fsdp_ctl_agree(run->job.ctl, st, err);
}

/* --- the whole ----------------------------------------------------------------------------------- */

static fsdp_status measure_steps(trainer_run *run, fsdp_error *err)
{
    trainer_turns *turns = calloc(1, sizeof *turns);
    fsdp_status st = turns ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    st = fsdp_ctl_agree(run->job.ctl, st, err);
    if (st == FSDP_OK)
        st = start_peers(run, turns, err);
    if (st == FSDP_OK)
        st = take_turns(run, turns, err);
    for (int i = 0; turns && i < SIDES; i++)
        bench_peer_stop(turns->peers[i]);
    if (st == FSDP_OK)
        st = print_rows(run, turns, err);
    free(turns);
    return st;
}

static fsdp_status run_rank(fsdp_world *world, const row_options *opts, fsdp_error *err)
{
    trainer_run *run = calloc(1, sizeof *run);
    fsdp_status st = run ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    st = fsdp_ctl_agree(fsdp_world_ctl(world), st, err);
    if (st == FSDP_OK) {
        run->opts = opts;
        run->trainer = opts->trainer;
        st = bench_trainer_begin(run, world, err);
        if (st == FSDP_OK)
            st = measure_steps(run, err);
        if (st == FSDP_OK && fsdp_world_size(world) > 1)
            st = bench_trainer_saves(run, err);
        bench_trainer_end(run);
    }
    free(run);
    return st;
}

fsdp_status bench_trainer(const row_options *opts, fsdp_error *err)
{
    (void)err;
    (void)fsdp_nn_cpu_products(); /* before threads */
    bench_launch_twice(opts, run_rank, RANKS);
}
