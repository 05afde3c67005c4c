/* Reads adapter_config.json and finds the modules that it names: see adapter_config.h. */
#include "statedict/derive/adapter_config.h"
#include "base/data/json.h"
#include "base/text.h"
#include "formats/source.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

/* === modules ================================================================================== */

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
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "the patterns in '%s' need more than %d states together", json->name,
                         (int)MOST_STATES);
    return fsdp_json_f64(json, &item->number, err);
}

/* Takes an object of the JSON; null and the like stand for none. */
static fsdp_status module_numbers_read(fsdp_json *json, fsdp_module_numbers *numbers,
                                       fsdp_error *err)
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

/* Replaces *number by that of the first expression which matches; it stays when none does. */
static fsdp_status module_numbers_find(const fsdp_module_numbers *numbers,
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

static void module_numbers_release(fsdp_module_numbers *numbers)
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

/* Takes a string, which is an expression, or a list of names; anything else stands for none. */
static fsdp_status module_list_read(fsdp_json *json, fsdp_module_list *list, fsdp_error *err)
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

/* *is_end_out: a name of the list is only the end of the module's. */
static fsdp_status module_list_has(const fsdp_module_list *list, const fsdp_module_name *module,
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

static void module_list_release(fsdp_module_list *list)
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

/* Takes a number or a list of numbers. */
static fsdp_status module_layers_read(fsdp_json *json, fsdp_module_layers *layers, fsdp_error *err)
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

/* Takes the names in front of a number. FSDP_ERR_USAGE: one is an expression.
 * PEFT puts the names into an expression of its own, where one that is an expression may match several
 * numbers. */
static fsdp_status module_layers_read_above(fsdp_json *json, fsdp_module_layers *layers,
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
                                 "layers_pattern '%s' is an expression, which is not matched here; "
                                 "merge with PEFT's merge_and_unload",
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

/* True when the number that begins at `from` counts layers: after the name, or where that is NULL after
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

/* True also when no layers are named. */
static bool module_layers_have(const fsdp_module_layers *layers, const fsdp_module_name *module)
{
    int64_t layer = layers->count > 0 ? layer_of(layers, module) : -1;
    bool is_there = layers->count == 0;
    for (size_t i = 0; i < layers->count; i++)
        is_there = is_there || (layer >= 0 && layers->numbers[i] == layer);
    return is_there;
}

static void module_layers_release(fsdp_module_layers *layers)
{
    fsdp_free(layers->numbers);
    module_list_release(&layers->above);
    *layers = (fsdp_module_layers){0};
}

/* === the configuration ======================================================================== */

enum { CONFIG_MOST = 4 << 20 };

static fsdp_status read_flag(fsdp_json *json, bool *flag_out, fsdp_error *err)
{
    return fsdp_json_peek(json) == FSDP_JSON_BOOL ? fsdp_json_bool(json, flag_out, err)
                                                  : fsdp_json_skip(json, err);
}

static fsdp_status read_type(fsdp_json *json, fsdp_adapter_config *config, fsdp_error *err)
{
    const char *type;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &type, &size, err));
    config->is_lora = fsdp_bytes_are(type, size, "LORA");
    return FSDP_OK;
}

static fsdp_status read_start(fsdp_json *json, fsdp_adapter_config *config, fsdp_error *err)
{
    const char *word;
    size_t size;
    if (fsdp_json_peek(json) != FSDP_JSON_STRING)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_string(json, &word, &size, err));
    snprintf(config->start, sizeof config->start, "%.*s", (int)size, word);
    return FSDP_OK;
}

/* PEFT writes null or false for a variant that is not used. */
static fsdp_status read_variant(fsdp_json *json, fsdp_adapter_config *config, const char *name,
                                fsdp_error *err)
{
    bool is_used = fsdp_json_peek(json) != FSDP_JSON_NULL;
    FSDP_TRY(fsdp_json_peek(json) == FSDP_JSON_BOOL ? fsdp_json_bool(json, &is_used, err)
                                                    : fsdp_json_skip(json, err));
    config->variant = is_used ? name : config->variant;
    return FSDP_OK;
}

/* Layers that are used several times make another model. */
static fsdp_status read_replication(fsdp_json *json, fsdp_adapter_config *config, const char *name,
                                    fsdp_error *err)
{
    bool more;
    if (fsdp_json_peek(json) != FSDP_JSON_ARRAY)
        return read_variant(json, config, name, err);
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        config->variant = name;
        FSDP_TRY(fsdp_json_skip(json, err));
    }
}

static fsdp_status read_members(fsdp_json *json, fsdp_adapter_config *config, fsdp_error *err)
{
    static const char *const names[] = {"peft_type",
                                        "lora_alpha",
                                        "alpha_pattern",
                                        "use_rslora",
                                        "fan_in_fan_out",
                                        "init_lora_weights",
                                        "ensure_weight_tying",
                                        "r",
                                        "rank_pattern",
                                        "target_modules",
                                        "exclude_modules",
                                        "layers_to_transform",
                                        "layers_pattern",
                                        "use_dora",
                                        "layer_replication",
                                        "use_qalora",
                                        "alora_invocation_tokens",
                                        "arrow_config",
                                        "kasa_config",
                                        "monteclora_config",
                                        "use_bdlora"};
    fsdp_json_members members = {.names = names, .count = sizeof names / sizeof *names};
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        switch (which) {
        case 0: FSDP_TRY(read_type(json, config, err)); break;
        case 1: FSDP_TRY(fsdp_json_f64(json, &config->alpha, err)); break;
        case 2: FSDP_TRY(module_numbers_read(json, &config->alphas, err)); break;
        case 3: FSDP_TRY(read_flag(json, &config->divides_by_root, err)); break;
        case 4: FSDP_TRY(read_flag(json, &config->is_transposed, err)); break;
        case 5: FSDP_TRY(read_start(json, config, err)); break;
        case 6: FSDP_TRY(read_flag(json, &config->ties_weights, err)); break;
        case 7: FSDP_TRY(fsdp_json_f64(json, &config->rank, err)); break;
        case 8: FSDP_TRY(module_numbers_read(json, &config->ranks, err)); break;
        case 9: FSDP_TRY(module_list_read(json, &config->targets, err)); break;
        case 10: FSDP_TRY(module_list_read(json, &config->excluded, err)); break;
        case 11: FSDP_TRY(module_layers_read(json, &config->layers, err)); break;
        case 12: FSDP_TRY(module_layers_read_above(json, &config->layers, err)); break;
        case 13: FSDP_TRY(read_flag(json, &config->has_lengths, err)); break;
        case 14: FSDP_TRY(read_replication(json, config, names[which], err)); break;
        case -1: return fsdp_json_finish(json, err);
        default: FSDP_TRY(read_variant(json, config, names[which], err));
        }
    }
}

