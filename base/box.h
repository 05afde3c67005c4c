/*
 * n-d boxes in global coordinates: offset and length per dimension. Everything about resharding is
 * box intersection. A box with ndim 0 is a scalar and holds one element.
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

/* The box that is a whole tensor. */
FSDP_API fsdp_box fsdp_box_whole(int ndim, const int64_t *shape);

/* Elements of a tensor of this shape; 0 when a length is 0. Shapes are checked on entry, so this cannot
 * overflow. */
FSDP_API int64_t fsdp_shape_count(int ndim, const int64_t *shape);

/* Elements in the box. */
FSDP_API int64_t fsdp_box_count(const fsdp_box *box);

FSDP_API bool fsdp_box_equal(const fsdp_box *a, const fsdp_box *b);

/*
 * Elements of a row-major tensor of this shape before the given element: its linear position.
 * lo is relative to the tensor's origin.
 */
FSDP_API int64_t fsdp_box_position(int ndim, const int64_t *shape, const int64_t *lo);

/* Rows [*lo, *lo + *len) of part `index` of `parts` of n rows, each ceil(n / parts) but for the last ones;
 * an empty part is (n, 0). */
FSDP_API void fsdp_chunk(int64_t n, int64_t parts, int64_t index, int64_t *lo, int64_t *len);

#ifdef __cplusplus
}
#endif
#endif
