/*
 * The model of transformer.h: linear layers; a layer of the transformer, forward and backward:
 * x + attention(norm(x)), then the same with the MLP; a microbatch, whose ids go through embedding, layers,
 * last norm and head to the loss and back; sampling; and the object. transformer_parts.c makes its tensors.
 */
#include "runtime/transformer/transformer_internal.h"
#include "base/core/mem.h"
#include "runtime/launch/world_internal.h"
#include "runtime/param/param.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* === linear layers ============================================================================ */

/* --- parameters in f32 ------------------------------------------------------------------------ */

static int64_t count_of(const fsdp_param *param)
{
    fsdp_box box;
    fsdp_param_data_box(param, &box);
    return fsdp_box_count(&box);
}

static bool is_cast(const fsdp_param *param)
{
    const fsdp_param_info info = fsdp_param_describe(param);
    return !info.is_buffer && info.data_dtype != FSDP_F32;
}

static fsdp_status take(fsdp_f32_params *params, int64_t count, float **room_out, fsdp_error *err)
{
    *room_out = params->nn->ops->alloc(params->nn, count);
    params->count += count;
    return *room_out ? FSDP_OK : fsdp_fail_memory(err, "parameters in f32");
}

/* kernels/nn is the host's: it would read and write addresses that are those of a GPU. */
static fsdp_status expect_host(const fsdp_model *model, fsdp_error *err)
{
    const fsdp_device_ops *device = model->world->parts.device->ops;
    if (device->is_host)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "cannot compute on device '%s': models compute on the host, which cannot "
                     "reach a GPU's memory; use --device cpu or cpu-async",
                     device->name);
}

fsdp_status fsdp_f32_params_init(fsdp_f32_params *params, fsdp_nn *nn, const fsdp_model *model,
                                 bool casts_grads, fsdp_error *err)
{
    int64_t most = 0, most_of_bias = 0;
    *params = (fsdp_f32_params){.nn = nn};
    FSDP_TRY(expect_host(model, err));
    for (size_t i = 0; i < fsdp_model_count(model); i++) {
        const fsdp_param *param = fsdp_model_at(model, i);
        int64_t count = is_cast(param) ? count_of(param) : 0;
        most = count > most ? count : most;
        if (fsdp_param_describe(param).ndim == 1)
            most_of_bias = count > most_of_bias ? count : most_of_bias;
    }
    if (most == 0)
        return FSDP_OK;
    FSDP_TRY(take(params, most, &params->weight, err));
    FSDP_TRY(take(params, most_of_bias, &params->bias, err));
    return casts_grads ? take(params, most, &params->weight_grad, err) : FSDP_OK;
}

void fsdp_f32_params_release(fsdp_f32_params *params)
{
    if (!params->nn)
        return;
    params->nn->ops->free(params->nn, params->weight);
    params->nn->ops->free(params->nn, params->bias);
    params->nn->ops->free(params->nn, params->weight_grad);
    *params = (fsdp_f32_params){0};
}

const float *fsdp_param_f32(fsdp_param *param, float *room)
{
    const void *data = fsdp_param_data(param);
    if (!data || !is_cast(param))
        return data;
    fsdp_cast(room, FSDP_F32, data, fsdp_param_describe(param).data_dtype, (size_t)count_of(param));
    return room;
}

/* --- gradients -------------------------------------------------------------------------------- */

/* A gradient that is computed in f32: in place, or in a room from which finish_grad casts it. */
typedef struct param_grad {
    fsdp_param *param;
    void *to;
    float *data;
} param_grad;

static fsdp_status begin_grad(fsdp_param *param, float *room, bool adds, param_grad *grad_out,
                              fsdp_error *err)
{
    const fsdp_param_info info = fsdp_param_describe(param);
    const bool is_f32 = info.grad_dtype == FSDP_F32;
    void *to = adds ? fsdp_param_grad(param) : fsdp_param_grad_raw(param);
    if (!to)
        return fsdp_param_error(param, err);
    if (!is_f32 && adds)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has a gradient of %s: a layer adds to gradients of f32 only; set "
                         "that by fsdp_param_set_grad_dtype",
                         info.name, fsdp_dtype_name(info.grad_dtype));
    if (!is_f32 && !room)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has a gradient of %s: no memory was set aside to compute it in f32",
                         info.name, fsdp_dtype_name(info.grad_dtype));
    *grad_out = (param_grad){param, to, is_f32 ? to : room};
    return FSDP_OK;
}

static void finish_grad(const param_grad *grad)
{
    if (grad->data != grad->to)
        fsdp_cast(grad->to, fsdp_param_describe(grad->param).grad_dtype, grad->data, FSDP_F32,
                  (size_t)count_of(grad->param));
}

/* --- linear layers ---------------------------------------------------------------------------- */

fsdp_status fsdp_linear_forward(const fsdp_f32_params *params, const fsdp_linear *layer,
                                const float *x, float *y, int64_t rows, fsdp_error *err)
{
    const float *weight = fsdp_param_f32(layer->weight, params->weight), *bias = NULL;
    if (!weight)
        return fsdp_param_error(layer->weight, err);
    if (layer->bias) {
        bias = fsdp_param_f32(layer->bias, params->bias);
        if (!bias)
            return fsdp_param_error(layer->bias, err);
    }
    params->nn->ops->product(params->nn, &(fsdp_nn_product){.out = y,
                                                            .a = x,
                                                            .b = weight,
                                                            .rows = rows,
                                                            .columns = layer->out,
                                                            .inner = layer->in,
                                                            .b_is_turned = !layer->is_in_by_out,
                                                            .bias = bias});
    return FSDP_OK;
}

