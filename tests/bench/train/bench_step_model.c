/*
 * The model of bench step: a multilayer perceptron (mlp.h), one unit per layer, over the mesh and
 * with the settings of the options.
 */
#include "tests/bench/train/bench_step.h"

#include <stdio.h>
#include <stdlib.h>

#include <fsdp/root_init.h>

/* --- building --------------------------------------------------------------------------------- */

static fsdp_status make_mesh(step_model *model, fsdp_error *err)
{
    const step_options *opts = model->opts;
    int ranks = fsdp_world_size(model->world), apart = opts->replicas * opts->parts, n = 0;
    int shards = opts->shards > 0 ? opts->shards : ranks;
    int64_t shape[3];
    const char *names[3];
    if (apart * shards != ranks)
        return fsdp_fail(err, FSDP_ERR_USAGE, "--mesh has %d ranks, there are %d", apart * shards,
                         ranks);
    if (opts->replicas > 1)
        shape[n] = opts->replicas, names[n++] = "rep";
    shape[n] = shards, names[n++] = "dp";
    if (opts->parts > 1)
        shape[n] = opts->parts, names[n++] = "tp";
    FSDP_TRY(fsdp_world_mesh(model->world, n, shape, names, &model->mesh, err));
    model->data_ranks = ranks / opts->parts;
    model->data_rank = fsdp_world_rank(model->world) / opts->parts;
    return FSDP_OK;
}

static fsdp_unit_opts unit_opts_of(const step_model *model)
{
    const step_options *opts = model->opts;
    fsdp_unit_opts unit = {.mesh = model->mesh};
    unit.shard_dims = "dp";
    unit.replicate_dims = opts->replicas > 1 ? "rep" : "";
    unit.reshard_after_forward = opts->reshard;
    unit.param_dtype = opts->param_dtype;
    unit.reduce_dtype = opts->reduce_dtype;
    unit.offload = opts->offload;
    return unit;
}

static fsdp_status add_unit(const step_model *model, int layer, const fsdp_unit_opts *unit_opts,
                            fsdp_error *err)
{
    const step_options *opts = model->opts;
    char name[48];
    snprintf(name, sizeof name, "layers.%d", layer);
    FSDP_TRY(fsdp_unit_create(model->model, name, unit_opts, &model->mlp->layers[layer].unit, err));
    fsdp_unit *unit = model->mlp->layers[layer].unit;
    if (opts->divide > 0)
        FSDP_TRY(fsdp_unit_set_gradient_divide_factor(unit, opts->divide, err));
    FSDP_TRY(
        fsdp_unit_set(unit, FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS, opts->force_sum, false, err));
    return fsdp_unit_set(unit, FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP, true, false, err);
}

/* The units before or after a layer, nearest first. */
static size_t list_neighbours(const step_model *model, int number, int direction, int depth,
                              fsdp_unit **units_out)
{
    size_t n = 0;
    for (int i = 1; i <= depth; i++) {
        int other = number + direction * i;
        if (other >= 0 && other < model->opts->layers)
            units_out[n++] = model->mlp->layers[other].unit;
    }
    return n;
}

static fsdp_status set_prefetch(step_model *model, fsdp_error *err)
{
    const step_options *opts = model->opts;
    fsdp_unit **units = calloc((size_t)opts->layers, sizeof *units);
    fsdp_status st = units ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    for (int i = 0; i < opts->layers && st == FSDP_OK; i++) {
        fsdp_unit *unit = model->mlp->layers[i].unit;
        size_t n = list_neighbours(model, i, 1, opts->prefetch_forward, units);
        st = fsdp_unit_set_prefetch(unit, FSDP_HOOK_PRE_FORWARD, units, n, err);
        n = list_neighbours(model, i, -1, opts->prefetch_backward, units);
        if (st == FSDP_OK)
            st = fsdp_unit_set_prefetch(unit, FSDP_HOOK_PRE_BACKWARD, units, n, err);
    }
    free(units);
    return st;
}

static fsdp_status make_optimizer(step_model *model, fsdp_error *err)
{
    fsdp_adamw_opts adamw = {.weight_decay = 0.01};
    fsdp_sgd_opts sgd = {0};
    adamw.lr = sgd.lr = model->opts->lr;
    return model->opts->optim == STEP_SGD
               ? fsdp_sgd_create(model->root, &sgd, &model->optim, err)
               : fsdp_adamw_create(model->root, &adamw, &model->optim, err);
}

/* Declares layers and prefetches, without messages; the caller agrees on failures. */
static fsdp_status declare(step_model *model, const fsdp_unit_opts *unit, fsdp_error *err)
{
    const step_options *opts = model->opts;
    int64_t *widths = calloc((size_t)opts->layers + 1, sizeof *widths);
    if (!widths)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    for (int i = 0; i <= opts->layers; i++)
        widths[i] = i < opts->layers ? opts->width : opts->out;
    fsdp_mlp_plan plan = {.layers = opts->layers, .widths = widths, .rows = opts->rows};
    if (opts->parts > 1) {
        int last = fsdp_mesh_ndim(model->mesh) - 1;
        plan.tensor_dim = "tp";
        plan.tensor = fsdp_world_comm(model->world, model->mesh, last, last);
    }
    fsdp_status st = fsdp_model_create(model->world, &model->model, err);
    if (st == FSDP_OK)
        st = fsdp_mlp_declare(model->model, &plan, &model->mlp, err);
    free(widths);
    for (int i = 0; i < opts->layers && st == FSDP_OK; i++)
        st = add_unit(model, i, unit, err);
    return st == FSDP_OK ? set_prefetch(model, err) : st;
}

fsdp_status step_model_build(step_model *model, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(model->world);
    FSDP_TRY(make_mesh(model, err));
    const fsdp_unit_opts opts = unit_opts_of(model);
    FSDP_TRY(fsdp_ctl_agree(ctl, declare(model, &opts, err), err));
    FSDP_TRY(fsdp_root_create(model->model, &opts, &model->root, err));
    fsdp_status st = fsdp_root_init_uniform(model->root, model->seed, err);
    if (st == FSDP_OK)
        st = make_optimizer(model, err);
    if (st == FSDP_OK)
        st = fsdp_mlp_set_root(model->mlp, model->root, err);
    FSDP_TRY(fsdp_ctl_agree(ctl, st, err));
    return model->opts->load ? fsdp_root_load(model->root, model->opts->load, NULL, err) : FSDP_OK;
}

void step_model_free(step_model *model)
{
    fsdp_optim_free(model->optim);
    fsdp_mlp_free(model->mlp);
    fsdp_root_free(model->root);
    fsdp_model_free(model->model);
    fsdp_mesh_free(model->mesh);
}

/* --- a microbatch ----------------------------------------------------------------------------- */

void step_model_fill(step_model *model, int step, int microbatch)
{
    int64_t before = (int64_t)step * model->opts->accumulate + microbatch;
    fsdp_mlp_fill(model->mlp, model->seed,
                  (before * model->data_ranks + model->data_rank) * model->opts->rows);
}
