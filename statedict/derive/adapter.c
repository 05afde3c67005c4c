/* Merges an adapter into a model, as its settings (adapter_config.json) say: see adapter.h. */
#include "statedict/derive/adapter.h"
#include "base/data/json.h"
#include "base/text.h"
#include "formats/frameworks.h"
#include "formats/source.h"
#include "statedict/derive/derived_checkpoint.h"
#include "statedict/derive/derived_product.h"
#include "statedict/derive/python_expression.h"
#include "statedict/run/hub_cache.h"
#include "statedict/run/remote_path.h"
#include "statedict/sd/meter.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

/* === settings ================================================================================= */

/*
 * The modules that adapter_config.json names: by expressions of Python, by ends of names, by layers. A module
 * is matched by the name that it has in the model, as PEFT does.
 */

/* A module's name as bytes. */
typedef struct module_name {
    const char *text;
    size_t size;
} module_name;

typedef struct module_number {
    fsdp_python_expression expression;
    char *key;
    size_t key_size;
    double number;
} module_number;

/* Numbers for the modules that expressions match: alpha_pattern, rank_pattern. */
typedef struct module_numbers {
    fsdp_arena arena;
    module_number *items;
    size_t count, room;
    size_t states; /* of all expressions: memory and time are bounded */
} module_numbers;

/* Names of modules, or of their ends, or an expression for whole names: target_modules, exclude_modules. */
typedef struct module_list {
    fsdp_arena arena;
    module_name *names;
    size_t count, room;
    fsdp_python_expression expression;
    bool is_given, is_expression;
} module_list;

/* Layers of a model by their numbers: layers_to_transform, layers_pattern. */
typedef struct module_layers {
    int64_t *numbers;
    size_t count, room;
    module_list above; /* names in front of a layer's number; none: any */
} module_layers;

/* The settings. */
typedef struct adapter_config {
    double alpha, rank;            /* lora_alpha, r: of the modules that no pattern matches */
    module_numbers alphas, ranks;  /* alpha_pattern, rank_pattern */
    module_list targets, excluded; /* target_modules, exclude_modules */
    module_layers layers;          /* layers_to_transform, layers_pattern */
    bool divides_by_root;          /* use_rslora: the factor is alpha / sqrt(rank) */
    bool is_transposed;            /* fan_in_fan_out */
    bool is_lora;                  /* peft_type */
    bool has_lengths;              /* use_dora: each product comes with magnitudes */
    bool ties_weights;   /* ensure_weight_tying: a tied weight is trained with the other one */
    char start[24];      /* init_lora_weights, if it is a word */
    const char *variant; /* a member that asks for another product than LoRA's; NULL: none */
} adapter_config;

enum { MOST_STATES = 1 << 20 };

static bool is_same(const module_name *a, const module_name *b)
{
    return a->size == b->size && memcmp(a->text, b->text, a->size) == 0;
}

static fsdp_status copy_name(fsdp_arena *arena, const char *text, size_t size, module_name *out,
                             fsdp_error *err)
{
    *out = (module_name){fsdp_arena_strndup(arena, text, size), size};
    return out->text ? FSDP_OK : fsdp_fail_memory(err, "a name");
}

/* --- numbers ------------------------------------------------------------------------------------ */

/* PEFT matches a key at the end of a module's name, as whole elements of it. */
static fsdp_status compile_key(fsdp_arena *arena, const char *key, size_t size,
                               fsdp_python_expression *out, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "(.*\\.)?(");
    fsdp_text_add(&text, key, size);
    fsdp_text_addf(&text, ")$");
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "an expression")
                                 : fsdp_python_compile(arena, text.data, text.size, out, err);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status add_number(fsdp_json *json, const char *key, size_t size,
                              module_numbers *numbers, fsdp_error *err)
{
    if (!fsdp_grow(&numbers->items, &numbers->room, numbers->count + 1, sizeof *numbers->items))
        return fsdp_fail_memory(err, "a pattern");
    module_number *item = &numbers->items[numbers->count++];
    *item =
        (module_number){.key = fsdp_arena_strndup(&numbers->arena, key, size), .key_size = size};
    if (!item->key)
        return fsdp_fail_memory(err, "a pattern");
    FSDP_TRY(compile_key(&numbers->arena, item->key, size, &item->expression, err));
    numbers->states += item->expression.count;
    if (numbers->states > MOST_STATES)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "the patterns in '%s' need more than %d states together", json->name,
                         (int)MOST_STATES);
    return fsdp_json_f64(json, &item->number, err);
}

