/*
 * Contexts: the streams, the memory and the buffers in flight that the units of a root share, and
 * several roots may.
 */
#include "runtime/unit/root_internal.h"

#include "base/mem.h"

static const char *const stream_names[FSDP_STREAMS] = {"compute", "copy_in", "all_gather", "reduce",
                                                       "all_reduce"};

static fsdp_status open_streams(fsdp_context *context, fsdp_error *err)
{
    for (int i = 0; i < FSDP_STREAMS; i++)
        FSDP_TRY(context->device->ops->stream_create(context->device, stream_names[i],
                                                     &context->streams[i], err));
    return FSDP_OK;
}

static void enter(fsdp_root *root, fsdp_context *context)
{
    root->context = context;
    root->next_sharing = context->roots;
    context->roots = root;
}

fsdp_status fsdp_context_create(fsdp_root *root, fsdp_error *err)
{
    fsdp_context *context = fsdp_alloc(1, sizeof *context);
    if (!context)
        return fsdp_fail_memory(err, "the context of a root");
    context->world = root->world;
    context->device = root->world->parts.device;
    fsdp_memory_init(&context->memory, context->device);
    enter(root, context);
    return open_streams(context, err);
}

void fsdp_context_drain(fsdp_context *context)
{
    const fsdp_device_ops *ops = context->device->ops;
    for (int i = 0; i < FSDP_STREAMS; i++)
        if (context->streams[i])
            (void)!ops->sync(ops->record(context->streams[i]), NULL);
}

/* Lanes outlive contexts: an event of a stream that is gone has long been reached. */
static void forget_streams(fsdp_context *context)
{
    for (size_t i = 0; i < context->world->comm_count; i++)
        for (int s = 0; s < FSDP_STREAMS; s++)
            if (context->world->comms[i]->last.stream == context->streams[s])
                context->world->comms[i]->last = (fsdp_event){0};
}

static void free_context(fsdp_context *context)
{
    fsdp_context_flush_gather(context);
    fsdp_context_limit_inputs(context, 0);
    fsdp_context_give_all_reduced(context);
    fsdp_context_drain(context); /* no stream is freed while another one still waits for it */
    fsdp_memory_release(&context->memory);
    forget_streams(context);
    for (int i = 0; i < FSDP_STREAMS; i++)
        if (context->streams[i])
            context->device->ops->stream_free(context->streams[i]);
    fsdp_free(context->inputs);
    fsdp_free(context->order);
    fsdp_free(context);
}

void fsdp_context_leave(fsdp_root *root)
{
    fsdp_context *context = root->context;
    if (!context)
        return;
    fsdp_root **at = &context->roots;
    while (*at != root)
        at = &(*at)->next_sharing;
    *at = root->next_sharing;
    root->next_sharing = NULL;
    root->context = NULL;
    if (!context->roots)
        free_context(context);
}

fsdp_status fsdp_context_sync(fsdp_context *context, fsdp_error *err)
{
    fsdp_stream *compute = context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_device_ops *ops = context->device->ops;
    return ops->is_host ? ops->sync(ops->record(compute), err) : FSDP_OK;
}

static int largest_wish(const fsdp_root *root)
{
    int most = 1;
    for (size_t i = 0; i < root->unit_count; i++)
        if (root->units[i]->max_inputs > most)
            most = root->units[i]->max_inputs;
    return most;
}

fsdp_status fsdp_context_size_inputs(fsdp_context *context, const fsdp_root *root, fsdp_error *err)
{
    int most = largest_wish(root);
    for (const fsdp_root *at = context->roots; at; at = at->next_sharing)
        if (largest_wish(at) > most)
            most = largest_wish(at);
    context->max_inputs = most;
    if (most <= context->input_room)
        return FSDP_OK;
    fsdp_used_block *inputs = fsdp_realloc(context->inputs, (size_t)most, sizeof *inputs);
    if (!inputs)
        return fsdp_fail_memory(err, "the list of reductions");
    context->inputs = inputs;
    context->input_room = most;
    return FSDP_OK;
}

/* Shards are all that it has of a step. */
static bool is_at_rest(const fsdp_group *group)
{
    bool has_blocks = group->gather.block || group->unsharded || group->again_shard ||
                      group->partial.block || group->grad_count > 0;
    for (size_t i = 0; i < group->count; i++)
        has_blocks = has_blocks || group->params[i]->grad || group->params[i]->kept;
    return group->state == FSDP_IS_SHARDED && !has_blocks;
}

static fsdp_status check_shareable(const fsdp_root *root, const fsdp_root *with, fsdp_error *err)
{
    const fsdp_context *own = root->context;
    bool is_in_step = root->is_in_forward || root->is_in_backward || own->finalizing;
    if (root->world != with->world)
        return fsdp_fail(err, FSDP_ERR_USAGE, "roots of two worlds cannot share a context");
    if (is_in_step || root->step > 0 || own->order_count > 0 || own->roots->next_sharing)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a context is shared once, before the first step");
    for (size_t i = 0; i < root->unit_count; i++)
        for (size_t g = 0; g < root->units[i]->group_count; g++)
            if (!is_at_rest(&root->units[i]->groups[g]))
                return fsdp_fail(err, FSDP_ERR_USAGE,
                                 "a context is shared while every unit is sharded: unit %s is "
                                 "gathered, or keeps memory of a gather (fsdp_unit_reshard, "
                                 "fsdp_root_reset)",
                                 root->units[i]->name);
    return FSDP_OK;
}

/* They were reached, and their streams go. */
static void forget_events(fsdp_root *root)
{
    const fsdp_event none = {0};
    for (size_t i = 0; i < root->unit_count; i++)
        for (size_t g = 0; g < root->units[i]->group_count; g++) {
            fsdp_group *group = &root->units[i]->groups[g];
            group->resharded = group->reduced = none;
            group->rects_in.last = group->rects_out.last = group->rects_reduce.last = none;
        }
    root->has_post_optim_event = false;
}

/* What a root has before its first step: shards and buffers. */
static void move_blocks(fsdp_root *root, fsdp_context *to)
{
    fsdp_memory_pool *from = &root->context->memory;
    fsdp_stream *compute = to->streams[FSDP_STREAM_COMPUTE];
    const fsdp_memory *counts = &root->context->memory.counts;
    for (size_t i = 0; i < root->unit_count; i++)
        for (size_t g = 0; g < root->units[i]->group_count; g++)
            fsdp_memory_pass(from, &to->memory, root->units[i]->groups[g].shards, compute);
    if (root->buffers)
        fsdp_memory_pass(from, &to->memory, root->buffers, compute);
    for (int i = 0; i < FSDP_MEMORY_CLASSES; i++)
        fsdp_memory_count(&to->memory, (fsdp_memory_class)i, counts->now[i]);
}

fsdp_status fsdp_root_share_context(fsdp_root *root, fsdp_root *with, fsdp_error *err)
{
    fsdp_context *own = root->context, *shared = with->context;
    if (own == shared)
        return FSDP_OK;
    FSDP_TRY(check_shareable(root, with, err));
    FSDP_TRY(fsdp_context_sync(own, err));
    FSDP_TRY(fsdp_context_size_inputs(shared, root, err));
    fsdp_context_flush_gather(own);
    fsdp_context_drain(own);
    forget_events(root);
    move_blocks(root, shared);
    fsdp_context_leave(root);
    enter(root, shared);
    return FSDP_OK;
}
