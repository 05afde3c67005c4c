/* The training that bench train measures: tools/train with a model of its options, on random ids. */
#include "tests/bench/train/bench_trainer.h"

#include <fsdp/root_init.h>
#include <stdlib.h>

enum { CORES = 2 };

int bench_trainer_threads(const row_options *opts)
{
    return opts->common.jobs > 0 ? opts->common.jobs : CORES;
}

/* --- the model -------------------------------------------------------------------------------- */

static fsdp_status describe(const trainer_options *trainer, fsdp_transformer_config *config,
                            fsdp_error *err)
{
    FSDP_TRY(fsdp_transformer_config_init(config, "gpt2", err));
    config->layers = trainer->layers;
    config->width = trainer->width;
    config->inner = 4 * trainer->width;
    config->heads = config->kv_heads = trainer->heads;
    config->head_dim = trainer->width / trainer->heads;
    config->vocab = trainer->vocab;
    return FSDP_OK;
}

static void set_training(trainer_run *run, int ranks)
{
    train_config *config = &run->training.config;
    int threads = bench_trainer_threads(run->opts) / ranks;
    train_config_init(config);
    config->train.threads = threads > 0 ? threads : 1;
    config->optim.clip = 0; /* as in the peers */
    config->optim.schedule = TRAIN_CONSTANT;
}

fsdp_status bench_trainer_begin(trainer_run *run, fsdp_world *world, fsdp_error *err)
{
    const trainer_options *trainer = run->trainer;
    fsdp_transformer_config *config = calloc(1, sizeof *config);
    run->batch = (train_batch){.sequences = trainer->batch, .length = trainer->length};
    run->batch.ids = calloc((size_t)(trainer->batch * (trainer->length + 1)), sizeof(int64_t));
    fsdp_status st =
        config && run->batch.ids ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    if (st == FSDP_OK)
        st = describe(trainer, config, err);
    st = fsdp_ctl_agree(fsdp_world_ctl(world), st, err);
    if (st == FSDP_OK) {
        set_training(run, fsdp_world_size(world));
        st = train_job_make(&run->job, &run->training, world, config, err);
    }
    free(config);
    return st;
}

/* --- a step --------------------------------------------------------------------------------------- */

static void next_batch(trainer_run *run)
{
    const int64_t count = run->batch.sequences * (run->batch.length + 1);
    const int64_t vocab = run->trainer->vocab, first = run->batches++ * count;
    for (int64_t i = 0; i < count; i++) {
        const double drawn = fsdp_uniform(run->opts->seed, "ids", (uint64_t)(first + i));
        const int64_t id = (int64_t)((drawn + 1) / 2 * (double)vocab);
        run->batch.ids[i] = id < vocab ? id : vocab - 1;
    }
}

fsdp_status bench_trainer_step(trainer_run *run, bench_times *times, fsdp_error *err)
{
    train_result result;
    next_batch(run);
    fsdp_status st = cli_check_stop(err);
    if (st == FSDP_OK)
        st = train_batch_prepare(&run->job, &run->batch, err);
    FSDP_TRY(fsdp_ctl_agree(run->job.ctl, st, err));
    run->batch.is_agreed = true;
    bench_clock began = bench_now();
    FSDP_TRY(train_step(&run->job, &run->batch, &result, err));
    FSDP_TRY(fsdp_ctl_barrier(run->job.ctl, err));
    bench_add_time(times, &began);
    return result.is_finite ? FSDP_OK : fsdp_fail(err, FSDP_ERR_INTERNAL, "the loss is not finite");
}

void bench_trainer_end(trainer_run *run)
{
    train_job_end(&run->job);
    free(run->batch.ids);
}
