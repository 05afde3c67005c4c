/*
 * The runtime over a device whose memory the host cannot touch: training, first values, state dicts,
 * checkpoints and saves in the background give the bits of device cpu. The device is "cuda" over the fake
 * CUDA runtime, which faults when the host touches the device's memory. The layers' kernels are functions
 * of the device: one body serves all devices. tests/cuda/cuda_training.c tries many orders of streams.
 */
#include "base/io/io.h"
#include "tests/cuda/fake_cudart.h"
#include "tests/support/disk/io_fault.h"
#include "tests/unit/runtime/expect_toy.h"
#include <fsdp/async_save.h>

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LAYERS = 4, ROWS = 7, COLUMNS = 6, ELEMENTS = ROWS * COLUMNS };
enum { STEPS = 3, SEEDS = 2, MOST_RANKS = 4 };

/* A way to train. */
typedef struct training_way {
    int64_t mesh_shape[2];
    int mesh_ndim;
    fsdp_dtype param_dtype; /* NONE: f32 */
    int reshard_after_forward;
    bool accumulates;   /* two microbatches per step */
    int64_t pool_bytes; /* of saves in the background */
    bool offloads;
    fsdp_dtype buffer_dtype;
    bool is_wrapped, summons; /* by the FSDP1 face; its gradients are doubled between steps */
    fsdp_wrap_strategy strategy;
    fsdp_wrap_comm_hook hook;
} training_way;

/* Results of a training, on each rank. */
typedef struct training_result {
    fsdp_hash trained, loaded, saved, saved_in_background;
    double norms[STEPS];
} training_result;

typedef struct training {
    const training_way *way;
    const char *dir;
    training_result results[MOST_RANKS];
} training;

/* --- paths ------------------------------------------------------------------------------------ */

static char dir[] = "/tmp/fsdp-memory-XXXXXX";

static void make_dir(void)
{
    cr_assert(mkdtemp(dir));
}

static void remove_dir(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, dir, NULL), FSDP_OK);
}

TestSuite(device_memory, .init = make_dir, .fini = remove_dir);

/* --- a step ----------------------------------------------------------------------------------- */

/* The gradient is the parameter times a number of the rank, made by kernels. */
static fsdp_status add_gradient(toy *net, int layer, fsdp_error *err)
{
    fsdp_param *param = net->weight[layer];
    fsdp_stream *compute = net->root->context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_device_kernels *kernels = compute->device->ops->kernels;
    const fsdp_param_info info = fsdp_param_describe(param);
    const void *data = fsdp_param_data(param);
    void *grad = fsdp_param_grad(param);
    if (!data || !grad)
        return fsdp_param_error(param, err);
    fsdp_work_uses(compute, data);
    fsdp_work_uses(compute, grad);
    kernels->add(compute, grad, info.grad_dtype, data, info.data_dtype, ELEMENTS);
    kernels->multiply(compute, &(fsdp_span){grad, info.grad_dtype, ELEMENTS}, 1,
                      1.5 + fsdp_world_rank(net->world) + layer);
    return FSDP_OK;
}

static fsdp_status microbatch(toy *net, int i, int n, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_microbatch(net->root, i, n, err));
    FSDP_TRY(toy_forward(net, NULL, err));
    return toy_backward(net, add_gradient, err);
}

static fsdp_status double_gradients(toy *net, fsdp_error *err)
{
    const fsdp_wrap_summon_opts opts = {.with_grads = true};
    FSDP_TRY(fsdp_wrap_summon_full_params(net->wrap, NULL, &opts, err));
    for (int i = 0; i < LAYERS; i++) {
        float *grad = fsdp_param_grad(net->weight[i]);
        if (!grad)
            return fsdp_param_error(net->weight[i], err);
        fsdp_tensor_multiply(grad, FSDP_F32, ELEMENTS, 2);
    }
    return fsdp_wrap_summon_end(net->wrap, err);
}

static fsdp_status step(toy *net, const training_way *way, double *norm_out, fsdp_error *err)
{
    const fsdp_clip_opts clip = {.max_norm = 3};
    int n = way->accumulates ? 2 : 1;
    for (int i = 0; i < n; i++)
        FSDP_TRY(microbatch(net, i, n, err));
    if (way->summons)
        FSDP_TRY(double_gradients(net, err));
    FSDP_TRY(fsdp_root_clip_grad_norm(net->root, &clip, norm_out, err));
    return fsdp_optim_step(net->optim, err);
}

/* --- states ----------------------------------------------------------------------------------- */