static fsdp_status give_weight_grad(const fsdp_f32_params *params, const fsdp_linear *layer,
                                    const fsdp_linear_grad *call, fsdp_error *err)
{
    param_grad grad;
    FSDP_TRY(begin_grad(layer->weight, params->weight_grad, call->adds, &grad, err));
    fsdp_nn_product product = {
        .out = grad.data, .inner = call->rows, .a_is_turned = true, .adds = call->adds};
    product.a = layer->is_in_by_out ? call->x : call->dy;
    product.b = layer->is_in_by_out ? call->dy : call->x;
    product.rows = layer->is_in_by_out ? layer->in : layer->out;
    product.columns = layer->is_in_by_out ? layer->out : layer->in;
    params->nn->ops->product(params->nn, &product);
    finish_grad(&grad);
    return FSDP_OK;
}

fsdp_status fsdp_linear_bias_grad(const fsdp_f32_params *params, const fsdp_linear *layer,
                                  const fsdp_linear_grad *call, fsdp_error *err)
{
    param_grad grad;
    float *room = params->weight_grad ? params->bias : NULL;
    FSDP_TRY(begin_grad(layer->bias, room, call->adds, &grad, err));
    if (!call->adds)
        params->nn->ops->zero(params->nn, grad.data, layer->out);
    params->nn->ops->column_sums(params->nn, grad.data, call->dy, call->rows, layer->out);
    finish_grad(&grad);
    return FSDP_OK;
}

fsdp_status fsdp_linear_backward(const fsdp_f32_params *params, const fsdp_linear *layer,
                                 const fsdp_linear_grad *call, fsdp_error *err)
{
    FSDP_TRY(give_weight_grad(params, layer, call, err));
    if (layer->bias)
        FSDP_TRY(fsdp_linear_bias_grad(params, layer, call, err));
    if (!call->dx)
        return FSDP_OK;
    const float *weight = fsdp_param_f32(layer->weight, params->weight);
    if (!weight)
        return fsdp_param_error(layer->weight, err);
    params->nn->ops->product(params->nn, &(fsdp_nn_product){.out = call->dx,
                                                            .a = call->dy,
                                                            .b = weight,
                                                            .rows = call->rows,
                                                            .columns = layer->in,
                                                            .inner = layer->out,
                                                            .b_is_turned = layer->is_in_by_out,
                                                            .adds = call->adds_dx});
    return FSDP_OK;
}

/* === a layer ================================================================================== */

/* Sampling keeps keys and values of earlier tokens. NULL: none. */
typedef struct key_cache {
    float *keys, *values; /* of one layer: sequences x room x kv_heads * head_dim */
    int64_t room, used;
} key_cache;

typedef struct model_caches {
    key_cache *layers;
} model_caches;

/* --- norms ----------------------------------------------------------------------------------------- */

static fsdp_status apply_norm(fsdp_transformer *t, const model_norm *norm, const fsdp_nn_norm *call,
                              fsdp_error *err)
{
    fsdp_nn_norm whole = *call;
    whole.weight = fsdp_param_f32(norm->weight, t->params.weight);
    if (!whole.weight)
        return fsdp_param_error(norm->weight, err);
    if (norm->bias) {
        whole.bias = fsdp_param_f32(norm->bias, t->params.bias);
        if (!whole.bias)
            return fsdp_param_error(norm->bias, err);
    }
    whole.columns = norm->columns;
    whole.eps = t->config.norm_eps;
    t->ops->norm(t->nn, &whole);
    return FSDP_OK;
}

static fsdp_status make_norm_grad(fsdp_transformer *t, const model_norm *norm,
                                  const fsdp_nn_norm_grad *call, fsdp_error *err)
{
    fsdp_nn_norm_grad whole = *call;
    whole.weight = fsdp_param_f32(norm->weight, t->params.weight);
    whole.dweight = fsdp_param_grad(norm->weight);
    if (!whole.weight || !whole.dweight)
        return fsdp_param_error(norm->weight, err);
    if (norm->bias) {
        whole.dbias = fsdp_param_grad(norm->bias);
        if (!whole.dbias)
            return fsdp_param_error(norm->bias, err);
    }
    whole.columns = norm->columns;
    t->ops->norm_grad(t->nn, &whole);
    return FSDP_OK;
}

/* --- attention ----------------------------------------------------------------------------------- */

/* Queries, keys and values lie in one array: next to each other in every row (packed), or in turn. */
typedef struct qkv_view {
    float *q, *k, *v;
    int64_t q_row, k_row; /* v lies as k does */
} qkv_view;

static qkv_view view_qkv(const fsdp_transformer *t, const model_block *block, float *data)
{
    const int64_t queries = t->config.heads * t->config.head_dim;
    const int64_t keys = t->config.kv_heads * t->config.head_dim, rows = model_rows(t);
    if (block->qkv.weight) {
        const int64_t row = queries + 2 * keys;
        return (qkv_view){data, data + queries, data + queries + keys, row, row};
    }
    float *k = data + rows * queries;
    return (qkv_view){data, k, k + rows * keys, queries, keys};
}

static void rotate(fsdp_transformer *t, float *x, int64_t row, int64_t heads, int64_t first,
                   bool backward)
{
    t->ops->rotate(t->nn, &(fsdp_nn_rotation){.x = x,
                                              .row = row,
                                              .sequences = t->sequences,
                                              .length = t->length,
                                              .first = first,
                                              .heads = heads,
                                              .head_dim = t->config.head_dim,
                                              .cos = t->cosines,
                                              .sin = t->sines,
                                              .backward = backward});
}

/* Each head of q and k is a row of its norm. */
static fsdp_status norm_heads(fsdp_transformer *t, const model_block *block, const qkv_view *from,
                              const qkv_view *to, fsdp_error *err)
{
    float *const inverse = t->arrays[block->number].heads_inverse;
    const int64_t q_rows = model_rows(t) * t->config.heads;
    const fsdp_nn_norm q = {.x = from->q, .y = to->q, .inverse = inverse, .rows = q_rows};
    const fsdp_nn_norm k = {.x = from->k,
                            .y = to->k,
                            .inverse = inverse + q_rows,
                            .rows = model_rows(t) * t->config.kv_heads};
    FSDP_TRY(apply_norm(t, &block->q_norm, &q, err));
    return apply_norm(t, &block->k_norm, &k, err);
}

