/* See toy_mlp.h. */
#include "tests/support/nets/toy_mlp.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/support/nets/tensors.h"

#include <fsdp/root_init.h>

/* --- plans ------------------------------------------------------------------------------------ */

mlp_plan mlp_plan_default(int layers, int64_t ranks)
{
    static const int widths[] = {5, 7, 4, 6, 8, 3, 7, 5, 6, 4, 3};
    mlp_plan plan = {.layers = layers,
                     .mesh_ndim = 1,
                     .mesh_shape = {ranks},
                     .mesh_names = {"dp"},
                     .opts = (fsdp_unit_opts){0},
                     .root_reshard = FSDP_RESHARD_AUTO};
    for (int i = 0; i < layers; i++) {
        plan.widths[i] = widths[i];
        plan.groups[i] = i;
    }
    plan.widths[layers] = widths[layers];
    return plan;
}

static void name_layer(const mlp_plan *plan, int layer, char out[32])
{
    if (plan->names[layer])
        snprintf(out, 32, "%s", plan->names[layer]);
    else
        snprintf(out, 32, "L%d", layer);
}

/* --- making the layers ------------------------------------------------------------------------ */

static fsdp_status place_layer(toy *net, int i, fsdp_error *err)
{
    const fsdp_placement columns = {FSDP_SHARD, 0, 0}, rows = {FSDP_SHARD, 1, 0};
    const char *dim = net->plan->tensor_dim;
    if (i % 2 == 1) /* every rank holds its whole bias */
        return fsdp_param_set_placement(net->weight[i], dim, rows, err);
    FSDP_TRY(fsdp_param_set_placement(net->weight[i], dim, columns, err));
    return fsdp_param_set_placement(net->bias[i], dim, columns, err);
}

static fsdp_status declare_layer(toy *net, int i, fsdp_error *err)
{
    const mlp_plan *plan = net->plan;
    fsdp_dtype dtype = plan->dtype != FSDP_DTYPE_NONE ? plan->dtype : FSDP_F32;
    char prefix[32], name[48];
    const int64_t shape[] = {plan->widths[i + 1], plan->widths[i]};
    name_layer(plan, i, prefix);
    snprintf(name, sizeof name, "%s.weight", prefix);
    FSDP_TRY(fsdp_model_add(
        net->model, &(fsdp_param_spec){.name = name, .dtype = dtype, .ndim = 2, .shape = shape},
        &net->weight[i], err));
    snprintf(name, sizeof name, "%s.bias", prefix);
    FSDP_TRY(fsdp_model_add(
        net->model, &(fsdp_param_spec){.name = name, .dtype = dtype, .ndim = 1, .shape = shape},
        &net->bias[i], err));
    return plan->tensor_dim ? place_layer(net, i, err) : FSDP_OK;
}

/* The root's bias is a layer without a weight, after the others. */
fsdp_status mlp_declare(toy *net, fsdp_error *err)
{
    const mlp_plan *plan = net->plan;
    const int64_t out = plan->widths[plan->layers];
    memcpy(net->is_skipped, plan->is_skipped, sizeof net->is_skipped);
    for (net->layers = 0; net->layers < plan->layers; net->layers++)
        FSDP_TRY(declare_layer(net, net->layers, err));
    if (!plan->has_root_bias)
        return FSDP_OK;
    FSDP_TRY(fsdp_model_add(
        net->model, &(fsdp_param_spec){.name = "bias", .dtype = FSDP_F32, .ndim = 1, .shape = &out},
        &net->own, err));
    net->bias[net->layers++] = net->own;
    return FSDP_OK;
}

/* Makes the unit of layer `first` and its neighbours; *next_out: the layer after them. */
static fsdp_status make_unit(toy *net, int first, int *next_out, fsdp_error *err)
{
    const mlp_plan *plan = net->plan;
    char names[MLP_LAYERS][32];
    const char *prefixes[MLP_LAYERS];
    fsdp_unit *unit = NULL;
    size_t n = 0;
    int next = first;
    for (; next < plan->layers && plan->groups[next] == plan->groups[first]; next++) {
        name_layer(plan, next, names[n]);
        prefixes[n] = names[n];
        net->member[next] = n++;
    }
    if (plan->groups[first] != MLP_ROOT)
        FSDP_TRY(fsdp_unit_create_list(net->model, prefixes, n, &net->opts, &unit, err));
    for (int i = first; i < next; i++)
        net->unit[i] = unit;
    *next_out = next;
    return FSDP_OK;
}

