/*
 * A training job: the ids of each step, from an array of batches or from data in its order; signals, and the
 * file RUN/STOP, that ask for a save and the end; its objects (mesh, model, optimizer, tokenizer, data); one
 * step, evaluation, and gradients in a file. See train.h.
 */
#include "tools/train/train.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <fsdp/root_init.h>

/* === the ids of a step ======================================================================== */

struct train_batches {
    fsdp_value identity;       /* of the data: read once */
    train_ids given;           /* --batches: N x B x (S + 1) */
    fsdp_token_data *data;     /* NULL: given */
    int64_t sequences, length; /* of a step's batch */
    int64_t *ids;              /* one batch, of data */
    int64_t *held_out;         /* one batch, of an evaluation */
};

/* --- opening ------------------------------------------------------------------------------------- */

static fsdp_status open_given(train_job *job, train_batches *batches, fsdp_error *err)
{
    FSDP_TRY(train_ids_read(job->opts->batches, 3, &batches->given, err));
    batches->sequences = batches->given.shape[1];
    batches->length = batches->given.shape[2] - 1;
    if (batches->given.shape[0] < 1)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' holds no batches", job->opts->batches);
    if (batches->sequences < 1 || batches->length < 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has batches of %lld sequences of %lld ids; a batch needs at least 1 "
                         "sequence of 2 ids",
                         job->opts->batches, (long long)batches->given.shape[1],
                         (long long)batches->given.shape[2]);
    if (batches->given.shape[0] < job->config->train.steps)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has batches for %lld steps, but train.steps is %lld",
                         job->opts->batches, (long long)batches->given.shape[0],
                         (long long)job->config->train.steps);
    return train_ids_check(&batches->given, job->opts->batches, job->model_config.vocab, err);
}

/* A model of a source says how long its sequences may be; an evaluation takes them as long as it can. */
static int64_t length_of(const train_job *job)
{
    enum { LONG = 1024 };
    const int64_t most = job->model_config.context;
    const int64_t wanted = job->opts->eval ? LONG : job->config->model.context;
    return (job->opts->init || job->opts->eval) && wanted > most ? most : wanted;
}

/* All of the data that an evaluation names is held out. */
static const char *val_of(const train_job *job)
{
    if (job->opts->data)
        return job->opts->data;
    return job->config->data.val[0] ? job->config->data.val : NULL;
}

static fsdp_status open_data(train_job *job, train_batches *batches, const char *path,
                             fsdp_error *err)
{
    const train_config *config = job->config;
    batches->sequences = config->train.batch;
    batches->length = length_of(job);
    if (batches->sequences < 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "train.batch is 0; a step needs at least one sequence");
    const fsdp_token_options opts = {.path = path,
                                     .val = val_of(job),
                                     .tokenizer = job->tokenizer,
                                     .vocab = job->model_config.vocab,
                                     .length = batches->length,
                                     .in_order = !config->data.shuffle,
                                     .seed = (uint64_t)config->data.seed};
    FSDP_TRY(fsdp_token_data_open(&opts, &batches->data, err));
    if (job->opts->run)
        FSDP_TRY(fsdp_token_data_identity(batches->data, &batches->identity, err));
    const size_t count = (size_t)(batches->sequences * (batches->length + 1));
    batches->ids = calloc(count, sizeof *batches->ids);
    batches->held_out = calloc(count, sizeof *batches->held_out);
    return batches->ids && batches->held_out ? FSDP_OK
                                             : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
}

/* --- identity ------------------------------------------------------------------------------------ */

static fsdp_status set_key(fsdp_value *dict, size_t item, const char *key, fsdp_error *err)
{
    return fsdp_value_set_bytes(&dict->as.list.items[item], FSDP_VALUE_STRING, key, strlen(key),
                                err);
}

static fsdp_status describe_given(const train_batches *batches, fsdp_value *value_out,
                                  fsdp_error *err)
{
    const train_ids *ids = &batches->given;
    char hash[FSDP_XXH3_HEX];
    const int64_t count = ids->shape[0] * ids->shape[1] * ids->shape[2];
    fsdp_xxh3_hex(ids->data, (size_t)count * sizeof *ids->data, hash);
    FSDP_TRY(fsdp_value_set_items(value_out, FSDP_VALUE_DICT, 2, err));
    FSDP_TRY(set_key(value_out, 0, "batches", err));
    return set_key(value_out, 1, hash, err);
}

static fsdp_status describe_data(const train_job *job, fsdp_value *value_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_value_set_items(value_out, FSDP_VALUE_DICT, 8, err));
    fsdp_value *items = value_out->as.list.items;
    FSDP_TRY(set_key(value_out, 0, "files", err));
    FSDP_TRY(fsdp_value_copy(&job->batches->identity, &items[1], err));
    FSDP_TRY(set_key(value_out, 2, "length", err));
    items[3] = fsdp_value_i64(job->batches->length);
    FSDP_TRY(set_key(value_out, 4, "shuffle", err));
    items[5] = fsdp_value_bool(job->config->data.shuffle);
    FSDP_TRY(set_key(value_out, 6, "seed", err));
    items[7] = fsdp_value_i64(job->config->data.seed);
    return FSDP_OK;
}

/* Sets job->data: the files after it, for checkpoints. */
static fsdp_status identify_data(train_job *job, fsdp_error *err)
{
    return job->batches->data ? describe_data(job, &job->data, err)
                              : describe_given(job->batches, &job->data, err);
}

