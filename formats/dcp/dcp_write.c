/*
 * Writes a directory of torch.distributed.checkpoint: see target.h. The mirror is dcp_read.c.
 *
 *   __R_0.distcp per rank: values (rank 0), then its boxes; each item is a torch.save archive
 *   .metadata: the place of every item, written last
 *
 * The archive of a box follows from its dtype and shape alone, so its records are made again for
 * the first and the last piece of the box, and only its checksum is kept in memory.
 */
#include "base/core/mem.h"
#include "base/data/box_internal.h"
#include "base/data/name_path.h"
#include "base/data/value_internal.h"
#include "formats/dcp/dcp.h"
#include "formats/dcp/dcp_fold.h"
#include "formats/target/container_table.h"
#include "formats/target/nesting.h"
#include "formats/torch/torch_emit.h"
#include "formats/torch/torch_internal.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === lists that PyTorch loads as one value ==================================================== */

/* The entries below a list; other containers have zeros. */
typedef struct contents {
    size_t first;      /* first entry */
    size_t all, plain; /* plain: values with no dict on their path */
    size_t dicts;      /* dicts without keys, which made a source name the list's items */
} contents;

typedef struct folding {
    const fsdp_target_entry *entries;
    size_t count;
    dcp_fold *fold;
    fsdp_name_table names;      /* names of entries */
    container_table containers; /* indexes of contents */
    contents *contents;
    size_t contents_count, contents_room;
    bool is_too_much; /* too many contents: no list is merged */
} folding;

static bool is_nested(const fsdp_target_entry *entry)
{
    return entry->path && entry->path_count > 1 &&
           fsdp_path_fits(entry->name, entry->name_size, entry->path, entry->path_count);
}

static bool is_in_list(const fsdp_target_entry *entry)
{
    for (size_t i = 1; i < entry->path_count; i++)
        if (entry->path[i] < 0)
            return is_nested(entry);
    return false;
}

/* True when the path from that element on has positions only. */
static bool is_plain(const fsdp_target_entry *entry, size_t from)
{
    for (size_t i = from; i < entry->path_count; i++)
        if (entry->path[i] >= 0)
            return false;
    return entry->value && !fsdp_value_is_opaque(entry->value);
}

/* --- counting --------------------------------------------------------------------------------- */

/* A position on the path from the outermost dict down to an entry. */
typedef struct way_down {
    size_t around, at; /* the container reached; bytes of the name up to the next element */
} way_down;

/* The container that element i of the entry names; NULL when it is new, and the position stays. */
static contents *go_down(folding *work, const fsdp_target_entry *entry, size_t i, way_down *way)
{
    const uint64_t *found =
        container_table_find(&work->containers, way->around, entry->name + way->at, entry->path[i]);
    if (!found)
        return NULL;
    way->around = (size_t)*found + 1;
    way->at += fsdp_path_bytes(entry->path[i]) + 1;
    return &work->contents[*found];
}

/* Adds the container that go_down did not find. */
static bool add_contents(folding *work)
{
    if (!container_table_put(&work->containers, work->contents_count) ||
        !fsdp_grow(&work->contents, &work->contents_room, work->contents_count + 1,
                   sizeof *work->contents))
        return false;
    work->contents[work->contents_count++] = (contents){0};
    work->is_too_much = work->contents_count > NESTING_MOST;
    return true;
}

static fsdp_status count_entry(folding *work, size_t number, fsdp_error *err)
{
    const fsdp_target_entry *entry = &work->entries[number];
    way_down way = {0};
    for (size_t i = 0; i + 1 < entry->path_count; i++) {
        contents *list = go_down(work, entry, i, &way);
        if (!list && add_contents(work))
            list = go_down(work, entry, i, &way);
        if (!list)
            return fsdp_fail_memory(err, "the names of a checkpoint");
        if (entry->path[i + 1] >= 0)
            continue;
        if (list->all++ == 0)
            list->first = number;
        list->plain += is_plain(entry, i + 1);
        list->dicts += entry->value && entry->value->kind == FSDP_VALUE_DICT;
    }
    return FSDP_OK;
}