/* Takes an object of the JSON; null and the like stand for none. */
static fsdp_status module_numbers_read(fsdp_json *json, module_numbers *numbers, fsdp_error *err)
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
static double number_of(const module_numbers *numbers, size_t found)
{
    const module_number *item = &numbers->items[found];
    double number = item->number;
    for (size_t i = found + 1; i < numbers->count; i++)
        if (numbers->items[i].key_size == item->key_size &&
            memcmp(numbers->items[i].key, item->key, item->key_size) == 0)
            number = numbers->items[i].number;
    return number;
}

/* Replaces *number by that of the first expression which matches; it stays when none does. */
static fsdp_status module_numbers_find(const module_numbers *numbers, const module_name *module,
                                       double *number, fsdp_error *err)
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

static void module_numbers_release(module_numbers *numbers)
{
    fsdp_free(numbers->items);
    fsdp_arena_release(&numbers->arena);
    *numbers = (module_numbers){0};
}

/* --- lists -------------------------------------------------------------------------------------- */

static fsdp_status add_name(fsdp_json *json, module_list *list, fsdp_error *err)
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

static fsdp_status add_names(fsdp_json *json, module_list *list, fsdp_error *err)
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
static fsdp_status module_list_read(fsdp_json *json, module_list *list, fsdp_error *err)
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
    return fsdp_python_compile(&list->arena, text, size, &list->expression, err);
}

/* True for "layers.0.q_proj" and the end "q_proj". */
static bool ends_in(const module_name *module, const module_name *end)
{
    size_t before = module->size > end->size ? module->size - end->size : 0;
    return before > 0 && module->text[before - 1] == '.' &&
           memcmp(module->text + before, end->text, end->size) == 0;
}

