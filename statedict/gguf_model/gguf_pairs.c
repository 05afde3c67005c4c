/* Lists of named values: see gguf_values.h. */
#include "base/core/mem.h"
#include "statedict/gguf_model/gguf_values.h"

#include <stdio.h>
#include <string.h>

void fsdp_gguf_spell_key(char name_out[FSDP_GGUF_KEY], const char *architecture, const char *key)
{
    const bool is_below = strncmp(key, "tokenizer.", strlen("tokenizer.")) != 0;
    snprintf(name_out, FSDP_GGUF_KEY, "%s%s%s", is_below ? architecture : "", is_below ? "." : "",
             key);
}

void fsdp_named_values_release(fsdp_named_values *values)
{
    for (size_t i = 0; i < values->count; i++) {
        fsdp_free(values->items[i].name);
        fsdp_value_release(&values->items[i].value);
    }
    fsdp_free(values->items);
    *values = (fsdp_named_values){0};
}

fsdp_status fsdp_named_values_add(fsdp_named_values *values, const char *name, fsdp_value *value,
                                  fsdp_error *err)
{
    char *copy = fsdp_strndup(name, strlen(name));
    if (!copy ||
        !fsdp_grow(&values->items, &values->capacity, values->count + 1, sizeof *values->items)) {
        fsdp_free(copy);
        fsdp_value_release(value);
        return fsdp_fail_memory(err, "key-value pairs");
    }
    values->items[values->count++] = (fsdp_named_value){copy, *value};
    *value = (fsdp_value){.kind = FSDP_VALUE_NULL};
    return FSDP_OK;
}

fsdp_status fsdp_named_values_add_text(fsdp_named_values *values, const char *name,
                                       const char *text, fsdp_error *err)
{
    fsdp_value value = {.kind = FSDP_VALUE_NULL};
    FSDP_TRY(fsdp_value_set_bytes(&value, FSDP_VALUE_STRING, text, strlen(text), err));
    return fsdp_named_values_add(values, name, &value, err);
}

const fsdp_value *fsdp_gguf_pair(const fsdp_sd *sd, const char *name)
{
    int64_t at = fsdp_sd_find(sd, name, strlen(name));
    const fsdp_entry *entry = at < 0 ? NULL : fsdp_sd_at(sd, (size_t)at);
    return entry && entry->kind == FSDP_ENTRY_VALUE ? &entry->value : NULL;
}
