/* Statistics of a floating tensor: range, mean, magnitudes, and counts of zeros, NaN and infinities. */
#ifndef FSDP_STATS_H
#define FSDP_STATS_H

#include <fsdp/dtype.h>
#include <fsdp/status.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { FSDP_STATS_BINS = 16, FSDP_STATS_LOWEST = -40, FSDP_STATS_STEP = 4 };

/* Zero-initialise. min, max and sum are of finite elements; min and max are valid only when finite > 0. */
typedef struct fsdp_stats {
    int64_t finite, nans, infinities, zeros;
    double min, max, sum;
    int64_t magnitudes[FSDP_STATS_BINS];   /* |x| from 2^-40 on, 2^4 to a bin; the outer ones hold the rest */
} fsdp_stats;

/* Adds count elements of a real floating type (fsdp_dtype_info.is_float); other types add nothing. */
FSDP_API void fsdp_stats_add(fsdp_stats *stats, fsdp_dtype dtype, const void *data, int64_t count);

#ifdef __cplusplus
}
#endif
#endif