/* The hash of the whole state: every rank has it. */
static fsdp_status hash_state(toy *net, fsdp_hash *hash_out, fsdp_error *err)
{
    const fsdp_state_opts full = {.full_state_dict = true};
    fsdp_hasher *hasher = fsdp_hasher_create();
    fsdp_sd *sd = NULL;
    fsdp_status status = hasher ? fsdp_root_get_state(net->root, &full, &sd, err)
                                : fsdp_fail_memory(err, "a hasher");
    for (size_t i = 0; status == FSDP_OK && i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        fsdp_hasher_add(hasher, entry->name, entry->name_size);
        if (entry->kind == FSDP_ENTRY_TENSOR)
            fsdp_hasher_add(hasher, entry->data, (size_t)fsdp_entry_bytes(entry));
    }
    if (status == FSDP_OK)
        *hash_out = fsdp_hasher_value(hasher);
    fsdp_hasher_free(hasher);
    fsdp_sd_free(sd);
    return status;
}

/* Loads over values that differ from all that were saved. */
static fsdp_status load(toy *net, const char *path, fsdp_hash *hash_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_init_uniform(net->root, 77, err));
    FSDP_TRY(fsdp_root_load(net->root, path, NULL, err));
    return hash_state(net, hash_out, err);
}

/* Trains on while the copy is made and written. */
static fsdp_status save_in_background(toy *net, const training *job, const char *path,
                                      fsdp_error *err)
{
    fsdp_async_saver *saver = NULL;
    double norm;
    const fsdp_async_opts opts = {.pool_bytes = job->way->pool_bytes};
    FSDP_TRY(fsdp_async_saver_create(net->root, &opts, &saver, err));
    fsdp_status status = fsdp_async_save(saver, path, NULL, err);
    for (int i = 0; i < 2 && status == FSDP_OK; i++)
        status = step(net, job->way, &norm, err);
    if (status == FSDP_OK)
        status = fsdp_async_save_wait(saver, NULL, err);
    fsdp_async_saver_free(saver);
    return status;
}

/* --- a training ------------------------------------------------------------------------------- */

static fsdp_status wrap(toy *net, const training_way *way, fsdp_error *err)
{
    const fsdp_wrap_opts opts = {
        .mesh = net->mesh,
        .policy.kind = FSDP_POLICY_ALWAYS,
        .unit = {.strategy = way->strategy, .offload_params = way->offloads},
        .buffer_dtype = way->buffer_dtype,
        .use_orig_params = true};
    FSDP_TRY(fsdp_wrap_create(net->model, &opts, &net->wrap, err));
    net->root = fsdp_wrap_root(net->wrap);
    for (int i = 0; i < LAYERS; i++) {
        char name[16];
        snprintf(name, sizeof name, "L%d", i);
        net->unit[i] = fsdp_wrap_unit(net->wrap, name);
    }
    return way->hook ? fsdp_wrap_register_comm_hook(net->wrap, way->hook, NULL, err) : FSDP_OK;
}

static fsdp_status make(toy *net, const training_way *way, fsdp_error *err)
{
    const int64_t shape[] = {ROWS, COLUMNS};
    const fsdp_adamw_opts adamw = {.lr = 0.1, .weight_decay = 0.01};
    net->opts.param_dtype = way->param_dtype;
    net->opts.reshard_after_forward = way->reshard_after_forward;
    net->opts.offload = way->offloads;
    FSDP_TRY(toy_add_weights(net, LAYERS, 2, shape, err));
    FSDP_TRY(way->is_wrapped ? wrap(net, way, err) : toy_wrap(net, err));
    FSDP_TRY(fsdp_root_init_uniform(net->root, 5, err));
    return toy_add_adamw(net, &adamw, err);
}

static fsdp_status train(toy *net, training *job, fsdp_error *err)
{
    training_result *mine = &job->results[fsdp_world_rank(net->world)];
    char saved[120], background[120];
    snprintf(saved, sizeof saved, "%s/saved", job->dir);
    snprintf(background, sizeof background, "%s/background", job->dir);
    FSDP_TRY(make(net, job->way, err));
    for (int i = 0; i < STEPS; i++)
        FSDP_TRY(step(net, job->way, &mine->norms[i], err));
    FSDP_TRY(hash_state(net, &mine->trained, err));
    FSDP_TRY(fsdp_root_save(net->root, saved, NULL, err));
    FSDP_TRY(save_in_background(net, job, background, err));
    FSDP_TRY(hash_state(net, &mine->loaded, err));
    FSDP_TRY(load(net, saved, &mine->saved, err));
    return load(net, background, &mine->saved_in_background, err);
}

static fsdp_status run_rank(world_rank *rank, fsdp_error *err)
{
    training *job = rank->user;
    const training_way *way = job->way;
    const toy_case what = {.mesh_ndim = way->mesh_ndim,
                           .mesh_shape = {way->mesh_shape[0], way->mesh_shape[1]},
                           .mesh_names = {"replicate", "dp"}};
    toy net;
    fsdp_status status = toy_begin(&net, rank, &what, err);
    if (status == FSDP_OK)
        status = train(&net, job, err);
    toy_free(&net);
    return status;
}

