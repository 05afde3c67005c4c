/*
 * n-d boxes in global coordinates: offset and length per dimension. Resharding is the intersection of boxes.
 * A box with ndim 0 is a scalar and holds one element. All calls are local, allocate nothing and cannot fail.
 */
#ifndef FSDP_BOX_H
#define FSDP_BOX_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { FSDP_MAX_DIMS = 64 };

typedef struct fsdp_box {
    int ndim;
    int64_t lo[FSDP_MAX_DIMS];
    int64_t len[FSDP_MAX_DIMS];
} fsdp_box;

/* Returns the box that is a whole tensor. */
FSDP_API fsdp_box fsdp_box_whole(int ndim, const int64_t *shape);

/* Returns the number of elements of a tensor of this shape; 0 when a length is 0. Shapes are checked when
 * a tensor is added or read, so the product does not overflow. */
FSDP_API int64_t fsdp_shape_count(int ndim, const int64_t *shape);

/* Returns the number of elements in the box. */
FSDP_API int64_t fsdp_box_count(const fsdp_box *box);

/* Returns true when offsets and lengths are the same. */
FSDP_API bool fsdp_box_equal(const fsdp_box *a, const fsdp_box *b);

/* Returns the linear position of an element: the number of elements before it in a row-major tensor of
 * this shape. lo is relative to the tensor's origin. */
FSDP_API int64_t fsdp_box_position(int ndim, const int64_t *shape, const int64_t *lo);

/* Computes the rows [*lo_out, *lo_out + *len_out) of part `index` of `parts` of n rows, each ceil(n /
 * parts) but for the last ones; an empty part is (n, 0). */
FSDP_API void fsdp_chunk(int64_t n, int64_t parts, int64_t index, int64_t *lo_out, int64_t *len_out);

#ifdef __cplusplus
}
#endif
#endif
