/*
 * Reads boxes of tensors from chunks. The part of a chunk that a box overlaps is a strided view
 * of a file; it is walked from the largest stride to the smallest, and adjacent bytes are read
 * together, through a buffer of the reading thread or straight to their place. Byte order and
 * signs are repaired afterwards.
 */
#include "formats/source/source_internal.h"

#include "base/data/box_internal.h"
#include "base/data/flow.h"
#include "kernels/kernels.h"

#include <string.h>

enum {
    LARGE_GAP = 2 << 10, /* a larger gap is skipped, not read */
    LARGE_RUN = 32 << 10 /* a longer run is read to its place, not copied */
};

void fsdp_source_reader_release(fsdp_source_reader *reader)
{
    fsdp_free(reader->buf);
    *reader = (fsdp_source_reader){0};
}

/* --- from a file to memory -------------------------------------------------------------------- */

/* The part of a chunk to read. Strides are in bytes; those of the file are positive and falling. */
typedef struct strided_part {
    fsdp_source *source;
    fsdp_source_reader *reader;
    const fsdp_source_chunk *chunk;
    fsdp_file *file; /* NULL: a stream */
    size_t element_size;
    int ndim;
    int64_t len[FSDP_MAX_DIMS], from[FSDP_MAX_DIMS], to[FSDP_MAX_DIMS];
    int64_t span[FSDP_MAX_DIMS + 1]; /* bytes of the file from the first to the last, dims >= i */
    bool is_scattered[FSDP_MAX_DIMS + 1]; /* dims >= i: one span would waste much */
    int64_t offset;                       /* of the first element */
    uint8_t *place;                       /* destination */
} strided_part;

static fsdp_status read_bytes(const strided_part *part, void *data, int64_t size, int64_t offset,
                              fsdp_error *err)
{
    part->reader->bytes_read += size;
    if (!part->file)
        return fsdp_source_stream_pread(part->source, part->chunk->stream, data, (size_t)size,
                                        offset, err);
    return fsdp_io_read(part->file, part->source->files[part->chunk->file].path, data, (size_t)size,
                        offset, err);
}

/* Reads dims >= dim, count indices of dim, as one span. */
static fsdp_status read_span(const strided_part *part, int dim, int64_t count, int64_t offset,
                             uint8_t *place, fsdp_error *err)
{
    int64_t len[FSDP_MAX_DIMS];
    memcpy(len, part->len, sizeof len);
    len[dim] = count;
    int64_t size = part->span[dim + 1] + (count - 1) * part->from[dim];
    FSDP_TRY(read_bytes(part, part->reader->buf, size, offset, err));
    fsdp_copy_box(&(fsdp_strided_copy){place, part->to + dim, part->reader->buf, part->from + dim,
                                       part->ndim - dim, len + dim, part->element_size});
    return FSDP_OK;
}

/* The number of indices of dim that fit into the buffer together; 1 also when they are read
 * singly. */
static int64_t block_of(const strided_part *part, int dim)
{
    int64_t space = (int64_t)part->reader->size - part->span[dim + 1];
    if (part->is_scattered[dim] || space < 0)
        return 1;
    int64_t count = part->from[dim] > 0 ? 1 + space / part->from[dim] : part->len[dim];
    return count < part->len[dim] ? count : part->len[dim];
}

/* Recursion depth is at most the number of dims. */
static fsdp_status read_dims(const strided_part *part, int dim, int64_t offset, uint8_t *place,
                             fsdp_error *err)
{
    int64_t element_size = (int64_t)part->element_size;
    if (dim == part->ndim)
        return read_bytes(part, place, element_size, offset, err);
    if (dim == part->ndim - 1 && part->from[dim] == element_size && part->to[dim] == element_size)
        return read_bytes(part, place, part->len[dim] * element_size, offset, err);
    int64_t block = block_of(part, dim);
    for (int64_t i = 0; i < part->len[dim]; i += block) {
        int64_t count = block < part->len[dim] - i ? block : part->len[dim] - i;
        int64_t at = offset + i * part->from[dim];
        uint8_t *to = place + i * part->to[dim];
        if (block == 1)
            FSDP_TRY(read_dims(part, dim + 1, at, to, err));
        else
            FSDP_TRY(read_span(part, dim, count, at, to, err));
    }
    return FSDP_OK;
}

