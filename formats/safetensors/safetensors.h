/*
 * The header of a safetensors file, checked: also DCP keeps such files.
 *
 *     u64 n (little-endian), n bytes of JSON, then the data of the tensors without gaps or overlaps
 */
#ifndef FSDP_SAFETENSORS_H
#define FSDP_SAFETENSORS_H

#include "base/data/name_table.h"
#include "formats/source.h"
#include "formats/source/spelling.h"

typedef struct fsdp_safetensors_entry {
    const char *name;          /* as the file spells it */
    size_t name_size;
    const char *true_name;     /* the same, unless it was escaped */
    size_t true_size;
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;      /* ours: the last dim of F4 and F6 counts bytes */
    int64_t begin, end;        /* in the file */
    bool is_added;             /* for readers: it is a tensor of the source, with this number */
    size_t tensor;
    const int64_t *lo;         /* where it lies in the whole tensor (DCP_SHARDING_INFO); NULL: not told */
} fsdp_safetensors_entry;

/* Zero-initialise; release when done, also after a failure. */
typedef struct fsdp_safetensors {
    fsdp_arena arena;
    fsdp_safetensors_entry *entries;   /* in the order of the header */
    size_t count, room;
    fsdp_name_table names;     /* -> number of the entry */
    bool has_metadata, is_sharded;     /* sharded: it has a DCP_SHARDING_INFO */
    fsdp_text metadata;        /* as a JSON object */
    fsdp_spelling spelling;
} fsdp_safetensors;

/* Reads the header of a file of the source, which is nothing but safetensors. */
fsdp_status fsdp_safetensors_read(const fsdp_source *source, int file, fsdp_safetensors *header,
                                  fsdp_error *err);
void fsdp_safetensors_release(fsdp_safetensors *header);

/* Of a directory without an index: a set whose names count its files must have them all. FSDP_ERR_DAMAGED
 * names the first that is missing. */
fsdp_status fsdp_safetensors_check_set(const char *directory, const char *const *names, size_t count,
                                       fsdp_error *err);

#endif
