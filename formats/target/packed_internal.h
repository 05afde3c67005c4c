/* The target as packed formats see it; see packed.h. */
#ifndef FSDP_PACKED_INTERNAL_H
#define FSDP_PACKED_INTERNAL_H

#include "base/core/mem.h"
#include "base/data/name_table.h"
#include "base/data/text_pairs.h"
#include "formats/target/packed.h"
#include <fsdp/box.h>
#include "base/text.h"

#include <pthread.h>

/* A range of written elements; neighbours are joined. */
typedef struct target_range {
    int64_t first, count;
    uint32_t crc;
} target_range;

typedef struct target_tensor {
    fsdp_packed_tensor what;
    const char *stored_name;       /* name in the file, set before lay_out */
    size_t stored_name_size;
    int64_t count, size;       /* elements, bytes */
    int file;                  /* set by lay_out */
    int64_t offset;
    target_range *ranges;      /* sorted */
    size_t range_count, range_room;
} target_tensor;

typedef struct target_file {
    const char *path;
    fsdp_file *file;
} target_file;

typedef struct target_value {
    const char *name;
    size_t name_size;
    fsdp_value value;
} target_value;

typedef struct target_tie {
    const char *name;
    size_t name_size;
    size_t tensor;
} target_tie;

struct fsdp_packed_format {
    bool has_crc;              /* the format needs range.crc */
    bool (*holds_name)(const char *name, size_t size);   /* NULL: any */
    /* Adds files, gives every tensor its file and offset, writes headers. */
    fsdp_status (*lay_out)(fsdp_packed *target, fsdp_error *err);
    /* Writes trailers and checksums, after all elements. NULL: the format has none. */
    fsdp_status (*finish)(fsdp_packed *target, fsdp_error *err);
};

struct fsdp_packed {
    const fsdp_format *format;
    const fsdp_packed_format *packed;  /* of its writer */
    fsdp_packed_opts opts;
    fsdp_io *io;
    char *path;
    bool has_directory;        /* the directory was created here */
    fsdp_arena arena;
    fsdp_name_table names;
    target_tensor *tensors;
    size_t tensor_count, tensor_room;
    target_value *values;
    size_t value_count, value_room;
    target_tie *ties;
    size_t tie_count, tie_room;
    const char *copied;        /* or NULL */
    fsdp_text_pairs metadata;
    fsdp_text escaped_names;        /* {"escaped": "true name"}, empty when no name is escaped */
    target_file *files;
    size_t file_count, file_room;
    int64_t file_bytes;        /* of all files */
    pthread_mutex_t lock;      /* of the ranges */
};

/* Creates a file of this size: at the target's path, or under `name` in it when that is a directory. */
fsdp_status fsdp_packed_add_file(fsdp_packed *target, const char *name, int64_t size, int *number_out,
                                 fsdp_error *err);
fsdp_status fsdp_packed_put(fsdp_packed *target, int file, const void *data, size_t size, int64_t offset,
                            fsdp_error *err);
/* CRC-32 of all bytes of a complete tensor. */
uint32_t fsdp_packed_crc(const target_tensor *tensor);

#endif