/* *is_end_out: a name of the list is only the end of the module's. */
static fsdp_status module_list_has(const module_list *list, const module_name *module,
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

static void module_list_release(module_list *list)
{
    fsdp_free(list->names);
    fsdp_arena_release(&list->arena);
    *list = (module_list){0};
}

/* --- layers ------------------------------------------------------------------------------------- */

static fsdp_status add_layer(fsdp_json *json, module_layers *layers, fsdp_error *err)
{
    if (!fsdp_grow(&layers->numbers, &layers->room, layers->count + 1, sizeof *layers->numbers))
        return fsdp_fail_memory(err, "a layer");
    FSDP_TRY(fsdp_json_i64(json, &layers->numbers[layers->count], err));
    layers->count++;
    return FSDP_OK;
}

/* Takes a number or a list of numbers. */
static fsdp_status module_layers_read(fsdp_json *json, module_layers *layers, fsdp_error *err)
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
static fsdp_status module_layers_read_above(fsdp_json *json, module_layers *layers, fsdp_error *err)
{
    module_list *above = &layers->above;
    if (fsdp_json_peek(json) == FSDP_JSON_STRING) {
        FSDP_TRY(add_name(json, above, err));
        above->count -= above->names[0].size == 0; /* as if it were not there */
    } else if (fsdp_json_peek(json) == FSDP_JSON_ARRAY)
        FSDP_TRY(add_names(json, above, err));
    else
        FSDP_TRY(fsdp_json_skip(json, err));
    for (size_t i = 0; i < above->count; i++) {
        char shown[100];
        const module_name *name = &above->names[i];
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
static bool is_above(const module_name *name, const char *text, size_t size)
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
static bool counts_layers(const module_name *above, const module_name *module, size_t from)
{
    if (from == 0)
        return false;
    return above ? is_above(above, module->text, from - 1)
                 : memchr(module->text, '.', from - 1) != NULL;
}

/* The first element that is a number of a layer, in front of another element; -1: none. */
static int64_t layer_behind(const module_name *above, const module_name *module)
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

static int64_t layer_of(const module_layers *layers, const module_name *module)
{
    int64_t layer = layers->above.count == 0 ? layer_behind(NULL, module) : -1;
    for (size_t i = 0; i < layers->above.count && layer < 0; i++)
        layer = layer_behind(&layers->above.names[i], module);
    return layer;
}

/* True also when no layers are named. */
static bool module_layers_have(const module_layers *layers, const module_name *module)
{
    int64_t layer = layers->count > 0 ? layer_of(layers, module) : -1;
    bool is_there = layers->count == 0;
    for (size_t i = 0; i < layers->count; i++)
        is_there = is_there || (layer >= 0 && layers->numbers[i] == layer);
    return is_there;
}

static void module_layers_release(module_layers *layers)
{
    fsdp_free(layers->numbers);
    module_list_release(&layers->above);
    *layers = (module_layers){0};
}

/* --- the members ------------------------------------------------------------------------------ */

enum { CONFIG_MOST = 4 << 20 };

static fsdp_status read_flag(fsdp_json *json, bool *flag_out, fsdp_error *err)
{
    return fsdp_json_peek(json) == FSDP_JSON_BOOL ? fsdp_json_bool(json, flag_out, err)
                                                  : fsdp_json_skip(json, err);
}

static fsdp_status read_type(fsdp_json *json, adapter_config *config, fsdp_error *err)
{
    const char *type;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &type, &size, err));
    config->is_lora = fsdp_bytes_are(type, size, "LORA");
    return FSDP_OK;
}

static fsdp_status read_start(fsdp_json *json, adapter_config *config, fsdp_error *err)
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
static fsdp_status read_variant(fsdp_json *json, adapter_config *config, const char *name,
                                fsdp_error *err)
{
    bool is_used = fsdp_json_peek(json) != FSDP_JSON_NULL;
    FSDP_TRY(fsdp_json_peek(json) == FSDP_JSON_BOOL ? fsdp_json_bool(json, &is_used, err)
                                                    : fsdp_json_skip(json, err));
    config->variant = is_used ? name : config->variant;
    return FSDP_OK;
}

/* Layers that are used several times make another model. */
static fsdp_status read_replication(fsdp_json *json, adapter_config *config, const char *name,
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

static fsdp_status read_members(fsdp_json *json, adapter_config *config, fsdp_error *err)
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

static fsdp_status check_kind(const adapter_config *config, const char *path, fsdp_error *err)
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

/* Reads DIR/adapter_config.json. Release the config after a failure, too. */
static fsdp_status read_config(fsdp_io *io, const char *dir, adapter_config *config,
                               fsdp_error *err)
{
    char *text = NULL, *path = fsdp_path_join(dir, "adapter_config.json");
    size_t size = 0;
    fsdp_json json;
    *config = (adapter_config){.alpha = 8, .rank = 8}; /* PEFT's defaults */
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

static void release_config(adapter_config *config)
{
    module_numbers_release(&config->alphas);
    module_numbers_release(&config->ranks);
    module_list_release(&config->targets);
    module_list_release(&config->excluded);
    module_layers_release(&config->layers);
    *config = (adapter_config){0};
}

/* --- one module --------------------------------------------------------------------------------- */

/* PEFT puts an adapter into modules that the targets name, in the layers, and that are not excluded. */
static fsdp_status check_target(const adapter_config *config, const module_name *module,
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

typedef struct adapter_module {
    module_name name;
    int64_t rank;
    bool has_lengths;
} adapter_module;

/* Compares what the adapter has for a module with the settings, and finds the factor of its product.
 * FSDP_ERR_DAMAGED: PEFT would not put an adapter there, or one of another rank or kind. */
static fsdp_status find_factor(const adapter_config *config, const adapter_module *module,
                               double *factor_out, fsdp_error *err)
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

/* === merging ================================================================================== */

typedef struct adapter_merge {
    adapter_config config;
    fsdp_checkpoint *adapter;
    fsdp_derivation *derivation;
    const fsdp_sd *base;
    bool *is_used;     /* per entry of the adapter */
    int64_t tied;      /* of the base: the embedding that is the output, too; -1: none */
    bool lacks_memory; /* a name could not be made, so what find() said does not count */
    fsdp_adapter_report report;
} adapter_merge;

/* --- names ---------------------------------------------------------------------------------------- */

/* The adapter's entry of a module, with an end; -1: none. PEFT's models wrap the model twice. */
static int64_t find(adapter_merge *merge, const char *module, size_t size, const char *end)
{
    static const char *const prefixes[] = {"base_model.model.", ""};
    const fsdp_sd *sd = merge->adapter->manifest.sd;
    int64_t entry = -1;
    for (int i = 0; i < 2 && entry < 0; i++) {
        fsdp_text name = {0};
        fsdp_text_addf(&name, "%s", prefixes[i]);
        fsdp_text_add(&name, module, size);
        fsdp_text_addf(&name, "%s", end);
        merge->lacks_memory = merge->lacks_memory || name.failed;
        if (!name.failed)
            entry = fsdp_sd_find(sd, name.data, name.size);
        fsdp_text_release(&name);
    }
    return entry >= 0 && fsdp_sd_at(sd, (size_t)entry)->kind != FSDP_ENTRY_VALUE ? entry : -1;
}

/* The node of one of an adapter's tensors of a module; *out stays NULL when there is none. */
static fsdp_status find_part(adapter_merge *merge, const char *module, size_t size,
                             const char *const *ends, const fsdp_derived **out, fsdp_error *err)
{
    for (; *ends && !*out; ends++) {
        int64_t entry = find(merge, module, size, *ends);
        if (entry < 0)
            continue;
        FSDP_TRY(fsdp_derive_stored(fsdp_derivation_arena(merge->derivation), merge->adapter,
                                    (size_t)entry, out, err));
        merge->is_used[entry] = true;
    }
    return merge->lacks_memory ? fsdp_fail_memory(err, "a name") : FSDP_OK;
}

/* --- one weight ------------------------------------------------------------------------------------- */

static const int swapped[2] = {1, 0};

typedef struct module_parts {
    const fsdp_derived *a, *b, *magnitudes;
    bool is_embedding;
} module_parts;

static fsdp_status find_parts(adapter_merge *merge, const char *module, size_t size,
                              module_parts *parts, fsdp_error *err)
{
    static const char *const a[] = {".lora_A.weight", ".lora_A.default.weight", NULL};
    static const char *const b[] = {".lora_B.weight", ".lora_B.default.weight", NULL};
    static const char *const embedding_a[] = {".lora_embedding_A", ".lora_embedding_A.default",
                                              NULL};
    static const char *const embedding_b[] = {".lora_embedding_B", ".lora_embedding_B.default",
                                              NULL};
    static const char *const lengths[] = {".lora_magnitude_vector", ".lora_magnitude_vector.weight",
                                          ".lora_magnitude_vector.default.weight",
                                          ".lora_magnitude_vector.default", NULL};
    *parts = (module_parts){0};
    FSDP_TRY(find_part(merge, module, size, a, &parts->a, err));
    FSDP_TRY(find_part(merge, module, size, b, &parts->b, err));
    if (!parts->a && !parts->b) {
        FSDP_TRY(find_part(merge, module, size, embedding_a, &parts->a, err));
        FSDP_TRY(find_part(merge, module, size, embedding_b, &parts->b, err));
        parts->is_embedding = parts->a != NULL;
    }
    FSDP_TRY(find_part(merge, module, size, lengths, &parts->magnitudes, err));
    if (!parts->a == !parts->b)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' has one matrix of the pair for '%.*s', not both",
                     merge->adapter->path, (int)size, module);
}

/* True when the product has the dims of the weight as it is, or with its dims swapped. */
static bool fits(const int64_t *shape, const module_parts *parts, bool is_swapped)
{
    return parts->b->shape[0] == shape[is_swapped] && parts->a->shape[1] == shape[!is_swapped];
}

/* A model has linear modules of both kinds, and PEFT stores the kind of the last one that the adapter wraps
 * (fan_in_fan_out). So the dims decide, and fan_in_fan_out where they are equal. */
static bool is_transposed(const adapter_merge *merge, const fsdp_derived *weight,
                          const module_parts *parts)
{
    bool is_matrix = weight->ndim == 2, as_it_is = is_matrix && fits(weight->shape, parts, false),
         turned = is_matrix && fits(weight->shape, parts, true);
    return parts->is_embedding || (as_it_is == turned ? merge->config.is_transposed : turned);
}

/* [out, in] of a weight that is stored as [in, out], and back. */
static fsdp_status merge_pair(adapter_merge *merge, const fsdp_derived *weight,
                              const module_parts *parts, const fsdp_low_rank *pair,
                              const fsdp_derived **out, fsdp_error *err)
{
    fsdp_arena *arena = fsdp_derivation_arena(merge->derivation);
    bool turns = is_transposed(merge, weight, parts);
    if (turns && weight->ndim == 2)
        FSDP_TRY(fsdp_derive_permute(arena, weight, swapped, &weight, err));
    FSDP_TRY(fsdp_derive_low_rank(arena, weight, pair, out, err));
    return turns ? fsdp_derive_permute(arena, *out, swapped, out, err) : FSDP_OK;
}

/* DoRA: the sum's rows get the trained lengths. They are computed in f32. */
static fsdp_status merge_lengths(adapter_merge *merge, const fsdp_derived *weight,
                                 const module_parts *parts, const fsdp_low_rank *pair,
                                 const fsdp_derived **out, fsdp_error *err)
{
    fsdp_arena *arena = fsdp_derivation_arena(merge->derivation);
    fsdp_dtype dtype = weight->dtype;
    bool turns = is_transposed(merge, weight, parts);
    if (turns && weight->ndim == 2)
        FSDP_TRY(fsdp_derive_permute(arena, weight, swapped, &weight, err));
    FSDP_TRY(fsdp_derive_cast(arena, weight, FSDP_F32, &weight, err));
    FSDP_TRY(fsdp_derive_low_rank(arena, weight, pair, out, err));
    FSDP_TRY(fsdp_derive_row_lengths(arena, *out, parts->magnitudes, out, err));
    FSDP_TRY(fsdp_derive_cast(arena, *out, dtype, out, err));
    return turns ? fsdp_derive_permute(arena, *out, swapped, out, err) : FSDP_OK;
}

static fsdp_status merge_module(adapter_merge *merge, const fsdp_derived *weight,
                                fsdp_derived_name module, const module_parts *parts,
                                const fsdp_derived **out, fsdp_error *err)
{
    if (parts->a->ndim != 2 || parts->b->ndim != 2)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "an adapter of a convolution cannot be merged here; merge it with PEFT's "
                         "merge_and_unload");
    const adapter_module found = {.name = {module.text, module.size},
                                  .rank = parts->a->shape[0],
                                  .has_lengths = parts->magnitudes != NULL};
    fsdp_low_rank pair = {.b = parts->b, .a = parts->a};
    FSDP_TRY(find_factor(&merge->config, &found, &pair.factor, err));
    merge->report.merged++;
    if (!parts->magnitudes)
        return merge_pair(merge, weight, parts, &pair, out, err);
    if (parts->is_embedding)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "an embedding with DoRA cannot be merged here; merge it with PEFT's merge_and_unload");
    return merge_lengths(merge, weight, parts, &pair, out, err);
}

/* --- all of them -------------------------------------------------------------------------------------- */

/* The adapter's own tensor for one of the model, which was trained whole or belongs to a module that the
 * adapter wraps: a bias, or an embedding's weight. *out stays NULL when there is none. */
static fsdp_status find_whole(adapter_merge *merge, fsdp_derived_name name,
                              const fsdp_derived **out, fsdp_error *err)
{
    static const char *const whole[] = {"", NULL};
    static const char *const ends[] = {".weight", ".bias"};
    FSDP_TRY(find_part(merge, name.text, name.size, whole, out, err));
    for (int i = 0; i < 2 && !*out; i++) {
        size_t size = strlen(ends[i]);
        const char *const wrapped[] = {i == 0 ? ".base_layer.weight" : ".base_layer.bias", NULL};
        if (name.size > size && fsdp_bytes_end(name.text, name.size, ends[i]))
            FSDP_TRY(find_part(merge, name.text, name.size - size, wrapped, out, err));
    }
    return FSDP_OK;
}

/* The sum of a tensor, or of the base's where *tensor is NULL, and the product of a module. */
static fsdp_status merge_stored(adapter_merge *merge, size_t number, fsdp_derived_name module,
                                const module_parts *parts, const fsdp_derived **tensor,
                                fsdp_error *err)
{
    if (!*tensor)
        FSDP_TRY(fsdp_derive_stored(fsdp_derivation_arena(merge->derivation),
                                    fsdp_derivation_base(merge->derivation), number, tensor, err));
    fsdp_status st = merge_module(merge, *tensor, module, parts, tensor, err);
    if (st != FSDP_OK)
        fsdp_error_prefix(err, "'%.*s'", (int)module.size, module.text);
    return st;
}

/* --- an output that the base ties to its embedding -------------------------------------------------- */

static const char output_module[] = "lm_head";
static const fsdp_derived_name output = {"lm_head.weight", sizeof "lm_head.weight" - 1};

static int64_t find_tensor(const fsdp_sd *sd, const char *name)
{
    int64_t entry = fsdp_sd_find(sd, name, strlen(name));
    bool is_tensor = entry >= 0 && fsdp_sd_at(sd, (size_t)entry)->kind == FSDP_ENTRY_TENSOR;
    return is_tensor ? entry : -1;
}

static int64_t find_tied(const fsdp_sd *sd)
{
    static const char *const embeddings[] = {"model.embed_tokens.weight", "transformer.wte.weight"};
    static const char *const outputs[] = {"lm_head.weight", "score.weight", "classifier.weight"};
    int64_t embedding = -1;
    for (size_t i = 0; i < sizeof embeddings / sizeof *embeddings && embedding < 0; i++)
        embedding = find_tensor(sd, embeddings[i]);
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++)
        if (find_tensor(sd, outputs[i]) >= 0)
            return -1;
    return embedding;
}