static fsdp_status open_batches(train_job *job, fsdp_error *err)
{
    const train_options *opts = job->opts;
    const char *path = opts->data ? opts->data : opts->config.data.path;
    bool trains = !opts->eval && !opts->sample;
    if (!trains && !opts->data)
        return FSDP_OK;
    job->batches = calloc(1, sizeof *job->batches);
    if (!job->batches)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    if (opts->batches)
        FSDP_TRY(open_given(job, job->batches, err));
    else if (!*path)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot train without data; set data.path, or give --data.path or --batches");
    else
        FSDP_TRY(open_data(job, job->batches, path, err));
    return opts->run ? identify_data(job, err) : FSDP_OK;
}

static void close_batches(train_batches *batches)
{
    if (!batches)
        return;
    train_ids_release(&batches->given);
    fsdp_token_data_close(batches->data);
    fsdp_value_release(&batches->identity);
    free(batches->ids);
    free(batches->held_out);
    free(batches);
}

/* --- reading ------------------------------------------------------------------------------------- */

static void finish(train_batch *batch)
{
    const size_t count = (size_t)(batch->sequences * (batch->length + 1));
    fsdp_xxh3_hex(batch->ids, count * sizeof *batch->ids, batch->hash);
}

/* The batch of the step after those done, equal on all ranks. */
static fsdp_status read_batch(const train_job *job, train_batch *batch_out, fsdp_error *err)
{
    const train_batches *from = job->batches;
    const int64_t row = from->length + 1;
    *batch_out = (train_batch){.sequences = from->sequences, .length = from->length};
    if (!from->data) {
        batch_out->ids = from->given.data + job->step * from->sequences * row;
        finish(batch_out);
        return FSDP_OK;
    }
    const int64_t count = fsdp_token_data_count(from->data, FSDP_TOKENS_TRAIN);
    batch_out->ids = from->ids;
    for (int64_t i = 0; i < from->sequences; i++) {
        const int64_t at = job->consumed + i;
        FSDP_TRY(fsdp_token_data_read(from->data, FSDP_TOKENS_TRAIN, (uint64_t)(at / count),
                                      at % count, from->ids + i * row, err));
    }
    finish(batch_out);
    return FSDP_OK;
}

/* Local. Batch i of the held-out data; false after the last one. */
static fsdp_status take_held_out(train_job *job, int64_t i, train_batch *batch_out,
                                 bool *is_there_out, fsdp_error *err)
{
    const train_batches *from = job->batches;
    const int64_t row = from->length + 1, first = i * from->sequences;
    const int64_t count = from->data ? fsdp_token_data_count(from->data, FSDP_TOKENS_VAL) : 0;
    *is_there_out = first < count;
    *batch_out = (train_batch){.length = from->length, .ids = from->held_out};
    for (int64_t s = 0; s < from->sequences && first + s < count; s++, batch_out->sequences++)
        FSDP_TRY(fsdp_token_data_read(from->data, FSDP_TOKENS_VAL, 0, first + s,
                                      from->held_out + s * row, err));
    return FSDP_OK;
}

/* === requests to stop ========================================================================= */

/* --- signals ------------------------------------------------------------------------------------- */

enum { REPEATED_MS = 1000, STEPS_OF_PATIENCE = 4 };

static volatile sig_atomic_t was_asked, interrupts, asked_by;
static atomic_bool is_rank, speaks, is_over; /* this process has ranks, has rank 0, has saved */
static atomic_llong asked_ms;
static atomic_int shields; /* works of this process that take their time, and end by themselves */
static atomic_uint patience_s;

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* For the handler: nothing but _exit ends a step that does not come to its end. */
static void end_now(int number)
{
    static const char text[] = "error: stopped by a signal in a step that did not end in time; the "
                               "checkpoints that were saved stay\n";
    if (speaks)
        (void)!write(STDERR_FILENO, text, sizeof text - 1);
    _exit(128 + number);
}

/* Schedulers repeat a signal at once; a person who repeats it does not wait for the step. */
static void note_again(int number)
{
    if (number == SIGINT && interrupts++)
        _exit(128 + SIGINT); /* who asks twice does not wait for the save */
    if (is_rank && !is_over && atomic_load(&shields) == 0 &&
        now_ms() - atomic_load(&asked_ms) >= REPEATED_MS)
        end_now(number);
}

static void note_signal(int number)
{
    const int before = errno;
    if (was_asked) {
        note_again(number);
    } else {
        interrupts += number == SIGINT;
        asked_by = number;
        atomic_store(&asked_ms, now_ms());
        was_asked = 1;
        if (is_rank)
            (void)alarm(atomic_load(&patience_s));
    }
    errno = before;
}

static void note_deadline(int number)
{
    (void)number;
    if (is_over)
        return;
    if (atomic_load(&shields) > 0)
        (void)alarm(atomic_load(&patience_s));
    else
        end_now(asked_by);
}

static void catch_signal(int number, void (*handler)(int))
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
    sigfillset(&action.sa_mask);
    if (sigaction(number, NULL, &before) == 0 && before.sa_handler != SIG_IGN)
        sigaction(number, &action, NULL);
}

/* A signal that is ignored from the start (nohup, a job in the background) stays ignored. */
void train_catch_signals(double deadline)
{
    atomic_store(&patience_s, (unsigned)ceil(deadline));
    catch_signal(SIGALRM, note_deadline);
    catch_signal(SIGINT, note_signal);
    catch_signal(SIGTERM, note_signal);
    catch_signal(SIGUSR1, note_signal);
    catch_signal(SIGHUP, note_signal);
}

