/*
 * Reads the bytes of an entry of a zip archive, inflates them and compares them with their
 * checksum. See zip.h.
 */
#include "formats/zip/zip.h"

#include "base/core/mem.h"
#include "kernels/kernels.h"
#include "base/text.h"

#include <zlib.h>

enum { PIECE_BYTES = 256 << 10 };

static fsdp_status fail_entry(const fsdp_zip *zip, const fsdp_zip_entry *entry, const char *why,
                              fsdp_error *err)
{
    char name[200];
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': record '%s' at byte %lld %s",
                     fsdp_zip_input_of(zip)->path,
                     fsdp_printable(entry->name, entry->name_size, name, sizeof name),
                     (long long)entry->offset, why);
}

/* A deflate stream that is decoded piece by piece. */
typedef struct inflation {
    const fsdp_zip *zip;
    const fsdp_zip_entry *entry;
    uint8_t *input;       /* PIECE_BYTES */
    int64_t taken, given; /* bytes read, bytes decoded */
    z_stream stream;
} inflation;

static fsdp_status refill(inflation *state, fsdp_error *err)
{
    int64_t rest = state->entry->stored - state->taken;
    size_t piece = rest < PIECE_BYTES ? (size_t)rest : PIECE_BYTES;
    const fsdp_zip_input *input = fsdp_zip_input_of(state->zip);
    FSDP_TRY(
        input->read(input->context, state->input, piece, state->entry->offset + state->taken, err));
    state->taken += (int64_t)piece;
    state->stream.next_in = state->input;
    state->stream.avail_in = (uInt)piece;
    return FSDP_OK;
}

/* Fills out with exactly room bytes, or with fewer at the end of the stream. */
static fsdp_status inflate_piece(inflation *state, uint8_t *out, size_t room, size_t *size_out,
                                 bool *ended_out, fsdp_error *err)
{
    state->stream.next_out = out;
    state->stream.avail_out = (uInt)room;
    int rc = Z_OK;
    while (state->stream.avail_out > 0 && rc != Z_STREAM_END) {
        if (state->stream.avail_in == 0 && state->taken < state->entry->stored)
            FSDP_TRY(refill(state, err));
        rc = inflate(&state->stream, Z_NO_FLUSH);
        if (rc != Z_OK && rc != Z_STREAM_END)
            return fail_entry(state->zip, state->entry, "cannot be unpacked", err);
    }
    *size_out = room - state->stream.avail_out;
    *ended_out = rc == Z_STREAM_END;
    return FSDP_OK;
}

/* Decodes the whole stream into data; scratch takes bytes that the entry does not announce. */
static fsdp_status inflate_all(inflation *state, uint8_t *data, uint8_t *scratch, uint32_t *crc,
                               fsdp_error *err)
{
    bool ended = false;
    while (!ended) {
        int64_t rest = state->entry->size - state->given;
        uint8_t *out = rest > 0 ? data + state->given : scratch;
        size_t room = rest > 0 && rest < PIECE_BYTES ? (size_t)rest : PIECE_BYTES, size = 0;
        FSDP_TRY(inflate_piece(state, out, room, &size, &ended, err));
        if ((int64_t)size > rest)
            return fail_entry(state->zip, state->entry, "is longer than declared", err);
        *crc = fsdp_crc32(*crc, out, size);
        state->given += (int64_t)size;
    }
    if (state->given != state->entry->size || state->taken != state->entry->stored ||
        state->stream.avail_in > 0)
        return fail_entry(state->zip, state->entry, "has a different size than declared", err);
    return FSDP_OK;
}

static fsdp_status inflate_entry(const fsdp_zip *zip, const fsdp_zip_entry *entry, uint8_t *data,
                                 uint32_t *crc, fsdp_error *err)
{
    inflation state = {.zip = zip, .entry = entry, .input = fsdp_realloc(NULL, PIECE_BYTES, 1)};
    uint8_t *scratch = fsdp_realloc(NULL, PIECE_BYTES, 1);
    fsdp_status st = FSDP_OK;
    if (!state.input || !scratch || inflateInit2(&state.stream, -MAX_WBITS) != Z_OK) {
        st = fsdp_fail_memory(err, "unpacking a zip record");
    } else {
        st = inflate_all(&state, data, scratch, crc, err);
        inflateEnd(&state.stream);
    }
    fsdp_free(scratch);
    fsdp_free(state.input);
    return st;
}

static fsdp_status read_stored(const fsdp_zip *zip, const fsdp_zip_entry *entry, uint8_t *data,
                               uint32_t *crc, fsdp_error *err)
{
    const fsdp_zip_input *input = fsdp_zip_input_of(zip);
    for (int64_t at = 0; at < entry->size;) {
        size_t piece = entry->size - at < PIECE_BYTES ? (size_t)(entry->size - at) : PIECE_BYTES;
        FSDP_TRY(input->read(input->context, data + at, piece, entry->offset + at, err));
        if (entry->has_crc)
            *crc = fsdp_crc32(*crc, data + at, piece);
        at += (int64_t)piece;
    }
    return FSDP_OK;
}

static fsdp_status read_entry(const fsdp_zip *zip, const fsdp_zip_entry *entry, uint8_t *data,
                              fsdp_error *err)
{
    uint32_t crc = 0;
    FSDP_TRY(entry->is_deflated ? inflate_entry(zip, entry, data, &crc, err)
                                : read_stored(zip, entry, data, &crc, err));
    if (entry->has_crc && crc != entry->crc)
        return fail_entry(zip, entry, "does not have the checksum that the archive gives", err);
    return FSDP_OK;
}

fsdp_status fsdp_zip_read(const fsdp_zip *zip, const fsdp_zip_entry *entry, size_t max_size,
                          char **data_out, fsdp_error *err)
{
    *data_out = NULL;
    if ((uint64_t)entry->size > max_size) {
        char name[200];
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "'%s': record '%s' has %lld bytes, at most %zu are allowed",
                         fsdp_zip_input_of(zip)->path,
                         fsdp_printable(entry->name, entry->name_size, name, sizeof name),
                         (long long)entry->size, max_size);
    }
    char *data = fsdp_realloc(NULL, (size_t)entry->size + 1, 1);
    if (!data)
        return fsdp_fail_memory(err, "a zip record");
    data[entry->size] = '\0';
    fsdp_status st = read_entry(zip, entry, (uint8_t *)data, err);
    if (st != FSDP_OK) {
        fsdp_free(data);
        return st;
    }
    *data_out = data;
    return FSDP_OK;
}
