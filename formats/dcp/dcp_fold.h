/*
 * Lists that PyTorch does not go into when it loads: those in which no tensor and no dict with keys is, at
 * any depth of lists. Our readers go into some of them (a list with an empty dict in it) and give every item
 * a name; in a DCP directory such a list is one value again.
 */
#ifndef FSDP_DCP_FOLD_H
#define FSDP_DCP_FOLD_H

#include "formats/target.h"

#include "base/core/mem.h"

/* Zero-initialise; release when done. */
typedef struct dcp_fold {
    fsdp_target_entry *entries;    /* what is written; borrows from those that were given */
    size_t count;
    size_t *number;                /* per entry that was given: of the one that it went into */
    fsdp_value *lists;
    size_t list_count;
} dcp_fold;

/* A list with an object in it, or not there from its first to its last item, stays as it is. */
FSDP_CHECKED fsdp_status dcp_fold_lists(const fsdp_target_entry *entries, size_t count, dcp_fold *fold_out,
                                        fsdp_error *err);
void dcp_fold_release(dcp_fold *fold);

#endif