static fsdp_status count_all(folding *work, fsdp_error *err)
{
    for (size_t i = 0; i < work->count; i++) {
        const fsdp_target_entry *entry = &work->entries[i];
        if (!fsdp_name_table_find(&work->names, entry->name, entry->name_size) &&
            !fsdp_name_table_put(&work->names, entry->name, entry->name_size, i))
            return fsdp_fail_memory(err, "the names of a checkpoint");
        if (is_in_list(entry) && !work->is_too_much)
            FSDP_TRY(count_entry(work, i, err));
    }
    return FSDP_OK;
}

/* --- one list --------------------------------------------------------------------------------- */

/* Entries [first, end) below the list that `depth` elements name. */
typedef struct list_run {
    size_t first, end, depth;
    size_t name_size; /* of the list */
} list_run;

static bool is_below(const fsdp_target_entry *entry, const fsdp_target_entry *first, size_t depth,
                     size_t name_size)
{
    return is_nested(entry) && entry->path_count > depth && entry->name_size > name_size &&
           memcmp(entry->path, first->path, depth * sizeof *entry->path) == 0 &&
           memcmp(entry->name, first->name, name_size) == 0;
}

/* Finds the outermost plain list of the entry, if the entry is its first and its others follow. */
static bool find_list(folding *work, size_t first, list_run *run_out)
{
    const fsdp_target_entry *entry = &work->entries[first];
    const contents *list = NULL;
    way_down way = {0};
    size_t depth = 0;
    if (work->is_too_much || !is_in_list(entry))
        return false;
    for (size_t i = 0; i + 1 < entry->path_count && !list; i++) {
        const contents *found = go_down(work, entry, i, &way);
        if (!found)
            return false; /* no memory: see dcp_fold_lists */
        if (entry->path[i + 1] < 0 && found->all == found->plain && found->dicts > 0) {
            list = found;
            depth = i + 1;
        }
    }
    if (!list || list->first != first)
        return false;
    size_t end = first, name_size = way.at - 1;
    while (end < work->count && is_below(&work->entries[end], entry, depth, name_size))
        end++;
    *run_out = (list_run){first, end, depth, name_size};
    return end - first == list->all && !fsdp_name_table_find(&work->names, entry->name, name_size);
}

/* Both are in the run, and so have equal paths up to the list. */
static bool are_of_one_item(const fsdp_target_entry *a, const fsdp_target_entry *b,
                            const list_run *run)
{
    size_t depth = run->depth, at = run->name_size + 1;
    return a->path_count > depth + 1 && b->path_count > depth + 1 &&
           a->path[depth] == b->path[depth] &&
           memcmp(a->name + at, b->name + at, fsdp_path_bytes(a->path[depth])) == 0;
}

/* The entries from there on that share the next element. */
static list_run item_at(const folding *work, const list_run *run, size_t from)
{
    const fsdp_target_entry *first = &work->entries[from];
    size_t bytes = fsdp_path_bytes(first->path[run->depth]), end = from + 1;
    while (end < run->end && are_of_one_item(first, &work->entries[end], run))
        end++;
    return (list_run){from, end, run->depth + 1, run->name_size + 1 + bytes};
}

static bool has_position(const fsdp_target_entry *entry, size_t name_size, size_t position)
{
    return strtoull(entry->name + name_size + 1, NULL, 10) == position;
}

/* *whole is false when an item is missing. */
static fsdp_status make_list(const folding *work, const list_run *run, fsdp_value *list,
                             bool *whole, fsdp_error *err)
{
    size_t count = 0, item = 0;
    for (size_t i = run->first; i < run->end; i = item_at(work, run, i).end)
        *whole = *whole && has_position(&work->entries[i], run->name_size, count++);
    if (!*whole)
        return FSDP_OK;
    FSDP_TRY(fsdp_value_set_items(list, FSDP_VALUE_LIST, count, err));
    list->is_tuple = fsdp_path_in_tuple(work->entries[run->first].path[run->depth]);
    for (size_t i = run->first, end; i < run->end && *whole; i = end) {
        const fsdp_target_entry *entry = &work->entries[i];
        fsdp_value *value = &list->as.list.items[item++];
        list_run inner = item_at(work, run, i);
        end = inner.end;
        FSDP_TRY(entry->path_count == inner.depth ? fsdp_value_copy(entry->value, value, err)
                                                  : make_list(work, &inner, value, whole, err));
    }
    return FSDP_OK;
}

