/*
 * The scenarios of docs/scenarios.md on ranks that share the GPU. The tests that the page names prove them on
 * device cpu; here each rank notes the order of its gathers and reductions and the bits of its gradients and
 * shards, which must be those on device cpu. See gpu_scene.h for the model.
 */
#include "tests/gpu_check/gpu_ranks.h"
#include "tests/gpu_check/gpu_scene.h"

#include <string.h>

#include "base/core/clock.h"
#include "base/core/mem.h"
#include "tests/support/nets/order_scenarios.h"
#include <fsdp/root_init.h>

enum { LAYERS = 4, MOST_LATE_BYTES = 64 << 20, DEADLINE_MS = 30000 };

/* --- C9: a factor of the root's --------------------------------------------------------------- */

static fsdp_status train_by_factor(gpu_scene *scene, const gpu_scene_net *net, double factor,
                                   fsdp_error *err)
{
    FSDP_TRY(gpu_scene_build(scene, net, err));
    FSDP_TRY(fsdp_unit_set_gradient_divide_factor(fsdp_root_unit(scene->toy.root), factor, err));
    return gpu_scene_train(scene, 4, err);
}

static fsdp_status factors(gpu_scene *scene, fsdp_error *err)
{
    const int ranks = fsdp_world_size(scene->rank->world);
    const int meshes[][2] = {{0, 0}, {ranks, 1}, {ranks / 2, 2}};
    for (int kind = 0; kind < (ranks > 1 ? 12 : 8); kind++) {
        gpu_scene_net net = {.layers = LAYERS - 1,
                             .rows = meshes[kind / 4][0],
                             .columns = meshes[kind / 4][1],
                             .has_own = true};
        if (kind / 2 % 2 == 1)
            net.units = (fsdp_unit_opts){.param_dtype = FSDP_BF16, .reduce_dtype = FSDP_F32};
        FSDP_TRY(train_by_factor(scene, &net, kind % 2 == 0 ? ranks : 2 * ranks, err));
    }
    return FSDP_OK;
}

/* --- C10, C18, C19: settings and calls that change no number ------------------------------------ */

typedef fsdp_status (*scene_change)(gpu_scene *scene, int variant, fsdp_error *err);

/* Trains with the change of a variant; the notes of the tensors are the result. */
static fsdp_status train_changed(gpu_scene *scene, const gpu_scene_net *net, scene_change change,
                                 int variant, fsdp_text *tensors, fsdp_error *err)
{
    enum { STEPS = 2 };
    fsdp_text *notes = scene->notes;
    FSDP_TRY(gpu_scene_build(scene, net, err));
    for (int i = 0; i < STEPS; i++) {
        if (variant > 0)
            FSDP_TRY(change(scene, variant, err));
        FSDP_TRY(toy_forward(&scene->toy, NULL, err));
        FSDP_TRY(toy_backward(&scene->toy, gpu_scene_give_grad, err));
        gpu_scene_note_events(scene);
        scene->notes = tensors;
        fsdp_status status = gpu_scene_note_tensors(scene, err);
        scene->notes = notes;
        FSDP_TRY(status);
        scene->step++;
        FSDP_TRY(fsdp_optim_step(scene->toy.optim, err));
    }
    return FSDP_OK;
}

/* Every variant has the numbers of variant 0, which changes nothing. */
static fsdp_status expect_no_change(gpu_scene *scene, const gpu_scene_net *net, scene_change change,
                                    int variants, fsdp_error *err)
{
    fsdp_text usual = {0}, tensors = {0};
    fsdp_status status = train_changed(scene, net, change, 0, &usual, err);
    for (int i = 1; i <= variants && status == FSDP_OK; i++) {
        tensors.size = 0;
        status = train_changed(scene, net, change, i, &tensors, err);
        if (status == FSDP_OK && (usual.size == 0 || usual.size != tensors.size ||
                                  memcmp(usual.data, tensors.data, usual.size) != 0))
            status = fsdp_fail(err, FSDP_ERR_INTERNAL, "variant %d trains to other numbers", i);
    }
    if (status == FSDP_OK)
        fsdp_text_add(scene->notes, usual.data, usual.size);
    fsdp_text_release(&usual);
    fsdp_text_release(&tensors);
    return status;
}

