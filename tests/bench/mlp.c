/* A plan becomes parameters and arrays; forward and backward of a microbatch. See mlp.h. */
#include "tests/bench/mlp.h"

#include "base/core/mem.h"

#include <fsdp/root_init.h>
#include <stdio.h>

/* --- parameters ------------------------------------------------------------------------------- */

static fsdp_mlp_cut cut_of(const fsdp_mlp_plan *plan, int layer)
{
    if (!plan->tensor_dim || (layer % 2 == 0 && layer == plan->layers - 1))
        return FSDP_MLP_WHOLE;
    return layer % 2 == 0 ? FSDP_MLP_COLUMNS : FSDP_MLP_SUMS;
}

/* Every rank has the whole bias of a layer whose results are added up. */
static fsdp_status place_parts(const fsdp_mlp_layer *layer, const char *dim, fsdp_error *err)
{
    const fsdp_placement rows = {FSDP_SHARD, 0, 0}, columns = {FSDP_SHARD, 1, 0};
    if (layer->cut == FSDP_MLP_WHOLE)
        return FSDP_OK;
    if (layer->cut == FSDP_MLP_SUMS)
        return fsdp_param_set_placement(layer->linear.weight, dim, columns, err);
    FSDP_TRY(fsdp_param_set_placement(layer->linear.weight, dim, rows, err));
    return fsdp_param_set_placement(layer->linear.bias, dim, rows, err);
}

static fsdp_status declare_layer(fsdp_mlp *mlp, const fsdp_mlp_plan *plan, int i, fsdp_error *err)
{
    char prefix[48], name[64];
    fsdp_mlp_layer *layer = &mlp->layers[i];
    const int64_t shape[2] = {plan->widths[i + 1], plan->widths[i]};
    const fsdp_dtype dtype = plan->dtype != FSDP_DTYPE_NONE ? plan->dtype : FSDP_F32;
    *layer = (fsdp_mlp_layer){.linear = {.in = shape[1], .out = shape[0]},
                              .cut = cut_of(plan, i),
                              .has_relu = i + 1 < plan->layers};
    snprintf(prefix, sizeof prefix, "layers.%d", i);
    snprintf(name, sizeof name, "%s.weight", plan->names ? plan->names[i] : prefix);
    FSDP_TRY(fsdp_model_add(
        mlp->model, &(fsdp_param_spec){.name = name, .dtype = dtype, .ndim = 2, .shape = shape},
        &layer->linear.weight, err));
    snprintf(name, sizeof name, "%s.bias", plan->names ? plan->names[i] : prefix);
    FSDP_TRY(fsdp_model_add(
        mlp->model, &(fsdp_param_spec){.name = name, .dtype = dtype, .ndim = 1, .shape = shape},
        &layer->linear.bias, err));
    return place_parts(layer, plan->tensor_dim, err);
}

static fsdp_status declare_layers(fsdp_mlp *mlp, const fsdp_mlp_plan *plan, fsdp_error *err)
{
    const int64_t out = plan->widths[plan->layers];
    fsdp_mlp_layer *last = &mlp->layers[plan->layers];
    for (int i = 0; i < plan->layers; i++)
        FSDP_TRY(declare_layer(mlp, plan, i, err));
    if (!plan->has_root_bias)
        return FSDP_OK;
    *last = (fsdp_mlp_layer){.linear = {.in = out, .out = out}};
    return fsdp_model_add(
        mlp->model, &(fsdp_param_spec){.name = "bias", .dtype = FSDP_F32, .ndim = 1, .shape = &out},
        &last->linear.bias, err);
}

/* --- the object ------------------------------------------------------------------------------- */

fsdp_status fsdp_mlp_declare(fsdp_model *model, const fsdp_mlp_plan *plan, fsdp_mlp **mlp_out,
                             fsdp_error *err)
{
    *mlp_out = NULL;
    const int count = plan->layers + plan->has_root_bias;
    fsdp_mlp *mlp = fsdp_alloc(1, sizeof *mlp + (size_t)count * sizeof mlp->layers[0]);
    if (!mlp)
        return fsdp_fail_memory(err, "layers");
    mlp->model = model;
    mlp->tensor = plan->tensor;
    mlp->rows = plan->rows;
    mlp->layer_count = count;
    fsdp_status st = fsdp_nn_open_cpu(1, &mlp->nn, err);
    if (st == FSDP_OK)
        st = declare_layers(mlp, plan, err);
    if (st == FSDP_OK)
        *mlp_out = mlp;
    else
        fsdp_mlp_free(mlp);
    return st;
}