/* --- all lists -------------------------------------------------------------------------------- */

static void add_entry(folding *work, const fsdp_target_entry *entry, size_t first, size_t end)
{
    for (size_t i = first; i < end; i++)
        work->fold->number[i] = work->fold->count;
    work->fold->entries[work->fold->count++] = *entry;
}

static fsdp_status fold_list(folding *work, const list_run *run, bool *is_folded, fsdp_error *err)
{
    dcp_fold *fold = work->fold;
    fsdp_value *list = &fold->lists[fold->list_count];
    fsdp_target_entry entry = work->entries[run->first];
    *is_folded = true;
    FSDP_TRY(make_list(work, run, list, is_folded, err));
    if (!*is_folded) {
        fsdp_value_release(list);
        return FSDP_OK;
    }
    fold->list_count++;
    entry.name_size = run->name_size;
    entry.path_count = run->depth;
    entry.value = list;
    add_entry(work, &entry, run->first, run->end);
    return FSDP_OK;
}

static fsdp_status fold_all(folding *work, fsdp_error *err)
{
    dcp_fold *fold = work->fold;
    fold->entries = fsdp_alloc(work->count, sizeof *fold->entries);
    fold->number = fsdp_alloc(work->count, sizeof *fold->number);
    fold->lists = fsdp_alloc(work->contents_count, sizeof *fold->lists);
    if (!fold->entries || !fold->number || !fold->lists)
        return fsdp_fail_memory(err, "a checkpoint");
    for (size_t i = 0, end; i < work->count; i = end) {
        list_run run;
        bool is_folded = false;
        if (find_list(work, i, &run))
            FSDP_TRY(fold_list(work, &run, &is_folded, err));
        end = is_folded ? run.end : i + 1;
        if (!is_folded)
            add_entry(work, &work->entries[i], i, end);
    }
    return FSDP_OK;
}

fsdp_status dcp_fold_lists(const fsdp_target_entry *entries, size_t count, dcp_fold *fold_out,
                           fsdp_error *err)
{
    folding work = {.entries = entries, .count = count, .fold = fold_out};
    *fold_out = (dcp_fold){0};
    fsdp_status st = count_all(&work, err);
    if (st == FSDP_OK)
        st = fold_all(&work, err);
    if (st == FSDP_OK && work.containers.key.failed)
        st = fsdp_fail_memory(err, "the names of a checkpoint");
    fsdp_name_table_release(&work.names);
    container_table_release(&work.containers);
    fsdp_free(work.contents);
    return st;
}

void dcp_fold_release(dcp_fold *fold)
{
    for (size_t i = 0; fold->lists && i < fold->list_count; i++)
        fsdp_value_release(&fold->lists[i]);
    fsdp_free(fold->lists);
    fsdp_free(fold->entries);
    fsdp_free(fold->number);
}

/* === the pickle of .metadata ================================================================== */

/*
 * Writes .metadata of a DCP directory: the pickle of
 * torch.distributed.checkpoint.metadata.Metadata, in the form that PyTorch 2.3 to 2.15 read.
 * TensorProperties have five members (the sixth, strides, is for new versions only and optional
 * there), and storage_meta is None. The mirror is dcp_metadata.c.
 *
 * planner_data gives every name its path (nesting.c), so that PyTorch restores the nesting.
 */

/* A box or value in the file of its rank. */
typedef struct dcp_written {
    int rank;
    int64_t offset, size; /* size 0: a box without elements, which is not stored */
    torch_part part;
} dcp_written;

typedef struct dcp_plan {
    dcp_fold fold;
    const fsdp_target_entry *entries; /* owned by the plan */
    size_t entry_count;
    int world;
    size_t *first;      /* per entry: its first item; one more at the end */
    dcp_written *items; /* one per value; one per box of a tensor, at least one */
    int64_t *rank_sizes;
    char (*rank_names)[24]; /* of the files */
    fsdp_pickler metadata;
} dcp_plan;

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

static bool dcp_has_elements(const fsdp_target_entry *entry)
{
    return torch_bytes_of(entry->dtype, entry->ndim, entry->shape) > 0;
}

/* The box of an entry's n-th item. A tensor without elements, which may have no boxes, is stored as a
 * whole. */
