/*
 * How the file or directory that is written for another program comes into being whole or not at all:
 * begin -> write at `path` -> publish -> end, or only end. The native checkpoint has commit.h, which does
 * more.
 */
#ifndef FSDP_OUTPUT_PLACE_H
#define FSDP_OUTPUT_PLACE_H

#include "base/io/io.h"
#include "formats/target.h"
#include "statedict/commit/resume.h"
#include <fsdp/checkpoint.h>

typedef struct fsdp_output_place {
    fsdp_io *io;
    const fsdp_target_format *format;
    bool overwrite, durable;
    const char *hash;          /* of the plan; NULL: none, and nobody can go on with it */
    bool resume;               /* go on with what has that hash; what is not published stays for the next */
    int64_t unit;              /* for resume.h; after begin that of the conversion that is gone on with */
    char *target, *parent;     /* DST and the directory that holds it */
    char *staging;             /* DST.tmp-UUID, which holds .saving, .resume and */
    char *path;                /* where to write: its "result"; NULL before begin and after publish */
    fsdp_file *marker;
    bool is_taken_up;
    fsdp_resume notes;
} fsdp_output_place;

/* FSDP_ERR_USAGE when `to` would lie in the directory that is converted. */
fsdp_status fsdp_output_check_inside(const fsdp_checkpoint *from, const char *to, fsdp_error *err);
/* Would publishing there be allowed? FSDP_ERR_USAGE when that took something of what is converted.
 * FSDP_ERR_EXISTS as for native checkpoints: an overwrite deletes files of the same format and nothing
 * else. */
fsdp_status fsdp_output_check(const fsdp_output_place *place, const fsdp_checkpoint *from, const char *to,
                              fsdp_error *err);

/* Checks, removes what the dead left or takes it up, and creates the directory when the format is one. */
fsdp_status fsdp_output_begin(fsdp_output_place *place, const char *to, fsdp_error *err);
/*
 * For a place whose plan is known. Slabs are as large as in the conversion that is gone on with, if memory
 * allows: *slab_bytes says what they would be and is set to what they are. Otherwise its notes are of no use,
 * and new ones are begun.
 */
void fsdp_output_agree_on_slabs(fsdp_output_place *place, int64_t least, int64_t *slab_bytes);
fsdp_status fsdp_output_publish(fsdp_output_place *place, fsdp_error *err);
/* Removes what was written and not published, unless it is to be resumed; releases. err is the error that
 * it is given up for, or NULL: what could not be removed is told there, too. */
void fsdp_output_end(fsdp_output_place *place, fsdp_error *err);

#endif
