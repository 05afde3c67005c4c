/* Makes the objects of a job: mesh, model, optimizer, tokenizer, data. See train.h. */
#include "tools/train/train.h"
#include <fsdp/root_init.h>

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

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
    return train_batches_open(job, err);
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
static fsdp_status open_given(const train_options *opts, job_sources *from, fsdp_error *err)
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
        return open_given(opts, from, err);
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

static fsdp_status load_source(train_job *job, const train_source *source, fsdp_error *err)
{
    fsdp_status st = job->rank == 0 ? train_source_check_head(source, err) : FSDP_OK;
    FSDP_TRY(fsdp_ctl_agree(job->ctl, st, err));
    return train_source_load_model(source, job->root, err);
}

static fsdp_status bring_values(train_job *job, job_sources *from, fsdp_error *err)
{
    if (from->has_resume)
        return train_resume_from(job, &from->resume, err);
    if (from->has_init)
        return load_source(job, &from->init, err);
    return fsdp_transformer_init(job->model, (uint64_t)job->config->train.seed, err);
}

/* Before values: a resume sets damaged checkpoints aside, which another job may be writing. */
static fsdp_status lock_run(train_job *job, fsdp_error *err)
{
    if (job->rank != 0)
        return FSDP_OK;
    job->log.drops_lines = job->config->save.on_error == TRAIN_ERROR_CONTINUE;
    FSDP_TRY(train_log_lock(&job->log, job->opts->run, err));
    return train_stop_file_check(job->opts->run, err);
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
    return load_source(job, source, err);
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
    train_batches_close(job->batches);
    fsdp_tokenizer_free(job->tokenizer);
    fsdp_optim_free(job->optim);
    fsdp_transformer_free(job->model);
    fsdp_mesh_free(job->mesh);
    fsdp_text_release(&job->model_text);
    fsdp_text_release(&job->generation_text);
    fsdp_text_release(&job->tokenizer_config_text);
}