void fsdp_mlp_free(fsdp_mlp *mlp)
{
    if (!mlp)
        return;
    if (mlp->nn) {
        fsdp_f32_params_release(&mlp->params);
        mlp->nn->ops->free(mlp->nn, mlp->arrays);
        mlp->nn->ops->close(mlp->nn);
    }
    fsdp_free(mlp);
}

/* --- arrays ----------------------------------------------------------------------------------- */

static int64_t result_width(const fsdp_mlp *mlp)
{
    return mlp->layers[mlp->layer_count - 1].linear.out;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* This rank's part of a layer. */
static void find_part(fsdp_linear *linear)
{
    fsdp_box box;
    fsdp_param_data_box(linear->weight, &box);
    linear->out = box.len[0];
    linear->in = box.len[1];
}

/* Columns are fewer than elements of parameters, and so do not overflow. */
fsdp_status fsdp_mlp_set_root(fsdp_mlp *mlp, fsdp_root *root, fsdp_error *err)
{
    int64_t widest = 0, columns = 0;
    mlp->root = root;
    for (int i = 0; i < mlp->layer_count; i++) {
        fsdp_linear *linear = &mlp->layers[i].linear;
        if (linear->weight)
            find_part(linear);
        widest = larger(widest, larger(linear->in, linear->out));
        columns += linear->out;
    }
    const int64_t in = mlp->layers[0].linear.in, out = result_width(mlp);
    if (fsdp_mul_overflow(mlp->rows, columns + in + out + 2 * widest, &mlp->array_count))
        return fsdp_fail_memory(err, "activations");
    mlp->arrays = mlp->nn->ops->alloc(mlp->nn, mlp->array_count);
    if (!mlp->arrays)
        return fsdp_fail_memory(err, "activations");
    float *next = mlp->arrays;
    for (int i = 0; i < mlp->layer_count; next += mlp->rows * mlp->layers[i++].linear.out)
        mlp->layers[i].y = next;
    mlp->x = next;
    mlp->t = mlp->x + mlp->rows * in;
    mlp->dy = mlp->t + mlp->rows * out;
    mlp->dx = mlp->dy + mlp->rows * widest;
    return fsdp_f32_params_init(&mlp->params, mlp->nn, mlp->model, true, err);
}

int64_t fsdp_mlp_bytes(const fsdp_mlp *mlp)
{
    return (mlp->array_count + mlp->params.count) * (int64_t)sizeof(float);
}

/* --- layers ----------------------------------------------------------------------------------- */

/* The result of the last layer before this one that is not skipped. */
static const float *input_of(const fsdp_mlp *mlp, int layer)
{
    while (layer > 0 && mlp->layers[layer - 1].is_skipped)
        layer--;
    return layer > 0 ? mlp->layers[layer - 1].y : mlp->x;
}

static fsdp_status call_hook(const fsdp_mlp_layer *layer, fsdp_hook hook, fsdp_error *err)
{
    return layer->unit ? fsdp_unit_member_hook(layer->unit, layer->member, hook, err) : FSDP_OK;
}

/* The sum over the ranks that share these rows. */
static fsdp_status add_parts(const fsdp_mlp *mlp, float *data, int64_t columns, fsdp_error *err)
{
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = FSDP_F32,
                                  .in = data,
                                  .out = data,
                                  .count = mlp->rows * columns,
                                  .unit = "tensor parallel sums"};
    return fsdp_comm_run(mlp->tensor, &call, err);
}

static fsdp_status add_bias(const fsdp_mlp *mlp, const fsdp_mlp_layer *layer, fsdp_error *err)
{
    const int64_t out = layer->linear.out;
    const float *bias = fsdp_param_f32(layer->linear.bias, mlp->params.bias);
    if (!bias)
        return fsdp_param_error(layer->linear.bias, err);
    for (int64_t r = 0; r < mlp->rows; r++)
        mlp->nn->ops->add(mlp->nn, layer->y + r * out, bias, out);
    return FSDP_OK;
}

/* y, but for relu. */
static fsdp_status multiply(const fsdp_mlp *mlp, const fsdp_mlp_layer *layer, const float *x,
                            fsdp_error *err)
{
    fsdp_linear linear = layer->linear;
    if (!linear.weight) {
        mlp->nn->ops->copy(mlp->nn, layer->y, x, mlp->rows * linear.out);
        return add_bias(mlp, layer, err);
    }
    if (layer->cut != FSDP_MLP_SUMS)
        return fsdp_linear_forward(&mlp->params, &linear, x, layer->y, mlp->rows, err);
    linear.bias = NULL;
    FSDP_TRY(fsdp_linear_forward(&mlp->params, &linear, x, layer->y, mlp->rows, err));
    FSDP_TRY(add_parts(mlp, layer->y, linear.out, err));
    return add_bias(mlp, layer, err);
}

