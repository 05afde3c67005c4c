/*
 * Shards become gathered parameters, and go back. In docs/flow_step.md: steps "gather" and "reshard".
 *
 *   copy-in     padded shards, cast, side by side into this rank's place of one flat buffer   copy_in
 *   all-gather  the flat buffer, in place                                                     all_gather
 *   copy-out    every rank's part of every parameter to its place                             compute
 *
 * Outside forward and backward, and with asynchronous units, all three are done on the compute stream. After
 * a reshard to k ranks, the gather takes its input from what was kept of the gathered parameters.
 */
#include "runtime/unit/unit_internal.h"
#include "runtime/unit/work.h"

#include "base/mem.h"

/* --- which streams, which ranks --------------------------------------------------------------- */

/* Work that the caller has ordered by hand goes to the compute stream. */
static bool uses_side_streams(const fsdp_group *group, bool is_async)
{
    return !is_async && (group->phase == FSDP_FORWARD || group->phase == FSDP_PRE_BACKWARD);
}

typedef struct gather_side {
    fsdp_lane *lane;
    int parts, rank;
} gather_side;

static gather_side side_of(const fsdp_group *group)
{
    if (group->state == FSDP_IS_SHARDED_AGAIN)
        return (gather_side){group->again, group->again_size, group->again_rank};
    return (gather_side){group->shard, group->shard_size, group->shard_rank};
}

/* --- sizes ------------------------------------------------------------------------------------ */

static size_t data_size(const fsdp_param *param)
{
    return fsdp_dtype_size(param->data_dtype);
}

/* Bytes that one of `parts` ranks brings for a parameter. */
static size_t input_bytes(const fsdp_group *group, const fsdp_param *param, int parts)
{
    if (param->extension && group->state != FSDP_IS_SHARDED_AGAIN) {
        size_t bytes = 0;
        for (size_t i = 0; i < param->extension->count; i++)
            bytes += param->extension->sizes[i];
        return bytes;
    }
    size_t whole = (size_t)fsdp_param_padded_count(param, group->shard_size) * data_size(param);
    return whole / (size_t)parts;
}

static size_t all_input_bytes(const fsdp_group *group, int parts)
{
    size_t bytes = 0;
    for (size_t i = 0; i < group->count; i++)
        bytes += input_bytes(group, group->params[i], parts);
    return bytes;
}

/* --- copy-in ---------------------------------------------------------------------------------- */

static void add_dense(fsdp_rect_list *list, void *to, fsdp_dtype to_type, const void *from,
                      fsdp_dtype from_type, int64_t count)
{
    fsdp_rects_add(list, &(fsdp_rect){.to = to,
                                      .from = from,
                                      .to_type = to_type,
                                      .from_type = from_type,
                                      .rows = 1,
                                      .width = count,
                                      .to_pitch = count,
                                      .from_pitch = count});
}

/* The slices that were kept, or the padded shards. */
static void list_inputs(fsdp_group *group, unsigned char *at, int parts, fsdp_stream *stream)
{
    const unsigned char *kept = group->again_shard ? group->again_shard->data : NULL;
    for (size_t i = 0; i < group->count; i++) {
        const fsdp_param *param = group->params[i];
        size_t bytes = input_bytes(group, param, parts);
        if (group->state == FSDP_IS_SHARDED_AGAIN) {
            add_dense(&group->rects_in, at, FSDP_U8, kept, FSDP_U8, (int64_t)bytes);
            kept += bytes;
        } else if (param->extension) {
            fsdp_work_pre_extension(stream, param, at);
        } else {
            add_dense(&group->rects_in, at, param->data_dtype, param->shard, param->dtype,
                      param->padded);
        }
        at += bytes;
    }
}

static fsdp_status copy_in(fsdp_group *group, unsigned char *at, int parts, fsdp_stream *stream,
                           fsdp_error *err)
{
    FSDP_TRY(fsdp_rects_begin(&group->rects_in, group->count, err));
    list_inputs(group, at, parts, stream);
    fsdp_work_rects(stream, &group->rects_in);
    fsdp_trace_copy(group, "copy_in", stream->name, (int64_t)all_input_bytes(group, parts));
    return FSDP_OK;
}