/* The output's part of a sum: the adapter's product on the tensor, or on the base's where *tensor is NULL. */
static fsdp_status merge_output(adapter_merge *merge, const fsdp_derived **tensor, fsdp_error *err)
{
    const fsdp_derived_name module = {output_module, sizeof output_module - 1};
    module_parts parts = {0};
    FSDP_TRY(find_parts(merge, module.text, module.size, &parts, err));
    if (!parts.a)
        return FSDP_OK;
    if (!*tensor)
        FSDP_TRY(find_whole(merge, output, tensor, err));
    return merge_stored(merge, (size_t)merge->tied, module, &parts, tensor, err);
}

/* The adapter's own tensor of a module that has no product; *is_whole_out tells whether there is one. */
static fsdp_status find_trained(adapter_merge *merge, fsdp_derived_name name, bool *is_whole_out,
                                fsdp_error *err)
{
    const fsdp_derived *tensor = NULL;
    module_parts parts = {0};
    FSDP_TRY(find_whole(merge, name, &tensor, err));
    FSDP_TRY(find_parts(merge, name.text, name.size - (sizeof ".weight" - 1), &parts, err));
    *is_whole_out = tensor && !parts.a;
    return FSDP_OK;
}

/* An embedding or an output that was trained whole is no longer the other one, unless PEFT was told to keep
 * them tied. */
