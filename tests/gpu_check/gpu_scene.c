/* See gpu_scene.h. */
#include "tests/gpu_check/gpu_scene.h"

#include <string.h>

#include "base/core/mem.h"
#include "kernels/digest.h"
#include <fsdp/root_init.h>

enum { ROWS = 61, WIDTH = 17 };

/* --- the net ---------------------------------------------------------------------------------- */

fsdp_stream *gpu_scene_compute(const gpu_scene *scene)
{
    return scene->toy.root->context->streams[FSDP_STREAM_COMPUTE];
}

fsdp_status gpu_scene_begin(gpu_scene *scene, const gpu_scene_net *net, fsdp_error *err)
{
    const bool two = net->rows > 0;
    toy_case where = {
        .mesh_ndim = 1 + two,
        .mesh_shape = {two ? net->rows : fsdp_world_size(scene->rank->world), net->columns},
        .mesh_names = {two ? "rep" : "dp", "dp"},
        .opts = net->units};
    toy_free(&scene->toy);
    forget_events(scene->rank);
    scene->step = 0;
    return toy_begin(&scene->toy, scene->rank, &where, err);
}

fsdp_status gpu_scene_build(gpu_scene *scene, const gpu_scene_net *net, fsdp_error *err)
{
    const int64_t shape[] = {ROWS, WIDTH};
    const fsdp_adamw_opts adamw = {.lr = 0.01, .weight_decay = 0.01};
    const fsdp_sgd_opts sgd = {.lr = 0.05};
    toy *base = &scene->toy;
    FSDP_TRY(gpu_scene_begin(scene, net, err));
    base->runs_root = net->has_own;
    if (net->has_own)
        FSDP_TRY(fsdp_model_add(
            base->model,
            &(fsdp_param_spec){.name = "own", .dtype = FSDP_F32, .ndim = 2, .shape = shape},
            &base->own, err));
    FSDP_TRY(toy_add_weights(base, net->layers, 2, shape, err));
    FSDP_TRY(toy_wrap(base, err));
    FSDP_TRY(fsdp_root_init_uniform(base->root, 1, err));
    return net->is_sgd ? toy_add_sgd(base, &sgd, err) : toy_add_adamw(base, &adamw, err);
}

static fsdp_status scale_to_grad(gpu_scene *scene, fsdp_param *param, double factor,
                                 fsdp_error *err)
{
    fsdp_stream *compute = gpu_scene_compute(scene);
    const fsdp_device_kernels *kernels = compute->device->ops->kernels;
    const fsdp_dtype dtype = fsdp_param_describe(param).grad_dtype;
    const size_t count = (size_t)fsdp_param_count(param);
    const void *data = fsdp_param_data(param);
    void *grad = data ? fsdp_param_grad_raw(param) : NULL;
    if (!grad)
        return fsdp_param_error(param, err);
    fsdp_work_uses(compute, data);
    fsdp_work_uses(compute, grad);
    kernels->copy(compute, grad, data, count * fsdp_dtype_size(dtype));
    kernels->multiply(compute, &(fsdp_span){grad, dtype, count}, 1, factor);
    return FSDP_OK;
}

/* The root's own parameter has its gradient with the last layer. */
fsdp_status gpu_scene_give_grad(toy *net, int layer, fsdp_error *err)
{
    gpu_scene *scene = (gpu_scene *)net;
    const double factor =
        0.3 + 0.7 * fsdp_world_rank(net->world) + 0.11 * scene->step - 0.2 * layer;
    if (net->own && layer == net->layers - 1)
        FSDP_TRY(scale_to_grad(scene, net->own, factor + 1, err));
    return scale_to_grad(scene, net->weight[layer], factor, err);
}

fsdp_status gpu_scene_step(gpu_scene *scene, fsdp_error *err)
{
    toy *net = &scene->toy;
    FSDP_TRY(toy_forward(net, NULL, err));
    FSDP_TRY(toy_backward(net, gpu_scene_give_grad, err));
    gpu_scene_note_events(scene);
    FSDP_TRY(gpu_scene_note_tensors(scene, err));
    scene->step++;
    return fsdp_optim_step(net->optim, err);
}

fsdp_status gpu_scene_train(gpu_scene *scene, int steps, fsdp_error *err)
{
    for (int i = 0; i < steps; i++)
        FSDP_TRY(gpu_scene_step(scene, err));
    return gpu_scene_note_tensors(scene, err);
}

/* --- the device's memory ---------------------------------------------------------------------- */