static fsdp_status build(toy *net, fsdp_world *world, fsdp_error *err)
{
    const mlp_plan *plan = net->plan;
    FSDP_TRY(toy_begin_in(net, world, plan->mesh_ndim, plan->mesh_shape, plan->mesh_names, err));
    net->opts = plan->opts;
    net->opts.mesh = net->mesh;
    FSDP_TRY(mlp_declare(net, err));
    for (int i = 0; i < plan->layers;)
        FSDP_TRY(make_unit(net, i, &i, err));
    fsdp_unit_opts opts = net->opts;
    opts.reshard_after_forward = plan->root_reshard;
    FSDP_TRY(fsdp_root_create(net->model, &opts, &net->root, err));
    for (int i = 0; i < net->layers; i++)
        if (!net->unit[i])
            net->unit[i] = fsdp_root_unit(net->root);
    return fsdp_root_init_uniform(net->root, 1, err);
}

fsdp_status mlp_create(toy *net, fsdp_world *world, const mlp_plan *plan, fsdp_error *err)
{
    *net = (toy){.plan = plan, .runs_root = true};
    fsdp_status status = build(net, world, err);
    if (status != FSDP_OK)
        toy_free(net);
    return status;
}

fsdp_status mlp_add_adamw(toy *net, fsdp_error *err)
{
    const fsdp_adamw_opts opts = {.weight_decay = 0.01};
    return toy_add_adamw(net, &opts, err);
}

/* --- arithmetic ------------------------------------------------------------------------------- */

static void layer_forward(float *y, const float *x, const float *w, const float *b, int out, int in,
                          bool has_relu)
{
    for (int r = 0; r < MLP_ROWS; r++)
        for (int o = 0; o < out; o++) {
            float sum = b[o];
            for (int k = 0; k < in; k++)
                sum += x[r * in + k] * w[o * in + k];
            y[r * out + o] = has_relu && sum < 0 ? 0 : sum;
        }
}

/* dy becomes the gradient of the input. y is the layer's output. */
static void layer_backward(float *dy, const float *x, const float *y, const float *w, float *dw,
                           float *db, int out, int in, bool has_relu)
{
    float dx[MLP_ROWS * MLP_WIDTH] = {0};
    memset(dw, 0, (size_t)(out * in) * sizeof *dw);
    memset(db, 0, (size_t)out * sizeof *db);
    for (int r = 0; r < MLP_ROWS; r++)
        for (int o = 0; o < out; o++) {
            float e = has_relu && y[r * out + o] <= 0 ? 0 : dy[r * out + o];
            db[o] += e;
            for (int k = 0; k < in; k++) {
                dx[r * in + k] += e * w[o * in + k];
                dw[o * in + k] += e * x[r * in + k];
            }
        }
    memcpy(dy, dx, sizeof dx);
}

void mlp_fill_rows(const mlp_plan *plan, uint64_t microbatch, float *x)
{
    uint64_t first = microbatch * MLP_ROWS * (uint64_t)plan->widths[0];
    for (int i = 0; i < MLP_ROWS * plan->widths[0]; i++)
        x[i] = (float)fsdp_uniform(2, "x", first + (uint64_t)i);
}

static double loss_of(const mlp_plan *plan, const float *y, uint64_t microbatch, float *dy_out)
{
    int n = MLP_ROWS * plan->widths[plan->layers];
    double loss = 0;
    for (int i = 0; i < n; i++) {
        float e = y[i] - (float)fsdp_uniform(2, "t", microbatch * (uint64_t)n + (uint64_t)i);
        loss += (double)(e * e) / n;
        dy_out[i] = 2 * e / (float)n;
    }
    return loss;
}

static bool has_relu(const mlp_plan *plan, int layer)
{
    return !plan->is_linear && layer + 1 < plan->layers;
}

/* --- over units ------------------------------------------------------------------------------- */

static void add_bias(float *y, const float *x, const float *bias, int out)
{
    for (int i = 0; i < MLP_ROWS * out; i++)
        y[i] = x[i] + bias[i % out];
}

static fsdp_status compute_layer(toy *net, int i, fsdp_error *err)
{
    const mlp_plan *plan = net->plan;
    float w[MLP_WIDTH * MLP_WIDTH], b[MLP_WIDTH], *y = net->x[i + 1];
    const float *weight = net->weight[i] ? tensor_values(net->weight[i], w) : NULL;
    const float *bias = tensor_values(net->bias[i], b);
    if (!bias || (net->weight[i] && !weight))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "layer %d is not gathered", i);
    if (weight)
        layer_forward(y, net->x[i], weight, bias, plan->widths[i + 1], plan->widths[i],
                      has_relu(plan, i));
    else
        add_bias(y, net->x[i], bias, plan->widths[i]);
    return FSDP_OK;
}