static fsdp_status norm_heads_grad(fsdp_transformer *t, const model_block *block,
                                   const qkv_view *grads, const qkv_view *to, fsdp_error *err)
{
    const block_arrays *arrays = &t->arrays[block->number];
    const qkv_view from = view_qkv(t, block, arrays->heads);
    const int64_t q_rows = model_rows(t) * t->config.heads;
    const fsdp_nn_norm_grad q = {
        .x = from.q, .inverse = arrays->heads_inverse, .dy = grads->q, .dx = to->q, .rows = q_rows};
    const fsdp_nn_norm_grad k = {.x = from.k,
                                 .inverse = arrays->heads_inverse + q_rows,
                                 .dy = grads->k,
                                 .dx = to->k,
                                 .rows = model_rows(t) * t->config.kv_heads};
    FSDP_TRY(make_norm_grad(t, &block->q_norm, &q, err));
    return make_norm_grad(t, &block->k_norm, &k, err);
}

static fsdp_status make_qkv(fsdp_transformer *t, const model_block *block, const float *normed,
                            const qkv_view *view, fsdp_error *err)
{
    const int64_t rows = model_rows(t);
    if (block->qkv.weight)
        return fsdp_linear_forward(&t->params, &block->qkv, normed, view->q, rows, err);
    const bool has_norm = block->q_norm.weight;
    const qkv_view to = has_norm ? view_qkv(t, block, t->arrays[block->number].heads) : *view;
    FSDP_TRY(fsdp_linear_forward(&t->params, &block->q, normed, to.q, rows, err));
    FSDP_TRY(fsdp_linear_forward(&t->params, &block->k, normed, to.k, rows, err));
    FSDP_TRY(fsdp_linear_forward(&t->params, &block->v, normed, view->v, rows, err));
    return has_norm ? norm_heads(t, block, &to, view, err) : FSDP_OK;
}

static float scale_of(const fsdp_transformer *t, const model_block *block)
{
    double scale = t->config.scales_attention ? 1 / sqrt((double)t->config.head_dim) : 1;
    if (t->config.scales_by_layer)
        scale /= (double)(block->number + 1);
    return (float)scale;
}

static fsdp_nn_attention describe_attention(const fsdp_transformer *t, const model_block *block,
                                            const qkv_view *view, const block_arrays *arrays)
{
    const fsdp_transformer_config *config = &t->config;
    return (fsdp_nn_attention){.q = view->q,
                               .k = view->k,
                               .v = view->v,
                               .q_row = view->q_row,
                               .k_row = view->k_row,
                               .v_row = view->k_row,
                               .out = arrays->attended,
                               .log_sum = arrays->log_sum,
                               .sequences = t->sequences,
                               .queries = t->length,
                               .keys = t->length,
                               .key_room = t->length,
                               .heads = config->heads,
                               .kv_heads = config->kv_heads,
                               .head_dim = config->head_dim,
                               .window = config->is_windowed[block->number] ? config->window : 0,
                               .scale = scale_of(t, block)};
}

/* Appends this call's keys and values, and lets attention read all. */
static void use_cache(fsdp_transformer *t, const qkv_view *view, const key_cache *cache,
                      fsdp_nn_attention *call)
{
    const int64_t width = t->config.kv_heads * t->config.head_dim;
    for (int64_t s = 0; s < t->sequences; s++)
        for (int64_t r = 0; r < t->length; r++) {
            const int64_t to = (s * cache->room + cache->used + r) * width;
            const int64_t from = (s * t->length + r) * view->k_row;
            t->ops->copy(t->nn, cache->keys + to, view->k + from, width);
            t->ops->copy(t->nn, cache->values + to, view->v + from, width);
        }
    call->k = cache->keys;
    call->v = cache->values;
    call->k_row = call->v_row = width;
    call->keys = cache->used + t->length;
    call->key_room = cache->room;
    call->log_sum = NULL;
}

static void attend(fsdp_transformer *t, const model_block *block, const qkv_view *view,
                   const key_cache *cache)
{
    const int64_t first = cache ? cache->used : 0;
    fsdp_nn_attention call = describe_attention(t, block, view, &t->arrays[block->number]);
    if (t->config.form.is_rotary) {
        rotate(t, view->q, view->q_row, t->config.heads, first, false);
        rotate(t, view->k, view->k_row, t->config.kv_heads, first, false);
    }
    if (cache)
        use_cache(t, view, cache, &call);
    t->ops->attend(t->nn, &call);
}

/* dqkv, the gradient of q, k and v before rotation, from dattended. */
static void attend_grad(fsdp_transformer *t, const model_block *block, const qkv_view *grads)
{
    block_arrays *arrays = &t->arrays[block->number];
    const qkv_view view = view_qkv(t, block, arrays->qkv);
    t->ops->attend_grad(
        t->nn, &(fsdp_nn_attention_grad){.forward = describe_attention(t, block, &view, arrays),
                                         .dout = t->dattended,
                                         .dq = grads->q,
                                         .dk = grads->k,
                                         .dv = grads->v});
    if (t->config.form.is_rotary) {
        rotate(t, grads->q, grads->q_row, t->config.heads, 0, true);
        rotate(t, grads->k, grads->k_row, t->config.kv_heads, 0, true);
    }
}

