/*
 * Writes a torch.save file: see target.h. The mirror is torch_read.c. The file holds one dict, in which dicts
 * and lists are nested by the paths of names (nesting.c); a name without a path is a key. The walk of
 * torch_names.c reads them back.
 *
 *   pickle and offsets (plan) -> leading records (create) -> storages, by many
 *   threads (write) -> closing records with the checksums (finish)
 */
#include "base/core/mem.h"
#include "base/data/name_path.h"
#include "formats/target/container_table.h"
#include "formats/target/nesting.h"
#include "formats/torch/torch_emit.h"

#include <stdlib.h>
#include <string.h>

/* === the tree of containers =================================================================== */

enum { NO_NODE = 0 }; /* no node has the root as a child */

/* A container or an entry, as an item of a container. */
typedef struct tree_node {
    const char *key;
    int32_t element;                 /* of a path, see name_path.h */
    bool is_list, is_tuple, is_leaf; /* a tuple is a list, too */
    bool is_top;                     /* its key is the first of a path */
    size_t entry;                    /* of a leaf */
    size_t first, last, next;        /* first and last item; the next item after this one */
    size_t count;                    /* of items */
} tree_node;

typedef struct tree {
    const fsdp_target_entry *entries;
    size_t entry_count;
    const char *namespaces; /* the dict of this key is a namespace; NULL: none */
    nesting nesting;
    tree_node *nodes;
    size_t count, room;
    container_table table; /* of numbers of nodes */
    fsdp_pickler *pickler;
    fsdp_status (*emit)(void *context, size_t entry, fsdp_error *err);
    void *context;
} tree;

/* --- growing ---------------------------------------------------------------------------------- */

static void append_item(tree *at, size_t parent, size_t number)
{
    tree_node *around = &at->nodes[parent];
    size_t *link = around->last == NO_NODE ? &around->first : &at->nodes[around->last].next;
    *link = number;
    around->last = number;
    around->count++;
}

static fsdp_status add_node(tree *at, size_t parent, const tree_node *node, fsdp_error *err)
{
    if (!fsdp_grow(&at->nodes, &at->room, at->count + 1, sizeof *at->nodes))
        return fsdp_fail_memory(err, "a pickle");
    at->nodes[at->count++] = *node;
    if (at->count > 1)
        append_item(at, parent, at->count - 1);
    return FSDP_OK;
}

/* Replaces *parent by the container that the node names in it, which is made when it is new. */
static fsdp_status find_container(tree *at, const tree_node *node, size_t *parent, fsdp_error *err)
{
    const uint64_t *found = container_table_find(&at->table, *parent, node->key, node->element);
    if (found) {
        *parent = (size_t)*found;
        return FSDP_OK;
    }
    if (!container_table_put(&at->table, at->count))
        return fsdp_fail_memory(err, "a pickle");
    FSDP_TRY(add_node(at, *parent, node, err));
    *parent = at->count - 1;
    return FSDP_OK;
}

static fsdp_status add_entry(tree *at, size_t i, fsdp_error *err)
{
    const char *key = at->entries[i].name;
    const int32_t *path = at->nesting.paths[i];
    size_t count = at->nesting.counts[i], parent = 0;
    for (size_t e = 0; e + 1 < count; e++) {
        tree_node node = {.key = key,
                          .element = path[e],
                          .is_list = path[e + 1] < 0,
                          .is_tuple = fsdp_path_in_tuple(path[e + 1]),
                          .is_top = e == 0};
        FSDP_TRY(find_container(at, &node, &parent, err));
        key += fsdp_path_bytes(path[e]) + 1;
    }
    tree_node leaf = {.key = key, .element = path[count - 1], .is_leaf = true, .entry = i};
    return add_node(at, parent, &leaf, err);
}

/* --- order ------------------------------------------------------------------------------------ */

typedef struct list_item {
    int64_t position;
    size_t number; /* of its node */
} list_item;

static int compare_positions(const void *a, const void *b)
{
    const list_item *x = a, *y = b;
    return (x->position > y->position) - (x->position < y->position);
}

