/*
 * fsdp-bench check: makes every element again from its name, position, seed and the checkpoint's
 * step, and compares. A checkpoint that says which model it holds must hold all of it and no more.
 */
#include "tools/bench/bench.h"

#include <inttypes.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --- the expected state -------------------------------------------------------------------------------- */

static fsdp_status fail_entry(fsdp_error *err, const fsdp_entry *entry, const char *what)
{
    char name[200];
    fsdp_printable(entry->name, entry->name_size, name, sizeof name);
    return fsdp_fail(err, FSDP_DIFFERS, "'%s' %s", name, what);
}

static bool same_target(const fsdp_sd *a, const fsdp_entry *x, const fsdp_sd *b,
                        const fsdp_entry *y)
{
    const fsdp_entry *p = fsdp_sd_at(a, x->target), *q = fsdp_sd_at(b, y->target);
    return p->name_size == q->name_size && memcmp(p->name, q->name, p->name_size) == 0;
}

static fsdp_status compare_entry(const fsdp_sd *found_in, const fsdp_entry *found,
                                 const fsdp_sd *wanted_in, const fsdp_entry *wanted,
                                 fsdp_error *err)
{
    if (found->kind != wanted->kind)
        return fail_entry(err, wanted, "is not the kind of entry that was saved");
    if (found->kind == FSDP_ENTRY_ALIAS && !same_target(found_in, found, wanted_in, wanted))
        return fail_entry(err, wanted, "names another tensor");
    if (found->kind != FSDP_ENTRY_TENSOR)
        return FSDP_OK;
    if (found->dtype != wanted->dtype)
        return fail_entry(err, wanted, "has another dtype");
    if (found->ndim != wanted->ndim ||
        memcmp(found->shape, wanted->shape, (size_t)found->ndim * sizeof *found->shape) != 0)
        return fail_entry(err, wanted, "has another shape");
    return FSDP_OK;
}

static fsdp_status compare_structure(const fsdp_sd *found, const fsdp_sd *wanted, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(wanted); i++) {
        const fsdp_entry *entry = fsdp_sd_at(wanted, i);
        int64_t at = fsdp_sd_find(found, entry->name, entry->name_size);
        if (at < 0)
            return fail_entry(err, entry, "is missing");
        FSDP_TRY(compare_entry(found, fsdp_sd_at(found, (size_t)at), wanted, entry, err));
    }
    for (size_t i = 0; i < fsdp_sd_count(found); i++) {
        const fsdp_entry *entry = fsdp_sd_at(found, i);
        if (fsdp_sd_find(wanted, entry->name, entry->name_size) < 0)
            return fail_entry(err, entry, "was never saved");
    }
    return FSDP_OK;
}

static fsdp_status compare_values(const fsdp_sd *found, const fsdp_sd *wanted, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(wanted); i++) {
        const fsdp_entry *entry = fsdp_sd_at(wanted, i);
        if (entry->kind != FSDP_ENTRY_VALUE)
            continue;
        int64_t at = fsdp_sd_find(found, entry->name, entry->name_size);
        if (!fsdp_value_equal(&fsdp_sd_at(found, (size_t)at)->value, &entry->value))
            return fail_entry(err, entry, "has another value");
    }
    return FSDP_OK;
}

/* {"model": NAME, "scale": F}, as bench_state.c wrote it. */
static bool read_config(const fsdp_sd *sd, char *name_out, size_t name_room, double *scale_out)
{
    int64_t at = fsdp_sd_find(sd, FSDP_NAME("config"));
    if (at < 0 || fsdp_sd_at(sd, (size_t)at)->kind != FSDP_ENTRY_VALUE)
        return false;
    const fsdp_value *config = &fsdp_sd_at(sd, (size_t)at)->value;
    if (config->kind != FSDP_VALUE_DICT || config->as.list.count != 4)
        return false;
    const fsdp_value *name = &config->as.list.items[1], *scale = &config->as.list.items[3];
    if (name->kind != FSDP_VALUE_STRING || name->as.bytes.size >= name_room ||
        scale->kind != FSDP_VALUE_F64)
        return false;
    memcpy(name_out, name->as.bytes.data, name->as.bytes.size);
    name_out[name->as.bytes.size] = '\0';
    *scale_out = scale->as.f64;
    return true;
}

