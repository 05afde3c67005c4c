/* A context's streams, and the blocks in flight between them. See context.h. */
#include "runtime/context/context.h"

#include <string.h>

#include "base/core/mem.h"

static const char *const stream_names[FSDP_STREAMS] = {"compute", "copy_in", "all_gather", "reduce",
                                                       "all_reduce"};

static fsdp_status open_streams(fsdp_context *context, fsdp_error *err)
{
    for (int i = 0; i < FSDP_STREAMS; i++)
        FSDP_TRY(context->device->ops->stream_create(context->device, stream_names[i],
                                                     &context->streams[i], err));
    return FSDP_OK;
}

fsdp_status fsdp_context_create(fsdp_world *world, fsdp_context **context_out, fsdp_error *err)
{
    fsdp_context *context = fsdp_alloc(1, sizeof *context);
    *context_out = context;
    if (!context)
        return fsdp_fail_memory(err, "the context of a root");
    context->world = world;
    context->device = world->parts.device;
    fsdp_memory_init(&context->memory, context->device);
    return open_streams(context, err);
}

void fsdp_context_drain(fsdp_context *context)
{
    const fsdp_device_ops *ops = context->device->ops;
    for (int i = 0; i < FSDP_STREAMS; i++)
        if (context->streams[i])
            (void)!ops->sync(ops->record(context->streams[i]), NULL);
}

/* Communicators outlive contexts, and their last events belong to streams that are freed now. The streams
 * were drained, so these events are reached. */
static void forget_streams(fsdp_context *context)
{
    for (size_t i = 0; i < context->world->comm_count; i++)
        for (int s = 0; s < FSDP_STREAMS; s++)
            if (context->world->comms[i]->last.stream == context->streams[s])
                context->world->comms[i]->last = (fsdp_event){0};
}

void fsdp_context_free(fsdp_context *context)
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

fsdp_status fsdp_context_sync(fsdp_context *context, fsdp_error *err)
{
    fsdp_stream *compute = context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_device_ops *ops = context->device->ops;
    return ops->is_host ? ops->sync(ops->record(compute), err) : FSDP_OK;
}

fsdp_status fsdp_context_check_comms(const fsdp_context *context, fsdp_error *err)
{
    const fsdp_world *world = context->world;
    if (!context->device->ops->issue) /* calls of the host have returned their failures */
        return FSDP_OK;
    for (size_t i = 0; i < world->comm_count; i++)
        if (world->comms[i]->comm)
            FSDP_TRY(fsdp_comm_failure(world->comms[i]->comm, err));
    return FSDP_OK;
}

fsdp_status fsdp_context_check(const fsdp_context *context, fsdp_error *err)
{
    for (int i = 0; i < FSDP_STREAMS; i++)
        FSDP_TRY(context->device->ops->check(context->streams[i], err));
    return FSDP_OK;
}

/* --- gathers ---------------------------------------------------------------------------------- */

void fsdp_context_give_gather(fsdp_context *context, fsdp_used_block *gather)
{
    if (!gather->block)
        return;
    fsdp_memory_give(&context->memory, gather->block, gather->event);
    *gather = (fsdp_used_block){0};
}

void fsdp_context_flush_gather(fsdp_context *context)
{
    fsdp_context_give_gather(context, &context->deferred);
}

/* --- reductions ------------------------------------------------------------------------------- */

fsdp_status fsdp_context_size_inputs(fsdp_context *context, int most, fsdp_error *err)
{
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

void fsdp_context_limit_inputs(fsdp_context *context, int most)
{
    while (context->input_count > most) {
        const fsdp_used_block oldest = context->inputs[0];
        fsdp_memory_give(&context->memory, oldest.block, oldest.event);
        context->input_count--;
        memmove(context->inputs, context->inputs + 1,
                (size_t)context->input_count * sizeof *context->inputs);
    }
}

void fsdp_context_give_all_reduced(fsdp_context *context)
{
    fsdp_memory_give(&context->memory, context->all_reduced.block, context->all_reduced.event);
    context->all_reduced = (fsdp_used_block){0};
}

/* --- trace ------------------------------------------------------------------------------------ */

void fsdp_context_trace(fsdp_context *context, fsdp_text *events, const fsdp_trace_event *event)
{
    fsdp_trace_add(context->world->parts.trace, event);
    if (events)
        fsdp_text_addf(events, "%s %s\n", event->event, event->unit);
}
