/*
 * Room target: a checkpoint written for another program, the mirror of source.h. This header is what
 * statedict sees of it; packed.h serves the formats.
 *
 * In: a format name and all entries (names, dtypes, shapes, boxes per rank, values) before the first byte;
 * then elements, from several threads, in any order. Out: files of that format under a staging path.
 *
 *   measure (how many files and bytes)  ->  create (all entries declared)  ->  write, from several threads
 *   at once  ->  finish, or discard
 *
 *   target.c           boxes of entries
 *   packed.c           formats whose tensors are one run of bytes: offsets, checksums, files (packed.h), and
 *                      the functions of this header for them
 *   nesting.c          the dict and list paths of all entries, free of contradictions (nesting.h)
 *   container_table.c  containers by parent and key, for nesting.c, torch_write.c and dcp_write.c
 *
 * The formats themselves are in the rooms of their readers (<fsdp/format.h>).
 *
 * The path is a staging name next to the final one: the caller removes the files of a target that was not
 * finished, and renames a finished one.
 */
#ifndef FSDP_TARGET_H
#define FSDP_TARGET_H

#include "base/data/name_path.h"
#include "base/io/io.h"
#include "base/text.h"
#include <fsdp/box.h>
#include <fsdp/dtype.h>
#include <fsdp/format.h>
#include <fsdp/value.h>

/* A name that is omitted, and the tensor whose other name it is. */
typedef struct fsdp_target_tie {
    const char *name;
    size_t name_size;
    size_t entry;
} fsdp_target_tie;

/* A box of a tensor, which one rank stores. */
typedef struct fsdp_target_box {
    int rank;
    const int64_t *lo, *len;   /* per dim */
} fsdp_target_box;

typedef struct fsdp_target_entry {
    const char *name;
    size_t name_size;
    const int32_t *path;               /* nesting of the name (name_path.h); NULL: not known */
    size_t path_count;
    bool is_model, is_optim;           /* of the model, of its optimizer; neither: of a trainer */
    /* a tensor, if value is NULL */
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape;
    size_t same_as;                    /* the first entry of the same tensor, counted from 1; or 0 */
    const fsdp_target_box *boxes;      /* in the order of ranks; unsharded targets: one box, the whole */
    size_t box_count;
    /* or a value: OPAQUE values hold a torch.save file, which is copied */
    const fsdp_value *value;
} fsdp_target_entry;

fsdp_box fsdp_target_box_at(const fsdp_target_entry *entry, size_t number);

/* How the boxes of sharded tensors follow from a mesh: each mesh dim cuts the tensor dim `shard_dim` (dim 0
 * of tensors with fewer dims) as torch.chunk does, or holds copies. */
enum { FSDP_TARGET_MESH_DIMS = 4 };
typedef struct fsdp_target_mesh {
    int ndim;
    int64_t shape[FSDP_TARGET_MESH_DIMS];
    const char *names[FSDP_TARGET_MESH_DIMS];  /* the user's; all NULL: the user named none */
    bool copies[FSDP_TARGET_MESH_DIMS];
    int shard_dim;
} fsdp_target_mesh;

typedef struct fsdp_target_opts {
    const fsdp_format *format;
    fsdp_io *io;
    const char *path;          /* a file to create, or an existing empty directory */
    const fsdp_target_entry *entries;  /* borrowed until finish or discard */
    size_t entry_count;
    int world;                 /* sharded: number of ranks */
    const fsdp_target_mesh *mesh;      /* sharded: of that many ranks; NULL: one dim, which cuts dim 0 */
    int64_t max_file_bytes;    /* hf: bytes of tensors per file; 0: the format's default */
    const fsdp_target_tie *ties;       /* for formats that record them; borrowed as the entries are */
    size_t tie_count;
    const char *stem;          /* hf: of its files, one of fsdp_hf_stems; NULL: "model" */
    const char *copied;        /* hf: a JSON text about files next to it that is kept with the tensors, or
                                * NULL; its length must not change between measuring and writing */
    const char *metadata;      /* formats with caps.metadata: a JSON object of texts that are stored next
                                * to the tensors, or NULL */
    const char *namespaces;    /* torch: the dict of this key is an argparse.Namespace; NULL: none */
    bool sync;
} fsdp_target_opts;

/* The format defines the struct. */
typedef struct fsdp_target fsdp_target;

/* Tells where a box is stored; its elements are one run there. */
typedef struct fsdp_target_place {
    const char *file;          /* name in the directory, borrowed from the target; "": of one file */
    int64_t offset;
} fsdp_target_place;

/* Elements [first, first + count) of the row-major order of one box of a tensor entry. */
typedef struct fsdp_target_piece {
    size_t entry, box;
    int64_t first, count;
    const void *data;
} fsdp_target_piece;

typedef struct fsdp_target_ops {
    /* Computes the files and bytes that create and write would make. io and path are not used. */
    fsdp_status (*measure)(const fsdp_target_opts *opts, int64_t *files_out, int64_t *bytes_out,
                           fsdp_error *err);
    fsdp_status (*create)(const fsdp_target_opts *opts, fsdp_target **target_out, fsdp_error *err);
    /* Every element is written once, in any order, by any thread, also for entries that are the same as
     * others. */
    fsdp_status (*write)(fsdp_target *target, const fsdp_target_piece *piece, fsdp_error *err);
    /* Writes trailers and checksums, syncs if requested, closes and frees; it frees after a failure, too. */
    fsdp_status (*finish)(fsdp_target *target, fsdp_error *err);
    /* Closes and frees. The caller removes the files. */
    void (*discard)(fsdp_target *target);
    /* Places are known after create. NULL for a format that has none: its plan lists no places, and a
     * resumed conversion writes everything again. */
    fsdp_status (*place)(const fsdp_target *target, size_t entry, size_t box, fsdp_target_place *place_out,
                         fsdp_error *err);
} fsdp_target_ops;

/* The functions that write a format. */
typedef struct fsdp_format_writer {
    const fsdp_target_ops *ops;    /* NULL: a native format, which statedict/convert writes */
    const struct fsdp_packed_format *packed;   /* for the ops of packed formats */
    /* Returns true for names that files of such a directory have: an overwrite deletes these and no
     * others. NULL for formats of one file. */
    bool (*owns)(const char *name);
    bool (*holds_dtype)(fsdp_dtype dtype);
    /* Returns true for values that the format can hold, by their names. NULL: all. */
    bool (*holds_value)(const char *name, size_t size, const fsdp_value *value);
    /* Returns true when the format can record `dropped` as another name of tensor `kept`. NULL
     * without caps.notes_ties. */
    bool (*notes_tie)(const char *dropped, size_t dropped_size, const char *kept, size_t kept_size);
} fsdp_format_writer;

/* Puts the new name of an entry into `item`, for formats with caps.in_items, where it is a tensor without a
 * key above it, or its first element cannot be a key. item NULL: it is a value. */
fsdp_status fsdp_target_put_into_item(const fsdp_path *old, const char *item, fsdp_text *name,
                                      fsdp_error *err);

/* The names that loaders give to files of weights ("model", "adapter_model", ...), up to NULL. */
extern const char *const fsdp_hf_stems[];

/* Returns the format that a model in this layout, or a path with the suffix of this format, gets where the
 * other one is asked for; else that one. */
const fsdp_format *fsdp_format_for(const fsdp_format *format, const char *other);

#endif
