/*
 * Roots: the structure is frozen and gets its memory; a step begins and ends. See root.h, and
 * docs/flow_step.md for the way of a step.
 */
#include "runtime/root_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

/* --- contexts --------------------------------------------------------------------------------- */

static const char *const stream_names[FSDP_STREAMS] = {"compute", "copy_in", "all_gather", "reduce",
                                                       "all_reduce"};

static fsdp_status open_streams(fsdp_context *context, fsdp_error *err)
{
    for (int i = 0; i < FSDP_STREAMS; i++)
        FSDP_TRY(context->device->ops->stream_create(context->device, stream_names[i],
                                                     &context->streams[i], err));
    return FSDP_OK;
}

static fsdp_status create_context(fsdp_world *world, fsdp_context **context_out, fsdp_error *err)
{
    fsdp_context *context = fsdp_alloc(1, sizeof *context);
    if (!context)
        return fsdp_fail_memory(err, "the context of a root");
    context->users = 1;
    context->world = world;
    context->device = world->parts.device;
    fsdp_memory_init(&context->memory, context->device);
    *context_out = context;
    return open_streams(context, err);
}

/* No stream is freed while another one still waits for it. */
static void drain(fsdp_context *context)
{
    const fsdp_device_ops *ops = context->device->ops;
    for (int i = 0; i < FSDP_STREAMS; i++)
        if (context->streams[i])
            (void)!ops->sync(ops->record(context->streams[i]), NULL);
}

/* Lanes outlive contexts: an event of a stream that is gone has long been reached. */
static void forget_streams(fsdp_context *context)
{
    for (size_t i = 0; i < context->world->lane_count; i++)
        for (int s = 0; s < FSDP_STREAMS; s++)
            if (context->world->lanes[i]->last.stream == context->streams[s])
                context->world->lanes[i]->last = (fsdp_event){0};
}

void fsdp_context_release(fsdp_context *context)
{
    if (!context || --context->users > 0)
        return;
    fsdp_context_flush_gather(context);
    fsdp_context_limit_inputs(context, 0);
    fsdp_context_give_all_reduced(context);
    drain(context);
    fsdp_memory_release(&context->memory);
    forget_streams(context);
    for (int i = 0; i < FSDP_STREAMS; i++)
        if (context->streams[i])
            context->device->ops->stream_free(context->streams[i]);
    fsdp_free(context->inputs);
    fsdp_free(context->order);
    fsdp_free(context);
}

fsdp_status fsdp_context_sync(fsdp_context *context, fsdp_error *err)
{
    fsdp_stream *compute = context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_device_ops *ops = context->device->ops;
    return ops->is_host ? ops->sync(ops->record(compute), err) : FSDP_OK;
}

/* The largest that any unit wants. */
static fsdp_status size_inputs(fsdp_context *context, const fsdp_root *root, fsdp_error *err)
{
    int most = context->max_inputs;
    for (size_t i = 0; i < root->unit_count; i++)
        if (root->units[i]->max_inputs > most)
            most = root->units[i]->max_inputs;
    if (most == context->max_inputs)
        return FSDP_OK;
    fsdp_used_block *inputs = fsdp_realloc(context->inputs, (size_t)most, sizeof *inputs);
    if (!inputs)
        return fsdp_fail_memory(err, "the list of reductions");
    context->inputs = inputs;
    context->max_inputs = most;
    return FSDP_OK;
}

/* What a root has before its first step: shards and buffers. */
static void move_blocks(fsdp_root *root, fsdp_context *to)
{
    fsdp_stream *compute = to->streams[FSDP_STREAM_COMPUTE];
    const fsdp_memory *counts = &root->context->memory.counts;
    for (size_t i = 0; i < root->unit_count; i++)
        for (size_t g = 0; g < root->units[i]->group_count; g++)
            root->units[i]->groups[g].shards->stream = compute;
    if (root->buffers)
        root->buffers->stream = compute;
    for (int class = 0; class < FSDP_MEMORY_CLASSES; class ++)
        fsdp_memory_count(&to->memory, (fsdp_memory_class) class, counts->now[class]);
}

fsdp_status fsdp_root_share_context(fsdp_root *root, fsdp_root *with, fsdp_error *err)
{
    fsdp_context *own = root->context, *shared = with->context;
    if (root->is_in_forward || root->step > 0 || own->order_count > 0 || own->users > 1)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a context is shared once, before the first step");
    if (own == shared)
        return FSDP_OK;
    FSDP_TRY(fsdp_context_sync(own, err));
    FSDP_TRY(size_inputs(shared, root, err));
    move_blocks(root, shared);
    root->context = shared;
    shared->users++;
    fsdp_context_release(own);
    return FSDP_OK;
}

