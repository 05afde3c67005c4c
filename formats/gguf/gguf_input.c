/* Reads a GGUF file forwards through a small buffer: see gguf.h. */
#include "formats/gguf/gguf.h"

#include "base/core/bytes.h"

#include <inttypes.h>
#include <string.h>

enum { BUFFER = 64 << 10 };

fsdp_status gguf_input_init(gguf_input *in, fsdp_source *source, int file, int64_t memory,
                            fsdp_error *err)
{
    *in = (gguf_input){.source = source,
                       .file = file,
                       .path = fsdp_source_file_path(source, (size_t)file),
                       .size = fsdp_source_file_size(source, (size_t)file),
                       .most = memory > 0 ? memory : (int64_t)256 << 20,
                       .buf = fsdp_realloc(NULL, BUFFER, 1)};
    return in->buf ? FSDP_OK : fsdp_fail_memory(err, in->path);
}

void gguf_input_release(gguf_input *in)
{
    fsdp_free(in->buf);
    in->buf = NULL;
}

/* Fills the buffer from in->at on. */
static fsdp_status fill(gguf_input *in, fsdp_error *err)
{
    int64_t left = in->size - in->at;
    in->buf_at = in->at;
    in->buf_size = left < BUFFER ? left : BUFFER;
    return fsdp_source_pread(in->source, in->file, in->buf, (size_t)in->buf_size, in->at, err);
}

fsdp_status gguf_take(gguf_input *in, size_t size, const char *what, void *out, fsdp_error *err)
{
    if ((uint64_t)size > (uint64_t)(in->size - in->at))
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': %s at byte %" PRId64 " takes %zu bytes, and the file ends after "
                         "%" PRId64,
                         in->path, what, in->at, size, in->size - in->at);
    if (size > BUFFER) {
        FSDP_TRY(fsdp_source_pread(in->source, in->file, out, size, in->at, err));
        in->at += (int64_t)size;
        return FSDP_OK;
    }
    if (in->at < in->buf_at || in->at + (int64_t)size > in->buf_at + in->buf_size)
        FSDP_TRY(fill(in, err));
    if (size > 0)
        memcpy(out, in->buf + (in->at - in->buf_at), size);
    in->at += (int64_t)size;
    return FSDP_OK;
}

static void turn(uint8_t *bytes, size_t size)
{
    for (size_t low = 0, high = size - 1; low < high; low++, high--) {
        uint8_t byte = bytes[low];
        bytes[low] = bytes[high];
        bytes[high] = byte;
    }
}

fsdp_status gguf_take_u32(gguf_input *in, const char *what, uint32_t *out, fsdp_error *err)
{
    uint8_t bytes[4];
    FSDP_TRY(gguf_take(in, sizeof bytes, what, bytes, err));
    if (in->is_big)
        turn(bytes, sizeof bytes);
    *out = fsdp_load_u32(bytes);
    return FSDP_OK;
}

fsdp_status gguf_take_u64(gguf_input *in, const char *what, uint64_t *out, fsdp_error *err)
{
    uint8_t bytes[8];
    FSDP_TRY(gguf_take(in, sizeof bytes, what, bytes, err));
    if (in->is_big)
        turn(bytes, sizeof bytes);
    *out = fsdp_load_u64(bytes);
    return FSDP_OK;
}

fsdp_status gguf_take_count(gguf_input *in, size_t least, const char *what, size_t *out,
                            fsdp_error *err)
{
    uint64_t count;
    FSDP_TRY(gguf_take_u64(in, what, &count, err));
    if (count > (uint64_t)(in->size - in->at) / least)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': %s is %" PRIu64 ", which does not fit into the %" PRId64
                         " bytes that follow",
                         in->path, what, count, in->size - in->at);
    *out = (size_t)count;
    return FSDP_OK;
}

fsdp_status gguf_take_string(gguf_input *in, size_t most, const char *what, char **out,
                             size_t *size_out, fsdp_error *err)
{
    size_t size = 0;
    *out = NULL;
    FSDP_TRY(gguf_take_count(in, 1, what, &size, err));
    if (size > most)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s': %s has %zu bytes, at most %zu are allowed",
                         in->path, what, size, most);
    char *text = fsdp_realloc(NULL, size + 1, 1);
    if (!text)
        return fsdp_fail_memory(err, in->path);
    fsdp_status st = gguf_take(in, size, what, text, err);
    if (st != FSDP_OK) {
        fsdp_free(text);
        return st;
    }
    text[size] = '\0';
    *out = text;
    *size_out = size;
    return FSDP_OK;
}
