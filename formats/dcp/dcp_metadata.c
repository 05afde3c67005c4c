/*
 * Reads `.metadata` of a DCP directory: names, boxes and their file ranges. See dcp_read.c.
 *
 *   Metadata.storage_data         (name, offsets of a box) -> range of a file
 *   Metadata.state_dict_metadata  name -> dtype, shape, boxes; or a pickled value
 *
 * File ranges are kept in a table of their own, which is asked by name and offsets. A save without
 * collectives leaves one metadata file per rank; this file merges them, and compares items that several ranks
 * stored, which must be the same.
 */
#include "base/data/name_path.h"
#include "base/core/bytes.h"
#include "base/core/mem.h"
#include "base/data/name_table.h"
#include "base/text.h"
#include "formats/dcp/dcp.h"
#include "formats/dcp/dcp_agree.h"
#include <fsdp/box.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === file ranges by name and box ============================================================== */

enum { DCP_NO_RANGE = UINT32_MAX, DCP_NO_BOX = -1, DCP_RECENT_BOXES = 64 };

/* The range of a box, or (ndim DCP_NO_BOX) of a value. There may be hundreds of thousands. */
typedef struct dcp_range {
    int64_t offset, length;
    const int64_t *lo; /* shared between ranges */
    uint32_t file;     /* number of the file, which the caller assigns */
    uint32_t next;     /* next range of the name; DCP_NO_RANGE: none */
    int8_t ndim;
    bool is_packed, was_used;
} dcp_range;
_Static_assert(FSDP_MAX_DIMS <= INT8_MAX, "the dims of a box are counted in a range");

/* The ranges of one name, in the order of their addition. */
typedef struct dcp_range_list {
    uint32_t first, last;
    uint32_t count, cursor; /* cursor: the next lookup begins after it */
    bool is_indexed;        /* the table `places` has its boxes */
} dcp_range_list;

#define DCP_NO_RANGES \
    ((dcp_range_list){.first = DCP_NO_RANGE, .last = DCP_NO_RANGE, .cursor = DCP_NO_RANGE})

/* The key of a range: the number of its name, and the offsets of its box. */
typedef struct dcp_range_key {
    size_t name;
    int ndim; /* DCP_NO_BOX: a value */
    const int64_t *lo;
} dcp_range_key;

/* Zero-initialise; release after use. */
typedef struct dcp_ranges {
    dcp_range *all;
    size_t count, room;
    struct {
        const int64_t *lo;
        int ndim;
    } recent[DCP_RECENT_BOXES]; /* by a hash */
    fsdp_name_table places;     /* (number of a name, offsets) -> range, for long lists */
    fsdp_arena arena;
    fsdp_text key; /* scratch */
} dcp_ranges;

static void dcp_ranges_release(dcp_ranges *ranges)
{
    fsdp_free(ranges->all);
    fsdp_name_table_release(&ranges->places);
    fsdp_text_release(&ranges->key);
    fsdp_arena_release(&ranges->arena);
    *ranges = (dcp_ranges){0};
}

/* Reserves capacity for so many more, as far as there is memory. */
static void dcp_ranges_expect(dcp_ranges *ranges, size_t count)
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

static bool is_at(const dcp_range *range, const dcp_range_key *key)
{
    size_t bytes = key->ndim > 0 ? (size_t)key->ndim * sizeof *key->lo : 0;
    return range->ndim == key->ndim && (bytes == 0 || memcmp(range->lo, key->lo, bytes) == 0);
}

/* Finds the range of a box (ndim DCP_NO_BOX: of a value); DCP_NO_RANGE when there is none. Boxes are
 * mostly looked up in the order in which they are stored. */
static fsdp_status dcp_ranges_find(dcp_ranges *ranges, dcp_range_list *list,
                                   const dcp_range_key *key, uint32_t *at_out, fsdp_error *err)
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