/* --- from a box to a strided part ------------------------------------------------------------- */

/* Inserts a dim so that the strides of the file fall; a negative stride is walked from its other
 * end. */
static void insert_dim(strided_part *part, int64_t len, int64_t from, int64_t to)
{
    if (from < 0) {
        part->offset += (len - 1) * from;
        part->place += (len - 1) * to;
        from = -from;
        to = -to;
    }
    int at = part->ndim++;
    for (; at > 0 && part->from[at - 1] < from; at--) {
        part->len[at] = part->len[at - 1];
        part->from[at] = part->from[at - 1];
        part->to[at] = part->to[at - 1];
    }
    part->len[at] = len;
    part->from[at] = from;
    part->to[at] = to;
}

/* Joins two dims when, on both sides, the outer one continues where the inner one ends. */
static void join_dims(strided_part *part)
{
    int kept = 0;
    for (int dim = 1; dim < part->ndim; dim++) {
        bool is_dense = part->from[kept] == part->from[dim] * part->len[dim] &&
                        part->to[kept] == part->to[dim] * part->len[dim];
        int64_t len = is_dense ? part->len[kept] * part->len[dim] : part->len[dim];
        kept += !is_dense;
        part->len[kept] = len;
        part->from[kept] = part->from[dim];
        part->to[kept] = part->to[dim];
    }
    part->ndim = part->ndim > 0 ? kept + 1 : 0;
}

static void measure_spans(strided_part *part)
{
    int last = part->ndim - 1;
    int64_t element_size = (int64_t)part->element_size;
    part->span[part->ndim] = element_size;
    part->is_scattered[part->ndim] = false;
    bool is_run = last >= 0 && part->from[last] == element_size && part->to[last] == element_size &&
                  part->len[last] * element_size >= LARGE_RUN;
    for (int dim = last; dim >= 0; dim--) {
        part->span[dim] = part->span[dim + 1] + (part->len[dim] - 1) * part->from[dim];
        part->is_scattered[dim] = is_run || part->is_scattered[dim + 1] ||
                                  part->from[dim] - part->span[dim + 1] >= LARGE_GAP;
    }
}

static void place_strides(const fsdp_box *box, size_t element_size, int64_t *strides)
{
    fsdp_box_strides(box->ndim, box->len, strides);
    for (int dim = 0; dim < box->ndim; dim++)
        strides[dim] *= (int64_t)element_size;
}

/* Describes the overlap of chunk and box as a strided part. */
static void describe_part(strided_part *part, const fsdp_box *shared, const fsdp_box *box,
                          uint8_t *data)
{
    const fsdp_source_chunk *chunk = part->chunk;
    int64_t from[FSDP_MAX_DIMS], to[FSDP_MAX_DIMS];
    fsdp_box own = {.ndim = box->ndim};
    memcpy(own.len, chunk->len, (size_t)box->ndim * sizeof *own.len);
    place_strides(&own, part->element_size, from);
    if (chunk->strides)
        memcpy(from, chunk->strides, (size_t)box->ndim * sizeof *from);
    place_strides(box, part->element_size, to);
    part->offset = chunk->offset;
    part->place = data;
    part->ndim = 0;
    for (int dim = 0; dim < box->ndim; dim++) {
        part->offset += (shared->lo[dim] - chunk->lo[dim]) * from[dim];
        part->place += (shared->lo[dim] - box->lo[dim]) * to[dim];
        if (shared->len[dim] > 1)
            insert_dim(part, shared->len[dim], from[dim], to[dim]);
    }
    join_dims(part);
    measure_spans(part);
}

/* --- byte order and signs --------------------------------------------------------------------- */

static bool is_complex(fsdp_dtype dtype)
{
    return dtype == FSDP_C64 || dtype == FSDP_C128 || dtype == FSDP_COMPLEX32 ||
           dtype == FSDP_BCOMPLEX32;
}