/* --- failures --------------------------------------------------------------------------------- */

fsdp_status fsdp_root_ready(fsdp_root *root, fsdp_error *err)
{
    fsdp_error *reason = root->failure.status != FSDP_OK ? &root->failure : &root->complaint;
    if (reason->status == FSDP_OK)
        return FSDP_OK;
    fsdp_status status = reason->status;
    if (err)
        *err = *reason;
    root->complaint = (fsdp_error){0};
    return status;
}

static fsdp_status check_streams(const fsdp_root *root, fsdp_error *err)
{
    const fsdp_context *context = root->context;
    for (int i = 0; i < FSDP_STREAMS; i++)
        FSDP_TRY(context->device->ops->check(context->streams[i], err));
    return FSDP_OK;
}

/* Ranks that wait for this one learn why it does not come. */
static void abort_all(fsdp_world *world, const fsdp_error *why)
{
    for (size_t i = 0; i < world->lane_count; i++)
        if (world->lanes[i]->comm)
            fsdp_comm_abort(world->lanes[i]->comm, why);
}

fsdp_status fsdp_root_done(fsdp_root *root, fsdp_status status, fsdp_error *err)
{
    fsdp_error here = {0};
    fsdp_error *reason = err ? err : &here;
    if (status == FSDP_OK)
        status = check_streams(root, reason);
    if (status == FSDP_OK || root->failure.status != FSDP_OK)
        return status;
    root->failure = *reason;
    root->failure.status = status;
    abort_all(root->world, &root->failure);
    return status;
}

/* --- memory of parameters --------------------------------------------------------------------- */

enum { ALIGNMENT = 64 };

static size_t align(size_t size)
{
    return (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static fsdp_status take_zeroed(fsdp_context *context, size_t bytes, size_t slack, const char *what,
                               fsdp_block **block_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_memory_take(&context->memory, FSDP_MEMORY_SHARD,
                              context->streams[FSDP_STREAM_COMPUTE], NULL, bytes, slack, what,
                              block_out, err));
    memset((*block_out)->data, 0, bytes + slack);
    return FSDP_OK;
}

static fsdp_status allocate_shards(fsdp_group *group, fsdp_error *err)
{
    fsdp_context *context = group->unit->root->context;
    size_t bytes = 0, at = 0;
    for (size_t i = 0; i < group->count; i++)
        bytes += (size_t)group->params[i]->padded * fsdp_dtype_size(group->params[i]->dtype);
    FSDP_TRY(take_zeroed(context, bytes, group->count * ALIGNMENT, group->unit->name,
                         &group->shards, err));
    for (size_t i = 0; i < group->count; i++) {
        fsdp_param *param = group->params[i];
        param->shard = (unsigned char *)group->shards->data + at;
        at += align((size_t)param->padded * fsdp_dtype_size(param->dtype));
    }
    return FSDP_OK;
}

/* Buffers, and parameters that units ignored. */
static size_t whole_bytes(const fsdp_param *param)
{
    const fsdp_box box = fsdp_box_whole(param->ndim, param->shape);
    return (size_t)fsdp_box_count(&box) * fsdp_dtype_size(param->dtype);
}

static fsdp_status allocate_wholes(fsdp_root *root, fsdp_error *err)
{
    const fsdp_model *model = root->model;
    size_t bytes = 0, count = 0, at = 0;
    for (size_t i = 0; i < model->count; i++)
        if (!model->params[i]->group) {
            bytes += whole_bytes(model->params[i]);
            count++;
        }
    if (count == 0)
        return FSDP_OK;
    FSDP_TRY(take_zeroed(root->context, bytes, count * ALIGNMENT, "buffers", &root->buffers, err));
    for (size_t i = 0; i < model->count; i++) {
        fsdp_param *param = model->params[i];
        if (param->group)
            continue;
        param->shard = (unsigned char *)root->buffers->data + at;
        at += align(whole_bytes(param));
    }
    return FSDP_OK;
}

/* --- creating --------------------------------------------------------------------------------- */

static fsdp_status create_root_unit(fsdp_root *root, const fsdp_unit_opts *opts, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_create(root->model, "", opts, &root->unit, err));
    root->unit->is_root = true;
    char *name = fsdp_strndup("root", 4);
    if (!name)
        return fsdp_fail_memory(err, "a unit");
    fsdp_free(root->unit->name);
    root->unit->name = name;
    return FSDP_OK;
}

