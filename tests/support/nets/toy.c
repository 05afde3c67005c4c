/* See toy.h. */
#include "tests/support/nets/toy.h"

#include "tests/bench/mlp.h"

#include <stdio.h>
#include <string.h>

/* --- building --------------------------------------------------------------------------------- */

static fsdp_status begin_model(toy *net, fsdp_world *world, fsdp_error *err)
{
    net->world = world;
    net->opts = (fsdp_unit_opts){.mesh = net->mesh};
    return fsdp_model_create(world, &net->model, err);
}

fsdp_status toy_begin_in(toy *net, fsdp_world *world, int ndim, const int64_t *shape,
                         const char *const *names, fsdp_error *err)
{
    FSDP_TRY(fsdp_world_mesh(world, ndim, shape, names, &net->mesh, err));
    return begin_model(net, world, err);
}

fsdp_status toy_begin_backwards(toy *net, fsdp_world *world, int ndim, const int64_t *shape,
                                const char *const *names, fsdp_error *err)
{
    int size = fsdp_world_size(world), ranks[16];
    for (int i = 0; i < size; i++)
        ranks[i] = size - 1 - i;
    FSDP_TRY(fsdp_mesh_create(ndim, shape, names, ranks, &net->mesh, err));
    FSDP_TRY(fsdp_world_connect(world, net->mesh, err));
    return begin_model(net, world, err);
}

fsdp_status toy_begin(toy *net, world_rank *rank, const toy_case *what, fsdp_error *err)
{
    const fsdp_unit_opts *opts = &what->opts;
    *net = (toy){.rank = rank, .user = what->user};
    FSDP_TRY(
        toy_begin_in(net, rank->world, what->mesh_ndim, what->mesh_shape, what->mesh_names, err));
    net->opts = *opts;
    net->opts.mesh = net->mesh;
    return FSDP_OK;
}

void toy_free(toy *net)
{
    fsdp_optim_free(net->optim);
    fsdp_mlp_free(net->mlp);
    if (net->wrap)
        fsdp_wrap_free(net->wrap);
    else
        fsdp_root_free(net->root);
    fsdp_model_free(net->model);
    fsdp_mesh_free(net->mesh);
    fsdp_mesh_free(net->other_mesh);
    *net = (toy){0};
}

fsdp_status toy_add_weights(toy *net, int layers, int ndim, const int64_t *shape, fsdp_error *err)
{
    for (net->layers = 0; net->layers < layers; net->layers++) {
        char name[16];
        snprintf(name, sizeof name, "L%d.w", net->layers);
        FSDP_TRY(fsdp_model_add(
            net->model,
            &(fsdp_param_spec){.name = name, .dtype = FSDP_F32, .ndim = ndim, .shape = shape},
            &net->weight[net->layers], err));
    }
    return FSDP_OK;
}

fsdp_status toy_wrap(toy *net, fsdp_error *err)
{
    for (int i = 0; i < net->layers; i++) {
        char name[16];
        snprintf(name, sizeof name, "L%d", i);
        FSDP_TRY(fsdp_unit_create(net->model, name, &net->opts, &net->unit[i], err));
    }
    return fsdp_root_create(net->model, &net->opts, &net->root, err);
}

fsdp_status toy_add_adamw(toy *net, const fsdp_adamw_opts *opts, fsdp_error *err)
{
    return fsdp_adamw_create(net->root, opts, &net->optim, err);
}

fsdp_status toy_add_sgd(toy *net, const fsdp_sgd_opts *opts, fsdp_error *err)
{
    return fsdp_sgd_create(net->root, opts, &net->optim, err);
}

/* --- a step ----------------------------------------------------------------------------------- */

static bool has_hooks(const toy *net, int layer)
{
    return net->unit[layer] != fsdp_root_unit(net->root);
}

