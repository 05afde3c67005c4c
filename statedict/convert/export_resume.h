/* Going on with an export that was cut off: which pieces of it are there already. See resume.h. */
#ifndef FSDP_EXPORT_RESUME_H
#define FSDP_EXPORT_RESUME_H

#include "kernels/kernels.h"
#include "statedict/convert/export_commit.h"

/* A slab: elements of one box. */
typedef struct fsdp_export_piece {
    fsdp_target *target;
    int64_t number;            /* of all slabs of the export */
    size_t entry, box;
    int64_t first;             /* element of the box */
    size_t size, element_size; /* bytes */
    bool casts;                /* something in the export is cast */
} fsdp_export_piece;

/* What is known of a slab that was written and is noted; the tally only when something is cast. */
typedef struct fsdp_export_done {
    fsdp_hash hash;
    fsdp_cast_tally tally;
} fsdp_export_done;

/*
 * For a place whose plan is known. Slabs are as large as in the export that is gone on with, if memory
 * allows: *slab_bytes says what they would be and is set to what they are. Otherwise its notes are of no use,
 * and new ones are begun.
 */
void fsdp_export_agree_on_slabs(fsdp_export_place *place, int64_t least, int64_t *slab_bytes);

/* Reads the piece from where it belongs; true when that is what was noted, which it tells. */
bool fsdp_export_is_there(const fsdp_export_place *place, const fsdp_export_piece *piece, void *data,
                          fsdp_export_done *done_out);
/* It is there now. */
void fsdp_export_note(const fsdp_export_place *place, const fsdp_export_piece *piece,
                      const fsdp_export_done *done);

#endif