/* NULL when the checkpoint does not say what it should hold. */
static fsdp_status make_wanted(const fsdp_sd *found, const bench_proof *proof, fsdp_sd **wanted_out,
                               fsdp_error *err)
{
    char name[32];
    double scale;
    bench_model model;
    if (!read_config(found, name, sizeof name, &scale))
        return FSDP_OK;
    bench_state_opts state = {.world = 1, .seed = proof->seed, .step = proof->step};
    FSDP_TRY(bench_model_init(&model, name, scale, err));
    fsdp_status st = bench_state_create(&model, &state, wanted_out, err);
    bench_model_release(&model);
    return st;
}

static void count_entries(const fsdp_sd *sd, bench_proof *proof)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_VALUE)
            proof->values++;
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        proof->tensors++;
        proof->bytes += fsdp_entry_bytes(entry);
    }
}

/* The manifest's, or the value that says the same. */
static fsdp_status find_step(fsdp_checkpoint *checkpoint, bench_proof *proof, fsdp_error *err)
{
    const fsdp_sd *sd = fsdp_checkpoint_sd(checkpoint);
    proof->step = fsdp_checkpoint_describe(checkpoint)->step;
    if (proof->step != FSDP_NO_STEP)
        return FSDP_OK;
    int64_t at = fsdp_sd_find(sd, FSDP_NAME("step"));
    const fsdp_entry *entry = at >= 0 ? fsdp_sd_at(sd, (size_t)at) : NULL;
    if (!entry || entry->kind != FSDP_ENTRY_VALUE || entry->value.kind != FSDP_VALUE_I64)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                         "'%s' does not say its step: nothing to check against",
                         fsdp_checkpoint_describe(checkpoint)->path);
    proof->step = entry->value.as.i64;
    return FSDP_OK;
}

/* --- elements ------------------------------------------------------------------------------------------ */

typedef struct prover_result {
    size_t entry; /* the failed one */
    fsdp_error err;
} prover_result;

typedef struct prove_job {
    fsdp_checkpoint *checkpoint;
    const fsdp_sd *sd;
    const bench_proof *proof;
    prover_result *results; /* one per thread */
    atomic_size_t next, first_bad;
    _Atomic int64_t done;
} prove_job;

typedef struct slab_check {
    prove_job *job;
    bench_stream stream;
    bool reports; /* this thread shows the progress */
} slab_check;

static void describe_element(fsdp_dtype dtype, const void *data, char *out, size_t room)
{
    float value;
    uint64_t bits = 0;
    memcpy(&bits, data, fsdp_dtype_size(dtype));
    if (dtype == FSDP_F32 || dtype == FSDP_BF16) {
        uint32_t wide = (uint32_t)(dtype == FSDP_BF16 ? bits << 16 : bits);
        memcpy(&value, &wide, sizeof value);
        snprintf(out, room, "%.9g", (double)value);
    } else {
        snprintf(out, room, "0x%" PRIx64, bits);
    }
}

static fsdp_status fail_element(const slab_check *check, const fsdp_entry *entry, int64_t position,
                                const void *data, fsdp_error *err)
{
    char name[200], found[40], wanted[40];
    uint64_t expected = 0;
    fsdp_text index = {0};
    int64_t left = position, at[FSDP_MAX_DIMS];
    bench_stream_fill(&check->stream, position, 1, &expected);
    describe_element(entry->dtype, data, found, sizeof found);
    describe_element(entry->dtype, &expected, wanted, sizeof wanted);
    for (int d = entry->ndim - 1; d >= 0; d--) {
        at[d] = left % entry->shape[d];
        left /= entry->shape[d];
    }
    cli_add_shape(&index, entry->ndim, at);
    fsdp_printable(entry->name, entry->name_size, name, sizeof name);
    fsdp_status st = fsdp_fail(err, FSDP_DIFFERS, "'%s': element %s is %s, expected %s", name,
                               index.data ? index.data : "[]", found, wanted);
    fsdp_text_release(&index);
    return st;
}