fsdp_status toy_forward_layer(toy *net, int i, toy_layer_body body, fsdp_error *err)
{
    if (has_hooks(net, i))
        FSDP_TRY(fsdp_unit_pre_forward(net->unit[i], err));
    if (body)
        FSDP_TRY(body(net, i, err));
    return has_hooks(net, i) ? fsdp_unit_post_forward(net->unit[i], err) : FSDP_OK;
}

fsdp_status toy_forward(toy *net, toy_layer_body body, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    if (net->runs_root)
        FSDP_TRY(fsdp_unit_pre_forward(fsdp_root_unit(net->root), err));
    for (int i = 0; i < net->layers; i++)
        FSDP_TRY(toy_forward_layer(net, i, body, err));
    if (net->runs_root)
        FSDP_TRY(fsdp_unit_post_forward(fsdp_root_unit(net->root), err));
    return fsdp_root_end_forward(net->root, err);
}

fsdp_status toy_backward_layer(toy *net, int i, toy_layer_body body, fsdp_error *err)
{
    if (has_hooks(net, i))
        FSDP_TRY(fsdp_unit_pre_backward(net->unit[i], err));
    if (body)
        FSDP_TRY(body(net, i, err));
    return has_hooks(net, i) ? fsdp_unit_post_backward(net->unit[i], err) : FSDP_OK;
}

fsdp_status toy_backward_layers(toy *net, toy_layer_body body, fsdp_error *err)
{
    if (net->runs_root)
        FSDP_TRY(fsdp_unit_pre_backward(fsdp_root_unit(net->root), err));
    for (int i = net->layers - 1; i >= 0; i--)
        FSDP_TRY(toy_backward_layer(net, i, body, err));
    return FSDP_OK;
}

fsdp_status toy_backward(toy *net, toy_layer_body body, fsdp_error *err)
{
    FSDP_TRY(toy_backward_layers(net, body, err));
    return fsdp_root_end_backward(net->root, err);
}

fsdp_status toy_touch_grad(toy *net, int layer, fsdp_error *err)
{
    return fsdp_param_grad(net->weight[layer]) ? FSDP_OK
                                               : fsdp_param_error(net->weight[layer], err);
}

fsdp_status toy_add_ones(toy *net, int layer, fsdp_error *err)
{
    float *grad = fsdp_param_grad(net->weight[layer]);
    if (!grad)
        return fsdp_param_error(net->weight[layer], err);
    for (int64_t i = 0; i < fsdp_param_count(net->weight[layer]); i++)
        grad[i] += 1;
    return FSDP_OK;
}

/* --- expectations ----------------------------------------------------------------------------- */

fsdp_status toy_expect_weights(const toy *net, float value, fsdp_error *err)
{
    for (int i = 0; i < net->layers; i++) {
        fsdp_box box;
        const float *shard = fsdp_param_shard(net->weight[i], &box);
        for (int64_t e = 0; e < fsdp_box_count(&box); e++)
            if (shard[e] != value)
                return fsdp_fail(err, FSDP_ERR_INTERNAL, "layer %d: a weight is %g, not %g", i,
                                 (double)shard[e], (double)value);
    }
    return FSDP_OK;
}

/* --- running ---------------------------------------------------------------------------------- */

static fsdp_status run_rank(world_rank *rank, fsdp_error *err)
{
    const toy_case *what = rank->user;
    toy net;
    fsdp_status status = toy_begin(&net, rank, what, err);
    if (status == FSDP_OK && what->declare)
        status = what->declare(&net, err);
    if (status == FSDP_OK)
        status = what->body(&net, err);
    toy_free(&net);
    return status;
}

fsdp_status toy_run_with(const char *device, world_body body, const toy_case *what, fsdp_error *err)
{
    int64_t ranks = 1;
    for (int i = 0; i < what->mesh_ndim; i++)
        ranks *= what->mesh_shape[i];
    return run_worlds((int)ranks, device, body, (void *)what, err);
}

fsdp_status toy_run_on(const char *device, const toy_case *what, fsdp_error *err)
{
    return toy_run_with(device, run_rank, what, err);
}
