/* Names on the disk: steps of a run, and directories next to a checkpoint while it is written or deleted.
 * docs/commit.md has the grammar. */
#ifndef FSDP_DISK_NAMES_H
#define FSDP_DISK_NAMES_H

#include "base/io/io.h"

#define FSDP_SUFFIX_STAGING ".tmp-"
#define FSDP_SUFFIX_DELETING ".deleting-"
#define FSDP_SUFFIX_REPLACED ".old-"   /* a whole checkpoint that an overwrite set aside */
#define FSDP_MARKER_SAVING ".saving"         /* in a staging directory, until it becomes DIR */
#define FSDP_MARKER_PUBLISHING ".publishing" /* in one whose files move one by one */
#define FSDP_RESUME_NAME ".resume"           /* in a staging directory: the notes of a conversion */

/* PATH.xxh3 holds digests of the checkpoint PATH (checkpoint/digests.h); its first bytes. */
#define FSDP_DIGESTS_SUFFIX ".xxh3"
#define FSDP_DIGESTS_MAGIC "fsdp-digests "

/* 32 hex digits of randomness; names only, never stored in a checkpoint. */
void fsdp_random_hex(char out[33]);

/* --- names in a run: step-%08d, .tmp-UUID, .deleting-UUID, .old-UUID --- */
typedef enum fsdp_step_name_kind {
    FSDP_NAME_OTHER, FSDP_NAME_STEP, FSDP_NAME_STAGING, FSDP_NAME_DELETING, FSDP_NAME_REPLACED
} fsdp_step_name_kind;
enum { FSDP_STEP_NAME_SIZE = 64 };
void fsdp_step_name(int64_t step, char name_out[FSDP_STEP_NAME_SIZE]);
/* Exact grammar: "step-900.bak" is OTHER. */
fsdp_step_name_kind fsdp_step_parse(const char *name, int64_t *step_out);

/* "DIR" + suffix + 32 random digits, in fresh memory. */
fsdp_status fsdp_beside_name(const char *dir, const char *suffix, char **path_out, fsdp_error *err);
/* True for the name of a staging directory. */
bool fsdp_dir_is_staging(const char *dir);
/* FSDP_ERR_USAGE when DIR's name has no space for the longest suffix. */
fsdp_status fsdp_name_check_room(const char *dir, fsdp_error *err);
/* True for the name of a step of a run. `target` is a result of fsdp_path_split, so that no memory is needed:
 * a failed allocation must not turn a step into another name. */
bool fsdp_target_is_step(const char *target, int64_t *step_out);
bool fsdp_dir_is_step(const char *dir, int64_t *step_out);
/* FSDP_ERR_USAGE when DIR has the name of another step than `step`. */
fsdp_status fsdp_name_check_step(const char *dir, int64_t step, fsdp_error *err);
/* "DIR" without trailing slashes and the directory that holds it; both in fresh memory, or NULL. */
fsdp_status fsdp_path_split(const char *dir, char **path_out, char **parent_out, fsdp_error *err);

/*
 * Calls visit for every existing "DIR" + suffix + 32 digits, until it returns false. Returns false when the
 * parent cannot be listed or memory is short.
 */
bool fsdp_beside_each(fsdp_io *io, const char *dir, const char *suffix,
                      bool (*visit)(void *context, const char *path), void *context);

/* True when DIR.old-UUID holds a manifest: then *path_out is its path (fresh memory). */
bool fsdp_replaced_find(fsdp_io *io, const char *dir, char **path_out);

bool fsdp_has_manifest(fsdp_io *io, const char *dir);
/* True when there is certainly no manifest. Both are false when the directory cannot be read. */
bool fsdp_lacks_manifest(fsdp_io *io, const char *dir);

#endif
