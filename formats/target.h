/*
 * A checkpoint written for another program: the mirror of source.h. Everything that it will hold is known
 * before the first byte, so that every element has its place from the beginning, and threads write
 * wherever they are.
 *
 *   measure (how many files and bytes)  ->  create (all entries declared)  ->  write, from several
 *   threads at once  ->  finish, or discard
 *
 * The path is a staging name beside the real one: a target that was not finished is removed by the
 * caller, and the caller renames a finished one.
 */
#ifndef FSDP_TARGET_H
#define FSDP_TARGET_H

#include "base/io/io.h"
#include <fsdp/box.h>
#include <fsdp/dtype.h>
#include <fsdp/value.h>

/* What a format can hold. */
typedef struct fsdp_limits {
    const char *format;        /* as --to names it: "hf", "safetensors", "dcp", "torch", "hdf5", "npz" or
                                * "npy" */
    bool is_directory;
    bool values;               /* null, bool, numbers, strings, bytes, lists, dicts */
    bool opaque;               /* objects of classes, tensors inside values: as blobs (OPAQUE) */
    bool model_only;           /* optimizer states only when they are asked for */
    bool sharded;              /* cut over ranks: tensors have boxes */
    bool nameless;             /* one tensor, whose name is not kept */
    bool shares;               /* names of one tensor are stored once */
    bool (*holds_dtype)(fsdp_dtype dtype);
    /* Can it say that `dropped` is another name of tensor `kept`? NULL: never. */
    bool (*notes_tie)(const char *dropped, size_t dropped_size, const char *kept, size_t kept_size);
} fsdp_limits;

/* A name that is left out, and the tensor that it is another name of. */
typedef struct fsdp_target_tie {
    const char *name;
    size_t name_size;
    size_t entry;
} fsdp_target_tie;

/* A box of a tensor that one rank stores. */
typedef struct fsdp_target_box {
    int rank;
    const int64_t *lo, *len;   /* per dim */
} fsdp_target_box;

typedef struct fsdp_target_entry {
    const char *name;
    size_t name_size;
    const int32_t *path;               /* how the name is nested (name_path.h); NULL: not known */
    size_t path_count;
    /* a tensor, when value is NULL */
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;
    size_t same_as;                    /* the first entry that is the same tensor, counted from 1; or 0 */
    const fsdp_target_box *boxes;      /* in the order of ranks; targets that are not sharded: the whole */
    size_t box_count;
    /* or a value: OPAQUE ones hold a torch.save file that is copied as it is */
    const fsdp_value *value;
} fsdp_target_entry;

fsdp_box fsdp_target_box_at(const fsdp_target_entry *entry, size_t number);

typedef struct fsdp_target_opts {
    fsdp_io *io;
    const char *path;          /* a file to be created, or an empty directory that exists */
    const fsdp_target_entry *entries;  /* borrowed until finish or discard */
    size_t entry_count;
    int world;                 /* sharded: number of ranks */
    int64_t max_file_bytes;    /* hf: tensors of a file; 0: the format's default */
    const fsdp_target_tie *ties;       /* formats that note them; borrowed as the entries are */
    size_t tie_count;
    const char *copied;        /* hf: a JSON text about files beside it that is kept with the tensors, or
                                * NULL; its length must not change between measuring and writing */
    bool sync;
} fsdp_target_opts;

/* Its state is the format's own. */
typedef struct fsdp_target fsdp_target;

/* Where a box lies: its elements are one run there. */
typedef struct fsdp_target_place {
    char file[80];             /* name in the directory, "" for formats of one file */
    int64_t offset;
} fsdp_target_place;

typedef struct fsdp_target_ops {
    /* Files and bytes that create and write would make. io and path are not used. */
    fsdp_status (*measure)(const fsdp_target_opts *opts, int64_t *files_out, int64_t *bytes_out,
                           fsdp_error *err);
    fsdp_status (*create)(const fsdp_target_opts *opts, fsdp_target **target_out, fsdp_error *err);
    /* Elements [first, first + count) of the row-major order of one box of a tensor entry. Every element is
     * written once, in any order, by any thread; also those of entries that are the same as others. */
    fsdp_status (*write)(fsdp_target *target, size_t entry, size_t box, int64_t first, int64_t count,
                         const void *data, fsdp_error *err);
    /* Completes, syncs when asked for, closes and frees, also when it fails. */
    fsdp_status (*finish)(fsdp_target *target, fsdp_error *err);
    /* Closes and frees; what was written stays for the caller to remove. */
    void (*discard)(fsdp_target *target);
    /* Known from create on. NULL for a format that cannot tell: its plan has no places, and what was
     * written before a kill is written again. */
    fsdp_status (*place)(const fsdp_target *target, size_t entry, size_t box, fsdp_target_place *place_out,
                         fsdp_error *err);
} fsdp_target_ops;

typedef struct fsdp_target_format {
    fsdp_limits limits;
    /* Names of files that such a directory consists of: an overwrite deletes these and no others. NULL for
     * formats of one file. */
    bool (*owns)(const char *name);
    const fsdp_target_ops *ops;    /* NULL: a native file, which is written as a checkpoint of ours is */
} fsdp_target_format;

/* By the name that --to takes; NULL when there is none. */
const fsdp_target_format *fsdp_target_find(const char *name);
/* The i-th of them, NULL behind the last. */
const fsdp_target_format *fsdp_target_at(size_t i);

#endif
