/*
 * fsdp-bench make: every rank makes its shards of a synthetic state and saves them, once, or several
 * times into a run. Rank 0 chooses the first step and reports each save. Ranks are the processes that mpirun
 * started, else threads of this process; they also end the program.
 */
#include "tools/bench/bench.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* --- ranks ---------------------------------------------------------------------------------------- */

int bench_mpi_world(void)
{
    return cli_mpi_find().size;
}

/* Counts those on this machine. */
static int mpi_local_world(void)
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

/* --- saves ---------------------------------------------------------------------------------------- */

typedef struct make_job {
    const bench_options *opts;
    const bench_model *model;
    int world;
} make_job;

/* The state of one rank. */
typedef struct maker {
    const make_job *job;
    fsdp_ctl *ctl;
    fsdp_sd *sd;
    int64_t step;
} maker;

static bool is_free(const fsdp_run_steps *steps, int64_t step)
{
    for (size_t i = 0; i < steps->count; i++) {
        fsdp_step_state state = steps->items[i].state;
        if (steps->items[i].step == step && (state == FSDP_STEP_GOOD || state == FSDP_STEP_BROKEN))
            return false;
    }
    return true;
}

static fsdp_status refuse_newer(const fsdp_run_steps *steps, bool *has_steps_out, fsdp_error *err)
{
    *has_steps_out = false;
    for (size_t i = steps->count; i-- > 0;) {
        const fsdp_run_step *step = &steps->items[i];
        if (step->state == FSDP_STEP_NEWER) /* this version cannot read its contents */
            return fsdp_fail(err, FSDP_ERR_REFUSED, "%s", step->reason);
        *has_steps_out =
            *has_steps_out || step->state == FSDP_STEP_GOOD || step->state == FSDP_STEP_BROKEN;
    }
    return FSDP_OK;
}

static int64_t step_of_path(const fsdp_run_steps *steps, const char *path)
{
    const char *name = strrchr(path, '/');
    for (size_t i = 0; name && i < steps->count; i++)
        if (strcmp(steps->items[i].name, name + 1) == 0)
            return steps->items[i].step;
    return FSDP_NO_STEP;
}

/* Chooses a step after the newest good one, whose data is read as in a load; broken steps stay for people
 * to inspect. */
static fsdp_status choose_step(const bench_options *opts, const fsdp_run_steps *steps,
                               int64_t *step_out, fsdp_error *err)
{
    bool has_steps;
    char *path = NULL;
    fsdp_error none = {0};
    fsdp_watch watch = cli_watch(&opts->common);
    FSDP_TRY(refuse_newer(steps, &has_steps, err));
    fsdp_status st = has_steps ? fsdp_run_latest(opts->path, FSDP_VERIFY_DATA, &watch, cli_access(),
                                                 &path, &none)
                               : FSDP_ERR_NOT_FOUND;
    if (st != FSDP_OK && st != FSDP_ERR_NOT_FOUND)
        return fsdp_fail(err, st, "%s", none.text);
    st = path ? bench_check_goes_on(opts, path, err) : FSDP_OK;
    int64_t newest = path ? step_of_path(steps, path) : 0;
    if (st == FSDP_OK && newest == FSDP_NO_STEP)
        st = fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' exists: another job created it in the meantime",
                       path);
    fsdp_string_free(path);
    *step_out = newest + BENCH_STEP;
    while (!is_free(steps, *step_out))
        *step_out += BENCH_STEP;
    return st;
}

static fsdp_status find_next_step(const bench_options *opts, int64_t *step_out, fsdp_error *err)
{
    fsdp_run_steps steps = {0};
    fsdp_error missing = {0};
    *step_out = BENCH_STEP;
    fsdp_status st = fsdp_run_list(opts->path, cli_access(), &steps, &missing);
    if (st == FSDP_ERR_NOT_FOUND)
        return FSDP_OK;
    if (st != FSDP_OK)
        return fsdp_fail(err, st, "%s", missing.text);
    st = choose_step(opts, &steps, step_out, err);
    fsdp_run_steps_release(&steps);
    return st;
}

/* Checks the path before the state is made, which can take long. */
static fsdp_status check_path(const bench_options *opts, fsdp_error *err)
{
    struct stat found;
    if (opts->saves == 0 && lstat(opts->path, &found) == 0)
        return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' exists", opts->path);
    return FSDP_OK;
}

static fsdp_status agree_on_step(maker *m, fsdp_error *err)
{
    const bench_options *opts = m->job->opts;
    fsdp_status st = FSDP_OK;
    m->step = BENCH_STEP;
    if (fsdp_ctl_rank(m->ctl) == 0)
        st = opts->saves > 0 ? find_next_step(opts, &m->step, err) : check_path(opts, err);
    FSDP_TRY(fsdp_ctl_agree(m->ctl, st, err));
    return fsdp_ctl_broadcast(m->ctl, 0, &m->step, sizeof m->step, err);
}

/* All ranks of this machine together hold the whole state. */
static fsdp_status check_memory(const bench_model *model, fsdp_error *err)
{
    char needed[CLI_NUMBER], present[CLI_NUMBER];
    int64_t bytes = bench_model_bytes(model);
    int64_t memory = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    if (bench_mpi_world() > 0)
        bytes = bytes / bench_mpi_world() * mpi_local_world();
    if (bytes < memory)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "the state has %s, but this machine has %s of memory; use --scale",
                     cli_bytes(bytes, needed), cli_bytes(memory, present));
}