static fsdp_status show_progress(const slab_check *check, fsdp_error *err)
{
    const bench_proof *proof = check->job->proof;
    FSDP_TRY(cli_check_stop(err));
    if (check->reports && proof->watch && proof->watch->progress)
        proof->watch->progress(proof->watch->context, atomic_load(&check->job->done), proof->bytes,
                               "check");
    return FSDP_OK;
}

static fsdp_status compare_slab(void *context, const fsdp_entry *entry, int64_t first,
                                int64_t count, const void *data, fsdp_error *err)
{
    slab_check *check = context;
    size_t size = fsdp_dtype_size(entry->dtype);
    int64_t bad = bench_stream_compare(&check->stream, first, count, data);
    if (bad >= 0)
        return fail_element(check, entry, bad, (const char *)data + (size_t)(bad - first) * size,
                            err);
    atomic_fetch_add(&check->job->done, count * (int64_t)size);
    return show_progress(check, err);
}

/* False for the few dtypes that no state of ours has. */
static bool is_written(fsdp_dtype dtype)
{
    switch (dtype) {
    case FSDP_F64:
    case FSDP_F32:
    case FSDP_BF16:
    case FSDP_BOOL:
    case FSDP_I64:
    case FSDP_I32:
    case FSDP_I16:
    case FSDP_I8:
    case FSDP_U64:
    case FSDP_U32:
    case FSDP_U16:
    case FSDP_U8: return true;
    default: return false;
    }
}

static fsdp_status prove_entry(prove_job *job, size_t index, int thread, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(job->sd, index);
    slab_check check = {.job = job, .reports = thread == 0};
    if (entry->kind != FSDP_ENTRY_TENSOR)
        return FSDP_OK;
    if (!is_written(entry->dtype))
        return fail_entry(err, entry, "has a dtype that fsdp-bench never writes");
    check.stream = bench_stream_of(entry, job->proof->seed, job->proof->step);
    return fsdp_checkpoint_stream(job->checkpoint, index, job->proof->memory / job->proof->threads,
                                  compare_slab, &check, err);
}

static void note_failure(prove_job *job, size_t entry)
{
    size_t first = atomic_load(&job->first_bad);
    while (entry < first && !atomic_compare_exchange_weak(&job->first_bad, &first, entry)) {
    }
}

/* Threads take entries in order, so every entry before a bad one is checked as well. */
static fsdp_status prove_entries(void *context, fsdp_ctl *ctl, fsdp_error *err)
{
    prove_job *job = context;
    int thread = fsdp_ctl_rank(ctl);
    prover_result *result = &job->results[thread];
    (void)err;
    for (;;) {
        size_t entry = atomic_fetch_add(&job->next, 1);
        if (entry >= fsdp_sd_count(job->sd) || entry > atomic_load(&job->first_bad))
            return FSDP_OK;
        if (prove_entry(job, entry, thread, &result->err) == FSDP_OK)
            continue;
        result->entry = entry;
        note_failure(job, entry);
        return FSDP_OK;
    }
}

static fsdp_status first_failure(const prove_job *job, fsdp_error *err)
{
    for (int i = 0; i < job->proof->threads; i++)
        if (job->results[i].err.status != FSDP_OK &&
            job->results[i].entry == atomic_load(&job->first_bad)) {
            if (err)
                *err = job->results[i].err;
            return job->results[i].err.status;
        }
    return FSDP_OK;
}

