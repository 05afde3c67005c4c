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
    static const int64_t widths[] = {5, 7, 4, 6, 8, 3, 7, 5, 6, 4, 3};
    static const char *const names[] = {"L0", "L1", "L2", "L3", "L4", "L5", "L6", "L7", "L8", "L9"};
    mlp_plan plan = {.layers = layers,
                     .mesh_ndim = 1,
                     .mesh_shape = {ranks},
                     .mesh_names = {"dp"},
                     .root_reshard = FSDP_RESHARD_AUTO};
    memcpy(plan.widths, widths, sizeof widths);
    memcpy(plan.names, names, sizeof names);
    for (int i = 0; i < layers; i++)
        plan.groups[i] = i;
    return plan;
}

static bool has_relu(const mlp_plan *plan, int layer)
{
    return !plan->is_linear && layer + 1 < plan->layers;
}

/* --- over units ------------------------------------------------------------------------------- */

fsdp_status mlp_declare(toy *net, fsdp_error *err)
{
    const mlp_plan *plan = net->plan;
    const int last = plan->mesh_ndim - 1;
    const fsdp_mlp_plan whole = {
        .layers = plan->layers,
        .widths = plan->widths,
        .rows = MLP_ROWS,
        .names = plan->names,
        .dtype = plan->dtype,
        .has_root_bias = plan->has_root_bias,
        .tensor_dim = plan->tensor_dim,
        .tensor = plan->tensor_dim ? fsdp_world_comm(net->world, net->mesh, last, last) : NULL};
    FSDP_TRY(fsdp_mlp_declare(net->model, &whole, &net->mlp, err));
    net->layers = net->mlp->layer_count;
    for (int i = 0; i < net->layers; i++) {
        fsdp_mlp_layer *layer = &net->mlp->layers[i];
        net->weight[i] = layer->linear.weight;
        net->bias[i] = layer->linear.bias;
        layer->has_relu = has_relu(plan, i);
        layer->is_skipped = i < plan->layers && plan->is_skipped[i];
    }
    net->own = plan->has_root_bias ? net->bias[plan->layers] : NULL;
    return FSDP_OK;
}

/* Makes the unit of layer `first` and its neighbours; *next_out: the layer after them. */
static fsdp_status make_unit(toy *net, int first, int *next_out, fsdp_error *err)
{
    const mlp_plan *plan = net->plan;
    fsdp_unit *unit = NULL;
    int next = first + 1;
    while (next < plan->layers && plan->groups[next] == plan->groups[first])
        next++;
    if (plan->groups[first] != MLP_ROOT)
        FSDP_TRY(fsdp_unit_create_list(net->model, &plan->names[first], (size_t)(next - first),
                                       &net->opts, &unit, err));
    for (int i = first; i < next; i++) {
        net->unit[i] = unit;
        net->mlp->layers[i].member = (size_t)(i - first);
    }
    *next_out = next;
    return FSDP_OK;
}

fsdp_status mlp_set_root(toy *net, fsdp_error *err)
{
    for (int i = 0; i < net->layers; i++)
        if (net->unit[i])
            net->mlp->layers[i].unit = net->unit[i];
        else
            net->unit[i] = fsdp_root_unit(net->root);
    return fsdp_mlp_set_root(net->mlp, net->root, err);
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
    FSDP_TRY(mlp_set_root(net, err));
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

enum { ROWS_SEED = 2 };

fsdp_status mlp_forward(toy *net, uint64_t microbatch, fsdp_error *err)
{
    fsdp_mlp_fill(net->mlp, ROWS_SEED, (int64_t)microbatch * MLP_ROWS);
    return fsdp_mlp_forward(net->mlp, err);
}

fsdp_status mlp_microbatch(toy *net, uint64_t microbatch, double *loss_out, fsdp_error *err)
{
    fsdp_mlp_fill(net->mlp, ROWS_SEED, (int64_t)microbatch * MLP_ROWS);
    return fsdp_mlp_run(net->mlp, loss_out, err);
}

/* --- in plain C ------------------------------------------------------------------------------- */

static void layer_forward(float *y, const float *x, const float *w, const float *b, int64_t out,
                          int64_t in, bool has_relu)
{
    for (int r = 0; r < MLP_ROWS; r++)
        for (int64_t o = 0; o < out; o++) {
            float sum = 0;
            for (int64_t k = 0; k < in; k++)
                sum = fmaf(x[r * in + k], w[o * in + k], sum);
            sum += b[o];
            y[r * out + o] = has_relu && sum < 0 ? 0 : sum;
        }
}

/* dy becomes the gradient of the input. y is the layer's output. */
static void layer_backward(float *dy, const float *x, const float *y, const float *w, float *dw,
                           float *db, int64_t out, int64_t in, bool has_relu)
{
    float dx[MLP_ROWS * MLP_WIDTH] = {0};
    for (int r = 0; r < MLP_ROWS; r++)
        for (int64_t o = 0; o < out; o++) {
            float e = has_relu && y[r * out + o] <= 0 ? 0 : dy[r * out + o];
            db[o] += e;
            for (int64_t k = 0; k < in; k++) {
                dx[r * in + k] = fmaf(e, w[o * in + k], dx[r * in + k]);
                dw[o * in + k] = fmaf(e, x[r * in + k], dw[o * in + k]);
            }
        }
    memcpy(dy, dx, sizeof dx);
}

static float row_value(const char *name, uint64_t microbatch, int64_t width, int64_t i)
{
    return (float)fsdp_uniform(ROWS_SEED, name,
                               microbatch * MLP_ROWS * (uint64_t)width + (uint64_t)i);
}

static double loss_of(const mlp_plan *plan, const float *y, uint64_t microbatch, float *dy_out)
{
    int64_t width = plan->widths[plan->layers], n = MLP_ROWS * width;
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        float e = y[i] - row_value("t", microbatch, width, i);
        sum += (double)e * (double)e;
        dy_out[i] = 2 * e / (float)n;
    }
    return sum / (double)n;
}

static void init_values(float *values, const char *layer, const char *name, int64_t count,
                        int64_t last_dim)
{
    char full[48];
    snprintf(full, sizeof full, "%s.%s", layer, name);
    for (int64_t k = 0; k < count; k++)
        values[k] = (float)(fsdp_uniform(1, full, (uint64_t)k) / sqrt((double)last_dim));
}

void mlp_values_init(const mlp_plan *plan, mlp_values *values_out)
{
    memset(values_out, 0, sizeof *values_out);
    for (int i = 0; i < plan->layers; i++) {
        int64_t out = plan->widths[i + 1], in = plan->widths[i];
        init_values(values_out->weight[i], plan->names[i], "weight", out * in, in);
        init_values(values_out->bias[i], plan->names[i], "bias", out, out);
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
    const int64_t *widths = plan->widths;
    for (int64_t i = 0; i < MLP_ROWS * widths[0]; i++)
        x[0][i] = row_value("x", microbatch, widths[0], i);
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
        memcpy(values_out->weight[i], fsdp_param_f32(net->weight[i], w), out * in * sizeof *w);
        memcpy(values_out->bias[i], fsdp_param_f32(net->bias[i], b), out * sizeof *b);
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