static fsdp_status set_inputs(gpu_scene *scene, int variant, fsdp_error *err)
{
    static const int numbers[][LAYERS] = {{1, 1, 1, 1}, {2, 2, 2, 2}, {1, 3, 2, 1}};
    for (int i = 0; i < LAYERS; i++)
        FSDP_TRY(fsdp_unit_set(scene->toy.unit[i], FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS,
                               numbers[variant - 1][i], false, err));
    return FSDP_OK;
}

static fsdp_status inputs(gpu_scene *scene, fsdp_error *err)
{
    const int ranks = fsdp_world_size(scene->rank->world);
    for (int kind = 0; kind < (ranks > 1 ? 4 : 2); kind++) {
        gpu_scene_net net = {.layers = LAYERS, .units = {.param_dtype = FSDP_BF16}};
        net.units.reshard_after_forward = kind % 2 == 1 ? FSDP_RESHARD_NEVER : FSDP_RESHARD_AUTO;
        net.rows = kind / 2 == 1 ? 2 : 0;
        net.columns = kind / 2 == 1 ? ranks / 2 : 0;
        FSDP_TRY(expect_no_change(scene, &net, set_inputs, 3, err));
    }
    return FSDP_OK;
}

static fsdp_status prefetch_what_is_done(gpu_scene *scene, int variant, fsdp_error *err)
{
    (void)variant;
    return fsdp_unit_set_prefetch(scene->toy.unit[0], FSDP_HOOK_PRE_BACKWARD, &scene->toy.unit[2],
                                  1, err);
}

static fsdp_status late_prefetch(gpu_scene *scene, fsdp_error *err)
{
    const gpu_scene_net net = {.layers = LAYERS};
    return expect_no_change(scene, &net, prefetch_what_is_done, 1, err);
}

/* An all-reduce of the caller's, in a stream of the caller's. */
typedef struct beside {
    fsdp_stream *stream;
    float *data; /* of the device */
    fsdp_ordered_comm *comm;
} beside;

enum { BESIDE = 1000 };

static fsdp_status add_up_beside(gpu_scene *scene, const beside *own, fsdp_error *err)
{
    const fsdp_device_ops *ops = own->stream->device->ops;
    const int ranks = fsdp_world_size(scene->rank->world);
    const size_t size = BESIDE * sizeof(float);
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = FSDP_F32,
                                  .in = own->data,
                                  .out = own->data,
                                  .count = BESIDE,
                                  .unit = "beside"};
    float host[BESIDE];
    for (int i = 0; i < BESIDE; i++)
        host[i] = (float)(i + fsdp_world_rank(scene->rank->world));
    ops->kernels->copy(own->stream, own->data, host, size);
    FSDP_TRY(ops->sync(ops->record(own->stream), err));
    fsdp_work_collective(own->stream, own->comm, &call, NULL);
    FSDP_TRY(ops->sync(ops->record(own->stream), err));
    FSDP_TRY(gpu_scene_read(scene, own->data, size, host, err));
    for (int i = 0; i < BESIDE; i++)
        if (host[i] != (float)(ranks * i + ranks * (ranks - 1) / 2))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "the sum at %d is %g", i, (double)host[i]);
    return FSDP_OK;
}

static fsdp_status gather_beside(gpu_scene *scene, const beside *own, fsdp_error *err)
{
    for (int i = 0; i < LAYERS; i++) {
        FSDP_TRY(fsdp_unit_unshard(scene->toy.unit[i], true, NULL, err));
        FSDP_TRY(add_up_beside(scene, own, err));
    }
    return FSDP_OK;
}

