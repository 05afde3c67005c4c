/*
 * Stored chunks: h5py's filter LZF, and checks of chunks before libhdf5 decodes them. libhdf5 trusts the
 * lengths in a chunk and the size that its filters return, and reads memory after a chunk that is too short:
 * bytes that no file holds.
 *
 * A chunk without filters has no length to check: such datasets are read without a cache (open_dataset),
 * and libhdf5 then reads as many bytes as the chunk's shape needs.
 */
#include "formats/hdf5_child/hdf5_child.h"

#include "base/core/mem.h"
#include "base/data/box_internal.h"
#include "kernels/kernels.h"

#include <stdlib.h>
#include <string.h>
#include <zlib.h>

/* === LZF ====================================================================================== */

/*
 * HDF5 filter 32000: LZF as h5py writes it, decoding only. libhdf5 does not include it; h5py registers it
 * itself.
 *
 * The data is a sequence of runs. A byte below 32 begins a literal run of that many bytes and one more.
 * Otherwise its upper three bits are the length of a copy less two (7: a byte with more length follows), and
 * its lower five bits with the next byte the distance less one.
 */

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

/* === checks of stored chunks ================================================================== */

enum {
    MOST_VALUES = 32,
    SPARE = 64, /* bytes that filters add to a chunk before others pack it */
    MOST_REMEMBERED = 1 << 27
};

typedef struct chunk_filter {
    H5Z_filter_t id;
    size_t value_count;
    unsigned values[MOST_VALUES];
} chunk_filter;

/* A dataset in chunks. */
typedef struct chunked_set {
    hid_t id;
    int ndim, filter_count;
    hsize_t dims[FSDP_MAX_DIMS], chunk[FSDP_MAX_DIMS];
    size_t element, bytes; /* of a decoded chunk */
    int64_t file_size;
    bool has_plain_edges; /* chunks that reach over the edge have no filters */
    chunk_filter filters[H5Z_MAX_NFILTERS];
} chunked_set;

/* A chunk while its filters are undone. data is NULL when only its size is known. */
typedef struct chunk_state {
    unsigned char *data;
    size_t size;
} chunk_state;

static void take_over(chunk_state *state, unsigned char *data, size_t size)
{
    fsdp_free(state->data);
    *state = (chunk_state){data, size};
}

/* --- undoing filters -------------------------------------------------------------------------- */

static fsdp_status undo_deflate(const chunked_set *set, chunk_state *state, fsdp_error *err)
{
    size_t room = set->bytes + SPARE;
    unsigned char *out = fsdp_alloc(room, 1);
    z_stream stream = {.next_in = state->data,
                       .avail_in = (uInt)state->size,
                       .next_out = out,
                       .avail_out = (uInt)room};
    if (!out)
        return fsdp_fail_memory(err, "a chunk");
    int result = inflateInit(&stream);
    if (result == Z_OK) {
        result = inflate(&stream, Z_FINISH);
        inflateEnd(&stream);
    }
    bool is_full = stream.avail_out == 0;
    take_over(state, out, room - stream.avail_out);
    if (result == Z_STREAM_END || is_full)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "its deflated bytes are damaged");
}

static fsdp_status undo_lzf(const chunked_set *set, chunk_state *state, fsdp_error *err)
{
    size_t room = set->bytes + SPARE, size = 0;
    unsigned char *out = fsdp_alloc(room, 1);
    if (!out)
        return fsdp_fail_memory(err, "a chunk");
    fsdp_lzf_result result = fsdp_lzf_decode(state->data, state->size, out, room, &size);
    take_over(state, out, size);
    if (result == FSDP_LZF_DAMAGED)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "its LZF bytes are damaged");
    return FSDP_OK;
}

/* Bytes after the last whole element are not shuffled. */
static fsdp_status undo_shuffle(const chunk_filter *filter, chunk_state *state, fsdp_error *err)
{
    size_t element = filter->values[0];
    if (element <= 1 || !state->data)
        return FSDP_OK;
    unsigned char *out = fsdp_alloc(state->size, 1);
    if (!out)
        return fsdp_fail_memory(err, "a chunk");
    size_t whole = state->size / element * element;
    memcpy(out + whole, state->data + whole, state->size - whole);
    if (whole > 0)
        fsdp_kernels_get()->unshuffle(out, state->data, whole, element);
    take_over(state, out, state->size);
    return FSDP_OK;
}

/* A scale-offset chunk is u32 bits per element, u8 size of the minimum, the minimum in 16 bytes, and the
 * elements as a bit string, after whose last whole byte there is one more. */
