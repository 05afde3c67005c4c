/*
 * Scenarios of single gathers and reductions: C1 to C5, C17, C20 (docs/scenarios.md), whose numbers are known
 * beforehand. Weights of a toy are parameters of one unit here. See gpu_scene.h.
 */
#include "tests/gpu_check/gpu_scene.h"

#include <stdio.h>
#include <string.h>

#include "base/core/mem.h"
#include "tests/support/nets/tensors.h"
#include <fsdp/root_init.h>

typedef struct wide_param {
    int ndim;
    int64_t shape[3];
    fsdp_dtype dtype;
} wide_param;

/* One unit "u" with these parameters. */
static fsdp_status build(gpu_scene *scene, const gpu_scene_net *net, const wide_param *params,
                         int count, fsdp_error *err)
{
    toy *base = &scene->toy;
    FSDP_TRY(gpu_scene_begin(scene, net, err));
    for (int i = 0; i < count; i++) {
        char name[16];
        snprintf(name, sizeof name, "u.%d", i);
        FSDP_TRY(fsdp_model_add(base->model,
                                &(fsdp_param_spec){.name = name,
                                                   .dtype = params[i].dtype,
                                                   .ndim = params[i].ndim,
                                                   .shape = params[i].shape},
                                &base->weight[i], err));
    }
    base->layers = 1;
    FSDP_TRY(fsdp_unit_create(base->model, "u", &base->opts, &base->unit[0], err));
    return fsdp_root_create(base->model, &base->opts, &base->root, err);
}

/* The sizes of C1 to C4. */
static const wide_param sizes[] = {
    {2, {17, 257}, FSDP_F32}, {1, {17}, FSDP_F32},      {2, {64, 312}, FSDP_F32},
    {1, {64}, FSDP_F32},      {2, {64, 64}, FSDP_F32},  {2, {512, 64}, FSDP_F32},
    {1, {256}, FSDP_F32},     {2, {64, 297}, FSDP_F32},
};
enum { SIZES = sizeof sizes / sizeof *sizes, LARGEST = 512 * 64 };

static fsdp_status expect_number(const fsdp_param *param, int64_t element, float found,
                                 float expected, fsdp_error *err)
{
    return found == expected
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s', element %lld: %.9g, not %.9g",
                           fsdp_param_name(param), (long long)element, (double)found,
                           (double)expected);
}

/* --- C1, C2, C20: gathers --------------------------------------------------------------------- */

/* Every element is its position, plus one. */
static fsdp_status expect_gathered(toy *net, int layer, fsdp_error *err)
{
    float *host = fsdp_alloc(LARGEST, sizeof *host);
    fsdp_status status = host ? FSDP_OK : fsdp_fail_memory(err, "a parameter");
    (void)layer;
    for (int i = 0; i < SIZES && status == FSDP_OK; i++) {
        const int64_t count = fsdp_param_count(net->weight[i]);
        const void *data = fsdp_param_data(net->weight[i]);
        status =
            data ? gpu_scene_read((gpu_scene *)net, data, (size_t)count * sizeof *host, host, err)
                 : fsdp_param_error(net->weight[i], err);
        for (int64_t e = 0; e < count && status == FSDP_OK; e++)
            status = expect_number(net->weight[i], e, host[e], (float)(e + 1), err);
    }
    fsdp_free(host);
    return status;
}

static fsdp_status build_sizes(gpu_scene *scene, fsdp_unit_opts opts, fsdp_error *err)
{
    const gpu_scene_net net = {.units = opts};
    FSDP_TRY(build(scene, &net, sizes, SIZES, err));
    return fsdp_root_init(scene->toy.root, tensor_number, NULL, err);
}

static fsdp_status gather_by_hand(gpu_scene *scene, bool is_async, fsdp_error *err)
{
    fsdp_unit *unit = scene->toy.unit[0];
    fsdp_unshard_handle *handle;
    FSDP_TRY(fsdp_unit_unshard(unit, is_async, &handle, err));
    FSDP_TRY(fsdp_unshard_wait(handle, err));
    FSDP_TRY(expect_gathered(&scene->toy, 0, err));
    return fsdp_unit_reshard(unit, err);
}

