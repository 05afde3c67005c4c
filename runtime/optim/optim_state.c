/* The state of an optimizer as tensors. It exists since the optimizer was created, so that names and shapes
 * are known before the first step. See optim.h. */
#include "runtime/optim/optim_internal.h"

static fsdp_optim_tensor tensor_of(const fsdp_param *param, const char *name, fsdp_dtype dtype,
                                   void *data)
{
    return (fsdp_optim_tensor){.name = name,
                               .dtype = dtype,
                               .ndim = param->ndim,
                               .shape = param->shape,
                               .layout = param->layout,
                               .data = data};
}

size_t fsdp_optim_state_tensors(const fsdp_optim *optim, fsdp_optim_state *state,
                                fsdp_optim_tensor tensors_out[FSDP_OPTIM_TENSORS])
{
    const fsdp_param *param = state->param;
    size_t n = 0;
    tensors_out[n++] =
        (fsdp_optim_tensor){.name = "step",
                            .dtype = FSDP_F32,
                            .layout = {.kind = FSDP_LAYOUT_MESH, .mesh = param->mesh},
                            .data = &state->step};
    for (int m = 0; m < FSDP_MOMENTS; m++) {
        const char *name = fsdp_optim_moment_name(optim, m);
        if (name)
            tensors_out[n++] = tensor_of(param, name, state->moment_dtype, state->moments[m]);
    }
    if (state->master)
        tensors_out[n++] = tensor_of(param, "master", FSDP_F32, state->master);
    return n;
}

size_t fsdp_optim_describe_state(const fsdp_optim *optim, const fsdp_param *param,
                                 fsdp_optim_tensor tensors_out[FSDP_OPTIM_TENSORS])
{
    if (!optim || !param || !tensors_out)
        return 0;
    for (size_t i = 0; i < optim->count; i++)
        if (optim->states[i].param == param)
            return fsdp_optim_state_tensors(optim, &optim->states[i], tensors_out);
    return 0;
}
