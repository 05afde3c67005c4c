/*
 * The texts with which Nanotron says where a rank's part of a parameter lies in it, in the metadata of its
 * file:
 *
 *     unsharded_shape            "(32, 8)"
 *     local_global_slices_pairs  "0,16,None|None,None,None#16,32,None|None,None,None;..."
 *
 * A slice is start, stop and step; '|' separates dims, '#' the part's slices from the parameter's, ';' pairs.
 */
#ifndef FSDP_SAFETENSORS_SLICES_H
#define FSDP_SAFETENSORS_SLICES_H

#include <fsdp/box.h>
#include <stddef.h>

/* False: the text is no shape of at most FSDP_MAX_DIMS dims. */
bool fsdp_slices_shape(const char *text, size_t size, int64_t shape_out[FSDP_MAX_DIMS], int *ndim_out);

/* The pairs of a part; the text is borrowed. */
typedef struct fsdp_slices {
    const char *at, *end;
    int ndim;
    const int64_t *part, *whole;       /* shapes */
} fsdp_slices;

/* A box of the part, and where it lies in the parameter. */
typedef struct fsdp_slices_pair {
    int64_t from[FSDP_MAX_DIMS], lo[FSDP_MAX_DIMS], len[FSDP_MAX_DIMS];
} fsdp_slices_pair;

/* Takes a pair, of which there must be one: at < end. False: it does not fit the shapes, or has a step. */
bool fsdp_slices_next(fsdp_slices *slices, fsdp_slices_pair *pair_out);

#endif
