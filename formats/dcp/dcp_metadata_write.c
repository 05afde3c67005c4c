/*
 * Writes .metadata of a DCP directory: the pickle of
 * torch.distributed.checkpoint.metadata.Metadata, in the form that PyTorch 2.3 to 2.15 read.
 * TensorProperties have five members (the sixth, strides, is for new versions only and optional
 * there), and storage_meta is None. The mirror is dcp_metadata.c.
 *
 * planner_data gives every name its path (nesting.c), so that PyTorch restores the nesting.
 */
#include "formats/dcp/dcp_write.h"

#include "base/core/mem.h"
#include "base/data/name_path.h"
#include "formats/target/nesting.h"
#include "formats/torch/torch_internal.h"

#include <stdio.h>
#include <stdlib.h>

static const char metadata_module[] = "torch.distributed.checkpoint.metadata";

/* Memo numbers of repeated parts. */
typedef struct metadata_memo {
    uint32_t *names; /* per entry */
    uint32_t *paths; /* per rank */
    bool *has_path;
    bool has_parts;
    uint32_t layout, memory_format;
    nesting nesting;
} metadata_memo;

/* --- items ------------------------------------------------------------------------------------ */

bool dcp_has_elements(const fsdp_target_entry *entry)
{
    return torch_bytes_of(entry->dtype, entry->ndim, entry->shape) > 0;
}

fsdp_box dcp_item_box(const fsdp_target_entry *entry, size_t number)
{
    return dcp_has_elements(entry) ? fsdp_target_box_at(entry, number)
                                   : fsdp_box_whole(entry->ndim, entry->shape);
}

/* --- shapes of a pickle ----------------------------------------------------------------------- */

static void begin_dict(fsdp_pickler *pickler)
{
    fsdp_pickler_op(pickler, FSDP_OP_EMPTY_DICT);
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
}

/* An object without a state. */
static void add_object(fsdp_pickler *pickler, const char *module, const char *name)
{
    fsdp_pickler_global(pickler, module, name);
    fsdp_pickler_op(pickler, FSDP_OP_EMPTY_TUPLE);
    fsdp_pickler_op(pickler, FSDP_OP_NEWOBJ);
}

static void begin_object(fsdp_pickler *pickler, const char *module, const char *name)
{
    add_object(pickler, module, name);
    begin_dict(pickler);
}

static void end_object(fsdp_pickler *pickler)
{
    fsdp_pickler_op(pickler, FSDP_OP_SETITEMS);
    fsdp_pickler_op(pickler, FSDP_OP_BUILD);
}

/* --- tensors ---------------------------------------------------------------------------------- */

static void add_layout(fsdp_pickler *pickler, metadata_memo *memo)
{
    if (memo->has_parts) {
        fsdp_pickler_get(pickler, memo->layout);
        return;
    }
    fsdp_pickler_global(pickler, "torch.serialization", "_get_layout");
    fsdp_pickler_word(pickler, "torch.strided");
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE1);
    fsdp_pickler_op(pickler, FSDP_OP_REDUCE);
    memo->layout = fsdp_pickler_put(pickler);
}

static void add_memory_format(fsdp_pickler *pickler, metadata_memo *memo)
{
    if (memo->has_parts) {
        fsdp_pickler_get(pickler, memo->memory_format);
        return;
    }
    fsdp_pickler_global(pickler, metadata_module, "_MEM_FORMAT_ENCODING");
    fsdp_pickler_int(pickler, 0); /* contiguous */
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE1);
    fsdp_pickler_op(pickler, FSDP_OP_REDUCE);
    memo->memory_format = fsdp_pickler_put(pickler);
}

static void add_properties(fsdp_pickler *pickler, metadata_memo *memo, fsdp_dtype dtype)
{
    add_object(pickler, metadata_module, "TensorProperties");
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    fsdp_pickler_global(pickler, "torch", fsdp_dtype_describe(dtype)->torch);
    add_layout(pickler, memo);
    fsdp_pickler_op(pickler, FSDP_OP_FALSE); /* requires_grad */
    add_memory_format(pickler, memo);
    fsdp_pickler_op(pickler, FSDP_OP_FALSE); /* pin_memory */
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE);
    fsdp_pickler_op(pickler, FSDP_OP_BUILD);
    memo->has_parts = true;
}

