/*
 * Copies rectangles of elements, as a training step does (copy-in, copy-out, chunk-cat), also for extensions
 * and custom collectives.
 */
#ifndef FSDP_RECTS_H
#define FSDP_RECTS_H

#include <fsdp/dtype.h>
#include <fsdp/status.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Describes rows x width elements to copy from one buffer to another, cast on the way (to nearest even,
 * overflow to infinity). Pitches count elements between the beginnings of rows. from NULL: zeros. Data may be
 * at any address; aligned data is faster. Buffers do not overlap.
 */
typedef struct fsdp_rect {
    void *to;
    const void *from;
    fsdp_dtype to_type, from_type;
    int64_t rows, width, to_pitch, from_pitch;
} fsdp_rect;

/* Copies n rectangles, in any order. Allocates nothing and cannot fail. */
FSDP_API void fsdp_rects_copy(const fsdp_rect *rects, size_t n);

#ifdef __cplusplus
}
#endif
#endif
