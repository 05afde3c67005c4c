/*
 * The format "torch_checkpointing" as a source: each item of the directory is a set of rank files, whose
 * entries have the names ITEM.NAME. See torch_items.h.
 */
#include "formats/torch_checkpointing/torch_items.h"

#include "base/core/mem.h"
#include "base/data/box_internal.h"
#include "base/data/json.h"
#include "base/data/name_path.h"
#include "formats/safetensors/safetensors.h"

#include <stdio.h>
#include <string.h>

/* === the items of a directory ================================================================= */

/*
 * Those that metadata.pkl states, and those that the names of files show, because items without tensors are
 * in no metadata, and some checkpoints have none at all.
 */

enum { BITS_OF_METADATA = 70, BITS_OF_FILES = 41, HEAD_BYTES = 64 << 10, METADATA_MOST = 1 << 30 };

/* --- looking at files ------------------------------------------------------------------------- */

/* The first bytes of a file of the directory; NULL: it is not a regular file that can be read. The caller
 * frees them. */
static char *read_head(const fsdp_probe *probe, const char *name, size_t *size_out)
{
    char *path = fsdp_path_join(probe->path, name), *head = fsdp_alloc(HEAD_BYTES, 1);
    fsdp_file *file = NULL;
    fsdp_file_info info;
    int64_t size = 0;
    bool is_read = path && head && probe->io->ops->info(probe->io, path, &info) == 0 &&
                   info.kind == FSDP_FILE_REGULAR &&
                   fsdp_io_open(probe->io, path, FSDP_IO_READ, &file, NULL) == FSDP_OK &&
                   file->ops->size(file, &size) == 0;
    *size_out = size < HEAD_BYTES ? (size_t)size : HEAD_BYTES;
    is_read = is_read && fsdp_io_read(file, path, head, *size_out, 0, NULL) == FSDP_OK;
    if (file)
        (void)fsdp_io_close(&file, path, NULL); /* read only: a failed close loses nothing */
    fsdp_free(path);
    if (!is_read)
        fsdp_free(head);
    return is_read ? head : NULL;
}

static bool holds(const char *head, size_t size, const char *word)
{
    return memmem(head, size, word, strlen(word)) != NULL;
}

static bool is_zip(const char *head, size_t size)
{
    return size >= 4 && memcmp(head, "PK\3\4", 4) == 0;
}

/* A pickle whose first words are those of the package. */
static bool has_metadata(const fsdp_probe *probe)
{
    size_t size;
    char *head = fsdp_probe_has(probe, FSDP_ITEMS_METADATA)
                     ? read_head(probe, FSDP_ITEMS_METADATA, &size)
                     : NULL;
    bool is_ours = head && size > 2 && (uint8_t)head[0] == 0x80 &&
                   holds(head, size < 64 ? size : 64, "metadata") &&
                   (holds(head, size, "nested_path_to_metadata") ||
                    holds(head, size, "sharding_metadata") || holds(head, size, "world_size"));
    fsdp_free(head);
    return is_ours;
}

/* --- sets of files ---------------------------------------------------------------------------- */

/* The part of the pattern before the rank, without the sign that joins both: the key of "model_{r}.pt". */
static size_t key_size(const rank_group *group)
{
    static const char word[] = "rank";
    size_t size = group->stem;
    if (size > 0 && strchr("_-.", group->pattern[size - 1]))
        size--;
    if (size > sizeof word && strchr("_-.", group->pattern[size - sizeof word]) &&
        memcmp(group->pattern + size - (sizeof word - 1), word, sizeof word - 1) == 0)
        size -= sizeof word;
    return size;
}

static const char *ending(const rank_group *group)
{
    return group->pattern + group->stem + 3;
}

