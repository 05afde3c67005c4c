/* fsdp-ls --stats: reads every floating tensor and prints what its numbers look like. */
#include "tools/ls.h"

#include <fsdp/stats.h>

#include <inttypes.h>
#include <stdio.h>

static fsdp_status add_slab(void *user, const fsdp_entry *entry, int64_t first, int64_t count,
                            const void *data, fsdp_error *err)
{
    (void)first;
    (void)err;
    fsdp_stats_add(user, entry->dtype, data, count);
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
    fsdp_text_add(text, "\n", 1);
}

fsdp_status ls_print_stats(ls_listing *listing, fsdp_text *text, fsdp_error *err)
{
    for (size_t i = 0; i < listing->count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, listing->order[i]);
        fsdp_stats stats = {0};
        if (entry->kind != FSDP_ENTRY_TENSOR || !fsdp_dtype_describe(entry->dtype)->is_float)
            continue;
        FSDP_TRY(ls_stream(listing, listing->order[i], add_slab, &stats, err));
        add_line(text, entry, &stats);
        FSDP_TRY(cli_put(text));
    }
    return FSDP_OK;
}