/* Sorts the items of a list by position, because entries arrive in any order. */
static fsdp_status sort_list(tree *at, tree_node *list, fsdp_error *err)
{
    list_item *items = fsdp_alloc(list->count, sizeof *items);
    if (!items)
        return fsdp_fail_memory(err, "a pickle");
    size_t count = 0, *link = &list->first;
    for (size_t i = list->first; i != NO_NODE; i = at->nodes[i].next)
        items[count++] = (list_item){strtoll(at->nodes[i].key, NULL, 10), i};
    qsort(items, count, sizeof *items, compare_positions);
    for (size_t i = 0; i < count; i++) {
        *link = items[i].number;
        link = &at->nodes[items[i].number].next;
    }
    *link = NO_NODE;
    fsdp_free(items);
    return FSDP_OK;
}

static fsdp_status sort_lists(tree *at, fsdp_error *err)
{
    for (size_t i = 0; i < at->count; i++)
        if (at->nodes[i].is_list)
            FSDP_TRY(sort_list(at, &at->nodes[i], err));
    return FSDP_OK;
}

/* --- writing ---------------------------------------------------------------------------------- */

static void emit_key(fsdp_pickler *pickler, const tree_node *item)
{
    if (item->element >= 0 && item->element & FSDP_PATH_NUMBER)
        fsdp_pickler_int(pickler, strtoll(item->key, NULL, 10));
    else
        fsdp_pickler_text(pickler, item->key, fsdp_path_bytes(item->element));
}

/* A dict at the top whose key is that of a namespace. */
static bool is_namespace(const tree *at, const tree_node *node)
{
    size_t size = at->namespaces ? strlen(at->namespaces) : 0;
    return size > 0 && !node->is_list && node->is_top && fsdp_path_bytes(node->element) == size &&
           memcmp(node->key, at->namespaces, size) == 0;
}

/* Recursion depth is the length of paths. */
static fsdp_status emit_node(tree *at, size_t number, fsdp_error *err)
{
    tree_node node = at->nodes[number];
    if (node.is_leaf)
        return at->emit(at->context, node.entry, err);
    bool opens_object = is_namespace(at, &node);
    if (opens_object) {
        fsdp_pickler_global(at->pickler, "argparse", "Namespace");
        fsdp_pickler_op(at->pickler, FSDP_OP_EMPTY_TUPLE);
        fsdp_pickler_op(at->pickler, FSDP_OP_NEWOBJ);
    }
    if (!node.is_tuple)
        fsdp_pickler_op(at->pickler, node.is_list ? FSDP_OP_EMPTY_LIST : FSDP_OP_EMPTY_DICT);
    fsdp_pickler_op(at->pickler, FSDP_OP_MARK);
    for (size_t i = node.first; i != NO_NODE; i = at->nodes[i].next) {
        if (!node.is_list)
            emit_key(at->pickler, &at->nodes[i]);
        FSDP_TRY(emit_node(at, i, err));
    }
    fsdp_pickler_op(at->pickler, node.is_tuple  ? FSDP_OP_TUPLE
                                 : node.is_list ? FSDP_OP_APPENDS
                                                : FSDP_OP_SETITEMS);
    if (opens_object)
        fsdp_pickler_op(at->pickler, FSDP_OP_BUILD);
    return FSDP_OK;
}

static fsdp_status emit_tree(tree *at, fsdp_error *err)
{
    FSDP_TRY(nesting_find(at->entries, at->entry_count, NESTING_TORCH, &at->nesting, err));
    nesting_root kind = at->nesting.root;
    if (kind == NESTING_WHOLE)
        return at->emit(at->context, 0, err);
    const tree_node root = {.is_list = kind != NESTING_IN_DICT,
                            .is_tuple = kind == NESTING_IN_TUPLE};
    FSDP_TRY(add_node(at, 0, &root, err));
    for (size_t i = 0; i < at->entry_count; i++)
        FSDP_TRY(add_entry(at, i, err));
    FSDP_TRY(sort_lists(at, err));
    return emit_node(at, 0, err);
}

fsdp_status torch_emit_tree(fsdp_pickler *pickler, const fsdp_target_opts *opts,
                            fsdp_status (*emit)(void *context, size_t entry, fsdp_error *err),
                            void *context, fsdp_error *err)
{
    tree at = {.entries = opts->entries,
               .entry_count = opts->entry_count,
               .namespaces = opts->namespaces,
               .pickler = pickler,
               .emit = emit,
               .context = context};
    fsdp_status st = emit_tree(&at, err);
    nesting_release(&at.nesting);
    fsdp_free(at.nodes);
    container_table_release(&at.table);
    return st;
}

/* === the file ================================================================================= */

