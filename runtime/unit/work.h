/*
 * Work that units give to streams: kernels and collectives as pieces of a stream's queue. What a piece points
 * to stays until it is done: lists of rectangles know when they may be written anew.
 */
#ifndef FSDP_WORK_H
#define FSDP_WORK_H

#include "kernels/tensor.h"
#include "runtime/device/device.h"
#include "runtime/unit/unit_internal.h"

/* What the next work of the stream reads or writes: for devices that watch (device_watch.c). Accepts NULL. */
void fsdp_work_uses(fsdp_stream *stream, const void *data);

/* Empty and ready to be filled: waits until the last work with it is done. */
fsdp_status fsdp_rects_begin(fsdp_rect_list *list, size_t most, fsdp_error *err);
void fsdp_rects_add(fsdp_rect_list *list, const fsdp_rect *rect);
void fsdp_rects_release(fsdp_rect_list *list);

/* Copies all rectangles of a list. */
void fsdp_work_rects(fsdp_stream *stream, fsdp_rect_list *list);
/* A collective on a communicator, after those that were issued on it before. custom: NULL, or what runs
 * instead of it. counts and unit of the call stay the caller's until it is done. */
void fsdp_work_collective(fsdp_stream *stream, fsdp_ordered_comm *ordered, const fsdp_collective *call,
                          const fsdp_custom_collective *custom);
void fsdp_work_divide(fsdp_stream *stream, void *data, fsdp_dtype dtype, int64_t count, double divisor);
void fsdp_work_add(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                   int64_t count);
void fsdp_work_cast(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                    int64_t count);
void fsdp_work_all_reduce_hook(fsdp_stream *stream, fsdp_all_reduce_hook hook, void *user, void *data,
                               fsdp_dtype dtype, int64_t count);
/* The extension's inputs lie one behind the other: at `to`, and at `from` and every `stride` bytes
 * behind it. */
void fsdp_work_pre_extension(fsdp_stream *stream, const fsdp_param *param, void *to);
void fsdp_work_post_extension(fsdp_stream *stream, const fsdp_param *param, const void *from, size_t stride);

/* The streams and the memory of a group are those of its root's context. */
static inline fsdp_context *fsdp_group_context(const fsdp_group *group)
{
    return group->unit->root->context;
}

static inline fsdp_stream *fsdp_group_stream(const fsdp_group *group, int which)
{
    return fsdp_group_context(group)->streams[which];
}

/* last_use: of the block, on any stream. */
static inline void fsdp_group_give(const fsdp_group *group, fsdp_block *block, fsdp_event last_use)
{
    fsdp_memory_give(&fsdp_group_context(group)->memory, block, last_use);
}

/* All that the stream was given until now. */
static inline fsdp_event fsdp_stream_now(fsdp_stream *stream)
{
    return stream->device->ops->record(stream);
}

/* stream does what comes next after all that `after` has so far. */
void fsdp_stream_follow(fsdp_stream *stream, fsdp_stream *after);

#endif