static fsdp_box dcp_item_box(const fsdp_target_entry *entry, size_t number)
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

/* Fills in plan->metadata, after all items have their places. */
static fsdp_status dcp_emit_metadata(dcp_plan *plan, fsdp_error *err)
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

/* === the target =============================================================================== */

/* Limit of open files; in a larger world every piece opens its file. */
enum { OPEN_MOST = 128, VALUES_TOGETHER = 1 << 20 };

struct fsdp_target {
    fsdp_target_opts opts;
    dcp_plan plan;
    char *path;
    fsdp_file **files; /* per rank, NULL: closed */
};

/* --- archives of boxes ------------------------------------------------------------------------ */

/* The records of an archive with one storage. */
typedef struct box_archive {
    fsdp_pickler pickler;
    fsdp_zip_record records[TORCH_FIXED + 1];
    int64_t size;
} box_archive;

static fsdp_status make_archive(box_archive *archive, fsdp_dtype dtype, const fsdp_box *box,
                                fsdp_error *err)
{
    fsdp_pickler *pickler = &archive->pickler;
    fsdp_pickler_begin(pickler);
    FSDP_TRY(torch_emit_tensor(pickler, dtype, box->ndim, box->len, 0, err));
    fsdp_pickler_op(pickler, FSDP_OP_STOP);
    if (pickler->text.failed)
        return fsdp_fail_memory(err, "an item");
    archive->records[TORCH_LEADING].size = torch_bytes_of(dtype, box->ndim, box->len);
    return torch_place_archive(archive->records, 1, &pickler->text, &archive->size, err);
}

static void add_before(fsdp_text *text, const box_archive *archive)
{
    torch_emit_leading(text, archive->records, &archive->pickler.text);
    fsdp_zip_add_header(text, &archive->records[TORCH_LEADING]);
}

static void add_behind(fsdp_text *text, box_archive *archive, uint32_t crc)
{
    archive->records[TORCH_LEADING].crc = crc;
    fsdp_zip_add_trailer(text, &archive->records[TORCH_LEADING]);
    torch_emit_closing(text, archive->records, 1);
}

/* --- planning --------------------------------------------------------------------------------- */

static size_t count_items(const fsdp_target_entry *entry)
{
    return entry->value || !dcp_has_elements(entry) ? 1 : entry->box_count;
}

static fsdp_status place_item(dcp_plan *plan, dcp_written *item, int rank, int64_t size,
                              fsdp_error *err)
{
    item->rank = rank;
    item->size = size;
    item->offset = plan->rank_sizes[rank];
    if (fsdp_add_overflow(item->offset, size, &plan->rank_sizes[rank]))
        return fsdp_fail(err, FSDP_ERR_LIMIT, "the file of rank %d is too large", rank);
    return FSDP_OK;
}

/* A blob is stored as an item, which dcp_read.c opens as a zip: a legacy torch.save file is not one. */
static fsdp_status place_blob(dcp_plan *plan, size_t i, const fsdp_value *value, fsdp_error *err)
{
    size_t size = value->as.bytes.size;
    fsdp_source *blob = NULL;
    fsdp_error why = {0};
    fsdp_status st = fsdp_source_open_blob(value->as.bytes.data, size, &blob, &why);
    fsdp_source_close(blob);
    if (st == FSDP_OK)
        return place_item(plan, &plan->items[plan->first[i]], 0, (int64_t)size, err);
    if (st == FSDP_ERR_LIMIT)
        return fsdp_fail(err, st, "%s", why.text);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "a DCP directory cannot hold an opaque value that is not a zip of torch.save; "
                     "leave it out with --drop opaque (%s)",
                     why.text);
}

static fsdp_status place_value(dcp_plan *plan, size_t i, fsdp_pickler *pickler, fsdp_text *text,
                               fsdp_error *err)
{
    const fsdp_value *value = plan->entries[i].value;
    text->size = 0;
    if (value->kind == FSDP_VALUE_OPAQUE)
        return place_blob(plan, i, value, err);
    FSDP_TRY(torch_emit_value(text, pickler, value, err));
    return place_item(plan, &plan->items[plan->first[i]], 0, (int64_t)text->size, err);
}