static fsdp_status find_backwards(gpu_scene *scene, fsdp_ordered_comm **comm_out, fsdp_error *err)
{
    fsdp_world *world = scene->rank->world;
    const int64_t size = fsdp_world_size(world);
    int ranks[GPU_MOST_RANKS];
    fsdp_mesh *mesh;
    for (int i = 0; i < (int)size; i++)
        ranks[i] = (int)size - 1 - i;
    FSDP_TRY(fsdp_mesh_create(1, &size, (const char *[]){"back"}, ranks, &mesh, err));
    fsdp_status status = fsdp_world_connect(world, mesh, err);
    if (status == FSDP_OK)
        *comm_out = fsdp_world_find_comm(world, mesh, 0, 0);
    fsdp_mesh_free(mesh);
    return status;
}

static fsdp_status gather_ahead(gpu_scene *scene, int variant, fsdp_error *err)
{
    fsdp_device *device = scene->rank->world->parts.device;
    beside own = {.data = device->ops->alloc(device, BESIDE * sizeof(float))};
    fsdp_status status = own.data ? FSDP_OK : fsdp_fail_memory(err, "an all-reduce");
    (void)variant;
    if (status == FSDP_OK)
        status = find_backwards(scene, &own.comm, err);
    if (status == FSDP_OK)
        status = device->ops->stream_create(device, "beside", &own.stream, err);
    if (status == FSDP_OK)
        status = gather_beside(scene, &own, err);
    if (own.stream) {
        own.comm->last = (fsdp_event){0};
        device->ops->stream_free(own.stream);
    }
    if (own.data)
        device->ops->dealloc(device, own.data, BESIDE * sizeof(float));
    return status;
}

static fsdp_status siblings(gpu_scene *scene, fsdp_error *err)
{
    const gpu_scene_net net = {.layers = LAYERS};
    return expect_no_change(scene, &net, gather_ahead, 1, err);
}

/* --- C16: units of several members -------------------------------------------------------------- */

enum { MEMBERS = 5 };

static fsdp_status make_groups(gpu_scene *scene, fsdp_error *err)
{
    static const char *const names[] = {"L0", "L1", "L2", "L3", "L4"};
    static const int64_t shape[] = {61, 17};
    const gpu_scene_net net = {0};
    toy *base = &scene->toy;
    FSDP_TRY(gpu_scene_begin(scene, &net, err));
    FSDP_TRY(toy_add_weights(base, MEMBERS, 2, shape, err));
    for (int i = 0; i < MEMBERS; i += i == 0 ? 1 : 2) {
        FSDP_TRY(fsdp_unit_create_list(base->model, &names[i], i == 0 ? 1 : 2, &base->opts,
                                       &base->unit[i], err));
        if (i > 0)
            base->unit[i + 1] = base->unit[i];
    }
    FSDP_TRY(fsdp_root_create(base->model, &base->opts, &base->root, err));
    FSDP_TRY(
        fsdp_unit_set(base->unit[MEMBERS - 1], FSDP_UNIT_RESHARD_AFTER_FORWARD, false, false, err));
    FSDP_TRY(fsdp_root_init_uniform(base->root, 1, err));
    return toy_add_adamw(base, &(fsdp_adamw_opts){.lr = 0.01}, err);
}

static fsdp_status hook(toy *net, int layer, fsdp_hook which, fsdp_error *err)
{
    return fsdp_unit_member_hook(net->unit[layer], layer > 0 && layer % 2 == 0, which, err);
}

