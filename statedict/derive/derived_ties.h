/* Tied names of derived tensors: see derived_ties.c. Caller: derived_checkpoint.c. */
#ifndef FSDP_DERIVED_TIES_H
#define FSDP_DERIVED_TIES_H

#include "base/data/name_table.h"
#include "statedict/derive/derived.h"

typedef struct fsdp_derived_ties {
    const fsdp_checkpoint *base;
    size_t *one;               /* per entry of the base: the first one of the same tensor */
    bool *is_tied;             /* ... true for a first one that is not the only one */
    fsdp_name_table table;     /* from hashes of derived tensors to the first of each */
    int64_t left;              /* comparisons */
} fsdp_derived_ties;

/* The derived tensors so far, per entry, and the number of the next one. */
typedef struct fsdp_derived_made {
    const fsdp_derived *const *tensors;
    size_t count;
} fsdp_derived_made;

/* Release it also after a failure. */
fsdp_status fsdp_derived_ties_init(fsdp_derived_ties *ties, const fsdp_checkpoint *base, fsdp_error *err);
void fsdp_derived_ties_release(fsdp_derived_ties *ties);

/* An earlier tensor that is the same one, by its operations on a tensor with several names; -1: none. */
fsdp_status fsdp_derived_ties_find(fsdp_derived_ties *ties, fsdp_arena *arena, const fsdp_derived *tensor,
                                   fsdp_derived_made made, int64_t *found_out, fsdp_error *err);

#endif