static void add_chunk(fsdp_pickler *pickler, const fsdp_box *box)
{
    begin_object(pickler, metadata_module, "ChunkStorageMetadata");
    fsdp_pickler_word(pickler, "offsets");
    fsdp_pickler_size(pickler, box->lo, (size_t)box->ndim);
    fsdp_pickler_word(pickler, "sizes");
    fsdp_pickler_size(pickler, box->len, (size_t)box->ndim);
    end_object(pickler);
}

static void add_tensor(fsdp_pickler *pickler, metadata_memo *memo, const dcp_plan *plan, size_t i)
{
    const fsdp_target_entry *entry = &plan->entries[i];
    begin_object(pickler, metadata_module, "TensorStorageMetadata");
    fsdp_pickler_word(pickler, "properties");
    add_properties(pickler, memo, entry->dtype);
    fsdp_pickler_word(pickler, "size");
    fsdp_pickler_size(pickler, entry->shape, (size_t)entry->ndim);
    fsdp_pickler_word(pickler, "chunks");
    fsdp_pickler_op(pickler, FSDP_OP_EMPTY_LIST);
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    for (size_t item = plan->first[i]; item < plan->first[i + 1]; item++) {
        fsdp_box box = dcp_item_box(entry, item - plan->first[i]);
        if (plan->items[item].size > 0)
            add_chunk(pickler, &box);
    }
    fsdp_pickler_op(pickler, FSDP_OP_APPENDS);
    end_object(pickler);
}

/* --- the three tables ------------------------------------------------------------------------- */

static void add_state_dict(fsdp_pickler *pickler, metadata_memo *memo, const dcp_plan *plan)
{
    begin_dict(pickler);
    for (size_t i = 0; i < plan->entry_count; i++) {
        const fsdp_target_entry *entry = &plan->entries[i];
        fsdp_pickler_text(pickler, entry->name, entry->name_size);
        memo->names[i] = fsdp_pickler_put(pickler);
        if (entry->value)
            add_object(pickler, metadata_module, "BytesStorageMetadata");
        else
            add_tensor(pickler, memo, plan, i);
    }
    fsdp_pickler_op(pickler, FSDP_OP_SETITEMS);
}

static void add_nesting(fsdp_pickler *pickler, const char *name, const int32_t *path, size_t count)
{
    fsdp_pickler_op(pickler, FSDP_OP_MARK);
    for (size_t i = 0; i < count; i++) {
        size_t size = fsdp_path_bytes(path[i]);
        if (path[i] < 0)
            fsdp_pickler_int(pickler, strtol(name, NULL, 10));
        else
            fsdp_pickler_text(pickler, name, size);
        name += size + 1;
    }
    fsdp_pickler_op(pickler, FSDP_OP_TUPLE);
}

static void add_planner_data(fsdp_pickler *pickler, const metadata_memo *memo, const dcp_plan *plan)
{
    begin_dict(pickler);
    for (size_t i = 0; i < plan->entry_count; i++) {
        size_t count = memo->nesting.counts[i];
        fsdp_pickler_get(pickler, memo->names[i]);
        if (count > 1) {
            add_nesting(pickler, plan->entries[i].name, memo->nesting.paths[i], count);
            continue;
        }
        fsdp_pickler_get(pickler, memo->names[i]);
        fsdp_pickler_op(pickler, FSDP_OP_TUPLE1);
    }
    fsdp_pickler_op(pickler, FSDP_OP_SETITEMS);
}