static fsdp_status step_groups(gpu_scene *scene, fsdp_error *err)
{
    toy *net = &scene->toy;
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    for (int i = 0; i < MEMBERS; i++) {
        FSDP_TRY(hook(net, i, FSDP_HOOK_PRE_FORWARD, err));
        FSDP_TRY(hook(net, i, FSDP_HOOK_POST_FORWARD, err));
    }
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    FSDP_TRY(expect_events(scene->rank, "U L0|R L0|U L1, L2|R L1, L2|U L3, L4", err));
    for (int i = MEMBERS - 1; i >= 0; i--) {
        FSDP_TRY(hook(net, i, FSDP_HOOK_PRE_BACKWARD, err));
        FSDP_TRY(gpu_scene_give_grad(net, i, err));
        FSDP_TRY(hook(net, i, FSDP_HOOK_POST_BACKWARD, err));
    }
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    FSDP_TRY(expect_events(
        scene->rank, "U L1, L2|R L3, L4|post L3, L4|U L0|R L1, L2|post L1, L2|R L0|post L0", err));
    FSDP_TRY(gpu_scene_note_tensors(scene, err));
    scene->step++;
    return fsdp_optim_step(net->optim, err);
}

static fsdp_status groups(gpu_scene *scene, fsdp_error *err)
{
    scene->rank->notes_collectives = false;
    FSDP_TRY(make_groups(scene, err));
    for (int i = 0; i < 3; i++)
        FSDP_TRY(step_groups(scene, err));
    return gpu_scene_note_tensors(scene, err);
}

/* --- C22: what the trace says --------------------------------------------------------------------- */

static void note_reduction(void *user, const fsdp_trace_event *event)
{
    static const char *const ops[] = {"sum", "avg", "max", "premul_sum"};
    if (event->call && event->call->kind != FSDP_ALL_GATHER)
        fsdp_text_addf(user, "%s %s %lld\n", event->event, ops[event->call->op],
                       (long long)event->call->count);
}

static fsdp_status reduce_by(gpu_scene *scene, bool forces_sum, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_set(scene->toy.unit[0], FSDP_UNIT_FORCE_SUM_REDUCTION_FOR_COMMS, forces_sum,
                           false, err));
    fsdp_text_addf(scene->notes, "sum forced: %d\n", forces_sum);
    return gpu_scene_step(scene, err);
}

static fsdp_status forced_sums(gpu_scene *scene, fsdp_error *err)
{
    const int ranks = fsdp_world_size(scene->rank->world);
    fsdp_trace_set_listener(scene->rank->world->parts.trace, note_reduction, scene->notes);
    for (int replicas = 1; replicas <= 2; replicas++) {
        const gpu_scene_net net = {
            .layers = 1, .rows = replicas == 2 ? 2 : 0, .columns = ranks / 2};
        FSDP_TRY(gpu_scene_build(scene, &net, err));
        FSDP_TRY(reduce_by(scene, false, err));
        FSDP_TRY(reduce_by(scene, true, err));
        FSDP_TRY(fsdp_unit_set_gradient_divide_factor(scene->toy.unit[0], 3, err));
        FSDP_TRY(reduce_by(scene, false, err));
    }
    return FSDP_OK;
}

/* --- C23: late streams, and freed memory that is overwritten --------------------------------------- */

typedef struct late_scene {
    gpu_scene *scene;
    int stream; /* of the context */
    void *load; /* of the device */
} late_scene;

static void be_late(const late_scene *late)
{
    fsdp_stream *stream = late->scene->toy.root->context->streams[late->stream];
    for (int i = 0; i < 4; i++)
        stream->device->ops->kernels->fill(stream, late->load, i, late->scene->bytes);
}

/* In the order of the stream that owns the block, as its next user would. */
static fsdp_status overwrite_free_blocks(fsdp_root *root, fsdp_error *err)
{
    enum { MOST_FREE = 64 };
    fsdp_memory_pool *pool = &root->context->memory;
    fsdp_memory_request requests[MOST_FREE];
    fsdp_block *blocks[MOST_FREE];
    size_t n = 0;
    for (const fsdp_block *at = pool->free; at && n < MOST_FREE; at = at->next)
        requests[n++] = (fsdp_memory_request){.class = FSDP_MEMORY_GRAD,
                                              .stream = at->stream,
                                              .allocator = at->allocator,
                                              .size = at->room,
                                              .owner = "gpu-check"};
    for (size_t i = 0; i < n; i++)
        FSDP_TRY(fsdp_memory_take(pool, &requests[i], &blocks[i], err));
    for (size_t i = 0; i < n; i++) {
        fsdp_stream *stream = requests[i].stream;
        fsdp_work_uses(stream, blocks[i]->data);
        stream->device->ops->kernels->fill(stream, blocks[i]->data, 0x7b, requests[i].size);
        fsdp_memory_give(pool, blocks[i], fsdp_stream_now(stream));
    }
    return FSDP_OK;
}

