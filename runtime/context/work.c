/* Work for streams. See work.h. */
#include "runtime/context/work.h"

#include "base/core/mem.h"

static const fsdp_device_ops *ops_of(const fsdp_stream *stream)
{
    return stream->device->ops;
}

void fsdp_work_uses(fsdp_stream *stream, const void *data)
{
    if (ops_of(stream)->use && data)
        ops_of(stream)->use(stream, data);
}

void fsdp_stream_follow(fsdp_stream *stream, fsdp_stream *after)
{
    if (stream != after)
        ops_of(stream)->wait(stream, ops_of(after)->record(after));
}

/* --- rectangles ------------------------------------------------------------------------------- */

fsdp_status fsdp_rects_begin(fsdp_rect_list *list, size_t most, fsdp_error *err)
{
    /* A GPU took the list with the launch; streams of the host read it when they come there. */
    if (list->last.stream && ops_of(list->last.stream)->is_host)
        FSDP_TRY(ops_of(list->last.stream)->sync(list->last, err));
    list->count = 0;
    if (!fsdp_grow(&list->items, &list->room, most, sizeof *list->items))
        return fsdp_fail_memory(err, "a list of copies");
    return FSDP_OK;
}

void fsdp_rects_add(fsdp_rect_list *list, const fsdp_rect *rect)
{
    if (rect->rows > 0 && rect->width > 0)
        list->items[list->count++] = *rect;
}

void fsdp_rects_release(fsdp_rect_list *list)
{
    fsdp_free(list->items);
    *list = (fsdp_rect_list){0};
}

void fsdp_work_rects(fsdp_stream *stream, fsdp_rect_list *list)
{
    for (size_t i = 0; i < list->count && ops_of(stream)->use; i++) {
        fsdp_work_uses(stream, list->items[i].to);
        fsdp_work_uses(stream, list->items[i].from);
    }
    ops_of(stream)->kernels->rects(stream, list->items, list->count);
    list->last = ops_of(stream)->record(stream);
}

/* --- collectives ------------------------------------------------------------------------------ */

typedef struct collective_args {
    fsdp_comm *comm;
    fsdp_collective call;
    fsdp_custom_collective custom;
} collective_args;

_Static_assert(sizeof(collective_args) <= FSDP_WORK_ARGS, "a collective fits into a stream's work");

static fsdp_status run_collective(void *args, fsdp_error *err)
{
    const collective_args *work = args;
    if (work->custom.run)
        return work->custom.run(work->custom.context, work->comm, &work->call, err);
    return fsdp_comm_run(work->comm, &work->call, err);
}

void fsdp_work_collective(fsdp_stream *stream, fsdp_ordered_comm *ordered,
                          const fsdp_collective *call, const fsdp_custom_collective *custom)
{
    collective_args args = {.comm = ordered->comm, .call = *call};
    if (custom)
        args.custom = *custom;
    ops_of(stream)->wait(stream, ordered->last);
    fsdp_work_uses(stream, call->in);
    fsdp_work_uses(stream, call->out);
    /* custom code is the host's where it may touch the memory */
    if (ops_of(stream)->issue && !(args.custom.run && ops_of(stream)->is_host)) {
        args.call.stream = stream;
        ops_of(stream)->issue(stream, run_collective, &args);
    } else {
        ops_of(stream)->submit(stream, run_collective, &args, sizeof args);
    }
    ordered->last = ops_of(stream)->record(stream);
}

/* --- arithmetic ------------------------------------------------------------------------------- */

void fsdp_work_divide(fsdp_stream *stream, void *data, fsdp_dtype dtype, int64_t count,
                      double divisor)
{
    if (divisor == 1)
        return;
    fsdp_work_uses(stream, data);
    ops_of(stream)->kernels->divide(stream, data, dtype, (size_t)count, divisor);
}

void fsdp_work_add(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from,
                   fsdp_dtype from_type, int64_t count)
{
    fsdp_work_uses(stream, to);
    fsdp_work_uses(stream, from);
    ops_of(stream)->kernels->add(stream, to, to_type, from, from_type, (size_t)count);
}

void fsdp_work_cast(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from,
                    fsdp_dtype from_type, int64_t count)
{
    fsdp_work_uses(stream, to);
    fsdp_work_uses(stream, from);
    if (to_type == from_type) /* to the host's memory, too, without processors of the device */
        ops_of(stream)->kernels->copy(stream, to, from, (size_t)count * fsdp_dtype_size(to_type));
    else
        ops_of(stream)->kernels->cast(stream, to, to_type, from, from_type, (size_t)count);
}

/* --- the user's own --------------------------------------------------------------------------- */

typedef struct hook_args {
    fsdp_all_reduce_hook hook;
    void *context, *data;
    fsdp_dtype dtype;
    int64_t count;
} hook_args;

static fsdp_status run_hook(void *args, fsdp_error *err)
{
    const hook_args *work = args;
    return work->hook(work->context, work->data, work->dtype, work->count, err);
}

void fsdp_work_all_reduce_hook(fsdp_stream *stream, fsdp_all_reduce_hook hook, void *context,
                               void *data, fsdp_dtype dtype, int64_t count)
{
    const hook_args args = {
        .hook = hook, .context = context, .data = data, .dtype = dtype, .count = count};
    fsdp_work_uses(stream, data);
    ops_of(stream)->submit(stream, run_hook, &args, sizeof args);
}