/* The supervisor of --np has the handlers, too, and only passes signals on. */
void train_signals_begin(bool is_first)
{
    if (is_first)
        atomic_store(&speaks, true);
    atomic_store(&is_rank, true);
    if (was_asked)
        (void)alarm(atomic_load(&patience_s));
}

void train_signals_end(void)
{
    atomic_store(&is_over, true);
    (void)alarm(0);
}

void train_signals_shield(bool is_begin)
{
    atomic_fetch_add(&shields, is_begin ? 1 : -1);
}

void train_signals_step(double seconds)
{
    const double patience = ceil(STEPS_OF_PATIENCE * seconds);
    if (patience > atomic_load(&patience_s) && patience < INT_MAX)
        atomic_store(&patience_s, (unsigned)patience);
}

static bool was_signalled(void)
{
    return was_asked != 0;
}

/* --- the file ------------------------------------------------------------------------------------ */

/* Whether something of this name is there, and what. A path that is too long names nothing. */
static bool find_stop_file(const char *run, char path[PATH_MAX], struct stat *info)
{
    return snprintf(path, PATH_MAX, "%s/STOP", run) < PATH_MAX && lstat(path, info) == 0;
}

static bool stop_file_is_there(const char *run)
{
    char path[PATH_MAX];
    struct stat info;
    return find_stop_file(run, path, &info);
}

/* Rank 0. FSDP_ERR_EXISTS: a directory stands in the place of the file RUN/STOP. */
static fsdp_status check_stop_file(const char *run, fsdp_error *err)
{
    char path[PATH_MAX];
    struct stat info;
    if (!find_stop_file(run, path, &info) || !S_ISDIR(info.st_mode))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_EXISTS,
                     "'%s' is a directory, but a file of this name stops a training; remove the "
                     "directory and start again",
                     path);
}

fsdp_status train_stop_file_take(const char *run, bool *was_there_out, fsdp_error *err)
{
    char path[PATH_MAX];
    struct stat info;
    *was_there_out = find_stop_file(run, path, &info);
    if (!*was_there_out)
        return FSDP_OK;
    FSDP_TRY(check_stop_file(run, err));
    return unlink(path) == 0 ? FSDP_OK : fsdp_fail_errno(err, errno, "cannot remove '%s'", path);
}

/* === the objects of a job ===================================================================== */

/* --- mesh ---------------------------------------------------------------------------------------- */

static fsdp_status make_mesh(train_job *job, fsdp_error *err)
{
    const train_mesh *mesh = &job->config->parallel.mesh;
    const int64_t shard = mesh->shard ? mesh->shard : job->ranks;
    const int64_t shape[2] = {mesh->replicate, shard};
    static const char *const names[2] = {"replicate", "dp"};
    if ((mesh->replicate ? mesh->replicate : 1) * shard != job->ranks)
        return fsdp_fail(err, FSDP_ERR_USAGE, "parallel.mesh needs %lld ranks, but there are %d",
                         (long long)((mesh->replicate ? mesh->replicate : 1) * shard), job->ranks);
    if (mesh->replicate)
        return fsdp_world_mesh(job->world, 2, shape, names, &job->mesh, err);
    return fsdp_world_mesh(job->world, 1, &shard, &names[1], &job->mesh, err);
}

/* --- model --------------------------------------------------------------------------------------- */

static fsdp_status take_model(train_job *job, const fsdp_transformer_config *config,
                              const fsdp_text *text, fsdp_error *err)
{
    job->model_config = *config;
    fsdp_text_add(&job->model_text, text->data, text->size);
    return job->model_text.failed ? fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory") : FSDP_OK;
}

static fsdp_status take_source(train_job *job, const train_source *source, fsdp_error *err)
{
    const fsdp_text *text = &source->generation_text, *tokenizer = &source->tokenizer_config_text;
    if (text->size > 0)
        fsdp_text_add(&job->generation_text, text->data, text->size);
    if (tokenizer->size > 0)
        fsdp_text_add(&job->tokenizer_config_text, tokenizer->data, tokenizer->size);
    if (job->generation_text.failed || job->tokenizer_config_text.failed)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    return take_model(job, &source->config, &source->config_text, err);
}

/* With a gate, the MLP has as many parameters as one without. */
static int64_t inner_of(const train_config *config, const fsdp_transformer_form *form)
{
    if (config->model.inner > 0)
        return config->model.inner;
    return form->is_gated ? (8 * config->model.width / 3 + 7) / 8 * 8 : 4 * config->model.width;
}