/* Adds a range to the list of a name, and copies lo. */
static fsdp_status dcp_ranges_put(dcp_ranges *ranges, dcp_range_list *list, size_t name,
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

/* === replicas ================================================================================= */

/* Items that an earlier rank stored, too. Zero-initialise; release when done. */
typedef struct dcp_replicas {
    struct dcp_replica *all;
    size_t count, room;
    fsdp_arena arena;
} dcp_replicas;

struct dcp_replica {
    const char *name;
    size_t name_size;
    dcp_item items[2];
};

/* The contents of an item: a tensor, or a value. */
typedef struct item_contents {
    torch_archive archive;
    torch_kind kind;
    torch_tensor tensor;
    fsdp_value value;
} item_contents;

static const char *path_of(fsdp_source *source, const dcp_item *item)
{
    return fsdp_source_file_path(source, (size_t)item->file);
}

static void release_contents(item_contents *contents)
{
    torch_tensor_release(&contents->tensor);
    fsdp_value_release(&contents->value);
    torch_archive_release(&contents->archive);
}

static fsdp_status open_item(fsdp_source *source, const dcp_item *item, bool has_value,
                             item_contents *out, fsdp_error *err)
{
    torch_wrapper wrapper;
    const torch_opening opening = {.source = source,
                                   .file = item->file,
                                   .stream = FSDP_NO_STREAM,
                                   .where = path_of(source, item)};
    FSDP_TRY(torch_zip_open(&opening, item->offset, item->length, false, &out->archive, err));
    FSDP_TRY(torch_tensor_read(&out->archive, out->archive.pickle.root, &out->kind, &out->tensor,
                               &wrapper, err));
    return out->kind == TORCH_KIND_NONE && has_value
               ? torch_value_read(&out->archive, out->archive.pickle.root, &out->value, err)
               : FSDP_OK;
}

static fsdp_status compare(fsdp_source *source, const struct dcp_replica *replica,
                           item_contents both[2], fsdp_facts *facts, fsdp_error *err)
{
    const dcp_item *items = replica->items;
    bool is_same = true, is_step = fsdp_fact_is_step(replica->name, replica->name_size);
    char shown[200];
    for (int i = 0; i < 2; i++)
        FSDP_TRY(open_item(source, &items[i], is_step, &both[i], err));
    for (int i = 0; i < 2 && is_step && both[0].kind == TORCH_KIND_NONE; i++)
        FSDP_TRY(fsdp_facts_note(facts, replica->name, replica->name_size,
                                 path_of(source, &items[i]), &both[i].value, err));
    if (both[0].kind != both[1].kind)
        is_same = false;
    else if (both[0].kind == TORCH_KIND_TENSOR)
        FSDP_TRY(torch_same_elements(source, &both[0].tensor, &both[1].tensor, TORCH_REPLICA,
                                     &is_same, err));
    return is_same
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_DAMAGED,
                           "'%s' and '%s' have different values of '%s'" FSDP_TWO_SAVES,
                           path_of(source, &items[0]), path_of(source, &items[1]),
                           fsdp_printable(replica->name, replica->name_size, shown, sizeof shown));
}

static fsdp_status compare_one(fsdp_source *source, const struct dcp_replica *replica,
                               fsdp_facts *facts, fsdp_error *err)
{
    item_contents both[2] = {{.kind = TORCH_KIND_NONE}};
    fsdp_status st = compare(source, replica, both, facts, err);
    release_contents(&both[0]);
    release_contents(&both[1]);
    return st;
}

/* Compares all of them: tensors by their begin, steps. FSDP_ERR_DAMAGED: two differ. */
static fsdp_status dcp_replicas_compare(const dcp_replicas *replicas, fsdp_source *source,
                                        fsdp_error *err)
{
    fsdp_facts facts = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < replicas->count && st == FSDP_OK; i++)
        st = compare_one(source, &replicas->all[i], &facts, err);
    fsdp_facts_release(&facts);
    return st;
}

static void dcp_replicas_release(dcp_replicas *replicas)
{
    fsdp_free(replicas->all);
    fsdp_arena_release(&replicas->arena);
}

/* Keeps two ranks' items of one name; packed ones and those of safetensors files are not compared. */
static fsdp_status dcp_replicas_keep(dcp_replicas *replicas, const char *name, size_t name_size,
                                     const dcp_item items[2], fsdp_error *err)
{
    if (items[0].is_packed || items[1].is_packed || items[0].header || items[1].header)
        return FSDP_OK;
    char *kept = fsdp_arena_strndup(&replicas->arena, name, name_size);
    if (!kept ||
        !fsdp_grow(&replicas->all, &replicas->room, replicas->count + 1, sizeof *replicas->all))
        return fsdp_fail_memory(err, "the items of a checkpoint");
    replicas->all[replicas->count++] = (struct dcp_replica){kept, name_size, {items[0], items[1]}};
    return FSDP_OK;
}

/* === names and their types ==================================================================== */

/* A file with items. */
typedef struct item_file {
    int number;
    bool is_known, is_lost;
    fsdp_safetensors *header; /* NULL: a sequence of zip archives */
    int64_t in_items;         /* bytes of the file that are in items */
} item_file;

/* The entry of a name: its ranges, then its type. */
typedef struct listed {
    dcp_range_list ranges;
    bool was_met;            /* the list of names has it */
    bool is_tensor, is_lost; /* is_lost: one of its files is missing */
    fsdp_node name;          /* node in the current metadata file; 0: unknown, or another node */
    fsdp_node path;          /* node of its path in planner_data; 0: none */
    fsdp_dtype dtype;
    int ndim;
    size_t tensor;
    int64_t bytes, stored; /* compared by check_sizes */
} listed;

typedef struct metadata {
    dcp_state *state;
    fsdp_source *source;
    bool has_several; /* several metadata files */
    fsdp_arena arena;
    fsdp_name_table files; /* relative path -> number in item_files */
    item_file *item_files;
    size_t file_count, file_room;
    dcp_ranges ranges;
    dcp_replicas replicas;
    dcp_steps steps;
    fsdp_name_table names; /* -> number in entries */
    listed *entries;
    size_t entry_count, entry_room;
    size_t last;   /* the entry of the last lookup */
    int32_t *path; /* scratch: see name_path.h */
    size_t path_room;
    uint64_t box_count;    /* of the current file, shared ones each time */
    torch_archive archive; /* only its pickle and where are used */
} metadata;

/* --- nodes -------------------------------------------------------------------------------------- */

static const fsdp_pickle_node *node_at(const metadata *meta, fsdp_node node)
{
    return fsdp_pickle_at(&meta->archive.pickle, node);
}