static fsdp_status make_qkv_grad(fsdp_transformer *t, const model_block *block,
                                 const qkv_view *grads, fsdp_error *err)
{
    const fsdp_linear *const linears[] = {&block->q, &block->k, &block->v};
    const bool has_norm = block->q_norm.weight;
    const qkv_view from = has_norm ? view_qkv(t, block, t->dheads) : *grads;
    const float *const dys[] = {from.q, from.k, grads->v};
    fsdp_linear_grad call = {.x = t->arrays[block->number].normed1,
                             .dy = grads->q,
                             .dx = t->dnormed,
                             .rows = model_rows(t)};
    if (block->qkv.weight)
        return fsdp_linear_backward(&t->params, &block->qkv, &call, err);
    if (has_norm)
        FSDP_TRY(norm_heads_grad(t, block, grads, &from, err));
    for (int i = 0; i < 3; i++) {
        call.dy = dys[i];
        call.adds_dx = i > 0;
        FSDP_TRY(fsdp_linear_backward(&t->params, linears[i], &call, err));
    }
    return FSDP_OK;
}

/* --- forward ------------------------------------------------------------------------------------- */

/* to = from + linear(x) */
static fsdp_status add_linear(fsdp_transformer *t, const fsdp_linear *linear, const float *x,
                              const float *from, float *to, fsdp_error *err)
{
    FSDP_TRY(fsdp_linear_forward(&t->params, linear, x, to, model_rows(t), err));
    t->ops->add(t->nn, to, from, model_rows(t) * t->config.width);
    return FSDP_OK;
}

static fsdp_status make_active(fsdp_transformer *t, const model_block *block, fsdp_error *err)
{
    block_arrays *arrays = &t->arrays[block->number];
    const int64_t rows = model_rows(t);
    fsdp_nn_activation call = {.function = t->config.activation,
                               .x = arrays->up,
                               .y = arrays->active,
                               .count = rows * t->config.inner};
    FSDP_TRY(fsdp_linear_forward(&t->params, &block->up, arrays->normed2, arrays->up, rows, err));
    if (t->config.form.is_gated) {
        FSDP_TRY(fsdp_linear_forward(&t->params, &block->gate, arrays->normed2, arrays->gate, rows,
                                     err));
        call.x = arrays->gate;
        call.gate = arrays->up;
    }
    t->ops->activate(t->nn, &call);
    return FSDP_OK;
}

/* x (rows x width) -> y; between the unit's hooks. */
static fsdp_status run_layer(fsdp_transformer *t, const model_block *block, const float *x,
                             float *y, const key_cache *cache, fsdp_error *err)
{
    block_arrays *arrays = &t->arrays[block->number];
    const qkv_view view = view_qkv(t, block, arrays->qkv);
    FSDP_TRY(apply_norm(t, &block->norm1,
                        &(fsdp_nn_norm){.x = x,
                                        .y = arrays->normed1,
                                        .mean = arrays->mean1,
                                        .inverse = arrays->inverse1,
                                        .rows = model_rows(t)},
                        err));
    FSDP_TRY(make_qkv(t, block, arrays->normed1, &view, err));
    attend(t, block, &view, cache);
    FSDP_TRY(add_linear(t, &block->output, arrays->attended, x, arrays->middle, err));
    FSDP_TRY(apply_norm(t, &block->norm2,
                        &(fsdp_nn_norm){.x = arrays->middle,
                                        .y = arrays->normed2,
                                        .mean = arrays->mean2,
                                        .inverse = arrays->inverse2,
                                        .rows = model_rows(t)},
                        err));
    FSDP_TRY(make_active(t, block, err));
    return y ? add_linear(t, &block->down, arrays->active, arrays->middle, y, err) : FSDP_OK;
}

/* --- backward ------------------------------------------------------------------------------------ */

/* dnormed, the gradient of the second norm's result. */
static fsdp_status make_mlp_grad(fsdp_transformer *t, const model_block *block, fsdp_error *err)
{
    block_arrays *arrays = &t->arrays[block->number];
    const int64_t rows = model_rows(t);
    fsdp_nn_activation_grad call = {.function = t->config.activation,
                                    .x = arrays->up,
                                    .dy = t->dactive,
                                    .dx = t->dup,
                                    .count = rows * t->config.inner};
    fsdp_linear_grad down = {.x = arrays->active, .dy = t->dx, .dx = t->dactive, .rows = rows};
    fsdp_linear_grad up = {.x = arrays->normed2, .dy = t->dup, .dx = t->dnormed, .rows = rows};
    fsdp_linear_grad gate = {
        .x = arrays->normed2, .dy = t->dgate, .dx = t->dnormed, .rows = rows, .adds_dx = true};
    FSDP_TRY(fsdp_linear_backward(&t->params, &block->down, &down, err));
    if (t->config.form.is_gated) {
        call.x = arrays->gate;
        call.gate = arrays->up;
        call.dx = t->dgate;
        call.dgate = t->dup;
    }
    t->ops->activate_grad(t->nn, &call);
    FSDP_TRY(fsdp_linear_backward(&t->params, &block->up, &up, err));
    return t->config.form.is_gated ? fsdp_linear_backward(&t->params, &block->gate, &gate, err)
                                   : FSDP_OK;
}

/* Adds the gradient through a norm to dx. */
static fsdp_status add_norm_grad(fsdp_transformer *t, const model_norm *norm, const float *x,
                                 const float *mean, const float *inverse, fsdp_error *err)
{
    return make_norm_grad(t, norm,
                          &(fsdp_nn_norm_grad){.x = x,
                                               .mean = mean,
                                               .inverse = inverse,
                                               .dy = t->dnormed,
                                               .dx = t->dx,
                                               .adds_dx = true,
                                               .rows = model_rows(t)},
                          err);
}

