/*
 * Casts a box in the memory of its slab: the elements are read to the end of the slab and their results
 * written from its beginning, so that the cast needs no other memory. Overflows, NaNs and rounding are
 * counted.
 */
#ifndef FSDP_CAST_BOX_H
#define FSDP_CAST_BOX_H

#include "kernels/kernels.h"
#include <fsdp/box.h>
#include <fsdp/convert.h>
#include <stdatomic.h>

/* A box of a tensor in memory. */
typedef struct fsdp_recast_box {
    const char *name;          /* of the tensor, for errors */
    size_t name_size;
    const fsdp_box *box;
    fsdp_dtype from, to;
    char *source;              /* elements, at the place of fsdp_recast_source; results go to its `data` */
} fsdp_recast_box;

/* Bytes of an element while it is cast. */
size_t fsdp_recast_size(fsdp_dtype from, fsdp_dtype to);
/* The place in `data` for `count` elements of `from` before the cast. */
char *fsdp_recast_source(char *data, int64_t count, fsdp_dtype from, fsdp_dtype to);

/* Does nothing when both types are equal. FSDP_ERR_DAMAGED names the first value that does not fit. */
fsdp_status fsdp_recast(const fsdp_recast_box *box, fsdp_on_overflow on_overflow, fsdp_cast_tally *tally,
                        fsdp_error *err);

/* The sum of the tallies of several threads. Zero-initialise. */
typedef struct fsdp_cast_sum {
    atomic_llong overflows, nans, underflows;
    _Atomic double max_rounding, max_underflow;
} fsdp_cast_sum;
void fsdp_cast_sum_add(fsdp_cast_sum *sum, const fsdp_cast_tally *tally);
fsdp_cast_tally fsdp_cast_sum_get(fsdp_cast_sum *sum);

/* report may be NULL. */
void fsdp_cast_report_fill(fsdp_cast_report *report, const fsdp_cast_tally *tally, int64_t tensors);

#endif