static fsdp_status expect_and_touch(toy *net, int layer, fsdp_error *err)
{
    FSDP_TRY(expect_gathered(net, layer, err));
    for (int i = 0; i < SIZES; i++)
        FSDP_TRY(toy_touch_grad(net, i, err));
    return FSDP_OK;
}

static fsdp_status gather_in_hooks(gpu_scene *scene, fsdp_error *err)
{
    FSDP_TRY(toy_forward(&scene->toy, expect_gathered, err));
    FSDP_TRY(toy_backward(&scene->toy, expect_and_touch, err));
    gpu_scene_note_events(scene);
    return gpu_scene_note_tensors(scene, err);
}

fsdp_status gpu_scene_gathers(gpu_scene *scene, fsdp_error *err)
{
    for (int is_async = 0; is_async < 2; is_async++) {
        FSDP_TRY(build_sizes(scene, (fsdp_unit_opts){.reshard_after_forward = FSDP_RESHARD_ALWAYS},
                             err));
        FSDP_TRY(
            fsdp_unit_set(scene->toy.unit[0], FSDP_UNIT_UNSHARD_ASYNC_OP, is_async, false, err));
        FSDP_TRY(gather_by_hand(scene, is_async, err));
        FSDP_TRY(gather_in_hooks(scene, err));
    }
    return FSDP_OK;
}

/* Two neighbours gather what they kept. */
fsdp_status gpu_scene_gathers_of_slices(gpu_scene *scene, fsdp_error *err)
{
    FSDP_TRY(build_sizes(scene, (fsdp_unit_opts){.reshard_after_forward = 2}, err));
    for (int i = 0; i < 2; i++)
        FSDP_TRY(gather_in_hooks(scene, err));
    return FSDP_OK;
}

fsdp_status gpu_scene_early_gathers(gpu_scene *scene, fsdp_error *err)
{
    fsdp_unshard_handle *handle;
    FSDP_TRY(build_sizes(scene, (fsdp_unit_opts){0}, err));
    FSDP_TRY(fsdp_unit_unshard(fsdp_root_unit(scene->toy.root), true, &handle, err)); /* empty */
    FSDP_TRY(fsdp_unshard_wait(handle, err));
    for (int is_async = 0; is_async < 2; is_async++)
        FSDP_TRY(gather_by_hand(scene, is_async, err));
    return gather_in_hooks(scene, err);
}

/* --- C3, C4: reductions ----------------------------------------------------------------------- */

/* Whole numbers whose sums and means are exact in the dtype; in f16, sums of many ranks overflow unless they
 * are divided before. */
static float grad_at(int rank, int64_t element, fsdp_dtype dtype)
{
    return (float)((rank + 1) * (1 + element % 3) * (dtype == FSDP_F16 ? 512 : 1));
}

static fsdp_status give_numbers(toy *net, int layer, fsdp_error *err)
{
    float *host = fsdp_alloc(LARGEST, sizeof *host);
    fsdp_status status = host ? FSDP_OK : fsdp_fail_memory(err, "a gradient");
    (void)layer;
    for (int i = 0; i < SIZES && status == FSDP_OK; i++) {
        const int64_t count = fsdp_param_count(net->weight[i]);
        for (int64_t e = 0; e < count; e++)
            host[e] = grad_at(fsdp_world_rank(net->world), e, net->opts.reduce_dtype);
        status = gpu_scene_write_grad((gpu_scene *)net, net->weight[i], host,
                                      (size_t)count * sizeof *host, err);
    }
    fsdp_free(host);
    return status;
}

static float mean_at(int ranks, int64_t element, fsdp_dtype dtype)
{
    float sum = 0;
    for (int r = 0; r < ranks; r++)
        sum += grad_at(r, element, dtype);
    return sum / (float)ranks;
}

static fsdp_status expect_means(gpu_scene *scene, fsdp_error *err)
{
    const toy *net = &scene->toy;
    const int ranks = fsdp_world_size(net->world);
    float *host = fsdp_alloc(LARGEST, sizeof *host);
    fsdp_status status = host ? FSDP_OK : fsdp_fail_memory(err, "a gradient");
    for (int i = 0; i < SIZES && status == FSDP_OK; i++) {
        fsdp_box box;
        (void)fsdp_param_shard(net->weight[i], &box);
        const int64_t count = fsdp_box_count(&box);
        const int64_t first = count > 0 ? fsdp_box_position(box.ndim, sizes[i].shape, box.lo) : 0;
        status = gpu_scene_read(scene, fsdp_param_shard_grad(net->weight[i]),
                                (size_t)count * sizeof *host, host, err);
        for (int64_t e = 0; e < count && status == FSDP_OK; e++)
            status = expect_number(net->weight[i], first + e, host[e],
                                   mean_at(ranks, first + e, net->opts.reduce_dtype), err);
    }
    fsdp_free(host);
    return status;
}

