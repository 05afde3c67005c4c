/* fsdp-ls --stats, --hist: reads every floating tensor and prints statistics of its numbers. */
#include "tools/ls/ls.h"
#include "base/text.h"

#include <fsdp/stats.h>

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

static fsdp_status add_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                            const void *data, fsdp_error *err)
{
    (void)first;
    (void)err;
    fsdp_stats_add(context, entry->dtype, data, count);
    return FSDP_OK;
}

static void add_line(fsdp_text *text, const fsdp_entry *entry, const fsdp_stats *stats)
{
    char name[64];
    fsdp_printable(entry->name, entry->name_size, name, sizeof name);
    fsdp_text_addf(text, "%-48s  %-8s", name, fsdp_dtype_name(entry->dtype));
    if (stats->finite > 0)
        fsdp_text_addf(text, "  min %-12.6g max %-12.6g mean %-12.6g zeros %" PRId64, stats->min,
                       stats->max, stats->sum / (double)stats->finite, stats->zeros);
    if (stats->nans > 0)
        fsdp_text_addf(text, "  NaN %" PRId64, stats->nans);
    if (stats->infinities > 0)
        fsdp_text_addf(text, "  Inf %" PRId64, stats->infinities);
    cli_end_line(text);
}

/* One character per bin, as high as the logarithm of its count; counts of zeros, NaN and Inf follow. */
static void add_histogram(fsdp_text *text, const fsdp_entry *entry, const fsdp_stats *stats)
{
    static const char *const bars[] = {" ",      "\u2581", "\u2582", "\u2583", "\u2584",
                                       "\u2585", "\u2586", "\u2587", "\u2588"};
    char name[64];
    int64_t most = 1;
    fsdp_printable(entry->name, entry->name_size, name, sizeof name);
    for (int i = 0; i < FSDP_STATS_BINS; i++)
        most = stats->magnitudes[i] > most ? stats->magnitudes[i] : most;
    fsdp_text_addf(text, "%-48s  %-8s  |", name, fsdp_dtype_name(entry->dtype));
    for (int i = 0; i < FSDP_STATS_BINS; i++) {
        double part = log1p((double)stats->magnitudes[i]) / log1p((double)most);
        fsdp_text_addf(text, "%s", bars[(int)ceil(8 * part)]);
    }
    fsdp_text_addf(text, "|  zeros %" PRId64, stats->zeros);
    if (stats->nans > 0)
        fsdp_text_addf(text, "  NaN %" PRId64, stats->nans);
    if (stats->infinities > 0)
        fsdp_text_addf(text, "  Inf %" PRId64, stats->infinities);
    fsdp_text_add(text, "\n", 1);
}

fsdp_status ls_print_stats(ls_listing *listing, fsdp_text *text, fsdp_error *err)
{
    if (listing->options->mode == LS_HIST)
        fsdp_text_addf(text, "%-58s  |2^%d .. 2^%d, 2^%d a column, heights logarithmic|\n", "",
                       FSDP_STATS_LOWEST, FSDP_STATS_LOWEST + FSDP_STATS_BINS * FSDP_STATS_STEP,
                       FSDP_STATS_STEP);
    for (size_t i = 0; i < listing->count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, listing->order[i]);
        fsdp_stats stats = {0};
        if (entry->kind != FSDP_ENTRY_TENSOR || !fsdp_dtype_describe(entry->dtype)->is_float)
            continue;
        FSDP_TRY(ls_stream(listing, listing->order[i], add_slab, &stats, err));
        if (listing->options->mode == LS_HIST)
            add_histogram(text, entry, &stats);
        else
            add_line(text, entry, &stats);
        FSDP_TRY(cli_put(text));
    }
    return FSDP_OK;
}