fsdp_status gpu_scene_read(gpu_scene *scene, const void *data, size_t size, void *host,
                           fsdp_error *err)
{
    fsdp_stream *compute = gpu_scene_compute(scene);
    const fsdp_device_ops *ops = compute->device->ops;
    void *staging = size > 0 ? ops->alloc_staging(compute->device, size) : NULL;
    if (size == 0)
        return FSDP_OK;
    if (!staging)
        return fsdp_fail_memory(err, "a copy of a tensor");
    fsdp_work_uses(compute, data);
    ops->kernels->copy(compute, staging, data, size);
    fsdp_status status = ops->sync(ops->record(compute), err);
    memcpy(host, staging, size);
    ops->dealloc_staging(compute->device, staging, size);
    return status;
}

fsdp_status gpu_scene_write_grad(gpu_scene *scene, fsdp_param *param, const void *host, size_t size,
                                 fsdp_error *err)
{
    fsdp_stream *compute = gpu_scene_compute(scene);
    const fsdp_device_ops *ops = compute->device->ops;
    void *grad = fsdp_param_grad_raw(param);
    if (!grad)
        return fsdp_param_error(param, err);
    fsdp_work_uses(compute, grad);
    ops->kernels->copy(compute, grad, host, size);
    return ops->sync(ops->record(compute), err);
}

/* --- notes ------------------------------------------------------------------------------------ */

void gpu_scene_note_events(gpu_scene *scene)
{
    const char *events = scene->rank->events.data;
    fsdp_text_addf(scene->notes, "events %s\n", events ? events : "");
    forget_events(scene->rank);
}

/* Tensors of the device; their copies lie one after the other. */
typedef struct noted {
    const char *what, *name;
    const void *data;
    size_t size;
} noted;

static void note(gpu_scene *scene, const noted *list, size_t n, const unsigned char *copies)
{
    for (size_t i = 0; i < n; i++) {
        char hex[FSDP_XXH3_HEX];
        fsdp_xxh3_hex(copies, list[i].size, hex);
        fsdp_text_addf(scene->notes, "%s of %s: XXH3-128 %s of %zu bytes\n", list[i].what,
                       list[i].name, hex, list[i].size);
        copies += list[i].size;
    }
}

/* The host waits once for all. */
static fsdp_status note_all(gpu_scene *scene, const noted *list, size_t n, fsdp_error *err)
{
    fsdp_stream *compute = gpu_scene_compute(scene);
    const fsdp_device_ops *ops = compute->device->ops;
    size_t room = 1;
    for (size_t i = 0; i < n; i++)
        room += list[i].size;
    unsigned char *copies = ops->alloc_staging(compute->device, room), *to = copies;
    if (!copies)
        return fsdp_fail_memory(err, "copies of tensors");
    for (size_t i = 0; i < n; to += list[i++].size) {
        fsdp_work_uses(compute, list[i].data);
        if (list[i].size > 0)
            ops->kernels->copy(compute, to, list[i].data, list[i].size);
    }
    fsdp_status status = ops->sync(ops->record(compute), err);
    if (status == FSDP_OK)
        note(scene, list, n, copies);
    ops->dealloc_staging(compute->device, copies, room);
    return status;
}

fsdp_status gpu_scene_note_bytes(gpu_scene *scene, const char *what, const char *name,
                                 const void *data, size_t size, fsdp_error *err)
{
    return note_all(scene, &(noted){what, name, data, size}, 1, err);
}

static size_t list_tensor(fsdp_param *param, noted *list)
{
    fsdp_box box;
    const void *shard = fsdp_param_shard(param, &box), *grad = fsdp_param_shard_grad(param);
    const size_t size =
        (size_t)fsdp_box_count(&box) * fsdp_dtype_size(fsdp_param_describe(param).dtype);
    list[0] = (noted){"shard", fsdp_param_name(param), shard, size};
    list[1] = (noted){"gradient", fsdp_param_name(param), grad, size};
    return grad ? 2 : 1;
}

fsdp_status gpu_scene_note_tensors(gpu_scene *scene, fsdp_error *err)
{
    const toy *net = &scene->toy;
    noted list[2 * (TOY_LAYERS + 1)];
    size_t n = net->own ? list_tensor(net->own, list) : 0;
    for (int i = 0; i < TOY_LAYERS && net->weight[i]; i++)
        n += list_tensor(net->weight[i], list + n);
    return note_all(scene, list, n, err);
}