static fsdp_status find_untied(adapter_merge *merge, fsdp_error *err)
{
    bool has_embedding = false, has_output = false;
    merge->tied = find_tied(merge->base);
    if (merge->tied < 0)
        return FSDP_OK;
    const fsdp_entry *entry = fsdp_sd_at(merge->base, (size_t)merge->tied);
    FSDP_TRY(find_trained(merge, (fsdp_derived_name){entry->name, entry->name_size}, &has_embedding,
                          err));
    FSDP_TRY(find_trained(merge, output, &has_output, err));
    merge->report.unties = (has_embedding || has_output) && !merge->config.ties_weights;
    merge->report.replaced += has_output && merge->report.unties;
    return FSDP_OK;
}

/* An output that was not trained whole keeps the base's numbers. */
static fsdp_status add_output(adapter_merge *merge, fsdp_error *err)
{
    const fsdp_derived *tensor = NULL;
    if (!merge->report.unties)
        return FSDP_OK;
    FSDP_TRY(find_whole(merge, output, &tensor, err));
    FSDP_TRY(merge_output(merge, &tensor, err));
    if (!tensor)
        FSDP_TRY(fsdp_derive_stored(fsdp_derivation_arena(merge->derivation),
                                    fsdp_derivation_base(merge->derivation), (size_t)merge->tied,
                                    &tensor, err));
    return fsdp_derivation_add(merge->derivation, output, tensor, err);
}