/* t->dx: the gradient of the block's result becomes that of its input x. */
static fsdp_status make_layer_grad(fsdp_transformer *t, const model_block *block, const float *x,
                                   fsdp_error *err)
{
    block_arrays *arrays = &t->arrays[block->number];
    const qkv_view grads = view_qkv(t, block, t->dqkv);
    if (t->opts.recompute)
        FSDP_TRY(run_layer(t, block, x, NULL, NULL, err));
    FSDP_TRY(make_mlp_grad(t, block, err));
    FSDP_TRY(add_norm_grad(t, &block->norm2, arrays->middle, arrays->mean2, arrays->inverse2, err));
    fsdp_linear_grad output = {
        .x = arrays->attended, .dy = t->dx, .dx = t->dattended, .rows = model_rows(t)};
    FSDP_TRY(fsdp_linear_backward(&t->params, &block->output, &output, err));
    attend_grad(t, block, &grads);
    FSDP_TRY(make_qkv_grad(t, block, &grads, err));
    return add_norm_grad(t, &block->norm1, x, arrays->mean1, arrays->inverse1, err);
}

/* === a microbatch ============================================================================= */

/*
 * A microbatch: ids through embedding, layers, last norm and head to the loss, and back. The head runs once,
 * when backward has begun: its logits become their gradient in place, some rows at a time.
 */

/* --- embedding ----------------------------------------------------------------------------------- */

/* Apart from the embedding of tokens: of bf16 parameters one f32 copy at a time is at hand. */
static fsdp_status add_positions(fsdp_transformer *t, int64_t first, fsdp_error *err)
{
    const int64_t count = t->length * t->config.width;
    const float *positions = fsdp_param_f32(t->positions, t->params.weight);
    if (!positions)
        return fsdp_param_error(t->positions, err);
    for (int64_t s = 0; s < t->sequences; s++)
        t->ops->add(t->nn, t->block_inputs[0] + s * count, positions + first * t->config.width,
                    count);
    return FSDP_OK;
}

static fsdp_status embed(fsdp_transformer *t, int64_t first, fsdp_error *err)
{
    fsdp_nn_embedding call = {.ids = t->inputs,
                              .out = t->block_inputs[0],
                              .sequences = t->sequences,
                              .length = t->length,
                              .first = first,
                              .columns = t->config.width};
    call.table = fsdp_param_f32(t->tokens, t->params.weight);
    if (!call.table)
        return fsdp_param_error(t->tokens, err);
    t->ops->embed(t->nn, &call);
    return t->positions ? add_positions(t, first, err) : FSDP_OK;
}

static fsdp_status embed_grad(fsdp_transformer *t, fsdp_error *err)
{
    fsdp_nn_embedding_grad call = {.ids = t->inputs,
                                   .dout = t->dx,
                                   .sequences = t->sequences,
                                   .length = t->length,
                                   .columns = t->config.width};
    call.dtable = fsdp_param_grad(t->tokens);
    if (!call.dtable)
        return fsdp_param_error(t->tokens, err);
    if (t->positions) {
        call.dpositions = fsdp_param_grad(t->positions);
        if (!call.dpositions)
            return fsdp_param_error(t->positions, err);
    }
    t->ops->embed_grad(t->nn, &call);
    return FSDP_OK;
}

/* --- forward: ids -> the last layer's result ----------------------------------------------------- */

static fsdp_status run_layers(fsdp_transformer *t, const model_caches *caches, fsdp_error *err)
{
    const int64_t first = caches ? caches->layers[0].used : 0;
    FSDP_TRY(embed(t, first, err));
    for (int64_t i = 0; i < t->config.layers; i++) {
        const model_block *block = &t->blocks[i];
        FSDP_TRY(fsdp_unit_pre_forward(block->unit, err));
        FSDP_TRY(run_layer(t, block, t->block_inputs[i], t->block_inputs[i + 1],
                           caches ? &caches->layers[i] : NULL, err));
        FSDP_TRY(fsdp_unit_post_forward(block->unit, err));
    }
    return FSDP_OK;
}

/* last_normed: the last norm's result. Computes logits of rows [first, first + rows), at most logit_rows. */
static fsdp_status model_last_norm(fsdp_transformer *t, fsdp_error *err)
{
    return apply_norm(t, &t->last_norm,
                      &(fsdp_nn_norm){.x = t->block_inputs[t->config.layers],
                                      .y = t->last_normed,
                                      .mean = t->last_mean,
                                      .inverse = t->last_inverse,
                                      .rows = model_rows(t)},
                      err);
}

/* --- head ---------------------------------------------------------------------------------------- */

static fsdp_status model_head(fsdp_transformer *t, int64_t first, int64_t rows, fsdp_error *err)
{
    const fsdp_linear head = {.weight = t->head, .in = t->config.width, .out = t->config.vocab};
    return fsdp_linear_forward(&t->params, &head, t->last_normed + first * t->config.width,
                               t->logits, rows, err);
}

/* Losses of all rows; with a scale the gradients of the head and, in dnormed, of its input. */
static fsdp_status find_losses(fsdp_transformer *t, double scale, bool with_grads, fsdp_error *err)
{
    const fsdp_linear head = {.weight = t->head, .in = t->config.width, .out = t->config.vocab};
    const int64_t rows = model_rows(t);
    if (with_grads && rows == 0 && !fsdp_param_grad(t->head)) /* else overwritten below */
        return fsdp_param_error(t->head, err);
    for (int64_t first = 0; first < rows; first += t->logit_rows) {
        int64_t some = rows - first < t->logit_rows ? rows - first : t->logit_rows;
        FSDP_TRY(model_head(t, first, some, err));
        t->ops->cross_entropy(t->nn, &(fsdp_nn_cross_entropy){.logits = t->logits,
                                                              .targets = t->targets + first,
                                                              .losses = t->losses + first,
                                                              .rows = some,
                                                              .columns = t->config.vocab,
                                                              .scale = scale,
                                                              .keeps_logits = !with_grads});
        if (!with_grads)
            continue;
        fsdp_linear_grad call = {.x = t->last_normed + first * t->config.width,
                                 .dy = t->logits,
                                 .dx = t->dnormed + first * t->config.width,
                                 .adds = first > 0,
                                 .rows = some};
        FSDP_TRY(fsdp_linear_backward(&t->params, &head, &call, err));
    }
    return FSDP_OK;
}

