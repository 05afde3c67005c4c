/* What the numbers of a floating tensor look like: range, mean, and how many are none. */
#ifndef FSDP_STATS_H
#define FSDP_STATS_H

#include <fsdp/dtype.h>
#include <fsdp/status.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Zero-initialise. Of finite elements: min, max, sum; min and max count only when finite > 0. */
typedef struct fsdp_stats {
    int64_t finite, nans, infinities, zeros;
    double min, max, sum;
} fsdp_stats;

/* Adds count elements of a real floating type (fsdp_dtype_info.is_float); other types add nothing. */
FSDP_API void fsdp_stats_add(fsdp_stats *stats, fsdp_dtype dtype, const void *data, int64_t count);

#ifdef __cplusplus
}
#endif
#endif