/* The values in the state dict belong to a step, so every save has a fresh one. */
static fsdp_status make_state(maker *m, fsdp_error *err)
{
    const bench_options *opts = m->job->opts;
    int rank = fsdp_ctl_rank(m->ctl);
    bench_state_opts state = {.world = m->job->world, .seed = opts->seed, .step = m->step};
    FSDP_TRY(bench_state_create(m->job->model, &state, &m->sd, err));
    FSDP_TRY(fsdp_sd_allocate(m->sd, rank, err));
    return bench_state_fill(m->sd, rank, opts->seed, m->step, err);
}

static int stop_when_asked(void *context, int64_t done, int64_t total, const char *what)
{
    (void)context, (void)done, (void)total, (void)what;
    return cli_stopped();
}

/* Rank 0 shows progress; a signal stops every rank. */
static fsdp_watch watch_of_rank(const cli_common *common, int rank)
{
    return rank == 0 ? cli_watch(common) : (fsdp_watch){.progress = stop_when_asked};
}

static fsdp_status save_state(maker *m, fsdp_error *err)
{
    static const fsdp_retention keep_three = {.keep_last = 3};
    const bench_options *opts = m->job->opts;
    fsdp_save_opts save = {0};
    save.kind = opts->kind;
    save.compress = opts->compress;
    save.level = opts->level;
    save.skip_fsync = opts->skip_fsync;
    save.threads = opts->common.jobs;
    save.memory = opts->common.memory;
    save.step = &m->step;
    save.retain = &keep_three;
    save.watch = watch_of_rank(&opts->common, fsdp_ctl_rank(m->ctl));
    if (opts->saves > 0)
        return fsdp_run_save(m->sd, m->ctl, opts->path, m->step, &save, err);
    return fsdp_sd_save(m->sd, m->ctl, opts->path, &save, err);
}

static int64_t count_bytes(const fsdp_sd *sd, int64_t *tensors_out)
{
    int64_t bytes = 0;
    *tensors_out = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        if (fsdp_sd_at(sd, i)->kind == FSDP_ENTRY_TENSOR) {
            bytes += fsdp_entry_bytes(fsdp_sd_at(sd, i));
            ++*tensors_out;
        }
    return bytes;
}

/* Prints without delay: a reader of the line may rely on the checkpoint. */
static fsdp_status report_save(const maker *m, double seconds)
{
    const bench_options *opts = m->job->opts;
    fsdp_text text = {0};
    char size[CLI_NUMBER], rate[CLI_NUMBER];
    int64_t tensors, bytes = count_bytes(m->sd, &tensors);
    if (opts->common.json) {
        bench_begin_item(&text, "saves");
        fsdp_text_addf(&text, "{\"path\": ");
        fsdp_text_add_json_string(&text, opts->path, strlen(opts->path));
        fsdp_text_addf(&text,
                       ", \"step\": %" PRId64 ", \"world_size\": %d, \"tensors\": %" PRId64
                       ", \"bytes\": %" PRId64 ", \"seconds\": %.3f}",
                       m->step, m->job->world, tensors, bytes, seconds);
    } else if (!opts->common.quiet) {
        fsdp_text_addf(
            &text, "saved step %" PRId64 ": %" PRId64 " tensors, %s by %d rank%s in %.2f s (%s)\n",
            m->step, tensors, cli_bytes(bytes, size), m->job->world, m->job->world == 1 ? "" : "s",
            seconds, cli_rate(bytes, seconds, rate));
    }
    cli_progress_clear();
    fsdp_status st = cli_put_all(&text);
    fflush(stdout);
    return st;
}

static fsdp_status make_once(maker *m, fsdp_error *err)
{
    FSDP_TRY(fsdp_ctl_agree(m->ctl, make_state(m, err), err));
    double began = cli_now();
    FSDP_TRY(save_state(m, err));
    fsdp_status st = FSDP_OK;
    if (fsdp_ctl_rank(m->ctl) == 0)
        st = report_save(m, cli_now() - began);
    return fsdp_ctl_agree(m->ctl, st, err);
}

static fsdp_status make_rank(void *context, fsdp_ctl *ctl, fsdp_error *err)
{
    const make_job *job = context;
    maker m = {.job = job, .ctl = ctl};
    int saves = job->opts->saves > 0 ? job->opts->saves : 1;
    FSDP_TRY(agree_on_step(&m, err));
    for (int i = 0; i < saves; i++, m.step += BENCH_STEP) {
        fsdp_status st = make_once(&m, err);
        fsdp_sd_free(m.sd);
        m.sd = NULL;
        FSDP_TRY(st);
    }
    return FSDP_OK;
}

fsdp_status bench_make(const bench_options *opts, fsdp_error *err)
{
    bench_model model;
    int ranks = bench_mpi_world();
    make_job job = {.opts = opts, .model = &model};
    job.world = ranks > 0 ? ranks : opts->world > 0 ? opts->world : 1;
    FSDP_TRY(bench_model_init(&model, opts->model, opts->scale, err));
    fsdp_status st = check_memory(&model, err);
    if (st == FSDP_OK)
        st = bench_run_ranks(opts->deadline_ms, job.world, make_rank, &job, err);
    bench_model_release(&model);
    return st;
}