/* "KEY_{r}.pt", as the package names files by default. */
static bool is_usual(const rank_group *group)
{
    return group->stem > 1 && group->pattern[group->stem - 1] == '_' && !group->says_rank &&
           group->world == 0 && strcmp(ending(group), ".pt") == 0 &&
           fsdp_name_is_key(group->pattern, group->stem - 1);
}

/* Its files are those of ranks 0, 1, ..., world - 1. */
static bool is_full_set(const rank_group *group, int world)
{
    for (size_t i = 0; i < group->count; i++)
        if (group->files[i].rank != (int)i)
            return false;
    return group->count == (size_t)world;
}

/* Without metadata a directory is recognised by two sets or more of as many files, of which one mentions
 * distributed tensors: numbers in names may be those of epochs. */
static bool has_sets(const fsdp_probe *probe, const rank_names *names)
{
    size_t sets = 0, world = 0;
    bool is_spread = false;
    for (size_t i = 0; i < names->count; i++) {
        const rank_group *group = &names->groups[i];
        size_t size;
        if (!is_usual(group))
            continue;
        world = world == 0 ? group->count : world;
        char *head =
            is_full_set(group, (int)world) ? read_head(probe, group->files[0].name, &size) : NULL;
        if (!head || !is_zip(head, size)) {
            fsdp_free(head);
            return false;
        }
        sets++;
        is_spread = is_spread || holds(head, size, "DTensor");
        fsdp_free(head);
    }
    return sets > 1 && is_spread;
}

static bool are_there(const fsdp_probe *probe, int *bits_out)
{
    rank_names names;
    *bits_out = 0;
    if (!probe->is_directory)
        return false;
    if (has_metadata(probe)) {
        *bits_out = BITS_OF_METADATA;
        return true;
    }
    if (rank_names_group(probe->names, probe->name_count, NULL, &names, NULL) != FSDP_OK)
        return false;
    bool is_there = has_sets(probe, &names);
    rank_names_release(&names);
    *bits_out = is_there ? BITS_OF_FILES : 0;
    return is_there;
}

/* --- items that the metadata does not have ---------------------------------------------------- */

static bool is_stated(const items_list *list, const char *path)
{
    for (size_t i = 0; i < list->count; i++)
        for (int rank = 0; rank < list->world; rank++)
            if (list->items[i].files[rank].path &&
                strcmp(list->items[i].files[rank].path, path) == 0)
                return true;
    return false;
}

static items_kind kind_of(const rank_group *group, const char *head, size_t size)
{
    if (is_zip(head, size) || torch_legacy_begins((const uint8_t *)head, size))
        return ITEMS_TORCH;
    if (fsdp_has_suffix(group->pattern, ".safetensors"))
        return ITEMS_SAFETENSORS;
    return fsdp_has_suffix(group->pattern, ".json") ? ITEMS_JSON : ITEMS_RAW;
}

/* The usual file, or the name of the neighbours with another rank. */
static fsdp_status name_missing(items_list *list, const rank_group *group, int rank,
                                items_file *file, fsdp_error *err)
{
    fsdp_text path = {0};
    fsdp_text_addf(&path, "%.*s%d%s", (int)group->stem, group->pattern, rank, ending(group));
    file->path = path.failed ? NULL : fsdp_arena_strndup(&list->arena, path.data, path.size);
    fsdp_text_release(&path);
    return file->path ? FSDP_OK : fsdp_fail_memory(err, "the files of a checkpoint");
}

static fsdp_status add_set(items_list *list, const rank_group *group, items_kind kind,
                           fsdp_error *err)
{
    items_item *item = NULL;
    size_t size = key_size(group);
    if (size == 0 || items_list_find(list, group->pattern, size))
        return FSDP_OK; /* "0.pt", or a second set under a name that is taken */
    FSDP_TRY(items_list_add(list, group->pattern, size, &item, err));
    for (size_t i = 0; i < group->count; i++) {
        const char *name = group->files[i].name;
        item->files[group->files[i].rank].path =
            fsdp_arena_strndup(&list->arena, name, strlen(name));
        if (!item->files[group->files[i].rank].path)
            return fsdp_fail_memory(err, "the files of a checkpoint");
    }
    for (int rank = 0; rank < list->world; rank++) {
        item->files[rank].kind = kind;
        if (!item->files[rank].path)
            FSDP_TRY(name_missing(list, group, rank, &item->files[rank], err));
    }
    return FSDP_OK;
}