/* Inline, with its callees, because every item and every box needs several attributes. */
static inline fsdp_node attribute(const metadata *meta, fsdp_node object, const char *name)
{
    const fsdp_pickle_node *at = node_at(meta, object);
    fsdp_node state = at->kind == FSDP_NODE_CALL ? at->as.call->state : 0;
    return node_at(meta, state)->kind == FSDP_NODE_DICT
               ? fsdp_pickle_lookup(&meta->archive.pickle, state, name)
               : torch_attribute(&meta->archive, object, name);
}

static bool is_object(const metadata *meta, fsdp_node node, fsdp_known known)
{
    const fsdp_pickle_node *at = node_at(meta, node);
    return at->kind == FSDP_NODE_CALL && at->known == known;
}

static fsdp_status damaged(const metadata *meta, const char *why, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: %s", meta->archive.where, why);
}

static fsdp_status damaged_entry(const metadata *meta, const fsdp_pickle_node *name,
                                 const char *why, fsdp_error *err)
{
    char shown[200];
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: '%s' %s", meta->archive.where,
                     fsdp_printable(name->as.text, name->count, shown, sizeof shown), why);
}

/* --- storage_data ------------------------------------------------------------------------------- */

/* Finds or makes the entry of a name. With one metadata file, the pickle lives as long as the
 * names, which need no copy. */
static fsdp_status look_up_entry(metadata *meta, const fsdp_pickle_node *name, size_t *number_out,
                                 fsdp_error *err)
{
    const char *text = name->as.text;
    const uint64_t *known = NULL;
    size_t count = meta->entry_count;
    if (meta->has_several) {
        known = fsdp_name_table_find(&meta->names, text, name->count);
        text = known ? text : fsdp_arena_strndup(&meta->arena, text, name->count);
    }
    if (!known && text && count < DCP_NO_RANGE - 1 &&
        fsdp_grow(&meta->entries, &meta->entry_room, count + 1, sizeof *meta->entries))
        known = fsdp_name_table_enter(&meta->names, text, name->count, count);
    if (!known)
        return fsdp_fail_memory(err, "the names of a checkpoint");
    *number_out = (size_t)*known;
    if (*number_out == count)
        meta->entries[meta->entry_count++] = (listed){.ranges = DCP_NO_RANGES};
    return FSDP_OK;
}

/* True when the name is that of the last entry or one of the next. Lists of names are mostly in
 * one order, from which a rank omits some, and share one node per name. */
static bool find_expected(metadata *meta, fsdp_node name)
{
    enum { AHEAD = 8 };
    for (size_t number = meta->last; number <= meta->last + AHEAD; number++)
        if (number < meta->entry_count && meta->entries[number].name == name) {
            meta->last = number;
            return true;
        }
    return false;
}

static fsdp_status find_entry(metadata *meta, fsdp_node node, size_t *number_out, fsdp_error *err)
{
    const fsdp_pickle_node *name = node_at(meta, node);
    *number_out = 0;
    if (name->kind != FSDP_NODE_STR)
        return damaged(meta, "a name is not a string", err);
    if (!find_expected(meta, node)) {
        FSDP_TRY(look_up_entry(meta, name, &meta->last, err));
        meta->entries[meta->last].name = node;
    }
    *number_out = meta->last;
    return FSDP_OK;
}

static const item_file *file_of(const metadata *meta, const dcp_range *range)
{
    return &meta->item_files[range->file];
}

static dcp_item item_of(const metadata *meta, const dcp_range *range)
{
    const item_file *file = file_of(meta, range);
    return (dcp_item){.file = file->number,
                      .offset = range->offset,
                      .length = range->length,
                      .is_packed = range->is_packed,
                      .header = file->header};
}

/* A safetensors file begins with the size of its header and '{'. */
static fsdp_status look_at_file(metadata *meta, item_file *file, fsdp_error *err)
{
    uint8_t head[9];
    int64_t size = fsdp_source_file_size(meta->source, (size_t)file->number);
    if (size < (int64_t)sizeof head)
        return FSDP_OK;
    FSDP_TRY(fsdp_source_pread(meta->source, file->number, head, sizeof head, 0, err));
    if (head[8] != '{' || memcmp(head, "PK\3\4", 4) == 0 || fsdp_load_u64(head) > (uint64_t)size)
        return FSDP_OK;
    file->header = fsdp_alloc(1, sizeof *file->header);
    if (!file->header)
        return fsdp_fail_memory(err, "a safetensors header");
    return fsdp_safetensors_read(meta->source, file->number, file->header, err);
}

static fsdp_status open_item_file(metadata *meta, item_file *file, const char *name,
                                  fsdp_error *err)
{
    char *path = fsdp_path_join(fsdp_source_path(meta->source), name);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    fsdp_status st = fsdp_source_add_file(meta->source, path, true, &file->number, err);
    file->is_lost = st == FSDP_ERR_NOT_FOUND && fsdp_source_tolerates(meta->source);
    if (st == FSDP_ERR_NOT_FOUND && !file->is_lost)
        st = fsdp_fail(
            err, FSDP_ERR_DAMAGED,
            "'%s' is missing, but %s says that it belongs to the checkpoint" FSDP_MISSING_HINT,
            path, meta->archive.where);
    fsdp_free(path);
    return file->is_lost ? FSDP_OK : st == FSDP_OK ? look_at_file(meta, file, err) : st;
}

