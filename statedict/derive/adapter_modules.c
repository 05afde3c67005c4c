/* Finds the modules that the settings of an adapter name: see adapter_modules.h. */
#include "statedict/derive/adapter_modules.h"

#include "base/text.h"

#include <string.h>
#include <strings.h>

enum { MOST_STATES = 1 << 20 };

static bool is_same(const fsdp_module_name *a, const fsdp_module_name *b)
{
    return a->size == b->size && memcmp(a->text, b->text, a->size) == 0;
}

static fsdp_status copy_name(fsdp_arena *arena, const char *text, size_t size,
                             fsdp_module_name *out, fsdp_error *err)
{
    *out = (fsdp_module_name){fsdp_arena_strndup(arena, text, size), size};
    return out->text ? FSDP_OK : fsdp_fail_memory(err, "a name");
}

/* --- numbers ------------------------------------------------------------------------------------ */

struct fsdp_module_number {
    fsdp_python_expression expression;
    char *key;
    size_t key_size;
    double number;
};

/* PEFT matches a key at the end of a module's name, as whole elements of it. */
static fsdp_status compile_key(const char *key, size_t size, fsdp_python_expression *out,
                               fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "(.*\\.)?(");
    fsdp_text_add(&text, key, size);
    fsdp_text_addf(&text, ")$");
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "an expression")
                                 : fsdp_python_compile(text.data, text.size, out, err);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status add_number(fsdp_json *json, const char *key, size_t size,
                              fsdp_module_numbers *numbers, fsdp_error *err)
{
    if (!fsdp_grow(&numbers->items, &numbers->room, numbers->count + 1, sizeof *numbers->items))
        return fsdp_fail_memory(err, "a pattern");
    struct fsdp_module_number *item = &numbers->items[numbers->count++];
    *item = (struct fsdp_module_number){.key = fsdp_strndup(key, size), .key_size = size};
    if (!item->key)
        return fsdp_fail_memory(err, "a pattern");
    FSDP_TRY(compile_key(item->key, size, &item->expression, err));
    numbers->states += item->expression.count;
    if (numbers->states > MOST_STATES)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has patterns of more than %d states together",
                         json->name, (int)MOST_STATES);
    return fsdp_json_f64(json, &item->number, err);
}

fsdp_status fsdp_module_numbers_read(fsdp_json *json, fsdp_module_numbers *numbers, fsdp_error *err)
{
    const char *key;
    size_t size;
    bool more;
    if (fsdp_json_peek(json) != FSDP_JSON_OBJECT)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(add_number(json, key, size, numbers, err));
    }
}

/* A dict of Python keeps the last number of a key that comes twice. */
static double number_of(const fsdp_module_numbers *numbers, size_t found)
{
    const struct fsdp_module_number *item = &numbers->items[found];
    double number = item->number;
    for (size_t i = found + 1; i < numbers->count; i++)
        if (numbers->items[i].key_size == item->key_size &&
            memcmp(numbers->items[i].key, item->key, item->key_size) == 0)
            number = numbers->items[i].number;
    return number;
}

fsdp_status fsdp_module_numbers_find(const fsdp_module_numbers *numbers,
                                     const fsdp_module_name *module, double *number,
                                     fsdp_error *err)
{
    for (size_t i = 0; i < numbers->count; i++) {
        bool matches = false;
        FSDP_TRY(fsdp_python_match(&numbers->items[i].expression, false, module->text, module->size,
                                   &matches, err));
        if (matches) {
            *number = number_of(numbers, i);
            return FSDP_OK;
        }
    }
    /* PEFT then takes the name itself for the key, which need not match itself. */
    for (size_t i = 0; i < numbers->count; i++)
        if (numbers->items[i].key_size == module->size &&
            memcmp(numbers->items[i].key, module->text, module->size) == 0)
            *number = numbers->items[i].number;
    return FSDP_OK;
}