/* Where the unit's first parameter stands in the model. */
static size_t place_of(const fsdp_unit *unit)
{
    const fsdp_model *model = unit->model;
    for (size_t i = 0; i < model->count; i++)
        if (model->params[i]->unit == unit)
            return i;
    return model->count;
}

static int compare_units(const void *a, const void *b)
{
    const fsdp_unit *x = *(fsdp_unit *const *)a, *y = *(fsdp_unit *const *)b;
    if (x->is_root != y->is_root)
        return x->is_root ? -1 : 1;
    size_t at = place_of(x), other = place_of(y);
    return at < other ? -1 : at > other;
}

static fsdp_status list_units(fsdp_root *root, fsdp_error *err)
{
    const fsdp_model *model = root->model;
    root->units = fsdp_alloc(model->unit_count, sizeof(fsdp_unit *));
    if (!root->units)
        return fsdp_fail_memory(err, "the units of a root");
    root->unit_count = model->unit_count;
    memcpy(root->units, model->units, root->unit_count * sizeof(fsdp_unit *));
    qsort(root->units, root->unit_count, sizeof(fsdp_unit *), compare_units);
    for (size_t i = 0; i < root->unit_count; i++) {
        fsdp_unit *unit = root->units[i];
        unit->root = root;
        if (unit->reshard_after_forward == FSDP_RESHARD_AUTO)
            unit->reshard_after_forward = unit->is_root ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
    }
    return FSDP_OK;
}

static fsdp_status make_groups(fsdp_root *root, fsdp_error *err)
{
    for (size_t i = 0; i < root->unit_count; i++) {
        fsdp_unit *unit = root->units[i];
        FSDP_TRY(fsdp_unit_make_groups(unit, err));
        for (size_t g = 0; g < unit->group_count; g++)
            FSDP_TRY(allocate_shards(&unit->groups[g], err));
    }
    return allocate_wholes(root, err);
}

static fsdp_status build(fsdp_root *root, const fsdp_unit_opts *opts, fsdp_error *err)
{
    FSDP_TRY(create_root_unit(root, opts, err));
    FSDP_TRY(create_context(root->world, &root->context, err));
    FSDP_TRY(list_units(root, err));
    FSDP_TRY(make_groups(root, err));
    return size_inputs(root->context, root, err);
}

fsdp_status fsdp_root_create(fsdp_model *model, const fsdp_unit_opts *opts, fsdp_root **root_out,
                             fsdp_error *err)
{
    if (model->root)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the model has a root already");
    fsdp_root *root = fsdp_alloc(1, sizeof *root);
    if (!root)
        return fsdp_fail_memory(err, "a root");
    root->model = model;
    root->world = model->world;
    root->is_last_backward = true;
    root->handle.root = root;
    fsdp_status status = fsdp_ctl_agree(fsdp_world_ctl(model->world), build(root, opts, err), err);
    model->root = root;
    if (status != FSDP_OK) {
        fsdp_root_free(root);
        return status;
    }
    *root_out = root;
    return FSDP_OK;
}

/* --- freeing ---------------------------------------------------------------------------------- */

static void give(fsdp_root *root, fsdp_block *block)
{
    fsdp_stream *compute = root->context->streams[FSDP_STREAM_COMPUTE];
    if (block)
        fsdp_memory_give(&root->context->memory, block, compute->device->ops->record(compute));
}

static void drop_group(fsdp_root *root, fsdp_group *group)
{
    fsdp_group_drop_gather(group);
    fsdp_group_drop_kept(group);
    fsdp_group_drop_grads(group);
    give(root, group->again_shard);
    give(root, group->unsharded);
    group->again_shard = group->unsharded = NULL;
    group->state = FSDP_IS_SHARDED;
    group->phase = FSDP_IDLE;
    group->order_count = 0;
}

static void drop_all(fsdp_root *root)
{
    fsdp_context_flush_gather(root->context);
    for (size_t i = 0; i < root->unit_count; i++)
        for (size_t g = 0; g < root->units[i]->group_count; g++)
            drop_group(root, &root->units[i]->groups[g]);
}