static fsdp_status find_file(metadata *meta, fsdp_node node, uint32_t *file_out, fsdp_error *err)
{
    const fsdp_pickle_node *name = node_at(meta, node);
    if (name->kind != FSDP_NODE_STR || memchr(name->as.text, '\0', name->count))
        return damaged(meta, "an item has no file", err);
    const uint64_t *known = fsdp_name_table_find(&meta->files, name->as.text, name->count);
    *file_out = (uint32_t)(known ? *known : meta->file_count);
    if (known)
        return FSDP_OK;
    char *copy = fsdp_arena_strndup(&meta->arena, name->as.text, name->count);
    if (!copy || meta->file_count >= DCP_NO_RANGE ||
        !fsdp_grow(&meta->item_files, &meta->file_room, meta->file_count + 1,
                   sizeof *meta->item_files) ||
        !fsdp_name_table_put(&meta->files, copy, name->count, meta->file_count))
        return fsdp_fail_memory(err, "the files of a checkpoint");
    item_file *file = &meta->item_files[meta->file_count++];
    *file = (item_file){0};
    return open_item_file(meta, file, copy, err);
}

/* ["stream.zstd/1"]: the transforms of the bytes, the last one first. */
static fsdp_status read_transforms(metadata *meta, fsdp_node node, dcp_range *range,
                                   fsdp_error *err)
{
    const fsdp_pickle_node *list = node_at(meta, node);
    if (list->kind == FSDP_NODE_ABSENT || list->kind == FSDP_NODE_NONE ||
        (list->kind == FSDP_NODE_LIST && list->count == 0))
        return FSDP_OK;
    const fsdp_pickle_node *only =
        node_at(meta, fsdp_pickle_element(&meta->archive.pickle, node, 0));
    static const char zstd[] = "stream.zstd";
    size_t size = sizeof zstd - 1;
    if (list->count != 1 || only->kind != FSDP_NODE_STR || only->count < size ||
        memcmp(only->as.text, zstd, size) != 0 ||
        (only->count > size && only->as.text[size] != '/'))
        return fsdp_fail(err, FSDP_ERR_REFUSED, "%s: items are packed in an unknown way",
                         meta->archive.where);
    range->is_packed = true;
    return FSDP_OK;
}

static fsdp_status read_range(metadata *meta, fsdp_node info, dcp_range *range, fsdp_error *err)
{
    const fsdp_pickle *pickle = &meta->archive.pickle;
    FSDP_TRY(find_file(meta, attribute(meta, info, "relative_path"), &range->file, err));
    const item_file *file = file_of(meta, range);
    range->is_packed = false;
    if (file->is_lost)
        return FSDP_OK;
    FSDP_TRY(read_transforms(meta, attribute(meta, info, "transform_descriptors"), range, err));
    int64_t size = fsdp_source_file_size(meta->source, (size_t)file->number);
    if (!fsdp_pickle_int(pickle, attribute(meta, info, "offset"), &range->offset) ||
        !fsdp_pickle_int(pickle, attribute(meta, info, "length"), &range->length) ||
        range->offset < 0 || range->length < 0)
        return damaged(meta, "an item has no range of bytes", err);
    if (range->offset > size || range->length > size - range->offset)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' has %lld bytes, but an item should have %lld from byte %lld on",
                         fsdp_source_file_path(meta->source, (size_t)file->number), (long long)size,
                         (long long)range->length, (long long)range->offset);
    int64_t *in_items = &meta->item_files[range->file].in_items;
    if (fsdp_add_overflow(*in_items, range->length, in_items))
        *in_items = INT64_MAX; /* items that share bytes */
    return FSDP_OK;
}

/* Another rank's copy of an item, to be compared when all names are known. */
static fsdp_status keep_replica(metadata *meta, fsdp_node index, fsdp_node info, uint32_t first,
                                fsdp_error *err)
{
    const fsdp_pickle_node *name = node_at(meta, attribute(meta, index, "fqn"));
    dcp_range range = {0};
    FSDP_TRY(read_range(meta, info, &range, err));
    if (file_of(meta, &range)->is_lost)
        return FSDP_OK;
    const dcp_item items[] = {item_of(meta, &meta->ranges.all[first]), item_of(meta, &range)};
    return dcp_replicas_keep(&meta->replicas, name->as.text, name->count, items, err);
}

