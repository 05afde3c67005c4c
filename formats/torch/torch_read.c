/*
 * torch.save files as a source: one file (zip or legacy), or a Hugging Face directory of
 * pytorch_model-0000i-of-0000N.bin with its index. See torch_internal.h for the order of the
 * files.
 */
#include "base/data/json.h"
#include "base/core/bytes.h"
#include "base/data/value_internal.h"
#include "formats/torch/torch_emit.h"
#include "formats/torch/torch_internal.h"
#include "formats/torch/torch_resave.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === legacy files ============================================================================= */

/*
 * torch.save files from before the zip form: a sequence of pickles, then the storages.
 *
 *   magic number | protocol version | system information | the object | list of storage keys
 *   then for each key: 8 bytes count of elements, the elements (little-endian)
 */

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
        return damaged(file, "a storage has a different size than the object says", err);
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
    FSDP_TRY(small_pickle(file, is_dict, "the system information is missing", err));
    archive->data_offset = file->at;
    FSDP_TRY(next_pickle(file, &archive->data, &archive->pickle, err));
    FSDP_TRY(collect_storages(file, err));
    FSDP_TRY(read_keys(file, err));
    return torch_resolve_links(archive, place_storage, file, err);
}

static fsdp_status torch_legacy_open(const torch_opening *opening, torch_archive *archive_out,
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

/* === the format =============================================================================== */

enum { ZIP_HEADER = 30, INDEX_LIMIT = 256 << 20, BITS_OF_INDEX = 60, TAR_MAGIC_AT = 257 };

static const char index_name[] = "pytorch_model.bin.index.json";

/* A value that only Python can interpret, and its node. */
typedef struct opaque_value {
    size_t entry;
    int file;
    fsdp_node node;
} opaque_value;

/* A second, private source of a file: a complete source accepts no more entries. */
typedef struct second_look {
    fsdp_source *source;
    torch_archive archive;
    char *where;
    int file; /* number in the complete source */
} second_look;

typedef struct torch_state {
    fsdp_source *source;
    torch_memory *memory;
    bool has_elements; /* a file has a tensor with elements */
    int64_t storage_bytes;
    opaque_value *opaque; /* in the order of entries */
    size_t opaque_count, opaque_room;
    second_look look;
} torch_state;

/* --- the state of the source -------------------------------------------------------------------- */

/* "'PATH'" in fresh memory. */
static char *quote(const char *path)
{
    size_t room = strlen(path) + 3;
    char *where = fsdp_alloc(room, 1);
    if (where)
        snprintf(where, room, "'%s'", path);
    return where;
}

static fsdp_status read_tensor(void *context, size_t tensor, const fsdp_box *box, void *data,
                               fsdp_error *err)
{
    const torch_state *state = context;
    return torch_memory_read(state->memory, state->source, tensor, box, data, err);
}

/* --- values that only Python can interpret ------------------------------------------------------ */

static void close_look(second_look *look)
{
    if (!look->source)
        return;
    torch_archive_release(&look->archive);
    fsdp_source_close(look->source);
    fsdp_free(look->where);
    *look = (second_look){0};
}

static fsdp_status open_look(const torch_state *state, int file, second_look *look, fsdp_error *err)
{
    const char *path = fsdp_source_file_path(state->source, (size_t)file);
    torch_opening opening = {.stream = FSDP_NO_STREAM};
    look->file = file;
    FSDP_TRY(fsdp_source_create(fsdp_source_io(state->source), path, "torch", &look->source, err));
    look->where = quote(path);
    if (!look->where)
        return fsdp_fail_memory(err, path);
    opening.where = look->where;
    opening.source = look->source;
    FSDP_TRY(fsdp_source_add_file(look->source, path, false, &opening.file, err));
    FSDP_TRY(fsdp_source_file_compare(state->source, (size_t)file,
                                      fsdp_source_file_info(look->source, (size_t)opening.file),
                                      err));
    return torch_file_open(&opening, &look->archive, err);
}

static fsdp_status look_into(torch_state *state, int file, fsdp_error *err)
{
    if (state->look.source && state->look.file == file)
        return FSDP_OK;
    close_look(&state->look);
    fsdp_status st = open_look(state, file, &state->look, err);
    if (st != FSDP_OK)
        close_look(&state->look);
    return st;
}

static int compare_entries(const void *key, const void *item)
{
    size_t entry = *(const size_t *)key, other = ((const opaque_value *)item)->entry;
    return (entry > other) - (entry < other);
}

static fsdp_status save_value(void *context, size_t entry, size_t most, fsdp_text *out,
                              fsdp_error *err)
{
    torch_state *state = context;
    const opaque_value *found =
        state->opaque_count == 0
            ? NULL
            : bsearch(&entry, state->opaque, state->opaque_count, sizeof *found, compare_entries);
    if (!found)
        return FSDP_OK;
    FSDP_TRY(look_into(state, found->file, err));
    return torch_resave_node(&state->look.archive, found->node, most, out, err);
}

/* A value that contains itself cannot be encoded from here. */
static bool is_cycle(const fsdp_value *value)
{
    return value->kind == FSDP_VALUE_CLASS && strcmp(value->as.bytes.data, "cycle") == 0;
}

static fsdp_status note_opaque(torch_state *state, const torch_archive *archive, fsdp_error *err)
{
    if (!fsdp_grow(&state->opaque, &state->opaque_room, state->opaque_count + 1,
                   sizeof *state->opaque))
        return fsdp_fail_memory(err, "values");
    state->opaque[state->opaque_count++] =
        (opaque_value){fsdp_source_entry_count(state->source), archive->file, archive->subject};
    return FSDP_OK;
}

/* --- visitor ------------------------------------------------------------------------------------ */

static fsdp_status take_tensor(void *context, const torch_item *item, torch_tensor *tensor,
                               fsdp_error *err)
{
    size_t number;
    (void)context;
    return torch_tensor_add(item->archive, item->name, item->name_size, tensor, &number, err);
}

static fsdp_status take_distributed(void *context, const torch_item *item,
                                    const torch_wrapper *wrapper, fsdp_error *err)
{
    (void)context;
    return torch_dist_add(item->archive, item->name, item->name_size, wrapper, err);
}

static fsdp_status take_value(void *context, const torch_item *item, fsdp_value *value,
                              fsdp_error *err)
{
    torch_state *state = context;
    if (fsdp_value_is_opaque(value) && !is_cycle(value))
        FSDP_TRY(note_opaque(state, item->archive, err));
    return fsdp_source_add_value(state->source, item->name, item->name_size, value, NULL, err);
}

/* --- opening and closing ------------------------------------------------------------------------ */

static void close_state(void *context)
{
    torch_state *state = context;
    close_look(&state->look);
    torch_memory_close(state->memory);
    fsdp_free(state->opaque);
    fsdp_free(state);
}

static const fsdp_source_ops torch_ops = {
    .read = read_tensor, .save_value = save_value, .close = close_state};

static fsdp_status create(const fsdp_probe *probe, fsdp_source **source_out,
                          torch_state **state_out, fsdp_error *err)
{
    torch_state *state = fsdp_alloc(1, sizeof *state);
    *source_out = NULL;
    if (!state)
        return fsdp_fail_memory(err, probe->path);
    fsdp_status st = torch_memory_create(&state->memory, err);
    if (st == FSDP_OK)
        st = fsdp_source_create(probe->io, probe->path, "torch", source_out, err);
    if (st != FSDP_OK) {
        close_state(state);
        return st;
    }
    state->source = *source_out;
    fsdp_source_tolerate(*source_out, probe->opts);
    *state_out = state;
    fsdp_source_set_ops(*source_out, &torch_ops, state);
    return FSDP_OK;
}

/* --- one file ----------------------------------------------------------------------------------- */

fsdp_status torch_file_open(const torch_opening *opening, torch_archive *archive_out,
                            fsdp_error *err)
{
    uint8_t head[32];
    int64_t size = fsdp_source_file_size(opening->source, (size_t)opening->file);
    size_t head_size = size < (int64_t)sizeof head ? (size_t)size : sizeof head;
    *archive_out = (torch_archive){0};
    FSDP_TRY(fsdp_source_pread(opening->source, opening->file, head, head_size, 0, err));
    if (torch_legacy_begins(head, head_size))
        return torch_legacy_open(opening, archive_out, err);
    if (head_size >= 4 && memcmp(head, "PK\3\4", 4) == 0)
        return torch_zip_open(opening, 0, size, true, archive_out, err);
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "%s was not written by torch.save", opening->where);
}

