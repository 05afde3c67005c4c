/* Reads .npy through the library's reader, and writes it. See train_npy.h. */
#include "tools/train/train_npy.h"

#include "base/text.h"
#include "tools/cli/cli.h"

#include <fsdp/checkpoint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- reading ------------------------------------------------------------------------------------- */

static fsdp_status open_array(const char *path, fsdp_checkpoint **file_out, fsdp_error *err)
{
    const fsdp_open_opts opts = {.format = "npy"};
    return fsdp_checkpoint_open(path, &opts, file_out, err);
}

static fsdp_status take_shape(const fsdp_checkpoint *file, const char *path, int ndim,
                              train_ids *ids, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(fsdp_checkpoint_sd(file), 0);
    if (!entry || entry->kind != FSDP_ENTRY_TENSOR || entry->dtype != FSDP_I64 ||
        entry->ndim != ndim)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is not an array of int64 with %d dimensions",
                         path, ndim);
    ids->ndim = ndim;
    memcpy(ids->shape, entry->shape, (size_t)ndim * sizeof *ids->shape);
    return FSDP_OK;
}

static fsdp_status read_array(fsdp_checkpoint *file, const char *path, int ndim, train_ids *ids,
                              fsdp_error *err)
{
    FSDP_TRY(take_shape(file, path, ndim, ids, err));
    const fsdp_box whole = fsdp_box_whole(ndim, ids->shape);
    int64_t count = fsdp_shape_count(ndim, ids->shape);
    ids->data = malloc((size_t)count * sizeof *ids->data + 1);
    if (!ids->data)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot read '%s': it does not fit in memory", path);
    return fsdp_checkpoint_read(file, 0, &whole, ids->data, FSDP_CHECK_BLOCKS, err);
}

fsdp_status train_ids_read(const char *path, int ndim, train_ids *ids_out, fsdp_error *err)
{
    fsdp_checkpoint *file = NULL;
    *ids_out = (train_ids){0};
    FSDP_TRY(open_array(path, &file, err));
    fsdp_status st = read_array(file, path, ndim, ids_out, err);
    fsdp_checkpoint_close(file);
    if (st != FSDP_OK)
        train_ids_release(ids_out);
    return st;
}

fsdp_status train_ids_count(const char *path, int ndim, int64_t *count_out, fsdp_error *err)
{
    train_ids ids = {0};
    fsdp_checkpoint *file = NULL;
    FSDP_TRY(open_array(path, &file, err));
    fsdp_status st = take_shape(file, path, ndim, &ids, err);
    *count_out = ids.shape[0];
    fsdp_checkpoint_close(file);
    return st;
}

fsdp_status train_ids_check(const train_ids *ids, const char *path, int64_t vocab, fsdp_error *err)
{
    const int64_t count = fsdp_shape_count(ids->ndim, ids->shape);
    for (int64_t i = 0; i < count; i++)
        if (ids->data[i] < 0 || ids->data[i] >= vocab)
            return fsdp_fail(
                err, FSDP_ERR_DAMAGED,
                "'%s': element %lld is %lld, which is outside the model's vocabulary of %lld", path,
                (long long)i, (long long)ids->data[i], (long long)vocab);
    return FSDP_OK;
}

void train_ids_release(train_ids *ids)
{
    free(ids->data);
    *ids = (train_ids){0};
}

/* --- writing ------------------------------------------------------------------------------------- */

/* Version 1.0 has magic, the length of the text, a Python dict padded to a multiple of 64 bytes. */
static void add_header(fsdp_text *text, fsdp_dtype dtype, int ndim, const int64_t *shape)
{
    fsdp_text dict = {0};
    fsdp_text_addf(&dict, "{'descr': '%s', 'fortran_order': False, 'shape': (",
                   dtype == FSDP_F32 ? "<f4" : "<i8");
    for (int i = 0; i < ndim; i++)
        fsdp_text_addf(&dict, "%lld,%s", (long long)shape[i], i + 1 < ndim ? " " : "");
    fsdp_text_addf(&dict, "), }");
    size_t size = (10 + dict.size + 1 + 63) / 64 * 64 - 10;
    const char lengths[2] = {(char)(size & 0xff), (char)(size >> 8)};
    fsdp_text_add(text, "\x93NUMPY\x01\x00", 8);
    fsdp_text_add(text, lengths, 2);
    fsdp_text_addf(text, "%s%*s\n", dict.data, (int)(size - 1 - dict.size), "");
    text->failed |= dict.failed;
    fsdp_text_release(&dict);
}

fsdp_status train_npy_write(const char *path, fsdp_dtype dtype, int ndim, const int64_t *shape,
                            const void *data, fsdp_error *err)
{
    fsdp_text header = {0};
    add_header(&header, dtype, ndim, shape);
    const cli_part parts[2] = {
        {header.data, header.size},
        {data, (size_t)fsdp_shape_count(ndim, shape) * (dtype == FSDP_F32 ? 4 : 8)}};
    fsdp_status st = header.failed ? fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory")
                                   : cli_write_output(path, parts, 2, err);
    fsdp_text_release(&header);
    return st;
}
