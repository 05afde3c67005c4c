/*
 * Work that units give to streams: kernels and collectives as pieces of a stream's queue. What a piece points
 * to stays until it is done: lists of rectangles know when they may be written anew.
 */
#ifndef FSDP_WORK_H
#define FSDP_WORK_H

#include "kernels/tensor.h"
#include "runtime/device.h"
#include "runtime/unit_internal.h"

/* Empty and ready to be filled: waits until the last work with it is done. */
fsdp_status fsdp_rects_begin(fsdp_rect_list *list, size_t most, fsdp_error *err);
void fsdp_rects_add(fsdp_rect_list *list, const fsdp_rect *rect);
void fsdp_rects_release(fsdp_rect_list *list);

/* Copies all rectangles of a list. */
void fsdp_work_rects(fsdp_stream *stream, fsdp_rect_list *list);
/* A collective in its lane: after those that were issued on it before. custom: NULL, or in its place. counts
 * and unit of the call stay the caller's until it is done. */
void fsdp_work_collective(fsdp_stream *stream, fsdp_lane *lane, const fsdp_collective *call,
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

/* stream does what comes next after all that `after` has so far. */
void fsdp_stream_follow(fsdp_stream *stream, fsdp_stream *after);

#endif
