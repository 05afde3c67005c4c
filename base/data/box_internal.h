/* The private part of box.h: cuts and intersections for plans and readers, and the check of shapes. */
#ifndef FSDP_BOX_INTERNAL_H
#define FSDP_BOX_INTERNAL_H

#include <fsdp/box.h>

/* True when the boxes share an element; then *out is what they share. */
bool fsdp_box_intersect(const fsdp_box *a, const fsdp_box *b, fsdp_box *out);

/* True when inner lies inside outer. */
bool fsdp_box_contains(const fsdp_box *outer, const fsdp_box *inner);

/* True when the packed row-major array of outer holds inner as one run, which begins at element *at_out. */
bool fsdp_box_is_run(const fsdp_box *outer, const fsdp_box *inner, int64_t *at_out);

/* Row-major strides in elements of a packed array of this shape. */
void fsdp_box_strides(int ndim, const int64_t *shape, int64_t *strides_out);

/*
 * Cuts elements [first, first + count) of the row-major order of box into boxes, in that order.
 * Writes at most FSDP_BOX_PIECES of them and returns how many.
 */
enum { FSDP_BOX_PIECES = 2 * FSDP_MAX_DIMS };
int fsdp_box_cut(const fsdp_box *box, int64_t first, int64_t count, fsdp_box *pieces_out);

/* Checks a shape from outside: 0..FSDP_MAX_DIMS dims, no negative length, elements times element_size (and
 * the product of the non-zero lengths) below 2^62. */
fsdp_status fsdp_shape_check(int ndim, const int64_t *shape, size_t element_size, fsdp_error *err);

#endif
