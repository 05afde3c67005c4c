/* Boxes of the entries of a target: see target.h. */
#include "formats/target.h"

#include "base/core/mem.h"

fsdp_box fsdp_target_box_at(const fsdp_target_entry *entry, size_t number)
{
    fsdp_box box = fsdp_box_whole(entry->ndim, entry->boxes[number].len);
    for (int d = 0; d < entry->ndim; d++)
        box.lo[d] = entry->boxes[number].lo[d];
    return box;
}

/* The bytes of the first element of a new name. */
static fsdp_status find_first(const fsdp_path *old, const fsdp_text *name, size_t *size_out,
                              fsdp_error *err)
{
    int32_t usual[FSDP_PATH_DEFAULT_MOST];
    fsdp_path from = *old;
    if (!from.elements) {
        from.elements = usual;
        from.count = fsdp_path_default(from.name, from.name_size, usual);
    }
    *size_out = name->size;
    if (fsdp_path_is_whole(from.elements, from.count))
        return FSDP_OK;
    int32_t *path = fsdp_alloc(from.count + 1, sizeof *path);
    if (!path)
        return fsdp_fail_memory(err, "a name");
    (void)fsdp_path_rename(&from, name->data ? name->data : "", name->size, path);
    *size_out = fsdp_path_bytes(path[0]);
    fsdp_free(path);
    return FSDP_OK;
}

fsdp_status fsdp_target_put_into_item(const fsdp_path *old, const char *item, fsdp_text *name,
                                      fsdp_error *err)
{
    size_t first;
    fsdp_text below = {0};
    FSDP_TRY(find_first(old, name, &first, err));
    if (fsdp_name_is_key(name->data, first) && !(item && first == name->size))
        return FSDP_OK;
    fsdp_text_addf(&below, "%s%s", item ? item : "other", name->size > 0 ? "." : "");
    fsdp_text_add(&below, name->data ? name->data : "", name->size);
    fsdp_text_release(name);
    *name = below;
    return FSDP_OK;
}
