/*
 * The codec: byte shuffle and one zstd frame per block, the form in which compressed chunks lie in
 * shard files. The frames are ordinary: any zstd reads them back, and so does HDF5's filter 32015.
 */
#include "base/mem.h"
#include "kernels/kernels.h"

#include <string.h>
#define ZSTD_STATIC_LINKING_ONLY
#include <zstd.h>
#include <zstd_errors.h>

/* As negative as zstd goes to useful effect: no matches are searched for. */
enum { LEVEL_WITHOUT_MATCHES = -1000, LEVEL_MOST = 19 };

struct fsdp_codec {
    ZSTD_CCtx *encoder;
    ZSTD_DCtx *decoder;
    uint8_t *scratch; /* the shuffled bytes */
    size_t scratch_size;
};

static void *zstd_alloc(void *opaque, size_t size)
{
    (void)opaque;
    return fsdp_realloc(NULL, 1, size);
}

static void zstd_free(void *opaque, void *data)
{
    (void)opaque;
    fsdp_free(data);
}

static bool set_level(ZSTD_CCtx *encoder, int level)
{
    if (level != FSDP_CODEC_HUFFMAN)
        return !ZSTD_isError(ZSTD_CCtx_setParameter(encoder, ZSTD_c_compressionLevel, level));
    return !ZSTD_isError(
               ZSTD_CCtx_setParameter(encoder, ZSTD_c_compressionLevel, LEVEL_WITHOUT_MATCHES)) &&
           !ZSTD_isError(
               ZSTD_CCtx_setParameter(encoder, ZSTD_c_literalCompressionMode, ZSTD_ps_enable));
}

fsdp_status fsdp_codec_create(int level, fsdp_codec **codec_out, fsdp_error *err)
{
    if (level < FSDP_CODEC_HUFFMAN || level > LEVEL_MOST)
        return fsdp_fail(err, FSDP_ERR_USAGE, "compression level %d is not in 0 to %d", level,
                         LEVEL_MOST);
    fsdp_codec *codec = fsdp_alloc(1, sizeof *codec);
    if (!codec)
        return fsdp_fail_memory(err, "a codec");
    ZSTD_customMem memory = {.customAlloc = zstd_alloc, .customFree = zstd_free};
    codec->encoder = ZSTD_createCCtx_advanced(memory);
    codec->decoder = ZSTD_createDCtx_advanced(memory);
    if (!codec->encoder || !codec->decoder) {
        fsdp_codec_free(codec);
        return fsdp_fail_memory(err, "a zstd context");
    }
    if (!set_level(codec->encoder, level)) {
        fsdp_codec_free(codec);
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "zstd %s does not take level %d",
                         ZSTD_versionString(), level);
    }
    *codec_out = codec;
    return FSDP_OK;
}

void fsdp_codec_free(fsdp_codec *codec)
{
    if (!codec)
        return;
    ZSTD_freeCCtx(codec->encoder);
    ZSTD_freeDCtx(codec->decoder);
    fsdp_free(codec->scratch);
    fsdp_free(codec);
}

size_t fsdp_codec_bound(size_t size)
{
    return ZSTD_compressBound(size);
}

static fsdp_status reserve_scratch(fsdp_codec *codec, size_t size, fsdp_error *err)
{
    if (size <= codec->scratch_size)
        return FSDP_OK;
    fsdp_free(codec->scratch);
    codec->scratch_size = 0;
    codec->scratch = fsdp_alloc_pages(size);
    if (!codec->scratch)
        return fsdp_fail_memory(err, "the codec's scratch buffer");
    codec->scratch_size = size;
    return FSDP_OK;
}

static fsdp_status check_elements(size_t size, size_t element_size, fsdp_error *err)
{
    if (element_size > 0 && size % element_size == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "%zu bytes are not whole elements of %zu bytes", size,
                     element_size);
}

fsdp_status fsdp_codec_encode(fsdp_codec *codec, const void *from, size_t size, size_t element_size,
                              void *to, size_t room, size_t *size_out, fsdp_error *err)
{
    FSDP_TRY(check_elements(size, element_size, err));
    const void *packed = from;
    if (element_size > 1) {
        FSDP_TRY(reserve_scratch(codec, size, err));
        fsdp_kernels_get()->shuffle(codec->scratch, from, size, element_size);
        packed = codec->scratch;
    }
    size_t made = ZSTD_compress2(codec->encoder, to, room, packed, size);
    if (ZSTD_getErrorCode(made) == ZSTD_error_memory_allocation)
        return fsdp_fail_memory(err, "compressing a block");
    if (ZSTD_isError(made))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "cannot compress %zu bytes into room for %zu: %s",
                         size, room, ZSTD_getErrorName(made));
    *size_out = made;
    return FSDP_OK;
}

/* zstd takes several frames in a row, and skippable ones, for one input; we take one frame. */
static fsdp_status check_frame(const void *from, size_t from_size, size_t size, fsdp_error *err)
{
    const uint32_t magic = ZSTD_MAGICNUMBER;
    uint8_t start[4];
    for (int i = 0; i < 4; i++)
        start[i] = (uint8_t)(magic >> 8 * i);
    if (from_size < sizeof start || memcmp(from, start, sizeof start) != 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "%zu compressed bytes are no zstd frame",
                         from_size);
    unsigned long long content = ZSTD_getFrameContentSize(from, from_size);
    if (content == ZSTD_CONTENTSIZE_ERROR || content == ZSTD_CONTENTSIZE_UNKNOWN)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "the zstd frame of %zu bytes does not tell its content's size", from_size);
    if (content != size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "the zstd frame holds %llu bytes, expected %zu",
                         content, size);
    size_t frame = ZSTD_findFrameCompressedSize(from, from_size);
    if (ZSTD_isError(frame))
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "the zstd frame of %zu bytes is damaged: %s",
                         from_size, ZSTD_getErrorName(frame));
    if (frame != from_size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "%zu bytes follow the zstd frame of %zu bytes",
                         from_size - frame, frame);
    return FSDP_OK;
}

/* In one call, straight into the target: no window is kept, whatever size the frame asks for. */
static fsdp_status decompress(fsdp_codec *codec, const void *from, size_t from_size, void *to,
                              size_t size, fsdp_error *err)
{
    FSDP_TRY(check_frame(from, from_size, size, err));
    size_t made = ZSTD_decompressDCtx(codec->decoder, to, size, from, from_size);
    if (ZSTD_getErrorCode(made) == ZSTD_error_memory_allocation)
        return fsdp_fail_memory(err, "decompressing a block");
    if (ZSTD_isError(made))
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "the zstd frame of %zu bytes is damaged: %s",
                         from_size, ZSTD_getErrorName(made));
    if (made != size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "the zstd frame gave %zu bytes, expected %zu", made,
                         size);
    return FSDP_OK;
}

fsdp_status fsdp_codec_decode(fsdp_codec *codec, const void *from, size_t from_size,
                              size_t element_size, void *to, size_t size, fsdp_error *err)
{
    FSDP_TRY(check_elements(size, element_size, err));
    if (element_size == 1)
        return decompress(codec, from, from_size, to, size, err);
    FSDP_TRY(check_frame(from, from_size, size, err));
    FSDP_TRY(reserve_scratch(codec, size, err));
    FSDP_TRY(decompress(codec, from, from_size, codec->scratch, size, err));
    fsdp_kernels_get()->unshuffle(to, codec->scratch, size, element_size);
    return FSDP_OK;
}
