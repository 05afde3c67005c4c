/* Reads adapter_config.json: see adapter_config.h. */
#include "statedict/derive/adapter_config.h"

#include "base/data/json.h"
#include "base/text.h"
#include "statedict/select/expression.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

enum { CONFIG_MOST = 4 << 20 };

static fsdp_status read_flag(fsdp_json *json, bool *flag_out, fsdp_error *err)
{
    return fsdp_json_peek(json) == FSDP_JSON_BOOL ? fsdp_json_bool(json, flag_out, err)
                                                  : fsdp_json_skip(json, err);
}

/* PEFT matches a key at the end of a module's name, as a whole element. */
static fsdp_status add_pattern(fsdp_json *json, fsdp_adapter_config *config, const char *key,
                               size_t size, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_alpha_pattern pattern = {.alpha = 0};
    fsdp_text_addf(&text, "^(.*\\.)?(%.*s)$", (int)size, key);
    fsdp_status st = text.failed
                         ? fsdp_fail_memory(err, "a pattern")
                         : fsdp_expression_compile(text.data, REG_NOSUB, &pattern.expression, err);
    fsdp_text_release(&text);
    FSDP_TRY(st);
    st = fsdp_json_f64(json, &pattern.alpha, err);
    if (st == FSDP_OK && !fsdp_grow(&config->patterns, &config->pattern_room,
                                    config->pattern_count + 1, sizeof pattern))
        st = fsdp_fail_memory(err, "a pattern");
    if (st == FSDP_OK)
        config->patterns[config->pattern_count++] = pattern;
    else
        regfree(&pattern.expression);
    return st;
}

static fsdp_status read_patterns(fsdp_json *json, fsdp_adapter_config *config, fsdp_error *err)
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
        FSDP_TRY(add_pattern(json, config, key, size, err));
    }
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

static fsdp_status read_members(fsdp_json *json, fsdp_adapter_config *config, fsdp_error *err)
{
    static const char *const names[] = {
        "peft_type",           "lora_alpha",     "alpha_pattern",
        "use_rslora",          "fan_in_fan_out", "init_lora_weights",
        "ensure_weight_tying", "use_qalora",     "alora_invocation_tokens",
        "arrow_config",        "kasa_config",    "monteclora_config",
        "use_bdlora"};
    fsdp_json_members members = {.names = names, .count = sizeof names / sizeof *names};
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        switch (which) {
        case 0: FSDP_TRY(read_type(json, config, err)); break;
        case 1: FSDP_TRY(fsdp_json_f64(json, &config->alpha, err)); break;
        case 2: FSDP_TRY(read_patterns(json, config, err)); break;
        case 3: FSDP_TRY(read_flag(json, &config->divides_by_root, err)); break;
        case 4: FSDP_TRY(read_flag(json, &config->is_transposed, err)); break;
        case 5: FSDP_TRY(read_start(json, config, err)); break;
        case 6: FSDP_TRY(read_flag(json, &config->ties_weights, err)); break;
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
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is of an adapter that is no LoRA: PEFT's merge_and_unload merges it",
                         path);
    if (config->variant)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has %s, a variant of LoRA that is not merged here: PEFT's "
                         "merge_and_unload merges it, or says why it cannot",
                         path, config->variant);
    if (start_changes_base(config->start))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' says init_lora_weights '%s', with which PEFT changes the base, too: "
                         "its merge_and_unload merges the adapter, and its "
                         "path_initial_model_for_weight_conversion makes a plain one of it",
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
    *config = (fsdp_adapter_config){.alpha = 8}; /* PEFT's default */
    fsdp_status st = path ? fsdp_io_read_file(io, path, CONFIG_MOST, &text, &size, err)
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
    for (size_t i = 0; i < config->pattern_count; i++)
        regfree(&config->patterns[i].expression);
    fsdp_free(config->patterns);
    *config = (fsdp_adapter_config){0};
}

double fsdp_adapter_factor(const fsdp_adapter_config *config, const char *module, size_t size,
                           int64_t rank)
{
    double alpha = config->alpha;
    for (size_t i = 0; i < config->pattern_count; i++)
        if (fsdp_expression_matches(&config->patterns[i].expression, module, size)) {
            alpha = config->patterns[i].alpha;
            break;
        }
    return alpha / (config->divides_by_root ? sqrt((double)rank) : (double)rank);
}
