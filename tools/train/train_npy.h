/* Reads arrays of NumPy's .npy files (batches, tokens), and writes them (logits, new ids). */
#ifndef FSDP_TRAIN_NPY_H
#define FSDP_TRAIN_NPY_H

#include <fsdp/dtype.h>
#include <fsdp/status.h>
#include <stdint.h>

typedef struct train_ids {
    int64_t *data;             /* freed by train_ids_release */
    int ndim;
    int64_t shape[3];          /* those before ndim */
} train_ids;

/* Reads an i64 array of `ndim` dims, at most 3. Other dtypes and shapes are FSDP_ERR_USAGE. */
fsdp_status train_ids_read(const char *path, int ndim, train_ids *ids_out, fsdp_error *err);
/* Finds its length in the first dim, without reading it. */
fsdp_status train_ids_count(const char *path, int ndim, int64_t *count_out, fsdp_error *err);
/* FSDP_ERR_DAMAGED names the first id beyond the vocabulary. */
fsdp_status train_ids_check(const train_ids *ids, const char *path, int64_t vocab, fsdp_error *err);
void train_ids_release(train_ids *ids);

/* Writes an array, f32 or i64; the file appears whole or not at all, in place of an older one. */
fsdp_status train_npy_write(const char *path, fsdp_dtype dtype, int ndim, const int64_t *shape,
                            const void *data, fsdp_error *err);

#endif
