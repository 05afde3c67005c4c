/*
 * Gathers a group's parameters from the shards of all ranks, and reshards them. In docs/flow_step.md: steps 2
 * to 4. Groups are made, laid out and freed at the end; --check's tests of gathered parameters come first.
 *
 *   part        what it does                                                                  stream
 *   copy-in     padded shards, cast, side by side into this rank's place of one flat buffer   copy_in
 *   all-gather  the flat buffer, in place                                                     all_gather
 *   copy-out    every rank's part of every parameter to its place                             compute
 *
 * Outside forward and backward, and with asynchronous units, all three run on the compute stream. After a
 * reshard to k ranks, the input of the next gather is the slice of the gathered parameters that this rank
 * kept.
 *
 * On device cpu nothing overlaps, so that a gather ahead of time gains nothing. There the last two parts are
 * one, a late gather: it runs when the parameters are due, and copy-out reads the other ranks' memory in
 * place.
 */
#include "runtime/group/group_internal.h"
#include "base/core/mem.h"

#include <string.h>

/* === checks =================================================================================== */

/*
 * With --check: reports gathered parameters that the program changed, since a reshard drops the change, and
 * fills memory without values with NaN, so that a read of it shows. 0xff in every byte is NaN in all floating
 * types but the two FNUZ ones. See launch.h; docs/runtime.md, "Checks".
 */

enum { NO_VALUE = 0xff };

static fsdp_status begin_check(fsdp_group *group, fsdp_error *err)
{
    const fsdp_world *world = group->context->world;
    fsdp_device *device = group->context->device;
    if (!world->parts.check || !device->ops->is_host)
        return FSDP_OK;
    group->gathered = device->ops->alloc_staging(device, group->count * sizeof *group->gathered);
    group->gathered_spans = fsdp_alloc(group->count, sizeof *group->gathered_spans);
    if (!group->gathered || !group->gathered_spans)
        return fsdp_fail_memory(err, group->name);
    return FSDP_OK;
}

static void end_check(fsdp_group *group)
{
    fsdp_device *device = group->context ? group->context->device : NULL;
    if (group->gathered)
        device->ops->dealloc_staging(device, group->gathered,
                                     group->count * sizeof *group->gathered);
    fsdp_free(group->gathered_spans);
    group->gathered = NULL;
    group->gathered_spans = NULL;
}

static size_t checked_bytes(const fsdp_param *param)
{
    return (size_t)fsdp_param_count(param) * fsdp_dtype_size(param->data_dtype);
}

/* --- gathered parameters ------------------------------------------------------------------------ */

/* On the compute stream: hashes of the parameters that were just gathered. */
static void group_note_gathered(fsdp_group *group)
{
    fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    if (!group->gathered)
        return;
    for (size_t i = 0; i < group->count; i++) {
        const fsdp_param *param = group->params[i];
        fsdp_work_uses(compute, param->data);
        group->gathered_spans[i] = (fsdp_span){param->data, FSDP_U8, checked_bytes(param)};
    }
    compute->device->ops->kernels->hashes(compute, group->gathered_spans, group->count,
                                          group->gathered);
}

/* FSDP_ERR_USAGE names a parameter that has changed since. Waits for the compute stream. */
static fsdp_status group_check_gathered(const fsdp_group *group, fsdp_error *err)
{
    if (!group->gathered)
        return FSDP_OK;
    FSDP_TRY(fsdp_context_sync(group->context, err));
    for (size_t i = 0; i < group->count; i++) {
        const fsdp_param *param = group->params[i];
        const fsdp_hash now = fsdp_kernels_get()->hash(param->data, checked_bytes(param));
        if (memcmp(&now, &group->gathered[i], sizeof now) != 0)
            return fsdp_fail(
                err, FSDP_ERR_USAGE,
                "unit %s: '%s' was changed while it was gathered, and resharding drops the change; "
                "change the rows of fsdp_param_shard between steps instead",
                group->name, param->name);
    }
    return FSDP_OK;
}

/* --- no values ---------------------------------------------------------------------------------- */