static void swap_words(uint8_t *data, size_t count, size_t size)
{
    for (size_t i = 0; i < count; i++, data += size) {
        for (size_t low = 0, high = size - 1; low < high; low++, high--) {
            uint8_t byte = data[low];
            data[low] = data[high];
            data[high] = byte;
        }
    }
}

/* Flips the sign bit of every step-th floating number, beginning with the first one. */
static void flip_signs(uint8_t *data, size_t count, size_t size, size_t step)
{
    for (size_t i = 0; i < count; i += step)
        data[i * size + size - 1] ^= 0x80;
}

/* Formats without negative zero: its bits encode their NaN. */
static void negate_without_zero(uint8_t *data, size_t count)
{
    for (size_t i = 0; i < count; i++)
        data[i] = (data[i] & 0x7F) == 0 ? data[i] : data[i] ^ 0x80;
}

static void negate_integers(uint8_t *data, size_t count, size_t size)
{
    for (size_t i = 0; i < count; i++, data += size) {
        unsigned carry = 1;
        for (size_t byte = 0; byte < size; byte++) {
            unsigned value = (unsigned)(uint8_t)~data[byte] + carry;
            data[byte] = (uint8_t)value;
            carry = value >> 8;
        }
    }
}

static void negate(uint8_t *data, size_t count, fsdp_dtype dtype)
{
    size_t size = fsdp_dtype_size(dtype);
    if (is_complex(dtype))
        flip_signs(data, 2 * count, size / 2, 1);
    else if (dtype == FSDP_F8_E4M3FNUZ || dtype == FSDP_F8_E5M2FNUZ)
        negate_without_zero(data, count);
    else if (fsdp_dtype_describe(dtype)->is_float && dtype != FSDP_F8_E8M0FNU)
        flip_signs(data, count, size, 1);
    else if (dtype >= FSDP_I64 && dtype <= FSDP_U8)
        negate_integers(data, count, size);
}

static void fix_run(uint8_t *data, size_t count, fsdp_dtype dtype, unsigned fix)
{
    size_t halves = is_complex(dtype) ? 2 : 1;
    size_t word = fsdp_dtype_size(dtype) / halves;
    if (fix & FSDP_FIX_SWAP && word > 1)
        swap_words(data, halves * count, word);
    if (fix & FSDP_FIX_CONJUGATE && halves == 2)
        flip_signs(data + word, 2 * count - 1, word, 2);
    if (fix & FSDP_FIX_NEGATE)
        negate(data, count, dtype);
}

/* Repairs the rows of the part where they were read to. */
static void fix_part(uint8_t *data, const fsdp_box *shared, const fsdp_box *box, fsdp_dtype dtype,
                     unsigned fix)
{
    int64_t strides[FSDP_MAX_DIMS], index[FSDP_MAX_DIMS] = {0};
    place_strides(box, fsdp_dtype_size(dtype), strides);
    int rows = box->ndim; /* dims >= rows are dense */
    int64_t run = 1;
    while (rows > 0 && (rows == box->ndim || shared->len[rows] == box->len[rows]))
        run *= shared->len[--rows];
    for (int dim = 0; dim < box->ndim; dim++)
        data += (shared->lo[dim] - box->lo[dim]) * strides[dim];
    for (int dim = 0; dim >= 0;) {
        fix_run(data, (size_t)run, dtype, fix);
        for (dim = rows - 1; dim >= 0; dim--) {
            data += strides[dim];
            if (++index[dim] < shared->len[dim])
                break;
            data -= strides[dim] * shared->len[dim];
            index[dim] = 0;
        }
    }
}

/* --- the box ---------------------------------------------------------------------------------- */

static fsdp_status read_part(strided_part *part, fsdp_error *err)
{
    int file = part->chunk->file;
    if (part->chunk->stream >= 0)
        return read_dims(part, 0, part->offset, part->place, err);
    FSDP_TRY(fsdp_source_pin(part->source, file, &part->file, err));
    fsdp_status status = read_dims(part, 0, part->offset, part->place, err);
    fsdp_source_unpin(part->source, file);
    return status;
}