void fsdp_module_numbers_release(fsdp_module_numbers *numbers)
{
    for (size_t i = 0; i < numbers->count; i++) {
        fsdp_python_release(&numbers->items[i].expression);
        fsdp_free(numbers->items[i].key);
    }
    fsdp_free(numbers->items);
    *numbers = (fsdp_module_numbers){0};
}

/* --- lists -------------------------------------------------------------------------------------- */

static fsdp_status add_name(fsdp_json *json, fsdp_module_list *list, fsdp_error *err)
{
    const char *text;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &text, &size, err));
    if (!fsdp_grow(&list->names, &list->room, list->count + 1, sizeof *list->names))
        return fsdp_fail_memory(err, "a name");
    FSDP_TRY(copy_name(&list->arena, text, size, &list->names[list->count], err));
    list->count++;
    return FSDP_OK;
}

static fsdp_status add_names(fsdp_json *json, fsdp_module_list *list, fsdp_error *err)
{
    bool more;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(add_name(json, list, err));
    }
}

/* A word of PEFT for what its own list of modules would be. */
static const char every_linear[] = "all-linear";

fsdp_status fsdp_module_list_read(fsdp_json *json, fsdp_module_list *list, fsdp_error *err)
{
    const char *text;
    size_t size;
    fsdp_json_kind kind = fsdp_json_peek(json);
    list->is_given = kind == FSDP_JSON_ARRAY || kind == FSDP_JSON_STRING;
    list->is_expression = kind == FSDP_JSON_STRING;
    if (kind == FSDP_JSON_ARRAY)
        return add_names(json, list, err);
    if (kind != FSDP_JSON_STRING)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_string(json, &text, &size, err));
    if (size == strlen(every_linear) && strncasecmp(text, every_linear, size) == 0) {
        list->is_given = false;
        return FSDP_OK;
    }
    return fsdp_python_compile(text, size, &list->expression, err);
}

/* True for "layers.0.q_proj" and the end "q_proj". */
static bool ends_in(const fsdp_module_name *module, const fsdp_module_name *end)
{
    size_t before = module->size > end->size ? module->size - end->size : 0;
    return before > 0 && module->text[before - 1] == '.' &&
           memcmp(module->text + before, end->text, end->size) == 0;
}

fsdp_status fsdp_module_list_has(const fsdp_module_list *list, const fsdp_module_name *module,
                                 bool *has_out, bool *is_end_out, fsdp_error *err)
{
    *has_out = *is_end_out = false;
    if (list->is_expression)
        return fsdp_python_match(&list->expression, true, module->text, module->size, has_out, err);
    for (size_t i = 0; i < list->count; i++) {
        *is_end_out = *is_end_out || ends_in(module, &list->names[i]);
        *has_out = *has_out || is_same(module, &list->names[i]);
    }
    *is_end_out = *is_end_out && !*has_out;
    *has_out = *has_out || *is_end_out;
    return FSDP_OK;
}

void fsdp_module_list_release(fsdp_module_list *list)
{
    fsdp_python_release(&list->expression);
    fsdp_free(list->names);
    fsdp_arena_release(&list->arena);
    *list = (fsdp_module_list){0};
}

/* --- layers ------------------------------------------------------------------------------------- */

static fsdp_status add_layer(fsdp_json *json, fsdp_module_layers *layers, fsdp_error *err)
{
    if (!fsdp_grow(&layers->numbers, &layers->room, layers->count + 1, sizeof *layers->numbers))
        return fsdp_fail_memory(err, "a layer");
    FSDP_TRY(fsdp_json_i64(json, &layers->numbers[layers->count], err));
    layers->count++;
    return FSDP_OK;
}

fsdp_status fsdp_module_layers_read(fsdp_json *json, fsdp_module_layers *layers, fsdp_error *err)
{
    bool more;
    if (fsdp_json_peek(json) == FSDP_JSON_NUMBER)
        return add_layer(json, layers, err);
    if (fsdp_json_peek(json) != FSDP_JSON_ARRAY)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(add_layer(json, layers, err));
    }
}