static int ranks_of(const training_way *way)
{
    return (int)(way->mesh_shape[0] * (way->mesh_ndim > 1 ? way->mesh_shape[1] : 1));
}

static void run(training *job, const char *device)
{
    fsdp_error err = {0};
    cr_assert_eq(fsdp_io_remove_tree(NULL, dir, NULL), FSDP_OK);
    cr_assert_eq(mkdir(dir, 0700), 0);
    cr_assert_eq(run_worlds(ranks_of(job->way), device, run_rank, job, &err), FSDP_OK,
                 "%d ranks on %s: %s", ranks_of(job->way), device, err.text);
}

static void run_one_rank(fsdp_status (*body)(toy *net, fsdp_error *err), void *user)
{
    const fake_cudart_plan plan = {.seed = 0};
    fsdp_error err = {0};
    cr_assert_eq(chdir(dir), 0);
    fake_cudart_begin(&plan);
    const toy_case what = {
        .mesh_ndim = 1, .mesh_shape = {1}, .mesh_names = {"dp"}, .body = body, .user = user};
    cr_assert_eq(toy_run_on("cuda", &what, &err), FSDP_OK, "%s", err.text);
    const char *misuse = fake_cudart_end();
    cr_assert_null(misuse, "%s", misuse);
}

/* --- a copy that is late ------------------------------------------------------------------------ */

static atomic_bool is_gate_open;

static void wait_at_gate(void *closure)
{
    (void)closure;
    for (int i = 0; i < 20000 && !atomic_load(&is_gate_open); i++)
        usleep(1000);
}

static void drop_nothing(void *closure)
{
    (void)closure;
}

/* The stream of copies, which had work before. */
static fsdp_stream *staging_of(const toy *net)
{
    return net->root->copies->last(net->root->copies->context).stream;
}

/* The stream of copies does nothing until the gate is open. */
static fsdp_status close_gate(toy *net, fsdp_error *err)
{
    fsdp_stream *staging = staging_of(net);
    atomic_store(&is_gate_open, false);
    if (fake_cudart_enqueue(staging->device->ops->native(staging), wait_at_gate, NULL,
                            drop_nothing))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the gate was not taken");
    return FSDP_OK;
}

/* The stream of copies does nothing until the optimizer's step was given to the compute stream. */
static fsdp_status save_late(toy *net, fsdp_async_saver *saver, const char *path, fsdp_error *err)
{
    FSDP_TRY(close_gate(net, err));
    FSDP_TRY(fsdp_async_save(saver, path, NULL, err));
    FSDP_TRY(fsdp_optim_step(net->optim, err));
    usleep(20000); /* a step that does not wait would be done now */
    atomic_store(&is_gate_open, true);
    return fsdp_async_save_wait(saver, NULL, err);
}

static fsdp_status save_twice(toy *net, fsdp_error *err)
{
    const training_way way = {.mesh_shape = {1}, .mesh_ndim = 1};
    fsdp_async_saver *saver = NULL;
    fsdp_hash before, loaded = {0};
    double norm;
    FSDP_TRY(make(net, &way, err));
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    fsdp_status status = fsdp_async_save(saver, "first", NULL, err);
    if (status == FSDP_OK)
        status = step(net, &way, &norm, err);
    if (status == FSDP_OK)
        status = hash_state(net, &before, err);
    if (status == FSDP_OK)
        status = microbatch(net, 0, 1, err);
    if (status == FSDP_OK)
        status = save_late(net, saver, "second", err);
    if (status == FSDP_OK)
        status = load(net, "second", &loaded, err);
    fsdp_async_saver_free(saver);
    if (status == FSDP_OK && memcmp(&before, &loaded, sizeof before) != 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the save has values of the step behind it");
    return status;
}

/* A second saver has copied the state while the copy of the first one is late. */
static fsdp_status save_beside(toy *net, fsdp_async_saver *saver, fsdp_error *err)
{
    fsdp_async_saver *second = NULL;
    FSDP_TRY(fsdp_async_save(saver, "first", NULL, err));
    FSDP_TRY(microbatch(net, 0, 1, err));
    FSDP_TRY(close_gate(net, err));
    FSDP_TRY(fsdp_async_save(saver, "late", NULL, err));
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &second, err));
    fsdp_status status = fsdp_async_save(second, "beside", NULL, err);
    if (status == FSDP_OK)
        status = fsdp_async_save_wait(second, NULL, err);
    if (status == FSDP_OK)
        status = fsdp_optim_step(net->optim, err);
    usleep(20000); /* a step that does not wait would be done now */
    atomic_store(&is_gate_open, true);
    fsdp_async_saver_free(second);
    return status == FSDP_OK ? fsdp_async_save_wait(saver, NULL, err) : status;
}

