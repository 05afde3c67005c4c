/* Range and mean of floating elements, in f64. See stats.h. */
#include <fsdp/stats.h>

#include "kernels/kernels.h"

#include <math.h>

enum { BLOCK = 1024 };

static int bin_of(double number)
{
    int bin = (ilogb(number) - FSDP_STATS_LOWEST) / FSDP_STATS_STEP;
    return bin < 0 ? 0 : bin < FSDP_STATS_BINS ? bin : FSDP_STATS_BINS - 1;
}

static void add_number(fsdp_stats *stats, double number)
{
    if (isnan(number)) {
        stats->nans++;
        return;
    }
    if (isinf(number)) {
        stats->infinities++;
        return;
    }
    if (stats->finite == 0 || number < stats->min)
        stats->min = number;
    if (stats->finite == 0 || number > stats->max)
        stats->max = number;
    stats->finite++;
    stats->sum += number;
    if (number == 0)
        stats->zeros++;
    else
        stats->magnitudes[bin_of(number)]++;
}

void fsdp_stats_add(fsdp_stats *stats, fsdp_dtype dtype, const void *data, int64_t count)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    const char *from = data;
    if (!info || !info->is_float)
        return;
    for (int64_t done = 0; done < count; done += BLOCK) {
        double numbers[BLOCK];
        size_t n = count - done < BLOCK ? (size_t)(count - done) : BLOCK;
        fsdp_kernels_get()->cast(numbers, FSDP_F64, from, dtype, n, FSDP_OVERFLOW_INF);
        for (size_t i = 0; i < n; i++)
            add_number(stats, numbers[i]);
        from += n * info->size;
    }
}
