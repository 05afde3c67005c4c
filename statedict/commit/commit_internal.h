/* Shared by the files of this room: markers, checks of the target, and moves file by file. See commit.h. */
#ifndef FSDP_COMMIT_INTERNAL_H
#define FSDP_COMMIT_INTERNAL_H

#include "statedict/commit/commit.h"
#include "statedict/manifest/disk_names.h"

/*
 * A marker is a locked file in a directory that is being made, see commit_marker.c; closing it unlocks it.
 * Taking a marker over succeeds only when its process is known to be dead; *marker_out then holds the lock.
 */
fsdp_status fsdp_marker_create(fsdp_io *io, const char *dir, const char *name, fsdp_file **marker_out,
                               fsdp_error *err);
bool fsdp_marker_take_over(fsdp_io *io, const char *dir, const char *name, fsdp_file **marker_out);

/* HELD: the process that made it is alive. FREE: no process of this machine has it locked. */
typedef enum fsdp_marker_state {
    FSDP_MARKER_MISSING, FSDP_MARKER_FREE, FSDP_MARKER_HELD, FSDP_MARKER_UNKNOWN
} fsdp_marker_state;
fsdp_marker_state fsdp_marker_look(fsdp_io *io, const char *dir, const char *name);
void fsdp_marker_remove(fsdp_io *io, const char *dir, const char *name);
/* Removes the marker that a save left in the checkpoint DIR when it was killed right after publishing. True
 * when there was an unlocked marker and it was removed. */
bool fsdp_marker_forget(fsdp_io *io, const char *dir);

/* Checks that a checkpoint may be saved as DIR: the parent is a writable directory and no checkpoint, and
 * DIR does not exist or, with overwrite, is a checkpoint. */
fsdp_status fsdp_place_check(fsdp_io *io, const char *dir, bool overwrite, fsdp_error *err);
/* Removes the digest file DIR.xxh3 before DIR becomes another checkpoint or goes away: the new one would not
 * match it. A file of another program under this name stays. */
fsdp_status fsdp_place_forget_digests(fsdp_io *io, const char *dir, const char *parent, bool durable,
                                      fsdp_error *err);
/* True when both paths lead to the same file or directory. */
bool fsdp_paths_are_same(fsdp_io *io, const char *a, const char *b);

/* The part of fsdp_place_check that holds for every format: DIR can be created in its parent. */
fsdp_status fsdp_place_check_parent(fsdp_io *io, const char *dir, fsdp_error *err);
/* FSDP_ERR_EXISTS when the path is a symbolic link, dangling or not: nothing is written through links. */
fsdp_status fsdp_place_refuse_link(fsdp_io *io, const char *path, fsdp_error *err);

/* One path that takes the place of another: a staging directory, or the result of a conversion. */
typedef struct fsdp_swap {
    fsdp_io *io;
    const char *path;          /* complete, and durable when that is asked for */
    const char *target;
    const char *parent;        /* holds the target */
    const char *folder;        /* holds the path; NULL: the parent does */
    bool durable;
    bool is_checkpoint;        /* where a directory cannot be renamed, its files are, the manifest last */
} fsdp_swap;
/* Syncs the directories that a rename or exchange of path and target changed, when that is asked for. */
fsdp_status fsdp_swap_sync(const fsdp_swap *swap, fsdp_error *err);
/* The target must not exist. After a failure it does not, or is another job's. */
fsdp_status fsdp_swap_new(const fsdp_swap *swap, fsdp_error *err);
/* Directories. After a failure the target is the old one; or, *is_old_out, the new one, and the old one is at
 * `path`. */
fsdp_status fsdp_swap_replace(const fsdp_swap *swap, bool *is_old_out, fsdp_error *err);

/* Deletes what is at `path` as NAME.deleting-UUID; `parent` holds both. */
fsdp_status fsdp_delete_as(fsdp_io *io, const char *path, const char *parent, const char *name,
                           fsdp_error *err);

/* True when moving the files one by one can replace a rename that failed with this result. */
bool fsdp_moves_needed(int result);
/* Moves the files of `from` into the new directory `to`, the manifest last. */
fsdp_status fsdp_moves_publish(fsdp_io *io, const char *from, const char *to, bool durable,
                               fsdp_error *err);

/*
 * Removes DIR when it has no manifest and a directory next to it proves that an interrupted
 * fsdp_moves_publish or a deletion left it. FSDP_ERR_EXISTS when that publish is still running.
 */
fsdp_status fsdp_moves_clear(fsdp_io *io, const char *dir, fsdp_error *err);

#endif