/* --- all-gather ------------------------------------------------------------------------------- */

static void gather(fsdp_group *group, const gather_side *side, size_t bytes, fsdp_stream *stream)
{
    fsdp_dtype wire = group->wire;
    unsigned char *all = group->gather.block->data;
    const fsdp_collective call = {.kind = FSDP_ALL_GATHER,
                                  .dtype = wire,
                                  .in = all + (size_t)side->rank * bytes,
                                  .out = all,
                                  .count = (int64_t)(bytes / fsdp_dtype_size(wire)),
                                  .unit = group->unit->name};
    fsdp_work_collective(stream, side->lane, &call, group->unit->custom_gather);
    fsdp_trace_collective(group, side->lane, &call, stream->name);
}

/* What the side streams need to know of the compute stream. */
static void follow_reshard(fsdp_group *group, fsdp_stream *in, fsdp_stream *out)
{
    const fsdp_device_ops *ops = in->device->ops;
    if (!group->resharded.stream)
        return;
    ops->wait(in, group->resharded);
    ops->wait(out, group->resharded);
    group->resharded = (fsdp_event){0};
}

/* The host waits until what was gathered before the last two has been given back: it may run ahead, but the
 * memory of its gathers stays bounded. */
static fsdp_status limit_gathers(fsdp_context *context, fsdp_error *err)
{
    if (!context->limits_gathers || context->freed_count < FSDP_MOST_GATHERS)
        return FSDP_OK;
    fsdp_event oldest = context->freed[0];
    context->freed[0] = context->freed[1];
    context->freed_count--;
    return context->device->ops->sync(oldest, err);
}

static void note_freed(fsdp_context *context, fsdp_event event)
{
    if (context->freed_count == FSDP_MOST_GATHERS) {
        context->freed[0] = context->freed[1];
        context->freed_count--;
    }
    context->freed[context->freed_count++] = event;
}

static fsdp_status issue(fsdp_group *group, bool is_async, fsdp_error *err)
{
    fsdp_context *context = fsdp_group_context(group);
    FSDP_TRY(limit_gathers(context, err));
    bool aside = uses_side_streams(group, is_async);
    fsdp_stream *in = context->streams[aside ? FSDP_STREAM_COPY_IN : FSDP_STREAM_COMPUTE];
    fsdp_stream *out = context->streams[aside ? FSDP_STREAM_ALL_GATHER : FSDP_STREAM_COMPUTE];
    const gather_side side = side_of(group);
    size_t bytes = all_input_bytes(group, side.parts);
    fsdp_comm *comm = group->unit->takes_comm_memory && side.lane ? side.lane->comm : NULL;
    follow_reshard(group, in, out);
    FSDP_TRY(fsdp_memory_take(&context->memory, FSDP_MEMORY_ALL_GATHER, in, comm,
                              bytes * (size_t)side.parts, 0, group->unit->name,
                              &group->gather.block, err));
    context->gather_count++;
    unsigned char *mine = (unsigned char *)group->gather.block->data + (size_t)side.rank * bytes;
    FSDP_TRY(copy_in(group, mine, side.parts, in, err));
    fsdp_stream_follow(out, in);
    if (side.parts > 1)
        gather(group, &side, bytes, out);
    group->gather.event = out->device->ops->record(out);
    group->gather.parts = side.parts;
    group->gather.is_async = is_async;
    return FSDP_OK;
}

fsdp_status fsdp_group_unshard(fsdp_group *group, bool is_async, fsdp_error *err)
{
    bool is_wanted = group->unit->unshards_in_backward || group->phase != FSDP_PRE_BACKWARD;
    if (group->gather.block || group->state == FSDP_IS_UNSHARDED || group->count == 0 || !is_wanted)
        return FSDP_OK;
    fsdp_trace_unit(group, "unshard");
    return issue(group, is_async, err);
}

/* --- copy-out --------------------------------------------------------------------------------- */

/* Along dim 0, and of slices that were kept, the parts lie one behind the other in the parameter: rows of one
 * rectangle, when the pitch is a number of elements. Along other dims they lie side by side. */
