/*
 * What a conversion tells the one that may have to go on with it: the file .resume in its staging directory.
 * A head (the hash of the plan, a unit), then one record of equal size for each piece that is finished, at
 * its number's place. A record is a claim, never a proof: who takes a piece over reads it and compares
 * hashes.
 *
 * Everything here is best effort. A record that is not written is a piece that is written again.
 */
#ifndef FSDP_RESUME_H
#define FSDP_RESUME_H

#include "base/io/io.h"
#include "statedict/manifest/disk_names.h"
#include <fsdp/checkpoint.h>

typedef struct fsdp_resume {
    fsdp_file *file;           /* NULL: nothing is noted */
    char *path;
    int64_t unit;              /* what a piece is; of the conversion that began */
} fsdp_resume;

/* Is the directory ours, and of a conversion with that plan? */
bool fsdp_resume_matches(fsdp_io *io, const char *staging, const char *hash);

/* In a new staging directory, or (is_there) in one that matched. */
void fsdp_resume_begin(fsdp_resume *resume, fsdp_io *io, const char *staging, const char *hash, int64_t unit,
                       bool is_there);
/* False when there is none. */
bool fsdp_resume_get(const fsdp_resume *resume, int64_t number, void *record, size_t size);
/* Several threads may note pieces of different numbers. */
void fsdp_resume_put(const fsdp_resume *resume, int64_t number, const void *record, size_t size);
void fsdp_resume_end(fsdp_resume *resume);

/* Notices: what is gone on with (NULL: nothing is there), and how many bytes need not be written again. */
void fsdp_resume_tell(const fsdp_watch *watch, const char *staging);
void fsdp_resume_tell_kept(const fsdp_watch *watch, int64_t bytes);

/* Bytes in the staging directories beside `to` that match and whose makers are dead, but for the notes
 * themselves: room that is taken already. */
int64_t fsdp_resume_bytes(fsdp_io *io, const char *to, const char *hash);

#endif