static fsdp_status undo_scaleoffset(const chunked_set *set, const chunk_filter *filter,
                                    chunk_state *state, fsdp_error *err)
{
    enum { VALUES = 20, BITS = 1, COUNT = 2, CLASS = 3, SIZE = 4, INTEGER = 0, HEADER = 21 };
    const unsigned char *head = state->data;
    size_t full = 8 * set->element, count = set->bytes / set->element;
    if (filter->value_count != VALUES || filter->values[SIZE] != set->element ||
        filter->values[COUNT] != count)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "the parameters of its scale-offset filter are those of another chunk");
    if (filter->values[CLASS] == INTEGER && filter->values[BITS] == full)
        return FSDP_OK; /* libhdf5 then leaves the bytes as they are */
    if (state->size < HEADER)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "its %zu bytes are too few for the scale-offset filter", state->size);
    size_t bits = head[0] | (size_t)head[1] << 8 | (size_t)head[2] << 16 | (size_t)head[3] << 24;
    if (bits > full)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "its scale-offset header has %zu bits per element of %zu", bits, full);
    size_t packed = bits == full ? set->bytes : bits == 0 ? 0 : count * bits / 8 + 1;
    if (state->size < HEADER + packed)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "its %zu bytes are too few for %zu elements of %zu bits", state->size,
                         count, bits);
    take_over(state, NULL, set->bytes);
    return FSDP_OK;
}

/* The types that are read use all their bits, and n-bit then packs nothing. */
static fsdp_status undo_nbit(const chunk_filter *filter, fsdp_error *err)
{
    enum { PACKS_NOTHING = 1 };
    if (filter->value_count > PACKS_NOTHING && filter->values[PACKS_NOTHING])
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "its n-bit filter packs a type without unused bits");
}

/* The chunk begins with the size of the result, which libhdf5 allocates. */
static fsdp_status undo_szip(chunk_state *state, fsdp_error *err)
{
    enum { HEADER = 4 };
    const unsigned char *head = state->data;
    if (state->size < HEADER)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "its %zu bytes are too few for szip", state->size);
    take_over(state, NULL,
              head[0] | (size_t)head[1] << 8 | (size_t)head[2] << 16 | (size_t)head[3] << 24);
    return FSDP_OK;
}

static fsdp_status undo_fletcher32(chunk_state *state, fsdp_error *err)
{
    enum { CHECKSUM = 4 };
    if (state->size < CHECKSUM)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "its %zu bytes hold no checksum", state->size);
    state->size -= CHECKSUM; /* which libhdf5 compares */
    return FSDP_OK;
}

static fsdp_status undo_filter(const chunked_set *set, const chunk_filter *filter,
                               chunk_state *state, fsdp_error *err)
{
    if (!state->data && filter->id != H5Z_FILTER_SHUFFLE)
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "filter %d precedes a filter whose result has a fixed size",
                         (int)filter->id);
    switch (filter->id) {
    case H5Z_FILTER_DEFLATE: return undo_deflate(set, state, err);
    case H5Z_FILTER_SHUFFLE: return undo_shuffle(filter, state, err);
    case H5Z_FILTER_FLETCHER32: return undo_fletcher32(state, err);
    case H5Z_FILTER_SZIP: return undo_szip(state, err);
    case H5Z_FILTER_NBIT: return undo_nbit(filter, err);
    case H5Z_FILTER_SCALEOFFSET: return undo_scaleoffset(set, filter, state, err);
    case FSDP_H5_LZF: return undo_lzf(set, state, err);
    default:
        return fsdp_fail(
            err, FSDP_ERR_REFUSED,
            "filter %d is unknown, and plugins are not loaded for files of other programs",
            (int)filter->id);
    }
}

/* mask: the filters that this chunk was stored without. */
static fsdp_status check_size(const chunked_set *set, uint32_t mask, chunk_state *state,
                              fsdp_error *err)
{
    for (int i = set->filter_count - 1; i >= 0; i--) {
        bool is_last_shuffle = i == 0 && set->filters[i].id == H5Z_FILTER_SHUFFLE;
        if (!(mask >> i & 1) && !is_last_shuffle) /* which changes no size */
            FSDP_TRY(undo_filter(set, &set->filters[i], state, err));
    }
    if (state->size >= set->bytes)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "it has %zu bytes, %zu were expected", state->size,
                     set->bytes);
}

/* --- one chunk -------------------------------------------------------------------------------- */

static bool is_partial(const chunked_set *set, const hsize_t *at)
{
    for (int d = 0; d < set->ndim; d++)
        if (set->dims[d] - at[d] < set->chunk[d])
            return true;
    return false;
}