static void list_outputs(fsdp_group *group, const fsdp_param *param, const unsigned char *from,
                         size_t stride)
{
    int64_t parts = group->gather.parts;
    size_t size = data_size(param);
    int64_t each = fsdp_param_padded_count(param, group->shard_size) / parts;
    bool behind = group->state == FSDP_IS_SHARDED_AGAIN || param->outer == 1;
    bool is_one = behind && stride % size == 0;
    int64_t rows = behind ? 1 : param->outer;
    int64_t width = each / rows;
    fsdp_rect rect = {.to = param->data,
                      .from = from,
                      .to_type = param->data_dtype,
                      .from_type = param->data_dtype,
                      .rows = is_one ? parts : rows,
                      .width = width,
                      .to_pitch = is_one ? width : width * parts,
                      .from_pitch = is_one ? (int64_t)(stride / size) : width};
    for (int64_t part = 0; part < (is_one ? 1 : parts); part++) {
        fsdp_rects_add(&group->rects_out, &rect);
        rect.to = (unsigned char *)rect.to + (size_t)width * size;
        rect.from = (const unsigned char *)rect.from + stride;
    }
}

static size_t data_bytes(const fsdp_group *group, const fsdp_param *param)
{
    return (size_t)fsdp_param_padded_count(param, group->shard_size) * data_size(param);
}

enum { ALIGNMENT = 64 };