/* A new model of [model], with the vocabulary of the tokenizer. */
static fsdp_status describe_new(train_job *job, fsdp_error *err)
{
    const train_config *config = job->config;
    fsdp_transformer_config made;
    fsdp_text text = {0};
    FSDP_TRY(fsdp_transformer_config_init(&made, config->model.family, err));
    made.layers = config->model.layers;
    made.heads = config->model.heads;
    made.kv_heads = config->model.kv_heads ? config->model.kv_heads : config->model.heads;
    made.width = config->model.width;
    made.inner = inner_of(config, &made.form);
    made.head_dim = made.heads > 0 ? made.width / made.heads : 0;
    made.context = config->model.context;
    made.vocab = fsdp_tokenizer_vocab(job->tokenizer);
    made.is_tied = config->model.tie;
    made.norm_eps = config->model.norm_eps;
    made.rope.theta = config->model.rope_theta;
    made.window = 0;
    made.bos = made.eos = fsdp_tokenizer_end_of_text(job->tokenizer);
    FSDP_TRY(fsdp_transformer_config_check(&made, "[model]", err));
    fsdp_status st = fsdp_transformer_config_write(&made, &text, err);
    if (st == FSDP_OK)
        st = take_model(job, &made, &text, err);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status make_model(train_job *job, fsdp_error *err)
{
    const train_config *config = job->config;
    const fsdp_transformer_opts opts = {
        .unit = {.mesh = job->mesh, .reshard_after_forward = (int)config->parallel.reshard},
        .is_mixed = config->train.dtype == TRAIN_MIXED,
        .recompute = config->train.recompute == TRAIN_RECOMPUTE_BLOCK,
        .threads = (int)config->train.threads};
    FSDP_TRY(fsdp_transformer_create(job->world, &job->model_config, &opts, &job->model, err));
    job->root = fsdp_transformer_root(job->model);
    return FSDP_OK;
}

/* --- optimizer ----------------------------------------------------------------------------------- */

static bool is_matrix(void *context, const fsdp_param *param)
{
    (void)context;
    return fsdp_param_describe(param).ndim >= 2;
}

static fsdp_status make_optimizer(train_job *job, fsdp_error *err)
{
    const train_config *config = job->config;
    const double decay = config->optim.weight_decay;
    const fsdp_optim_group groups[2] = {{.match = is_matrix, .weight_decay = decay},
                                        {.weight_decay = 0}};
    fsdp_adamw_opts opts = {.lr = config->optim.lr,
                            .beta1 = config->optim.beta1,
                            .beta2 = config->optim.beta2,
                            .eps = config->optim.eps,
                            .weight_decay = decay};
    if (config->optim.decay == TRAIN_DECAY_MATRICES) {
        opts.groups = groups;
        opts.group_count = 2;
    }
    return fsdp_adamw_create(job->root, &opts, &job->optim, err);
}

/* --- tokenizer and data -------------------------------------------------------------------------- */

static bool names_tokenizer(const train_job *job)
{
    return strcmp(job->config->data.tokenizer, "bytes") != 0;
}

/* Takes the tokenizer of the source; data.tokenizer may name an equal one. */
static fsdp_status take_tokenizer(train_job *job, const train_source *source, fsdp_error *err)
{
    const fsdp_text *text = &source->tokenizer_text;
    fsdp_tokenizer *named = NULL;
    size_t size = 0;
    FSDP_TRY(fsdp_tokenizer_parse(text->data, text->size, source->path, &job->tokenizer, err));
    if (!names_tokenizer(job))
        return FSDP_OK;
    FSDP_TRY(fsdp_tokenizer_open(job->config->data.tokenizer, &named, err));
    const char *data = fsdp_tokenizer_text(named, &size);
    const bool is_same = size == text->size && memcmp(data, text->data, size) == 0;
    fsdp_tokenizer_free(named);
    return is_same ? FSDP_OK
                   : fsdp_fail(err, FSDP_ERR_DAMAGED,
                               "'%s' has another tokenizer than data.tokenizer, '%s'", source->path,
                               job->config->data.tokenizer);
}

/* That of the source unless it has none. */
static fsdp_status open_tokenizer(train_job *job, const train_source *source, fsdp_error *err)
{
    if (source && source->tokenizer_text.size > 0)
        return take_tokenizer(job, source, err);
    if (job->opts->batches || job->opts->tokens)
        return FSDP_OK;
    if (source && source->other_tokenizer && !names_tokenizer(job))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has '%s' but no tokenizer.json; name one by data.tokenizer",
                         source->path, source->other_tokenizer);
    return fsdp_tokenizer_open(job->config->data.tokenizer, &job->tokenizer, err);
}

static fsdp_status check_vocabulary(const train_job *job, fsdp_error *err)
{
    int64_t ids = job->tokenizer ? fsdp_tokenizer_vocab(job->tokenizer) : 0;
    if (ids > job->model_config.vocab)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the tokenizer has %lld ids, but the model's vocabulary only %lld",
                         (long long)ids, (long long)job->model_config.vocab);
    return FSDP_OK;
}

static fsdp_status prepare(train_job *job, const train_source *source, fsdp_error *err)
{
    FSDP_TRY(open_tokenizer(job, source, err));
    if (source)
        FSDP_TRY(take_source(job, source, err));
    else if (!job->tokenizer)
        return fsdp_fail(err, FSDP_ERR_USAGE, "--batches needs --init, which gives the vocabulary");
    else
        FSDP_TRY(describe_new(job, err));
    FSDP_TRY(check_vocabulary(job, err));
    return open_batches(job, err);
}

/* --- begin and end ------------------------------------------------------------------------------- */

static void init(train_job *job, const train_options *opts, fsdp_world *world)
{
    *job = (train_job){.opts = opts, .config = &opts->config, .world = world};
    job->ctl = fsdp_world_ctl(world);
    job->rank = fsdp_world_rank(world);
    job->log.is_quiet = opts->common.quiet;
    job->log.prints_json = opts->common.json && opts->run && job->rank == 0;
    job->ranks = fsdp_world_size(world);
}

