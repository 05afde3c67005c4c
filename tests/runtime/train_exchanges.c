/*
 * Exchanges of the control plane in the steps of fsdp-train: all ranks agree on the first batch, and from
 * then on a step has one, however many microbatches it has. It tells whether a rank cannot continue: then all
 * ranks end before the next step. A step whose norm is not finite changes nothing.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "statedict/ctl/ctl_backend.h"
#include "tests/support/ranks/worlds.h"
#include "tools/train/train.h"

enum { STEPS = 4, SEQUENCES = 8, LENGTH = 6, VOCAB = 17, WIDTH = 8 };

typedef struct exchange_case {
    train_options opts;
    int exchanges; /* of rank 0 */
} exchange_case;

static fsdp_status describe(fsdp_transformer_config *config, fsdp_error *err)
{
    FSDP_TRY(fsdp_transformer_config_init(config, "gpt2", err));
    config->layers = config->heads = config->kv_heads = 1;
    config->width = config->head_dim = WIDTH;
    config->inner = 2 * WIDTH;
    config->vocab = VOCAB;
    return FSDP_OK;
}

/* A batch that the test brings, as if train_batches_take had read it. */
static fsdp_status take(train_job *job, int64_t *ids, train_batch *batch_out, fsdp_error *err)
{
    const bool is_agreed = job->next.batch.is_agreed;
    for (int64_t i = 0; i < SEQUENCES * (LENGTH + 1); i++)
        ids[i] = (i * 5 + job->step * 3) % VOCAB;
    job->next.was_read = true;
    job->next.batch =
        (train_batch){.ids = ids, .sequences = SEQUENCES, .length = LENGTH, .is_agreed = is_agreed};
    FSDP_TRY(train_batch_prepare(job, &job->next.batch, err));
    return train_batches_take(job, batch_out, err);
}

static fsdp_status run_steps(train_job *job, fsdp_error *err)
{
    int64_t ids[SEQUENCES * (LENGTH + 1)];
    for (int step = 0; step < STEPS; step++) {
        train_batch batch;
        train_result result;
        FSDP_TRY(take(job, ids, &batch, err));
        FSDP_TRY(train_step(job, &batch, &result, err));
        if (!result.is_finite || result.grad_norm <= 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "step %d has the norm %g", step,
                             result.grad_norm);
    }
    return FSDP_OK;
}

static fsdp_status spoil(void *context, fsdp_param *param, fsdp_error *err)
{
    (void)context;
    (void)err;
    *(float *)fsdp_param_shard_grad(param) = INFINITY;
    return FSDP_OK;
}

/* A finite loss, and a norm that is not: the step changes nothing. */
static fsdp_status expect_skip(train_job *job, fsdp_error *err)
{
    int64_t ids[SEQUENCES * (LENGTH + 1)];
    float before[WIDTH];
    train_batch batch;
    train_result result;
    fsdp_box box;
    fsdp_param *norm = fsdp_unit_param_at(fsdp_root_unit_at(job->root, 1), 0);
    float *shard = fsdp_param_shard(norm, &box);
    const size_t size = (size_t)fsdp_box_count(&box) * sizeof *shard;
    memcpy(before, shard, size);
    FSDP_TRY(take(job, ids, &batch, err));
    if (size > 0)
        fsdp_param_set_post_accumulate_hook(norm, spoil, NULL);
    FSDP_TRY(train_step(job, &batch, &result, err));
    fsdp_param_set_post_accumulate_hook(norm, NULL, NULL);
    if (isfinite(result.loss) && !result.is_finite && memcmp(before, shard, size) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "a step with the norm %g was taken", result.grad_norm);
}

/* Rank 0 alone cannot write its log any more. */
static fsdp_status expect_end(train_job *job, fsdp_error *err)
{
    int64_t ids[SEQUENCES * (LENGTH + 1)];
    train_batch batch;
    train_result result;
    fsdp_error why = {0};
    FSDP_TRY(take(job, ids, &batch, err));
    if (job->rank == 0)
        (void)!fsdp_fail(&job->log.failure, FSDP_ERR_NO_SPACE, "the disk is full");
    FSDP_TRY(train_step(job, &batch, &result, err));
    if (take(job, ids, &batch, &why) == FSDP_ERR_NO_SPACE && strstr(why.text, "the disk is full"))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "rank %d continues after a failure of rank 0: %s",
                     job->rank, why.text);
}

static fsdp_status run_rank(world_rank *rank, fsdp_error *err)
{
    exchange_case *what = rank->user;
    fsdp_transformer_config config;
    train_job job = {0};
    fsdp_status status = describe(&config, err);
    if (status == FSDP_OK)
        status = train_job_make(&job, &what->opts, rank->world, &config, err);
    const uint64_t before = fsdp_world_ctl(rank->world)->calls;
    if (status == FSDP_OK)
        status = run_steps(&job, err);
    if (fsdp_world_rank(rank->world) == 0)
        what->exchanges = (int)(fsdp_world_ctl(rank->world)->calls - before);
    if (status == FSDP_OK)
        status = expect_skip(&job, err);
    if (status == FSDP_OK)
        status = expect_end(&job, err);
    train_job_end(&job);
    return status;
}

int main(void)
{
    bool is_right = true;
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        static exchange_case what;
        fsdp_error err = {0};
        train_config_init(&what.opts.config);
        what.opts.config.train.micro = 1;
        what.opts.config.train.steps = STEPS;
        if (run_worlds(ranks, "cpu", run_rank, &what, &err) != FSDP_OK) {
            printf("%d ranks: %s\n", ranks, err.text);
            is_right = false;
        } else if (what.exchanges != 1 + STEPS) {
            printf("%d ranks: %d exchanges in %d steps of %d microbatches, %d are expected\n",
                   ranks, what.exchanges, STEPS, SEQUENCES / ranks, 1 + STEPS);
            is_right = false;
        }
    }
    return !is_right;
}