/* A box of a tensor that goes to packed memory. */
typedef struct box_read {
    fsdp_source *source;
    fsdp_source_reader *reader;
    const fsdp_source_tensor *tensor;
    const fsdp_box *box;
    void *data;
} box_read;

static fsdp_status read_chunk(const box_read *read, const fsdp_source_chunk *chunk, fsdp_error *err)
{
    fsdp_source *source = read->source;
    const fsdp_source_tensor *tensor = read->tensor;
    fsdp_source_chunk placed = *chunk;
    int64_t strides[FSDP_MAX_DIMS];
    fsdp_box own = {.ndim = tensor->ndim}, shared;
    size_t dims = (size_t)tensor->ndim * sizeof(int64_t);
    memcpy(own.lo, chunk->lo, dims);
    memcpy(own.len, chunk->len, dims);
    if (!fsdp_box_intersect(&own, read->box, &shared))
        return FSDP_OK;
    if (chunk->file < 0 && chunk->stream < 0) {
        size_t number = (size_t)(tensor - source->tensors);
        FSDP_TRY(source->ops.place(source->state, number, &placed, strides, err));
        chunk = &placed;
    }
    strided_part part = {.source = source,
                         .reader = read->reader,
                         .chunk = chunk,
                         .element_size = fsdp_dtype_size(tensor->dtype)};
    describe_part(&part, &shared, read->box, read->data);
    fsdp_flow_box("formats/source/source_read.c", "read", tensor->name, tensor->name_size, &shared);
    fsdp_status status = read_part(&part, err);
    if (status != FSDP_OK) {
        char shown[FSDP_NAME_SHOWN];
        fsdp_error_prefix(err, "tensor '%s'", fsdp_tensor_text(tensor, shown, sizeof shown));
        return status;
    }
    if (chunk->fix)
        fix_part(read->data, &shared, read->box, tensor->dtype, chunk->fix);
    return FSDP_OK;
}

/* The first chunk that may overlap the box: the ones before it begin too early to reach it. */
static size_t first_chunk(const fsdp_source_tensor *tensor, const chunk_order *order,
                          const fsdp_box *box)
{
    size_t low = 0, high = tensor->chunk_count;
    while (tensor->ndim > 0 && low < high) {
        size_t middle = low + (high - low) / 2;
        if (tensor->chunks[middle].lo[order->dim] <= box->lo[order->dim] - order->longest)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool is_own_storage(const fsdp_source_tensor *tensor)
{
    for (size_t i = 0; i < tensor->chunk_count; i++) {
        if (tensor->chunks[i].file < 0 && tensor->chunks[i].stream < 0)
            return true;
    }
    return false;
}

fsdp_status fsdp_source_read(fsdp_source *source, size_t number, const fsdp_box *box, void *data,
                             fsdp_source_reader *reader, fsdp_error *err)
{
    if (!source->is_complete || number >= source->tensor_count)
        return fsdp_fail(err, FSDP_ERR_INTERNAL,
                         "a read asks for a tensor that its source does not have");
    const fsdp_source_tensor *tensor = &source->tensors[number];
    const chunk_order *order = &source->orders[number];
    fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape);
    if (!fsdp_box_contains(&whole, box))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "a read asks for a box outside its tensor");
    if (fsdp_box_count(box) == 0)
        return FSDP_OK;
    bool reads = source->ops.reads ? source->ops.reads(source->state, number)
                                   : source->ops.read && !source->ops.place;
    if (reads && is_own_storage(tensor))
        return source->ops.read(source->state, number, box, data, err);
    FSDP_TRY(fsdp_reader_prepare(reader, err));
    box_read read = {source, reader, tensor, box, data};
    for (size_t i = first_chunk(tensor, order, box); i < tensor->chunk_count; i++) {
        const fsdp_source_chunk *chunk = &tensor->chunks[i];
        if (tensor->ndim > 0 && chunk->lo[order->dim] >= box->lo[order->dim] + box->len[order->dim])
            break;
        FSDP_TRY(read_chunk(&read, chunk, err));
    }
    return FSDP_OK;
}