/* The newest checkpoint, whole or not, or -1; the leftovers of a first save that was killed are none. */
static fsdp_status find_newest(const char *run, int64_t *step_out, fsdp_error *err)
{
    bool is_run;
    fsdp_run_steps steps;
    *step_out = -1;
    FSDP_TRY(fsdp_path_is_run(run, NULL, &is_run, err));
    if (!is_run)
        return FSDP_OK;
    FSDP_TRY(fsdp_run_list(run, NULL, &steps, err));
    for (size_t i = 0; i < steps.count; i++) {
        const fsdp_run_step *step = &steps.items[i];
        if (step->state != FSDP_STEP_STAGING && step->state != FSDP_STEP_DELETING &&
            step->step > *step_out)
            *step_out = step->step;
    }
    fsdp_run_steps_release(&steps);
    return FSDP_OK;
}

typedef struct job_sources {
    train_source init, resume;
    bool has_init, has_resume;
    int64_t newest; /* step of the run before it was locked; -1: none */
} job_sources;

/* Refuses a checkpoint older than the run's newest: the training would save steps that exist. */
static fsdp_status open_resume(const train_options *opts, job_sources *from, fsdp_error *err)
{
    from->has_resume = true;
    FSDP_TRY(train_source_open(opts->resume_path, &from->resume, err));
    if (from->resume.is_hf)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot resume from '%s': it is not a checkpoint of a training; use "
                         "--init to start one with its model",
                         opts->resume_path);
    if (from->newest < 0 || from->newest <= from->resume.step)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_EXISTS,
                     "'%s' has step %lld, which is newer than '%s'; resume from the older one in "
                     "another run (--run), or from the newest by --resume auto",
                     opts->run, (long long)from->newest, opts->resume_path);
}

/* The checkpoint that this job resumes from: the run's newest checkpoint, another one, or nothing. */
static fsdp_status find_resume(const train_job *job, job_sources *from, fsdp_error *err)
{
    const train_options *opts = job->opts;
    FSDP_TRY(find_newest(opts->run, &from->newest, err));
    if (opts->resume == TRAIN_RESUME_PATH)
        return open_resume(opts, from, err);
    if (from->newest < 0)
        return FSDP_OK;
    if (opts->resume == TRAIN_RESUME_NO)
        return fsdp_fail(
            err, FSDP_ERR_EXISTS,
            "'%s' has checkpoints; name another run, or resume from them by --resume auto",
            opts->run);
    from->has_resume = true;
    fsdp_status st = train_source_open(opts->run, &from->resume, err);
    if (st == FSDP_ERR_NOT_FOUND && err) /* there are some, none of them good */
        err->status = st = FSDP_ERR_DAMAGED;
    return st;
}

static fsdp_status open_sources(const train_job *job, job_sources *from, fsdp_error *err)
{
    FSDP_TRY(find_resume(job, from, err));
    if (!job->opts->init)
        return FSDP_OK;
    fsdp_status st = train_source_open(job->opts->init, &from->init, err);
    if (st == FSDP_ERR_NOT_FOUND && from->has_resume)
        return FSDP_OK; /* it was needed for the first start only */
    from->has_init = st == FSDP_OK;
    return st;
}

static fsdp_status bring_values(train_job *job, job_sources *from, fsdp_error *err)
{
    if (from->has_resume)
        return train_resume_from(job, &from->resume, err);
    if (from->has_init)
        return train_source_load_model(&from->init, job, err);
    return fsdp_transformer_init(job->model, (uint64_t)job->config->train.seed, err);
}

/* Before values: a resume sets damaged checkpoints aside, which another job may be writing. */
static fsdp_status lock_run(train_job *job, fsdp_error *err)
{
    if (job->rank != 0)
        return FSDP_OK;
    job->log.drops_lines = job->config->save.on_error == TRAIN_ERROR_CONTINUE;
    FSDP_TRY(train_log_lock(&job->log, job->opts->run, err));
    return check_stop_file(job->opts->run, err);
}

/* Behind the lock: another training may have saved since this one listed the checkpoints. */
static fsdp_status check_newest(const train_job *job, const job_sources *from, fsdp_error *err)
{
    int64_t newest;
    FSDP_TRY(find_newest(job->opts->run, &newest, err));
    if (newest == from->newest)
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_EXISTS,
        "another training changed the checkpoints of '%s' while this one started; start it again",
        job->opts->run);
}

bool train_job_is_done(const train_job *job)
{
    return job->resumed && job->step >= job->config->train.steps;
}

static fsdp_status open_log(train_job *job, fsdp_error *err)
{
    if (job->opts->dump_grads && job->step > 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "--dump-grads writes the gradients of step 1, which '%s' has done "
                         "already; name another run",
                         job->opts->run);
    if (job->rank != 0)
        return FSDP_OK;
    return train_log_open(&job->log, job->step,
                          job->config->log.tensorboard && !train_job_is_done(job), err);
}

/* The model comes from --init or [model]; where neither says it, from the checkpoint. */
static const train_source *source_of_model(const train_job *job, const job_sources *from)
{
    if (from->has_init)
        return &from->init;
    return from->has_resume && (job->opts->batches || job->opts->init) ? &from->resume : NULL;
}

/* Rank 0: what a killed training left in the run. Leftovers that stay are not a failure. */
static void clean_run(const train_job *job)
{
    enum { LONGEST_MS = 600000 };
    fsdp_error ignored = {0};
    if (job->rank != 0)
        return;
    fsdp_world_begin_busy(job->world, LONGEST_MS);
    (void)!fsdp_run_retain(job->opts->run, NULL, &(fsdp_retain_opts){.apply = true}, &ignored);
    fsdp_world_end_busy(job->world);
}

