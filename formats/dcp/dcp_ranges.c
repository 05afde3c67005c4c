/* The file ranges of the names of a DCP directory: see dcp_ranges.h. */
#include "formats/dcp/dcp_ranges.h"

#include <string.h>

void dcp_ranges_release(dcp_ranges *ranges)
{
    fsdp_free(ranges->all);
    fsdp_name_table_release(&ranges->places);
    fsdp_text_release(&ranges->key);
    fsdp_arena_release(&ranges->arena);
    *ranges = (dcp_ranges){0};
}

void dcp_ranges_expect(dcp_ranges *ranges, size_t count)
{
    (void)fsdp_grow(&ranges->all, &ranges->room, ranges->count + count, sizeof *ranges->all);
}

/* --- lookups ------------------------------------------------------------------------------------- */

static bool make_key(dcp_ranges *ranges, const dcp_range_key *key)
{
    uint64_t number = key->name;
    ranges->key.size = 0;
    fsdp_text_add(&ranges->key, (const char *)&number, sizeof number);
    fsdp_text_add(&ranges->key, key->ndim < 0 ? "v" : "t", 1);
    if (key->ndim > 0)
        fsdp_text_add(&ranges->key, (const char *)key->lo, (size_t)key->ndim * sizeof *key->lo);
    return !ranges->key.failed;
}

static bool put_place(dcp_ranges *ranges, size_t name, uint32_t at)
{
    const dcp_range *range = &ranges->all[at];
    if (!make_key(ranges, &(dcp_range_key){name, range->ndim, range->lo}))
        return false;
    if (fsdp_name_table_find(&ranges->places, ranges->key.data, ranges->key.size))
        return true;
    const char *key = fsdp_arena_strndup(&ranges->arena, ranges->key.data, ranges->key.size);
    return key && fsdp_name_table_put(&ranges->places, key, ranges->key.size, at);
}

static fsdp_status find_indexed(dcp_ranges *ranges, dcp_range_list *list, const dcp_range_key *key,
                                uint32_t *at_out, fsdp_error *err)
{
    for (uint32_t at = list->first; !list->is_indexed && at != DCP_NO_RANGE;
         at = ranges->all[at].next)
        if (!put_place(ranges, key->name, at))
            return fsdp_fail_memory(err, "the items of a checkpoint");
    list->is_indexed = true;
    if (!make_key(ranges, key))
        return fsdp_fail_memory(err, "the items of a checkpoint");
    const uint64_t *found =
        fsdp_name_table_find(&ranges->places, ranges->key.data, ranges->key.size);
    *at_out = found ? (uint32_t)*found : DCP_NO_RANGE;
    return FSDP_OK;
}

/* ------------------------------------------------------------------------------------------------- */

static bool is_at(const dcp_range *range, const dcp_range_key *key)
{
    size_t bytes = key->ndim > 0 ? (size_t)key->ndim * sizeof *key->lo : 0;
    return range->ndim == key->ndim && (bytes == 0 || memcmp(range->lo, key->lo, bytes) == 0);
}

fsdp_status dcp_ranges_find(dcp_ranges *ranges, dcp_range_list *list, const dcp_range_key *key,
                            uint32_t *at_out, fsdp_error *err)
{
    enum { SHORT_LIST = 16 };
    uint32_t at = list->cursor != DCP_NO_RANGE ? ranges->all[list->cursor].next : list->first;
    if (at == DCP_NO_RANGE || !is_at(&ranges->all[at], key)) {
        if (list->count > SHORT_LIST) {
            FSDP_TRY(find_indexed(ranges, list, key, &at, err));
        } else {
            at = list->first;
            while (at != DCP_NO_RANGE && !is_at(&ranges->all[at], key))
                at = ranges->all[at].next;
        }
    }
    if (at != DCP_NO_RANGE)
        list->cursor = at;
    *at_out = at;
    return FSDP_OK;
}

/* Most boxes begin at the same offsets as boxes of other tensors, so offsets are shared. */
static const int64_t *keep_offsets(dcp_ranges *ranges, int ndim, const int64_t *lo)
{
    enum { RECENT_SHIFT = 58 };
    size_t bytes = ndim > 0 ? (size_t)ndim * sizeof *lo : 0;
    uint64_t hash = (uint64_t)ndim;
    for (int dim = 0; dim < ndim; dim++)
        hash = (hash ^ (uint64_t)lo[dim]) * UINT64_C(0x9E3779B97F4A7C15);
    size_t slot = (size_t)(hash >> RECENT_SHIFT) % DCP_RECENT_BOXES;
    const int64_t *known = ranges->recent[slot].lo;
    if (known && ranges->recent[slot].ndim == ndim && (bytes == 0 || memcmp(known, lo, bytes) == 0))
        return known;
    int64_t *kept = fsdp_arena_alloc(&ranges->arena, bytes, 1);
    if (kept && bytes > 0)
        memcpy(kept, lo, bytes);
    ranges->recent[slot].lo = kept;
    ranges->recent[slot].ndim = ndim;
    return kept;
}

fsdp_status dcp_ranges_put(dcp_ranges *ranges, dcp_range_list *list, size_t name,
                           const dcp_range *range, const int64_t *lo, fsdp_error *err)
{
    uint32_t at = (uint32_t)ranges->count;
    const int64_t *kept = keep_offsets(ranges, range->ndim, lo);
    if (!kept || ranges->count >= DCP_NO_RANGE - 1 ||
        !fsdp_grow(&ranges->all, &ranges->room, ranges->count + 1, sizeof *range))
        return fsdp_fail_memory(err, "the items of a checkpoint");
    ranges->all[at] = *range;
    ranges->all[at].lo = kept;
    ranges->all[at].next = DCP_NO_RANGE;
    ranges->count++;
    if (list->last == DCP_NO_RANGE)
        list->first = at;
    else
        ranges->all[list->last].next = at;
    list->last = at;
    list->count++;
    if (list->is_indexed && !put_place(ranges, name, at))
        return fsdp_fail_memory(err, "the items of a checkpoint");
    return FSDP_OK;
}