struct fsdp_target {
    fsdp_target_opts opts;
    char *path;
    fsdp_file *file;
    fsdp_pickler pickler;
    fsdp_zip_record *records; /* TORCH_FIXED + storages */
    torch_part *parts;        /* per storage */
    size_t *storage_of; /* per entry that is a tensor and the first of its names: counted from 1 */
    size_t storages;
    int64_t size;
};

/* --- planning --------------------------------------------------------------------------------- */

static void release(fsdp_target *target)
{
    fsdp_pickler_release(&target->pickler);
    fsdp_free(target->records);
    fsdp_free(target->parts);
    fsdp_free(target->storage_of);
    fsdp_free(target->path);
    fsdp_free(target);
}

static fsdp_status allocate(fsdp_target *target, fsdp_error *err)
{
    const fsdp_target_opts *opts = &target->opts;
    size_t storages = 0;
    for (size_t i = 0; i < opts->entry_count; i++)
        storages += opts->entries[i].value == NULL;
    target->records = fsdp_alloc(storages + TORCH_FIXED, sizeof *target->records);
    target->parts = fsdp_alloc(storages, sizeof *target->parts);
    target->storage_of = fsdp_alloc(opts->entry_count, sizeof *target->storage_of);
    if (!target->records || !target->parts || !target->storage_of)
        return fsdp_fail_memory(err, "a torch.save file");
    return FSDP_OK;
}

static size_t first_name(const fsdp_target *target, size_t i)
{
    size_t same = target->opts.entries[i].same_as;
    return same > 0 ? same - 1 : i;
}

/* Storages are numbered in the order of the pickle, as torch does; all names of a tensor share
 * one. */
static size_t storage_for(fsdp_target *target, size_t i)
{
    const fsdp_target_entry *entry = &target->opts.entries[i];
    size_t *known = &target->storage_of[first_name(target, i)];
    if (*known == 0) {
        int64_t size = torch_bytes_of(entry->dtype, entry->ndim, entry->shape);
        *known = ++target->storages;
        target->records[TORCH_LEADING + *known - 1].size = size;
        atomic_store(&target->parts[*known - 1].left, size);
    }
    return *known - 1;
}

static fsdp_status pickle_entry(void *context, size_t i, fsdp_error *err)
{
    fsdp_target *target = context;
    const fsdp_target_entry *entry = &target->opts.entries[i];
    if (entry->value)
        return torch_blame_entry(entry, fsdp_pickler_value(&target->pickler, entry->value, err),
                                 err);
    size_t storage = storage_for(target, i);
    return torch_blame_entry(
        entry,
        torch_emit_tensor(&target->pickler, entry->dtype, entry->ndim, entry->shape, storage, err),
        err);
}

static fsdp_status pickle_all(fsdp_target *target, fsdp_error *err)
{
    fsdp_pickler *pickler = &target->pickler;
    pickler->weights_only = true;
    fsdp_pickler_begin(pickler);
    FSDP_TRY(torch_emit_tree(pickler, &target->opts, pickle_entry, target, err));
    fsdp_pickler_op(pickler, FSDP_OP_STOP);
    return pickler->text.failed ? fsdp_fail_memory(err, "a pickle") : FSDP_OK;
}

static fsdp_status plan(const fsdp_target_opts *opts, fsdp_target **target_out, fsdp_error *err)
{
    fsdp_target *target = fsdp_alloc(1, sizeof *target);
    if (!target)
        return fsdp_fail_memory(err, "a torch.save file");
    target->opts = *opts;
    fsdp_status st = allocate(target, err);
    if (st == FSDP_OK)
        st = pickle_all(target, err);
    if (st == FSDP_OK)
        st = torch_place_archive(target->records, target->storages, &target->pickler.text,
                                 &target->size, err);
    if (st == FSDP_OK)
        *target_out = target;
    else
        release(target);
    return st;
}

static fsdp_status measure(const fsdp_target_opts *opts, int64_t *files_out, int64_t *bytes_out,
                           fsdp_error *err)
{
    fsdp_target *target;
    FSDP_TRY(plan(opts, &target, err));
    *files_out = 1;
    *bytes_out = target->size;
    release(target);
    return FSDP_OK;
}

/* --- writing ---------------------------------------------------------------------------------- */

static void discard(fsdp_target *target)
{
    (void)fsdp_io_close(&target->file, target->path, NULL);
    release(target);
}