static fsdp_status reduce(gpu_scene *scene, fsdp_dtype dtype, fsdp_error *err)
{
    for (int is_separate = 0; is_separate < 2; is_separate++) {
        FSDP_TRY(build_sizes(scene, (fsdp_unit_opts){.reduce_dtype = dtype}, err));
        FSDP_TRY(fsdp_unit_set(scene->toy.unit[0], FSDP_UNIT_SEPARATE_REDUCE_SCATTER_GROUP,
                               is_separate, false, err));
        FSDP_TRY(toy_forward(&scene->toy, NULL, err));
        FSDP_TRY(toy_backward(&scene->toy, give_numbers, err));
        FSDP_TRY(expect_means(scene, err));
        gpu_scene_note_events(scene);
        FSDP_TRY(gpu_scene_note_tensors(scene, err));
    }
    return FSDP_OK;
}

fsdp_status gpu_scene_reductions(gpu_scene *scene, fsdp_error *err)
{
    return reduce(scene, FSDP_F32, err);
}

fsdp_status gpu_scene_narrow_reductions(gpu_scene *scene, fsdp_error *err)
{
    return reduce(scene, FSDP_F16, err);
}

/* --- C5: packing ------------------------------------------------------------------------------ */

static const wide_param mixes[][4] = {
    {{2, {5, 3}, FSDP_BF16},
     {1, {7}, FSDP_F32},
     {3, {2049, 2, 2}, FSDP_BF16},
     {2, {9, 5}, FSDP_F32}},
    {{2, {5, 3}, FSDP_F16}, {1, {7}, FSDP_F32}, {3, {2049, 2, 2}, FSDP_F16}, {2, {9, 5}, FSDP_F32}},
};
enum { MIXED = 4, MOST_MIXED = 2049 * 4 };

/* A copy of the reduction's input, in the order of its stream. */
typedef struct kept_input {
    fsdp_device *device;
    unsigned char *staging;
    size_t size, room;
} kept_input;

static fsdp_status keep_input(void *context, fsdp_comm *comm, const fsdp_collective *call,
                              fsdp_error *err)
{
    kept_input *kept = context;
    kept->size = (size_t)call->count * (size_t)fsdp_comm_size(comm) * fsdp_dtype_size(call->dtype);
    if (kept->size > kept->room)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "an input of %zu bytes", kept->size);
    if (call->stream)
        kept->device->ops->kernels->copy(call->stream, kept->staging, call->in, kept->size);
    else
        memcpy(kept->staging, call->in, kept->size);
    return fsdp_comm_run(comm, call, err);
}

static fsdp_status give_mixed(toy *net, int layer, fsdp_error *err)
{
    static _Thread_local unsigned char host[MOST_MIXED * sizeof(float)];
    (void)layer;
    for (int i = 0; i < MIXED; i++) {
        const fsdp_dtype dtype = fsdp_param_describe(net->weight[i]).dtype;
        const size_t count = (size_t)fsdp_param_count(net->weight[i]);
        for (size_t e = 0; e < count; e++) {
            float value = (float)fsdp_uniform(4, fsdp_param_name(net->weight[i]), e);
            fsdp_cast(host + e * fsdp_dtype_size(dtype), dtype, &value, FSDP_F32, 1);
        }
        FSDP_TRY(gpu_scene_write_grad((gpu_scene *)net, net->weight[i], host,
                                      count * fsdp_dtype_size(dtype), err));
    }
    return FSDP_OK;
}