static double sum_losses(const fsdp_transformer *t)
{
    double sum = 0;
    for (int64_t r = 0; r < model_rows(t); r++)
        sum += t->losses[r];
    return sum;
}

/* --- backward ------------------------------------------------------------------------------------ */

/* dx, the gradient of the last layer's result. */
static fsdp_status run_head(fsdp_transformer *t, double scale, fsdp_error *err)
{
    FSDP_TRY(model_last_norm(t, err));
    FSDP_TRY(find_losses(t, scale, true, err));
    return make_norm_grad(t, &t->last_norm,
                          &(fsdp_nn_norm_grad){.x = t->block_inputs[t->config.layers],
                                               .mean = t->last_mean,
                                               .inverse = t->last_inverse,
                                               .dy = t->dnormed,
                                               .dx = t->dx,
                                               .rows = model_rows(t)},
                          err);
}

static fsdp_status go_back(fsdp_transformer *t, double scale, fsdp_error *err)
{
    fsdp_unit *root = fsdp_root_unit(t->root);
    FSDP_TRY(fsdp_unit_pre_backward(root, err));
    FSDP_TRY(run_head(t, scale, err));
    for (int64_t i = t->config.layers - 1; i >= 0; i--) {
        const model_block *block = &t->blocks[i];
        FSDP_TRY(fsdp_unit_pre_backward(block->unit, err));
        FSDP_TRY(make_layer_grad(t, block, t->block_inputs[i], err));
        FSDP_TRY(fsdp_unit_post_backward(block->unit, err));
    }
    FSDP_TRY(embed_grad(t, err));
    FSDP_TRY(fsdp_unit_post_backward(root, err));
    return fsdp_root_end_backward(t->root, err);
}

/* --- a microbatch -------------------------------------------------------------------------------- */

/* Every rank learns that one cannot take its sequences, before any collective of the step. */
static fsdp_status take_batch(fsdp_transformer *t, const fsdp_token_batch *batch, bool with_targets,
                              fsdp_error *err)
{
    const fsdp_status mine = fsdp_model_take_batch(t, batch, with_targets, batch->length, err);
    return batch->is_agreed ? mine : fsdp_ctl_agree(t->ctl, mine, err);
}

/* Collective: begins a forward and runs all layers; the root's own parameters stay gathered until the end.
 * caches: NULL, or one per layer. */
static fsdp_status model_forward(fsdp_transformer *t, const model_caches *caches, fsdp_error *err)
{
    fsdp_unit *root = fsdp_root_unit(t->root);
    FSDP_TRY(fsdp_root_begin_forward(t->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(root, err));
    return run_layers(t, caches, err);
}

static fsdp_status end_forward(fsdp_transformer *t, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_post_forward(fsdp_root_unit(t->root), err));
    return fsdp_root_end_forward(t->root, err);
}

fsdp_status fsdp_transformer_train(fsdp_transformer *t, const fsdp_token_batch *batch, double scale,
                                   double *loss_out, fsdp_error *err)
{
    FSDP_TRY(take_batch(t, batch, true, err));
    FSDP_TRY(model_forward(t, NULL, err));
    FSDP_TRY(end_forward(t, err));
    FSDP_TRY(go_back(t, scale, err));
    FSDP_TRY(t->ops->finish(t->nn, err));
    *loss_out = sum_losses(t);
    return FSDP_OK;
}

/* Forward alone; `finish_rows` gets the rows while the root's parameters are gathered. */
typedef fsdp_status (*rows_use)(fsdp_transformer *t, void *context, fsdp_error *err);

static fsdp_status look(fsdp_transformer *t, rows_use use, void *context, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_set_evaluating(t->root, true, err));
    FSDP_TRY(model_forward(t, NULL, err));
    FSDP_TRY(model_last_norm(t, err));
    FSDP_TRY(use(t, context, err));
    FSDP_TRY(end_forward(t, err));
    FSDP_TRY(t->ops->finish(t->nn, err));
    return fsdp_root_set_evaluating(t->root, false, err);
}

static fsdp_status use_losses(fsdp_transformer *t, void *context, fsdp_error *err)
{
    (void)context;
    return find_losses(t, 0, false, err);
}

fsdp_status fsdp_transformer_evaluate(fsdp_transformer *t, const fsdp_token_batch *batch,
                                      double *loss_out, fsdp_error *err)
{
    FSDP_TRY(take_batch(t, batch, true, err));
    FSDP_TRY(look(t, use_losses, NULL, err));
    *loss_out = sum_losses(t);
    return FSDP_OK;
}

static fsdp_status use_logits(fsdp_transformer *t, void *context, fsdp_error *err)
{
    float *out = context;
    const int64_t rows = model_rows(t), vocab = t->config.vocab;
    for (int64_t first = 0; first < rows; first += t->logit_rows) {
        int64_t some = rows - first < t->logit_rows ? rows - first : t->logit_rows;
        FSDP_TRY(model_head(t, first, some, err));
        t->ops->download(t->nn, out + first * vocab, t->logits, some * vocab);
    }
    return FSDP_OK;
}

fsdp_status fsdp_transformer_logits(fsdp_transformer *t, const fsdp_token_batch *batch,
                                    float *logits_out, fsdp_error *err)
{
    FSDP_TRY(take_batch(t, batch, false, err));
    return look(t, use_logits, logits_out, err);
}

/* === sampling ================================================================================= */

/* Next ids: the prompt goes through the model once, then one id at a time with its cached keys. */