static fsdp_status forward_layer(const fsdp_mlp *mlp, const fsdp_mlp_layer *layer, const float *x,
                                 fsdp_error *err)
{
    FSDP_TRY(call_hook(layer, FSDP_HOOK_PRE_FORWARD, err));
    FSDP_TRY(multiply(mlp, layer, x, err));
    if (layer->has_relu)
        mlp->nn->ops->activate(mlp->nn,
                               &(fsdp_nn_activation){.function = FSDP_NN_RELU,
                                                     .x = layer->y,
                                                     .y = layer->y,
                                                     .count = mlp->rows * layer->linear.out});
    return call_hook(layer, FSDP_HOOK_POST_FORWARD, err);
}

/* Gives the gradients of parameters; dy becomes that of x, which the first layer does not need. */
static fsdp_status give_grads(fsdp_mlp *mlp, const fsdp_mlp_layer *layer, const float *x,
                              fsdp_error *err)
{
    const fsdp_linear_grad call = {
        .x = x, .dy = mlp->dy, .dx = x != mlp->x ? mlp->dx : NULL, .rows = mlp->rows};
    if (!layer->linear.weight)
        return fsdp_linear_bias_grad(&mlp->params, &layer->linear, &call, err);
    if (layer->has_relu)
        mlp->nn->ops->activate_grad(
            mlp->nn, &(fsdp_nn_activation_grad){.function = FSDP_NN_RELU,
                                                .x = layer->y,
                                                .dy = mlp->dy,
                                                .dx = mlp->dy,
                                                .count = mlp->rows * layer->linear.out});
    FSDP_TRY(fsdp_linear_backward(&mlp->params, &layer->linear, &call, err));
    if (call.dx && layer->cut == FSDP_MLP_COLUMNS)
        FSDP_TRY(add_parts(mlp, call.dx, layer->linear.in, err));
    if (call.dx) {
        mlp->dx = mlp->dy;
        mlp->dy = call.dx;
    }
    return FSDP_OK;
}

fsdp_status fsdp_mlp_backward_layer(fsdp_mlp *mlp, int number, fsdp_error *err)
{
    const fsdp_mlp_layer *layer = &mlp->layers[number];
    if (layer->is_skipped)
        return FSDP_OK;
    FSDP_TRY(call_hook(layer, FSDP_HOOK_PRE_BACKWARD, err));
    FSDP_TRY(give_grads(mlp, layer, input_of(mlp, number), err));
    return call_hook(layer, FSDP_HOOK_POST_BACKWARD, err);
}

/* --- a microbatch ----------------------------------------------------------------------------- */

static void fill(float *data, uint64_t seed, const char *name, int64_t first, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        data[i] = (float)fsdp_uniform(seed, name, (uint64_t)(first + i));
}

void fsdp_mlp_fill(fsdp_mlp *mlp, uint64_t seed, int64_t first)
{
    const int64_t in = mlp->layers[0].linear.in, out = result_width(mlp);
    fill(mlp->x, seed, "x", first * in, mlp->rows * in);
    fill(mlp->t, seed, "t", first * out, mlp->rows * out);
}

fsdp_status fsdp_mlp_forward(fsdp_mlp *mlp, fsdp_error *err)
{
    fsdp_unit *own = fsdp_root_unit(mlp->root);
    FSDP_TRY(fsdp_root_begin_forward(mlp->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(own, err));
    for (int i = 0; i < mlp->layer_count; i++)
        if (!mlp->layers[i].is_skipped)
            FSDP_TRY(forward_layer(mlp, &mlp->layers[i], input_of(mlp, i), err));
    FSDP_TRY(fsdp_unit_post_forward(own, err));
    return fsdp_root_end_forward(mlp->root, err);
}

double fsdp_mlp_loss(fsdp_mlp *mlp)
{
    const float *y = input_of(mlp, mlp->layer_count);
    const int64_t count = mlp->rows * result_width(mlp);
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        float apart = y[i] - mlp->t[i];
        sum += (double)apart * (double)apart;
        mlp->dy[i] = 2 * apart / (float)count;
    }
    return sum / (double)count;
}

fsdp_status fsdp_mlp_backward(fsdp_mlp *mlp, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_backward(fsdp_root_unit(mlp->root), err));
    for (int i = mlp->layer_count - 1; i >= 0; i--)
        FSDP_TRY(fsdp_mlp_backward_layer(mlp, i, err));
    FSDP_TRY(fsdp_root_end_backward(mlp->root, err));
    return mlp->nn->ops->finish(mlp->nn, err);
}

fsdp_status fsdp_mlp_run(fsdp_mlp *mlp, double *loss_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_mlp_forward(mlp, err));
    *loss_out = fsdp_mlp_loss(mlp);
    return fsdp_mlp_backward(mlp, err);
}