static fsdp_status pack(gpu_scene *scene, kept_input *kept, fsdp_error *err)
{
    const fsdp_custom_collective keep = {.context = kept, .run = keep_input};
    FSDP_TRY(fsdp_unit_set_custom_collective(scene->toy.unit[0], FSDP_REDUCE_SCATTER, &keep, err));
    FSDP_TRY(toy_forward(&scene->toy, NULL, err));
    FSDP_TRY(toy_backward(&scene->toy, give_mixed, err));
    gpu_scene_note_events(scene);
    FSDP_TRY(gpu_scene_note_tensors(scene, err)); /* waits for the copy */
    return gpu_scene_note_bytes(scene, "packed", "gradients", kept->staging, kept->size, err);
}

fsdp_status gpu_scene_packing(gpu_scene *scene, fsdp_error *err)
{
    static const fsdp_dtype reduced[] = {FSDP_DTYPE_NONE, FSDP_F32, FSDP_BF16};
    fsdp_device *device = scene->rank->world->parts.device;
    kept_input kept = {.device = device, .room = (size_t)1 << 18};
    kept.staging = device->ops->alloc_staging(device, kept.room);
    fsdp_status status = kept.staging ? FSDP_OK : fsdp_fail_memory(err, "an input");
    for (int i = 0; i < 6 && status == FSDP_OK; i++) {
        const gpu_scene_net net = {.units.reduce_dtype = reduced[i / 2]};
        status = build(scene, &net, mixes[i % 2], MIXED, err);
        if (status == FSDP_OK)
            status = pack(scene, &kept, err);
    }
    toy_free(&scene->toy); /* its work is done then */
    if (kept.staging)
        device->ops->dealloc_staging(device, kept.staging, kept.room);
    return status;
}

/* --- C17: one rank divides once ----------------------------------------------------------------- */

enum { ALONE = 1024 * 1025, THREE = 3 };

static fsdp_status give_threes(toy *net, int layer, fsdp_error *err)
{
    float *host = fsdp_alloc(ALONE, sizeof *host);
    if (!host)
        return fsdp_fail_memory(err, "a gradient");
    for (int i = 0; i < ALONE; i++)
        host[i] = THREE;
    fsdp_status status =
        gpu_scene_write_grad((gpu_scene *)net, net->weight[layer], host, ALONE * sizeof *host, err);
    fsdp_free(host);
    return status;
}

static fsdp_status expect_quotients(gpu_scene *scene, double divisor, fsdp_error *err)
{
    fsdp_param *param = scene->toy.weight[0];
    float *host = fsdp_alloc(ALONE, sizeof *host);
    fsdp_status status = host ? FSDP_OK : fsdp_fail_memory(err, "a gradient");
    if (status == FSDP_OK)
        status =
            gpu_scene_read(scene, fsdp_param_shard_grad(param), ALONE * sizeof *host, host, err);
    for (int i = 0; i < ALONE && status == FSDP_OK; i++)
        status = expect_number(param, i, host[i], (float)(THREE / divisor), err);
    fsdp_free(host);
    return status;
}

static fsdp_status divide_alone(gpu_scene *scene, double factor, bool forces_sum, fsdp_error *err)
{
    fsdp_unit *unit = scene->toy.unit[0];
    FSDP_TRY(fsdp_unit_set(unit, FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS, forces_sum, false, err));
    if (factor > 0)
        FSDP_TRY(fsdp_unit_set_gradient_divide_factor(unit, factor, err));
    FSDP_TRY(toy_forward(&scene->toy, NULL, err));
    FSDP_TRY(toy_backward(&scene->toy, give_threes, err));
    FSDP_TRY(expect_events(scene->rank, "U u|R u|U u|R u|post u", err)); /* no collective */
    return expect_quotients(scene, factor > 0 ? factor : 1, err);
}

fsdp_status gpu_scene_alone(gpu_scene *scene, fsdp_error *err)
{
    static const fsdp_dtype dtypes[] = {FSDP_DTYPE_NONE, FSDP_F16};
    static const wide_param weight = {2, {1024, 1025}, FSDP_F32};
    for (int kind = 0; kind < 3 * 2 * 2; kind++) {
        const gpu_scene_net net = {.units = {.reduce_dtype = dtypes[kind / 3 % 2],
                                             .reshard_after_forward = FSDP_RESHARD_ALWAYS}};
        FSDP_TRY(build(scene, &net, &weight, 1, err));
        FSDP_TRY(divide_alone(scene, kind % 3, kind / 6 == 1, err));
        FSDP_TRY(gpu_scene_note_tensors(scene, err));
    }
    return FSDP_OK;
}
