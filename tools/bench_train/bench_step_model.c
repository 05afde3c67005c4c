/*
 * The model of fsdp-bench step: layers y = x W^T + b with relu between them, one unit each. Mathematics are
 * in f32 whatever the parameters' dtype; loss = mean of (y - t)^2 over own rows and outputs.
 */
#include "tools/bench_train/bench_step.h"
#include "kernels/linear.h"

#include <stdio.h>
#include <stdlib.h>

#include <fsdp/root_init.h>

/* --- shapes ----------------------------------------------------------------------------------- */

static int64_t outputs_of(const step_options *opts, int layer)
{
    return layer == opts->layers - 1 ? opts->out : opts->width;
}

static step_cut cut_of(const step_options *opts, int layer)
{
    if (opts->parts == 1 || (layer % 2 == 0 && layer == opts->layers - 1))
        return STEP_WHOLE;
    return layer % 2 == 0 ? STEP_COLUMNS : STEP_ROWS;
}

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
    if (opts->parts > 1)
        model->tensor = fsdp_world_comm(model->world, model->mesh, n - 1, n - 1);
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

static fsdp_status place_parts(step_layer *layer, fsdp_error *err)
{
    const fsdp_placement of_rows = {.kind = FSDP_SHARD, .dim = 0}, of_columns = {FSDP_SHARD, 1, 0};
    if (layer->cut == STEP_WHOLE)
        return FSDP_OK;
    if (layer->cut == STEP_ROWS)
        return fsdp_param_set_placement(layer->weight, "tp", of_columns, err);
    FSDP_TRY(fsdp_param_set_placement(layer->weight, "tp", of_rows, err));
    return fsdp_param_set_placement(layer->bias, "tp", of_rows, err);
}

static fsdp_status add_layer(step_model *model, int number, fsdp_error *err)
{
    char name[48];
    step_layer *layer = &model->layers[number];
    const fsdp_unit_opts opts = unit_opts_of(model);
    const int64_t shape[2] = {outputs_of(model->opts, number), model->opts->width};
    layer->cut = cut_of(model->opts, number);
    snprintf(name, sizeof name, "layers.%d.weight", number);
    FSDP_TRY(fsdp_model_add(
        model->model,
        &(fsdp_param_spec){.name = name, .dtype = FSDP_F32, .ndim = 2, .shape = shape},
        &layer->weight, err));
    snprintf(name, sizeof name, "layers.%d.bias", number);
    FSDP_TRY(fsdp_model_add(
        model->model,
        &(fsdp_param_spec){.name = name, .dtype = FSDP_F32, .ndim = 1, .shape = shape},
        &layer->bias, err));
    FSDP_TRY(place_parts(layer, err));
    snprintf(name, sizeof name, "layers.%d", number);
    FSDP_TRY(fsdp_unit_create(model->model, name, &opts, &layer->unit, err));
    if (model->opts->divide > 0)
        FSDP_TRY(fsdp_unit_set_gradient_divide_factor(layer->unit, model->opts->divide, err));
    FSDP_TRY(fsdp_unit_set(layer->unit, FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS,
                           model->opts->force_sum, false, err));
    return fsdp_unit_set(layer->unit, FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP, true, false,
                         err);
}

/* The units before or behind a layer, nearest first. */
static size_t list_neighbours(const step_model *model, int number, int direction, int depth,
                              fsdp_unit **units_out)
{
    size_t n = 0;
    for (int i = 1; i <= depth; i++) {
        int other = number + direction * i;
        if (other >= 0 && other < model->opts->layers)
            units_out[n++] = model->layers[other].unit;
    }
    return n;
}

