/*
 * Comparing two checkpoints. In: two opened checkpoints and tolerances (diff.h). Out: one result per pair of
 * entries. Local; tools call fsdp_checkpoint_diff. diff.c compares the elements of two buffers and the texts
 * beside the tensors, pairs names and reads slabs.
 */
#ifndef FSDP_DIFF_INTERNAL_H
#define FSDP_DIFF_INTERNAL_H

#include <fsdp/diff.h>

typedef struct fsdp_diff_rule {
    fsdp_dtype a, b;           /* equal, or both real floating types */
    double atol, rtol;
    int64_t ulp;
} fsdp_diff_rule;

/* The result for one tensor so far. Merging is independent of the order of its slabs. */
typedef struct fsdp_diff_found {
    int64_t differing;
    int64_t at;                /* linear position of the element that differs most */
    double max_abs, max_rel;
    uint8_t from[8], to[8];    /* that element (the component of a complex one) */
} fsdp_diff_found;

/* Compares `count` elements, the first of which has linear position `first`; adds to *found. */
void fsdp_diff_data(const fsdp_diff_rule *rule, const void *a, const void *b, int64_t first, int64_t count,
                    fsdp_diff_found *found);
void fsdp_diff_merge(fsdp_diff_found *into, const fsdp_diff_found *found);

/* The element as text that reads back as the same number. */
void fsdp_diff_spell(fsdp_dtype dtype, const uint8_t bytes[8], char out[FSDP_DIFF_ELEMENT]);
/* Bits that differ between the elements, 0 when the dtypes do, and for blocks. */
int fsdp_diff_bits(const fsdp_diff_rule *rule, const fsdp_diff_found *found);

#endif
