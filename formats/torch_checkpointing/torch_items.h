/*
 * Room torch_checkpointing: directories of the package torch_checkpointing, PyTorch's successor of DCP.
 *
 * A checkpoint is a dict of *items* ("model", "optimizer", "step"). Each rank writes a file per item, and
 * rank 0 metadata.pkl, which states the layout of each tensor and the files of each item that has tensors:
 *
 *     model_0.pt  model_1.pt  step_0.pt  step_1.pt  metadata.pkl
 *
 * In: such a directory, whose bytes may be hostile, or the entries of a target. Out: the catalog of a source
 * (source.h) with the names ITEM.NAME, or the files.
 *
 *   items_metadata.c  metadata.pkl as statements about tensors (ranks.h), and the files of items
 *   items_read.c      the format: bid, open; the items of a directory, each a set of rank files; values in
 *                     JSON and raw bytes
 *   items_write.c     the target: DTensor and DeviceMesh as PyTorch pickles them, and metadata.pkl
 *
 * metadata.pkl is a pickle of plain dicts, and one with objects is refused. It is written when an item may be
 * resharded, and by savers that are not asynchronous with their first checkpoint alone, so that directories
 * without it are read, too.
 *
 * Only the table of formats in detect refers to this room. It calls ranks, safetensors, torch, source and
 * target.
 */
#ifndef FSDP_TORCH_ITEMS_H
#define FSDP_TORCH_ITEMS_H

#include "formats/ranks/ranks.h"
#include "formats/target.h"

#define FSDP_ITEMS_METADATA "metadata.pkl"
enum {
    ITEMS_VALUE_MOST = 64 << 20,       /* bytes of a file of JSON, or of raw bytes */
    ITEMS_FILES_MOST = 1 << 22
};

/* How a file of an item is written. */
typedef enum items_kind { ITEMS_TORCH, ITEMS_SAFETENSORS, ITEMS_JSON, ITEMS_RAW } items_kind;

/* A rank writes this file of an item. */
typedef struct items_file {
    const char *path;          /* in the directory */
    items_kind kind;
} items_file;

/* The ranks that share a statement about a tensor. */
typedef struct items_group {
    rank_statement stated;
    const int64_t *ranks;      /* as they stand in the file */
    size_t rank_count;
} items_group;

/* A tensor that the metadata states. */
typedef struct items_tensor {
    const char *name;          /* elements joined by dots */
    size_t name_size;
    int32_t *path;             /* name_path.h */
    size_t path_count;
    bool is_twice;             /* another path has the same name: neither is used */
    const items_group *groups;
    size_t group_count;
} items_tensor;

typedef struct items_item {
    const char *key;
    rank_statements statements;        /* find NULL: none. The reader sets the context, which is this item */
    items_file *files;         /* per rank of the world */
    items_tensor *tensors;
    size_t tensor_count;
    fsdp_name_table names;     /* of tensors */
} items_item;

/* Zero-initialise; release when done. */
typedef struct items_list {
    fsdp_arena arena;
    char *where;               /* "'PATH'" of the metadata; NULL: there is none */
    int world;                 /* 0: not known */
    items_item *items;
    size_t count, room;
} items_list;

static inline void items_list_release(items_list *list)
{
    for (size_t i = 0; i < list->count; i++)
        fsdp_name_table_release(&list->items[i].names);
    fsdp_free(list->items);
    fsdp_arena_release(&list->arena);
    *list = (items_list){0};
}

/* Adds an item with a file for each rank of the world, whose paths are NULL. The key is copied. */
static inline fsdp_status items_list_add(items_list *list, const char *key, size_t size,
                                         items_item **item_out,
                           fsdp_error *err)
{
    items_item item = {.key = fsdp_arena_strndup(&list->arena, key, size)};
    if ((list->count + 1) * (size_t)list->world > ITEMS_FILES_MOST)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "a checkpoint has over %d files", ITEMS_FILES_MOST);
    item.files = fsdp_arena_alloc(&list->arena, (size_t)list->world, sizeof *item.files);
    if (!item.key || !item.files ||
        !fsdp_grow(&list->items, &list->room, list->count + 1, sizeof *list->items))
        return fsdp_fail_memory(err, "the items of a checkpoint");
    list->items[list->count] = item;
    *item_out = &list->items[list->count++];
    return FSDP_OK;
}

/* Returns the item of a key; NULL: none. */
static inline items_item *items_list_find(const items_list *list, const char *key, size_t size)
{
    for (size_t i = 0; i < list->count; i++)
        if (fsdp_bytes_are(key, size, list->items[i].key))
            return &list->items[i];
    return NULL;
}

/* --- items_metadata.c --- */

/* Reads the text of metadata.pkl; path: for messages. FSDP_ERR_DAMAGED: it contradicts itself;
 * FSDP_ERR_REFUSED: it has objects, or is of an unknown version. */
fsdp_status items_metadata_read(const char *data, size_t size, const char *path, items_list *list,
                                fsdp_error *err);

extern const fsdp_format_writer fsdp_items_writer;     /* items_write.c */

#endif
