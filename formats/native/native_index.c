/* Cuts stored boxes into blocks, for native_write.c and native_read.c. */
#include "formats/native/native_index.h"

#include <string.h>

/*
 * A chunk covers whole trailing dims, a range of one dim and single indexes of the leading dims, so
 * it is a range of the packed order: `outer` times `per_outer` chunks of up to `step` rows of `row`
 * elements, with `rows` rows in each outer index.
 */
typedef struct chunking {
    int64_t rows, step, row, per_outer, outer;
} chunking;

static chunking describe_chunks(const fsdp_blocking *box)
{
    const int64_t *len = box->len, *chunk = box->chunk;
    chunking c = {1, 1, 1, 1, 1};
    int d = box->ndim - 1;
    for (; d >= 0 && chunk[d] == len[d]; d--)
        c.row *= len[d];
    if (d >= 0) {
        c.rows = len[d];
        c.step = chunk[d];
        d--;
    }
    c.per_outer = (c.rows + c.step - 1) / c.step;
    for (; d >= 0; d--)
        c.outer *= len[d];
    return c;
}

static int64_t count_elements(const fsdp_blocking *box)
{
    int64_t count = 1;
    for (int d = 0; d < box->ndim; d++)
        count *= box->len[d];
    return count;
}

int64_t fsdp_native_blocks(const fsdp_blocking *box)
{
    if (box->chunk) {
        chunking c = describe_chunks(box);
        return c.outer * c.per_outer;
    }
    int64_t per_block = FSDP_BLOCK_BYTES / (int64_t)box->element_size;
    return (count_elements(box) + per_block - 1) / per_block;
}

void fsdp_native_block_range(const fsdp_blocking *box, int64_t block, int64_t *first,
                             int64_t *count)
{
    if (box->chunk) {
        chunking c = describe_chunks(box);
        int64_t outer = block / c.per_outer, row = block % c.per_outer * c.step;
        int64_t rows = c.rows - row < c.step ? c.rows - row : c.step;
        *first = (outer * c.rows + row) * c.row;
        *count = rows * c.row;
        return;
    }
    int64_t per_block = FSDP_BLOCK_BYTES / (int64_t)box->element_size;
    int64_t total = count_elements(box);
    *first = block * per_block;
    *count = total - *first < per_block ? total - *first : per_block;
}

int64_t fsdp_native_block_of(const fsdp_blocking *box, int64_t element)
{
    if (box->chunk) {
        chunking c = describe_chunks(box);
        int64_t row = element / c.row;
        return row / c.rows * c.per_outer + row % c.rows / c.step;
    }
    return element / (FSDP_BLOCK_BYTES / (int64_t)box->element_size);
}

/* --- runs ------------------------------------------------------------------------------------- */

void fsdp_file_runs_begin(fsdp_file_runs *runs, const fsdp_file_place *place, int64_t first,
                          int64_t count)
{
    const int64_t *len = place->len, *strides = place->strides;
    int64_t run = 1, element_size = (int64_t)place->element_size;
    int outer = place->ndim;
    while (outer > 0 && (len[outer - 1] == 1 || strides[outer - 1] == run * element_size)) {
        outer--;
        run *= len[outer];
    }
    *runs = (fsdp_file_runs){.outer = outer,
                             .len = len,
                             .stride = strides,
                             .base = place->offset,
                             .run = run,
                             .at = first,
                             .end = first + count,
                             .element_size = element_size};
}

bool fsdp_file_runs_next(fsdp_file_runs *runs, int64_t *offset_out, int64_t *size_out)
{
    if (runs->at >= runs->end)
        return false;
    int64_t within = runs->at % runs->run, index = runs->at / runs->run;
    int64_t offset = runs->base + within * runs->element_size;
    for (int d = runs->outer - 1; d >= 0; d--) {
        offset += index % runs->len[d] * runs->stride[d];
        index /= runs->len[d];
    }
    int64_t count = runs->run - within;
    if (count > runs->end - runs->at)
        count = runs->end - runs->at;
    runs->at += count;
    *offset_out = offset;
    *size_out = count * runs->element_size;
    return true;
}