static fsdp_status step_late(const late_scene *late, fsdp_error *err)
{
    gpu_scene *scene = late->scene;
    toy *net = &scene->toy;
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    for (int i = 0; i < net->layers; i++) {
        be_late(late);
        FSDP_TRY(toy_forward_layer(net, i, NULL, err));
    }
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    for (int i = net->layers - 1; i >= 0; i--) {
        be_late(late);
        FSDP_TRY(toy_backward_layer(net, i, gpu_scene_give_grad, err));
        FSDP_TRY(overwrite_free_blocks(net->root, err));
    }
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    gpu_scene_note_events(scene);
    FSDP_TRY(gpu_scene_note_tensors(scene, err));
    for (int i = 1; i < net->layers; i++)
        if (fsdp_param_shard_grad(net->weight[i]) == fsdp_param_shard_grad(net->weight[i - 1]))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "layers %d and %d share a gradient", i - 1, i);
    scene->step++;
    return fsdp_optim_step(net->optim, err);
}

static fsdp_status train_late(gpu_scene *scene, const gpu_scene_net *net, int stream,
                              fsdp_error *err)
{
    fsdp_device *device = scene->rank->world->parts.device;
    late_scene late = {.scene = scene, .stream = stream};
    FSDP_TRY(gpu_scene_build(scene, net, err));
    late.load = device->ops->alloc(device, scene->bytes);
    if (!late.load)
        return fsdp_fail_memory(err, "what makes a stream late");
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < 2 && status == FSDP_OK; i++)
        status = step_late(&late, err);
    fsdp_context_drain(scene->toy.root->context);
    device->ops->dealloc(device, late.load, scene->bytes);
    return status;
}

static fsdp_status late_streams(gpu_scene *scene, fsdp_error *err)
{
    const int ranks = fsdp_world_size(scene->rank->world);
    for (int stream = 0; stream < FSDP_STREAMS; stream++)
        for (int kind = 0; kind < 2; kind++) {
            gpu_scene_net net = {.layers = LAYERS};
            net.rows = kind == 1 && ranks > 1 ? 2 : 0;
            net.columns = ranks / 2;
            if (kind == 1)
                net.units = (fsdp_unit_opts){.param_dtype = FSDP_BF16, .reduce_dtype = FSDP_F32};
            net.units.reshard_after_forward = stream % 2 == 1 ? FSDP_RESHARD_ALWAYS : 0;
            FSDP_TRY(train_late(scene, &net, stream, err));
        }
    return FSDP_OK;
}

/* --- running ------------------------------------------------------------------------------------ */

typedef struct numbered_scene {
    const char *name;
    int least_ranks, most_ranks;
    gpu_scene_body body;
} numbered_scene;

static const numbered_scene scenes[] = {
    {"C1", 1, 4, gpu_scene_gathers},
    {"C2", 4, 4, gpu_scene_gathers_of_slices},
    {"C3", 1, 4, gpu_scene_reductions},
    {"C4", 1, 4, gpu_scene_narrow_reductions},
    {"C5", 2, 4, gpu_scene_packing},
    {"C9", 1, 4, factors},
    {"C10", 1, 4, inputs},
    {"C16", 1, 4, groups},
    {"C17", 1, 1, gpu_scene_alone},
    {"C18", 1, 4, late_prefetch},
    {"C19", 2, 4, siblings},
    {"C20", 1, 4, gpu_scene_early_gathers},
    {"C22", 2, 4, forced_sums},
    {"C23", 1, 4, late_streams},
};