/* PEFT puts the names into an expression of its own, where one that is an expression may match several
 * numbers. */
fsdp_status fsdp_module_layers_read_above(fsdp_json *json, fsdp_module_layers *layers,
                                          fsdp_error *err)
{
    fsdp_module_list *above = &layers->above;
    if (fsdp_json_peek(json) == FSDP_JSON_STRING) {
        FSDP_TRY(add_name(json, above, err));
        above->count -= above->names[0].size == 0; /* as if it were not there */
    } else if (fsdp_json_peek(json) == FSDP_JSON_ARRAY)
        FSDP_TRY(add_names(json, above, err));
    else
        FSDP_TRY(fsdp_json_skip(json, err));
    for (size_t i = 0; i < above->count; i++) {
        char shown[100];
        const fsdp_module_name *name = &above->names[i];
        for (size_t j = 0; j < name->size; j++)
            if (name->text[j] == '\0' || strchr("\\^$*+?{}[]()|", name->text[j]))
                return fsdp_fail(err, FSDP_ERR_USAGE,
                                 "layers_pattern '%s' is an expression, which is not matched here: "
                                 "PEFT's merge_and_unload does",
                                 fsdp_printable(name->text, name->size, shown, sizeof shown));
    }
    return FSDP_OK;
}

/* The dot of an expression is any character. */
static bool is_above(const fsdp_module_name *name, const char *text, size_t size)
{
    size_t before = size - name->size;
    if (size < name->size || (before > 0 && text[before - 1] != '.'))
        return false;
    for (size_t i = 0; i < name->size; i++)
        if (name->text[i] != '.' && name->text[i] != text[before + i])
            return false;
    return true;
}

/* True when the number that begins at `from` counts layers: behind the name, or where that is NULL behind
 * two elements. */
static bool counts_layers(const fsdp_module_name *above, const fsdp_module_name *module,
                          size_t from)
{
    if (from == 0)
        return false;
    return above ? is_above(above, module->text, from - 1)
                 : memchr(module->text, '.', from - 1) != NULL;
}

/* The first element that is a number of a layer, in front of another element; -1: none. */
static int64_t layer_behind(const fsdp_module_name *above, const fsdp_module_name *module)
{
    for (size_t from = 0, end; from < module->size; from = end + 1) {
        const char *dot = memchr(module->text + from, '.', module->size - from);
        if (!dot)
            return -1;
        end = (size_t)(dot - module->text);
        int64_t number = 0;
        size_t at = from;
        for (; at < end && module->text[at] >= '0' && module->text[at] <= '9'; at++)
            number = number < INT32_MAX ? number * 10 + (module->text[at] - '0') : number;
        if (at == end && at > from && counts_layers(above, module, from))
            return number;
    }
    return -1;
}

static int64_t layer_of(const fsdp_module_layers *layers, const fsdp_module_name *module)
{
    int64_t layer = layers->above.count == 0 ? layer_behind(NULL, module) : -1;
    for (size_t i = 0; i < layers->above.count && layer < 0; i++)
        layer = layer_behind(&layers->above.names[i], module);
    return layer;
}

bool fsdp_module_layers_have(const fsdp_module_layers *layers, const fsdp_module_name *module)
{
    int64_t layer = layers->count > 0 ? layer_of(layers, module) : -1;
    bool is_there = layers->count == 0;
    for (size_t i = 0; i < layers->count; i++)
        is_there = is_there || (layer >= 0 && layers->numbers[i] == layer);
    return is_there;
}

void fsdp_module_layers_release(fsdp_module_layers *layers)
{
    fsdp_free(layers->numbers);
    fsdp_module_list_release(&layers->above);
    *layers = (fsdp_module_layers){0};
}