static fsdp_status check_ranks(const items_list *list, const rank_group *group, const char *path,
                               fsdp_error *err)
{
    for (size_t i = 1; i < group->count; i++)
        if (group->files[i].rank == group->files[i - 1].rank)
            return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': '%s' and '%s' both belong to rank %d",
                             path, group->files[i - 1].name, group->files[i].name,
                             group->files[i].rank);
    const rank_file *last = &group->files[group->count - 1];
    if (last->rank < list->world)
        return FSDP_OK;
    if (!list->where)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s': '%s' is of rank %d, more than %d", path,
                         last->name, last->rank, RANK_MESH_LIMIT);
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "%s states a world size of %d, but '%s' is of rank %d; remove what belongs to "
                     "another save",
                     list->where, list->world, last->name, last->rank);
}

/* Files of another kind than torch.save: those that all ranks have under a name of the usual form, and that
 * are small enough to be values. */
static bool are_values(const fsdp_probe *probe, const items_list *list, const rank_group *group)
{
    bool are = is_full_set(group, list->world) && group->stem > 1 &&
               group->pattern[group->stem - 1] == '_' && ending(group)[0] == '.' &&
               fsdp_name_is_key(group->pattern, group->stem - 1);
    for (size_t i = 0; i < group->count && are; i++) {
        char *path = fsdp_path_join(probe->path, group->files[i].name);
        fsdp_file_info info;
        are = path && probe->io->ops->info(probe->io, path, &info) == 0 &&
              info.kind == FSDP_FILE_REGULAR && info.size <= ITEMS_VALUE_MOST;
        fsdp_free(path);
    }
    return are;
}

static fsdp_status take_set(const fsdp_probe *probe, items_list *list, const rank_group *group,
                            fsdp_error *err)
{
    size_t size;
    if (is_stated(list, group->files[0].name))
        return check_ranks(list, group, probe->path, err);
    char *head = read_head(probe, group->files[0].name, &size);
    items_kind kind = head ? kind_of(group, head, size) : ITEMS_RAW;
    bool is_item = head && (kind == ITEMS_TORCH         ? group->files[0].rank < RANK_MESH_LIMIT
                            : kind == ITEMS_SAFETENSORS ? is_full_set(group, list->world)
                                                        : are_values(probe, list, group));
    fsdp_free(head);
    if (!is_item)
        return FSDP_OK;
    FSDP_TRY(check_ranks(list, group, probe->path, err));
    return add_set(list, group, kind, err);
}

/* Without metadata the world is as large as the largest set of torch.save files says. */
static void count_ranks(const fsdp_probe *probe, const rank_names *names, items_list *list)
{
    for (size_t i = 0; i < names->count && !list->where; i++) {
        const rank_group *group = &names->groups[i];
        size_t size;
        char *head = read_head(probe, group->files[0].name, &size);
        int last = group->files[group->count - 1].rank;
        if (head && kind_of(group, head, size) == ITEMS_TORCH && last >= list->world &&
            last < RANK_MESH_LIMIT)
            list->world = last + 1;
        fsdp_free(head);
    }
}

static fsdp_status take_sets(const fsdp_probe *probe, const rank_names *names, items_list *list,
                             fsdp_error *err)
{
    count_ranks(probe, names, list);
    for (size_t i = 0; i < names->count && list->world > 0; i++)
        FSDP_TRY(take_set(probe, list, &names->groups[i], err));
    return list->count > 0
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                           "'%s' holds no item of torch_checkpointing: no file NAME_0.pt",
                           probe->path);
}

