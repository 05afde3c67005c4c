/* One step of a training, and evaluation. See train.h. */
#include "tools/train/train.h"
#include "tools/train/train_file.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === gradients in a file ====================================================================== */

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
        return train_file_remove_directory(shards, err);
    (void)train_file_remove_directory(shards, NULL); /* the first failure counts */
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
                              .stride = batch->length + 1};
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
    if (train_was_signalled())
        return true;
    return job->rank == 0 && job->opts->run && train_stop_file_is_there(job->opts->run);
}

fsdp_status train_step(train_job *job, const train_batch *batch, train_result *result,
                       fsdp_error *err)
{
    const fsdp_clip_opts clip = {.max_norm = job->config->optim.clip};
    double sums[3];
    *result = (train_result){.lr = learning_rate(job->config, job->step + 1)};
    FSDP_TRY(accumulate(job, batch, &sums[0], err));
    if (job->opts->dump_grads && job->step == 0)
        FSDP_TRY(train_dump_grads(job, job->opts->dump_grads, err));
    fsdp_world_mark(job->world, "update");
    FSDP_TRY(fsdp_root_clip_grad_norm(job->root, &clip, &result->grad_norm, err));
    sums[1] = is_asked_to_stop(job);
    sums[2] = job->is_saving && fsdp_async_save_is_done(job->saver);
    FSDP_TRY(fsdp_world_sum(job->world, sums, 3, err));
    result->loss = sums[0] / ((double)batch->sequences * (double)batch->length);
    result->stop = sums[1] > 0;
    result->save_is_done = sums[2] == job->ranks;
    result->is_finite = isfinite(result->loss) && isfinite(result->grad_norm);
    if (result->is_finite) {
        FSDP_TRY(set_learning_rate(job, result->lr, err));
        FSDP_TRY(fsdp_optim_step(job->optim, err));
        job->has_changed |= result->lr > 0;
    } else {
        fsdp_root_zero_grad(job->root);
    }
    job->step++;
    job->tokens += batch->sequences * batch->length;
    job->consumed += batch->sequences;
    return FSDP_OK;
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
        FSDP_TRY(train_batches_held_out(job, i, &batch, &is_there, err));
        if (!is_there)
            break;
        FSDP_TRY(add_losses(job, &batch, &sum, err));
        *tokens_out += batch.sequences * batch.length;
    }
    FSDP_TRY(fsdp_world_sum(job->world, &sum, 1, err));
    *loss_out = *tokens_out > 0 ? sum / (double)*tokens_out : NAN;
    return FSDP_OK;
}