static fsdp_status read_place(metadata *meta, fsdp_node index, fsdp_node info, fsdp_error *err)
{
    if (!is_object(meta, index, FSDP_KNOWN_DCP_INDEX) ||
        !is_object(meta, info, FSDP_KNOWN_DCP_STORAGE))
        return damaged(meta, "storage_data holds entries that are not items", err);
    size_t number;
    FSDP_TRY(find_entry(meta, attribute(meta, index, "fqn"), &number, err));
    fsdp_node place = attribute(meta, index, "offset");
    uint8_t kind = node_at(meta, place)->kind;
    dcp_range range = {0};
    int ndim = DCP_NO_BOX;
    int64_t lo[FSDP_MAX_DIMS];
    if (kind != FSDP_NODE_ABSENT && kind != FSDP_NODE_NONE)
        FSDP_TRY(torch_read_sizes(&meta->archive, place, "offsets", &ndim, lo, err));
    range.ndim = (int8_t)ndim;
    if (meta->has_several) { /* a replica: another rank stored it, too */
        uint32_t known;
        FSDP_TRY(dcp_ranges_find(&meta->ranges, &meta->entries[number].ranges,
                                 &(dcp_range_key){number, ndim, lo}, &known, err));
        if (known != DCP_NO_RANGE && !file_of(meta, &meta->ranges.all[known])->is_lost)
            return keep_replica(meta, index, info, known, err);
        if (known != DCP_NO_RANGE) {
            meta->ranges.all[known].was_used = false;
            return read_range(meta, info, &meta->ranges.all[known], err);
        }
    }
    FSDP_TRY(read_range(meta, info, &range, err));
    if (!file_of(meta, &range)->is_lost) {
        const fsdp_pickle_node *name = node_at(meta, attribute(meta, index, "fqn"));
        const dcp_item item = item_of(meta, &range);
        FSDP_TRY(dcp_steps_note(&meta->steps, name->as.text, name->count, &item, err));
    }
    return dcp_ranges_put(&meta->ranges, &meta->entries[number].ranges, number, &range, lo, err);
}

static fsdp_status read_places(metadata *meta, fsdp_node node, fsdp_error *err)
{
    const fsdp_pickle_node *dict = node_at(meta, node);
    if (dict->kind != FSDP_NODE_DICT)
        return damaged(meta, "storage_data is missing", err);
    for (uint32_t i = 0; i + 1 < dict->count; i += 2)
        FSDP_TRY(read_place(meta, dict->as.items[i], dict->as.items[i + 1], err));
    return FSDP_OK;
}

/* --- planner_data ------------------------------------------------------------------------------- */

/* NULL: no bytes are stored under that name. */
static listed *known_entry(metadata *meta, fsdp_node node)
{
    const fsdp_pickle_node *name = node_at(meta, node);
    if (find_expected(meta, node))
        return &meta->entries[meta->last];
    const uint64_t *known = name->kind == FSDP_NODE_STR
                                ? fsdp_name_table_find(&meta->names, name->as.text, name->count)
                                : NULL;
    if (!known)
        return NULL;
    meta->last = (size_t)*known;
    return &meta->entries[meta->last];
}

/* Another planner may store something other than a dict of names: it is ignored. */
static void read_paths(metadata *meta, fsdp_node node)
{
    const fsdp_pickle_node *dict = node_at(meta, node);
    meta->last = 0;
    for (uint32_t i = 0; dict->kind == FSDP_NODE_DICT && i + 1 < dict->count; i += 2) {
        listed *entry = known_entry(meta, dict->as.items[i]);
        if (entry)
            entry->path = dict->as.items[i + 1];
    }
}

/* The entry's path in scratch memory; 0 without one, which is always allowed. */
static size_t parse_path(metadata *meta, fsdp_node node)
{
    const fsdp_pickle_node *tuple = node_at(meta, node);
    if (node == 0 || tuple->kind != FSDP_NODE_TUPLE || tuple->count > FSDP_PATH_MOST ||
        !fsdp_grow(&meta->path, &meta->path_room, tuple->count, sizeof *meta->path))
        return 0;
    for (uint32_t i = 0; i < tuple->count; i++) {
        const fsdp_pickle_node *element = node_at(meta, tuple->as.items[i]);
        if (element->kind == FSDP_NODE_STR && element->count <= INT32_MAX)
            meta->path[i] = (int32_t)element->count;
        else if (element->kind == FSDP_NODE_INT && element->as.i64 >= 0)
            meta->path[i] = -snprintf(NULL, 0, "%lld", (long long)element->as.i64);
        else
            return 0;
    }
    return tuple->count;
}

/* --- state_dict_metadata ------------------------------------------------------------------------ */

/* The properties are a tuple whose first member is the dtype; its other members differ between
 * versions. */
static fsdp_dtype read_dtype(const metadata *meta, fsdp_node properties)
{
    const fsdp_pickle_node *object = node_at(meta, properties);
    fsdp_node state = object->kind == FSDP_NODE_CALL ? object->as.call->state : 0;
    fsdp_node dtype = node_at(meta, state)->kind == FSDP_NODE_DICT
                          ? attribute(meta, properties, "dtype")
                          : fsdp_pickle_element(&meta->archive.pickle, state, 0);
    const fsdp_pickle_node *global = node_at(meta, dtype);
    bool is_dtype = global->kind == FSDP_NODE_GLOBAL && global->known == FSDP_KNOWN_TORCH_DTYPE;
    return is_dtype ? (fsdp_dtype)global->count : FSDP_DTYPE_NONE;
}

static fsdp_status read_box(metadata *meta, fsdp_node chunk, const fsdp_pickle_node *name, int ndim,
                            dcp_piece *piece, fsdp_error *err)
{
    int lengths;
    FSDP_TRY(torch_read_sizes(&meta->archive, attribute(meta, chunk, "offsets"), "offsets",
                              &piece->ndim, piece->lo, err));
    FSDP_TRY(torch_read_sizes(&meta->archive, attribute(meta, chunk, "sizes"), "sizes", &lengths,
                              piece->len, err));
    if (piece->ndim != ndim || lengths != ndim)
        return damaged_entry(meta, name, "has a box with a different number of dimensions", err);
    return FSDP_OK;
}

