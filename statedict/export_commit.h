/*
 * How the file or directory that is written for another program comes into being whole or not at all:
 * begin -> write at `path` -> publish, or abandon. The native checkpoint has commit.h, which does more.
 */
#ifndef FSDP_EXPORT_COMMIT_H
#define FSDP_EXPORT_COMMIT_H

#include "base/io.h"
#include "formats/target.h"

typedef struct fsdp_export_place {
    fsdp_io *io;
    const fsdp_target_format *format;
    bool overwrite, durable;
    char *target, *parent;     /* DST and the directory that holds it */
    char *path;                /* where to write: DST.tmp-UUID; NULL before begin and after publish */
} fsdp_export_place;

/* Would publishing there be allowed? FSDP_ERR_EXISTS as for native checkpoints: an overwrite deletes files of
 * the same format and nothing else. */
fsdp_status fsdp_export_check(const fsdp_export_place *place, const char *to, fsdp_error *err);

/* Checks, and creates the directory when the format is one. */
fsdp_status fsdp_export_begin(fsdp_export_place *place, const char *to, fsdp_error *err);
fsdp_status fsdp_export_publish(fsdp_export_place *place, fsdp_error *err);
/* Removes what was written and not published; releases. */
void fsdp_export_end(fsdp_export_place *place);

#endif
