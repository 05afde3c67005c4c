/*
 * The manifest: manifest.json, the commit point of a checkpoint and the only thing that says what
 * exists. It holds the identity, the state dict's description (names, dtypes, shapes, layouts,
 * values) and one line per shard file. Byte level: docs/native_format.md.
 *
 * The text ends in a member "xxh3" with the XXH3-128 of everything before it, so that a reader knows
 * a whole manifest from a torn one without asking anybody.
 */
#ifndef FSDP_MANIFEST_H
#define FSDP_MANIFEST_H

#include "base/io/io.h"
#include "kernels/kernels.h"
#include <fsdp/checkpoint.h>
#include <fsdp/sd.h>
#include "base/text.h"

#define FSDP_MANIFEST_NAME "manifest.json"
#define FSDP_MANIFEST_TEMPORARY FSDP_MANIFEST_NAME ".tmp"
#define FSDP_VIEW_NAME "index.h5"
#define FSDP_VIEW_TEMPORARY FSDP_VIEW_NAME ".tmp"   /* while it is written anew */
enum { FSDP_FORMAT_MAJOR = 1, FSDP_FORMAT_MINOR = 0 };
enum { FSDP_MANIFEST_MAX = 1 << 30 };

/* One shard file; its name follows from its number and the world size. */
typedef struct fsdp_manifest_file {
    int64_t size;
    int64_t index_offset, index_size;
    fsdp_hash index_hash;
} fsdp_manifest_file;

/* A value entry that is null until its bytes are read from rank 0's file (large_value.h). */
typedef struct fsdp_stored_value {
    size_t entry;
    fsdp_value_kind kind;
    int64_t size;
} fsdp_stored_value;

typedef struct fsdp_manifest {
    int minor;                 /* format version that the writer knew; decode only */
    fsdp_kind kind;
    int64_t step;              /* -1: none */
    uint8_t run[16];
    int world;                 /* ranks that saved; also the number of files, but 1 for full */
    fsdp_owner_policy owners;
    bool compressed;
    fsdp_sd *sd;               /* owned after decode, borrowed for encode */
    fsdp_manifest_file *files; /* as sd */
    int file_count;
    fsdp_stored_value *stored; /* decode only */
    size_t stored_count;
} fsdp_manifest;

/* "shard-00003-of-00008.h5" */
enum { FSDP_SHARD_NAME_SIZE = 40 };
void fsdp_shard_name(int number, int count, char name_out[FSDP_SHARD_NAME_SIZE]);

/* A checkpoint consists of files with such names, and no other. */
bool fsdp_is_checkpoint_file(const char *name);

fsdp_status fsdp_manifest_encode(const fsdp_manifest *manifest, fsdp_text *text, fsdp_error *err);
/*
 * path is for messages. A damaged, truncated or contradictory text is FSDP_ERR_DAMAGED; a higher
 * major version FSDP_ERR_NOT_FOUND naming the version needed. Every count is checked against the
 * bytes that remain.
 */
fsdp_status fsdp_manifest_decode(const char *text, size_t size, const char *path,
                                 fsdp_manifest *manifest_out, fsdp_error *err);
void fsdp_manifest_release(fsdp_manifest *manifest);

/* Does DIR/manifest.json begin like one of ours, of any version, damaged behind that or not? Other
 * programs have files of that name, too. No file, or a shorter one, is no; what cannot be read is an
 * error, not an answer. */
fsdp_status fsdp_manifest_is_ours(fsdp_io *io, const char *dir, bool *ours_out, fsdp_error *err);
/* The same: the major format version it states, 0 when it is none of ours. */
fsdp_status fsdp_manifest_major(fsdp_io *io, const char *dir, int *major_out, fsdp_error *err);

/* Does a text that begins, or ends, with these bytes look like a manifest of any version? */
bool fsdp_manifest_begins(const char *start, size_t size);
bool fsdp_manifest_ends(const char *end, size_t size);

/* Reads and decodes DIR/manifest.json and checks that every file is there with the right size.
 * A directory without a manifest is FSDP_ERR_NOT_FOUND "no manifest: not a complete checkpoint". */
fsdp_status fsdp_manifest_read(fsdp_io *io, const char *dir, fsdp_manifest *manifest_out, fsdp_error *err);

/* The same without a look at the files: for who looks at each of them. */
fsdp_status fsdp_manifest_read_alone(fsdp_io *io, const char *dir, fsdp_manifest *manifest_out,
                                     fsdp_error *err);

#endif