static fsdp_status set_prefetch(step_model *model, fsdp_error *err)
{
    const step_options *opts = model->opts;
    fsdp_unit **units = calloc((size_t)opts->layers, sizeof *units);
    fsdp_status st = units ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    for (int i = 0; i < opts->layers && st == FSDP_OK; i++) {
        fsdp_unit *unit = model->layers[i].unit;
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

/* --- buffers of the model --------------------------------------------------------------------- */

static fsdp_status take(float **data_out, int64_t rows, int64_t columns, fsdp_error *err)
{
    *data_out = (uint64_t)rows > SIZE_MAX / sizeof(float) / (uint64_t)(columns > 0 ? columns : 1)
                    ? NULL
                    : calloc((size_t)(rows * columns) + 1, sizeof(float));
    return *data_out ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory for activations");
}

static int64_t widest(const step_options *opts)
{
    return opts->out > opts->width ? opts->out : opts->width;
}

static bool is_f32(const step_model *model)
{
    return fsdp_param_describe(model->layers[0].weight).data_dtype == FSDP_F32;
}

static fsdp_status make_room(step_model *model, fsdp_error *err)
{
    const step_options *opts = model->opts;
    FSDP_TRY(fsdp_linear_scratch_create(&model->scratch, err));
    for (int i = 0; i < opts->layers; i++) {
        step_layer *layer = &model->layers[i];
        fsdp_box box;
        fsdp_param_data_box(layer->weight, &box);
        layer->size = (fsdp_linear_size){opts->rows, box.len[1], box.len[0]};
        FSDP_TRY(take(&layer->y, opts->rows, layer->size.out, err));
    }
    FSDP_TRY(take(&model->x, opts->rows, opts->width, err));
    FSDP_TRY(take(&model->t, opts->rows, opts->out, err));
    FSDP_TRY(take(&model->dy, opts->rows, widest(opts), err));
    FSDP_TRY(take(&model->dx, opts->rows, widest(opts), err));
    if (is_f32(model))
        return FSDP_OK;
    FSDP_TRY(take(&model->wide_weight, opts->width, widest(opts), err));
    FSDP_TRY(take(&model->wide_bias, 1, widest(opts), err));
    return take(&model->wide_grad, opts->width, widest(opts), err);
}

int64_t step_model_bytes(const step_model *model)
{
    const step_options *opts = model->opts;
    int64_t count = opts->rows * (opts->width + opts->out + 2 * widest(opts));
    for (int i = 0; i < opts->layers; i++)
        count += opts->rows * model->layers[i].size.out;
    if (model->wide_weight)
        count += (2 * opts->width + 1) * widest(opts);
    return count * (int64_t)sizeof(float);
}

/* Declares layers and prefetches, without messages; the caller agrees on failures. */
static fsdp_status declare(step_model *model, fsdp_error *err)
{
    model->layers = calloc((size_t)model->opts->layers, sizeof *model->layers);
    if (!model->layers)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    FSDP_TRY(fsdp_model_create(model->world, &model->model, err));
    for (int i = 0; i < model->opts->layers; i++)
        FSDP_TRY(add_layer(model, i, err));
    return set_prefetch(model, err);
}

fsdp_status step_model_build(step_model *model, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(model->world);
    FSDP_TRY(make_mesh(model, err));
    FSDP_TRY(fsdp_ctl_agree(ctl, declare(model, err), err));
    const fsdp_unit_opts opts = unit_opts_of(model);
    FSDP_TRY(fsdp_root_create(model->model, &opts, &model->root, err));
    fsdp_status st = fsdp_root_init_uniform(model->root, model->seed, err);
    if (st == FSDP_OK)
        st = make_optimizer(model, err);
    if (st == FSDP_OK)
        st = make_room(model, err);
    FSDP_TRY(fsdp_ctl_agree(ctl, st, err));
    return model->opts->load ? fsdp_root_load(model->root, model->opts->load, NULL, err) : FSDP_OK;
}

void step_model_free(step_model *model)
{
    fsdp_optim_free(model->optim);
    fsdp_root_free(model->root);
    fsdp_model_free(model->model);
    fsdp_mesh_free(model->mesh);
    fsdp_linear_scratch_free(model->scratch);
    for (int i = 0; model->layers && i < model->opts->layers; i++)
        free(model->layers[i].y);
    free(model->layers);
    free(model->x);
    free(model->t);
    free(model->dy);
    free(model->dx);
    free(model->wide_weight);
    free(model->wide_bias);
    free(model->wide_grad);
}

/* --- a microbatch ----------------------------------------------------------------------------- */

static void fill(float *data, uint64_t seed, const char *name, int64_t first, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        data[i] = (float)fsdp_uniform(seed, name, (uint64_t)(first + i));
}

void step_model_fill(step_model *model, int step, int microbatch)
{
    const step_options *opts = model->opts;
    int64_t before = (int64_t)step * opts->accumulate + microbatch;
    int64_t row = (before * model->data_ranks + model->data_rank) * opts->rows;
    fill(model->x, model->seed, "x", row * opts->width, opts->rows * opts->width);
    fill(model->t, model->seed, "t", row * opts->out, opts->rows * opts->out);
}

/* The sum over the ranks that share these rows. */
static fsdp_status add_parts(const step_model *model, float *data, int64_t count, fsdp_error *err)
{
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = FSDP_F32,
                                  .in = data,
                                  .out = data,
                                  .count = count,
                                  .unit = "tensor parallel sums"};
    return fsdp_comm_run(model->tensor, &call, err);
}

/* A gathered parameter in f32; `room` where it has another dtype. */
static const float *read_param(fsdp_param *param, float *room)
{
    fsdp_dtype dtype = fsdp_param_describe(param).data_dtype;
    const void *data = fsdp_param_data(param);
    fsdp_box box;
    if (!data || dtype == FSDP_F32)
        return data;
    fsdp_param_data_box(param, &box);
    fsdp_cast(room, FSDP_F32, data, dtype, (size_t)fsdp_box_count(&box));
    return room;
}

static fsdp_status multiply(step_model *model, const step_layer *layer, const float *x,
                            fsdp_error *err)
{
    const float *weight = read_param(layer->weight, model->wide_weight);
    const float *bias = read_param(layer->bias, model->wide_bias);
    if (!weight || !bias)
        return fsdp_param_error(layer->weight, err);
    FSDP_TRY(fsdp_linear_forward(model->scratch, layer->size, x, weight, layer->y, err));
    if (layer->cut == STEP_ROWS)
        FSDP_TRY(add_parts(model, layer->y, layer->size.rows * layer->size.out, err));
    fsdp_linear_add_bias(layer->y, bias, layer->size.rows, layer->size.out);
    return FSDP_OK;
}

static fsdp_status forward(step_model *model, fsdp_error *err)
{
    const float *x = model->x;
    FSDP_TRY(fsdp_root_begin_forward(model->root, err));
    for (int i = 0; i < model->opts->layers; i++) {
        step_layer *layer = &model->layers[i];
        FSDP_TRY(fsdp_unit_pre_forward(layer->unit, err));
        FSDP_TRY(multiply(model, layer, x, err));
        if (i < model->opts->layers - 1)
            fsdp_relu(layer->y, layer->size.rows * layer->size.out);
        FSDP_TRY(fsdp_unit_post_forward(layer->unit, err));
        x = layer->y;
    }
    return fsdp_root_end_forward(model->root, err);
}

static double find_loss(step_model *model)
{
    const float *y = model->layers[model->opts->layers - 1].y;
    int64_t count = model->opts->rows * model->opts->out;
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        float apart = y[i] - model->t[i];
        sum += (double)apart * (double)apart;
        model->dy[i] = 2 * apart / (float)count;
    }
    return sum / (double)count;
}