static fsdp_status save_by_two(toy *net, fsdp_error *err)
{
    fsdp_async_saver *saver = NULL;
    fsdp_hash before, late = {0}, beside = {0};
    FSDP_TRY(make(net, &(training_way){.mesh_shape = {1}, .mesh_ndim = 1}, err));
    FSDP_TRY(hash_state(net, &before, err));
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    fsdp_status status = save_beside(net, saver, err);
    if (status == FSDP_OK)
        status = load(net, "late", &late, err);
    if (status == FSDP_OK)
        status = load(net, "beside", &beside, err);
    fsdp_async_saver_free(saver);
    if (status == FSDP_OK && (memcmp(&before, &late, sizeof before) != 0 ||
                              memcmp(&before, &beside, sizeof before) != 0))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "a save has values of the step behind it");
    return status;
}

/* As a forward does that keeps statistics, right after the call. */
static void count_in_buffer(toy *net, fsdp_param *buffer)
{
    fsdp_stream *compute = net->root->context->streams[FSDP_STREAM_COMPUTE];
    compute->device->ops->kernels->fill(compute, fsdp_param_shard(buffer, NULL), 0x11, 16);
}

static fsdp_status save_buffer(toy *net, fsdp_error *err)
{
    const int64_t shape[] = {16};
    fsdp_async_saver *saver = NULL;
    fsdp_param *buffer = NULL;
    fsdp_sd *saved = NULL;
    FSDP_TRY(fsdp_model_add(
        net->model,
        &(fsdp_param_spec){
            .name = "count", .dtype = FSDP_U8, .ndim = 1, .shape = shape, .is_buffer = true},
        &buffer, err));
    FSDP_TRY(make(net, &(training_way){.mesh_shape = {1}, .mesh_ndim = 1}, err));
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    fsdp_status status = fsdp_async_save(saver, "first", NULL, err);
    if (status == FSDP_OK)
        status = fsdp_async_save_wait(saver, NULL, err);
    if (status == FSDP_OK)
        status = close_gate(net, err);
    if (status == FSDP_OK)
        status = fsdp_async_save(saver, "second", NULL, err);
    count_in_buffer(net, buffer);
    usleep(20000); /* a change that does not wait would be done now */
    atomic_store(&is_gate_open, true);
    if (status == FSDP_OK)
        status = fsdp_async_save_wait(saver, NULL, err);
    fsdp_async_saver_free(saver);
    if (status == FSDP_OK)
        status = fsdp_load_full("second", NULL, &saved, err);
    int64_t at = status == FSDP_OK ? fsdp_sd_find(saved, FSDP_NAME("model.count")) : -1;
    if (status == FSDP_OK &&
        (at < 0 || *(unsigned char *)fsdp_sd_at(saved, (size_t)at)->data == 0x11))
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "the save has a later value of the buffer");
    fsdp_sd_free(saved);
    return status;
}

static int be_slow(void *user, fsdp_io_call call, const char *path)
{
    (void)user;
    (void)call;
    (void)path;
    usleep(10000);
    return 0;
}

