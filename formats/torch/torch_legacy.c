/*
 * torch.save files from before the zip form: a sequence of pickles, then the storages.
 *
 *   magic number | protocol version | system information | the object | list of storage keys
 *   then for each key: 8 bytes count of elements, the elements (little-endian)
 */
#include "base/core/bytes.h"
#include "formats/torch/torch_internal.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_WINDOW = 1 << 16, LARGEST_PICKLE = 1 << 30, PROTOCOL = 1001 };

static const uint8_t magic_number[] = {0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46,
                                       0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19};

typedef struct stored {
    const char *key;
    size_t key_size;
    size_t element_size;
    int64_t offset, elements; /* in the file; elements -1: not found yet */
    fsdp_dtype dtype;
} stored;

typedef struct legacy {
    const torch_opening *opening;
    torch_archive *archive;
    int64_t at, size; /* of the file */
    stored *storages; /* sorted by key */
    size_t count, room;
} legacy;

static fsdp_status damaged(const legacy *file, const char *why, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s (legacy form): %s", file->opening->where, why);
}

bool torch_legacy_begins(const uint8_t *head, size_t size)
{
    enum { FRAME_AND_PROTOCOL = 11 };
    if (size < 2 + sizeof magic_number || head[0] != 0x80)
        return false;
    for (size_t i = 2; i <= FRAME_AND_PROTOCOL && i + sizeof magic_number <= size; i++)
        if (memcmp(head + i, magic_number, sizeof magic_number) == 0)
            return true;
    return false;
}

/* Parses the pickle at `at` and reads more of the file until it ends. *data_out must outlive it. */
static fsdp_status next_pickle(legacy *file, char **data_out, fsdp_pickle *pickle_out,
                               fsdp_error *err)
{
    *data_out = NULL;
    for (int64_t window = FIRST_WINDOW;; window *= 4) {
        int64_t rest = file->size - file->at;
        if (window > rest)
            window = rest;
        char *data = fsdp_realloc(*data_out, (size_t)window + 1, 1);
        if (!data)
            return fsdp_fail_memory(err, "a pickle");
        *data_out = data;
        data[window] = '\0';
        FSDP_TRY(fsdp_source_pread(file->opening->source, file->opening->file, data, (size_t)window,
                                   file->at, err));
        bool ran_out = false;
        size_t used;
        fsdp_pickle_options options = {.where = file->opening->where,
                                       .offset = file->at,
                                       .ran_out = &ran_out,
                                       .is_legacy = true};
        fsdp_error why = {0};
        fsdp_status st = fsdp_pickle_parse(&options, data, (size_t)window, pickle_out, &used, &why);
        if (st == FSDP_OK) {
            file->at += (int64_t)used;
            return torch_note_code(file->opening, pickle_out, err);
        }
        if (!ran_out || window == rest || window >= LARGEST_PICKLE) {
            if (err)
                *err = why;
            return st;
        }
    }
}

/* Parses a pickle of which only the root is checked. */
static fsdp_status small_pickle(legacy *file, bool (*accept)(const fsdp_pickle *pickle),
                                const char *why, fsdp_error *err)
{
    char *data;
    fsdp_pickle pickle = {0};
    fsdp_status st = next_pickle(file, &data, &pickle, err);
    if (st == FSDP_OK && !accept(&pickle))
        st = damaged(file, why, err);
    fsdp_pickle_release(&pickle);
    fsdp_free(data);
    return st;
}

static bool is_magic(const fsdp_pickle *pickle)
{
    const fsdp_pickle_node *root = fsdp_pickle_at(pickle, pickle->root);
    return root->kind == FSDP_NODE_BIGINT && root->count == sizeof magic_number - 2 &&
           memcmp(root->as.text, magic_number + 2, root->count) == 0;
}

static bool is_protocol(const fsdp_pickle *pickle)
{
    int64_t version;
    return fsdp_pickle_int(pickle, pickle->root, &version) && version == PROTOCOL;
}

static bool is_dict(const fsdp_pickle *pickle)
{
    return fsdp_pickle_at(pickle, pickle->root)->kind == FSDP_NODE_DICT;
}

/* --- storages ----------------------------------------------------------------------------------- */

static int compare_keys(const stored *a, const stored *b)
{
    int order = memcmp(a->key, b->key, a->key_size < b->key_size ? a->key_size : b->key_size);
    return order != 0 ? order : (a->key_size > b->key_size) - (a->key_size < b->key_size);
}

static int compare_stored(const void *a, const void *b)
{
    return compare_keys(a, b);
}

static stored *find_storage(const legacy *file, const char *key, size_t key_size)
{
    stored wanted = {.key = key, .key_size = key_size};
    return file->count == 0
               ? NULL
               : bsearch(&wanted, file->storages, file->count, sizeof wanted, compare_stored);
}

/* Lists the storages that the object refers to, without duplicates. */
static fsdp_status collect_storages(legacy *file, fsdp_error *err)
{
    const fsdp_pickle *pickle = &file->archive->pickle;
    for (size_t i = 0; i < pickle->count; i++) {
        torch_storage_id id;
        if (pickle->nodes[i].kind != FSDP_NODE_PERSISTENT)
            continue;
        FSDP_TRY(torch_read_storage_id(file->archive, (fsdp_node)i, &id, err));
        if (!fsdp_grow(&file->storages, &file->room, file->count + 1, sizeof *file->storages))
            return fsdp_fail_memory(err, "storages");
        size_t element = id.element_size > 0 ? id.element_size : 1;
        file->storages[file->count++] =
            (stored){id.key, id.key_size, element, 0, -1, id.storage.dtype};
    }
    if (file->count > 0)
        qsort(file->storages, file->count, sizeof *file->storages, compare_stored);
    size_t kept = 0;
    for (size_t i = 0; i < file->count; i++) {
        stored *last = kept > 0 ? &file->storages[kept - 1] : NULL;
        if (!last || compare_keys(last, &file->storages[i]) != 0)
            file->storages[kept++] = file->storages[i];
        else if (last->element_size != file->storages[i].element_size)
            return damaged(file, "one storage has two element types", err);
    }
    file->count = kept;
    return FSDP_OK;
}