/* With these starts PEFT takes the adapter's first product out of the weights of the base, also when it loads
 * the adapter later. */
static bool start_changes_base(const char *start)
{
    static const char *const begins[] = {"pissa", "corda", "olora", "loftq", "lora_ga"};
    for (size_t i = 0; i < sizeof begins / sizeof *begins; i++)
        if (strncasecmp(start, begins[i], strlen(begins[i])) == 0)
            return true;
    return false;
}

static fsdp_status check_kind(const fsdp_adapter_config *config, const char *path, fsdp_error *err)
{
    char shown[100];
    if (!config->is_lora)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "'%s' belongs to an adapter that is not a LoRA; merge it with PEFT's merge_and_unload",
            path);
    if (config->variant)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has %s, a variant of LoRA that is not merged here; use PEFT's "
                         "merge_and_unload, which merges it or says why it cannot",
                         path, config->variant);
    if (start_changes_base(config->start))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' says init_lora_weights '%s', with which PEFT also changes the base; "
                         "merge the adapter with PEFT's merge_and_unload, or make it a plain "
                         "adapter with PEFT's path_initial_model_for_weight_conversion",
                         path,
                         fsdp_printable(config->start, strlen(config->start), shown, sizeof shown));
    return FSDP_OK;
}

fsdp_status fsdp_adapter_config_read(fsdp_io *io, const char *dir, fsdp_adapter_config *config,
                                     fsdp_error *err)
{
    char *text = NULL, *path = fsdp_path_join(dir, "adapter_config.json");
    size_t size = 0;
    fsdp_json json;
    *config = (fsdp_adapter_config){.alpha = 8, .rank = 8}; /* PEFT's defaults */
    fsdp_status st = path ? fsdp_source_read_file(io, path, CONFIG_MOST, &text, &size, err)
                          : fsdp_fail_memory(err, "a path");
    if (st == FSDP_OK) {
        fsdp_json_init(&json, text, size, path);
        st = read_members(&json, config, err);
        fsdp_json_release(&json);
    }
    if (st == FSDP_OK)
        st = check_kind(config, path, err);
    fsdp_free(text);
    fsdp_free(path);
    return st;
}

void fsdp_adapter_config_release(fsdp_adapter_config *config)
{
    module_numbers_release(&config->alphas);
    module_numbers_release(&config->ranks);
    module_list_release(&config->targets);
    module_list_release(&config->excluded);
    module_layers_release(&config->layers);
    *config = (fsdp_adapter_config){0};
}

/* --- one module --------------------------------------------------------------------------------- */

/* PEFT puts an adapter into modules that the targets name, in the layers, and that are not excluded. */
static fsdp_status check_target(const fsdp_adapter_config *config, const fsdp_module_name *module,
                                fsdp_error *err)
{
    bool is_target = true, is_excluded, is_end = false;
    FSDP_TRY(module_list_has(&config->excluded, module, &is_excluded, &is_end, err));
    if (config->targets.is_given)
        FSDP_TRY(module_list_has(&config->targets, module, &is_target, &is_end, err));
    const char *member =
        is_excluded  ? "exclude_modules"
        : !is_target ? "target_modules"
        : config->targets.is_given && is_end && !module_layers_have(&config->layers, module)
            ? "layers_to_transform"
            : NULL;
    return member ? fsdp_fail(err, FSDP_ERR_DAMAGED,
                              "the adapter has a product for it, and %s of adapter_config.json "
                              "leave%s it out: PEFT would not load the product",
                              member, is_excluded || !is_target ? "" : "s")
                  : FSDP_OK;
}

fsdp_status fsdp_adapter_factor(const fsdp_adapter_config *config,
                                const fsdp_adapter_module *module, double *factor_out,
                                fsdp_error *err)
{
    double alpha = config->alpha, rank = config->rank;
    FSDP_TRY(check_target(config, &module->name, err));
    FSDP_TRY(module_numbers_find(&config->alphas, &module->name, &alpha, err));
    FSDP_TRY(module_numbers_find(&config->ranks, &module->name, &rank, err));
    if (rank != (double)module->rank)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "its product has the rank %" PRId64
                         ", but adapter_config.json says %g (r, rank_pattern)",
                         module->rank, rank);
    if (config->has_lengths != module->has_lengths)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         config->has_lengths
                             ? "adapter_config.json says use_dora, but the adapter has no "
                               "magnitudes (lora_magnitude_vector) for it"
                             : "the adapter has magnitudes (lora_magnitude_vector) for it, but "
                               "adapter_config.json does not say use_dora");
    *factor_out = alpha / (config->divides_by_root ? sqrt(rank) : rank);
    return FSDP_OK;
}