void fsdp_root_free(fsdp_root *root)
{
    if (!root)
        return;
    if (root->units) {
        drop_all(root);
        give(root, root->buffers);
    }
    for (size_t i = 0; i < root->unit_count; i++) {
        fsdp_unit *unit = root->units[i];
        for (size_t g = 0; g < unit->group_count; g++)
            give(root, unit->groups[g].shards);
        fsdp_unit_release_groups(unit);
        unit->root = NULL;
    }
    fsdp_context_release(root->context);
    root->model->root = NULL;
    fsdp_free(root->units);
    fsdp_free(root);
}

/* --- what is in it ---------------------------------------------------------------------------- */

fsdp_unit *fsdp_root_unit(fsdp_root *root)
{
    return root->unit;
}

size_t fsdp_root_unit_count(const fsdp_root *root)
{
    return root->unit_count;
}

fsdp_unit *fsdp_root_unit_at(const fsdp_root *root, size_t i)
{
    return i < root->unit_count ? root->units[i] : NULL;
}

fsdp_memory fsdp_root_memory(const fsdp_root *root)
{
    return root->context->memory.counts;
}

void fsdp_root_reset_peak(fsdp_root *root)
{
    fsdp_memory *counts = &root->context->memory.counts;
    memcpy(counts->peak, counts->now, sizeof counts->peak);
    counts->total_peak = counts->total_now;
}

fsdp_status fsdp_unit_set_separate_reduce_scatter_group(fsdp_unit *unit, bool separate,
                                                        bool recurse, fsdp_error *err)
{
    (void)recurse;
    unit->is_separate = separate;
    for (size_t g = 0; g < unit->group_count; g++)
        FSDP_TRY(fsdp_group_separate_reduce(&unit->groups[g], err));
    return FSDP_OK;
}

/* --- a step ----------------------------------------------------------------------------------- */

/* Gathers wait for the optimizer's step, or for all that the compute stream has so far. */
static void begin_streams(fsdp_root *root)
{
    fsdp_context *context = root->context;
    const fsdp_device_ops *ops = context->device->ops;
    fsdp_event event = root->has_post_optim_event
                           ? root->post_optim_event
                           : ops->record(context->streams[FSDP_STREAM_COMPUTE]);
    root->has_post_optim_event = false;
    ops->wait(context->streams[FSDP_STREAM_COPY_IN], event);
    ops->wait(context->streams[FSDP_STREAM_ALL_GATHER], event);
}

static fsdp_status check_finalized(const fsdp_root *root, fsdp_error *err)
{
    if (!root->context->finalizing)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "an asynchronous end of backward was not waited for: fsdp_finalize_wait comes "
                     "before the next forward");
}

fsdp_status fsdp_root_begin_forward(fsdp_root *root, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_ready(root, err));
    FSDP_TRY(check_finalized(root, err));
    if (root->is_in_forward)
        return fsdp_fail(err, FSDP_ERR_USAGE, "begin_forward came twice without end_forward");
    root->is_in_forward = true;
    fsdp_trace_step(root->world->parts.trace, root->step);
    FSDP_TRY(fsdp_root_done(root, size_inputs(root->context, root, err), err));
    begin_streams(root);
    return fsdp_root_done(root, FSDP_OK, err);
}

static fsdp_status end_forward(fsdp_root *root, fsdp_error *err)
{
    for (size_t i = 0; i < root->unit_count; i++)
        FSDP_TRY(fsdp_unit_complete_forward(root->units[i], err));
    fsdp_context_flush_gather(root->context);
    return FSDP_OK;
}

fsdp_status fsdp_root_end_forward(fsdp_root *root, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_ready(root, err));
    if (!root->is_in_forward)
        return fsdp_fail(err, FSDP_ERR_USAGE, "end_forward came without begin_forward");
    root->is_in_forward = false;
    return fsdp_root_done(root, end_forward(root, err), err);
}

/* The order of this root's forwards; another root's on the same context stays. */
static void clear_order(fsdp_root *root)
{
    fsdp_context *context = root->context;
    for (size_t i = 0; i < context->order_count; i++)
        if (context->order[i] && context->order[i]->unit->root == root)
            context->order[i] = NULL;
    while (context->order_count > 0 && !context->order[context->order_count - 1])
        context->order_count--;
}

static fsdp_status run_grad_hooks(fsdp_root *root, fsdp_error *err)
{
    const fsdp_model *model = root->model;
    for (size_t i = 0; i < model->count; i++) {
        fsdp_param *param = model->params[i];
        if (param->hook && param->shard_grad)
            FSDP_TRY(param->hook(param->hook_user, param, err));
    }
    return FSDP_OK;
}

