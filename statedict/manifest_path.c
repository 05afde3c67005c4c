/* The paths of names in the manifest, written and read: see base/name_path.h. */
#include "statedict/manifest_internal.h"

#include "base/mem.h"
#include "base/name_path.h"

#include <inttypes.h>
#include <string.h>

typedef struct fsdp_listed_path {
    const char *name;
    size_t name_size;
    const int32_t *path;
    size_t count;
} fsdp_listed_path;

void fsdp_manifest_put_path(fsdp_text *text, const fsdp_entry *entry)
{
    if (!entry->path ||
        fsdp_path_is_default(entry->name, entry->name_size, entry->path, entry->path_count))
        return;
    fsdp_text_addf(text, ", \"path\": [");
    for (size_t i = 0; i < entry->path_count; i++)
        fsdp_text_addf(text, i > 0 ? ", %" PRId32 : "%" PRId32, entry->path[i]);
    fsdp_text_add(text, "]", 1);
}

void fsdp_path_list_release(fsdp_path_list *list)
{
    fsdp_free(list->path);
    fsdp_free(list->items);
    fsdp_arena_release(&list->arena);
    *list = (fsdp_path_list){0};
}

fsdp_status fsdp_manifest_take_path(fsdp_json *json, fsdp_path_list *list, fsdp_error *err)
{
    list->path_count = 0;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        int64_t element;
        bool more;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(fsdp_json_i64(json, &element, err));
        if (element < -FSDP_MAX_NAME || element > FSDP_MAX_NAME ||
            list->path_count == FSDP_PATH_MOST)
            return fsdp_json_fail(json, err, "a path with an element of %" PRId64 " bytes",
                                  element);
        if (!fsdp_grow(&list->path, &list->path_capacity, list->path_count + 1, sizeof *list->path))
            return fsdp_fail_memory(err, "the manifest");
        list->path[list->path_count++] = (int32_t)element;
    }
}

fsdp_status fsdp_path_list_add(fsdp_path_list *list, const fsdp_json *json, const char *name,
                               size_t size, fsdp_error *err)
{
    if (!fsdp_path_fits(name, size, list->path, list->path_count))
        return fsdp_json_fail(json, err, "a path that does not make up the name");
    char *own_name = fsdp_arena_strndup(&list->arena, name, size);
    int32_t *own = fsdp_arena_alloc(&list->arena, list->path_count, sizeof *own);
    if (!own_name || !own ||
        !fsdp_grow(&list->items, &list->capacity, list->count + 1, sizeof *list->items))
        return fsdp_fail_memory(err, "the manifest");
    memcpy(own, list->path, list->path_count * sizeof *own);
    list->items[list->count++] = (fsdp_listed_path){own_name, size, own, list->path_count};
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
