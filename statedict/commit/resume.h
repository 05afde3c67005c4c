/*
 * The file .resume in the staging directory of a conversion: it lets a later conversion continue an
 * interrupted one. A head (the hash of the plan, a unit), then one record of equal size per finished piece,
 * at the place of the piece's number. A record is not a proof: before a piece is reused, it is read and its
 * hash compared.
 *
 * Everything here is best effort. A piece without a record is written again.
 */
#ifndef FSDP_RESUME_H
#define FSDP_RESUME_H

#include "base/io/io.h"
#include "statedict/manifest/disk_names.h"
#include <fsdp/checkpoint.h>

typedef struct fsdp_resume {
    fsdp_file *file;           /* NULL: no records are kept */
    char *path;
    int64_t unit;              /* size of a piece, as the first conversion chose it */
} fsdp_resume;

/* True when this user owns the directory and its .resume has that hash of a plan. */
bool fsdp_resume_matches(fsdp_io *io, const char *staging, const char *hash);

/* Creates .resume in a new staging directory or, with is_there, opens it in one that matched. */
void fsdp_resume_begin(fsdp_resume *resume, fsdp_io *io, const char *staging, const char *hash, int64_t unit,
                       bool is_there);
/* False when there is no record. */
bool fsdp_resume_get(const fsdp_resume *resume, int64_t number, void *record, size_t size);
/* Several threads may put records of different numbers. */
void fsdp_resume_put(const fsdp_resume *resume, int64_t number, const void *record, size_t size);
void fsdp_resume_end(fsdp_resume *resume);

/* Notices: the staging directory that is continued (NULL: the conversion starts again), and the bytes
 * reused. */
void fsdp_resume_notify(const fsdp_watch *watch, const char *staging);
void fsdp_resume_notify_kept(const fsdp_watch *watch, int64_t bytes);

/* Bytes that the matching staging directories of dead processes next to `to` hold, .resume not counted: space
 * that the conversion need not find again. */
int64_t fsdp_resume_bytes(fsdp_io *io, const char *to, const char *hash);

#endif
