/*
 * Shared by the files of the commit: markers, places, and the way to publish and delete where a directory
 * cannot be renamed. docs/commit.md has the whole protocol.
 */
#ifndef FSDP_COMMIT_INTERNAL_H
#define FSDP_COMMIT_INTERNAL_H

#include "statedict/commit/commit.h"
#include "statedict/manifest/disk_names.h"

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

/* Deletes what is at `path` as NAME.deleting-UUID; `parent` holds both. */
fsdp_status fsdp_delete_as(fsdp_io *io, const char *path, const char *parent, const char *name,
                           fsdp_error *err);

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