fsdp_status mlp_forward(toy *net, uint64_t microbatch, fsdp_error *err)
{
    mlp_fill_rows(net->plan, microbatch, net->x[0]);
    return toy_forward(net, compute_layer, err);
}

double mlp_loss(toy *net, uint64_t microbatch)
{
    return loss_of(net->plan, net->x[net->layers], microbatch, net->dy);
}

static fsdp_status give_bias_grad(toy *net, int i, fsdp_error *err)
{
    float db[MLP_WIDTH] = {0};
    int out = net->plan->widths[i];
    for (int k = 0; k < MLP_ROWS * out; k++)
        db[k % out] += net->dy[k];
    return tensor_give_grad(net->bias[i], db, err);
}

static fsdp_status give_layer_grads(toy *net, int i, fsdp_error *err)
{
    const mlp_plan *plan = net->plan;
    float w[MLP_WIDTH * MLP_WIDTH], dw[MLP_WIDTH * MLP_WIDTH], db[MLP_WIDTH];
    if (!net->weight[i])
        return give_bias_grad(net, i, err);
    const float *weight = tensor_values(net->weight[i], w);
    if (!weight)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "layer %d is not gathered", i);
    layer_backward(net->dy, net->x[i], net->x[i + 1], weight, dw, db, plan->widths[i + 1],
                   plan->widths[i], has_relu(plan, i));
    FSDP_TRY(tensor_give_grad(net->weight[i], dw, err));
    return tensor_give_grad(net->bias[i], db, err);
}

fsdp_status mlp_backward_layer(toy *net, int i, fsdp_error *err)
{
    return toy_backward_layer(net, i, give_layer_grads, err);
}

fsdp_status mlp_backward(toy *net, fsdp_error *err)
{
    return toy_backward(net, give_layer_grads, err);
}

fsdp_status mlp_microbatch(toy *net, uint64_t microbatch, double *loss_out, fsdp_error *err)
{
    FSDP_TRY(mlp_forward(net, microbatch, err));
    *loss_out = mlp_loss(net, microbatch);
    return mlp_backward(net, err);
}

/* --- in plain C ------------------------------------------------------------------------------- */

void mlp_values_init(const mlp_plan *plan, mlp_values *values_out)
{
    memset(values_out, 0, sizeof *values_out);
    for (int i = 0; i < plan->layers; i++) {
        char prefix[32], name[48];
        int out = plan->widths[i + 1], in = plan->widths[i];
        name_layer(plan, i, prefix);
        snprintf(name, sizeof name, "%s.weight", prefix);
        for (int k = 0; k < out * in; k++)
            values_out->weight[i][k] = (float)(fsdp_uniform(1, name, (uint64_t)k) / sqrt(in));
        snprintf(name, sizeof name, "%s.bias", prefix);
        for (int k = 0; k < out; k++)
            values_out->bias[i][k] = (float)(fsdp_uniform(1, name, (uint64_t)k) / sqrt(out));
    }
}

void mlp_values_round(mlp_values *values, fsdp_dtype dtype)
{
    enum { COUNT = sizeof *values / sizeof(float) };
    unsigned char narrow[COUNT * sizeof(double)];
    if (dtype == FSDP_F32)
        return;
    fsdp_cast(narrow, dtype, values, FSDP_F32, COUNT);
    fsdp_cast(values, FSDP_F32, narrow, dtype, COUNT);
}

double mlp_plain_microbatch(const mlp_plan *plan, const mlp_values *values, uint64_t microbatch,
                            mlp_values *grads_out)
{
    float x[MLP_LAYERS + 1][MLP_ROWS * MLP_WIDTH], dy[MLP_ROWS * MLP_WIDTH];
    const int *widths = plan->widths;
    mlp_fill_rows(plan, microbatch, x[0]);
    memset(grads_out, 0, sizeof *grads_out);
    for (int i = 0; i < plan->layers; i++)
        if (plan->is_skipped[i])
            memcpy(x[i + 1], x[i], sizeof x[i]);
        else
            layer_forward(x[i + 1], x[i], values->weight[i], values->bias[i], widths[i + 1],
                          widths[i], has_relu(plan, i));
    double loss = loss_of(plan, x[plan->layers], microbatch, dy);
    for (int i = plan->layers - 1; i >= 0; i--)
        if (!plan->is_skipped[i])
            layer_backward(dy, x[i], x[i + 1], values->weight[i], grads_out->weight[i],
                           grads_out->bias[i], widths[i + 1], widths[i], has_relu(plan, i));
    return loss;
}