/* --- the model -------------------------------------------------------------------------------------- */

/* Finds what the adapter makes of a tensor of the model; *out stays NULL where it makes nothing. */
static fsdp_status merge_tensor(adapter_merge *merge, size_t number, fsdp_derived_name name,
                                const fsdp_derived **out, fsdp_error *err)
{
    static const char suffix[] = ".weight";
    bool is_weight = name.size > sizeof suffix - 1 && fsdp_bytes_end(name.text, name.size, suffix);
    module_parts parts = {0};
    const fsdp_derived_name module = {name.text,
                                      is_weight ? name.size - (sizeof suffix - 1) : name.size};
    FSDP_TRY(find_whole(merge, name, out, err));
    if (is_weight)
        FSDP_TRY(find_parts(merge, module.text, module.size, &parts, err));
    bool is_whole = *out && !parts.a, is_tied = (int64_t)number == merge->tied;
    merge->report.replaced += is_whole;
    if (parts.a)
        FSDP_TRY(merge_stored(merge, number, module, &parts, out, err));
    return is_tied && !merge->report.unties ? merge_output(merge, out, err) : FSDP_OK;
}

static fsdp_status add_tensor(adapter_merge *merge, size_t number, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(merge->base, number);
    const fsdp_derived_name name = {entry->name, entry->name_size};
    const fsdp_derived *tensor = NULL;
    FSDP_TRY(merge_tensor(merge, number, name, &tensor, err));
    return tensor ? fsdp_derivation_replace(merge->derivation, number, name, tensor, err)
                  : fsdp_derivation_keep(merge->derivation, number, err);
}

/* Square weights of a model are stored as its other ones are, of which an adapter that says nothing of
 * fan_in_fan_out may hold some. */
static fsdp_status find_transposed(adapter_merge *merge, fsdp_error *err)
{
    static const char suffix[] = ".weight";
    for (size_t i = 0; i < fsdp_sd_count(merge->base) && !merge->config.is_transposed; i++) {
        const fsdp_entry *entry = fsdp_sd_at(merge->base, i);
        size_t size = entry->name_size - (sizeof suffix - 1);
        module_parts parts = {0};
        if (entry->kind != FSDP_ENTRY_TENSOR || entry->ndim != 2 ||
            entry->name_size < sizeof suffix ||
            !fsdp_bytes_end(entry->name, entry->name_size, suffix))
            continue;
        FSDP_TRY(find_parts(merge, entry->name, size, &parts, err));
        merge->config.is_transposed = parts.a && !parts.is_embedding && parts.a->ndim == 2 &&
                                      parts.b->ndim == 2 && !fits(entry->shape, &parts, false) &&
                                      fits(entry->shape, &parts, true);
    }
    return FSDP_OK;
}

