/* Compares two tensors: their bytes in the files, a block at a time. See torch_internal.h. */
#include "formats/torch/torch_internal.h"

#include "base/core/mem.h"
#include "base/data/box_internal.h"

#include <string.h>

enum { BLOCK = 256 << 10, MOST_PIECES = 1 << 20 };

fsdp_status torch_tensor_pread(fsdp_source *source, const torch_tensor *tensor, int64_t offset,
                               void *data, size_t size, fsdp_error *err)
{
    if (tensor->data) {
        memcpy(data, tensor->data + offset, size);
        return FSDP_OK;
    }
    if (tensor->storage.stream >= 0)
        return fsdp_source_stream_pread(source, tensor->storage.stream, data, size,
                                        tensor->offset + offset, err);
    return fsdp_source_pread(source, tensor->storage.file, data, size, tensor->offset + offset,
                             err);
}

int64_t torch_tensor_span(const torch_tensor *tensor)
{
    int64_t span = (int64_t)fsdp_dtype_size(tensor->dtype);
    for (int dim = 0; dim < tensor->ndim; dim++) {
        if (tensor->shape[dim] == 0)
            return 0;
        span += tensor->data ? 0 : (tensor->shape[dim] - 1) * tensor->strides[dim];
        span *= tensor->data ? tensor->shape[dim] : 1;
    }
    return span;
}

typedef struct comparison {
    fsdp_source *source;
    const torch_tensor *a, *b;
    int64_t most; /* bytes to compare */
    char *blocks; /* two blocks */
} comparison;

static fsdp_status same_bytes(const comparison *at, int64_t a, int64_t b, int64_t size,
                              bool *same_out, fsdp_error *err)
{
    *same_out = true;
    size = size < at->most ? size : at->most;
    for (int64_t done = 0; done < size && *same_out; done += BLOCK) {
        size_t block = size - done < BLOCK ? (size_t)(size - done) : BLOCK;
        FSDP_TRY(torch_tensor_pread(at->source, at->a, a + done, at->blocks, block, err));
        FSDP_TRY(torch_tensor_pread(at->source, at->b, b + done, at->blocks + BLOCK, block, err));
        *same_out = memcmp(at->blocks, at->blocks + BLOCK, block) == 0;
    }
    return FSDP_OK;
}

/* Orders dims by falling stride of a, without dims of length 1 and repeated elements. */
static int order_dims(const torch_tensor *a, const torch_tensor *b, int *order)
{
    int count = 0;
    for (int dim = 0; dim < a->ndim; dim++) {
        int at = count;
        if (a->shape[dim] == 1 || (a->strides[dim] == 0 && b->strides[dim] == 0))
            continue;
        for (; at > 0 && a->strides[order[at - 1]] < a->strides[dim]; at--)
            order[at] = order[at - 1];
        order[at] = dim;
        count++;
    }
    return count;
}

/* Compares piece by piece, where elements are not contiguous. */
static fsdp_status same_pieces(const comparison *at, bool *same_out, fsdp_error *err)
{
    const torch_tensor *a = at->a, *b = at->b;
    int order[FSDP_MAX_DIMS], count = order_dims(a, b, order);
    int64_t run = (int64_t)fsdp_dtype_size(a->dtype), pieces = 1, number[FSDP_MAX_DIMS] = {0};
    while (count > 0 && a->strides[order[count - 1]] == run && b->strides[order[count - 1]] == run)
        run *= a->shape[order[--count]];
    for (int i = 0; i < count && pieces <= MOST_PIECES; i++)
        pieces = fsdp_mul_overflow(pieces, a->shape[order[i]], &pieces) ? INT64_MAX : pieces;
    if (pieces > at->most / run)
        pieces = at->most / run + 1;
    if (pieces > MOST_PIECES)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "its elements are too scattered to be compared");
    *same_out = true;
    for (int64_t piece = 0; piece < pieces && *same_out; piece++) {
        int64_t a_at = 0, b_at = 0;
        for (int i = 0; i < count; i++) {
            a_at += number[i] * a->strides[order[i]];
            b_at += number[i] * b->strides[order[i]];
        }
        FSDP_TRY(same_bytes(at, a_at, b_at, run, same_out, err));
        for (int i = count - 1; i >= 0 && ++number[i] == a->shape[order[i]]; i--)
            number[i] = 0;
    }
    return FSDP_OK;
}

static bool same_strides(const torch_tensor *a, const torch_tensor *b)
{
    for (int dim = 0; dim < a->ndim; dim++)
        if (a->shape[dim] > 1 && a->strides[dim] != b->strides[dim])
            return false;
    return true;
}

static fsdp_status compare(const comparison *at, bool *same_out, fsdp_error *err)
{
    fsdp_box box = fsdp_box_whole(at->a->ndim, at->a->shape);
    int64_t bytes = fsdp_box_count(&box) * (int64_t)fsdp_dtype_size(at->a->dtype);
    int64_t span = torch_tensor_span(at->a);
    if (bytes == 0 || at->a->data) {
        *same_out = true;
        return bytes == 0 ? FSDP_OK : same_bytes(at, 0, 0, bytes, same_out, err);
    }
    if (same_strides(at->a, at->b) && (span == bytes || at->most == INT64_MAX)) {
        FSDP_TRY(same_bytes(at, 0, 0, span, same_out, err));
        if (*same_out || span == bytes)
            return FSDP_OK;
    }
    return same_pieces(at, same_out, err);
}

fsdp_status torch_same_elements(fsdp_source *source, const torch_tensor *a, const torch_tensor *b,
                                int64_t most, bool *same_out, fsdp_error *err)
{
    *same_out = false;
    if (a->dtype != b->dtype || a->ndim != b->ndim || a->fix != b->fix || !a->data != !b->data ||
        memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) != 0)
        return FSDP_OK;
    comparison at = {source, a, b, most, fsdp_alloc(2, BLOCK)};
    if (!at.blocks)
        return fsdp_fail_memory(err, "comparing tensors");
    fsdp_status st = compare(&at, same_out, err);
    fsdp_free(at.blocks);
    return st;
}