static fsdp_status read_metadata_file(const fsdp_probe *probe, items_list *list, fsdp_error *err)
{
    char *path = fsdp_path_join(probe->path, FSDP_ITEMS_METADATA), *text = NULL;
    size_t size;
    if (!path)
        return fsdp_fail_memory(err, probe->path);
    fsdp_status st = fsdp_source_read_file(probe->io, path, METADATA_MOST, &text, &size, err);
    if (st == FSDP_OK)
        st = items_metadata_read(text, size, path, list, err);
    fsdp_free(text);
    fsdp_free(path);
    return st;
}

static fsdp_status find_items(const fsdp_probe *probe, items_list *list, fsdp_error *err)
{
    rank_names names;
    if (fsdp_probe_has(probe, FSDP_ITEMS_METADATA))
        FSDP_TRY(read_metadata_file(probe, list, err));
    FSDP_TRY(rank_names_group(probe->names, probe->name_count, NULL, &names, err));
    fsdp_status st = take_sets(probe, &names, list, err);
    rank_names_release(&names);
    return st;
}

/* === reading them ============================================================================= */

/* --- values in JSON ----------------------------------------------------------------------------- */

static fsdp_status take_json(fsdp_json *json, fsdp_value *value, fsdp_error *err);

static fsdp_status add_item(fsdp_value *list, size_t *room, fsdp_value *item, fsdp_error *err)
{
    if (!fsdp_grow(&list->as.list.items, room, list->as.list.count + 1, sizeof *item)) {
        fsdp_value_release(item);
        return fsdp_fail_memory(err, "a value");
    }
    list->as.list.items[list->as.list.count++] = *item;
    return FSDP_OK;
}

/* After a failure value holds the items so far; the caller releases it. */
static fsdp_status take_list(fsdp_json *json, fsdp_value *value, fsdp_error *err)
{
    size_t room = 0;
    bool more;
    value->kind = FSDP_VALUE_LIST;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        fsdp_value item = {0};
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        fsdp_status st = take_json(json, &item, err);
        if (st != FSDP_OK) {
            fsdp_value_release(&item);
            return st;
        }
        FSDP_TRY(add_item(value, &room, &item, err));
    }
}

static fsdp_status take_dict(fsdp_json *json, fsdp_value *value, fsdp_error *err)
{
    size_t room = 0, size;
    const char *key;
    bool more;
    value->kind = FSDP_VALUE_DICT;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        fsdp_value name = {0}, item = {0};
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(fsdp_value_set_bytes(&name, FSDP_VALUE_STRING, key, size, err));
        FSDP_TRY(add_item(value, &room, &name, err));
        fsdp_status st = take_json(json, &item, err);
        fsdp_status added = add_item(value, &room, &item, err); /* keys and values stay pairs */
        FSDP_TRY(st != FSDP_OK ? st : added);
    }
}

static fsdp_status take_number(fsdp_json *json, fsdp_value *value, fsdp_error *err)
{
    const fsdp_json before = *json;
    fsdp_error why = {0};
    int64_t number;
    double real;
    if (fsdp_json_i64(json, &number, &why) == FSDP_OK) {
        *value = fsdp_value_i64(number);
        return FSDP_OK;
    }
    *json = before;
    size_t digits = strspn(json->at, "-0123456789"); /* the text ends with a zero byte */
    if (json->at[digits] == '\0' || !strchr(".eE", json->at[digits])) {
        const char *text = json->at;
        FSDP_TRY(fsdp_json_skip(json, err));
        return fsdp_value_set_bytes(value, FSDP_VALUE_INTEGER, text, digits, err);
    }
    FSDP_TRY(fsdp_json_f64(json, &real, err));
    *value = fsdp_value_f64(real);
    return FSDP_OK;
}