static fsdp_status make_saver(train_job *job, fsdp_error *err)
{
    if (!job->config->save.async)
        return FSDP_OK;
    fsdp_status st = fsdp_async_saver_create(job->root, NULL, &job->saver, err);
    if (st != FSDP_ERR_USAGE)
        return st;
    train_log_say(&job->log, "saves are synchronous: %s", err->text);
    *err = (fsdp_error){0};
    return FSDP_OK;
}

static fsdp_status begin(train_job *job, job_sources *from, fsdp_error *err)
{
    FSDP_TRY(fsdp_ctl_agree(job->ctl, open_sources(job, from, err), err));
    FSDP_TRY(fsdp_ctl_agree(job->ctl, prepare(job, source_of_model(job, from), err), err));
    FSDP_TRY(make_mesh(job, err));
    FSDP_TRY(make_model(job, err));
    fsdp_world_mark(job->world, "model");
    FSDP_TRY(fsdp_ctl_agree(job->ctl, make_optimizer(job, err), err));
    FSDP_TRY(fsdp_ctl_agree(job->ctl, lock_run(job, err), err));
    FSDP_TRY(fsdp_ctl_agree(job->ctl, check_newest(job, from, err), err));
    FSDP_TRY(fsdp_ctl_agree(job->ctl, bring_values(job, from, err), err));
    FSDP_TRY(fsdp_ctl_agree(job->ctl, open_log(job, err), err));
    clean_run(job);
    return make_saver(job, err);
}

fsdp_status train_job_begin(train_job *job, const train_options *opts, fsdp_world *world,
                            fsdp_error *err)
{
    job_sources *from = calloc(1, sizeof *from);
    fsdp_status st = from ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    init(job, opts, world);
    st = fsdp_ctl_agree(job->ctl, st, err);
    if (st == FSDP_OK)
        st = begin(job, from, err);
    if (from) {
        train_source_close(&from->init);
        train_source_close(&from->resume);
    }
    free(from);
    return st;
}

static fsdp_status open_model(train_job *job, const char *path, train_source *source,
                              fsdp_error *err)
{
    FSDP_TRY(fsdp_ctl_agree(job->ctl, train_source_open(path, source, err), err));
    FSDP_TRY(fsdp_ctl_agree(job->ctl, prepare(job, source, err), err));
    FSDP_TRY(make_mesh(job, err));
    FSDP_TRY(make_model(job, err));
    return train_source_load_model(source, job, err);
}

fsdp_status train_job_open(train_job *job, const train_options *opts, fsdp_world *world,
                           const char *path, fsdp_error *err)
{
    train_source *source = calloc(1, sizeof *source);
    fsdp_status st = source ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    init(job, opts, world);
    st = fsdp_ctl_agree(job->ctl, st, err);
    if (st == FSDP_OK)
        st = open_model(job, path, source, err);
    if (source)
        train_source_close(source);
    free(source);
    return st;
}

static fsdp_status make_new(train_job *job, fsdp_error *err)
{
    FSDP_TRY(make_mesh(job, err));
    FSDP_TRY(make_model(job, err));
    fsdp_status st = make_optimizer(job, err);
    if (st == FSDP_OK)
        st = fsdp_transformer_init(job->model, (uint64_t)job->config->train.seed, err);
    return fsdp_ctl_agree(job->ctl, st, err);
}

fsdp_status train_job_make(train_job *job, const train_options *opts, fsdp_world *world,
                           const fsdp_transformer_config *config, fsdp_error *err)
{
    init(job, opts, world);
    job->model_config = *config;
    return make_new(job, err);
}

void train_job_end(train_job *job)
{
    fsdp_async_saver_free(job->saver);
    train_log_close(&job->log);
    close_batches(job->batches);
    fsdp_value_release(&job->data);
    fsdp_tokenizer_free(job->tokenizer);
    fsdp_optim_free(job->optim);
    fsdp_transformer_free(job->model);
    fsdp_mesh_free(job->mesh);
    fsdp_text_release(&job->model_text);
    fsdp_text_release(&job->generation_text);
    fsdp_text_release(&job->tokenizer_config_text);
}

/* === gradients in a file ====================================================================== */

/* Removes a directory and the files in it, of which none is a directory. */
static fsdp_status remove_directory(const char *path, fsdp_error *err)
{
    const struct dirent *entry;
    DIR *directory = opendir(path);
    if (!directory)
        return fsdp_fail_errno(err, errno, "cannot open '%s'", path);
    while ((entry = readdir(directory)))
        if (entry->d_type != DT_DIR)
            (void)unlinkat(dirfd(directory), entry->d_name, 0); /* rmdir tells of files that stay */
    closedir(directory);
    return rmdir(path) == 0 ? FSDP_OK : fsdp_fail_errno(err, errno, "cannot remove '%s'", path);
}

static fsdp_status add_grads(train_job *job, fsdp_sd *sd, fsdp_error *err)
{
    for (size_t u = 0; u < fsdp_root_unit_count(job->root); u++) {
        fsdp_unit *unit = fsdp_root_unit_at(job->root, u);
        for (size_t i = 0; i < fsdp_unit_param_count(unit); i++) {
            fsdp_param *param = fsdp_unit_param_at(unit, i);
            const fsdp_param_info info = fsdp_param_describe(param);
            const fsdp_tensor tensor = {.dtype = info.dtype,
                                        .ndim = info.ndim,
                                        .shape = info.shape,
                                        .layout = *info.layout,
                                        .data = fsdp_param_shard_grad(param)};
            FSDP_TRY(fsdp_sd_add_tensor(sd, info.name, strlen(info.name), &tensor, err));
        }
    }
    return FSDP_OK;
}