static fsdp_status check_stored(const chunked_set *set, const hsize_t *at, size_t size,
                                fsdp_error *err)
{
    uint32_t mask = 0;
    chunk_state state = {.data = fsdp_alloc(size, 1), .size = size};
    if (!state.data)
        return fsdp_fail_memory(err, "a chunk");
    fsdp_status status = H5Dread_chunk(set->id, H5P_DEFAULT, at, &mask, state.data) >= 0
                             ? FSDP_OK
                             : fsdp_h5_child_fail(err, "cannot be read");
    if (set->has_plain_edges && is_partial(set, at))
        mask = UINT32_MAX;
    if (status == FSDP_OK)
        status = check_size(set, mask, &state, err);
    fsdp_free(state.data);
    return status;
}

/* False for a chunk whose elements are the fill value. For such a one libhdf5 fails or returns 0. */
static bool is_stored(const chunked_set *set, const hsize_t *at, hsize_t *size_out)
{
    haddr_t address = HADDR_UNDEF;
    hsize_t size = 0;
    unsigned mask;
    if (H5Dget_chunk_storage_size(set->id, at, size_out) < 0) {
        H5Eclear2(H5E_DEFAULT); /* H5Dread reports what is wrong */
        return false;
    }
    return *size_out > 0 || (H5Dget_chunk_info_by_coord(set->id, at, &mask, &address, &size) >= 0 &&
                             address != HADDR_UNDEF);
}

static fsdp_status check_chunk(const chunked_set *set, const hsize_t *at, fsdp_error *err)
{
    hsize_t size = 0;
    fsdp_status status = FSDP_OK;
    if (!is_stored(set, at, &size))
        return FSDP_OK;
    if (size > (hsize_t)set->file_size)
        status = fsdp_fail(err, FSDP_ERR_DAMAGED, "its size exceeds that of the file");
    else if (size == 0)
        status = fsdp_fail(err, FSDP_ERR_DAMAGED, "it has no bytes");
    else
        status = check_stored(set, at, (size_t)size, err);
    if (status == FSDP_OK)
        return FSDP_OK;
    fsdp_text where = {0};
    for (int d = 0; d < set->ndim; d++)
        fsdp_text_addf(&where, "%s%llu", d ? ", " : "", (unsigned long long)at[d]);
    fsdp_error_prefix(err, "the chunk at [%s]", where.data ? where.data : "");
    fsdp_text_release(&where);
    return status;
}

/* --- chunks of a dataset ---------------------------------------------------------------------- */

static fsdp_status take_filters(chunked_set *set, hid_t creation, fsdp_error *err)
{
    unsigned flags, options = 0;
    set->filter_count = H5Pget_nfilters(creation);
    if (set->filter_count < 0 || set->filter_count > H5Z_MAX_NFILTERS ||
        H5Pget_chunk_opts(creation, &options) < 0)
        return fsdp_h5_child_fail(err, "its filters");
    set->has_plain_edges = options & H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS;
    for (int i = 0; i < set->filter_count; i++) {
        chunk_filter *filter = &set->filters[i];
        filter->value_count = MOST_VALUES;
        filter->id = H5Pget_filter2(creation, (unsigned)i, &flags, &filter->value_count,
                                    filter->values, 0, NULL, NULL);
        if (filter->id < 0)
            return fsdp_h5_child_fail(err, "its filters");
    }
    return FSDP_OK;
}

static fsdp_status take_shape(chunked_set *set, hid_t creation, fsdp_error *err)
{
    hid_t space = H5Dget_space(set->id), type = H5Dget_type(set->id);
    hsize_t dims[H5S_MAX_RANK], chunk[H5S_MAX_RANK];
    int ndim = H5Sget_simple_extent_dims(space, dims, NULL);
    bool ok =
        ndim > 0 && ndim <= FSDP_MAX_DIMS && H5Pget_chunk(creation, H5S_MAX_RANK, chunk) == ndim;
    set->element = set->bytes = H5Tget_size(type);
    set->ndim = ndim;
    for (int d = 0; ok && d < ndim; d++) {
        set->dims[d] = dims[d];
        set->chunk[d] = chunk[d];
        ok = chunk[d] > 0 && !__builtin_mul_overflow(set->bytes, chunk[d], &set->bytes);
    }
    ok = ok && set->bytes > 0 && set->bytes <= UINT32_MAX - SPARE;
    H5Tclose(type);
    H5Sclose(space);
    return ok ? FSDP_OK : fsdp_fail(err, FSDP_ERR_DAMAGED, "its chunks have an impossible shape");
}

static int64_t chunk_count(const chunked_set *set)
{
    int64_t count = 1;
    for (int d = 0; d < set->ndim; d++)
        if (fsdp_mul_overflow(count, (int64_t)((set->dims[d] + set->chunk[d] - 1) / set->chunk[d]),
                              &count))
            return INT64_MAX;
    return count;
}