/* dweight and dbias are made in f32 and, where the gradient has another dtype, cast. */
static fsdp_status give_grads(step_model *model, const step_layer *layer, const float *x,
                              fsdp_error *err)
{
    void *weight = fsdp_param_grad_raw(layer->weight), *bias = fsdp_param_grad_raw(layer->bias);
    if (!weight || !bias)
        return fsdp_param_error(layer->weight, err);
    float *dweight = model->wide_grad ? model->wide_grad : weight;
    float *dbias = model->wide_grad ? model->wide_bias : bias;
    fsdp_linear_grad_weight(model->scratch, layer->size, x, model->dy, dweight);
    fsdp_linear_grad_bias(dbias, model->dy, layer->size.rows, layer->size.out);
    if (!model->wide_grad)
        return FSDP_OK;
    fsdp_dtype dtype = fsdp_param_describe(layer->weight).data_dtype;
    fsdp_cast(weight, dtype, model->wide_grad, FSDP_F32,
              (size_t)(layer->size.out * layer->size.in));
    fsdp_cast(bias, dtype, model->wide_bias, FSDP_F32, (size_t)layer->size.out);
    return FSDP_OK;
}

/* Computes the gradient of the layer's input x, which is the output y of the layer before. */
static fsdp_status give_input_grad(step_model *model, const step_layer *layer, const float *x,
                                   fsdp_error *err)
{
    int64_t count = layer->size.rows * layer->size.in;
    const float *weight = read_param(layer->weight, model->wide_weight);
    if (!weight)
        return fsdp_param_error(layer->weight, err);
    fsdp_linear_grad_input(model->scratch, layer->size, model->dy, weight, model->dx);
    if (layer->cut == STEP_COLUMNS)
        FSDP_TRY(add_parts(model, model->dx, count, err));
    fsdp_relu_grad(model->dx, x, count);
    float *dy = model->dy;
    model->dy = model->dx;
    model->dx = dy;
    return FSDP_OK;
}

static fsdp_status backward(step_model *model, fsdp_error *err)
{
    for (int i = model->opts->layers - 1; i >= 0; i--) {
        const step_layer *layer = &model->layers[i];
        const float *x = i > 0 ? model->layers[i - 1].y : model->x;
        FSDP_TRY(fsdp_unit_pre_backward(layer->unit, err));
        FSDP_TRY(give_grads(model, layer, x, err));
        if (i > 0)
            FSDP_TRY(give_input_grad(model, layer, x, err));
        FSDP_TRY(fsdp_unit_post_backward(layer->unit, err));
    }
    return fsdp_root_end_backward(model->root, err);
}

fsdp_status step_model_run(step_model *model, bool is_last, double *loss_out, fsdp_error *err)
{
    for (int i = 0; i < model->opts->layers; i++)
        FSDP_TRY(fsdp_unit_set(model->layers[i].unit, FSDP_UNIT_REQUIRES_GRADIENT_SYNC, is_last,
                               false, err));
    FSDP_TRY(forward(model, err));
    *loss_out = find_loss(model);
    return backward(model, err);
}
