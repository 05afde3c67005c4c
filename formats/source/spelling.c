/* The true names of what a format could not spell, read back. */
#include "formats/source/spelling.h"

#include "base/data/json.h"

void fsdp_spelling_release(fsdp_spelling *spelling)
{
    fsdp_free(spelling->names);
    fsdp_name_table_release(&spelling->table);
    fsdp_arena_release(&spelling->arena);
    *spelling = (fsdp_spelling){0};
}

static fsdp_status read_pairs(fsdp_spelling *spelling, fsdp_json *json, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        const char *key, *name;
        size_t key_size, size;
        bool more;
        FSDP_TRY(fsdp_json_next_key(json, &key, &key_size, &more, err));
        if (!more)
            return fsdp_json_finish(json, err);
        if (fsdp_name_table_find(&spelling->table, key, key_size))
            return fsdp_json_fail(json, err, "the same name stands here twice");
        const char *escaped = fsdp_arena_strndup(&spelling->arena, key, key_size);
        FSDP_TRY(fsdp_json_string(json, &name, &size, err));
        const char *kept = fsdp_arena_strndup(&spelling->arena, name, size);
        if (!escaped || !kept ||
            !fsdp_grow(&spelling->names, &spelling->room, spelling->count + 1,
                       sizeof *spelling->names) ||
            !fsdp_name_table_put(&spelling->table, escaped, key_size, spelling->count))
            return fsdp_fail_memory(err, json->name);
        spelling->names[spelling->count].name = kept;
        spelling->names[spelling->count++].size = size;
    }
}

fsdp_status fsdp_spelling_parse(fsdp_spelling *spelling, const char *path, const char *text,
                                size_t size, fsdp_error *err)
{
    fsdp_json json;
    fsdp_json_init(&json, text, size, path);
    fsdp_status status = read_pairs(spelling, &json, err);
    fsdp_json_release(&json);
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "the list of escaped names");
    return status;
}

void fsdp_spelling_resolve(const fsdp_spelling *spelling, const char **name, size_t *size)
{
    const uint64_t *number = fsdp_name_table_find(&spelling->table, *name, *size);
    if (!number)
        return;
    *name = spelling->names[*number].name;
    *size = spelling->names[*number].size;
}
