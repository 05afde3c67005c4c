/*
 * The codec: byte shuffle and one zstd frame per block, the form in which compressed chunks lie in
 * shard files. The frames are ordinary: any zstd reads them back, and so does HDF5's filter 32015.
 *
 * Shuffled floats begin with the low bytes of their mantissas, which are noise. With entropy coding
 * alone zstd does not see them: the frame begins with these bytes as raw blocks and continues with the
 * blocks that zstd makes of the rest.
 */
#include "base/core/mem.h"
#include "kernels/kernels.h"

#include <string.h>
#define ZSTD_STATIC_LINKING_ONLY
#include <zstd.h>
#include <zstd_errors.h>

/* A level so low that zstd searches for no matches. */
enum { LEVEL_WITHOUT_MATCHES = -1000, LEVEL_MOST = 19 };

struct fsdp_codec {
    ZSTD_CCtx *encoder;
    ZSTD_DCtx *decoder;
    uint8_t *scratch; /* the shuffled bytes */
    size_t scratch_size;
    bool skips_noise;
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
    codec->skips_noise = level == FSDP_CODEC_HUFFMAN;
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

/* --- noise ------------------------------------------------------------------------------------ */

enum {
    NOISE_LEAST = 64 << 10, /* bytes of a plane that is looked at */
    SAMPLES = 16,
    SAMPLE_BYTES = 1 << 10,
    FRAME_HEADER_BYTES = 9,
    RAW_BLOCK_BYTES = 128 << 10,
    RAW_BLOCK_HEADER = 3
};

/*
 * True when entropy coding gains nothing, judged by the sum of squared frequencies of sampled bytes:
 * Shannon's entropy is at least the collision entropy, and zstd wants a larger gain than 0.1 bit a byte.
 */
static bool is_noise(const uint8_t *plane, size_t size)
{
    const uint64_t total = SAMPLES * SAMPLE_BYTES, limit = total * total / 256 * 107 / 100;
    uint32_t counts[256] = {0};
    uint64_t squares = 0;
    for (size_t s = 0; s < SAMPLES; s++) {
        const uint8_t *sample = plane + (size - SAMPLE_BYTES) / (SAMPLES - 1) * s;
        for (size_t i = 0; i < SAMPLE_BYTES; i++)
            counts[sample[i]]++;
    }
    for (size_t i = 0; i < 256; i++)
        squares += (uint64_t)counts[i] * counts[i];
    return squares <= limit;
}

/* Bytes of the leading planes that are noise; a last byte at least is left for zstd to end with. */
static size_t leading_noise(const uint8_t *shuffled, size_t size, size_t element_size)
{
    size_t plane = size / element_size, noise = 0;
    if (plane < NOISE_LEAST || size > UINT32_MAX)
        return 0;
    while (noise + plane < size && is_noise(shuffled + noise, plane))
        noise += plane;
    return noise;
}

static void put_u32(uint8_t *to, uint32_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        to[i] = (uint8_t)(value >> 8 * i);
}

/* A frame's header, content size in four bytes, and raw blocks, none of them the last. */
static size_t begin_frame(uint8_t *to, const uint8_t *noise, size_t noise_size, size_t size)
{
    const uint8_t single_segment_size_of_4_bytes = 0xA0;
    size_t at = FRAME_HEADER_BYTES;
    put_u32(to, ZSTD_MAGICNUMBER, 4);
    to[4] = single_segment_size_of_4_bytes;
    put_u32(to + 5, (uint32_t)size, 4);
    for (size_t done = 0; done < noise_size;) {
        size_t n = noise_size - done < RAW_BLOCK_BYTES ? noise_size - done : RAW_BLOCK_BYTES;
        put_u32(to + at, (uint32_t)n << 3, RAW_BLOCK_HEADER);
        memcpy(to + at + RAW_BLOCK_HEADER, noise + done, n);
        at += RAW_BLOCK_HEADER + n;
        done += n;
    }
    return at;
}

/* Size of the header of a frame that states its content size and has no window. */
static size_t header_size(size_t content)
{
    return content < 256 ? 6 : content < 65536 + 256 ? 7 : FRAME_HEADER_BYTES;
}

/*
 * Makes a zstd frame of the rest so that its blocks follow the raw blocks. The frame's header overwrites
 * their last bytes, which are restored afterwards. Its first block refers to nothing before it, so it is
 * valid at any place. Returns the size, or zstd's error.
 */
static size_t encode_behind_noise(fsdp_codec *codec, const uint8_t *shuffled, size_t size,
                                  size_t noise, uint8_t *to, size_t room)
{
    size_t rest = size - noise, header = header_size(rest);
    size_t at = begin_frame(to, shuffled, noise, size) - header;
    uint8_t covered[FRAME_HEADER_BYTES];
    memcpy(covered, to + at, header);
    size_t made = ZSTD_compress2(codec->encoder, to + at, room - at, shuffled + noise, rest);
    if (ZSTD_isError(made))
        return made;
    size_t stated = ZSTD_frameHeaderSize(to + at, made);
    if (ZSTD_isError(stated))
        return stated;
    if (stated != header)
        memmove(to + at + header, to + at + stated, made - stated);
    memcpy(to + at, covered, header);
    return at + header + made - stated;
}

/* --- encode, decode --------------------------------------------------------------------------- */

fsdp_status fsdp_codec_encode(fsdp_codec *codec, const fsdp_coding *coding, size_t *size_out,
                              fsdp_error *err)
{
    const void *packed = coding->from;
    void *to = coding->to;
    size_t size = coding->from_size, room = coding->to_size, noise = 0;
    FSDP_TRY(check_elements(size, coding->element_size, err));
    if (coding->element_size > 1) {
        FSDP_TRY(reserve_scratch(codec, size, err));
        fsdp_kernels_get()->shuffle(codec->scratch, coding->from, size, coding->element_size);
        packed = codec->scratch;
        if (codec->skips_noise)
            noise = leading_noise(packed, size, coding->element_size);
    }
    size_t made = noise > 0 ? encode_behind_noise(codec, packed, size, noise, to, room)
                            : ZSTD_compress2(codec->encoder, to, room, packed, size);
    if (ZSTD_getErrorCode(made) == ZSTD_error_memory_allocation)
        return fsdp_fail_memory(err, "compressing a block");
    if (ZSTD_isError(made))
        return fsdp_fail(err, FSDP_ERR_INTERNAL,
                         "cannot compress %zu bytes into a buffer of %zu: %s", size, room,
                         ZSTD_getErrorName(made));
    *size_out = made;
    return FSDP_OK;
}

/* zstd accepts several frames in a row, and skippable ones; a chunk is exactly one frame. */
static fsdp_status check_frame(const void *from, size_t from_size, size_t size, fsdp_error *err)
{
    const uint32_t magic = ZSTD_MAGICNUMBER;
    uint8_t start[4];
    for (int i = 0; i < 4; i++)
        start[i] = (uint8_t)(magic >> 8 * i);
    if (from_size < sizeof start || memcmp(from, start, sizeof start) != 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "%zu compressed bytes are not a zstd frame",
                         from_size);
    unsigned long long content = ZSTD_getFrameContentSize(from, from_size);
    if (content == ZSTD_CONTENTSIZE_ERROR || content == ZSTD_CONTENTSIZE_UNKNOWN)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "the zstd frame of %zu bytes does not give its content's size", from_size);
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

/* One call decodes into the target: zstd allocates no window, whatever size the frame asks for. */
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
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "the zstd frame decompressed to %zu bytes, expected %zu", made, size);
    return FSDP_OK;
}

fsdp_status fsdp_codec_decode(fsdp_codec *codec, const fsdp_coding *coding, fsdp_error *err)
{
    const void *from = coding->from;
    size_t from_size = coding->from_size, size = coding->to_size;
    FSDP_TRY(check_elements(size, coding->element_size, err));
    if (coding->element_size == 1)
        return decompress(codec, from, from_size, coding->to, size, err);
    FSDP_TRY(check_frame(from, from_size, size, err));
    FSDP_TRY(reserve_scratch(codec, size, err));
    FSDP_TRY(decompress(codec, from, from_size, codec->scratch, size, err));
    fsdp_kernels_get()->unshuffle(coding->to, codec->scratch, size, coding->element_size);
    return FSDP_OK;
}