/* --- choosing an id ------------------------------------------------------------------------------ */

typedef struct choice {
    float logit;
    int64_t id;
    double weight;
} choice;

static int compare_choices(const void *a, const void *b)
{
    const choice *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static int64_t find_largest(const float *logits, int64_t vocab)
{
    int64_t best = 0;
    for (int64_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

/* Keeps the first choices whose probabilities reach top_p. */
static int64_t cut_tail(const choice *choices, int64_t count, double sum, double top_p)
{
    double reached = 0;
    for (int64_t i = 0; i < count; i++) {
        reached += choices[i].weight;
        if (reached >= top_p * sum)
            return i + 1;
    }
    return count;
}

static double weigh(choice *choices, int64_t count, double temperature)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        choices[i].weight =
            exp(((double)choices[i].logit - (double)choices[0].logit) / temperature);
        sum += choices[i].weight;
    }
    return sum;
}

static int64_t draw(const fsdp_sampling *sampling, const float *logits, int64_t vocab,
                    choice *choices, double uniform)
{
    if (sampling->temperature == 0)
        return find_largest(logits, vocab);
    for (int64_t i = 0; i < vocab; i++)
        choices[i] = (choice){logits[i], i, 0};
    qsort(choices, (size_t)vocab, sizeof *choices, compare_choices);
    int64_t count = sampling->top_k > 0 && sampling->top_k < vocab ? sampling->top_k : vocab;
    double sum = weigh(choices, count, sampling->temperature);
    if (sampling->top_p > 0 && sampling->top_p < 1) {
        count = cut_tail(choices, count, sum, sampling->top_p);
        sum = weigh(choices, count, sampling->temperature);
    }
    double at = uniform * sum;
    for (int64_t i = 0; i < count; i++) {
        at -= choices[i].weight;
        if (at < 0)
            return choices[i].id;
    }
    return choices[count - 1].id;
}

/* --- caches -------------------------------------------------------------------------------------- */

typedef struct sampler {
    fsdp_transformer *t;
    const fsdp_sampling *sampling;
    model_caches caches;
    int64_t sequences, room; /* tokens that the caches hold of each sequence */
    int64_t *ids;            /* sequences x stride: prompt and new ids */
    int64_t stride, known;   /* ids of each sequence that are there */
    int64_t begin;           /* the first of them that the caches know */
    float *logits;           /* one row on the host */
    choice *choices;
} sampler;

static void sampler_release(sampler *s)
{
    for (int64_t i = 0; s->caches.layers && i < s->t->config.layers; i++) {
        s->t->ops->free(s->t->nn, s->caches.layers[i].keys);
        s->t->ops->free(s->t->nn, s->caches.layers[i].values);
    }
    fsdp_free(s->caches.layers);
    fsdp_free(s->ids);
    fsdp_free(s->logits);
    fsdp_free(s->choices);
}

static fsdp_status make_caches(sampler *s, fsdp_error *err)
{
    const fsdp_transformer_config *config = &s->t->config;
    int64_t count;
    s->caches.layers = fsdp_alloc((size_t)config->layers, sizeof *s->caches.layers);
    if (!s->caches.layers ||
        fsdp_mul_overflow(s->sequences * s->room, config->kv_heads * config->head_dim, &count))
        return fsdp_fail_memory(err, "keys and values");
    for (int64_t i = 0; i < config->layers; i++) {
        key_cache *cache = &s->caches.layers[i];
        cache->room = s->room;
        cache->keys = s->t->ops->alloc(s->t->nn, count);
        cache->values = s->t->ops->alloc(s->t->nn, count);
        if (!cache->keys || !cache->values)
            return fsdp_fail_memory(err, "keys and values");
    }
    return FSDP_OK;
}

static fsdp_status sampler_init(sampler *s, const fsdp_token_batch *batch, fsdp_error *err)
{
    const int64_t vocab = s->t->config.vocab, context = s->t->config.context;
    int64_t most, count;
    if (batch->sequences < 1 || batch->length < 1 || s->sampling->count < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot sample from no token; give at least one");
    if (!(s->sampling->temperature >= 0) || !isfinite(s->sampling->temperature))
        return fsdp_fail(err, FSDP_ERR_USAGE, "the temperature must be a number of at least 0");
    if (fsdp_add_overflow(batch->length, s->sampling->count, &most) ||
        fsdp_mul_overflow(most, batch->sequences, &count))
        return fsdp_fail_memory(err, "ids");
    s->sequences = batch->sequences;
    s->stride = most;
    s->room = most < context ? most : context;
    s->ids = fsdp_alloc((size_t)count, sizeof *s->ids);
    s->logits = fsdp_alloc((size_t)vocab, sizeof *s->logits);
    s->choices = fsdp_alloc((size_t)vocab, sizeof *s->choices);
    if (!s->ids || !s->logits || !s->choices)
        return fsdp_fail_memory(err, "ids");
    for (int64_t i = 0; i < s->sequences; i++)
        memcpy(s->ids + i * s->stride, batch->ids + i * batch->stride,
               (size_t)batch->length * sizeof *s->ids);
    s->known = batch->length;
    return make_caches(s, err);
}

/* --- steps --------------------------------------------------------------------------------------- */

/* The ids that the caches do not know yet; when they are full they begin again with the last half. */
static fsdp_token_batch next_batch(sampler *s)
{
    int64_t used = s->caches.layers[0].used, fresh = s->known - s->begin - used;
    if (used + fresh > s->room) {
        fresh = s->room - s->room / 2;
        s->begin = s->known - fresh;
        used = 0;
    }
    for (int64_t i = 0; i < s->t->config.layers; i++)
        s->caches.layers[i].used = used;
    return (fsdp_token_batch){.ids = s->ids + s->begin + used,
                              .sequences = s->sequences,
                              .length = fresh,
                              .stride = s->stride};
}

/* The next id of every sequence, from the logits of its last row. */
static fsdp_status choose(sampler *s, fsdp_error *err)
{
    fsdp_transformer *t = s->t;
    const int64_t number = s->sampling->count - (s->stride - s->known);
    for (int64_t i = 0; i < s->sequences; i++) {
        const uint64_t index = (uint64_t)(i * s->sampling->count + number);
        FSDP_TRY(model_head(t, (i + 1) * t->length - 1, 1, err));
        t->ops->download(t->nn, s->logits, t->logits, t->config.vocab);
        FSDP_TRY(t->ops->finish(t->nn, err));
        s->ids[i * s->stride + s->known] =
            draw(s->sampling, s->logits, t->config.vocab, s->choices,
                 fsdp_model_uniform(s->sampling->seed, "sample", index));
    }
    return FSDP_OK;
}

static fsdp_status step(sampler *s, fsdp_error *err)
{
    fsdp_transformer *t = s->t;
    const fsdp_token_batch batch = next_batch(s);
    FSDP_TRY(fsdp_ctl_agree(t->ctl, fsdp_model_take_batch(t, &batch, false, s->room, err), err));
    FSDP_TRY(model_forward(t, &s->caches, err));
    FSDP_TRY(model_last_norm(t, err));
    FSDP_TRY(choose(s, err));
    for (int64_t i = 0; i < t->config.layers; i++)
        s->caches.layers[i].used += batch.length;
    s->known++;
    return end_forward(t, err);
}

static fsdp_status run(sampler *s, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_set_evaluating(s->t->root, true, err));
    for (int64_t n = 0; n < s->sampling->count; n++)
        FSDP_TRY(step(s, err));
    return fsdp_root_set_evaluating(s->t->root, false, err);
}

fsdp_status fsdp_transformer_sample(fsdp_transformer *t, const fsdp_token_batch *batch,
                                    const fsdp_sampling *sampling, int64_t *ids_out,
                                    fsdp_error *err)
{
    sampler s = {.t = t, .sampling = sampling};
    fsdp_status st = fsdp_ctl_agree(t->ctl, sampler_init(&s, batch, err), err);
    if (st == FSDP_OK)
        st = run(&s, err);
    for (int64_t i = 0; st == FSDP_OK && i < s.sequences; i++)
        memcpy(ids_out + i * sampling->count, s.ids + i * s.stride + batch->length,
               (size_t)sampling->count * sizeof *ids_out);
    sampler_release(&s);
    return st;
}

/* === the object =============================================================================== */

static fsdp_status set_options(fsdp_transformer *t, const fsdp_transformer_opts *opts,
                               fsdp_error *err)
{
    t->opts = *opts;
    if (opts->is_mixed) {
        t->opts.unit.param_dtype = FSDP_BF16;
        t->opts.unit.reduce_dtype = FSDP_F32;
    }
    FSDP_TRY(fsdp_nn_open_cpu(opts->threads > 0 ? opts->threads : 1, &t->nn, err));
    t->ops = t->nn->ops;
    return FSDP_OK;
}

/* Gradients are summed: the loss has the factor of the whole step already. */
static fsdp_status set_sums(fsdp_transformer *t, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_root_unit_count(t->root); i++)
        FSDP_TRY(fsdp_unit_set_gradient_divide_factor(fsdp_root_unit_at(t->root, i), 1, err));
    return FSDP_OK;
}