static fsdp_status write_leading(fsdp_target *target, fsdp_error *err)
{
    fsdp_text text = {0};
    torch_emit_leading(&text, target->records, &target->pickler.text);
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "a pickle")
                                 : fsdp_io_write(target->file, target->path, text.data, text.size,
                                                 target->records[0].header, err);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status open_file(fsdp_target *target, fsdp_error *err)
{
    target->path = fsdp_strndup(target->opts.path, strlen(target->opts.path));
    if (!target->path)
        return fsdp_fail_memory(err, "a path");
    FSDP_TRY(fsdp_io_open(target->opts.io, target->path, FSDP_IO_CREATE, &target->file, err));
    FSDP_TRY(fsdp_io_reserve(target->file, target->path, target->size, err));
    return write_leading(target, err);
}

static fsdp_status create(const fsdp_target_opts *opts, fsdp_target **target_out, fsdp_error *err)
{
    fsdp_target *target;
    FSDP_TRY(plan(opts, &target, err));
    fsdp_status st = open_file(target, err);
    if (st == FSDP_OK)
        *target_out = target;
    else
        discard(target);
    return st;
}

/* The only box of an entry is the whole tensor. */
static fsdp_status write(fsdp_target *target, const fsdp_target_piece *elements, fsdp_error *err)
{
    size_t entry = elements->entry, number = target->storage_of[first_name(target, entry)] - 1;
    int64_t element = (int64_t)fsdp_dtype_size(target->opts.entries[entry].dtype);
    int64_t end = elements->first + elements->count;
    fsdp_zip_record *record = &target->records[TORCH_LEADING + number];
    torch_part *part = &target->parts[number];
    torch_piece piece = {.data = elements->data,
                         .size = (size_t)(elements->count * element),
                         .offset = record->data + elements->first * element,
                         .end = record->data + record->size};
    if (elements->count == 0 || first_name(target, entry) != entry)
        return FSDP_OK;
    if (elements->first == 0)
        fsdp_zip_add_header(&piece.before, record);
    if (torch_part_take(part, piece.data, piece.size, record->size - end * element)) {
        record->crc = atomic_load(&part->crc);
        fsdp_zip_add_trailer(&piece.behind, record);
    }
    return torch_write_piece(target->file, target->path, &piece, target->opts.sync, err);
}

/* --- the end ---------------------------------------------------------------------------------- */

static fsdp_status write_empty(fsdp_target *target, const fsdp_zip_record *record, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_zip_add_header(&text, record);
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "a record")
                                 : fsdp_io_write(target->file, target->path, text.data, text.size,
                                                 record->header, err);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status check_complete(fsdp_target *target, fsdp_error *err)
{
    for (size_t i = 0; i < target->storages; i++) {
        if (atomic_load(&target->parts[i].left) != 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s': storage %zu is not complete",
                             target->path, i);
        if (target->records[TORCH_LEADING + i].size == 0)
            FSDP_TRY(write_empty(target, &target->records[TORCH_LEADING + i], err));
    }
    return FSDP_OK;
}

static fsdp_status write_closing(fsdp_target *target, fsdp_error *err)
{
    fsdp_text text = {0};
    torch_emit_closing(&text, target->records, target->storages);
    fsdp_status st =
        text.failed ? fsdp_fail_memory(err, "a zip directory")
                    : fsdp_io_write(target->file, target->path, text.data, text.size,
                                    target->records[TORCH_LEADING + target->storages].header, err);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status finish(fsdp_target *target, fsdp_error *err)
{
    fsdp_status st = check_complete(target, err);
    if (st == FSDP_OK)
        st = write_closing(target, err);
    if (st == FSDP_OK && target->opts.sync)
        st = fsdp_io_sync(target->file, target->path, err);
    if (st == FSDP_OK)
        st = fsdp_io_close(&target->file, target->path, err);
    discard(target);
    return st;
}

static fsdp_status place(const fsdp_target *target, size_t entry, size_t box,
                         fsdp_target_place *place_out, fsdp_error *err)
{
    (void)box;
    (void)err;
    size_t storage = target->storage_of[first_name(target, entry)] - 1;
    *place_out =
        (fsdp_target_place){.file = "", .offset = target->records[TORCH_LEADING + storage].data};
    return FSDP_OK;
}

static const fsdp_target_ops ops = {measure, create, write, finish, discard, place};

const fsdp_format_writer fsdp_torch_writer = {.ops = &ops, .holds_dtype = torch_holds_dtype};