static fsdp_status place_next(legacy *file, const fsdp_pickle_node *key, fsdp_error *err)
{
    stored *storage =
        key->kind == FSDP_NODE_STR ? find_storage(file, key->as.text, key->count) : NULL;
    if (!storage || storage->elements >= 0)
        return damaged(file, "the list of storages does not fit the object", err);
    uint8_t head[8];
    if (file->at > file->size - (int64_t)sizeof head)
        return damaged(file, "it ends before its storages do", err);
    FSDP_TRY(fsdp_source_pread(file->opening->source, file->opening->file, head, sizeof head,
                               file->at, err));
    uint64_t elements = fsdp_load_u64(head);
    file->at += (int64_t)sizeof head;
    if (elements > (uint64_t)(file->size - file->at) / storage->element_size)
        return damaged(file, "a storage is longer than the file", err);
    storage->elements = (int64_t)elements;
    storage->offset = file->at;
    file->at += storage->elements * (int64_t)storage->element_size;
    return FSDP_OK;
}

static fsdp_status place_all(legacy *file, const fsdp_pickle *keys, fsdp_error *err)
{
    const fsdp_pickle_node *list = fsdp_pickle_at(keys, keys->root);
    if (list->kind != FSDP_NODE_LIST || list->count != file->count)
        return damaged(file, "the list of storages does not fit the object", err);
    for (size_t i = 0; i < list->count; i++)
        FSDP_TRY(place_next(file, fsdp_pickle_at(keys, list->as.items[i]), err));
    return FSDP_OK;
}

static fsdp_status read_keys(legacy *file, fsdp_error *err)
{
    char *data;
    fsdp_pickle keys = {0};
    fsdp_status st = next_pickle(file, &data, &keys, err);
    if (st == FSDP_OK)
        st = place_all(file, &keys, err);
    fsdp_pickle_release(&keys);
    fsdp_free(data);
    return st;
}

/* Places a storage that is a part of another one: (key, offset, size). */
static fsdp_status place_view(const legacy *file, const torch_storage_id *id,
                              torch_storage *storage, fsdp_error *err)
{
    const fsdp_pickle *pickle = &file->archive->pickle;
    int64_t offset, elements, end, element = (int64_t)id->element_size;
    if (!fsdp_pickle_int(pickle, fsdp_pickle_element(pickle, id->view, 1), &offset) ||
        !fsdp_pickle_int(pickle, fsdp_pickle_element(pickle, id->view, 2), &elements) ||
        offset < 0 || elements < 0 || fsdp_add_overflow(offset, elements, &end) ||
        end > id->elements)
        return damaged(file, "a part of a storage reaches beyond it", err);
    storage->offset += offset * element;
    storage->size = elements * element;
    return FSDP_OK;
}

static fsdp_status place_storage(void *context, const torch_storage_id *id, torch_storage *storage,
                                 fsdp_error *err)
{
    const legacy *file = context;
    const stored *found = find_storage(file, id->key, id->key_size);
    if (!found || found->elements < 0)
        return damaged(file, "a storage is not in the file", err);
    if (id->element_size > 0 && found->elements != id->elements)
        return damaged(file, "a storage has another size than the object says", err);
    storage->file = file->opening->file;
    storage->offset = found->offset;
    storage->size = found->elements * (int64_t)found->element_size;
    bool is_view =
        id->view != 0 && fsdp_pickle_at(&file->archive->pickle, id->view)->kind != FSDP_NODE_NONE;
    return is_view ? place_view(file, id, storage, err) : FSDP_OK;
}

/* --- opening ------------------------------------------------------------------------------------ */

static fsdp_status load(legacy *file, fsdp_error *err)
{
    torch_archive *archive = file->archive;
    FSDP_TRY(small_pickle(file, is_magic, "the magic number is wrong", err));
    FSDP_TRY(small_pickle(file, is_protocol, "its protocol version is not 1001", err));
    FSDP_TRY(small_pickle(file, is_dict, "there is no system information", err));
    archive->data_offset = file->at;
    FSDP_TRY(next_pickle(file, &archive->data, &archive->pickle, err));
    FSDP_TRY(collect_storages(file, err));
    FSDP_TRY(read_keys(file, err));
    return torch_resolve_links(archive, place_storage, file, err);
}

fsdp_status torch_legacy_open(const torch_opening *opening, torch_archive *archive_out,
                              fsdp_error *err)
{
    *archive_out = (torch_archive){.source = opening->source,
                                   .where = opening->where,
                                   .file = opening->file,
                                   .memory = opening->memory};
    legacy file = {.opening = opening,
                   .archive = archive_out,
                   .size = fsdp_source_file_size(opening->source, (size_t)opening->file)};
    fsdp_status st = load(&file, err);
    fsdp_free(file.storages);
    if (st != FSDP_OK)
        torch_archive_release(archive_out);
    return st;
}