/* Bits of the chunks of child->open that were checked. Without them each read checks again. */
static unsigned char *checked_bits(fsdp_h5_child *child, const chunked_set *set)
{
    if (set->id != child->open)
        return NULL;
    int64_t count = chunk_count(set);
    if (!child->checked && count <= MOST_REMEMBERED)
        child->checked = fsdp_alloc((size_t)count / 8 + 1, 1);
    return child->checked;
}

static int64_t chunk_number(const chunked_set *set, const hsize_t *at)
{
    int64_t number = 0;
    for (int d = 0; d < set->ndim; d++)
        number = number * (int64_t)((set->dims[d] + set->chunk[d] - 1) / set->chunk[d]) +
                 (int64_t)(at[d] / set->chunk[d]);
    return number;
}

static fsdp_status check_chunks(const chunked_set *set, unsigned char *checked, const fsdp_box *box,
                                fsdp_error *err)
{
    hsize_t first[FSDP_MAX_DIMS], at[FSDP_MAX_DIMS];
    for (int d = 0; d < set->ndim; d++)
        at[d] = first[d] = (hsize_t)box->lo[d] / set->chunk[d] * set->chunk[d];
    for (int d = 0; d >= 0;) {
        int64_t number = checked ? chunk_number(set, at) : 0;
        if (!checked || !(checked[number / 8] >> number % 8 & 1))
            FSDP_TRY(check_chunk(set, at, err));
        if (checked)
            checked[number / 8] |= (unsigned char)(1U << number % 8);
        for (d = set->ndim - 1; d >= 0; d--) {
            at[d] += set->chunk[d];
            if (at[d] < (hsize_t)(box->lo[d] + box->len[d]))
                break;
            at[d] = first[d];
        }
    }
    return FSDP_OK;
}

static fsdp_status check_dataset(fsdp_h5_child *child, hid_t dataset, hid_t creation,
                                 const fsdp_box *box, fsdp_error *err)
{
    chunked_set set = {.id = dataset, .file_size = child->file_size};
    fsdp_box whole = {0};
    if (H5Pget_layout(creation) != H5D_CHUNKED || H5Pget_nfilters(creation) == 0)
        return FSDP_OK;
    FSDP_TRY(take_shape(&set, creation, err));
    FSDP_TRY(take_filters(&set, creation, err));
    whole.ndim = set.ndim;
    for (int d = 0; d < set.ndim; d++)
        whole.len[d] = (int64_t)set.dims[d];
    if (!box)
        box = &whole;
    if (box->ndim != set.ndim || fsdp_box_count(box) == 0)
        return FSDP_OK;
    return check_chunks(&set, checked_bits(child, &set), box, err);
}

/* --- sources of virtual datasets -------------------------------------------------------------- */

typedef struct source_check {
    fsdp_h5_child *child;
    fsdp_status status;
    fsdp_error *err;
} source_check;

static herr_t check_object(hid_t file, const char *name, const H5O_info_t *info, void *context)
{
    source_check *check = context;
    if (info->type != H5O_TYPE_DATASET)
        return 0;
    hid_t dataset = H5Oopen(file, name, H5P_DEFAULT);
    hid_t creation = H5Dget_create_plist(dataset);
    check->status = creation < 0 ? fsdp_h5_child_fail(check->err, "cannot open '%s'", name)
                                 : check_dataset(check->child, dataset, creation, NULL, check->err);
    H5Pclose(creation);
    H5Oclose(dataset);
    return check->status == FSDP_OK ? 0 : -1;
}

/* The sources are in this file, under names with patterns or after links: all its datasets are checked. */
static fsdp_status check_sources(fsdp_h5_child *child, fsdp_error *err)
{
    source_check check = {.child = child, .err = err};
    if (child->sources_checked)
        return FSDP_OK;
    if (H5Ovisit2(child->file, H5_INDEX_NAME, H5_ITER_NATIVE, check_object, &check,
                  H5O_INFO_BASIC) < 0)
        return check.status != FSDP_OK ? check.status
                                       : fsdp_h5_child_fail(err, "cannot list its sources");
    child->sources_checked = true;
    return FSDP_OK;
}

fsdp_status fsdp_h5_child_check(fsdp_h5_child *child, hid_t dataset, const fsdp_box *box,
                                fsdp_error *err)
{
    hid_t creation = H5Dget_create_plist(dataset);
    fsdp_status status = FSDP_OK;
    if (creation < 0)
        status = fsdp_h5_child_fail(err, "how it is stored");
    else if (H5Pget_layout(creation) == H5D_VIRTUAL)
        status = check_sources(child, err);
    else
        status = check_dataset(child, dataset, creation, box, err);
    H5Pclose(creation);
    return status;
}
