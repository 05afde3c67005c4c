/*
 * Makes a file or directory for another program appear as a whole or not at all: begin -> write at `path` ->
 * publish -> end; without publish, end removes it. Native checkpoints use commit.h instead.
 */
#ifndef FSDP_OUTPUT_PLACE_H
#define FSDP_OUTPUT_PLACE_H

#include "base/io/io.h"
#include "formats/target.h"
#include "statedict/commit/resume.h"
#include <fsdp/checkpoint.h>

typedef struct fsdp_output_place {
    fsdp_io *io;
    const fsdp_format *format;
    bool overwrite, durable;
    const char *hash;          /* of the plan; NULL: the conversion cannot be resumed */
    bool resume;               /* resume a staging with that hash; keep an unpublished one */
    int64_t unit, unit_least;  /* for resume.h; begin lowers unit to that of a resumed conversion, but not
                                * below the least */
    char *target, *parent;     /* DST and the directory that holds it */
    char *staging;             /* DST.tmp-UUID, which holds .saving, .resume and */
    char *path;                /* its "result", to write to; NULL before begin and after publish */
    fsdp_file *marker;
    bool is_taken_up;
    fsdp_resume notes;
} fsdp_output_place;

/* Checks that publishing at `to` is allowed. FSDP_ERR_USAGE when it would remove a part of the source.
 * FSDP_ERR_EXISTS as for native checkpoints: an overwrite deletes files of the same format and nothing
 * else. */
fsdp_status fsdp_output_check(const fsdp_output_place *place, const fsdp_checkpoint *from, const char *to,
                              fsdp_error *err);

/* Checks, removes stagings of dead processes or resumes one, and creates the directory if the format is
 * one. */
fsdp_status fsdp_output_begin(fsdp_output_place *place, const char *to, fsdp_error *err);
fsdp_status fsdp_output_publish(fsdp_output_place *place, fsdp_error *err);
/* Releases the place, and removes an unpublished result unless it may be resumed. err: the error of the
 * conversion, or NULL; a failed removal is appended to it. */
void fsdp_output_end(fsdp_output_place *place, fsdp_error *err);

#endif