static void wait_reductions(fsdp_root *root)
{
    for (size_t i = 0; i < root->unit_count; i++)
        for (size_t g = 0; g < root->units[i]->group_count; g++) {
            fsdp_group *group = &root->units[i]->groups[g];
            fsdp_group_wait_reduced(group);
            fsdp_group_drop_gather(group);
            group->order_count = 0;
        }
    clear_order(root);
    fsdp_context_limit_inputs(root->context, 0);
    fsdp_context_give_all_reduced(root->context);
}

static fsdp_status finalize(fsdp_root *root, fsdp_error *err)
{
    wait_reductions(root);
    FSDP_TRY(fsdp_context_sync(root->context, err));
    return run_grad_hooks(root, err);
}

static fsdp_status complete_backward(fsdp_root *root, fsdp_error *err)
{
    for (size_t i = 0; i < root->unit_count; i++)
        FSDP_TRY(fsdp_unit_complete_backward(root->units[i], err));
    for (size_t i = 0; i < root->unit_count; i++) {
        fsdp_unit *unit = root->units[i];
        unit->phase = FSDP_IDLE;
        for (size_t g = 0; g < unit->group_count; g++)
            unit->groups[g].phase = FSDP_IDLE;
    }
    return FSDP_OK;
}

static fsdp_status end_backward(fsdp_root *root, fsdp_error *err)
{
    FSDP_TRY(complete_backward(root, err));
    return root->is_manual || !root->is_last_backward ? FSDP_OK : finalize(root, err);
}

fsdp_status fsdp_root_end_backward(fsdp_root *root, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_ready(root, err));
    root->is_in_backward = false;
    return fsdp_root_done(root, end_backward(root, err), err);
}

/* --- the end of backward by hand -------------------------------------------------------------- */

void fsdp_root_set_is_last_backward(fsdp_root *root, bool is_last)
{
    root->is_last_backward = is_last;
}

void fsdp_root_set_post_optim_event(fsdp_root *root)
{
    const fsdp_context *context = root->context;
    root->post_optim_event = context->device->ops->record(context->streams[FSDP_STREAM_COMPUTE]);
    root->has_post_optim_event = true;
}

fsdp_status fsdp_root_set_manual_backward_finalization(fsdp_root *root, bool manual,
                                                       fsdp_error *err)
{
    if (root->is_in_backward)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "how backward is ended cannot change inside a backward");
    root->is_manual = manual;
    return FSDP_OK;
}

fsdp_status fsdp_root_finalize_backward(fsdp_root *root, bool is_async,
                                        fsdp_finalize_handle **handle_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_ready(root, err));
    FSDP_TRY(check_finalized(root, err));
    if (!root->is_manual)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "finalize_backward needs fsdp_root_set_manual_backward_finalization");
    root->is_in_backward = false;
    FSDP_TRY(fsdp_root_done(root, complete_backward(root, err), err));
    if (handle_out)
        *handle_out = &root->handle;
    root->context->finalizing = root;
    return is_async ? FSDP_OK : fsdp_finalize_wait(&root->handle, err);
}

fsdp_status fsdp_finalize_wait(fsdp_finalize_handle *handle, fsdp_error *err)
{
    fsdp_root *root = handle->root;
    FSDP_TRY(fsdp_root_ready(root, err));
    if (root->context->finalizing != root)
        return FSDP_OK;
    root->context->finalizing = NULL;
    return fsdp_root_done(root, finalize(root, err), err);
}

/* --- back to the beginning -------------------------------------------------------------------- */

void fsdp_root_zero_grad(fsdp_root *root)
{
    for (size_t i = 0; i < root->unit_count; i++)
        for (size_t g = 0; g < root->units[i]->group_count; g++)
            fsdp_group_drop_grads(&root->units[i]->groups[g]);
}

fsdp_status fsdp_root_reset(fsdp_root *root, fsdp_error *err)
{
    root->complaint = (fsdp_error){0};
    FSDP_TRY(fsdp_root_ready(root, err));
    wait_reductions(root);
    drop_all(root);
    for (size_t i = 0; i < root->unit_count; i++) {
        fsdp_unit *unit = root->units[i];
        unit->phase = FSDP_IDLE;
        unit->to_run_count = unit->to_return_count = 0;
    }
    root->is_in_forward = root->is_in_backward = false;
    if (root->context->finalizing == root)
        root->context->finalizing = NULL;
    return fsdp_root_done(root, fsdp_context_sync(root->context, err), err);
}