/* Rank 0 alone. */
static fsdp_status make_file(const char *shards, const char *path, fsdp_error *err)
{
    const fsdp_convert_opts opts = {.format = "safetensors", .overwrite = true, .skip_fsync = true};
    fsdp_status st = fsdp_checkpoint_convert(shards, path, &opts, err);
    if (st == FSDP_OK)
        return remove_directory(shards, err);
    (void)remove_directory(shards, NULL); /* the first failure counts */
    return st;
}

/* Collective, once after a backward. Writes whole gradients as safetensors. */
static fsdp_status train_dump_grads(train_job *job, const char *path, fsdp_error *err)
{
    char shards[PATH_MAX];
    fsdp_sd *sd = NULL;
    const fsdp_save_opts opts = {.overwrite = true, .skip_fsync = true, .skip_view = true};
    snprintf(shards, sizeof shards, "%s.shards", path);
    fsdp_status st = fsdp_sd_create(&sd, err);
    if (st == FSDP_OK)
        st = add_grads(job, sd, err);
    st = fsdp_ctl_agree(job->ctl, st, err);
    if (st == FSDP_OK)
        st = fsdp_sd_save(sd, job->ctl, shards, &opts, err);
    fsdp_sd_free(sd);
    if (st == FSDP_OK && job->rank == 0)
        st = make_file(shards, path, err);
    return fsdp_ctl_agree(job->ctl, st, err);
}

/* === a step =================================================================================== */

/* --- agreement ----------------------------------------------------------------------------------- */

fsdp_status train_agree(const train_job *job, fsdp_status mine, fsdp_error *err)
{
    const fsdp_error *failure = &job->log.failure;
    if (mine == FSDP_OK && failure->status != FSDP_OK) {
        mine = failure->status;
        if (err)
            *err = *failure;
    }
    return fsdp_ctl_agree(job->ctl, mine, err);
}

/* --- learning rate ------------------------------------------------------------------------------- */

/* Steps count from 1: the last one of the warm-up has the whole rate, and the next one is below it. */
static double learning_rate(const train_config *config, int64_t step)
{
    static const fsdp_schedule_kind kinds[] = {[TRAIN_CONSTANT] = FSDP_SCHEDULE_CONSTANT,
                                               [TRAIN_LINEAR] = FSDP_SCHEDULE_LINEAR,
                                               [TRAIN_COSINE] = FSDP_SCHEDULE_COSINE};
    const fsdp_schedule schedule = {.kind = kinds[config->optim.schedule],
                                    .warmup = config->optim.warmup,
                                    .total = config->train.steps,
                                    .end = config->optim.min_lr};
    const int64_t at = step <= schedule.warmup ? step - 1 : step;
    return config->optim.lr * fsdp_schedule_factor(&schedule, at);
}

/* --- microbatches -------------------------------------------------------------------------------- */

typedef struct share {
    int64_t first, count; /* this rank's sequences of a batch */
    int64_t micro;        /* sequences of a microbatch */
    int64_t rounds;       /* microbatches, equal on all ranks */
} share;

static share share_of(const train_job *job, int64_t sequences)
{
    share mine;
    int64_t most = (sequences + job->ranks - 1) / job->ranks;
    mine.first = sequences * job->rank / job->ranks;
    mine.count = sequences * (job->rank + 1) / job->ranks - mine.first;
    mine.micro = job->config->train.micro > 0 ? job->config->train.micro : most;
    mine.micro = mine.micro < most ? mine.micro : most;
    mine.rounds = mine.micro > 0 ? (most + mine.micro - 1) / mine.micro : 0;
    return mine;
}

static fsdp_token_batch microbatch(const train_batch *batch, const share *mine, int64_t round)
{
    int64_t begin = round * mine->micro, end = begin + mine->micro;
    begin = begin < mine->count ? begin : mine->count;
    end = end < mine->count ? end : mine->count;
    return (fsdp_token_batch){.ids = batch->ids + (mine->first + begin) * (batch->length + 1),
                              .sequences = end - begin,
                              .length = batch->length,
                              .stride = batch->length + 1,
                              .is_agreed = batch->is_agreed};
}

fsdp_status train_batch_prepare(train_job *job, const train_batch *batch, fsdp_error *err)
{
    const share mine = share_of(job, batch->sequences);
    for (int64_t round = 0; round < mine.rounds; round++) {
        const fsdp_token_batch part = microbatch(batch, &mine, round);
        FSDP_TRY(fsdp_transformer_prepare(job->model, &part, err));
    }
    return FSDP_OK;
}

/* A failure is kept: the ranks learn it in their next exchange. */
static void read_next(train_job *job)
{
    train_next *next = &job->next;
    *next = (train_next){.was_read = true};
    if (!job->batches || job->step >= job->config->train.steps)
        return;
    next->failure.status = read_batch(job, &next->batch, &next->failure);
    if (next->failure.status == FSDP_OK)
        next->failure.status = train_batch_prepare(job, &next->batch, &next->failure);
}