static bool is_empty(const dcp_piece *piece)
{
    for (int dim = 0; dim < piece->ndim; dim++)
        if (piece->len[dim] == 0)
            return true;
    return false;
}

static fsdp_status add_chunk(metadata *meta, const fsdp_pickle_node *name, size_t number,
                             fsdp_node chunk, fsdp_error *err)
{
    dcp_piece piece;
    listed *entry = &meta->entries[number];
    FSDP_TRY(read_box(meta, chunk, name, entry->ndim, &piece, err));
    if (is_empty(&piece))
        return FSDP_OK;
    uint32_t at;
    FSDP_TRY(dcp_ranges_find(&meta->ranges, &meta->entries[number].ranges,
                             &(dcp_range_key){number, piece.ndim, piece.lo}, &at, err));
    if (at == DCP_NO_RANGE)
        return damaged_entry(meta, name, "has a box that no file holds", err);
    dcp_range *range = &meta->ranges.all[at];
    if (range->was_used)
        return FSDP_OK; /* several ranks list it */
    range->was_used = true;
    bool is_lost = file_of(meta, range)->is_lost;
    entry->is_lost |= is_lost;
    if (is_lost)
        return FSDP_OK; /* fsdp_source_complete reports it */
    piece.item = item_of(meta, range);
    if (fsdp_add_overflow(entry->stored, piece.item.length, &entry->stored))
        entry->stored = INT64_MAX; /* a sparse file that many items share */
    dcp_tensor tensor = {name->as.text, name->count, entry->dtype};
    return dcp_add_piece(meta->state, &tensor, entry->tensor, &piece, err);
}

/* Limits boxes: a real checkpoint lists every box once, so tensors do not share a list of boxes. */
static fsdp_status count_boxes(metadata *meta, const fsdp_pickle_node *list, fsdp_error *err)
{
    meta->box_count += list->count;
    if (meta->box_count <= (uint64_t)meta->archive.pickle.count + FSDP_PICKLE_WORK)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_LIMIT, "%s: tensors share too many boxes", meta->archive.where);
}

/* Adds a value that names the type of a tensor whose dtype is not supported. */
static fsdp_status add_other_object(metadata *meta, const fsdp_pickle_node *name, fsdp_error *err)
{
    static const char text[] = "torch.Tensor";
    fsdp_value value = {0};
    FSDP_TRY(fsdp_value_set_bytes(&value, FSDP_VALUE_CLASS, text, sizeof text - 1, err));
    return fsdp_source_add_value(meta->source, name->as.text, name->count, &value, NULL, err);
}

static fsdp_status read_tensor(metadata *meta, const fsdp_pickle_node *name, fsdp_node node,
                               bool is_new, size_t number, fsdp_error *err)
{
    listed *entry = &meta->entries[number];
    int64_t shape[FSDP_MAX_DIMS];
    int ndim;
    fsdp_dtype dtype = read_dtype(meta, attribute(meta, node, "properties"));
    if (dtype == FSDP_DTYPE_NONE)
        return is_new ? add_other_object(meta, name, err) : FSDP_OK;
    FSDP_TRY(torch_read_sizes(&meta->archive, attribute(meta, node, "size"), "sizes", &ndim, shape,
                              err));
    if (is_new) {
        FSDP_TRY(torch_check_shape(&meta->archive, ndim, shape, dtype, err));
        entry->is_tensor = true;
        entry->dtype = dtype;
        entry->ndim = ndim;
        entry->bytes = fsdp_shape_count(ndim, shape) * (int64_t)fsdp_dtype_size(dtype);
        FSDP_TRY(fsdp_source_add_tensor(meta->source, name->as.text, name->count,
                                        &(fsdp_source_shape){dtype, ndim, shape}, &entry->tensor,
                                        err));
    }
    const fsdp_source_tensor *tensor =
        entry->is_tensor ? fsdp_source_tensor_at(meta->source, entry->tensor) : NULL;
    if (!tensor || tensor->dtype != dtype || tensor->ndim != ndim ||
        memcmp(tensor->shape, shape, (size_t)ndim * sizeof *shape) != 0)
        return damaged_entry(meta, name, "is a different tensor on a different rank", err);
    fsdp_node chunks = attribute(meta, node, "chunks");
    const fsdp_pickle_node *list = node_at(meta, chunks);
    if (list->kind != FSDP_NODE_LIST && list->kind != FSDP_NODE_TUPLE)
        return damaged_entry(meta, name, "has no list of boxes", err);
    FSDP_TRY(count_boxes(meta, list, err));
    for (uint32_t i = 0; i < list->count; i++)
        FSDP_TRY(add_chunk(meta, name, number, list->as.items[i], err));
    return FSDP_OK;
}