/* True for the second name that the base has for a tied output, which gets a tensor of its own. */
static bool is_left(const adapter_merge *merge, const fsdp_entry *entry)
{
    return merge->report.unties && entry->kind == FSDP_ENTRY_ALIAS &&
           fsdp_bytes_are(entry->name, entry->name_size, output.text);
}

static fsdp_status add_entries(adapter_merge *merge, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(merge->base); i++) {
        const fsdp_entry *entry = fsdp_sd_at(merge->base, i);
        if (entry->kind == FSDP_ENTRY_TENSOR)
            FSDP_TRY(add_tensor(merge, i, err));
        else if (!is_left(merge, entry))
            FSDP_TRY(fsdp_derivation_keep(merge->derivation, i, err));
    }
    return add_output(merge, err);
}

/* Why no tensor of the model took one of the adapter. */
static const char *reason_of(const fsdp_entry *entry)
{
    static const struct {
        const char *end, *reason;
    } rows[] = {
        {".lora_B.bias", "adapters with biases (lora_bias) are not merged here"},
        {".trainable_tokens_delta", "single trained tokens are not merged here"},
        {"lm_head.weight", "the base has no output"},
        {"lm_head.base_layer.weight", "the base has no output"},
        {".base_layer.lora_A.weight", "adapters of single parameters are not merged here"},
        {".base_layer.lora_B.weight", "adapters of single parameters are not merged here"},
        {"", "the adapter may belong to another model"},
    };
    size_t row = 0;
    while (!fsdp_bytes_end(entry->name, entry->name_size, rows[row].end))
        row++;
    return rows[row].reason;
}

/* A tensor of the adapter that no tensor of the model took. */
static fsdp_status check_all_used(const adapter_merge *merge, fsdp_error *err)
{
    const fsdp_sd *sd = merge->adapter->manifest.sd;
    char shown[200];
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind != FSDP_ENTRY_TENSOR || merge->is_used[i])
            continue;
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' of the adapter belongs to no tensor of '%s': %s",
                         fsdp_printable(entry->name, entry->name_size, shown, sizeof shown),
                         fsdp_derivation_base(merge->derivation)->path, reason_of(entry));
    }
    return FSDP_OK;
}

/* --- files -------------------------------------------------------------------------------------------- */

static const char config_name[] = "adapter_config.json";

bool fsdp_sd_has_adapter(const fsdp_sd *sd)
{
    static const char *const parts[] = {".lora_", "base_model.model.", "prompt_embeddings"};
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        for (size_t j = 0; j < sizeof parts / sizeof *parts && entry->kind != FSDP_ENTRY_VALUE; j++)
            if (memmem(entry->name, entry->name_size, parts[j], strlen(parts[j])))
                return true;
    }
    return false;
}

static fsdp_status has_file(fsdp_io *io, const char *dir, const char *name, bool *has_out,
                            fsdp_error *err)
{
    fsdp_file_info info;
    char *path = fsdp_path_join(dir, name);
    *has_out = path && io->ops->info(io, path, &info) == 0;
    fsdp_free(path);
    return path ? FSDP_OK : fsdp_fail_memory(err, "a path");
}

static void notify(void *context, const char *text)
{
    fsdp_notice(context, "%s", text);
}

static fsdp_status refuse_directory(const adapter_merge *merge, const char *dir, fsdp_error *err)
{
    const char *base = fsdp_derivation_base(merge->derivation)->path;
    if (fsdp_sd_has_adapter(merge->base))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is an adapter, and '%s' is not: the two are swapped; name the model "
                         "first, and the adapter after --adapter",
                         base, dir);
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                     "'%s' is not an adapter of PEFT: neither it nor its newest step has an %s",
                     dir, config_name);
}

/* The snapshot in a hub's cache, or the newest step of a run; the caller frees it also after a failure. */
static fsdp_status find_newest(const adapter_merge *merge, const fsdp_adapter_opts *opts,
                               char **step_out, fsdp_error *err)
{
    fsdp_io *io = fsdp_access_io(opts->access);
    const fsdp_framework_way way = {.note = notify, .context = (void *)(uintptr_t)opts->watch};
    bool has_config = false;
    fsdp_status st = fsdp_hub_snapshot(opts->path, io, step_out, err);
    if (st == FSDP_OK && !*step_out)
        st = fsdp_framework_resolve(io, opts->path, &way, step_out, err);
    if (st == FSDP_ERR_LIMIT || st == FSDP_ERR_DAMAGED || st == FSDP_ERR_REFUSED)
        return st; /* a pointer to nothing, a link: the run says more than that it is not an adapter */
    if (*step_out)
        FSDP_TRY(has_file(io, *step_out, config_name, &has_config, err));
    return has_config ? FSDP_OK : refuse_directory(merge, opts->path, err);
}

