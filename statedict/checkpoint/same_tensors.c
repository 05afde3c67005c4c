/* Finds the names of one tensor: see same_tensors.h. */
#include "statedict/checkpoint/same_tensors.h"

#include "base/core/mem.h"

#include <stdlib.h>

typedef struct placed_tensor {
    const fsdp_checkpoint *from;
    size_t entry;
} placed_tensor;

static int compare_placed(const void *a, const void *b)
{
    const placed_tensor *x = a, *y = b;
    int order = 0; /* all have places */
    (void)fsdp_checkpoint_compare_places(x->from, x->entry, y->entry, &order);
    return order != 0 ? order : (x->entry > y->entry) - (x->entry < y->entry);
}

static fsdp_status find_same_places(const fsdp_checkpoint *from, size_t *one, fsdp_error *err)
{
    size_t n = 0, count = fsdp_sd_count(from->manifest.sd);
    int order;
    placed_tensor *placed = fsdp_alloc(count, sizeof *placed);
    if (!placed)
        return fsdp_fail_memory(err, "tied weights");
    for (size_t i = 0; i < count; i++)
        if (fsdp_sd_at(from->manifest.sd, i)->kind == FSDP_ENTRY_TENSOR &&
            fsdp_checkpoint_compare_places(from, i, i, &order))
            placed[n++] = (placed_tensor){from, i};
    if (n > 0)
        qsort(placed, n, sizeof *placed, compare_placed);
    for (size_t i = 1; i < n; i++)
        if (fsdp_checkpoint_compare_places(from, placed[i - 1].entry, placed[i].entry, &order) &&
            order == 0)
            one[placed[i].entry] = one[placed[i - 1].entry];
    fsdp_free(placed);
    return FSDP_OK;
}

fsdp_status fsdp_same_tensors(const fsdp_checkpoint *from, bool by_place, size_t *one_out,
                              fsdp_error *err)
{
    const fsdp_sd *sd = from->manifest.sd;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        one_out[i] = i;
    if (by_place)
        FSDP_TRY(find_same_places(from, one_out, err));
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_ALIAS)
            one_out[i] = one_out[entry->target];
    }
    return FSDP_OK;
}
