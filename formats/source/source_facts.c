/* Facts that several files of a checkpoint state, compared by their text: see source_facts.h. */
#include "formats/source/source_facts.h"

#include "base/text.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { DEEPEST = 4, ITEMS_SHOWN = 64, TEXT_SHOWN = 120, TELLING = 2 };

struct fsdp_fact {
    const char *text, *file;
};

bool fsdp_fact_is_step(const char *name, size_t size)
{
    static const char *const at_top[] = {"iteration", "iter", "epoch", "world_size", NULL};
    static const char *const anywhere[] = {"step", "global_step", "global_steps", NULL};
    for (const char *const *word = at_top; *word; word++)
        if (fsdp_bytes_are(name, size, *word))
            return true;
    for (const char *const *word = anywhere; *word; word++) {
        size_t length = strlen(*word);
        if (fsdp_bytes_end(name, size, *word) && (size == length || name[size - length - 1] == '.'))
            return true;
    }
    return false;
}

bool fsdp_fact_tells(const char *data, size_t size, size_t element)
{
    int changes = 0;
    for (size_t at = element; at + element <= size && changes < TELLING; at += element)
        changes += memcmp(data + at - element, data + at, element) != 0;
    return changes == TELLING;
}

void fsdp_facts_release(fsdp_facts *facts)
{
    fsdp_free(facts->items);
    fsdp_name_table_release(&facts->names);
    fsdp_arena_release(&facts->arena);
    *facts = (fsdp_facts){0};
}

static void spell_number(double number, fsdp_text *text)
{
    const double whole = 9007199254740992.0;
    if (number == floor(number) && fabs(number) < whole) /* one file may count in floats */
        fsdp_text_addf(text, "%" PRId64, (int64_t)number);
    else if (isfinite(number))
        fsdp_text_add_f64(text, number);
    else
        fsdp_text_addf(text, "%f", number);
}

/* False: the value has no short text. */
static bool spell(const fsdp_value *value, int depth, fsdp_text *text)
{
    bool is_spelled = value->as.list.count <= ITEMS_SHOWN && depth < DEEPEST;
    switch (value->kind) {
    case FSDP_VALUE_NULL: fsdp_text_addf(text, "none"); return true;
    case FSDP_VALUE_BOOL: fsdp_text_addf(text, value->as.boolean ? "true" : "false"); return true;
    case FSDP_VALUE_I64: fsdp_text_addf(text, "%" PRId64, value->as.i64); return true;
    case FSDP_VALUE_U64: fsdp_text_addf(text, "%" PRIu64, value->as.u64); return true;
    case FSDP_VALUE_F64: spell_number(value->as.f64, text); return true;
    case FSDP_VALUE_STRING:
        fsdp_text_add_json_shown(text, value->as.bytes.data, value->as.bytes.size);
        return value->as.bytes.size <= TEXT_SHOWN;
    case FSDP_VALUE_LIST:
        fsdp_text_addf(text, "[");
        for (size_t i = 0; is_spelled && i < value->as.list.count; i++) {
            fsdp_text_addf(text, "%s", i > 0 ? ", " : "");
            is_spelled = spell(&value->as.list.items[i], depth + 1, text);
        }
        fsdp_text_addf(text, "]");
        return is_spelled;
    default: return false;
    }
}

static fsdp_status add(fsdp_facts *facts, const char *what, size_t what_size, const char *file,
                       const fsdp_text *text, fsdp_error *err)
{
    const char *name = fsdp_arena_strndup(&facts->arena, what, what_size);
    struct fsdp_fact fact = {.text = fsdp_arena_strndup(&facts->arena, text->data, text->size),
                             .file = fsdp_arena_strndup(&facts->arena, file, strlen(file))};
    if (!name || !fact.text || !fact.file ||
        !fsdp_grow(&facts->items, &facts->room, facts->count + 1, sizeof *facts->items) ||
        !fsdp_name_table_put(&facts->names, name, what_size, facts->count))
        return fsdp_fail_memory(err, "what the files of a checkpoint say");
    facts->items[facts->count++] = fact;
    return FSDP_OK;
}

static fsdp_status compare(const struct fsdp_fact *fact, const char *what, size_t what_size,
                           const char *file, const fsdp_text *text, fsdp_error *err)
{
    char shown[200];
    if (strcmp(fact->text, text->data) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' says that %s is %s, and '%s' says %s" FSDP_TWO_SAVES, fact->file,
                     fsdp_printable(what, what_size, shown, sizeof shown), fact->text, file,
                     text->data);
}

fsdp_status fsdp_facts_note(fsdp_facts *facts, const char *what, size_t what_size, const char *file,
                            const fsdp_value *value, fsdp_error *err)
{
    fsdp_text text = {0};
    bool is_spelled = spell(value, 0, &text);
    const uint64_t *known = fsdp_name_table_find(&facts->names, what, what_size);
    fsdp_status st = text.failed   ? fsdp_fail_memory(err, "what the files of a checkpoint say")
                     : !is_spelled ? FSDP_OK
                     : known ? compare(&facts->items[*known], what, what_size, file, &text, err)
                             : add(facts, what, what_size, file, &text, err);
    fsdp_text_release(&text);
    return st;
}