/* The directory itself, or the newest step of a run. */
static fsdp_status find_directory(const adapter_merge *merge, const fsdp_adapter_opts *opts,
                                  char **dir_out, fsdp_error *err)
{
    fsdp_io *io = fsdp_access_io(opts->access);
    fsdp_file_info info;
    bool has_config;
    int result = io->ops->info(io, opts->path, &info);
    *dir_out = NULL;
    if (result < 0)
        return fsdp_remote_path_fail(io, opts->path, -result, err);
    FSDP_TRY(has_file(io, opts->path, config_name, &has_config, err));
    if (!has_config && info.kind != FSDP_FILE_DIRECTORY)
        return refuse_directory(merge, opts->path, err);
    if (!has_config)
        return find_newest(merge, opts, dir_out, err);
    *dir_out = fsdp_strndup(opts->path, strlen(opts->path));
    return *dir_out ? FSDP_OK : fsdp_fail_memory(err, "a path");
}

static fsdp_status note_config(adapter_merge *merge, const char *dir, fsdp_error *err)
{
    char *path = fsdp_path_join(dir, config_name);
    fsdp_status st = path ? fsdp_derivation_note_file(merge->derivation, path, err)
                          : fsdp_fail_memory(err, "a path");
    fsdp_free(path);
    return st;
}

/* The adapter's own file: a base model, or the state of an optimizer, may be next to it. Before PEFT 0.7 it
 * was one of torch.save. */
static fsdp_status open_tensors(adapter_merge *merge, fsdp_io *io, const char *dir, fsdp_error *err)
{
    static const char *const names[] = {"adapter_model.safetensors", "adapter_model.bin"};
    bool is_there = false;
    char *path = NULL;
    for (int i = 0; i < 2 && !is_there; i++) {
        FSDP_TRY(has_file(io, dir, names[i], &is_there, err));
        if (is_there)
            path = fsdp_path_join(dir, names[i]);
    }
    if (is_there && !path)
        return fsdp_fail_memory(err, "a path");
    fsdp_status st = fsdp_checkpoint_open_as(io, path ? path : dir, NULL, &merge->adapter, err);
    fsdp_free(path);
    return st;
}

static fsdp_status open_directory(adapter_merge *merge, const char *dir, fsdp_io *io,
                                  fsdp_error *err)
{
    FSDP_TRY(note_config(merge, dir, err));
    FSDP_TRY(read_config(io, dir, &merge->config, err));
    FSDP_TRY(open_tensors(merge, io, dir, err));
    fsdp_derivation_close_too(merge->derivation, merge->adapter);
    merge->is_used = fsdp_alloc(fsdp_sd_count(merge->adapter->manifest.sd), sizeof *merge->is_used);
    return merge->is_used ? FSDP_OK : fsdp_fail_memory(err, "an adapter");
}

static fsdp_status open_adapter(adapter_merge *merge, const fsdp_adapter_opts *opts,
                                fsdp_error *err)
{
    char *dir = NULL;
    fsdp_status st = find_directory(merge, opts, &dir, err);
    if (st == FSDP_OK)
        st = open_directory(merge, dir, fsdp_access_io(opts->access), err);
    fsdp_free(dir);
    return st;
}

fsdp_status fsdp_adapter_merge(const fsdp_adapter_opts *opts, fsdp_checkpoint **checkpoint,
                               fsdp_adapter_report *report_out, fsdp_error *err)
{
    adapter_merge merge = {.base = (*checkpoint)->manifest.sd};
    fsdp_checkpoint *base = *checkpoint;
    *checkpoint = NULL;
    FSDP_TRY(fsdp_derivation_begin(base, &merge.derivation, err));
    fsdp_status st = open_adapter(&merge, opts, err);
    if (st == FSDP_OK)
        st = find_transposed(&merge, err);
    if (st == FSDP_OK)
        st = find_untied(&merge, err);
    if (st == FSDP_OK)
        st = add_entries(&merge, err);
    if (st == FSDP_OK)
        st = check_all_used(&merge, err);
    *report_out = merge.report;
    fsdp_free(merge.is_used);
    release_config(&merge.config);
    if (st == FSDP_OK)
        return fsdp_derivation_finish(merge.derivation, checkpoint, err);
    fsdp_derivation_cancel(merge.derivation);
    return st;
}
