/*
 * Targets (target.h) in which every tensor is one run of bytes in one file: safetensors, Hugging Face
 * directories, NumPy's, GGUF and llm.c's files.
 *
 *   create  ->  add tensors and values, in order  ->  lay out: creates the files, gives every tensor its
 *   offset  ->  write elements, from any thread and in any order  ->  finish, or discard
 */
#ifndef FSDP_PACKED_H
#define FSDP_PACKED_H

#include "formats/target.h"

typedef struct fsdp_packed fsdp_packed;
typedef struct fsdp_packed_format fsdp_packed_format;

/* The functions of target.h for these formats, whose writers have a fsdp_packed_format. */
extern const fsdp_target_ops fsdp_packed_ops;

typedef struct fsdp_packed_opts {
    fsdp_io *io;               /* NULL: the file system */
    int64_t max_shard_size;    /* hf: bytes of tensors per file; 0: 5 * 10^9 */
    const char *stem;          /* hf: of the names of its files; NULL: "model" */
    bool sync;                 /* finish syncs everything but the caller's directory */
} fsdp_packed_opts;

typedef struct fsdp_packed_tensor {
    const char *name;          /* NULL: only inside a value */
    size_t name_size;
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;
} fsdp_packed_tensor;

/* path: a new file, or a directory, which is created if necessary. Nothing is created before the layout. */
fsdp_status fsdp_packed_create(const fsdp_format *format, const fsdp_packed_opts *opts,
                               const char *path,
                               fsdp_packed **target_out, fsdp_error *err);

/* Copies everything. FSDP_ERR_USAGE: the format cannot hold that dtype, or the name exists already. */
fsdp_status fsdp_packed_add_tensor(fsdp_packed *target, const fsdp_packed_tensor *tensor, size_t *number_out,
                                   fsdp_error *err);
/* Tensors in the value (FSDP_VALUE_TENSOR) are numbers of this target. */
fsdp_status fsdp_packed_add_value(fsdp_packed *target, const char *name, size_t name_size,
                                  const fsdp_value *value, fsdp_error *err);

/* Creates the files at their full size and writes the headers in front of the tensors. */
fsdp_status fsdp_packed_lay_out(fsdp_packed *target, fsdp_error *err);

/* The place of a tensor's bytes, packed row-major and little-endian. */
typedef struct fsdp_packed_place {
    fsdp_file *file;
    const char *path;          /* of the file */
    int64_t offset, size;
} fsdp_packed_place;
fsdp_packed_place fsdp_packed_place_of(const fsdp_packed *target, size_t tensor);

/* Writes elements [first, first + count) of a tensor, each once. Any thread. */
fsdp_status fsdp_packed_write(fsdp_packed *target, size_t tensor, int64_t first, int64_t count,
                              const void *data,
                              fsdp_error *err);

/* Completes the files; every element must have been written. Frees the target in any case. */
fsdp_status fsdp_packed_finish(fsdp_packed *target, fsdp_error *err);
/* Closes and frees. The files stay: what they hold already may be taken up. Accepts NULL. */
void fsdp_packed_discard(fsdp_packed *target);

#endif
