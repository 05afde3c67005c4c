/* Texts under unique keys: see text_pairs.h. */
#include "base/data/text_pairs.h"

#include <string.h>

void fsdp_text_pairs_release(fsdp_text_pairs *pairs)
{
    fsdp_free(pairs->items);
    fsdp_name_table_release(&pairs->keys);
    fsdp_arena_release(&pairs->arena);
    *pairs = (fsdp_text_pairs){0};
}

const fsdp_text_pair *fsdp_text_pairs_find(const fsdp_text_pairs *pairs, const char *key,
                                           size_t size)
{
    const uint64_t *number = fsdp_name_table_find(&pairs->keys, key, size);
    return number ? &pairs->items[*number] : NULL;
}

fsdp_status fsdp_text_pairs_add(fsdp_text_pairs *pairs, const fsdp_text_pair *pair, fsdp_error *err)
{
    fsdp_text_pair kept = {fsdp_arena_strndup(&pairs->arena, pair->key, pair->key_size),
                           fsdp_arena_strndup(&pairs->arena, pair->text, pair->text_size),
                           pair->key_size, pair->text_size};
    if (!kept.key || !kept.text ||
        !fsdp_grow(&pairs->items, &pairs->room, pairs->count + 1, sizeof *pairs->items) ||
        !fsdp_name_table_put(&pairs->keys, kept.key, kept.key_size, pairs->count))
        return fsdp_fail_memory(err, "metadata");
    pairs->items[pairs->count++] = kept;
    return FSDP_OK;
}

/* Takes the text of a key, which is valid until then. */
static fsdp_status take_text(fsdp_text_pairs *pairs, fsdp_json *json, const char *key, size_t size,
                             fsdp_error *err)
{
    if (fsdp_name_table_find(&pairs->keys, key, size))
        return fsdp_json_fail(json, err, "a key appears twice in the metadata");
    fsdp_text_pair pair = {.key = fsdp_arena_strndup(&pairs->arena, key, size), .key_size = size};
    if (!pair.key)
        return fsdp_fail_memory(err, "metadata");
    FSDP_TRY(fsdp_json_string(json, &pair.text, &pair.text_size, err));
    return fsdp_text_pairs_add(pairs, &pair, err);
}

fsdp_status fsdp_text_pairs_take(fsdp_text_pairs *pairs, fsdp_json *json, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        const char *key;
        size_t size;
        bool more;
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return FSDP_OK;
        if (pairs->count == FSDP_TEXT_PAIRS_MOST)
            return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has more than %d keys of metadata",
                             json->name, FSDP_TEXT_PAIRS_MOST);
        FSDP_TRY(take_text(pairs, json, key, size, err));
    }
}

fsdp_status fsdp_text_pairs_parse(fsdp_text_pairs *pairs, const char *text, const char *name,
                                  fsdp_error *err)
{
    fsdp_json json;
    fsdp_json_init(&json, text, strlen(text), name);
    fsdp_status st = fsdp_text_pairs_take(pairs, &json, err);
    if (st == FSDP_OK)
        st = fsdp_json_finish(&json, err);
    fsdp_json_release(&json);
    return st;
}

void fsdp_text_pairs_spell(const fsdp_text_pairs *pairs, fsdp_text *out)
{
    fsdp_text_addf(out, "{");
    for (size_t i = 0; i < pairs->count; i++) {
        const fsdp_text_pair *pair = &pairs->items[i];
        fsdp_text_addf(out, i > 0 ? ", " : "");
        fsdp_text_add_json_shown(out, pair->key, pair->key_size);
        fsdp_text_addf(out, ": ");
        fsdp_text_add_json_shown(out, pair->text, pair->text_size);
    }
    fsdp_text_addf(out, "}");
}