static fsdp_status walk(torch_state *state, torch_archive *archive, fsdp_error *err)
{
    const torch_visitor visitor = {.context = state,
                                   .tensor = take_tensor,
                                   .distributed = take_distributed,
                                   .value = take_value};
    return torch_walk(archive, &visitor, err);
}

static void count_contents(torch_state *state, const torch_archive *archive)
{
    state->has_elements |= archive->has_elements;
    for (size_t i = 0; i < archive->link_count; i++)
        if (archive->links[i].storage.file >= 0)
            state->storage_bytes += archive->links[i].storage.size;
}

static fsdp_status add_contents(torch_state *state, int file, fsdp_error *err)
{
    torch_archive archive;
    const char *path = fsdp_source_file_path(state->source, (size_t)file);
    char *where = quote(path);
    if (!where)
        return fsdp_fail_memory(err, path);
    torch_opening opening = {.source = state->source,
                             .memory = state->memory,
                             .file = file,
                             .stream = FSDP_NO_STREAM,
                             .where = where};
    fsdp_status st = torch_file_open(&opening, &archive, err);
    if (st == FSDP_OK)
        st = walk(state, &archive, err);
    if (st == FSDP_OK)
        count_contents(state, &archive);
    torch_archive_release(&archive);
    fsdp_free(where);
    return st;
}