static fsdp_status read_value(metadata *meta, const fsdp_pickle_node *name, size_t number,
                              fsdp_error *err)
{
    uint32_t at;
    FSDP_TRY(dcp_ranges_find(&meta->ranges, &meta->entries[number].ranges,
                             &(dcp_range_key){number, DCP_NO_BOX, NULL}, &at, err));
    if (at == DCP_NO_RANGE)
        return damaged_entry(meta, name, "is not stored in any file", err);
    if (file_of(meta, &meta->ranges.all[at])->is_lost)
        return fsdp_source_add_missing(meta->source, name->as.text, name->count, NULL, err);
    dcp_item item = item_of(meta, &meta->ranges.all[at]);
    fsdp_status st = dcp_add_value(meta->state, name->as.text, name->count, &item, err);
    if (st != FSDP_OK) {
        char shown[200];
        fsdp_error_prefix(err, "value '%s'",
                          fsdp_printable(name->as.text, name->count, shown, sizeof shown));
    }
    return st;
}

static fsdp_status read_entry(metadata *meta, fsdp_node key, fsdp_node node, fsdp_error *err)
{
    size_t number;
    FSDP_TRY(find_entry(meta, key, &number, err));
    const fsdp_pickle_node *name = node_at(meta, key);
    bool is_new = !meta->entries[number].was_met;
    meta->entries[number].was_met = true;
    fsdp_source_nest(meta->source, meta->path, 0);
    if (is_new) {
        size_t count = parse_path(meta, meta->entries[number].path);
        fsdp_source_nest(meta->source, meta->path, count);
    }
    if (is_object(meta, node, FSDP_KNOWN_DCP_TENSOR))
        return read_tensor(meta, name, node, is_new, number, err);
    if (is_object(meta, node, FSDP_KNOWN_DCP_BYTES))
        return is_new ? read_value(meta, name, number, err) : FSDP_OK;
    return damaged_entry(meta, name, "is neither a tensor nor a value", err);
}

static fsdp_status read_entries(metadata *meta, fsdp_node node, fsdp_error *err)
{
    const fsdp_pickle_node *dict = node_at(meta, node);
    meta->last = 0;
    if (dict->kind != FSDP_NODE_DICT)
        return damaged(meta, "state_dict_metadata is missing", err);
    for (uint32_t i = 0; i + 1 < dict->count; i += 2)
        FSDP_TRY(read_entry(meta, dict->as.items[i], dict->as.items[i + 1], err));
    return FSDP_OK;
}

/* --- files -------------------------------------------------------------------------------------- */

/* Reserves capacity for all lists, so that they need not grow repeatedly. Names are nodes; a dict
 * that repeats one of them can thus not reserve more than the file could fill. */
static void expect_all(metadata *meta, fsdp_node places, fsdp_node entries)
{
    const fsdp_pickle_node *ranges = node_at(meta, places), *names = node_at(meta, entries);
    size_t most = meta->archive.pickle.count;
    size_t range_count = ranges->kind == FSDP_NODE_DICT ? ranges->count / 2 : 0;
    size_t name_count = names->kind == FSDP_NODE_DICT ? names->count / 2 : 0;
    range_count = range_count < most ? range_count : most;
    name_count = name_count < most ? name_count : most;
    dcp_ranges_expect(&meta->ranges, range_count);
    (void)fsdp_grow(&meta->entries, &meta->entry_room, meta->entry_count + name_count + 1,
                    sizeof *meta->entries);
    (void)fsdp_name_table_expect(&meta->names, meta->entry_count + name_count);
    fsdp_source_expect(meta->source, name_count, range_count);
    dcp_expect(meta->state, range_count);
}

static fsdp_status read_root(metadata *meta, size_t size, fsdp_error *err)
{
    fsdp_pickle_options options = {.where = meta->archive.where, .is_metadata = true};
    FSDP_TRY(
        fsdp_pickle_parse(&options, meta->archive.data, size, &meta->archive.pickle, NULL, err));
    fsdp_node root = meta->archive.pickle.root;
    meta->box_count = 0;
    if (!is_object(meta, root, FSDP_KNOWN_DCP_METADATA))
        return damaged(meta, "it is not the metadata of a checkpoint", err);
    fsdp_node places = attribute(meta, root, "storage_data");
    fsdp_node entries = attribute(meta, root, "state_dict_metadata");
    expect_all(meta, places, entries);
    /* forgets the nodes of the previous metadata file */
    meta->last = 0;
    for (size_t i = 0; i < meta->entry_count; i++)
        meta->entries[i].name = meta->entries[i].path = 0;
    FSDP_TRY(read_places(meta, places, err));
    read_paths(meta, attribute(meta, root, "planner_data"));
    return read_entries(meta, entries, err);
}

/* Reads a whole file of metadata; the caller frees *data_out, also after a failure. */
static fsdp_status read_bytes(fsdp_io *io, const char *path, char **data_out, size_t *size_out,
                              fsdp_error *err)
{
    enum { METADATA_LIMIT = 2000 << 20 };
    fsdp_file *file = NULL;
    int64_t size = 0;
    *size_out = 0;
    FSDP_TRY(fsdp_io_open(io, path, FSDP_IO_READ, &file, err));
    fsdp_status st = FSDP_OK;
    int result = file->ops->size(file, &size);
    if (result < 0)
        st = fsdp_fail_errno(err, -result, "cannot get the size of '%s'", path);
    else if (size > METADATA_LIMIT)
        st = fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has %lld bytes, at most %d are allowed", path,
                       (long long)size, METADATA_LIMIT);
    else if (!(*data_out = fsdp_realloc(NULL, (size_t)size + 1, 1)))
        st = fsdp_fail_memory(err, path);
    else
        st = fsdp_io_read(file, path, *data_out, (size_t)size, 0, err);
    *size_out = (size_t)size;
    (void)fsdp_io_close(&file, path, NULL); /* read only: a failed close loses nothing */
    return st;
}