static fsdp_status prove_elements(fsdp_checkpoint *checkpoint, const bench_proof *proof,
                                  fsdp_error *err)
{
    prove_job job = {
        .checkpoint = checkpoint, .sd = fsdp_checkpoint_sd(checkpoint), .proof = proof};
    atomic_init(&job.next, 0);
    atomic_init(&job.first_bad, SIZE_MAX);
    atomic_init(&job.done, 0);
    job.results = calloc((size_t)proof->threads, sizeof *job.results);
    if (!job.results)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate memory for %d threads",
                         proof->threads);
    fsdp_status st = fsdp_ctl_run_threads(proof->threads, prove_entries, &job, err);
    if (st == FSDP_OK)
        st = first_failure(&job, err);
    free(job.results);
    return st;
}

/* Checks elements before values, so that a wrong seed is reported by an element. */
static fsdp_status prove(fsdp_checkpoint *checkpoint, const bench_proof *proof,
                         const fsdp_sd *wanted, fsdp_error *err)
{
    const fsdp_sd *found = fsdp_checkpoint_sd(checkpoint);
    if (!wanted)
        return prove_elements(checkpoint, proof, err);
    FSDP_TRY(compare_structure(found, wanted, err));
    FSDP_TRY(prove_elements(checkpoint, proof, err));
    return compare_values(found, wanted, err);
}

int bench_cores(void)
{
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) != 0)
        return (int)sysconf(_SC_NPROCESSORS_ONLN);
    return CPU_COUNT(&cores);
}

fsdp_status bench_prove(fsdp_checkpoint *checkpoint, bench_proof *proof, fsdp_error *err)
{
    const fsdp_sd *found = fsdp_checkpoint_sd(checkpoint);
    fsdp_sd *wanted = NULL;
    if (proof->threads <= 0)
        proof->threads = bench_cores();
    if (proof->memory <= 0)
        proof->memory = FSDP_MEMORY_DEFAULT;
    count_entries(found, proof);
    FSDP_TRY(find_step(checkpoint, proof, err));
    FSDP_TRY(make_wanted(found, proof, &wanted, err));
    proof->knows_model = wanted != NULL;
    fsdp_status st = prove(checkpoint, proof, wanted, err);
    fsdp_sd_free(wanted);
    return st;
}

/* --- a run to continue ---------------------------------------------------------------------------- */

/* Compares structure and values, which show model and seed: rng.cpu depends on the seed and the step. */
static fsdp_status check_same_state(fsdp_checkpoint *checkpoint, const bench_options *opts,
                                    fsdp_error *err)
{
    const fsdp_sd *found = fsdp_checkpoint_sd(checkpoint);
    bench_proof proof = {.seed = opts->seed};
    fsdp_sd *wanted = NULL;
    FSDP_TRY(find_step(checkpoint, &proof, err));
    FSDP_TRY(make_wanted(found, &proof, &wanted, err));
    fsdp_status st = compare_structure(found, wanted, err);
    if (st == FSDP_OK)
        st = compare_values(found, wanted, err);
    fsdp_sd_free(wanted);
    return st;
}

static fsdp_status check_goes_on(fsdp_checkpoint *checkpoint, const bench_options *opts,
                                 fsdp_error *err)
{
    static const char advice[] =
        "all saves of a run are of one model and seed; name another directory";
    const char *path = fsdp_checkpoint_describe(checkpoint)->path;
    char name[32];
    double scale;
    fsdp_error found = {0};
    if (!read_config(fsdp_checkpoint_sd(checkpoint), name, sizeof name, &scale))
        return fsdp_fail(err, FSDP_ERR_EXISTS,
                         "'%s' was not made by fsdp-bench make; name another directory", path);
    if (strcmp(name, opts->model) != 0 || scale != opts->scale)
        return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' holds --model %s --scale %g: %s", path, name,
                         scale, advice);
    fsdp_status st = check_same_state(checkpoint, opts, &found);
    if (st == FSDP_DIFFERS)
        return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' is not of --seed %" PRIu64 " (%s): %s", path,
                         opts->seed, found.text, advice);
    if (st != FSDP_OK)
        *err = found;
    return st;
}

