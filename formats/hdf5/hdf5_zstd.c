/*
 * HDF5 filter 32015: one zstd frame per chunk. hdf5_file.c registers it in this process;
 * hdf5_plugin.c builds it into the plugin for other programs. The plugin must load next to any
 * libhdf5, so it links neither libhdf5 nor the library; memory therefore comes from malloc, as
 * libhdf5 requires for buffers that a filter returns.
 *
 * A save makes its frames in kernels/bytes/codec.c and never runs this filter.
 */
#include "formats/hdf5/hdf5_internal.h"

#include <stdlib.h>
#include <zstd.h>

/* HDF5 chunks are smaller than 4 GiB: a frame that claims more is damaged. */
static const unsigned long long largest_chunk = 0xFFFFFFFFULL;

static void replace_buffer(void **buf, size_t *buf_size, void *data, size_t capacity)
{
    free(*buf);
    *buf = data;
    *buf_size = capacity;
}

static size_t compress(int level, size_t size, size_t *buf_size, void **buf)
{
    size_t room = ZSTD_compressBound(size);
    void *frame = ZSTD_isError(room) ? NULL : malloc(room);
    if (!frame)
        return 0;
    size_t frame_size = ZSTD_compress(frame, room, *buf, size, level);
    if (ZSTD_isError(frame_size)) {
        free(frame);
        return 0;
    }
    replace_buffer(buf, buf_size, frame, room);
    return frame_size;
}

static size_t decompress_known(size_t content, size_t size, size_t *buf_size, void **buf)
{
    void *data = malloc(content ? content : 1);
    if (!data)
        return 0;
    size_t n = ZSTD_decompress(data, content, *buf, size);
    if (ZSTD_isError(n)) {
        free(data);
        return 0;
    }
    replace_buffer(buf, buf_size, data, content);
    return n;
}

/* Doubles the output buffer, up to the largest chunk. */
static bool grow_output(ZSTD_outBuffer *out)
{
    if (out->pos < out->size)
        return true;
    if (out->size >= largest_chunk)
        return false;
    size_t size = out->size > largest_chunk / 2 ? (size_t)largest_chunk : 2 * out->size;
    void *data = realloc(out->dst, size);
    if (!data)
        return false;
    out->dst = data;
    out->size = size;
    return true;
}

static bool stream_out(ZSTD_DCtx *context, ZSTD_inBuffer *in, ZSTD_outBuffer *out)
{
    size_t left = 1;
    while (left != 0) {
        if (!grow_output(out))
            return false;
        size_t in_before = in->pos, out_before = out->pos;
        left = ZSTD_decompressStream(context, out, in);
        bool moved = in->pos != in_before || out->pos != out_before;
        if (ZSTD_isError(left) || (left != 0 && !moved))
            return false;
        /* Frames may follow one another. */
        if (left == 0 && in->pos < in->size)
            left = 1;
    }
    return true;
}

/* A streamed frame does not state its size. */
static size_t decompress_unknown(size_t size, size_t *buf_size, void **buf)
{
    ZSTD_inBuffer in = {.src = *buf, .size = size};
    ZSTD_outBuffer out = {.size = ZSTD_DStreamOutSize()};
    out.dst = malloc(out.size);
    ZSTD_DCtx *context = ZSTD_createDCtx();
    bool ok = out.dst && context && stream_out(context, &in, &out);
    ZSTD_freeDCtx(context);
    if (!ok) {
        free(out.dst);
        return 0;
    }
    replace_buffer(buf, buf_size, out.dst, out.size);
    return out.pos;
}

static size_t decompress(size_t size, size_t *buf_size, void **buf)
{
    unsigned long long content = ZSTD_getFrameContentSize(*buf, size);
    if (content == ZSTD_CONTENTSIZE_ERROR)
        return 0;
    if (content == ZSTD_CONTENTSIZE_UNKNOWN)
        return decompress_unknown(size, buf_size, buf);
    return content > largest_chunk ? 0 : decompress_known((size_t)content, size, buf_size, buf);
}

/* values[0] is the level. Returns the size of the data in *buf, 0 for failure. */
static size_t run_filter(unsigned flags, size_t value_count, const unsigned values[], size_t size,
                         size_t *buf_size, void **buf)
{
    if (flags & H5Z_FLAG_REVERSE)
        return decompress(size, buf_size, buf);
    return compress(value_count > 0 ? (int)values[0] : ZSTD_CLEVEL_DEFAULT, size, buf_size, buf);
}

const H5Z_class2_t fsdp_h5_zstd_filter = {
    .version = H5Z_CLASS_T_VERS,
    .id = FSDP_H5_ZSTD,
    .encoder_present = 1,
    .decoder_present = 1,
    .name = "zstd",
    .filter = run_filter,
};
