/* Writes and reads the paths of names in the manifest: see base/data/name_path.h. */
#include "statedict/manifest/manifest_internal.h"

#include "base/core/mem.h"
#include "base/data/name_path.h"
#include "statedict/sd/layout_internal.h"

#include <inttypes.h>
#include <string.h>

typedef struct fsdp_listed_path {
    const char *name;
    size_t name_size;
    const int32_t *path;
    size_t count;
} fsdp_listed_path;

/* Writes the length of the element; in brackets when it is a number used as a key. */
static void put_element(fsdp_text *text, int32_t element)
{
    if (element >= 0 && element & FSDP_PATH_NUMBER)
        fsdp_text_addf(text, "[%zu]", fsdp_path_bytes(element));
    else
        fsdp_text_addf(text, element < 0 ? "-%zu" : "%zu", fsdp_path_bytes(element));
}

/* Writes the numbers of the elements that are positions in tuples. */
static void put_tuples(fsdp_text *text, const fsdp_entry *entry)
{
    const char *before = ", \"tuples\": [";
    for (size_t i = 0; i < entry->path_count; i++)
        if (fsdp_path_in_tuple(entry->path[i])) {
            fsdp_text_addf(text, "%s%zu", before, i);
            before = ", ";
        }
    if (strcmp(before, ", ") == 0)
        fsdp_text_add(text, "]", 1);
}

void fsdp_manifest_put_path(fsdp_text *text, const fsdp_entry *entry)
{
    if (!entry->path ||
        fsdp_path_is_default(entry->name, entry->name_size, entry->path, entry->path_count))
        return;
    if (fsdp_path_is_whole(entry->path, entry->path_count)) {
        fsdp_text_addf(text, ", \"whole\": true");
        return;
    }
    fsdp_text_addf(text, ", \"path\": [");
    for (size_t i = 0; i < entry->path_count; i++) {
        if (i > 0)
            fsdp_text_add(text, ", ", 2);
        put_element(text, entry->path[i]);
    }
    fsdp_text_add(text, "]", 1);
    put_tuples(text, entry);
}

void fsdp_path_list_release(fsdp_path_list *list)
{
    fsdp_free(list->path);
    fsdp_free(list->items);
    fsdp_arena_release(&list->arena);
    *list = (fsdp_path_list){0};
}

static fsdp_status take_element(fsdp_json *json, int32_t *element_out, fsdp_error *err)
{
    int64_t bytes;
    bool is_number = fsdp_json_peek(json) == FSDP_JSON_ARRAY, more;
    if (is_number) {
        FSDP_TRY(fsdp_json_enter_array(json, err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return fsdp_json_fail(json, err, "a path with an empty element");
    }
    FSDP_TRY(fsdp_json_i64(json, &bytes, err));
    if (bytes < (is_number ? 1 : -FSDP_MAX_NAME) || bytes > FSDP_MAX_NAME)
        return fsdp_json_fail(json, err, "a path with an element of %" PRId64 " bytes", bytes);
    *element_out = (int32_t)bytes | (is_number ? FSDP_PATH_NUMBER : 0);
    if (!is_number)
        return FSDP_OK;
    FSDP_TRY(fsdp_json_next_item(json, &more, err));
    return more ? fsdp_json_fail(json, err, "a path with an element of two numbers") : FSDP_OK;
}

fsdp_status fsdp_manifest_take_path(fsdp_json *json, fsdp_path_list *list, fsdp_error *err)
{
    list->path_count = 0;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        if (list->path_count == FSDP_PATH_MOST)
            return fsdp_json_fail(json, err, "a path of more than %d elements", FSDP_PATH_MOST);
        if (!fsdp_grow(&list->path, &list->path_capacity, list->path_count + 1, sizeof *list->path))
            return fsdp_fail_memory(err, "the manifest");
        FSDP_TRY(take_element(json, &list->path[list->path_count], err));
        list->path_count++;
    }
}

fsdp_status fsdp_manifest_take_tuples(fsdp_json *json, fsdp_path_list *list, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        bool more;
        int64_t i;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(fsdp_json_i64(json, &i, err));
        if (i < 0 || (size_t)i >= list->path_count || list->path[i] >= 0 ||
            list->path[i] < -FSDP_MAX_NAME) /* the whole object, or in a tuple already */
            return fsdp_json_fail(json, err, "a tuple that is no list of the path before it");
        list->path[i] = -(-list->path[i] | FSDP_PATH_TUPLE);
    }
}

fsdp_status fsdp_manifest_take_whole(fsdp_json *json, fsdp_path_list *list, fsdp_error *err)
{
    bool is_whole;
    FSDP_TRY(fsdp_json_bool(json, &is_whole, err));
    list->path_count = 0;
    if (!is_whole)
        return fsdp_json_fail(json, err, "an entry that says it is not the whole");
    if (!fsdp_grow(&list->path, &list->path_capacity, 1, sizeof *list->path))
        return fsdp_fail_memory(err, "the manifest");
    list->path[list->path_count++] = FSDP_PATH_WHOLE;
    return FSDP_OK;
}

fsdp_status fsdp_path_list_add(fsdp_path_list *list, const fsdp_json *json, const char *name,
                               size_t size, fsdp_error *err)
{
    if (!fsdp_path_fits(name, size, list->path, list->path_count))
        return fsdp_json_fail(json, err, "a path that does not make up the name");
    char *name_copy = fsdp_arena_strndup(&list->arena, name, size);
    int32_t *path_copy = fsdp_arena_alloc(&list->arena, list->path_count, sizeof *path_copy);
    if (!name_copy || !path_copy ||
        !fsdp_grow(&list->items, &list->capacity, list->count + 1, sizeof *list->items))
        return fsdp_fail_memory(err, "the manifest");
    memcpy(path_copy, list->path, list->path_count * sizeof *path_copy);
    list->items[list->count++] = (fsdp_listed_path){name_copy, size, path_copy, list->path_count};
    return FSDP_OK;
}

fsdp_status fsdp_path_list_apply(const fsdp_path_list *list, fsdp_sd *sd, fsdp_error *err)
{
    for (size_t i = 0; i < list->count; i++) {
        const fsdp_listed_path *item = &list->items[i];
        int64_t found = fsdp_sd_find(sd, item->name, item->name_size);
        if (found >= 0)
            FSDP_TRY(fsdp_sd_set_path(sd, (size_t)found, item->path, item->count, err));
    }
    return FSDP_OK;
}