/* The optimizer is freed while most waves are not given to the stream: the disk is slow. */
static fsdp_status save_without_optimizer(toy *net, fsdp_async_saver *saver,
                                          const fsdp_root_save_opts *opts, fsdp_error *err)
{
    fsdp_hash before, loaded;
    FSDP_TRY(hash_state(net, &before, err));
    FSDP_TRY(fsdp_async_save(saver, "waves", opts, err));
    fsdp_optim_free(net->optim);
    net->optim = NULL;
    FSDP_TRY(fsdp_async_save_wait(saver, NULL, err));
    FSDP_TRY(toy_add_adamw(net, NULL, err));
    FSDP_TRY(load(net, "waves", &loaded, err));
    if (memcmp(&before, &loaded, sizeof before) != 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the save has other values");
    return FSDP_OK;
}

static fsdp_status free_optimizer(toy *net, fsdp_error *err)
{
    const training_way way = {.mesh_shape = {1}, .mesh_ndim = 1};
    const fsdp_fault_plan slow = {.calls = 1 << FSDP_CALL_PWRITE,
                                  .at = 1,
                                  .forever = true,
                                  .action = FSDP_FAULT_CALL,
                                  .call = be_slow};
    fsdp_async_saver *saver = NULL;
    fsdp_io *disk = NULL;
    double norm;
    FSDP_TRY(make(net, &way, err));
    FSDP_TRY(step(net, &way, &norm, err));
    FSDP_TRY(fsdp_io_fault_create(NULL, &slow, &disk, err));
    fsdp_status status =
        fsdp_async_saver_create(net->root, &(fsdp_async_opts){.pool_bytes = 1}, &saver, err);
    const fsdp_root_save_opts opts = {.save.access.disk = (void *)disk};
    if (status == FSDP_OK)
        status = save_without_optimizer(net, saver, &opts, err);
    fsdp_async_saver_free(saver);
    fsdp_io_fault_free(disk);
    return status;
}

/* A save of buffers in another dtype brings these to the host, and no other block of its view. */
static fsdp_status save_cast_buffer(toy *net, fsdp_error *err)
{
    const training_way way = {
        .mesh_shape = {1}, .mesh_ndim = 1, .is_wrapped = true, .buffer_dtype = FSDP_BF16};
    const int64_t shape[] = {16};
    fsdp_param *buffer = NULL;
    fsdp_sd *saved = NULL;
    fsdp_hash hash;
    FSDP_TRY(fsdp_model_add(
        net->model,
        &(fsdp_param_spec){
            .name = "mean", .dtype = FSDP_F32, .ndim = 1, .shape = shape, .is_buffer = true},
        &buffer, err));
    FSDP_TRY(make(net, &way, err));
    FSDP_TRY(hash_state(net, &hash, err)); /* loads the view */
    const fsdp_host_view *view = &net->root->view;
    for (size_t i = 0; i < view->count; i++)
        memset(view->blocks[i].copy, 0x3f, view->blocks[i].size);
    FSDP_TRY(fsdp_root_save(net->root, "cast", NULL, err));
    for (size_t i = 0; i < view->count; i++)
        if ((view->blocks[i].copy[0] == 0x3f) == view->blocks[i].is_buffers)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "block %zu: %s", i,
                             view->blocks[i].is_buffers ? "not loaded" : "loaded");
    FSDP_TRY(fsdp_load_full("cast", NULL, &saved, err));
    int64_t at = fsdp_sd_find(saved, FSDP_NAME("model.mean"));
    const fsdp_entry *mean = at >= 0 ? fsdp_sd_at(saved, (size_t)at) : NULL;
    bool is_cast = mean && mean->dtype == FSDP_F32;
    fsdp_sd_free(saved);
    return is_cast ? FSDP_OK : fsdp_fail(err, FSDP_ERR_INTERNAL, "the buffer is not cast");
}

/* The first save fails between two waves, and a step waits for it; the second one stores what it left. */
static fsdp_status save_on_full_disk(toy *net, fsdp_async_saver *saver, fsdp_io *full,
                                     fsdp_error *err)
{
    const training_way way = {.mesh_shape = {1}, .mesh_ndim = 1};
    const fsdp_root_save_opts opts = {.save.access.disk = (void *)full};
    fsdp_error why = {0};
    fsdp_hash before, loaded;
    double norm;
    FSDP_TRY(fsdp_async_save(saver, "full", &opts, err));
    FSDP_TRY(step(net, &way, &norm, err));
    if (fsdp_async_save_wait(saver, NULL, &why) != FSDP_ERR_NO_SPACE)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "it ended so: %.200s", why.text);
    FSDP_TRY(hash_state(net, &before, err));
    FSDP_TRY(fsdp_async_save(saver, "next", NULL, err));
    FSDP_TRY(fsdp_async_save_wait(saver, NULL, err));
    FSDP_TRY(load(net, "next", &loaded, err));
    if (memcmp(&before, &loaded, sizeof before) != 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the save has other values");
    return FSDP_OK;
}

/* The saver is freed after its root. */
static fsdp_status fail_between_waves(toy *net, fsdp_error *err)
{
    const fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_PWRITE,
                                  .at = 3,
                                  .forever = true,
                                  .action = FSDP_FAULT_ERRNO,
                                  .errnum = ENOSPC};
    fsdp_async_saver *saver = NULL;
    fsdp_io *full = NULL;
    FSDP_TRY(make(net, &(training_way){.mesh_shape = {1}, .mesh_ndim = 1}, err));
    FSDP_TRY(fsdp_io_fault_create(NULL, &plan, &full, err));
    fsdp_status status =
        fsdp_async_saver_create(net->root, &(fsdp_async_opts){.pool_bytes = 1}, &saver, err);
    if (status == FSDP_OK)
        status = save_on_full_disk(net, saver, full, err);
    fsdp_optim_free(net->optim);
    fsdp_root_free(net->root);
    net->optim = NULL;
    net->root = NULL;
    fsdp_async_saver_free(saver);
    fsdp_io_fault_free(full);
    return status;
}

static void take_long(void *closure)
{
    (void)closure;
    usleep(100000);
}

