/*
 * Merges the lists whose items PyTorch does not visit when it loads: those without a tensor and without a
 * dict with keys, at any depth of lists. A source visits some of them (a list with an empty dict in it)
 * and names every item; a DCP directory must hold such a list as one value again.
 */
#ifndef FSDP_DCP_FOLD_H
#define FSDP_DCP_FOLD_H

#include "formats/target.h"

#include "base/core/mem.h"

/* Zero-initialise; release after use. */
typedef struct dcp_fold {
    fsdp_target_entry *entries;    /* the entries to write; they borrow from the given ones */
    size_t count;
    size_t *number;                /* per given entry: number of the entry that holds it now */
    fsdp_value *lists;
    size_t list_count;
} dcp_fold;

/* A list with an object in it, or with items missing, stays as it is. */
FSDP_CHECKED fsdp_status dcp_fold_lists(const fsdp_target_entry *entries, size_t count, dcp_fold *fold_out,
                                        fsdp_error *err);
void dcp_fold_release(dcp_fold *fold);

#endif
