/*
 * What the files of the commit share: names beside a checkpoint, and the way to publish and delete
 * where a directory cannot be renamed. docs/commit.md tells the whole story.
 */
#ifndef FSDP_COMMIT_INTERNAL_H
#define FSDP_COMMIT_INTERNAL_H

#include "statedict/commit/commit.h"

#define FSDP_SUFFIX_STAGING ".tmp-"
#define FSDP_SUFFIX_DELETING ".deleting-"
#define FSDP_SUFFIX_REPLACED ".old-"   /* a whole checkpoint that an overwrite set aside */

#define FSDP_MARKER_SAVING ".saving"         /* in a staging directory, from begin until it is DIR */
#define FSDP_MARKER_PUBLISHING ".publishing" /* in one whose files move one by one */

/*
 * A locked file in a directory that is being made, see commit_marker.c; closing it ends the lock.
 * Taking over succeeds only when the maker is known to be dead; *marker_out then holds the lock.
 */
fsdp_status fsdp_marker_create(fsdp_io *io, const char *dir, const char *name, fsdp_file **marker_out,
                               fsdp_error *err);
bool fsdp_marker_take_over(fsdp_io *io, const char *dir, const char *name, fsdp_file **marker_out);

/* HELD: its maker is at work. FREE: nobody of this machine holds it. */
typedef enum fsdp_marker_state {
    FSDP_MARKER_MISSING, FSDP_MARKER_FREE, FSDP_MARKER_HELD, FSDP_MARKER_UNKNOWN
} fsdp_marker_state;
fsdp_marker_state fsdp_marker_look(fsdp_io *io, const char *dir, const char *name);
void fsdp_marker_remove(fsdp_io *io, const char *dir, const char *name);
/* Removes what a save that was killed right after it published left in the checkpoint DIR, where it means
 * nothing any more. True when there was one, nobody held it, and it is gone. */
bool fsdp_marker_forget(fsdp_io *io, const char *dir);

/* "DIR" + suffix + 32 random digits, in fresh memory. */
fsdp_status fsdp_beside_name(const char *dir, const char *suffix, char **path_out, fsdp_error *err);
/* Is it the name of a staging directory, which nobody but its maker has made a checkpoint of yet? */
bool fsdp_dir_is_staging(const char *dir);
/* FSDP_ERR_USAGE when DIR's name has no room for the longest suffix. */
fsdp_status fsdp_name_check_room(const char *dir, fsdp_error *err);
/* Is DIR's name that of a step of a run? A target is a path that was split: then it needs no memory, for want
 * of which a step would be taken for something else. */
bool fsdp_target_is_step(const char *target, int64_t *step_out);
bool fsdp_dir_is_step(const char *dir, int64_t *step_out);
/* FSDP_ERR_USAGE when DIR's name is that of another step than the one it is to hold. */
fsdp_status fsdp_name_check_step(const char *dir, int64_t step, fsdp_error *err);
/* "DIR" without trailing slashes and the directory that holds it; both in fresh memory, or NULL. */
fsdp_status fsdp_path_split(const char *dir, char **path_out, char **parent_out, fsdp_error *err);

/* Brings back or clears away what an interrupted overwrite, publish or delete left at DIR. */
fsdp_status fsdp_place_recover(fsdp_io *io, const char *dir, fsdp_error *err);

/* May a checkpoint be saved as DIR? Its parent must be a directory that can be written and is no
 * checkpoint itself, and DIR must not exist; with overwrite it may be a checkpoint and nothing else. */
fsdp_status fsdp_place_check(fsdp_io *io, const char *dir, bool overwrite, fsdp_error *err);
/* Do the two paths lead to the same file or directory? */
bool fsdp_paths_are_same(fsdp_io *io, const char *a, const char *b);

/* The half of it that is the same for every format: may anything of that name be created there? */
fsdp_status fsdp_place_check_parent(fsdp_io *io, const char *dir, fsdp_error *err);
/* Writing never goes through a link: FSDP_ERR_EXISTS where the name is one, wherever it leads. */
fsdp_status fsdp_place_refuse_link(fsdp_io *io, const char *path, fsdp_error *err);

/*
 * Calls visit for every "DIR" + suffix + 32 digits that is there, until it returns false. False when
 * the parent cannot be listed or memory is short.
 */
bool fsdp_beside_each(fsdp_io *io, const char *dir, const char *suffix,
                      bool (*visit)(void *user, const char *path), void *user);

/* True when DIR.old-UUID holds a manifest: then *path_out is its path (fresh memory). */
bool fsdp_replaced_find(fsdp_io *io, const char *dir, char **path_out);

/* Deletes what is at `path` as NAME.deleting-UUID; `parent` holds both. */
fsdp_status fsdp_delete_as(fsdp_io *io, const char *path, const char *parent, const char *name,
                           fsdp_error *err);

bool fsdp_has_manifest(fsdp_io *io, const char *dir);
/* It is known that there is none. Both are false when nobody can tell. */
bool fsdp_lacks_manifest(fsdp_io *io, const char *dir);

/* A rename that failed like this can be replaced by moving the files one by one. */
bool fsdp_moves_needed(int result);
/* `from` becomes the new directory `to`, manifest last. */
fsdp_status fsdp_moves_publish(fsdp_io *io, const char *from, const char *to, bool durable,
                               fsdp_error *err);
/* Takes the manifest away first; `aside` is created to say so until the rest is gone. */
fsdp_status fsdp_moves_delete(fsdp_io *io, const char *dir, const char *aside, fsdp_error *err);
/*
 * Removes DIR when it has no manifest and what lies beside it proves that it is what an interrupted
 * fsdp_moves_publish or fsdp_moves_delete left. FSDP_ERR_EXISTS when that publish is still at work.
 */
fsdp_status fsdp_moves_clear(fsdp_io *io, const char *dir, fsdp_error *err);

/* For tests that hold the run's lease themselves: fsdp_staging_begin without taking it. */
fsdp_status fsdp_staging_begin_held(fsdp_io *io, const char *dir, bool durable, bool overwrite,
                                    fsdp_staging *staging_out, fsdp_error *err);

#endif