/* On the compute stream: NaN in the memory of the gathered parameters. */
static void group_spoil_gathered(const fsdp_group *group)
{
    fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    const fsdp_block *block = group->unsharded;
    if (!group->gathered || !block)
        return;
    fsdp_work_uses(compute, block->data);
    compute->device->ops->kernels->fill(compute, block->data, NO_VALUE, block->room);
}

void fsdp_param_spoil_grad(const fsdp_param *param)
{
    fsdp_stream *compute = fsdp_group_stream(param->group, FSDP_STREAM_COMPUTE);
    if (param->group->gathered)
        compute->device->ops->kernels->fill(compute, param->grad->data, NO_VALUE,
                                            param->grad->size);
}

/* === extensions =============================================================================== */

/*
 * Extensions of parameters as work of streams: a gather moves the caller's own bytes instead of a shard. See
 * fsdp_extension in model.h.
 */

typedef struct extension_args {
    const fsdp_param *param;
    void *data; /* post: the parameter that it makes */
    unsigned char *inputs;
    size_t stride;
} extension_args;

/* Addresses of the inputs, which lie one after the other. */
static void find_inputs(const extension_args *work, void **inputs)
{
    const fsdp_extension *extension = work->param->extension;
    unsigned char *at = work->inputs;
    for (size_t i = 0; i < extension->count; i++) {
        inputs[i] = at;
        at += extension->sizes[i];
    }
}

static fsdp_status run_pre(void *args, fsdp_error *err)
{
    const extension_args *work = args;
    const fsdp_extension *extension = work->param->extension;
    void *inputs[FSDP_MAX_EXTENSION_INPUTS];
    find_inputs(work, inputs);
    return extension->pre(extension->context, work->param, work->param->shard, inputs, err);
}

static fsdp_status run_post(void *args, fsdp_error *err)
{
    const extension_args *work = args;
    const fsdp_extension *extension = work->param->extension;
    void *inputs[FSDP_MAX_EXTENSION_INPUTS];
    find_inputs(work, inputs);
    return extension->post(extension->context, work->param, (const void *const *)inputs,
                           work->stride, work->data, err);
}

/* The extension's inputs lie one after the other: at `to`, and at `from` and every `stride` bytes
 * behind it. */
static void work_pre_extension(fsdp_stream *stream, const fsdp_param *param, void *to)
{
    const extension_args args = {.param = param, .inputs = to};
    fsdp_work_uses(stream, param->shard);
    fsdp_work_uses(stream, to);
    stream->device->ops->submit(stream, run_pre, &args, sizeof args);
}

static void work_post_extension(fsdp_stream *stream, const fsdp_param *param, const void *from,
                                size_t stride)
{
    const extension_args args = {
        .param = param, .data = param->data, .inputs = (void *)from, .stride = stride};
    fsdp_work_uses(stream, from);
    fsdp_work_uses(stream, param->data);
    stream->device->ops->submit(stream, run_post, &args, sizeof args);
}

/* === gathers ================================================================================== */

/* --- streams and ranks ------------------------------------------------------------------------ */

/* Gathers outside forward and backward run on the compute stream, whose order is the caller's. */
static bool uses_side_streams(const fsdp_group *group, bool is_async)
{
    return !is_async && (group->phase == FSDP_FORWARD || group->phase == FSDP_PRE_BACKWARD);
}

typedef struct gather_side {
    fsdp_ordered_comm *ordered;
    int parts, rank;
} gather_side;

static gather_side side_of(const fsdp_group *group)
{
    if (group->gather.is_of_slices)
        return (gather_side){group->again, group->again_size, group->again_rank};
    return (gather_side){group->shard, group->shard_size, group->shard_rank};
}

/* --- sizes ------------------------------------------------------------------------------------ */

static size_t data_size(const fsdp_param *param)
{
    return fsdp_dtype_size(param->data_dtype);
}

static bool is_extended(const fsdp_group *group, const fsdp_param *param)
{
    return param->extension && !group->gather.is_of_slices;
}