void mlp_plain_adamw(mlp_values *values, const mlp_values *grads, mlp_moments *moments)
{
    const fsdp_adamw_opts opts = {
        .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
    float *value = (float *)values, *first = (float *)&moments->first,
          *second = (float *)&moments->second;
    const float *grad = (const float *)grads;
    moments->step++;
    double near = 1 - pow(opts.beta1, moments->step), far = 1 - pow(opts.beta2, moments->step);
    for (size_t i = 0; i < sizeof *values / sizeof *value; i++) {
        double g = (double)grad[i];
        double m = opts.beta1 * (double)first[i] + (1 - opts.beta1) * g;
        double v = opts.beta2 * (double)second[i] + (1 - opts.beta2) * g * g;
        double kept = (double)value[i] * (1 - opts.lr * opts.weight_decay);
        value[i] = (float)(kept - opts.lr * (m / near) / (sqrt(v / far) + opts.eps));
        first[i] = (float)m;
        second[i] = (float)v;
    }
}

/* --- replicas --------------------------------------------------------------------------------- */

static fsdp_status add_up(mlp_values *values, fsdp_world *world, const fsdp_mesh *mesh,
                          fsdp_error *err)
{
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = FSDP_F32,
                                  .in = values,
                                  .out = values,
                                  .count = sizeof *values / sizeof(float)};
    for (int dim = fsdp_mesh_ndim(mesh) - 1; dim >= 0; dim--)
        FSDP_TRY(fsdp_comm_run(fsdp_world_comm(world, mesh, dim, dim), &call, err));
    return FSDP_OK;
}

fsdp_status mlp_replica_backward(mlp_replica *replica, fsdp_world *world, const toy *net,
                                 uint64_t microbatch, const mlp_values *gathered, fsdp_error *err)
{
    replica->loss = mlp_plain_microbatch(net->plan, gathered ? gathered : &replica->values,
                                         microbatch, &replica->grads);
    mlp_values_round(&replica->grads, fsdp_param_describe(net->weight[0]).data_dtype);
    return add_up(&replica->grads, world, net->mesh, err);
}

void mlp_replica_divide(mlp_replica *replica, int layer, double divisor)
{
    for (size_t i = 0; i < MLP_WIDTH * MLP_WIDTH; i++)
        replica->grads.weight[layer][i] /= (float)divisor;
    for (size_t i = 0; i < MLP_WIDTH; i++)
        replica->grads.bias[layer][i] /= (float)divisor;
}

/* --- both ------------------------------------------------------------------------------------- */

fsdp_status mlp_gather(toy *net, mlp_values *values_out, fsdp_error *err)
{
    memset(values_out, 0, sizeof *values_out);
    for (int i = 0; i < net->plan->layers; i++) {
        float w[MLP_WIDTH * MLP_WIDTH], b[MLP_WIDTH];
        size_t out = (size_t)net->plan->widths[i + 1], in = (size_t)net->plan->widths[i];
        FSDP_TRY(fsdp_unit_unshard(net->unit[i], false, NULL, err));
        memcpy(values_out->weight[i], tensor_values(net->weight[i], w), out * in * sizeof *w);
        memcpy(values_out->bias[i], tensor_values(net->bias[i], b), out * sizeof *b);
        FSDP_TRY(fsdp_unit_reshard(net->unit[i], err));
    }
    return FSDP_OK;
}

fsdp_status mlp_expect(toy *net, const mlp_values *values, double tolerance, fsdp_error *err)
{
    for (int i = 0; i < net->plan->layers; i++) {
        FSDP_TRY(expect_shard(net->weight[i], values->weight[i], tolerance, err));
        FSDP_TRY(expect_shard(net->bias[i], values->bias[i], tolerance, err));
    }
    return FSDP_OK;
}

fsdp_status mlp_expect_grads(toy *net, const mlp_values *grads, double tolerance, fsdp_error *err)
{
    for (int i = 0; i < net->plan->layers; i++) {
        if (net->plan->is_skipped[i])
            continue;
        FSDP_TRY(expect_shard_grad(net->weight[i], grads->weight[i], tolerance, err));
        FSDP_TRY(expect_shard_grad(net->bias[i], grads->bias[i], tolerance, err));
    }
    return FSDP_OK;
}
