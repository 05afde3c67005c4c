/* Reads the true names of escaped ones. See escaped_names.h. */
#include "formats/source/escaped_names.h"

#include "base/data/json.h"

void fsdp_escaped_names_release(fsdp_escaped_names *escaped_names)
{
    fsdp_free(escaped_names->names);
    fsdp_name_table_release(&escaped_names->table);
    fsdp_arena_release(&escaped_names->arena);
    *escaped_names = (fsdp_escaped_names){0};
}

static fsdp_status read_pairs(fsdp_escaped_names *escaped_names, fsdp_json *json, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        const char *key, *name;
        size_t key_size, size;
        bool more;
        FSDP_TRY(fsdp_json_next_key(json, &key, &key_size, &more, err));
        if (!more)
            return fsdp_json_finish(json, err);
        if (fsdp_name_table_find(&escaped_names->table, key, key_size))
            return fsdp_json_fail(json, err, "the name appears twice");
        const char *escaped = fsdp_arena_strndup(&escaped_names->arena, key, key_size);
        FSDP_TRY(fsdp_json_string(json, &name, &size, err));
        const char *kept = fsdp_arena_strndup(&escaped_names->arena, name, size);
        if (!escaped || !kept ||
            !fsdp_grow(&escaped_names->names, &escaped_names->room, escaped_names->count + 1,
                       sizeof *escaped_names->names) ||
            !fsdp_name_table_put(&escaped_names->table, escaped, key_size, escaped_names->count))
            return fsdp_fail_memory(err, json->name);
        escaped_names->names[escaped_names->count].name = kept;
        escaped_names->names[escaped_names->count++].size = size;
    }
}

fsdp_status fsdp_escaped_names_parse(fsdp_escaped_names *escaped_names, const char *path,
                                     const char *text, size_t size, fsdp_error *err)
{
    fsdp_json json;
    fsdp_json_init(&json, text, size, path);
    fsdp_status status = read_pairs(escaped_names, &json, err);
    fsdp_json_release(&json);
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "the list of escaped names");
    return status;
}

void fsdp_escaped_names_resolve(const fsdp_escaped_names *escaped_names, const char **name,
                                size_t *size)
{
    const uint64_t *number = fsdp_name_table_find(&escaped_names->table, *name, *size);
    if (!number)
        return;
    *name = escaped_names->names[*number].name;
    *size = escaped_names->names[*number].size;
}