static fsdp_status check_boxes(const dcp_plan *plan, const fsdp_target_entry *entry,
                               fsdp_error *err)
{
    fsdp_box whole = fsdp_box_whole(entry->ndim, entry->shape);
    int64_t count = 0;
    for (size_t b = 0; b < entry->box_count; b++) {
        int rank = entry->boxes[b].rank;
        fsdp_box box = fsdp_target_box_at(entry, b);
        if (rank < 0 || rank >= plan->world || !fsdp_box_contains(&whole, &box))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "box %zu lies outside the tensor or world", b);
        count += fsdp_box_count(&box);
    }
    if (count != fsdp_box_count(&whole))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "its boxes do not cover it");
    return FSDP_OK;
}

static fsdp_status place_boxes(dcp_plan *plan, size_t i, box_archive *archive, fsdp_error *err)
{
    const fsdp_target_entry *entry = &plan->entries[i];
    FSDP_TRY(check_boxes(plan, entry, err));
    bool stored = !dcp_has_elements(entry); /* stored as a whole although it has no elements */
    for (size_t item = plan->first[i]; item < plan->first[i + 1]; item++) {
        size_t number = item - plan->first[i];
        fsdp_box box = dcp_item_box(entry, number);
        int rank = number < entry->box_count ? entry->boxes[number].rank : 0;
        if (fsdp_box_count(&box) == 0 && !stored) {
            FSDP_TRY(place_item(plan, &plan->items[item], rank, 0, err));
            continue;
        }
        FSDP_TRY(make_archive(archive, entry->dtype, &box, err));
        FSDP_TRY(place_item(plan, &plan->items[item], rank, archive->size, err));
        atomic_store(&plan->items[item].part.left, archive->records[TORCH_LEADING].size);
    }
    return FSDP_OK;
}

/* Values come first, as in PyTorch. */
static fsdp_status place_items(dcp_plan *plan, fsdp_error *err)
{
    box_archive archive = {0};
    fsdp_text text = {0};
    fsdp_status st = FSDP_OK;
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < plan->entry_count && st == FSDP_OK; i++) {
            const fsdp_target_entry *entry = &plan->entries[i];
            if (pass == 0 && entry->value)
                st = place_value(plan, i, &archive.pickler, &text, err);
            else if (pass == 1 && !entry->value)
                st = place_boxes(plan, i, &archive, err);
            st = torch_blame_entry(entry, st, err);
        }
    fsdp_text_release(&text);
    fsdp_pickler_release(&archive.pickler);
    return st;
}

static void release_plan(dcp_plan *plan)
{
    dcp_fold_release(&plan->fold);
    fsdp_pickler_release(&plan->metadata);
    fsdp_free(plan->first);
    fsdp_free(plan->items);
    fsdp_free(plan->rank_sizes);
    fsdp_free(plan->rank_names);
}

/* The caller releases the plan, also after a failure. */
static fsdp_status make_plan(const fsdp_target_opts *opts, dcp_plan *plan, fsdp_error *err)
{
    *plan = (dcp_plan){.world = opts->world > 0 ? opts->world : 1};
    FSDP_TRY(dcp_fold_lists(opts->entries, opts->entry_count, &plan->fold, err));
    plan->entries = plan->fold.entries;
    plan->entry_count = plan->fold.count;
    plan->first = fsdp_alloc(plan->entry_count + 1, sizeof *plan->first);
    plan->rank_sizes = fsdp_alloc((size_t)plan->world, sizeof *plan->rank_sizes);
    plan->rank_names = fsdp_alloc((size_t)plan->world, sizeof *plan->rank_names);
    if (!plan->first || !plan->rank_sizes || !plan->rank_names)
        return fsdp_fail_memory(err, "a checkpoint");
    for (int rank = 0; rank < plan->world; rank++)
        snprintf(plan->rank_names[rank], sizeof plan->rank_names[rank], "__%d_0.distcp", rank);
    for (size_t i = 0; i < plan->entry_count; i++)
        plan->first[i + 1] = plan->first[i] + count_items(&plan->entries[i]);
    plan->items = fsdp_alloc(plan->first[plan->entry_count], sizeof *plan->items);
    if (!plan->items)
        return fsdp_fail_memory(err, "a checkpoint");
    FSDP_TRY(place_items(plan, err));
    return dcp_emit_metadata(plan, err);
}

