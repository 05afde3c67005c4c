/*
 * Decides which compressed streams are spooled. It does so before the first read, so that a plan
 * can report them and count the disk space. A stream is decoded forwards only: a reader that
 * needs another order, or the same bytes again, and does not find them in memory would decode
 * the stream many times over.
 */
#include "formats/source/source_internal.h"

#include <limits.h>

/* True when its elements lie in the stream in the order of the box. */
static bool is_in_order(const fsdp_source_chunk *chunk, int ndim)
{
    int64_t last = INT64_MAX;
    for (int d = 0; chunk->strides && d < ndim; d++) {
        if (chunk->len[d] < 2)
            continue;
        if (chunk->strides[d] < 0 || chunk->strides[d] > last)
            return false;
        last = chunk->strides[d];
    }
    return true;
}

/* True when no element of another chunk lies between its first and last element. */
static bool is_run(const fsdp_source_chunk *chunk, const fsdp_source_tensor *tensor)
{
    bool is_cut = false;
    for (int d = tensor->ndim - 1; d >= 0; d--) {
        if (is_cut && chunk->len[d] > 1)
            return false;
        is_cut = is_cut || chunk->len[d] < tensor->shape[d];
    }
    return true;
}

static packed_stream *stream_of(const fsdp_source *source, const fsdp_source_chunk *chunk)
{
    return chunk->stream == FSDP_NO_STREAM ? NULL : source->streams[chunk->stream];
}

/* Chunks side by side are decoded side by side; true when memory holds the rings of all of them. */
static bool fit_together(const fsdp_source *source, const fsdp_source_tensor *tensor)
{
    int64_t room = 0;
    for (size_t i = 0; i < tensor->chunk_count; i++) {
        const packed_stream *stream = stream_of(source, &tensor->chunks[i]);
        if (stream && !is_run(&tensor->chunks[i], tensor))
            room += fsdp_packed_room(source, stream);
        if (room > source->stream_memory)
            return false;
    }
    return true;
}

fsdp_status fsdp_source_announce(fsdp_source *source, size_t number, bool repeated, fsdp_error *err)
{
    const fsdp_source_tensor *tensor = &source->tensors[number];
    if (source->ops.check_memory)
        FSDP_TRY(source->ops.check_memory(source->state, number, err));
    bool fit = source->stream_count == 0 || fit_together(source, tensor);
    for (size_t i = 0; source->stream_count > 0 && i < tensor->chunk_count; i++) {
        const fsdp_source_chunk *chunk = &tensor->chunks[i];
        packed_stream *stream = stream_of(source, chunk);
        if (!stream)
            continue;
        bool fits_alone = fsdp_packed_room(source, stream) >= fsdp_packed_size(stream);
        bool again = repeated || !is_in_order(chunk, tensor->ndim);
        if ((again && !fits_alone) || (!fit && !is_run(chunk, tensor)))
            fsdp_packed_expect_spool(stream);
    }
    return FSDP_OK;
}

void fsdp_source_reading_limits(const fsdp_source *source, int *threads_out, int64_t *bytes_out)
{
    *threads_out = INT_MAX;
    *bytes_out = INT64_MAX;
    for (size_t i = 0; i < source->stream_count; i++) {
        int64_t room = fsdp_packed_room(source, source->streams[i]);
        int64_t together = source->stream_memory / room;
        if (room >= fsdp_packed_size(source->streams[i]))
            continue;
        *bytes_out = room < *bytes_out ? room : *bytes_out;
        if (together < *threads_out)
            *threads_out = together > 1 ? (int)together : 1;
    }
}

int64_t fsdp_source_spool_bytes(const fsdp_source *source)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < source->stream_count; i++) {
        if (fsdp_packed_is_for_spool(source->streams[i]))
            bytes += fsdp_packed_size(source->streams[i]);
    }
    return bytes;
}
