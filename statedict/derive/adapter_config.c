/* Reads adapter_config.json: see adapter_config.h. */
#include "statedict/derive/adapter_config.h"

#include "base/data/json.h"
#include "base/text.h"
#include "formats/source.h"

#include <inttypes.h>
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
        case 2: FSDP_TRY(fsdp_module_numbers_read(json, &config->alphas, err)); break;
        case 3: FSDP_TRY(read_flag(json, &config->divides_by_root, err)); break;
        case 4: FSDP_TRY(read_flag(json, &config->is_transposed, err)); break;
        case 5: FSDP_TRY(read_start(json, config, err)); break;
        case 6: FSDP_TRY(read_flag(json, &config->ties_weights, err)); break;
        case 7: FSDP_TRY(fsdp_json_f64(json, &config->rank, err)); break;
        case 8: FSDP_TRY(fsdp_module_numbers_read(json, &config->ranks, err)); break;
        case 9: FSDP_TRY(fsdp_module_list_read(json, &config->targets, err)); break;
        case 10: FSDP_TRY(fsdp_module_list_read(json, &config->excluded, err)); break;
        case 11: FSDP_TRY(fsdp_module_layers_read(json, &config->layers, err)); break;
        case 12: FSDP_TRY(fsdp_module_layers_read_above(json, &config->layers, err)); break;
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
    fsdp_module_numbers_release(&config->alphas);
    fsdp_module_numbers_release(&config->ranks);
    fsdp_module_list_release(&config->targets);
    fsdp_module_list_release(&config->excluded);
    fsdp_module_layers_release(&config->layers);
    *config = (fsdp_adapter_config){0};
}

/* --- one module --------------------------------------------------------------------------------- */

/* PEFT puts an adapter into modules that the targets name, in the layers, and that are not excluded. */
static fsdp_status check_target(const fsdp_adapter_config *config, const fsdp_module_name *module,
                                fsdp_error *err)
{
    bool is_target = true, is_excluded, is_end = false;
    FSDP_TRY(fsdp_module_list_has(&config->excluded, module, &is_excluded, &is_end, err));
    if (config->targets.is_given)
        FSDP_TRY(fsdp_module_list_has(&config->targets, module, &is_target, &is_end, err));
    const char *member =
        is_excluded  ? "exclude_modules"
        : !is_target ? "target_modules"
        : config->targets.is_given && is_end && !fsdp_module_layers_have(&config->layers, module)
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
    FSDP_TRY(fsdp_module_numbers_find(&config->alphas, &module->name, &alpha, err));
    FSDP_TRY(fsdp_module_numbers_find(&config->ranks, &module->name, &rank, err));
    if (rank != (double)module->rank)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "its product has the rank %" PRId64
                         ", and adapter_config.json says %g (r, "
                         "rank_pattern)",
                         module->rank, rank);
    if (config->has_lengths != module->has_lengths)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         config->has_lengths
                             ? "adapter_config.json says use_dora, and the adapter has no "
                               "magnitudes (lora_magnitude_vector) for it"
                             : "the adapter has magnitudes (lora_magnitude_vector) for it, and "
                               "adapter_config.json does not say use_dora");
    *factor_out = alpha / (config->divides_by_root ? sqrt(rank) : rank);
    return FSDP_OK;
}