static fsdp_status measure(const fsdp_target_opts *opts, int64_t *files_out, int64_t *bytes_out,
                           fsdp_error *err)
{
    dcp_plan plan;
    fsdp_status st = make_plan(opts, &plan, err);
    *files_out = plan.world + 1;
    *bytes_out = (int64_t)plan.metadata.text.size;
    for (int rank = 0; st == FSDP_OK && rank < plan.world; rank++)
        if (fsdp_add_overflow(*bytes_out, plan.rank_sizes[rank], bytes_out))
            st = fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' would be too large", opts->path);
    release_plan(&plan);
    return st;
}

/* --- files ------------------------------------------------------------------------------------ */

static fsdp_status rank_path(const fsdp_target *target, int rank, char **path_out, fsdp_error *err)
{
    *path_out = fsdp_path_join(target->path, target->plan.rank_names[rank]);
    return *path_out ? FSDP_OK : fsdp_fail_memory(err, "a path");
}

typedef struct rank_file {
    fsdp_file *file;
    char *path;
    bool is_extra; /* beyond OPEN_MOST: closed after this piece */
} rank_file;

static fsdp_status borrow_file(const fsdp_target *target, int rank, rank_file *out, fsdp_error *err)
{
    *out = (rank_file){.file = target->files[rank], .is_extra = !target->files[rank]};
    FSDP_TRY(rank_path(target, rank, &out->path, err));
    fsdp_status st = FSDP_OK;
    if (out->is_extra)
        st = fsdp_io_open(target->opts.io, out->path, FSDP_IO_WRITE, &out->file, err);
    if (st != FSDP_OK)
        fsdp_free(out->path);
    return st;
}

static fsdp_status return_file(rank_file *file, fsdp_status status, fsdp_error *err)
{
    if (file->is_extra) {
        fsdp_status closed = fsdp_io_close(&file->file, file->path, status == FSDP_OK ? err : NULL);
        status = status == FSDP_OK ? closed : status;
    }
    fsdp_free(file->path);
    return status;
}

static fsdp_status create_file(fsdp_target *target, int rank, fsdp_error *err)
{
    char *path;
    fsdp_file *file = NULL;
    int64_t size = target->plan.rank_sizes[rank];
    FSDP_TRY(rank_path(target, rank, &path, err));
    fsdp_status st = fsdp_io_open(target->opts.io, path, FSDP_IO_CREATE, &file, err);
    if (st == FSDP_OK && size > 0)
        st = fsdp_io_reserve(file, path, size, err);
    if (st == FSDP_OK && target->plan.world <= OPEN_MOST) {
        target->files[rank] = file;
        file = NULL;
    }
    fsdp_status closed = fsdp_io_close(&file, path, st == FSDP_OK ? err : NULL);
    fsdp_free(path);
    return st == FSDP_OK ? closed : st;
}

/* --- create ----------------------------------------------------------------------------------- */

static fsdp_status add_value(const fsdp_value *value, fsdp_pickler *pickler, fsdp_text *text,
                             fsdp_error *err)
{
    if (value->kind != FSDP_VALUE_OPAQUE)
        return torch_emit_value(text, pickler, value, err);
    fsdp_text_add(text, value->as.bytes.data, value->as.bytes.size);
    return text->failed ? fsdp_fail_memory(err, "a value") : FSDP_OK;
}

/* They are contiguous at the beginning of rank 0's file. */
static fsdp_status write_values(const fsdp_target *target, rank_file *file, fsdp_error *err)
{
    fsdp_pickler pickler = {0};
    fsdp_text text = {0};
    int64_t place = 0;
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i <= target->plan.entry_count && st == FSDP_OK; i++) {
        bool is_end = i == target->plan.entry_count;
        if (!is_end && target->plan.entries[i].value)
            st = add_value(target->plan.entries[i].value, &pickler, &text, err);
        if (st == FSDP_OK && text.size > 0 && (is_end || text.size >= VALUES_TOGETHER)) {
            st = fsdp_io_write(file->file, file->path, text.data, text.size, place, err);
            place += (int64_t)text.size;
            text.size = 0;
        }
    }
    fsdp_text_release(&text);
    fsdp_pickler_release(&pickler);
    return st;
}