typedef struct scene_job {
    const numbered_scene *what;
    size_t bytes;
    fsdp_text notes[GPU_MOST_RANKS];
} scene_job;

static fsdp_status run_rank(world_rank *rank, fsdp_error *err)
{
    scene_job *job = rank->user;
    gpu_scene scene = {
        .rank = rank, .notes = &job->notes[fsdp_world_rank(rank->world)], .bytes = job->bytes};
    rank->notes_collectives = true;
    fsdp_status status = job->what->body(&scene, err);
    toy_free(&scene.toy);
    return status;
}

/* The first line in which two notes differ. */
static fsdp_status expect_notes(const fsdp_text *found, const fsdp_text *expected, int rank,
                                fsdp_error *err)
{
    const char *a = found->data, *b = expected->data;
    if (!a || !b || found->failed || expected->failed)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "rank %d has no notes", rank);
    if (strcmp(a, b) == 0)
        return FSDP_OK;
    while (strcspn(a, "\n") == strcspn(b, "\n") && strncmp(a, b, strcspn(a, "\n") + 1) == 0)
        a += strcspn(a, "\n") + 1, b += strcspn(b, "\n") + 1;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "rank %d: '%.*s', on cpu '%.*s'", rank,
                     (int)strcspn(a, "\n"), a, (int)strcspn(b, "\n"), b);
}

static fsdp_status run_both(const numbered_scene *what, int ranks, const char *device, size_t bytes,
                            fsdp_error *err)
{
    scene_job host = {.what = what, .bytes = bytes}, own = host;
    fsdp_status status = run_worlds(ranks, "cpu", run_rank, &host, err);
    if (status == FSDP_OK)
        status = run_worlds(ranks, device, run_rank, &own, err);
    for (int i = 0; i < ranks; i++) {
        if (status == FSDP_OK)
            status = expect_notes(&own.notes[i], &host.notes[i], i, err);
        fsdp_text_release(&own.notes[i]);
        fsdp_text_release(&host.notes[i]);
    }
    return status;
}

/* Timed by the host. */
static void end_row(gpu_row *row, int64_t began_ms, fsdp_status status, const fsdp_error *err)
{
    row->seconds = (double)(fsdp_now_ms() - began_ms) * 1e-3;
    gpu_end_row(row, status, err);
}

static void check_orders(gpu_results *results, int ranks)
{
    /* --check would report the heads that C13 does not use */
    const worlds_setup setup = {.ranks = ranks,
                                .deadline_ms = DEADLINE_MS,
                                .device = results->options.device,
                                .is_unchecked = true};
    const char *name;
    for (int i = 0; (name = order_scenario_at(i)); i++) {
        fsdp_error err = {0};
        if (!order_scenario_fits(name, ranks))
            continue;
        gpu_row *row = gpu_add_wanted_row(results, "scenarios/%d-ranks/%s", ranks, name);
        const int64_t began = fsdp_now_ms();
        if (!row)
            continue;
        end_row(row, began, order_scenario_run(name, &setup, &err), &err);
    }
}

fsdp_status gpu_check_scenarios(gpu_results *results, int ranks, fsdp_error *err)
{
    const size_t bytes = results->options.bytes / 4;
    (void)err;
    check_orders(results, ranks);
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        const numbered_scene *what = &scenes[i];
        fsdp_error why = {0};
        if (ranks < what->least_ranks || ranks > what->most_ranks)
            continue;
        gpu_row *row = gpu_add_wanted_row(results, "scenarios/%d-ranks/%s", ranks, what->name);
        const int64_t began = fsdp_now_ms();
        if (!row)
            continue;
        fsdp_status status = run_both(what, ranks, results->options.device,
                                      bytes < MOST_LATE_BYTES ? bytes : MOST_LATE_BYTES, &why);
        end_row(row, began, status, &why);
    }
    return FSDP_OK;
}
