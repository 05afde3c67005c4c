/* Computes with parameters in f32, and with linear layers of them. See linear_layer.h. */
#include "runtime/transformer/linear_layer.h"

#include "base/core/mem.h"
#include "runtime/launch/world_internal.h"
#include "runtime/param/param.h"

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