/* Recursion depth is at most that of fsdp_json. */
static fsdp_status take_json(fsdp_json *json, fsdp_value *value, fsdp_error *err)
{
    const char *text;
    size_t size;
    bool flag;
    switch (fsdp_json_peek(json)) {
    case FSDP_JSON_NULL: return fsdp_json_null(json, err);
    case FSDP_JSON_BOOL:
        FSDP_TRY(fsdp_json_bool(json, &flag, err));
        *value = fsdp_value_bool(flag);
        return FSDP_OK;
    case FSDP_JSON_STRING:
        FSDP_TRY(fsdp_json_string(json, &text, &size, err));
        return fsdp_value_set_bytes(value, FSDP_VALUE_STRING, text, size, err);
    case FSDP_JSON_ARRAY: return take_list(json, value, err);
    case FSDP_JSON_OBJECT: return take_dict(json, value, err);
    default: return take_number(json, value, err);
    }
}

static fsdp_status parse_json(const char *text, size_t size, const char *path, fsdp_value *value,
                              fsdp_error *err)
{
    fsdp_json json;
    fsdp_json_init(&json, text, size, path);
    fsdp_status st = take_json(&json, value, err);
    if (st == FSDP_OK)
        st = fsdp_json_finish(&json, err);
    fsdp_json_release(&json);
    return st;
}

/* --- one file ----------------------------------------------------------------------------------- */

/* A file that is a value as a whole: JSON, or raw bytes. */
static fsdp_status read_value(rank_files *set, int file, items_kind kind, fsdp_error *err)
{
    static const int32_t whole[] = {FSDP_PATH_WHOLE};
    int64_t size = fsdp_source_file_size(set->source, (size_t)file);
    fsdp_value value = {0};
    torch_item found = {.name = ""};
    if (size > ITEMS_VALUE_MOST)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s': a value of over %d MiB", set->path,
                         ITEMS_VALUE_MOST >> 20);
    char *text = fsdp_alloc((size_t)size + 1, 1);
    if (!text)
        return fsdp_fail_memory(err, set->path);
    fsdp_status st = fsdp_source_pread(set->source, file, text, (size_t)size, 0, err);
    if (st == FSDP_OK)
        st = kind == ITEMS_JSON
                 ? parse_json(text, (size_t)size, set->path, &value, err)
                 : fsdp_value_set_bytes(&value, FSDP_VALUE_BYTES, text, (size_t)size, err);
    fsdp_source_nest(set->source, whole, 1);
    if (st == FSDP_OK)
        st = rank_files_value(set, &found, &value, err);
    fsdp_source_nest(set->source, NULL, 0);
    fsdp_value_release(&value);
    fsdp_free(text);
    return st;
}

/* What the metadata says is a part is placed; the rest is kept as in other rank files. */
static fsdp_status take_tensor(void *context, const torch_item *found, torch_tensor *tensor,
                               fsdp_error *err)
{
    rank_files *set = context;
    bool is_taken;
    FSDP_TRY(rank_files_place_stated(set, found, tensor, &is_taken, err));
    return is_taken ? FSDP_OK : rank_files_tensor(set, found, tensor, err);
}

/* The safetensors file has flat names, and the metadata their nesting. */
static void nest_as_stated(rank_files *set, const items_item *item, const char *name, size_t size,
                           int32_t *flat)
{
    const uint64_t *number = fsdp_name_table_find(&item->names, name, size);
    const items_tensor *tensor = number ? &item->tensors[*number] : NULL;
    *flat = (int32_t)size;
    if (tensor && !tensor->is_twice)
        fsdp_source_nest(set->source, tensor->path, tensor->path_count);
    else
        fsdp_source_nest(set->source, flat, 1);
}