static fsdp_status prepare(fsdp_world *world, fsdp_transformer *t,
                           const fsdp_transformer_opts *opts, fsdp_error *err)
{
    FSDP_TRY(fsdp_transformer_config_check(&t->config, "the model", err));
    FSDP_TRY(set_options(t, opts, err));
    FSDP_TRY(fsdp_model_create(world, &t->model, err));
    return fsdp_model_declare(t, err);
}

fsdp_status fsdp_transformer_create(fsdp_world *world, const fsdp_transformer_config *config,
                                    const fsdp_transformer_opts *opts,
                                    fsdp_transformer **transformer_out, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(world);
    fsdp_transformer *t = fsdp_alloc(1, sizeof *t);
    fsdp_status st;
    if (t) {
        t->config = *config;
        t->ctl = ctl;
        st = prepare(world, t, opts, err);
    } else {
        st = fsdp_fail_memory(err, "a model");
    }
    st = fsdp_ctl_agree(ctl, st, err);
    if (st == FSDP_OK)
        st = fsdp_root_create(t->model, &t->opts.unit, &t->root, err);
    if (st == FSDP_OK) {
        st = set_sums(t, err);
        if (st == FSDP_OK)
            st = fsdp_f32_params_init(&t->params, t->nn, t->model, false, err);
        st = fsdp_ctl_agree(ctl, st, err);
    }
    if (st == FSDP_OK)
        *transformer_out = t;
    else
        fsdp_transformer_free(t);
    return st;
}

void fsdp_transformer_free(fsdp_transformer *t)
{
    if (!t)
        return;
    fsdp_model_free_arrays(t);
    fsdp_f32_params_release(&t->params);
    fsdp_root_free(t->root);
    fsdp_model_free(t->model);
    if (t->nn)
        t->ops->close(t->nn);
    fsdp_free(t->blocks);
    fsdp_free(t);
}

fsdp_root *fsdp_transformer_root(fsdp_transformer *t)
{
    return t->root;
}

int64_t fsdp_transformer_param_count(const fsdp_transformer *t)
{
    int64_t count = 0;
    for (size_t i = 0; i < fsdp_model_count(t->model); i++) {
        const fsdp_param_info info = fsdp_param_describe(fsdp_model_at(t->model, i));
        int64_t elements = 1;
        for (int d = 0; d < info.ndim; d++)
            elements *= info.shape[d];
        count += elements;
    }
    return count;
}