static fsdp_status make_late(fsdp_stream *stream, fsdp_error *err)
{
    return fake_cudart_enqueue(stream->device->ops->native(stream), take_long, NULL, drop_nothing)
               ? fsdp_fail(err, FSDP_ERR_INTERNAL, "the delay was not taken")
               : FSDP_OK;
}

/* Changes the state around a save of it, with one of the streams late; what was saved is `saved_out`. */
typedef fsdp_status (*save_while)(toy *net, fsdp_async_saver *saver, fsdp_hash *saved_out,
                                  fsdp_error *err);

static fsdp_status save_behind_a_step(toy *net, fsdp_async_saver *saver, fsdp_hash *saved_out,
                                      fsdp_error *err)
{
    FSDP_TRY(microbatch(net, 0, 1, err));
    FSDP_TRY(make_late(net->root->context->streams[FSDP_STREAM_COMPUTE], err));
    FSDP_TRY(fsdp_optim_step(net->optim, err));
    FSDP_TRY(fsdp_async_save(saver, "late", NULL, err));
    FSDP_TRY(hash_state(net, saved_out, err));
    return fsdp_async_save_wait(saver, NULL, err);
}

static fsdp_status save_before_other_values(toy *net, fsdp_async_saver *saver, fsdp_hash *saved_out,
                                            fsdp_error *err)
{
    FSDP_TRY(hash_state(net, saved_out, err));
    FSDP_TRY(make_late(staging_of(net), err));
    FSDP_TRY(fsdp_async_save(saver, "late", NULL, err));
    FSDP_TRY(fsdp_root_init_uniform(net->root, 77, err));
    return fsdp_async_save_wait(saver, NULL, err);
}

static fsdp_status save_before_a_load(toy *net, fsdp_async_saver *saver, fsdp_hash *saved_out,
                                      fsdp_error *err)
{
    FSDP_TRY(fsdp_root_init_uniform(net->root, 77, err));
    FSDP_TRY(hash_state(net, saved_out, err));
    FSDP_TRY(make_late(staging_of(net), err));
    FSDP_TRY(fsdp_async_save(saver, "late", NULL, err));
    FSDP_TRY(fsdp_root_load(net->root, "first", NULL, err));
    return fsdp_async_save_wait(saver, NULL, err);
}

static fsdp_status load_behind_a_step(toy *net, fsdp_async_saver *saver, fsdp_hash *saved_out,
                                      fsdp_error *err)
{
    FSDP_TRY(fsdp_async_save(saver, "late", NULL, err));
    FSDP_TRY(fsdp_async_save_wait(saver, NULL, err));
    FSDP_TRY(microbatch(net, 0, 1, err));
    FSDP_TRY(make_late(net->root->context->streams[FSDP_STREAM_COMPUTE], err));
    FSDP_TRY(fsdp_optim_step(net->optim, err));
    FSDP_TRY(fsdp_root_load(net->root, "late", NULL, err));
    return hash_state(net, saved_out, err);
}