static fsdp_status read_packed(rank_files *set, const items_item *item, int file,
                               const fsdp_safetensors_entry *entry, fsdp_error *err)
{
    torch_tensor tensor = {.dtype = entry->dtype,
                           .ndim = entry->ndim,
                           .storage = {.file = file,
                                       .stream = FSDP_NO_STREAM,
                                       .offset = entry->begin,
                                       .size = entry->end - entry->begin,
                                       .dtype = entry->dtype},
                           .offset = entry->begin};
    torch_item found = {.name = entry->true_name, .name_size = entry->true_size};
    size_t bytes = (size_t)entry->ndim * sizeof *entry->shape;
    int32_t flat;
    if (entry->true_size >= FSDP_PATH_TUPLE)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s': a name is too long", set->path);
    if (bytes > 0)
        memcpy(tensor.shape, entry->shape, bytes);
    fsdp_box_strides(entry->ndim, entry->shape, tensor.strides);
    for (int dim = 0; dim < entry->ndim; dim++)
        tensor.strides[dim] *= (int64_t)fsdp_dtype_size(entry->dtype);
    nest_as_stated(set, item, entry->true_name, entry->true_size, &flat);
    fsdp_status st = take_tensor(set, &found, &tensor, err);
    fsdp_source_nest(set->source, NULL, 0);
    return st;
}

static fsdp_status read_safetensors(rank_files *set, const items_item *item, int file,
                                    fsdp_error *err)
{
    fsdp_safetensors header = {0};
    fsdp_status st = fsdp_safetensors_read(set->source, file, &header, err);
    for (size_t i = 0; i < header.count && st == FSDP_OK; i++)
        st = read_packed(set, item, file, &header.entries[i], err);
    fsdp_safetensors_release(&header);
    return st;
}

static fsdp_status read_file(rank_files *set, const items_item *item, const char *directory,
                             const rank_file *of, fsdp_error *err)
{
    items_kind kind = item->files[of->rank].kind;
    int file;
    if (kind == ITEMS_TORCH)
        return rank_files_read(set, directory, of, true, err);
    FSDP_TRY(rank_files_begin(set, directory, of, true, &file, err));
    return kind == ITEMS_SAFETENSORS ? read_safetensors(set, item, file, err)
                                     : read_value(set, file, kind, err);
}

/* --- one item ----------------------------------------------------------------------------------- */

/* An item while it is read. The arrays belong to the arena of the list. */
typedef struct open_item {
    items_item *item;
    rank_group group; /* of the files that are there */
    const char **expected;
    rank_statements statements;
    rank_files set;
} open_item;

static fsdp_status find_files(const fsdp_probe *probe, items_list *list, open_item *open,
                              fsdp_error *err)
{
    size_t world = (size_t)list->world;
    open->expected = fsdp_arena_alloc(&list->arena, world, sizeof *open->expected);
    open->group.files = fsdp_arena_alloc(&list->arena, world, sizeof *open->group.files);
    if (!open->expected || !open->group.files)
        return fsdp_fail_memory(err, "the files of a checkpoint");
    open->group.world = list->world;
    open->group.pattern = "{r}";
    for (int rank = 0; rank < list->world; rank++) {
        const char *name = open->item->files[rank].path;
        char *path = fsdp_path_join(probe->path, name);
        if (!path)
            return fsdp_fail_memory(err, "a path");
        open->expected[rank] = name;
        if (fsdp_io_exists(probe->io, path))
            open->group.files[open->group.count++] = (rank_file){.rank = rank, .name = name};
        fsdp_free(path);
    }
    return FSDP_OK;
}

/* A tensor that the metadata has and no file. */
static fsdp_status check_tensor(open_item *open, const items_tensor *tensor, fsdp_error *err)
{
    fsdp_text name = {0};
    if (tensor->is_twice || tensor->group_count == 0 ||
        fsdp_name_table_find(&open->set.names, tensor->name, tensor->name_size))
        return FSDP_OK;
    fsdp_text_addf(&name, "%s%s", open->item->key, tensor->name_size > 0 ? "." : "");
    fsdp_text_add(&name, tensor->name, tensor->name_size);
    fsdp_status st = name.failed ? fsdp_fail_memory(err, "a name")
                                 : fsdp_source_add_missing(open->set.source, name.data, name.size,
                                                           open->expected[0], err);
    fsdp_text_release(&name);
    return st;
}

