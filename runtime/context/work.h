/*
 * Work for streams: kernels and collectives as pieces of a stream's queue. Memory that a piece points to
 * stays valid until it is done. A list of rectangles records the last work that reads it; filling it again
 * waits for that work.
 */
#ifndef FSDP_WORK_H
#define FSDP_WORK_H

#include "kernels/train/tensor.h"
#include "runtime/launch/world_internal.h"
#include <fsdp/settings.h>

/* Notifies a device that watches (device_watch.c) of a block that the next work of the stream reads or
 * writes. Accepts NULL. */
void fsdp_work_uses(fsdp_stream *stream, const void *data);

/* A point after all that the stream was given until now. */
static inline fsdp_event fsdp_stream_now(fsdp_stream *stream)
{
    return stream->device->ops->record(stream);
}

/* The next work of the stream comes after all that `after` has so far. */
void fsdp_stream_follow(fsdp_stream *stream, fsdp_stream *after);

/* --- copies ------------------------------------------------------------------------------------ */

/* Rectangles for a stream, and its last work with them. */
typedef struct fsdp_rect_list {
    fsdp_rect *items;
    size_t count, room;
    fsdp_event last;
} fsdp_rect_list;

/* Empty, with capacity for `most`: waits until the last work with the list is done. */
fsdp_status fsdp_rects_begin(fsdp_rect_list *list, size_t most, fsdp_error *err);
void fsdp_rects_add(fsdp_rect_list *list, const fsdp_rect *rect);
void fsdp_rects_release(fsdp_rect_list *list);

/* Copies all rectangles of a list. */
void fsdp_work_rects(fsdp_stream *stream, fsdp_rect_list *list);

/* --- collectives ------------------------------------------------------------------------------- */

/* A collective on a communicator, after those that were issued on it before. custom: NULL, or what runs
 * instead of it. counts and unit of the call stay the caller's until it is done. */
void fsdp_work_collective(fsdp_stream *stream, fsdp_ordered_comm *ordered, const fsdp_collective *call,
                          const fsdp_custom_collective *custom);
void fsdp_work_all_reduce_hook(fsdp_stream *stream, fsdp_all_reduce_hook hook, void *context, void *data,
                               fsdp_dtype dtype, int64_t count);

/* --- arithmetic -------------------------------------------------------------------------------- */

void fsdp_work_divide(fsdp_stream *stream, void *data, fsdp_dtype dtype, int64_t count, double divisor);
void fsdp_work_add(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                   int64_t count);
void fsdp_work_cast(fsdp_stream *stream, void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                    int64_t count);

#endif
