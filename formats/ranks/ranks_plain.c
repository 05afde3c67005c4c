/*
 * Tensors and values that are not distributed: data equal on all ranks is kept once, other data
 * per rank. See ranks.h.
 */
#include "formats/ranks/ranks.h"

#include <string.h>

#include "base/data/box_internal.h"
#include "base/data/value_internal.h"
#include "formats/torch/torch_resave.h"

static fsdp_status fail_mixed(const rank_files *set, const rank_entry *entry, fsdp_error *err)
{
    char shown[200];
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s': '%s' is a distributed tensor on some ranks but not on rank %d",
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

/* --- the step ----------------------------------------------------------------------------------- */

/* A tensor of one element as a number. */
static fsdp_status read_number(rank_files *set, const torch_tensor *tensor, fsdp_value *value_out,
                               fsdp_error *err)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(tensor->dtype);
    fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape);
    char stored[16];
    double number = 0;
    if (fsdp_box_count(&whole) != 1 || tensor->fix != 0 || info->size > sizeof number ||
        !(info->is_float || tensor->dtype == FSDP_I64))
        return FSDP_OK;
    FSDP_TRY(torch_tensor_pread(set->source, tensor, 0, stored, info->size, err));
    if (info->is_float) {
        fsdp_kernels_get()->cast(&number, FSDP_F64, stored, tensor->dtype, 1, FSDP_OVERFLOW_INF);
        *value_out = fsdp_value_f64(number);
    } else {
        int64_t count;
        memcpy(&count, stored, sizeof count);
        *value_out = fsdp_value_i64(count);
    }
    return FSDP_OK;
}

static fsdp_status note_step(rank_files *set, const torch_item *found, const fsdp_value *value,
                             fsdp_error *err)
{
    if (value->kind != FSDP_VALUE_I64 && value->kind != FSDP_VALUE_F64)
        return FSDP_OK;
    return fsdp_facts_note(&set->facts, found->name, found->name_size, set->path, value, err);
}

static fsdp_status note_step_tensor(rank_files *set, const torch_item *found,
                                    const torch_tensor *tensor, fsdp_error *err)
{
    fsdp_value value = {0};
    FSDP_TRY(read_number(set, tensor, &value, err));
    return note_step(set, found, &value, err);
}

/* --- entries ------------------------------------------------------------------------------------ */

/* Ranks may have other numbers in a tensor of their own, never of another type. */
static fsdp_status check_dtype(const rank_files *set, const rank_entry *entry,
                               const torch_tensor *tensor, fsdp_error *err)
{
    const torch_tensor *first = entry->items[0].tensor;
    char shown[200];
    bool has_shape = first->ndim == tensor->ndim &&
                     (first->ndim == 0 || memcmp(first->shape, tensor->shape,
                                                 (size_t)first->ndim * sizeof *first->shape) == 0);
    if (first->dtype == tensor->dtype || !has_shape)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s': tensor '%s' is of %s on rank %d and of %s on rank %d" FSDP_TWO_SAVES,
                     set->where, fsdp_printable(entry->name, entry->name_size, shown, sizeof shown),
                     fsdp_dtype_name(first->dtype), entry->items[0].rank,
                     fsdp_dtype_name(tensor->dtype), set->rank);
}

fsdp_status rank_files_tensor(void *context, const torch_item *found, torch_tensor *tensor,
                              fsdp_error *err)
{
    rank_files *set = context;
    rank_entry *entry;
    rank_item *item = NULL;
    if (fsdp_fact_is_step(found->name, found->name_size))
        FSDP_TRY(note_step_tensor(set, found, tensor, err));
    FSDP_TRY(rank_files_entry(set, found->name, found->name_size, &entry, err));
    FSDP_TRY(add_item(set, entry, &item, err));
    item->is_tensor = true;
    const rank_item *first = &entry->items[0];
    if (item != first && first->is_tensor) {
        FSDP_TRY(rank_files_count_compared(set, tensor, INT64_MAX, err));
        FSDP_TRY(check_dtype(set, entry, tensor, err));
        FSDP_TRY(named(
            entry,
            torch_same_elements(set->source, first->tensor, tensor, INT64_MAX, &item->is_same, err),
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
    if (fsdp_fact_is_step(found->name, found->name_size))
        FSDP_TRY(note_step(set, found, value, err));
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