fsdp_status train_batches_take(train_job *job, train_batch *batch_out, fsdp_error *err)
{
    if (!job->next.was_read)
        read_next(job);
    if (!job->next.batch.is_agreed) {
        if (err && job->next.failure.status != FSDP_OK)
            *err = job->next.failure;
        FSDP_TRY(train_agree(job, job->next.failure.status, err));
        job->next.batch.is_agreed = true;
    }
    *batch_out = job->next.batch;
    fsdp_world_mark(job->world, "batch");
    return FSDP_OK;
}

static fsdp_status accumulate(train_job *job, const train_batch *batch, double *loss_out,
                              fsdp_error *err)
{
    const share mine = share_of(job, batch->sequences);
    const double scale = 1 / ((double)batch->sequences * (double)batch->length);
    double loss;
    *loss_out = 0;
    for (int64_t round = 0; round < mine.rounds; round++) {
        const fsdp_token_batch part = microbatch(batch, &mine, round);
        FSDP_TRY(fsdp_root_begin_microbatch(job->root, round, mine.rounds, err));
        FSDP_TRY(fsdp_transformer_train(job->model, &part, scale, &loss, err));
        *loss_out += loss;
    }
    return FSDP_OK;
}

/* --- a step -------------------------------------------------------------------------------------- */

static fsdp_status set_learning_rate(train_job *job, double lr, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_optim_group_count(job->optim); i++)
        FSDP_TRY(fsdp_optim_set_lr(job->optim, i, lr, err));
    return FSDP_OK;
}

/* A signal to any rank, or a file RUN/STOP. */
static bool is_asked_to_stop(const train_job *job)
{
    if (was_signalled())
        return true;
    return job->rank == 0 && job->opts->run && stop_file_is_there(job->opts->run);
}

/* Collective: the one exchange of a step. */
static fsdp_status exchange(train_job *job, double loss, double *loss_out, train_result *result,
                            fsdp_error *err)
{
    const bool fails = job->next.failure.status != FSDP_OK || job->log.failure.status != FSDP_OK;
    double sums[4] = {loss, is_asked_to_stop(job),
                      job->is_saving && fsdp_async_save_is_done(job->saver), fails};
    FSDP_TRY(fsdp_world_sum(job->world, sums, 4, err));
    *loss_out = sums[0];
    result->stop = sums[1] > 0;
    result->save_is_done = sums[2] == job->ranks;
    job->next.batch.is_agreed = sums[3] == 0;
    return FSDP_OK;
}

/* The step itself does not change anything where the norm is not finite. */
static fsdp_status update(train_job *job, train_result *result, fsdp_error *err)
{
    if (isfinite(result->loss)) {
        FSDP_TRY(set_learning_rate(job, result->lr, err));
        FSDP_TRY(fsdp_optim_step(job->optim, err));
    } else {
        fsdp_root_zero_grad(job->root);
    }
    FSDP_TRY(fsdp_root_grad_norm(job->root, 0, &result->grad_norm, err));
    result->is_finite = isfinite(result->loss) && isfinite(result->grad_norm);
    job->has_changed |= result->is_finite && result->lr > 0;
    return FSDP_OK;
}

fsdp_status train_step(train_job *job, const train_batch *batch, train_result *result,
                       fsdp_error *err)
{
    const fsdp_clip_opts clip = {.max_norm = job->config->optim.clip, .error_if_nonfinite = true};
    double loss;
    *result = (train_result){.lr = learning_rate(job->config, job->step + 1)};
    FSDP_TRY(accumulate(job, batch, &loss, err));
    if (job->opts->dump_grads && job->step == 0)
        FSDP_TRY(train_dump_grads(job, job->opts->dump_grads, err));
    fsdp_world_mark(job->world, "update");
    FSDP_TRY(fsdp_root_clip_grad_norm(job->root, &clip, NULL, err));
    job->step++;
    job->tokens += batch->sequences * batch->length;
    job->consumed += batch->sequences;
    read_next(job);
    FSDP_TRY(exchange(job, loss, &loss, result, err));
    result->loss = loss / ((double)batch->sequences * (double)batch->length);
    return update(job, result, err);
}

/* --- evaluation ---------------------------------------------------------------------------------- */

static fsdp_status add_losses(train_job *job, const train_batch *batch, double *sum,
                              fsdp_error *err)
{
    const share mine = share_of(job, batch->sequences);
    double loss;
    for (int64_t round = 0; round < mine.rounds; round++) {
        const fsdp_token_batch part = microbatch(batch, &mine, round);
        FSDP_TRY(fsdp_transformer_evaluate(job->model, &part, &loss, err));
        *sum += loss;
    }
    return FSDP_OK;
}

fsdp_status train_evaluate(train_job *job, int64_t batches, double *loss_out, int64_t *tokens_out,
                           fsdp_error *err)
{
    double sum = 0;
    *tokens_out = 0;
    for (int64_t i = 0; i < batches; i++) {
        train_batch batch;
        bool is_there;
        if (job->opts->eval)
            FSDP_TRY(fsdp_ctl_agree(job->ctl, cli_check_stop(err), err));
        FSDP_TRY(take_held_out(job, i, &batch, &is_there, err));
        if (!is_there)
            break;
        FSDP_TRY(add_losses(job, &batch, &sum, err));
        *tokens_out += batch.sequences * batch.length;
    }
    FSDP_TRY(fsdp_world_sum(job->world, &sum, 1, err));
    *loss_out = *tokens_out > 0 ? sum / (double)*tokens_out : NAN;
    return FSDP_OK;
}