/* Nothing is there of an item that the metadata has. */
static fsdp_status skip_item(const fsdp_probe *probe, open_item *open, fsdp_error *err)
{
    if (!fsdp_source_tolerates(open->set.source))
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': no file of item '%s' is there, such as '%s'" FSDP_MISSING_HINT,
                         probe->path, open->item->key, open->expected[0]);
    for (size_t i = 0; i < open->item->tensor_count; i++)
        FSDP_TRY(check_tensor(open, &open->item->tensors[i], err));
    return FSDP_OK;
}

static fsdp_status read_item(const fsdp_probe *probe, items_list *list, open_item *open,
                             fsdp_error *err)
{
    FSDP_TRY(find_files(probe, list, open, err));
    open->statements = open->item->statements;
    open->statements.context = open->item;
    open->set.where = probe->path;
    open->set.group = &open->group;
    open->set.key = open->item->key;
    open->set.take = take_tensor;
    open->set.expected = open->expected;
    open->set.statements = open->statements.find ? &open->statements : NULL;
    if (open->group.count == 0)
        return skip_item(probe, open, err);
    for (size_t i = 0; i < open->group.count; i++)
        FSDP_TRY(read_file(&open->set, open->item, probe->path, &open->group.files[i], err));
    for (size_t i = 0; i < open->item->tensor_count; i++)
        FSDP_TRY(check_tensor(open, &open->item->tensors[i], err));
    return rank_files_merge(&open->set, NULL, err);
}

/* --- the format --------------------------------------------------------------------------------- */

static fsdp_status read_items(const fsdp_probe *probe, items_list *list, open_item *open,
                              fsdp_error *err)
{
    FSDP_TRY(rank_files_create(probe, "torch_checkpointing", &open[0].set, err));
    for (size_t i = 0; i < list->count; i++) {
        open[i].item = &list->items[i];
        open[i].set.source = open[0].set.source;
        open[i].set.memory = open[0].set.memory;
        FSDP_TRY(read_item(probe, list, &open[i], err));
    }
    for (size_t i = 0; i < list->count; i++)
        FSDP_TRY(rank_files_add_ties(&open[i].set, err));
    return fsdp_source_complete(open[0].set.source, err);
}

static fsdp_status open_items(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err)
{
    items_list list = {0};
    *source_out = NULL;
    fsdp_status st = find_items(probe, &list, err);
    open_item *open = st == FSDP_OK ? fsdp_alloc(list.count, sizeof *open) : NULL;
    if (st == FSDP_OK)
        st = open ? read_items(probe, &list, open, err) : fsdp_fail_memory(err, probe->path);
    fsdp_source *source = open ? open[0].set.source : NULL;
    for (size_t i = 0; open && i < list.count; i++)
        rank_files_release(&open[i].set);
    fsdp_free(open);
    items_list_release(&list);
    if (st == FSDP_OK)
        *source_out = source;
    else
        fsdp_source_close(source);
    return st;
}

static int bid(const fsdp_probe *probe)
{
    int bits;
    return are_there(probe, &bits) ? bits : 0;
}

const fsdp_format fsdp_format_torch_checkpointing = {
    .name = "torch_checkpointing",
    .reads_directory = true,
    .writes_directory = true,
    .caps = {.values = true,
             .tuples = true,
             .regroups = true,
             .takes_under = true,
             .in_items = true,
             .maps_names = true,
             .all_names = true,
             .names_groups = true,
             .forms_groups = true,
             .sharded = true,
             .without_config = true},
    .reader = &(const fsdp_format_reader){.bid = bid, .open = open_items},
    .writer = &fsdp_items_writer};