static fsdp_status save_and_load(toy *net, fsdp_error *err)
{
    const save_while *save = net->user;
    const training_way way = {.mesh_shape = {1}, .mesh_ndim = 1};
    fsdp_async_saver *saver = NULL;
    fsdp_hash saved = {0}, loaded = {0};
    FSDP_TRY(make(net, &way, err));
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    fsdp_status status = fsdp_async_save(saver, "first", NULL, err);
    if (status == FSDP_OK)
        status = fsdp_async_save_wait(saver, NULL, err);
    if (status == FSDP_OK)
        status = (*save)(net, saver, &saved, err);
    if (status == FSDP_OK)
        status = load(net, "late", &loaded, err);
    fsdp_async_saver_free(saver);
    if (status == FSDP_OK && memcmp(&saved, &loaded, sizeof saved) != 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the save has other values");
    return status;
}

Test(device_memory, the_copy_of_a_save_waits_for_the_step_before)
{
    run_one_rank(save_and_load, &(save_while){save_behind_a_step});
}

Test(device_memory, other_values_wait_for_the_copy_of_a_save)
{
    run_one_rank(save_and_load, &(save_while){save_before_other_values});
}

Test(device_memory, a_load_waits_for_the_copy_of_a_save)
{
    run_one_rank(save_and_load, &(save_while){save_before_a_load});
}

Test(device_memory, a_load_waits_for_the_step_before)
{
    run_one_rank(save_and_load, &(save_while){load_behind_a_step});
}

Test(device_memory, an_optimizer_waits_for_the_copy_of_a_save)
{
    run_one_rank(save_twice, NULL);
}

Test(device_memory, an_optimizer_waits_for_the_copies_of_two_savers)
{
    run_one_rank(save_by_two, NULL);
}

Test(device_memory, an_optimizer_that_is_freed_waits_for_the_waves_of_a_save)
{
    run_one_rank(free_optimizer, NULL);
}

Test(device_memory, a_save_that_fails_between_waves_lets_the_step_go_on)
{
    run_one_rank(fail_between_waves, NULL);
}

Test(device_memory, a_change_of_a_buffer_waits_for_its_copy)
{
    run_one_rank(save_buffer, NULL);
}

Test(device_memory, a_save_of_cast_buffers_brings_only_these_to_the_host)
{
    run_one_rank(save_cast_buffer, NULL);
}

/* A communicator fails before the copy is made: its data is undefined. */
static fsdp_status fail_behind_a_save(toy *net, fsdp_error *err)
{
    const training_way way = {.mesh_shape = {2}, .mesh_ndim = 1};
    const fsdp_error why = {.status = FSDP_ERR_PEER, .text = "a planted failure"};
    fsdp_async_saver *saver = NULL;
    fsdp_error failure = {0};
    fsdp_comm *comm = fsdp_world_comm(net->world, net->mesh, 0, 0);
    FSDP_TRY(make(net, &way, err));
    FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    fsdp_status status = fsdp_async_save(saver, "first", NULL, err);
    if (status == FSDP_OK)
        status = fsdp_async_save_wait(saver, NULL, err);
    if (status == FSDP_OK)
        status = close_gate(net, err);
    if (status == FSDP_OK)
        status = fsdp_async_save(saver, "second", NULL, err);
    fsdp_comm_abort(comm, &why);
    atomic_store(&is_gate_open, true);
    if (status == FSDP_OK && fsdp_async_save_wait(saver, NULL, &failure) == FSDP_OK)
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "the save was published");
    if (status == FSDP_OK && !strstr(failure.text, "a planted failure"))
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "it failed for '%.200s'", failure.text);
    fsdp_async_saver_free(saver);
    return status;
}

