/*
 * The manifest: manifest.json, the commit point of a checkpoint. A checkpoint consists of the entries and
 * files that it lists: the identity, the description of the state dict (names, dtypes, shapes, layouts,
 * values) and one line per shard file. docs/native_format.md has the bytes.
 *
 * The text ends in a member "xxh3" with the XXH3-128 of all bytes before it, by which a reader detects a
 * truncated manifest.
 *
 * In: a described state dict and the records of files; or a directory. Out: the text; or the same struct. All
 * functions are local. save/, convert/, checkpoint/ and commit/ call this room.
 *
 *   manifest.c               head, list of files, closing hash; reading from a directory
 *   manifest_state.c         meshes, flat buffers, entries and their paths
 *   manifest_value.c         values; those over 64 KiB (large_value.h)
 *   disk_names.c             names of steps, staging directories and replaced checkpoints
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
#define FSDP_VIEW_TEMPORARY FSDP_VIEW_NAME ".tmp"   /* while it is rewritten */
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
    char *metadata;            /* texts that another program stored next to the tensors, a JSON object; NULL:
                                * none. As sd */
    fsdp_sd *sd;               /* owned after decode, borrowed for encode */
    fsdp_manifest_file *files; /* as sd */
    int file_count;
    fsdp_stored_value *stored; /* decode only */
    size_t stored_count;
} fsdp_manifest;

/* "shard-00003-of-00008.h5" */
enum { FSDP_SHARD_NAME_SIZE = 40 };
void fsdp_shard_name(int number, int count, char name_out[FSDP_SHARD_NAME_SIZE]);

/* True for the names of files that a checkpoint consists of. */
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

/* *ours_out is true when DIR/manifest.json begins like a native manifest of any version, even a damaged one:
 * other programs use that file name, too. False when there is no file or a shorter one; an unreadable file is
 * an error. */
fsdp_status fsdp_manifest_is_ours(fsdp_io *io, const char *dir, bool *ours_out, fsdp_error *err);
/* Like fsdp_manifest_is_ours, but returns the major format version in the text; 0 for other files. */
fsdp_status fsdp_manifest_major(fsdp_io *io, const char *dir, int *major_out, fsdp_error *err);

/* True when a text that begins (ends) with these bytes looks like a manifest of any version. */
bool fsdp_manifest_begins(const char *start, size_t size);
bool fsdp_manifest_ends(const char *end, size_t size);

/* Reads and decodes DIR/manifest.json and checks that every file is there with the right size.
 * A directory without a manifest is FSDP_ERR_NOT_FOUND "no manifest: not a complete checkpoint". */
fsdp_status fsdp_manifest_read(fsdp_io *io, const char *dir, fsdp_manifest *manifest_out, fsdp_error *err);

/* Like fsdp_manifest_read, without the check of the files: for callers that open every file. */
fsdp_status fsdp_manifest_read_alone(fsdp_io *io, const char *dir, fsdp_manifest *manifest_out,
                                     fsdp_error *err);

#endif