/* Storages without tensors are tensors that the walk did not find. */
static fsdp_status complete(torch_state *state, fsdp_error *err)
{
    if (!state->has_elements && state->storage_bytes > 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' holds storages of %lld bytes, but no tensor with elements",
                         fsdp_source_path(state->source), (long long)state->storage_bytes);
    return fsdp_source_complete(state->source, err);
}

static fsdp_status open_file(const fsdp_probe *probe, torch_state *state, fsdp_error *err)
{
    int file;
    FSDP_TRY(fsdp_source_add_file(state->source, probe->path, false, &file, err));
    FSDP_TRY(add_contents(state, file, err));
    return complete(state, err);
}

/* --- a directory with an index ------------------------------------------------------------------ */

typedef struct mapping {
    const char *name, *file;
    size_t name_size, file_size;
} mapping;

typedef struct weight_map {
    fsdp_arena arena;
    mapping *items; /* sorted by name after reading */
    size_t count, room;
    bool was_read;
} weight_map;

static int compare_bytes(const char *a, size_t a_size, const char *b, size_t b_size)
{
    int order = memcmp(a, b, a_size < b_size ? a_size : b_size);
    return order != 0 ? order : (a_size > b_size) - (a_size < b_size);
}

static int by_name(const void *a, const void *b)
{
    const mapping *x = a, *y = b;
    return compare_bytes(x->name, x->name_size, y->name, y->name_size);
}

static int by_file(const void *a, const void *b)
{
    const mapping *x = a, *y = b;
    return compare_bytes(x->file, x->file_size, y->file, y->file_size);
}

static fsdp_status read_mapping(fsdp_json *json, weight_map *map, const char *key, size_t size,
                                fsdp_error *err)
{
    if (!fsdp_grow(&map->items, &map->room, map->count + 1, sizeof *map->items))
        return fsdp_fail_memory(err, "an index");
    mapping *item = &map->items[map->count];
    item->name = fsdp_arena_strndup(&map->arena, key, size);
    item->name_size = size;
    if (fsdp_json_peek(json) != FSDP_JSON_STRING)
        return fsdp_json_fail(json, err, "a file name is not a string");
    const char *file;
    FSDP_TRY(fsdp_json_string(json, &file, &item->file_size, err));
    item->file = fsdp_arena_strndup(&map->arena, file, item->file_size);
    if (!item->name || !item->file)
        return fsdp_fail_memory(err, "an index");
    map->count++;
    return FSDP_OK;
}

static fsdp_status read_map(fsdp_json *json, weight_map *map, fsdp_error *err)
{
    const char *key;
    size_t size;
    bool more;
    if (map->was_read || fsdp_json_peek(json) != FSDP_JSON_OBJECT)
        return fsdp_json_fail(json, err, "weight_map is not an object, or appears twice");
    map->was_read = true;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(read_mapping(json, map, key, size, err));
    }
}