Test(device_memory, a_save_behind_a_failed_collective_is_not_published)
{
    const fake_cudart_plan plan = {.seed = 0};
    fsdp_error err = {0};
    cr_assert_eq(chdir(dir), 0);
    fake_cudart_begin(&plan);
    const toy_case what = {
        .mesh_ndim = 1, .mesh_shape = {2}, .mesh_names = {"dp"}, .body = fail_behind_a_save};
    cr_assert_eq(toy_run_on("cuda", &what, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(access("first/manifest.json", F_OK), 0);
    cr_assert_neq(access("second/manifest.json", F_OK), 0);
}

/* --- shards that are copied late ------------------------------------------------------------------ */

typedef float layer_values[LAYERS][ELEMENTS];

static fsdp_status keep_gathered(toy *net, int layer, fsdp_error *err)
{
    layer_values *seen = (void *)net->user;
    fsdp_stream *compute = net->root->context->streams[FSDP_STREAM_COMPUTE];
    const void *data = fsdp_param_data(net->weight[layer]);
    if (!data)
        return fsdp_param_error(net->weight[layer], err);
    compute->device->ops->kernels->copy(compute, (*seen)[layer], data, sizeof(*seen)[layer]);
    return FSDP_OK;
}

/* The stream that copies the shards begins late, and the host gives them other values at once. */
static fsdp_status change_behind_a_forward(toy *net, layer_values *seen, fsdp_error *err)
{
    fsdp_stream *copy_in = net->root->context->streams[FSDP_STREAM_COPY_IN];
    const fsdp_device_ops *ops = copy_in->device->ops;
    net->user = seen;
    FSDP_TRY(make_late(copy_in, err));
    FSDP_TRY(fsdp_root_set_evaluating(net->root, true, err));
    FSDP_TRY(toy_forward(net, keep_gathered, err));
    FSDP_TRY(fsdp_root_set_evaluating(net->root, false, err));
    FSDP_TRY(fsdp_root_init_uniform(net->root, 77, err));
    return ops->sync(ops->record(net->root->context->streams[FSDP_STREAM_COMPUTE]), err);
}

/* The shards of the one rank are whole, and the host's. */
static fsdp_status set_behind_a_forward(toy *net, fsdp_error *err)
{
    const training_way way = {.mesh_shape = {1}, .mesh_ndim = 1, .offloads = true};
    layer_values expected, *seen;
    FSDP_TRY(make(net, &way, err));
    fsdp_device *device = net->root->context->device;
    seen = device->ops->alloc_staging(device, sizeof *seen);
    for (int i = 0; i < LAYERS; i++)
        memcpy(expected[i], fsdp_param_shard(net->weight[i], NULL), sizeof expected[i]);
    fsdp_status status = change_behind_a_forward(net, seen, err);
    bool is_old = memcmp(seen, expected, sizeof expected) == 0;
    device->ops->dealloc_staging(device, seen, sizeof *seen);
    EXPECT(status != FSDP_OK || is_old);
    return status;
}

Test(device_memory, the_host_sets_offloaded_shards_behind_the_copies_of_a_forward)
{
    run_one_rank(set_behind_a_forward, NULL);
}

/* --- tests ------------------------------------------------------------------------------------ */

static void expect_equal(const training_way *way)
{
    training usual = {.way = way, .dir = dir};
    run(&usual, "cpu");
    cr_assert_eq(memcmp(&usual.results[0].trained, &usual.results[0].saved, sizeof(fsdp_hash)), 0);
    for (int seed = 0; seed < SEEDS; seed++) {
        const fake_cudart_plan plan = {.seed = (uint64_t)seed};
        training late = {.way = way, .dir = dir};
        fake_cudart_begin(&plan);
        run(&late, "cuda");
        const char *misuse = fake_cudart_end();
        cr_assert_null(misuse, "seed %d: %s", seed, misuse);
        cr_assert_eq(memcmp(usual.results, late.results, sizeof usual.results), 0, "seed %d", seed);
    }
}

Test(device_memory, one_rank_trains_as_on_the_host)
{
    expect_equal(&(training_way){.mesh_shape = {1}, .mesh_ndim = 1});
}

Test(device_memory, two_ranks_train_as_on_the_host)
{
    expect_equal(&(training_way){.mesh_shape = {2}, .mesh_ndim = 1});
}

/* A pool for two tensors at a time. */
Test(device_memory, a_save_in_waves_has_the_state_before_the_steps_behind_it)
{
    expect_equal(&(training_way){.mesh_shape = {2}, .mesh_ndim = 1, .pool_bytes = 1});
    expect_equal(&(training_way){.mesh_shape = {1}, .mesh_ndim = 1, .pool_bytes = 1000});
}

Test(device_memory, bf16_parameters_train_as_on_the_host)
{
    expect_equal(&(training_way){.mesh_shape = {3}, .mesh_ndim = 1, .param_dtype = FSDP_BF16});
}

Test(device_memory, replicas_train_as_on_the_host)
{
    expect_equal(&(training_way){.mesh_shape = {2, 2}, .mesh_ndim = 2, .accumulates = true});
}

Test(device_memory, gathered_slices_train_as_on_the_host)
{
    expect_equal(&(training_way){.mesh_shape = {4}, .mesh_ndim = 1, .reshard_after_forward = 2});
}

Test(device_memory, offloaded_parameters_train_as_on_the_host)
{
    expect_equal(&(training_way){.mesh_shape = {2}, .mesh_ndim = 1, .offloads = true});
}

Test(device_memory, offloaded_bf16_parameters_with_replicas_train_as_on_the_host)
{
    expect_equal(&(training_way){.mesh_shape = {2, 2},
                                 .mesh_ndim = 2,
                                 .param_dtype = FSDP_BF16,
                                 .accumulates = true,
                                 .offloads = true});
}

Test(device_memory, hooks_and_summoned_gradients_are_as_on_the_host)
{
    expect_equal(&(training_way){.mesh_shape = {2},
                                 .mesh_ndim = 1,
                                 .is_wrapped = true,
                                 .summons = true,
                                 .hook = fsdp_wrap_bf16_compress_hook});
    expect_equal(&(training_way){.mesh_shape = {3},
                                 .mesh_ndim = 1,
                                 .is_wrapped = true,
                                 .summons = true,
                                 .strategy = FSDP_WRAP_NO_SHARD,
                                 .hook = fsdp_wrap_fp16_compress_hook});
    expect_equal(&(training_way){.mesh_shape = {2},
                                 .mesh_ndim = 1,
                                 .offloads = true,
                                 .is_wrapped = true,
                                 .summons = true,
                                 .hook = fsdp_wrap_bf16_compress_hook});
}

static fsdp_status hook_of_the_host(void *context, void *data, fsdp_dtype dtype, int64_t count,
                                    fsdp_error *err)
{
    (void)context;
    fsdp_tensor_multiply(data, dtype, (size_t)count, 2);
    (void)err;
    return FSDP_OK;
}

static fsdp_status refuse_hook(toy *net, fsdp_error *err)
{
    const training_way way = {.mesh_shape = {1}, .mesh_ndim = 1};
    FSDP_TRY(make(net, &way, err));
    fsdp_unit_set_all_reduce_hook(net->unit[0], hook_of_the_host, NULL);
    EXPECT_REFUSAL(microbatch(net, 0, 1, why), "use a custom reduce-scatter");
    return FSDP_OK;
}

Test(device_memory, an_all_reduce_hook_is_refused_by_name)
{
    run_one_rank(refuse_hook, NULL);
}
