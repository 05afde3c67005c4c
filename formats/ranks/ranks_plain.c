/*
 * Tensors and values that are not distributed: data equal on all ranks is kept once, other data
 * per rank. See ranks.h.
 */
#include "formats/ranks/ranks.h"

#include <string.h>

#include "base/data/value_internal.h"
#include "formats/torch/torch_resave.h"

static fsdp_status fail_mixed(const rank_files *set, const rank_entry *entry, fsdp_error *err)
{
    char shown[200];
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s': '%s' is a distributed tensor on some ranks and none on rank %d",
                     set->where, fsdp_printable(entry->name, entry->name_size, shown, sizeof shown),
                     set->rank);
}

static fsdp_status add_item(rank_files *set, rank_entry *entry, rank_item **item_out,
                            fsdp_error *err)
{
    if (entry->is_spread)
        return fail_mixed(set, entry, err);
    if (!fsdp_grow(&entry->items, &entry->item_room, entry->item_count + 1, sizeof *entry->items))
        return fsdp_fail_memory(err, "the values of ranks");
    *item_out = &entry->items[entry->item_count++];
    **item_out = (rank_item){.rank = set->rank};
    return FSDP_OK;
}

static fsdp_status named(const rank_entry *entry, fsdp_status status, fsdp_error *err)
{
    char shown[200];
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "'%s'",
                          fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
    return status;
}

/* Limits comparisons: many views of one small storage would cost much. */
static fsdp_status check_work(rank_files *set, const torch_tensor *tensor, fsdp_error *err)
{
    const int64_t views = 16, small = (int64_t)1 << 30;
    set->compared += tensor->data ? 0 : rank_tensor_span(tensor);
    return set->compared / views <= set->bytes + small / views
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_LIMIT,
                           "'%s': the tensors of the ranks are far larger than their files",
                           set->where);
}

fsdp_status rank_files_tensor(void *context, const torch_item *found, torch_tensor *tensor,
                              fsdp_error *err)
{
    rank_files *set = context;
    rank_entry *entry;
    rank_item *item = NULL;
    FSDP_TRY(rank_files_entry(set, found->name, found->name_size, &entry, err));
    FSDP_TRY(add_item(set, entry, &item, err));
    item->is_tensor = true;
    const rank_item *first = &entry->items[0];
    if (item != first && first->is_tensor) {
        FSDP_TRY(check_work(set, tensor, err));
        FSDP_TRY(named(entry,
                       rank_same_elements(set->source, first->tensor, tensor, &item->is_same, err),
                       err));
    }
    if (item->is_same)
        return FSDP_OK;
    item->tensor = fsdp_alloc(1, sizeof *item->tensor);
    if (!item->tensor)
        return fsdp_fail_memory(err, "a tensor");
    *item->tensor = *tensor;
    tensor->data = NULL;
    return FSDP_OK;
}

/* An object that is not visited item by item is compared by its pickled bytes, where they can be
 * reproduced. */
static fsdp_status hash_stored(const torch_archive *archive, fsdp_node node,
                               const fsdp_value *value, fsdp_hash *stored, fsdp_error *err)
{
    enum { MOST = 64 << 20 };
    fsdp_text bytes = {0};
    if (node == 0 || !fsdp_value_is_opaque(value))
        return FSDP_OK;
    fsdp_status st = torch_resave_node(archive, node, MOST, &bytes, err);
    if (st == FSDP_OK && bytes.size > 0)
        *stored = fsdp_kernels_get()->hash(bytes.data, bytes.size);
    fsdp_text_release(&bytes);
    return st;
}

static bool is_same(const rank_item *first, const rank_item *item, const fsdp_value *value)
{
    return item != first && !first->is_tensor && fsdp_value_equal(&first->value, value) &&
           memcmp(&first->stored, &item->stored, sizeof first->stored) == 0;
}

fsdp_status rank_files_value(void *context, const torch_item *found, fsdp_value *value,
                             fsdp_error *err)
{
    rank_files *set = context;
    rank_entry *entry;
    rank_item *item = NULL;
    if (found->name_size == 0 && value->kind == FSDP_VALUE_DICT && value->as.list.count == 0)
        return FSDP_OK; /* a rank without the entry */
    FSDP_TRY(rank_files_entry(set, found->name, found->name_size, &entry, err));
    FSDP_TRY(add_item(set, entry, &item, err));
    const rank_item *first = &entry->items[0];
    FSDP_TRY(hash_stored(found->archive, found->node, value, &item->stored, err));
    item->is_same = is_same(first, item, value);
    if (item->is_same)
        return FSDP_OK;
    item->value = *value;
    *value = (fsdp_value){0};
    return FSDP_OK;
}

void rank_items_release(rank_entry *entry)
{
    for (size_t i = 0; i < entry->item_count; i++) {
        if (entry->items[i].tensor)
            torch_tensor_release(entry->items[i].tensor);
        fsdp_free(entry->items[i].tensor);
        fsdp_value_release(&entry->items[i].value);
    }
    fsdp_free(entry->items);
    entry->items = NULL;
    entry->item_count = entry->item_room = 0;
}