static fsdp_status parse_index(fsdp_json *json, weight_map *map, fsdp_error *err)
{
    const char *key;
    size_t size;
    bool more;
    if (fsdp_json_peek(json) != FSDP_JSON_OBJECT)
        return fsdp_json_fail(json, err, "the index is not an object");
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            break;
        bool is_map = size == 10 && memcmp(key, "weight_map", 10) == 0;
        FSDP_TRY(is_map ? read_map(json, map, err) : fsdp_json_skip(json, err));
    }
    FSDP_TRY(fsdp_json_finish(json, err));
    if (!map->was_read)
        return fsdp_json_fail(json, err, "weight_map is missing");
    if (map->count > 0)
        qsort(map->items, map->count, sizeof *map->items, by_name);
    for (size_t i = 1; i < map->count; i++)
        if (by_name(&map->items[i - 1], &map->items[i]) == 0)
            return fsdp_json_fail(json, err, "a name appears twice");
    return FSDP_OK;
}

static fsdp_status read_index(const fsdp_probe *probe, weight_map *map, fsdp_error *err)
{
    char *path = fsdp_path_join(probe->path, index_name), *text = NULL;
    size_t size;
    if (!path)
        return fsdp_fail_memory(err, "an index");
    fsdp_file *file = NULL;
    fsdp_status st = fsdp_io_open(probe->io, path, FSDP_IO_READ, &file, err);
    int64_t bytes = 0;
    if (st == FSDP_OK && file->ops->size(file, &bytes) < 0)
        st = fsdp_fail(err, FSDP_ERR_IO, "cannot get the size of '%s'", path);
    if (st == FSDP_OK && bytes > INDEX_LIMIT)
        st = fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has %lld bytes, at most %d are allowed", path,
                       (long long)bytes, (int)INDEX_LIMIT);
    size = (size_t)bytes;
    if (st == FSDP_OK && !(text = fsdp_alloc(size + 1, 1)))
        st = fsdp_fail_memory(err, path);
    if (st == FSDP_OK)
        st = fsdp_io_read(file, path, text, size, 0, err);
    if (st == FSDP_OK) {
        fsdp_json json;
        fsdp_json_init(&json, text, size, path);
        st = parse_index(&json, map, err);
        fsdp_json_release(&json);
    }
    (void)fsdp_io_close(&file, path, NULL); /* read only: a failed close loses nothing */
    fsdp_free(text);
    fsdp_free(path);
    return st;
}

/* Every name of the index must be in the file that the index assigns. */
static fsdp_status check_names(fsdp_source *source, const weight_map *map, const mapping *file,
                               size_t from, bool *found, fsdp_error *err)
{
    for (size_t i = from; i < fsdp_source_entry_count(source); i++) {
        const fsdp_source_entry *entry = fsdp_source_entry_at(source, i);
        mapping wanted = {.name = entry->name, .name_size = entry->name_size};
        const mapping *item = bsearch(&wanted, map->items, map->count, sizeof wanted, by_name);
        if (item && by_file(item, file) == 0)
            found[item - map->items] = true;
    }
    for (size_t i = 0; i < map->count; i++)
        if (by_file(&map->items[i], file) == 0 && !found[i]) {
            char shown[200];
            return fsdp_fail(
                err, FSDP_ERR_DAMAGED,
                "'%s/%s' does not hold '%s', but the index says that it does",
                fsdp_source_path(source), file->file,
                fsdp_printable(map->items[i].name, map->items[i].name_size, shown, sizeof shown));
        }
    return FSDP_OK;
}

static bool is_lost(fsdp_status *st, const char *path, const fsdp_source *source, fsdp_error *err)
{
    if (*st != FSDP_ERR_NOT_FOUND)
        return false;
    if (fsdp_source_tolerates(source))
        return true;
    *st = fsdp_fail(
        err, FSDP_ERR_DAMAGED,
        "'%s' is missing, but the index says that it belongs to the checkpoint" FSDP_MISSING_HINT,
        path);
    return false;
}

static fsdp_status add_lost(fsdp_source *source, const weight_map *map, const mapping *file,
                            fsdp_error *err)
{
    for (size_t i = 0; i < map->count; i++)
        if (by_file(&map->items[i], file) == 0)
            FSDP_TRY(fsdp_source_add_missing(source, map->items[i].name, map->items[i].name_size,
                                             file->file, err));
    return FSDP_OK;
}