static fsdp_status read_file(metadata *meta, const fsdp_probe *probe, const char *name,
                             fsdp_error *err)
{
    char *path = fsdp_path_join(probe->path, name);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    size_t size;
    meta->archive = (torch_archive){.source = meta->source, .where = path};
    fsdp_status st = read_bytes(probe->io, path, &meta->archive.data, &size, err);
    if (st == FSDP_OK)
        st = read_root(meta, size, err);
    torch_archive_release(&meta->archive);
    fsdp_free(path);
    return st;
}

/* Refuses gigabytes that are stored in a few bytes; the source cannot check this, because items
 * are opened later. */
static fsdp_status check_sizes(const metadata *meta, fsdp_error *err)
{
    static const int64_t large = INT64_C(4) << 30;
    for (size_t i = 0; i < meta->entry_count; i++) {
        const listed *entry = &meta->entries[i];
        if (entry->bytes > large && !entry->is_lost && entry->bytes / 1000 > entry->stored) {
            const fsdp_source_tensor *tensor = fsdp_source_tensor_at(meta->source, entry->tensor);
            char shown[200];
            return fsdp_fail(err, FSDP_ERR_REFUSED,
                             "'%s': tensor '%s' has %lld bytes, of which only %lld are stored",
                             fsdp_source_path(meta->source),
                             fsdp_printable(tensor->name, tensor->name_size, shown, sizeof shown),
                             (long long)entry->bytes, (long long)entry->stored);
        }
    }
    return FSDP_OK;
}

static void release(metadata *meta)
{
    for (size_t i = 0; i < meta->file_count; i++)
        if (meta->item_files[i].header) {
            fsdp_safetensors_release(meta->item_files[i].header);
            fsdp_free(meta->item_files[i].header);
        }
    fsdp_free(meta->item_files);
    dcp_replicas_release(&meta->replicas);
    dcp_steps_release(&meta->steps);
    dcp_ranges_release(&meta->ranges);
    fsdp_free(meta->path);
    fsdp_free(meta->entries);
    fsdp_name_table_release(&meta->files);
    fsdp_name_table_release(&meta->names);
    fsdp_arena_release(&meta->arena);
}

static int compare_ranks(const void *a, const void *b)
{
    const char *x = *(const char *const *)a, *y = *(const char *const *)b;
    unsigned long long left = strtoull(x + 2, NULL, 10), right = strtoull(y + 2, NULL, 10);
    return (left > right) - (left < right);
}

static fsdp_status read_ranks(metadata *meta, const fsdp_probe *probe, fsdp_error *err)
{
    const char **names = fsdp_alloc(probe->name_count, sizeof *names);
    size_t count = 0;
    if (!names)
        return fsdp_fail_memory(err, "the metadata of ranks");
    for (size_t i = 0; i < probe->name_count; i++)
        if (dcp_is_rank_metadata(probe->names[i]))
            names[count++] = probe->names[i];
    qsort(names, count, sizeof *names, compare_ranks);
    fsdp_status st = FSDP_OK;
    meta->has_several = count > 1;
    for (size_t i = 0; st == FSDP_OK && i < count; i++)
        st = read_file(meta, probe, names[i], err);
    fsdp_free(names);
    return st == FSDP_OK ? dcp_replicas_compare(&meta->replicas, meta->source, err) : st;
}

/* Refuses a file of whose bytes some are in no item. */
static fsdp_status check_bytes(const fsdp_source *source, int file, int64_t in_items,
                               fsdp_error *err)
{
    int64_t size = fsdp_source_file_size(source, (size_t)file);
    if (in_items >= size)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' has %lld bytes, but the metadata of '%s' has items in only %lld of "
                     "them" FSDP_TWO_SAVES "; use --from dcp to read them",
                     fsdp_source_file_path(source, (size_t)file), (long long)size,
                     fsdp_source_path(source), (long long)in_items);
}

/* A person who names the format takes the directory as it is. */
static fsdp_status compare_files(metadata *meta, const fsdp_probe *probe, fsdp_error *err)
{
    if (probe->opts && probe->opts->format)
        return FSDP_OK;
    for (size_t i = 0; i < meta->file_count; i++) {
        const item_file *file = &meta->item_files[i];
        if (!file->is_lost && !file->header)
            FSDP_TRY(check_bytes(meta->source, file->number, file->in_items, err));
    }
    return dcp_agree_steps(meta->source, &meta->steps, err);
}

fsdp_status dcp_read_metadata(const fsdp_probe *probe, dcp_state *state, fsdp_source *source,
                              fsdp_error *err)
{
    metadata meta = {.state = state, .source = source};
    fsdp_status st = fsdp_probe_has(probe, ".metadata") ? read_file(&meta, probe, ".metadata", err)
                                                        : read_ranks(&meta, probe, err);
    if (st == FSDP_OK)
        st = check_sizes(&meta, err);
    if (st == FSDP_OK)
        st = compare_files(&meta, probe, err);
    fsdp_source_nest(source, NULL, 0);
    release(&meta);
    return st;
}
