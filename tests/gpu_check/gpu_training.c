/*
 * Training on the GPU: its state equals that of the host, and other numbers of ranks load it. The
 * models of runtime/ compute on the host, so layers here are kernels of the device: a gradient is
 * the gathered parameter times a number that depends on rank, step and layer. Gathers, casts,
 * reductions, clipping and optimizers are those of every model. See gpu_check.h.
 */
#include "tests/gpu_check/gpu_ranks.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/core/mem.h"
#include "kernels/digest.h"
#include "tests/support/nets/toy.h"
#include <fsdp/root_init.h>
#include <fsdp/state.h>

enum { STEPS = 5, LAYERS = 4 };

typedef struct train_setup {
    const char *name;
    fsdp_unit_opts units; /* without mesh */
    int replicas;         /* 0: none */
    bool is_sgd, prefetches;
} train_setup;

static const train_setup setups[] = {
    {.name = "adamw"},
    {.name = "sgd-unsharded", .units.reshard_after_forward = FSDP_RESHARD_NEVER, .is_sgd = true},
    {.name = "adamw-bf16", .units = {.param_dtype = FSDP_BF16, .reduce_dtype = FSDP_F32}},
    {.name = "adamw-prefetch", .prefetches = true},
    {.name = "adamw-hybrid", .replicas = 2},
    {.name = "adamw-offload", .units.offload = true},
    {.name = "hybrid-offload", .units.offload = true, .replicas = 2},
};

typedef struct train_job {
    const train_setup *setup;
    const char *save, *load;                  /* NULL: not */
    char hash[GPU_MOST_RANKS][FSDP_XXH3_HEX]; /* of each rank's whole state */
} train_job;

/* --- the model -------------------------------------------------------------------------------- */

static fsdp_status set_prefetch(toy *net, fsdp_error *err)
{
    for (int i = 0; i < LAYERS; i++) {
        FSDP_TRY(fsdp_unit_set_prefetch(net->unit[i], FSDP_HOOK_PRE_FORWARD, &net->unit[i + 1],
                                        i + 1 < LAYERS, err));
        FSDP_TRY(fsdp_unit_set_prefetch(net->unit[i], FSDP_HOOK_PRE_BACKWARD,
                                        i > 0 ? &net->unit[i - 1] : NULL, i > 0, err));
    }
    return FSDP_OK;
}

static fsdp_status build(toy *net, fsdp_world *world, const train_setup *setup, fsdp_error *err)
{
    const int64_t size = fsdp_world_size(world), rows[] = {37, 13};
    const bool two = setup->replicas > 0;
    const int64_t shape[] = {two ? setup->replicas : size, two ? size / setup->replicas : 0};
    const char *const names[] = {two ? "rep" : "dp", "dp"};
    const fsdp_adamw_opts adamw = {.weight_decay = 0.01};
    fsdp_sgd_opts sgd = {.momentum = 0.9};
    sgd.lr = 0.05;
    FSDP_TRY(toy_begin_in(net, world, 1 + two, shape, names, err));
    const fsdp_mesh *mesh = net->opts.mesh;
    net->opts = setup->units;
    net->opts.mesh = mesh;
    FSDP_TRY(toy_add_weights(net, LAYERS, 2, rows, err));
    FSDP_TRY(toy_wrap(net, err));
    FSDP_TRY(fsdp_root_init_uniform(net->root, 1, err));
    if (setup->prefetches)
        FSDP_TRY(set_prefetch(net, err));
    return setup->is_sgd ? toy_add_sgd(net, &sgd, err) : toy_add_adamw(net, &adamw, err);
}

/* --- a step ----------------------------------------------------------------------------------- */

static fsdp_status give_grad(toy *net, int layer, fsdp_error *err)
{
    fsdp_stream *stream = net->root->context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_device_kernels *kernels = stream->device->ops->kernels;
    fsdp_param *param = net->weight[layer];
    const fsdp_dtype dtype = fsdp_param_describe(param).grad_dtype;
    const size_t count = (size_t)fsdp_param_count(param);
    const int step = *(const int *)net->user, rank = fsdp_world_rank(net->world);
    const void *data = fsdp_param_data(param);
    void *grad = data ? fsdp_param_grad_raw(param) : NULL;
    if (!grad)
        return fsdp_param_error(param, err);
    kernels->copy(stream, grad, data, count * fsdp_dtype_size(dtype));
    kernels->multiply(stream, &(fsdp_span){grad, dtype, count}, 1,
                      0.3 + 0.7 * rank + 0.11 * step - 0.2 * layer);
    return FSDP_OK;
}