static fsdp_status add_indexed(torch_state *state, const weight_map *map, const mapping *file,
                               bool *found, fsdp_error *err)
{
    int number = -1;
    fsdp_source *source = state->source;
    if (strlen(file->file) != file->file_size || file->file_size == 0)
        return fsdp_fail(err, FSDP_ERR_REFUSED, "the index of '%s' has a file without a name",
                         fsdp_source_path(source));
    char *path = fsdp_path_join(fsdp_source_path(source), file->file);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    size_t from = fsdp_source_entry_count(source);
    fsdp_status st = fsdp_source_add_file(source, path, true, &number, err);
    bool lost = is_lost(&st, path, source, err);
    fsdp_free(path);
    if (lost)
        return add_lost(source, map, file, err);
    if (st == FSDP_OK)
        st = add_contents(state, number, err);
    return st == FSDP_OK ? check_names(source, map, file, from, found, err) : st;
}

static fsdp_status add_files(torch_state *state, const weight_map *map, fsdp_error *err)
{
    mapping *files = fsdp_alloc(map->count, sizeof *files);
    bool *found = fsdp_alloc(map->count, sizeof *found);
    fsdp_status st = files && found ? FSDP_OK : fsdp_fail_memory(err, "an index");
    if (st == FSDP_OK && map->count > 0) {
        memcpy(files, map->items, map->count * sizeof *files);
        qsort(files, map->count, sizeof *files, by_file);
    }
    for (size_t i = 0; st == FSDP_OK && i < map->count; i++)
        if (i == 0 || by_file(&files[i - 1], &files[i]) != 0)
            st = add_indexed(state, map, &files[i], found, err);
    fsdp_free(files);
    fsdp_free(found);
    return st == FSDP_OK ? complete(state, err) : st;
}

static fsdp_status open_directory(const fsdp_probe *probe, torch_state *state, fsdp_error *err)
{
    weight_map map = {0};
    fsdp_status st = read_index(probe, &map, err);
    if (st == FSDP_OK)
        st = add_files(state, &map, err);
    fsdp_free(map.items);
    fsdp_arena_release(&map.arena);
    return st;
}

/* --- the format --------------------------------------------------------------------------------- */

/* Bids for a zip archive whose first record lies in a folder: torch writes one, NumPy does not. */
static int bid_for_zip(const fsdp_probe *probe)
{
    enum { BITS_OF_ZIP = 32, BITS_OF_TORCH = 64 };
    static const char *const endings[] = {"/data.pkl",      "/version",
                                          "/byteorder",     "/.format_version",
                                          "/.data/version", "/.data/serialization_id",
                                          "/data/0"};
    if (probe->head_size < ZIP_HEADER || memcmp(probe->head, "PK\3\4", 4) != 0)
        return probe->head_size >= 4 && memcmp(probe->head, "PK\3\4", 4) == 0 ? 1 : 0;
    size_t size = fsdp_load_u16(probe->head + 26), room = probe->head_size - ZIP_HEADER;
    const char *name = (const char *)probe->head + ZIP_HEADER;
    size = size < room ? size : room;
    if (size >= 4 && memcmp(name + size - 4, ".npy", 4) == 0)
        return 1;
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        size_t length = strlen(endings[i]);
        if (size >= length && memcmp(name + size - length, endings[i], length) == 0)
            return BITS_OF_ZIP + BITS_OF_TORCH;
    }
    return memchr(name, '/', size) ? BITS_OF_ZIP : BITS_OF_ZIP / 2;
}

static int bid(const fsdp_probe *probe)
{
    enum { BITS_OF_MAGIC = 96 };
    if (probe->is_directory)
        return fsdp_probe_has(probe, index_name) ? BITS_OF_INDEX : 0;
    return torch_legacy_begins(probe->head, probe->head_size) ? BITS_OF_MAGIC : bid_for_zip(probe);
}

static fsdp_status open_torch(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err)
{
    torch_state *state = NULL;
    FSDP_TRY(create(probe, source_out, &state, err));
    fsdp_status st =
        probe->is_directory ? open_directory(probe, state, err) : open_file(probe, state, err);
    if (st != FSDP_OK) {
        fsdp_source_close(*source_out);
        *source_out = NULL;
    }
    return st;
}

const fsdp_format fsdp_format_torch = {
    .name = "torch",
    .suffixes = {".pt", ".pth", ".bin"},
    .reads_file = true,
    .reads_directory = true,
    .writes_file = true,
    .caps = {.values = true,
             .shares = true,
             .tuples = true,
             .regroups = true,
             .takes_under = true,
             .maps_names = true,
             .numbered = true,
             .keeps_order = true},
    .reader = &(const fsdp_format_reader){.bid = bid, .open = open_torch},
    .writer = &fsdp_torch_writer};