static fsdp_status create_files(fsdp_target *target, fsdp_error *err)
{
    target->files = fsdp_alloc((size_t)target->plan.world, sizeof(fsdp_file *));
    target->path = fsdp_strndup(target->opts.path, strlen(target->opts.path));
    if (!target->files || !target->path)
        return fsdp_fail_memory(err, "a checkpoint");
    for (int rank = 0; rank < target->plan.world; rank++)
        FSDP_TRY(create_file(target, rank, err));
    rank_file file;
    FSDP_TRY(borrow_file(target, 0, &file, err));
    return return_file(&file, write_values(target, &file, err), err);
}

static void discard(fsdp_target *target)
{
    for (int rank = 0; target->files && rank < target->plan.world; rank++)
        (void)fsdp_io_close(&target->files[rank], target->path, NULL);
    release_plan(&target->plan);
    fsdp_free(target->files);
    fsdp_free(target->path);
    fsdp_free(target);
}

static fsdp_status create(const fsdp_target_opts *opts, fsdp_target **target_out, fsdp_error *err)
{
    fsdp_target *target = fsdp_alloc(1, sizeof *target);
    if (!target)
        return fsdp_fail_memory(err, "a checkpoint");
    target->opts = *opts;
    fsdp_status st = make_plan(opts, &target->plan, err);
    if (st == FSDP_OK)
        st = create_files(target, err);
    if (st == FSDP_OK)
        *target_out = target;
    else
        discard(target);
    return st;
}

/* --- write ------------------------------------------------------------------------------------ */

/* The bytes of a piece, and the archive records before its first and after its last byte. */
typedef struct item_piece {
    const void *data;
    size_t size;
    int64_t first; /* first byte in the storage */
} item_piece;

static fsdp_status write_in(const fsdp_target *target, dcp_written *item, box_archive *archive,
                            const item_piece *from, fsdp_error *err)
{
    const fsdp_zip_record *storage = &archive->records[TORCH_LEADING];
    int64_t place = item->offset + storage->data;
    torch_piece piece = {.data = from->data,
                         .size = from->size,
                         .offset = place + from->first,
                         .end = place + storage->size};
    rank_file file;
    FSDP_TRY(borrow_file(target, item->rank, &file, err));
    if (from->first == 0)
        add_before(&piece.before, archive);
    if (torch_part_take(&item->part, from->data, from->size,
                        storage->size - from->first - (int64_t)from->size))
        add_behind(&piece.behind, archive, atomic_load(&item->part.crc));
    fsdp_status st = torch_write_piece(file.file, file.path, &piece, target->opts.sync, err);
    return return_file(&file, st, err);
}

static fsdp_status write_piece(const fsdp_target *target, size_t entry, size_t box,
                               const item_piece *piece, fsdp_error *err)
{
    const fsdp_target_entry *declared = &target->plan.entries[entry];
    fsdp_box whole = dcp_item_box(declared, box);
    box_archive archive = {0};
    fsdp_status st = make_archive(&archive, declared->dtype, &whole, err);
    if (st == FSDP_OK)
        st = write_in(target, &target->plan.items[target->plan.first[entry] + box], &archive, piece,
                      err);
    fsdp_pickler_release(&archive.pickler);
    return st;
}

static fsdp_status place(const fsdp_target *target, size_t entry, size_t box,
                         fsdp_target_place *place_out, fsdp_error *err)
{
    entry = target->plan.fold.number[entry];
    const fsdp_target_entry *declared = &target->plan.entries[entry];
    const dcp_written *item = &target->plan.items[target->plan.first[entry] + box];
    fsdp_box whole = dcp_item_box(declared, box);
    box_archive archive = {0};
    *place_out = (fsdp_target_place){target->plan.rank_names[item->rank], item->offset};
    if (item->size == 0)
        return FSDP_OK;
    fsdp_status st = make_archive(&archive, declared->dtype, &whole, err);
    place_out->offset += archive.records[TORCH_LEADING].data;
    fsdp_pickler_release(&archive.pickler);
    return st;
}

static fsdp_status write(fsdp_target *target, const fsdp_target_piece *piece, fsdp_error *err)
{
    size_t entry = target->plan.fold.number[piece->entry];
    size_t size = fsdp_dtype_size(target->plan.entries[entry].dtype);
    item_piece bytes = {piece->data, (size_t)piece->count * size, piece->first * (int64_t)size};
    return piece->count > 0 ? write_piece(target, entry, piece->box, &bytes, err) : FSDP_OK;
}