static size_t align(size_t offset)
{
    return (offset + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* One block for the parameters of the group, which find their places in it. */
static fsdp_status take_unsharded(fsdp_group *group, fsdp_error *err)
{
    fsdp_context *context = fsdp_group_context(group);
    size_t bytes = 0, offset = 0;
    for (size_t i = 0; i < group->count; i++)
        bytes += data_bytes(group, group->params[i]);
    if (!group->unsharded)
        FSDP_TRY(fsdp_memory_take(
            &context->memory, FSDP_MEMORY_UNSHARDED, context->streams[FSDP_STREAM_COMPUTE], NULL,
            bytes, group->count * ALIGNMENT, group->unit->name, &group->unsharded, err));
    for (size_t i = 0; i < group->count; i++) {
        group->params[i]->data = (unsigned char *)group->unsharded->data + offset;
        offset += align(data_bytes(group, group->params[i]));
    }
    return FSDP_OK;
}

static fsdp_status copy_out(fsdp_group *group, fsdp_stream *compute, fsdp_error *err)
{
    int parts = group->gather.parts;
    size_t stride = all_input_bytes(group, parts);
    const unsigned char *from = group->gather.block->data;
    FSDP_TRY(fsdp_rects_begin(&group->rects_out, group->count * (size_t)parts, err));
    for (size_t i = 0; i < group->count; i++) {
        const fsdp_param *param = group->params[i];
        if (param->extension && group->state != FSDP_IS_SHARDED_AGAIN)
            fsdp_work_post_extension(compute, param, from, stride);
        else
            list_outputs(group, param, from, stride);
        from += input_bytes(group, param, parts);
    }
    fsdp_work_rects(compute, &group->rects_out);
    fsdp_trace_copy(group, "copy_out", compute->name, (int64_t)(stride * (size_t)parts));
    return FSDP_OK;
}

/* Frees a flat buffer once the streams that fill the next one have waited for what read it. */
static void give_gather(fsdp_context *context, fsdp_gather *gather_taken, fsdp_event read)
{
    fsdp_stream *out = context->streams[FSDP_STREAM_ALL_GATHER];
    if (!gather_taken->block)
        return;
    out->device->ops->wait(out, read);
    fsdp_memory_give(&context->memory, gather_taken->block, read);
    *gather_taken = (fsdp_gather){0};
}

void fsdp_context_flush_gather(fsdp_context *context)
{
    give_gather(context, &context->deferred, context->deferred_event);
}

void fsdp_group_drop_gather(fsdp_group *group)
{
    fsdp_group_context(group)->gather_count -= group->gather.block != NULL;
    give_gather(fsdp_group_context(group), &group->gather, group->gather.event);
}

static void give_again_shard(fsdp_group *group, fsdp_event read)
{
    fsdp_memory_give(&fsdp_group_context(group)->memory, group->again_shard, read);
    group->again_shard = NULL;
}

/* In forward the flat buffer is kept until the next gather was issued, so that this copy-out and that gather
 * overlap; in backward, and when the caller orders by hand, it goes at once. */
fsdp_status fsdp_group_wait_unshard(fsdp_group *group, fsdp_error *err)
{
    fsdp_context *context = fsdp_group_context(group);
    fsdp_stream *compute = context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_device_ops *ops = compute->device->ops;
    if (!group->gather.block)
        return FSDP_OK;
    if (group->phase == FSDP_FORWARD)
        fsdp_context_flush_gather(context);
    ops->wait(compute, group->gather.event);
    FSDP_TRY(take_unsharded(group, err));
    FSDP_TRY(copy_out(group, compute, err));
    fsdp_event read = ops->record(compute);
    give_again_shard(group, read);
    group->state = FSDP_IS_UNSHARDED;
    context->gather_count--;
    if (group->phase == FSDP_FORWARD && !group->gather.is_async) {
        context->deferred = group->gather;
        context->deferred_event = read;
        group->gather = (fsdp_gather){0};
    } else {
        give_gather(context, &group->gather, read);
    }
    return FSDP_OK;
}

/* --- reshard ---------------------------------------------------------------------------------- */

static void give_unsharded(fsdp_group *group)
{
    fsdp_context *context = fsdp_group_context(group);
    fsdp_stream *compute = context->streams[FSDP_STREAM_COMPUTE];
    for (size_t i = 0; i < group->count; i++)
        group->params[i]->data = NULL;
    if (group->unit->keeps_storage)
        return;
    fsdp_memory_give(&context->memory, group->unsharded, compute->device->ops->record(compute));
    group->unsharded = NULL;
}

/* This rank's slice of every gathered parameter, so that fewer ranks can gather it again. */
static fsdp_status keep_slices(fsdp_group *group, fsdp_error *err)
{
    fsdp_context *context = fsdp_group_context(group);
    fsdp_stream *compute = context->streams[FSDP_STREAM_COMPUTE];
    size_t bytes = 0;
    for (size_t i = 0; i < group->count; i++)
        bytes += data_bytes(group, group->params[i]) / (size_t)group->again_size;
    FSDP_TRY(fsdp_rects_begin(&group->rects_in, group->count, err));
    FSDP_TRY(fsdp_memory_take(&context->memory, FSDP_MEMORY_ALL_GATHER, compute, NULL, bytes, 0,
                              group->unit->name, &group->again_shard, err));
    unsigned char *to = group->again_shard->data;
    for (size_t i = 0; i < group->count; i++) {
        const fsdp_param *param = group->params[i];
        size_t slice = data_bytes(group, param) / (size_t)group->again_size;
        const unsigned char *from =
            (const unsigned char *)param->data + (size_t)group->again_rank * slice;
        add_dense(&group->rects_in, to, FSDP_U8, from, FSDP_U8, (int64_t)slice);
        to += slice;
    }
    fsdp_work_rects(compute, &group->rects_in);
    return FSDP_OK;
}

static bool keeps_slices(const fsdp_group *group)
{
    return group->phase == FSDP_FORWARD &&
           group->unit->reshard_after_forward > FSDP_RESHARD_ALWAYS && group->again;
}

fsdp_status fsdp_group_reshard(fsdp_group *group, fsdp_error *err)
{
    fsdp_stream *compute = fsdp_group_context(group)->streams[FSDP_STREAM_COMPUTE];
    bool slices = keeps_slices(group);
    if (group->phase == FSDP_FORWARD && group->unit->reshard_after_forward == FSDP_RESHARD_NEVER)
        return FSDP_OK;
    if (group->state == FSDP_IS_SHARDED_AGAIN && !slices) {
        give_again_shard(group, compute->device->ops->record(compute));
        group->state = FSDP_IS_SHARDED;
    }
    if (group->state != FSDP_IS_UNSHARDED)
        return FSDP_OK;
    if (slices)
        FSDP_TRY(keep_slices(group, err));
    give_unsharded(group);
    group->state = slices ? FSDP_IS_SHARDED_AGAIN : FSDP_IS_SHARDED;
    group->resharded = compute->device->ops->record(compute);
    note_freed(fsdp_group_context(group), group->resharded);
    fsdp_trace_unit(group, "reshard");
    return FSDP_OK;
}