static fsdp_status train(toy *net, fsdp_error *err)
{
    const fsdp_clip_opts clip = {.max_norm = 2, .norm_type = 2};
    for (int step = 0; step < STEPS; step++) {
        net->user = &step;
        FSDP_TRY(toy_forward(net, NULL, err));
        FSDP_TRY(toy_backward(net, give_grad, err));
        FSDP_TRY(fsdp_root_clip_grad_norm(net->root, &clip, NULL, err));
        FSDP_TRY(fsdp_optim_step(net->optim, err));
    }
    return FSDP_OK;
}

/* --- its state -------------------------------------------------------------------------------- */

/* XXH3-128 of all whole tensors and their names. */
static fsdp_status hash_state(toy *net, char hash_out[FSDP_XXH3_HEX], fsdp_error *err)
{
    const fsdp_state_opts opts = {.full_state_dict = true};
    fsdp_text text = {0};
    fsdp_sd *sd = NULL;
    FSDP_TRY(fsdp_root_get_state(net->root, &opts, &sd, err));
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        fsdp_text_add(&text, entry->name, entry->name_size);
        if (entry->kind == FSDP_ENTRY_TENSOR)
            fsdp_text_add(&text, entry->data, (size_t)fsdp_entry_bytes(entry));
    }
    fsdp_sd_free(sd);
    bool is_whole = !text.failed && text.size > 0;
    if (is_whole)
        fsdp_xxh3_hex(text.data, text.size, hash_out);
    fsdp_text_release(&text);
    return is_whole ? FSDP_OK : fsdp_fail_memory(err, "a state");
}

static fsdp_status run_rank(void *context, fsdp_world *world, fsdp_error *err)
{
    train_job *job = context;
    toy net = {0};
    fsdp_status status = build(&net, world, job->setup, err);
    if (status == FSDP_OK)
        status = job->load ? fsdp_root_load(net.root, job->load, NULL, err) : train(&net, err);
    if (status == FSDP_OK && job->save)
        status = fsdp_root_save(net.root, job->save, NULL, err);
    if (status == FSDP_OK)
        status = hash_state(&net, job->hash[fsdp_world_rank(world)], err);
    toy_free(&net);
    return status;
}

static fsdp_status run_job(train_job *job, const char *device, int ranks, fsdp_error *err)
{
    gpu_ranks run = {.count = ranks, .device = device, .body = run_rank, .context = job};
    memset(job->hash, 0, sizeof job->hash);
    FSDP_TRY(gpu_ranks_run(&run, err));
    for (int i = 1; i < ranks; i++)
        if (strcmp(job->hash[0], job->hash[i]) != 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "rank %d gathers another state than rank 0",
                             i);
    return FSDP_OK;
}

static fsdp_status expect_hash(const train_job *job, const char *expected, fsdp_error *err)
{
    return strcmp(job->hash[0], expected) == 0
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_INTERNAL, "XXH3-128 of the state is %s, and %s is right",
                           job->hash[0], expected);
}

/* --- checks ----------------------------------------------------------------------------------- */

/* The GPU's state is the host's. */
fsdp_status gpu_check_training(gpu_results *results, int ranks, fsdp_error *err)
{
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++) {
        train_job host = {.setup = &setups[i]}, device = host;
        if (setups[i].replicas > 0 && ranks % setups[i].replicas != 0)
            continue;
        gpu_row *row = gpu_add_wanted_row(results, "training/%d-ranks/%s", ranks, setups[i].name);
        if (!row)
            continue;
        fsdp_status status = run_job(&host, "cpu", ranks, err);
        if (status == FSDP_OK)
            status = run_job(&device, results->options.device, ranks, err);
        if (status == FSDP_OK)
            status = expect_hash(&device, host.hash[0], err);
        gpu_end_row(row, status, err);
    }
    return FSDP_OK;
}

/* Saved by so many ranks, and loaded by others. */
fsdp_status gpu_check_reload(gpu_results *results, int ranks, fsdp_error *err)
{
    static const int others[] = {1, 2, 4};
    char path[4096];
    train_job saved = {.setup = &setups[0], .save = path};
    snprintf(path, sizeof path, "%s/saved-by-%d", results->options.work, ranks);
    FSDP_TRY(run_job(&saved, results->options.device, ranks, err));
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        train_job loaded = {.setup = &setups[0], .load = path};
        gpu_row *row = gpu_add_wanted_row(results, "reload/%d-to-%d-ranks", ranks, others[i]);
        if (!row)
            continue;
        fsdp_status status = run_job(&loaded, results->options.device, others[i], err);
        if (status == FSDP_OK)
            status = expect_hash(&loaded, saved.hash[0], err);
        gpu_end_row(row, status, err);
    }
    return FSDP_OK;
}