/* number: index of the box among the chunks of its tensor; box NULL: a value. */
static void add_index(fsdp_pickler *pickler, uint32_t name, const fsdp_box *box, int64_t number)
{
    begin_object(pickler, metadata_module, "MetadataIndex");
    fsdp_pickler_word(pickler, "fqn");
    fsdp_pickler_get(pickler, name);
    fsdp_pickler_word(pickler, "index");
    if (box) {
        fsdp_pickler_int(pickler, number);
        fsdp_pickler_word(pickler, "offset");
        fsdp_pickler_size(pickler, box->lo, (size_t)box->ndim);
    } else
        fsdp_pickler_op(pickler, FSDP_OP_NONE);
    end_object(pickler);
}

static void add_path(fsdp_pickler *pickler, metadata_memo *memo, int rank)
{
    char path[32];
    if (memo->has_path[rank]) {
        fsdp_pickler_get(pickler, memo->paths[rank]);
        return;
    }
    int size = snprintf(path, sizeof path, "__%d_0.distcp", rank);
    fsdp_pickler_text(pickler, path, (size_t)size);
    memo->paths[rank] = fsdp_pickler_put(pickler);
    memo->has_path[rank] = true;
}

static void add_place(fsdp_pickler *pickler, metadata_memo *memo, const dcp_written *item)
{
    begin_object(pickler, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    fsdp_pickler_word(pickler, "relative_path");
    add_path(pickler, memo, item->rank);
    fsdp_pickler_word(pickler, "offset");
    fsdp_pickler_int(pickler, item->offset);
    fsdp_pickler_word(pickler, "length");
    fsdp_pickler_int(pickler, item->size);
    end_object(pickler);
}

static void add_storage_data(fsdp_pickler *pickler, metadata_memo *memo, const dcp_plan *plan)
{
    begin_dict(pickler);
    for (size_t i = 0; i < plan->entry_count; i++) {
        int64_t number = 0;
        for (size_t item = plan->first[i]; item < plan->first[i + 1]; item++) {
            const fsdp_target_entry *entry = &plan->entries[i];
            if (plan->items[item].size == 0)
                continue;
            fsdp_box box = dcp_item_box(entry, item - plan->first[i]);
            add_index(pickler, memo->names[i], entry->value ? NULL : &box, number++);
            add_place(pickler, memo, &plan->items[item]);
        }
    }
    fsdp_pickler_op(pickler, FSDP_OP_SETITEMS);
}

static void add_all(fsdp_pickler *pickler, metadata_memo *memo, const dcp_plan *plan)
{
    fsdp_pickler_begin(pickler);
    begin_object(pickler, metadata_module, "Metadata");
    fsdp_pickler_word(pickler, "state_dict_metadata");
    add_state_dict(pickler, memo, plan);
    fsdp_pickler_word(pickler, "planner_data");
    add_planner_data(pickler, memo, plan);
    fsdp_pickler_word(pickler, "storage_data");
    add_storage_data(pickler, memo, plan);
    fsdp_pickler_word(pickler, "storage_meta");
    fsdp_pickler_op(pickler, FSDP_OP_NONE);
    fsdp_pickler_word(pickler, "version");
    fsdp_pickler_word(pickler, "1.0.0");
    end_object(pickler);
    fsdp_pickler_op(pickler, FSDP_OP_STOP);
}

fsdp_status dcp_emit_metadata(dcp_plan *plan, fsdp_error *err)
{
    metadata_memo memo = {.names = fsdp_alloc(plan->entry_count, sizeof(uint32_t)),
                          .paths = fsdp_alloc((size_t)plan->world, sizeof(uint32_t)),
                          .has_path = fsdp_alloc((size_t)plan->world, sizeof(bool))};
    fsdp_status st =
        nesting_find(plan->entries, plan->entry_count, NESTING_DCP, &memo.nesting, err);
    bool has_memory = memo.names && memo.paths && memo.has_path;
    if (st == FSDP_OK && has_memory)
        add_all(&plan->metadata, &memo, plan);
    if (st == FSDP_OK && (!has_memory || plan->metadata.text.failed))
        st = fsdp_fail_memory(err, "the metadata of a checkpoint");
    nesting_release(&memo.nesting);
    fsdp_free(memo.names);
    fsdp_free(memo.paths);
    fsdp_free(memo.has_path);
    return st;
}