/* Returns the bytes that each of `parts` ranks contributes for a parameter. */
static size_t input_bytes(const fsdp_group *group, const fsdp_param *param, int parts)
{
    if (is_extended(group, param)) {
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

static void add_line(fsdp_rect_list *list, void *to, fsdp_dtype to_type, const void *from,
                     fsdp_dtype from_type, int64_t count)
{
    const fsdp_rect line = fsdp_rect_line(to, to_type, from, from_type, count);
    fsdp_rects_add(list, &line);
}

/* Offloaded shards come to a device with memory of its own in one copy: kernels that read the host's memory
 * would keep processors of the device waiting. *block_out: NULL where shards are read in place. */
static fsdp_status bring_shards(fsdp_group *group, fsdp_stream *stream, fsdp_block **block_out,
                                fsdp_error *err)
{
    const fsdp_block *shards = group->shards;
    const fsdp_memory_request request = {.class = FSDP_MEMORY_ALL_GATHER,
                                         .stream = stream,
                                         .size = shards->room,
                                         .owner = group->name};
    *block_out = NULL;
    if (!shards->is_staging || stream->device->ops->is_host || group->gather.is_of_slices)
        return FSDP_OK;
    FSDP_TRY(fsdp_memory_take(&group->context->memory, &request, block_out, err));
    fsdp_work_uses(stream, shards->data);
    stream->device->ops->kernels->copy(stream, (*block_out)->data, shards->data, shards->room);
    return FSDP_OK;
}

/* brought: a copy of the shards, or NULL. */
static const void *shard_of(const fsdp_param *param, const fsdp_block *brought)
{
    const unsigned char *first = param->group->shards->data, *shard = param->shard;
    return brought ? (const unsigned char *)brought->data + (shard - first) : shard;
}

/* Inputs are the kept slices, or the padded shards. */
static void list_inputs(fsdp_group *group, const fsdp_block *brought, unsigned char *at, int parts,
                        fsdp_stream *stream)
{
    const unsigned char *kept = group->again_shard ? group->again_shard->data : NULL;
    for (size_t i = 0; i < group->count; i++) {
        const fsdp_param *param = group->params[i];
        size_t bytes = input_bytes(group, param, parts);
        if (group->gather.is_of_slices) {
            add_line(&group->rects_in, at, FSDP_U8, kept, FSDP_U8, (int64_t)bytes);
            kept += bytes;
        } else if (param->extension) {
            work_pre_extension(stream, param, at);
        } else {
            add_line(&group->rects_in, at, param->data_dtype, shard_of(param, brought),
                     param->dtype, param->padded);
        }
        at += bytes;
    }
}

static fsdp_status copy_in(fsdp_group *group, unsigned char *at, int parts, fsdp_stream *stream,
                           fsdp_error *err)
{
    fsdp_block *brought;
    FSDP_TRY(fsdp_rects_begin(&group->rects_in, group->count, err));
    FSDP_TRY(bring_shards(group, stream, &brought, err));
    list_inputs(group, brought, at, parts, stream);
    fsdp_work_rects(stream, &group->rects_in);
    fsdp_group_give(group, brought, fsdp_stream_now(stream));
    fsdp_trace_work(group, "copy_in", stream->name, (int64_t)all_input_bytes(group, parts));
    return FSDP_OK;
}

/* --- all-gather ------------------------------------------------------------------------------- */

static fsdp_collective call_of(const fsdp_group *group, const gather_side *side)
{
    unsigned char *all = group->gather.block->data;
    size_t bytes = all_input_bytes(group, side->parts);
    return (fsdp_collective){.kind = FSDP_ALL_GATHER,
                             .dtype = group->gather_dtype,
                             .in = all + (size_t)side->rank * bytes,
                             .out = all,
                             .count = (int64_t)(bytes / fsdp_dtype_size(group->gather_dtype)),
                             .unit = group->name};
}

static bool has_extensions(const fsdp_group *group)
{
    for (size_t i = 0; i < group->count; i++)
        if (group->params[i]->extension)
            return true;
    return false;
}

/* Equal on all ranks: it decides the order of collectives. A gather outside forward and backward is never
 * late, because a rank may issue it and never wait for it. */
static bool is_late(const fsdp_group *group, const fsdp_stream *stream, bool is_async)
{
    return stream->device->ops->is_at_once && uses_side_streams(group, is_async) &&
           !group->settings->custom_gather && !has_extensions(group);
}

static void gather(fsdp_group *group, const gather_side *side, fsdp_stream *stream)
{
    const fsdp_collective call = call_of(group, side);
    if (!group->gather.is_late)
        fsdp_work_collective(stream, side->ordered, &call, group->settings->custom_gather);
    fsdp_trace_collective(group, side->ordered, &call, stream->name);
}

/* A gather of slices reads what the reshard kept. */
static void follow_reshard(fsdp_group *group, fsdp_stream *in)
{
    in->device->ops->wait(in, group->resharded);
    group->resharded = (fsdp_event){0};
}

/* The host waits until all but the last two gathered blocks were given back, so that memory stays bounded
 * however far the host runs ahead. */
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
    fsdp_context *context = group->context;
    FSDP_TRY(limit_gathers(context, err));
    bool aside = uses_side_streams(group, is_async);
    fsdp_stream *in = context->streams[aside ? FSDP_STREAM_COPY_IN : FSDP_STREAM_COMPUTE];
    fsdp_stream *out = context->streams[aside ? FSDP_STREAM_ALL_GATHER : FSDP_STREAM_COMPUTE];
    group->gather.is_of_slices = group->state == FSDP_IS_SHARDED_AGAIN;
    const gather_side side = side_of(group);
    size_t bytes = all_input_bytes(group, side.parts);
    const fsdp_memory_request request = {
        .class = FSDP_MEMORY_ALL_GATHER,
        .stream = in,
        .allocator = fsdp_group_allocator(group, group->settings->custom_gather, side.ordered),
        .size = bytes * (size_t)side.parts,
        .owner = group->name};
    follow_reshard(group, in);
    FSDP_TRY(fsdp_memory_take(&context->memory, &request, &group->gather.block, err));
    context->gather_count++;
    unsigned char *mine = (unsigned char *)group->gather.block->data + (size_t)side.rank * bytes;
    FSDP_TRY(copy_in(group, mine, side.parts, in, err));
    fsdp_stream_follow(out, in);
    group->gather.is_late = side.parts > 1 && is_late(group, out, is_async);
    if (side.parts > 1)
        gather(group, &side, out);
    group->gather.event = out->device->ops->record(out);
    group->gather.parts = side.parts;
    group->gather.is_async = is_async;
    return FSDP_OK;
}

/* A late gather that is now asked for outside forward and backward runs at once. */
static void make_if_late(fsdp_group *group, bool is_async)
{
    const gather_side side = side_of(group);
    if (!group->gather.block || !group->gather.is_late || uses_side_streams(group, is_async))
        return;
    const fsdp_collective call = call_of(group, &side);
    fsdp_stream *compute = group->context->streams[FSDP_STREAM_COMPUTE];
    compute->device->ops->wait(compute, group->gather.event); /* of the copy-in */
    fsdp_work_collective(compute, side.ordered, &call, NULL);
    group->gather.event = compute->device->ops->record(compute);
    group->gather.is_late = false;
}

fsdp_status fsdp_group_unshard(fsdp_group *group, bool is_async, fsdp_error *err)
{
    make_if_late(group, is_async);
    bool is_wanted = group->settings->unshards_in_backward || group->phase != FSDP_PRE_BACKWARD;
    if (group->gather.block || group->state == FSDP_IS_UNSHARDED || group->count == 0 || !is_wanted)
        return FSDP_OK;
    fsdp_trace_group(group, "unshard");
    return issue(group, is_async, err);
}

/* --- copy-out --------------------------------------------------------------------------------- */

/* The parts of all ranks: one after the other, or at addresses of their own. */
typedef struct gathered {
    const unsigned char *flat;
    size_t stride;
    const void *const *parts; /* NULL: flat */
} gathered;

static const unsigned char *part_of(const gathered *from, int64_t part)
{
    return from->parts ? from->parts[part] : from->flat + (size_t)part * from->stride;
}

/* at: the parameter's offset in every part. Along dim 0, and of kept slices, the parts lie one behind the
 * other in the parameter; along other dims they lie side by side. */
static void list_outputs(fsdp_group *group, const fsdp_param *param, const gathered *from,
                         size_t at)
{
    int64_t parts = group->gather.parts;
    bool behind = group->gather.is_of_slices || param->outer == 1;
    int64_t rows = behind ? 1 : param->outer;
    int64_t width = fsdp_param_padded_count(param, group->shard_size) / parts / rows;
    for (int64_t part = 0; part < parts; part++)
        fsdp_rects_add(&group->rects_out,
                       &(fsdp_rect){.to = (unsigned char *)param->data +
                                          (size_t)(part * width) * data_size(param),
                                    .from = part_of(from, part) + at,
                                    .to_type = param->data_dtype,
                                    .from_type = param->data_dtype,
                                    .rows = rows,
                                    .width = width,
                                    .to_pitch = width * parts,
                                    .from_pitch = width});
}

static void list_all_outputs(fsdp_group *group, const gathered *from)
{
    size_t at = 0;
    for (size_t i = 0; i < group->count; i++) {
        const fsdp_param *param = group->params[i];
        if (!is_extended(group, param))
            list_outputs(group, param, from, at);
        at += input_bytes(group, param, group->gather.parts);
    }
}

static size_t data_bytes(const fsdp_group *group, const fsdp_param *param)
{
    return (size_t)fsdp_param_padded_count(param, group->shard_size) * data_size(param);
}

/* Takes one block for the parameters of the group, and sets their addresses in it. */
static fsdp_status take_unsharded(fsdp_group *group, fsdp_error *err)
{
    fsdp_context *context = group->context;
    size_t bytes = 0, offset = 0;
    for (size_t i = 0; i < group->count; i++)
        bytes += data_bytes(group, group->params[i]);
    const fsdp_memory_request request = {.class = FSDP_MEMORY_UNSHARDED,
                                         .stream = context->streams[FSDP_STREAM_COMPUTE],
                                         .size = bytes,
                                         .slack = group->count * FSDP_MEMORY_ALIGNMENT,
                                         .owner = group->name};
    if (!group->unsharded)
        FSDP_TRY(fsdp_memory_take(&context->memory, &request, &group->unsharded, err));
    for (size_t i = 0; i < group->count; i++) {
        group->params[i]->data = (unsigned char *)group->unsharded->data + offset;
        offset += fsdp_memory_align(data_bytes(group, group->params[i]));
    }
    return FSDP_OK;
}

static void extend(const fsdp_group *group, const gathered *from, fsdp_stream *compute)
{
    const unsigned char *at = from->flat;
    for (size_t i = 0; i < group->count; i++) {
        if (is_extended(group, group->params[i]))
            work_post_extension(compute, group->params[i], at, from->stride);
        at += input_bytes(group, group->params[i], group->gather.parts);
    }
}

static void copy_out_flat(fsdp_group *group, fsdp_stream *compute)
{
    const gathered from = {.flat = group->gather.block->data,
                           .stride = all_input_bytes(group, group->gather.parts)};
    list_all_outputs(group, &from);
    fsdp_work_rects(compute, &group->rects_out);
    extend(group, &from, compute);
}

static void copy_parts(void *context, const void *const *parts)
{
    fsdp_group *group = context;
    list_all_outputs(group, &(gathered){.parts = parts});
    fsdp_rects_copy(group->rects_out.items, group->rects_out.count);
}

/* The collective itself, with copy-out as its view. */
static void copy_out_late(fsdp_group *group, fsdp_stream *compute)
{
    const gather_side side = side_of(group);
    const fsdp_comm_view view = {.see = copy_parts, .context = group};
    fsdp_collective call = call_of(group, &side);
    call.view = &view;
    fsdp_work_uses(compute, group->unsharded->data);
    fsdp_work_collective(compute, side.ordered, &call, NULL);
}

static fsdp_status copy_out(fsdp_group *group, fsdp_stream *compute, fsdp_error *err)
{
    size_t parts = (size_t)group->gather.parts;
    FSDP_TRY(fsdp_rects_begin(&group->rects_out, group->count * parts, err));
    if (group->gather.is_late)
        copy_out_late(group, compute);
    else
        copy_out_flat(group, compute);
    fsdp_trace_work(group, "copy_out", compute->name,
                    (int64_t)(all_input_bytes(group, (int)parts) * parts));
    return FSDP_OK;
}

/* `read`: its last use. */
static void give_gather(fsdp_group *group, fsdp_event read)
{
    fsdp_used_block used = {.block = group->gather.block, .event = read};
    if (!used.block)
        return;
    fsdp_context_give_gather(group->context, &used);
    group->gather = (fsdp_gather){0};
}

void fsdp_group_drop_gather(fsdp_group *group)
{
    group->context->gather_count -= group->gather.block != NULL;
    give_gather(group, group->gather.event);
}

void fsdp_group_cancel_gather(fsdp_group *group)
{
    fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    compute->device->ops->wait(compute, group->gather.event);
    fsdp_group_drop_gather(group);
}

static void give_again_shard(fsdp_group *group, fsdp_event read)
{
    fsdp_memory_give(&group->context->memory, group->again_shard, read);
    group->again_shard = NULL;
}

/* In forward the context keeps the flat buffer until the next gather was issued, so that this copy-out and
 * that gather overlap. In backward, and outside both, the buffer is given back at once. */
fsdp_status fsdp_group_wait_unshard(fsdp_group *group, fsdp_error *err)
{
    fsdp_context *context = group->context;
    fsdp_stream *compute = context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_device_ops *ops = compute->device->ops;
    if (!group->gather.block)
        return FSDP_OK;
    if (group->phase == FSDP_FORWARD)
        fsdp_context_flush_gather(context);
    ops->wait(compute, group->gather.event);
    fsdp_trace_work(group, "wait", compute->name, -1);
    FSDP_TRY(take_unsharded(group, err));
    FSDP_TRY(copy_out(group, compute, err));
    group_note_gathered(group);
    fsdp_event read = ops->record(compute);
    give_again_shard(group, read);
    group->state = FSDP_IS_UNSHARDED;
    context->gather_count--;
    if (group->phase == FSDP_FORWARD && !group->gather.is_async) {
        context->deferred = (fsdp_used_block){.block = group->gather.block, .event = read};
        group->gather = (fsdp_gather){0};
    } else {
        give_gather(group, read);
    }
    return FSDP_OK;
}

/* --- reshard ---------------------------------------------------------------------------------- */

static void give_unsharded(fsdp_group *group)
{
    fsdp_context *context = group->context;
    fsdp_stream *compute = context->streams[FSDP_STREAM_COMPUTE];
    group_spoil_gathered(group);
    for (size_t i = 0; i < group->count; i++)
        group->params[i]->data = NULL;
    if (group->settings->keeps_storage)
        return;
    fsdp_memory_give(&context->memory, group->unsharded, compute->device->ops->record(compute));
    group->unsharded = NULL;
}

/* Keeps this rank's slice of every gathered parameter, from which k ranks can gather it again. */
static fsdp_status keep_slices(fsdp_group *group, fsdp_error *err)
{
    fsdp_context *context = group->context;
    fsdp_stream *compute = context->streams[FSDP_STREAM_COMPUTE];
    size_t bytes = 0;
    for (size_t i = 0; i < group->count; i++)
        bytes += data_bytes(group, group->params[i]) / (size_t)group->again_size;
    FSDP_TRY(fsdp_rects_begin(&group->rects_in, group->count, err));
    const fsdp_memory_request request = {
        .class = FSDP_MEMORY_ALL_GATHER, .stream = compute, .size = bytes, .owner = group->name};
    FSDP_TRY(fsdp_memory_take(&context->memory, &request, &group->again_shard, err));
    unsigned char *to = group->again_shard->data;
    for (size_t i = 0; i < group->count; i++) {
        const fsdp_param *param = group->params[i];
        size_t slice = data_bytes(group, param) / (size_t)group->again_size;
        const unsigned char *from =
            (const unsigned char *)param->data + (size_t)group->again_rank * slice;
        add_line(&group->rects_in, to, FSDP_U8, from, FSDP_U8, (int64_t)slice);
        to += slice;
    }
    fsdp_work_rects(compute, &group->rects_in);
    return FSDP_OK;
}

static bool keeps_slices(const fsdp_group *group)
{
    return group->phase == FSDP_FORWARD &&
           group->settings->reshard_after_forward > FSDP_RESHARD_ALWAYS && group->again;
}

fsdp_status fsdp_group_reshard(fsdp_group *group, fsdp_error *err)
{
    fsdp_stream *compute = group->context->streams[FSDP_STREAM_COMPUTE];
    bool slices = keeps_slices(group);
    if (group->phase == FSDP_FORWARD &&
        group->settings->reshard_after_forward == FSDP_RESHARD_NEVER)
        return FSDP_OK;
    if (group->state == FSDP_IS_SHARDED_AGAIN && !slices) {
        give_again_shard(group, group->gather.event); /* which may read the slices */
        group->state = FSDP_IS_SHARDED;
    }
    if (group->state != FSDP_IS_UNSHARDED)
        return FSDP_OK;
    FSDP_TRY(group_check_gathered(group, err));
    if (slices)
        FSDP_TRY(keep_slices(group, err));
    give_unsharded(group);
    group->state = slices ? FSDP_IS_SHARDED_AGAIN : FSDP_IS_SHARDED;
    group->resharded = compute->device->ops->record(compute);
    note_freed(group->context, group->resharded);
    fsdp_trace_group(group, "reshard");
    return FSDP_OK;
}

/* === groups =================================================================================== */

/* Groups are made, laid out and freed. */

fsdp_status fsdp_group_take_params(fsdp_group *group, fsdp_param *const *params, size_t count,
                                   const fsdp_mesh *mesh, fsdp_error *err)
{
    group->params = fsdp_alloc(count, sizeof *group->params);
    group->ranks = fsdp_alloc((size_t)fsdp_mesh_size(mesh), sizeof *group->ranks);
    if (!group->params || !group->ranks)
        return fsdp_fail_memory(err, group->name);
    for (size_t i = 0; i < count; i++) {
        if (params[i]->group || !fsdp_mesh_equal(params[i]->cut.mesh, mesh))
            continue;
        params[i]->group = group;
        group->params[group->count++] = params[i];
    }
    return begin_check(group, err);
}

/* --- sizes ------------------------------------------------------------------------------------ */

enum { WIDEST = 16 }; /* bytes of an element */

/* The most bytes that a gather or a reduction moves for a parameter; false: beyond all memory. */
static bool add_most_bytes(const fsdp_param *param, int ranks, int64_t *sum)
{
    const fsdp_extension *extension = param->extension;
    int64_t bytes;
    if (fsdp_mul_overflow(param->padded, ranks, &bytes) ||
        fsdp_mul_overflow(bytes, WIDEST, &bytes) || fsdp_add_overflow(*sum, bytes, sum) ||
        fsdp_add_overflow(*sum, FSDP_MEMORY_ALIGNMENT, sum))
        return false;
    for (size_t i = 0; extension && i < extension->count; i++)
        if (extension->sizes[i] > INT64_MAX ||
            fsdp_mul_overflow((int64_t)extension->sizes[i], ranks, &bytes) ||
            fsdp_add_overflow(*sum, bytes, sum))
            return false;
    return true;
}

/* Sizes of the group's buffers are sums of these, so that no later sum overflows. */
static fsdp_status check_sizes(const fsdp_group *group, fsdp_error *err)
{
    int64_t sum = 0;
    for (size_t i = 0; i < group->count; i++)
        if (!add_most_bytes(group->params[i], group->shard_size, &sum))
            return fsdp_fail(err, FSDP_ERR_LIMIT,
                             "unit %s is too large: its parameters up to '%s' have more bytes than "
                             "can be counted",
                             group->name, group->params[i]->name);
    return FSDP_OK;
}

static fsdp_status lay_out(fsdp_group *group, fsdp_error *err)
{
    for (size_t i = 0; i < group->count; i++) {
        const fsdp_param *param = group->params[i];
        FSDP_TRY(fsdp_param_lay_out(group->params[i], &group->roles, group->name, err));
        bool is_alike = i == 0 || group->gather_dtype == param->data_dtype;
        group->gather_dtype = is_alike && !param->extension ? param->data_dtype : FSDP_U8;
    }
    return check_sizes(group, err);
}

static size_t shard_bytes(const fsdp_param *param)
{
    return (size_t)param->padded * fsdp_dtype_size(param->dtype);
}

fsdp_status fsdp_group_allocate(fsdp_group *group, fsdp_error *err)
{
    fsdp_memory_request request = {.class = FSDP_MEMORY_SHARD,
                                   .stream = fsdp_group_stream(group, FSDP_STREAM_COMPUTE),
                                   .is_staging = group->settings->offloads,
                                   .slack = group->count * FSDP_MEMORY_ALIGNMENT,
                                   .owner = group->name};
    FSDP_TRY(lay_out(group, err));
    for (size_t i = 0; i < group->count; i++)
        request.size += shard_bytes(group->params[i]);
    FSDP_TRY(fsdp_memory_take_zeroed(&group->context->memory, &request, &group->shards, err));
    unsigned char *at = group->shards->data;
    for (size_t i = 0; i < group->count; i++) {
        group->params[i]->shard = at;
        at += fsdp_memory_align(shard_bytes(group->params[i]));
    }
    return FSDP_OK;
}

/* --- between steps ---------------------------------------------------------------------------- */

void fsdp_group_drop(fsdp_group *group)
{
    fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    fsdp_group_drop_gather(group);
    fsdp_group_drop_kept(group);
    fsdp_group_drop_grads(group);
    fsdp_group_give(group, group->again_shard, fsdp_stream_now(compute));
    fsdp_group_give(group, group->unsharded, fsdp_stream_now(compute));
    group->again_shard = group->unsharded = NULL;
    group->state = FSDP_IS_SHARDED;
    group->phase = FSDP_IDLE;
    group->order_count = 0;
    group->next_gather = NULL;
}

bool fsdp_group_is_at_rest(const fsdp_group *group)
{
    bool has_blocks = group->gather.block || group->unsharded || group->again_shard ||
                      group->partial.block || group->grad_count > 0;
    for (size_t i = 0; i < group->count; i++)
        has_blocks = has_blocks || group->params[i]->grad || group->params[i]->kept;
    return group->state == FSDP_IS_SHARDED && !has_blocks;
}

void fsdp_group_enter(fsdp_group *group, fsdp_context *context)
{
    const fsdp_event none = {0}; /* the old events were reached, and their streams may be freed */
    fsdp_memory_pass(&group->context->memory, &context->memory, group->shards,
                     context->streams[FSDP_STREAM_COMPUTE]);
    group->context = context;
    group->resharded = group->reduced = none;
    group->rects_in.last = group->rects_out.last = group->rects_reduce.last = none;
}

void fsdp_group_release(fsdp_group *group)
{
    for (size_t p = 0; p < group->count; p++) {
        group->params[p]->group = NULL;
        group->params[p]->mesh = NULL;
        group->params[p]->shard = NULL;
    }
    fsdp_rects_release(&group->rects_in);
    fsdp_rects_release(&group->rects_out);
    fsdp_rects_release(&group->rects_reduce);
    fsdp_free(group->params);
    fsdp_free(group->ranks);
    fsdp_free(group->order);
    fsdp_free(group->grads);
    end_check(group);
    fsdp_mesh_free(group->made_mesh);
}