fsdp_status bench_check_goes_on(const bench_options *opts, const char *path, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint = NULL;
    FSDP_TRY(
        fsdp_checkpoint_open(path, &(fsdp_open_opts){.access = *cli_access()}, &checkpoint, err));
    fsdp_status st = check_goes_on(checkpoint, opts, err);
    fsdp_checkpoint_close(checkpoint);
    return st;
}

/* --- the command --------------------------------------------------------------------------------------- */

static void add_verdict_json(fsdp_text *text, const char *path, const bench_proof *proof,
                             const char *difference)
{
    fsdp_text_addf(text, "{\"schema\": 1, \"path\": ");
    fsdp_text_add_json_string(text, path, strlen(path));
    fsdp_text_addf(text,
                   ", \"step\": %" PRId64 ", \"seed\": %" PRIu64 ", \"tensors\": %" PRId64
                   ", \"values\": %" PRId64 ", \"bytes\": %" PRId64
                   ", \"whole\": %s, \"equal\": %s",
                   proof->step, proof->seed, proof->tensors, proof->values, proof->bytes,
                   proof->knows_model ? "true" : "false", difference ? "false" : "true");
    if (difference) {
        fsdp_text_addf(text, ", \"text\": ");
        fsdp_text_add_json_string(text, difference, strlen(difference));
    }
    fsdp_text_addf(text, "}\n");
}

static void add_verdict(fsdp_text *text, const char *path, const bench_proof *proof,
                        const char *difference)
{
    char number[CLI_NUMBER];
    if (difference) {
        fsdp_text_addf(text, "bad   ");
        cli_add_message(text, path);
        fsdp_text_addf(text, ": %s\n", difference);
        return;
    }
    fsdp_text_addf(text, "ok    ");
    cli_add_message(text, path);
    fsdp_text_addf(text, ", step %" PRId64 ": %s", proof->step,
                   cli_plural(proof->tensors, "tensor", number));
    fsdp_text_addf(text, " (%s), ", cli_bytes(proof->bytes, number));
    if (proof->knows_model)
        fsdp_text_addf(text, "%s: all that seed %" PRIu64 " gives, and no more\n",
                       cli_plural(proof->values, "value", number), proof->seed);
    else
        fsdp_text_addf(text,
                       "as seed %" PRIu64 " gives them; no config says what else there should be\n",
                       proof->seed);
}

static fsdp_status check(const bench_options *opts, fsdp_checkpoint *checkpoint,
                         const fsdp_watch *watch, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_error found = {0};
    const char *path = fsdp_checkpoint_describe(checkpoint)->path;
    bench_proof proof = {.seed = opts->seed,
                         .threads = opts->common.jobs,
                         .memory = opts->common.memory,
                         .watch = watch};
    fsdp_status st = bench_prove(checkpoint, &proof, &found);
    if (st != FSDP_OK && st != FSDP_DIFFERS) {
        *err = found;
        return st;
    }
    cli_progress_clear();
    const char *difference = st == FSDP_DIFFERS ? found.text : NULL;
    if (opts->common.json)
        add_verdict_json(&text, path, &proof, difference);
    else if (difference || !opts->common.quiet)
        add_verdict(&text, path, &proof, difference);
    fsdp_status put = cli_put_all(&text);
    return put != FSDP_OK ? put : st;
}

fsdp_status bench_check(const bench_options *opts, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint = NULL;
    fsdp_watch watch = cli_watch(&opts->common);
    FSDP_TRY(cli_open_verified(opts->path, &watch, &checkpoint, err));
    fsdp_status st = check(opts, checkpoint, &watch, err);
    fsdp_checkpoint_close(checkpoint);
    return st;
}