/* --- finish ----------------------------------------------------------------------------------- */

static fsdp_status complete_items(const fsdp_target *target, fsdp_error *err)
{
    const item_piece nothing = {"", 0, 0};
    for (size_t i = 0; i < target->plan.entry_count; i++) {
        const fsdp_target_entry *entry = &target->plan.entries[i];
        for (size_t item = target->plan.first[i]; item < target->plan.first[i + 1]; item++)
            if (atomic_load(&target->plan.items[item].part.left) != 0)
                return torch_blame_entry(
                    entry, fsdp_fail(err, FSDP_ERR_INTERNAL, "an item is not complete"), err);
        if (!entry->value && !dcp_has_elements(entry))
            FSDP_TRY(write_piece(target, i, 0, &nothing, err));
    }
    return FSDP_OK;
}

static fsdp_status close_file(fsdp_target *target, int rank, fsdp_error *err)
{
    rank_file file;
    if (!target->files[rank] && !target->opts.sync)
        return FSDP_OK;
    FSDP_TRY(borrow_file(target, rank, &file, err));
    file.is_extra = true; /* the file is closed here */
    target->files[rank] = NULL;
    fsdp_status st = target->opts.sync ? fsdp_io_sync(file.file, file.path, err) : FSDP_OK;
    return return_file(&file, st, err);
}

static fsdp_status write_metadata(const fsdp_target *target, fsdp_error *err)
{
    const fsdp_text *text = &target->plan.metadata.text;
    char *path = fsdp_path_join(target->path, ".metadata");
    if (!path)
        return fsdp_fail_memory(err, "a path");
    fsdp_file *file = NULL;
    fsdp_status st = fsdp_io_open(target->opts.io, path, FSDP_IO_CREATE, &file, err);
    if (st == FSDP_OK)
        st = fsdp_io_write(file, path, text->data, text->size, 0, err);
    if (st == FSDP_OK && target->opts.sync)
        st = fsdp_io_sync(file, path, err);
    fsdp_status closed = fsdp_io_close(&file, path, st == FSDP_OK ? err : NULL);
    fsdp_free(path);
    return st == FSDP_OK ? closed : st;
}

static fsdp_status finish(fsdp_target *target, fsdp_error *err)
{
    fsdp_status st = complete_items(target, err);
    for (int rank = 0; rank < target->plan.world && st == FSDP_OK; rank++)
        st = close_file(target, rank, err);
    if (st == FSDP_OK)
        st = write_metadata(target, err);
    discard(target);
    return st;
}

/* --- the format ------------------------------------------------------------------------------- */

/* ".metadata", "__R.metadata" (one per rank) and "__R_N.distcp". */
static bool owns(const char *name)
{
    if (strcmp(name, ".metadata") == 0 || dcp_is_rank_metadata(name))
        return true;
    if (strncmp(name, "__", 2) != 0 || !isdigit((unsigned char)name[2]))
        return false;
    name += 2;
    while (isdigit((unsigned char)*name))
        name++;
    if (name[0] != '_' || !isdigit((unsigned char)name[1]))
        return false;
    name++;
    while (isdigit((unsigned char)*name))
        name++;
    return strcmp(name, ".distcp") == 0;
}

static const fsdp_target_ops ops = {measure, create, write, finish, discard, place};

const fsdp_format_writer fsdp_dcp_writer = {
    .ops = &ops, .owns = owns, .holds_dtype = torch_holds_dtype};

const fsdp_format fsdp_format_dcp = {.name = "dcp",
                                     .suffixes = {".dcp"},
                                     .reads_directory = true,
                                     .writes_directory = true,
                                     .caps = {.values = true,
                                              .opaque = true,
                                              .lists_tuples = true,
                                              .regroups = true,
                                              .takes_under = true,
                                              .maps_names = true,
                                              .all_names = true,
                                              .names_groups = true,
                                              .forms_groups = true,
                                              .sharded = true,
                                              .without_config = true},
                                     .reader = &fsdp_dcp_reader,
                                     .writer = &fsdp_dcp_writer};
