/*
 * HDF5 filter 32000: LZF as h5py writes it. libhdf5 does not include it; h5py registers it
 * itself.
 *
 * The data is a sequence of runs. A byte below 32 begins a literal run of that many bytes and
 * one more. Otherwise its upper three bits are the length of a copy less two (7: a byte with
 * more length follows), and its lower five bits with the next byte the distance less one.
 */
#include "formats/hdf5_child/hdf5_lzf.h"

#include <stdlib.h>
#include <string.h>

typedef struct lzf_reader {
    const unsigned char *at, *end;
    unsigned char *out;
    size_t size, room;
} lzf_reader;

static fsdp_lzf_result take_literals(lzf_reader *reader, size_t length)
{
    if ((size_t)(reader->end - reader->at) < length)
        return FSDP_LZF_DAMAGED;
    if (reader->room - reader->size < length)
        return FSDP_LZF_NO_ROOM;
    memcpy(reader->out + reader->size, reader->at, length);
    reader->at += length;
    reader->size += length;
    return FSDP_LZF_OK;
}

static fsdp_lzf_result take_copy(lzf_reader *reader, unsigned control)
{
    enum { LONG = 7, SHORTEST = 2 };
    size_t length = control >> 5, distance = (size_t)(control & 31) << 8;
    size_t more = length == LONG;
    if ((size_t)(reader->end - reader->at) < 1 + more)
        return FSDP_LZF_DAMAGED;
    if (more)
        length += *reader->at++;
    length += SHORTEST;
    distance += *reader->at++;
    distance++;
    if (distance > reader->size)
        return FSDP_LZF_DAMAGED;
    if (reader->room - reader->size < length)
        return FSDP_LZF_NO_ROOM;
    /* byte by byte, because a copy may overlap its output */
    for (size_t i = 0; i < length; i++, reader->size++)
        reader->out[reader->size] = reader->out[reader->size - distance];
    return FSDP_LZF_OK;
}

fsdp_lzf_result fsdp_lzf_decode(const unsigned char *data, size_t size, unsigned char *out,
                                size_t room, size_t *size_out)
{
    enum { LITERALS = 32 };
    lzf_reader reader = {.at = data, .end = data + size, .out = out, .room = room};
    fsdp_lzf_result result = FSDP_LZF_OK;
    while (result == FSDP_LZF_OK && reader.at < reader.end) {
        unsigned control = *reader.at++;
        result =
            control < LITERALS ? take_literals(&reader, control + 1) : take_copy(&reader, control);
    }
    *size_out = reader.size;
    return result;
}

/* --- the filter ------------------------------------------------------------------------------- */

/* values[2] is the size of a chunk, if the writer stored it. */
static size_t first_room(size_t value_count, const unsigned values[], size_t size)
{
    enum { CHUNK_SIZE = 2, USUAL_RATIO = 4 };
    size_t room = value_count > CHUNK_SIZE ? values[CHUNK_SIZE] : 0;
    return room > 0 ? room : USUAL_RATIO * size;
}

/* Returns the size of the data in *buf, 0 for failure. */
static size_t run_lzf(unsigned flags, size_t value_count, const unsigned values[], size_t size,
                      size_t *buf_size, void **buf)
{
    const size_t largest_chunk = 0xFFFFFFFFU;
    if (!(flags & H5Z_FLAG_REVERSE))
        return 0;
    size_t room = first_room(value_count, values, size);
    for (; room <= largest_chunk; room *= 2) {
        unsigned char *out = malloc(room ? room : 1);
        size_t n = 0;
        fsdp_lzf_result result = FSDP_LZF_DAMAGED;
        if (out)
            result = fsdp_lzf_decode(*buf, size, out, room, &n);
        if (result == FSDP_LZF_OK) {
            free(*buf);
            *buf = out;
            *buf_size = room;
            return n;
        }
        free(out);
        if (result != FSDP_LZF_NO_ROOM)
            return 0;
    }
    return 0;
}

const H5Z_class2_t fsdp_h5_lzf_filter = {
    .version = H5Z_CLASS_T_VERS,
    .id = FSDP_H5_LZF,
    .encoder_present = 0,
    .decoder_present = 1,
    .name = "lzf",
    .filter = run_lzf,
};
