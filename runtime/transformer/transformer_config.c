/*
 * config.json <-> fsdp_transformer_config, and the families that can be trained. statedict/models reads the
 * file and describes its family: its members, what they are where they are absent, and the tensors that
 * follow. Here members become sizes and settings of this room, and what it cannot do is refused by its
 * name. A null counts as absent, as it does in transformers.
 */
#include "runtime/transformer/transformer_internal.h"
#include "base/core/mem.h"
#include "base/text.h"
#include "statedict/models/config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === config.json ============================================================================== */

typedef struct reader {
    fsdp_config_file file;
    fsdp_config values; /* its numbers, for the description of its family */
    const char *origin;
    fsdp_transformer_config *config;
} reader;

static fsdp_status fail_member(const reader *from, const char *name, const char *reason,
                               fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "cannot train '%s': %s: %s", from->origin, name, reason);
}

static fsdp_status fail_kind(const reader *from, const char *name, const char *reason,
                             fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': %s is %s", from->origin, name, reason);
}

/* --- members --------------------------------------------------------------------------------------- */

/* The member of the file; NULL where it is absent or null. */
static const fsdp_value *find(const reader *from, const char *name)
{
    return fsdp_config_at(&from->file.json, name);
}

/* For members where null does not mean the default. */
static bool is_null(const reader *from, const char *name)
{
    return fsdp_config_is_null(&from->file.json, name);
}

/* The family's member; NULL: it has none of this name. */
static const fsdp_config_member *describe(const reader *from, const char *name)
{
    return fsdp_architecture_member(from->values.architecture, name, strlen(name));
}

/* The family's value where the file has none; NULL: nothing is said. */
static const char *default_of(const reader *from, const char *name)
{
    const fsdp_config_member *member = describe(from, name);
    return member ? member->otherwise : NULL;
}

static fsdp_status take_number(const reader *from, const char *name, double *number,
                               fsdp_error *err)
{
    const fsdp_value *value = find(from, name);
    if (!value)
        return FSDP_OK;
    if (value->kind == FSDP_VALUE_BOOL || !fsdp_config_real(&from->file.json, name, number))
        return fail_kind(from, name, "not a number", err);
    return FSDP_OK;
}

static fsdp_status take_real(const reader *from, const char *name, double *real, fsdp_error *err)
{
    const char *otherwise = default_of(from, name);
    if (otherwise)
        *real = strtod(otherwise, NULL);
    return take_number(from, name, real, err);
}

/* A whole number, or what follows from others where it is absent. */
static fsdp_status take_count(const reader *from, const char *name, int64_t *count, fsdp_error *err)
{
    double number = 0;
    if (!find(from, name))
        return default_of(from, name) ? fsdp_formula_compute(&from->values, name, 0, count, err)
                                      : FSDP_OK;
    FSDP_TRY(take_number(from, name, &number, err));
    if (!(number >= -1) || number > 9e15 || number != floor(number))
        return fail_kind(from, name, "not a whole number", err);
    *count = (int64_t)number;
    return FSDP_OK;
}

/* A null is false in transformers 4 and an error in 5: refused where the default is true. */
static fsdp_status take_bool(const reader *from, const char *name, bool *is_set, fsdp_error *err)
{
    const fsdp_value *value = find(from, name);
    const char *otherwise = default_of(from, name);
    if (otherwise)
        *is_set = strcmp(otherwise, "0") != 0;
    if (is_null(from, name) && *is_set)
        return fail_member(from, name, "it is null; write true or false", err);
    if (value && value->kind != FSDP_VALUE_BOOL)
        return fail_kind(from, name, "neither true nor false", err);
    if (value)
        *is_set = value->as.boolean;
    return FSDP_OK;
}

/* Lists of ids leave the default. */
static fsdp_status take_token(const reader *from, const char *name, int64_t *id, fsdp_error *err)
{
    const fsdp_value *value = find(from, name);
    const char *otherwise = default_of(from, name);
    *id = otherwise && !is_null(from, name) ? strtoll(otherwise, NULL, 10) : -1;
    const bool is_number =
        value && (value->kind == FSDP_VALUE_I64 || value->kind == FSDP_VALUE_F64);
    return is_number ? take_count(from, name, id, err) : FSDP_OK;
}

static fsdp_status take_activation(const reader *from, fsdp_nn_function *function, fsdp_error *err)
{
    static const struct {
        const char *name;
        fsdp_nn_function function;
    } known[] = {{"gelu", FSDP_NN_GELU},          {"gelu_python", FSDP_NN_GELU},
                 {"gelu_new", FSDP_NN_GELU_TANH}, {"gelu_pytorch_tanh", FSDP_NN_GELU_TANH},
                 {"silu", FSDP_NN_SILU},          {"swish", FSDP_NN_SILU},
                 {"relu", FSDP_NN_RELU}};
    const char *member = describe(from, "hidden_act") ? "hidden_act" : "activation_function";
    const char *name =
        find(from, member) ? fsdp_config_word(&from->file.json, member) : default_of(from, member);
    for (size_t i = 0; name && i < sizeof known / sizeof *known; i++)
        if (strcmp(name, known[i].name) == 0) {
            *function = known[i].function;
            return FSDP_OK;
        }
    char shown[80] = "";
    if (name)
        fsdp_printable(name, strlen(name), shown, sizeof shown);
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "cannot train '%s': %s is '%s'; this trainer computes gelu, gelu_new, silu and relu",
        from->origin, member, shown);
}

/* --- rotary positions ------------------------------------------------------------------------------ */

static bool is_scaling_wrong(const fsdp_rope *rope)
{
    const bool is_blend_wrong = !(rope->low_freq_factor > 0) ||
                                !(rope->high_freq_factor > rope->low_freq_factor) ||
                                !(rope->original_context > 0);
    return !(rope->factor > 0) || (rope->kind == FSDP_ROPE_LLAMA3 && is_blend_wrong);
}

static fsdp_status take_rope(const reader *from, fsdp_error *err)
{
    fsdp_rope *rope = &from->config->rope;
    const char *otherwise = default_of(from, "rope_theta");
    char shown[80], reason[160];
    FSDP_TRY(fsdp_rope_read(&from->file.json, from->origin, rope, err));
    const bool is_scaled = rope->kind != FSDP_ROPE_DEFAULT;
    if (rope->differs)
        return fail_member(from, rope->member, "it differs between layers", err);
    if (is_scaled && rope->kind != FSDP_ROPE_LINEAR && rope->kind != FSDP_ROPE_LLAMA3) {
        snprintf(reason, sizeof reason, "'%s' is not one of default, linear, llama3",
                 fsdp_printable(rope->type, strlen(rope->type), shown, sizeof shown));
        return fail_member(from, rope->member, reason, err);
    }
    if (!isnan(rope->partial_factor) && rope->partial_factor != 1)
        return fail_member(from, "partial_rotary_factor", "heads are rotated whole", err);
    if (is_scaled && isnan(rope->factor))
        return fail_member(from, rope->member, "it has no factor", err);
    if (isnan(rope->theta) && otherwise)
        rope->theta = strtod(otherwise, NULL);
    if (isnan(rope->original_context))
        rope->original_context = (double)from->config->context;
    if (!(rope->theta > 0) || !isfinite(rope->theta) || (is_scaled && is_scaling_wrong(rope)))
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': rotary positions need a positive theta and factor, and "
                         "low_freq_factor below high_freq_factor",
                         from->origin);
    return FSDP_OK;
}

/* --- windows --------------------------------------------------------------------------------------- */

/* Layers from `full_layers` on have a window, unless layer_types lists them. */
static fsdp_status take_layer_types(const reader *from, int64_t full_layers, fsdp_error *err)
{
    fsdp_transformer_config *config = from->config;
    const fsdp_value *types = find(from, "layer_types");
    for (int64_t i = 0; i < config->layers && i < FSDP_MODEL_LAYERS; i++)
        config->is_windowed[i] = i >= full_layers;
    if (!types || types->kind != FSDP_VALUE_LIST || types->as.list.count == 0)
        return FSDP_OK;
    for (size_t i = 0; i < types->as.list.count; i++) {
        const fsdp_value *type = &types->as.list.items[i];
        const bool is_text = type->kind == FSDP_VALUE_STRING;
        const bool slides = is_text && strcmp(type->as.bytes.data, "sliding_attention") == 0;
        if (i == FSDP_MODEL_LAYERS)
            return fail_member(from, "layer_types", "too many layers", err);
        if (!slides && (!is_text || strcmp(type->as.bytes.data, "full_attention") != 0))
            return fail_member(from, "layer_types",
                               "a layer is neither full_attention nor sliding_attention", err);
        config->is_windowed[i] = slides;
    }
    if (types->as.list.count != (size_t)config->layers)
        return fail_member(from, "layer_types", "its length is not the number of layers", err);
    return FSDP_OK;
}

/* Families without use_sliding_window have a window in every layer. */
static fsdp_status take_windows(const reader *from, fsdp_error *err)
{
    fsdp_transformer_config *config = from->config;
    bool use = true, is_any = false;
    int64_t full_layers = 0;
    if (!describe(from, "sliding_window"))
        return FSDP_OK;
    if (describe(from, "use_sliding_window"))
        FSDP_TRY(take_bool(from, "use_sliding_window", &use, err));
    if (describe(from, "max_window_layers"))
        FSDP_TRY(take_count(from, "max_window_layers", &full_layers, err));
    FSDP_TRY(take_layer_types(from, full_layers, err));
    FSDP_TRY(take_count(from, "sliding_window", &config->window, err));
    if (is_null(from, "sliding_window") || !use)
        config->window = 0;
    if (config->window < 0)
        return fail_member(from, "sliding_window", "it is negative", err);
    for (int64_t i = 0; i < config->layers && i < FSDP_MODEL_LAYERS; i++)
        is_any |= config->is_windowed[i];
    if (use && is_any && config->window == 0 && find(from, "sliding_window"))
        return fail_member(from, "sliding_window",
                           "a window of 0 hides every token; null means that there is none", err);
    return FSDP_OK;
}

/* --- what is refused ------------------------------------------------------------------------------- */

static fsdp_status check_family(const reader *from, fsdp_error *err)
{
    const char *name = fsdp_config_word(&from->file.json, "model_type");
    char shown[80];
    if (!name)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no model_type", from->origin);
    if (from->file.architecture && from->file.architecture->form)
        return FSDP_OK;
    fsdp_text families = {0};
    fsdp_transformer_families(", ", &families);
    fsdp_status st =
        fsdp_fail(err, FSDP_ERR_USAGE,
                  "cannot train '%s': model_type '%s' is not known here; this trainer knows %s",
                  from->origin, fsdp_printable(name, strlen(name), shown, sizeof shown),
                  families.failed ? "others" : families.data);
    fsdp_text_release(&families);
    return st;
}

static fsdp_status refuse_others(const reader *from, fsdp_error *err)
{
    const fsdp_value *cross = find(from, "add_cross_attention");
    double one = 1;
    if (find(from, "quantization_config"))
        return fail_member(from, "quantization_config", "its weights are not floats", err);
    if (cross && cross->kind == FSDP_VALUE_BOOL && cross->as.boolean)
        return fail_member(from, "add_cross_attention", "there is no encoder", err);
    FSDP_TRY(take_number(from, "pretraining_tp", &one, err));
    if (one != 1)
        return fail_member(from, "pretraining_tp", "it is not 1", err);
    return FSDP_OK;
}

/* --- all of it ------------------------------------------------------------------------------------- */

/* True where the shape of a tensor depends on the member. */
static bool has_effect(const reader *from, const char *member)
{
    const fsdp_architecture *model = from->values.architecture;
    for (size_t i = 0; i < model->row_count; i++)
        if (strstr(model->rows[i].shape, member))
            return true;
    return false;
}

/* A family that has the short name takes the long one as well, which wins. */
static fsdp_status take_size(const reader *from, const char *brief, const char *name, int64_t *size,
                             fsdp_error *err)
{
    const bool has_brief = describe(from, brief);
    if (has_brief)
        FSDP_TRY(take_count(from, brief, size, err));
    return has_brief && !find(from, name) ? FSDP_OK : take_count(from, name, size, err);
}

static fsdp_status take_sizes(const reader *from, fsdp_error *err)
{
    fsdp_transformer_config *config = from->config;
    config->form.has_kv_heads = has_effect(from, "num_key_value_heads");
    config->form.has_head_dim = has_effect(from, "head_dim");
    FSDP_TRY(take_size(from, "n_layer", "num_hidden_layers", &config->layers, err));
    FSDP_TRY(take_size(from, "n_head", "num_attention_heads", &config->heads, err));
    FSDP_TRY(take_size(from, "n_embd", "hidden_size", &config->width, err));
    FSDP_TRY(take_size(from, "n_positions", "max_position_embeddings", &config->context, err));
    FSDP_TRY(take_count(from, describe(from, "n_inner") ? "n_inner" : "intermediate_size",
                        &config->inner, err));
    FSDP_TRY(take_count(from, "vocab_size", &config->vocab, err));
    if (config->form.has_kv_heads)
        FSDP_TRY(take_count(from, "num_key_value_heads", &config->kv_heads, err));
    if (config->form.has_head_dim && config->heads > 0)
        FSDP_TRY(take_count(from, "head_dim", &config->head_dim, err));
    if (config->kv_heads < 1)
        config->kv_heads = config->heads;
    if (config->head_dim < 1 && config->heads > 0)
        config->head_dim = config->width / config->heads;
    if (config->inner < 1 && config->width < (1 << 24))
        config->inner = 4 * config->width;
    return FSDP_OK;
}

static fsdp_status take_settings(const reader *from, fsdp_error *err)
{
    static const char *const dropouts[] = {"attn_pdrop", "embd_pdrop", "resid_pdrop",
                                           "attention_dropout"};
    fsdp_transformer_config *config = from->config;
    bool ignored;
    FSDP_TRY(take_real(from, describe(from, "rms_norm_eps") ? "rms_norm_eps" : "layer_norm_epsilon",
                       &config->norm_eps, err));
    FSDP_TRY(take_number(from, "initializer_range", &config->initializer_range, err));
    FSDP_TRY(take_activation(from, &config->activation, err));
    FSDP_TRY(take_bool(from, "tie_word_embeddings", &config->is_tied, err));
    FSDP_TRY(take_bool(from, "attention_bias", &ignored, err)); /* formulas take any number */
    FSDP_TRY(take_bool(from, "mlp_bias", &ignored, err));
    if (describe(from, "scale_attn_weights"))
        FSDP_TRY(take_bool(from, "scale_attn_weights", &config->scales_attention, err));
    if (describe(from, "scale_attn_by_inverse_layer_idx"))
        FSDP_TRY(take_bool(from, "scale_attn_by_inverse_layer_idx", &config->scales_by_layer, err));
    FSDP_TRY(take_token(from, "bos_token_id", &config->bos, err));
    FSDP_TRY(take_token(from, "eos_token_id", &config->eos, err));
    for (size_t i = 0; i < sizeof dropouts / sizeof *dropouts; i++) {
        double rate = 0;
        config->has_dropout |= fsdp_config_real(&from->file.json, dropouts[i], &rate) && rate != 0;
    }
    return FSDP_OK;
}

static fsdp_status read_all(reader *from, const char *text, size_t size, fsdp_error *err)
{
    fsdp_transformer_config *config = from->config;
    FSDP_TRY(fsdp_config_parse(text, size, from->origin, &from->file, err));
    FSDP_TRY(check_family(from, err));
    FSDP_TRY(refuse_others(from, err));
    FSDP_TRY(fsdp_config_read(&from->file, &from->values, err));
    *config = (fsdp_transformer_config){.initializer_range = 0.02, .scales_attention = true};
    snprintf(config->model_type, sizeof config->model_type, "%s",
             from->values.architecture->model_type);
    FSDP_TRY(take_sizes(from, err));
    FSDP_TRY(take_settings(from, err));
    FSDP_TRY(take_windows(from, err));
    config->form.is_rotary = describe(from, "rope_theta") != NULL;
    if (config->form.is_rotary)
        FSDP_TRY(take_rope(from, err));
    FSDP_TRY(fsdp_transformer_config_check(config, from->origin, err));
    return fsdp_model_make_form(&from->values, config, err);
}

fsdp_status fsdp_transformer_config_parse(const char *text, size_t size, const char *origin,
                                          fsdp_transformer_config *config_out, fsdp_error *err)
{
    reader from = {.origin = origin, .config = config_out};
    fsdp_status st = read_all(&from, text, size, err);
    fsdp_arena_release(&from.values.arena);
    fsdp_config_release(&from.file);
    return st;
}

/* --- families ------------------------------------------------------------------------------------ */

fsdp_status fsdp_transformer_config_init(fsdp_transformer_config *config, const char *model_type,
                                         fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "{\"model_type\": ");
    fsdp_text_add_json_string(&text, model_type, strlen(model_type));
    fsdp_text_addf(&text, "}");
    fsdp_status st =
        text.failed ? fsdp_fail_memory(err, "a model's config")
                    : fsdp_transformer_config_parse(text.data, text.size, model_type, config, err);
    fsdp_text_release(&text);
    return st;
}

/* A description with the line `form` is meant for this room; one that it cannot do yet is left out. */
void fsdp_transformer_families(const char *separator, fsdp_text *text)
{
    fsdp_arena arena = {0};
    fsdp_transformer_config *config = fsdp_alloc(1, sizeof *config);
    const fsdp_architecture *model;
    const size_t begin = text->size;
    text->failed |= !config;
    for (size_t i = 0; config; i++) {
        text->failed |= fsdp_architecture_at(&arena, i, &model, NULL) != FSDP_OK;
        if (text->failed || !model)
            break;
        if (model->form && fsdp_transformer_config_init(config, model->model_type, NULL) == FSDP_OK)
            fsdp_text_addf(text, "%s%s", text->size > begin ? separator : "", model->model_type);
    }
    fsdp_arena_release(&arena);
    fsdp_free(config);
}

/* === sizes ==================================================================================== */

static fsdp_status check_size(const char *name, int64_t value, int64_t most, const char *origin,
                              fsdp_error *err)
{
    if (value < 1 || value > most)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s': %s %lld is not between 1 and %lld", origin,
                         name, (long long)value, (long long)most);
    return FSDP_OK;
}

fsdp_status fsdp_transformer_config_check(const fsdp_transformer_config *config, const char *origin,
                                          fsdp_error *err)
{
    const int64_t most = 1 << 24;
    FSDP_TRY(check_size("the number of layers", config->layers, FSDP_MODEL_LAYERS, origin, err));
    FSDP_TRY(check_size("the number of heads", config->heads, 1 << 16, origin, err));
    FSDP_TRY(check_size("the number of key-value heads", config->kv_heads, 1 << 16, origin, err));
    FSDP_TRY(check_size("the width", config->width, most, origin, err));
    FSDP_TRY(check_size("the inner width", config->inner, most, origin, err));
    FSDP_TRY(check_size("the vocabulary", config->vocab, most * 4, origin, err));
    FSDP_TRY(check_size("the context", config->context, 1 << 28, origin, err));
    FSDP_TRY(check_size("the width of a head", config->head_dim, 1 << 16, origin, err));
    if (config->heads % config->kv_heads != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s': %lld heads cannot share %lld key-value heads evenly", origin,
                         (long long)config->heads, (long long)config->kv_heads);
    if (!config->form.has_kv_heads && config->kv_heads != config->heads)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s': %s has as many key-value heads as heads, but %lld is not %lld",
                         origin, config->model_type, (long long)config->kv_heads,
                         (long long)config->heads);
    if (config->form.is_rotary && config->head_dim % 2 != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s': rotary positions need heads of an even width, not %lld", origin,
                         (long long)config->head_dim);
    if (!config->form.has_head_dim && config->head_dim * config->heads != config->width)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s': the width %lld is not a multiple of %lld heads", origin,
                         (long long)config->width, (long long)config->heads);
    if (!(config->norm_eps >= 0) || !isfinite(config->norm_eps) ||
        !(config->initializer_range >= 0) || !isfinite(config->initializer_range))
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "'%s': the eps of norms and initializer_range must be numbers of at least 0", origin);
    return FSDP_OK;
}

/* === config.json of a new model =============================================================== */

static const char *const function_names[] = {[FSDP_NN_GELU] = "gelu",
                                             [FSDP_NN_GELU_TANH] = "gelu_new",
                                             [FSDP_NN_SILU] = "silu",
                                             [FSDP_NN_RELU] = "relu"};

static void add_number(fsdp_text *text, const char *name, int64_t value)
{
    fsdp_text_addf(text, "  \"%s\": %lld,\n", name, (long long)value);
}

static void add_real(fsdp_text *text, const char *name, double value)
{
    fsdp_text_addf(text, "  \"%s\": ", name);
    fsdp_text_add_f64(text, value);
    fsdp_text_addf(text, ",\n");
}

static void add_bool(fsdp_text *text, const char *name, bool value)
{
    fsdp_text_addf(text, "  \"%s\": %s,\n", name, value ? "true" : "false");
}

static void add_id(fsdp_text *text, const char *name, int64_t id)
{
    if (id < 0)
        fsdp_text_addf(text, "  \"%s\": null,\n", name);
    else
        add_number(text, name, id);
}

static void write_gpt2(const fsdp_transformer_config *config, fsdp_text *text)
{
    fsdp_text_addf(text, "  \"activation_function\": \"%s\",\n",
                   function_names[config->activation]);
    fsdp_text_addf(text,
                   "  \"attn_pdrop\": 0.0,\n  \"embd_pdrop\": 0.0,\n  \"resid_pdrop\": 0.0,\n");
    add_real(text, "layer_norm_epsilon", config->norm_eps);
    add_number(text, "n_embd", config->width);
    add_number(text, "n_head", config->heads);
    add_number(text, "n_inner", config->inner);
    add_number(text, "n_layer", config->layers);
    add_number(text, "n_positions", config->context);
    add_bool(text, "scale_attn_by_inverse_layer_idx", config->scales_by_layer);
    add_bool(text, "scale_attn_weights", config->scales_attention);
}

/* rope_theta and rope_scaling are transformers 4's spelling, which 5 reads, too. */
static void write_rope(const fsdp_rope *rope, fsdp_text *text)
{
    add_real(text, "rope_theta", rope->theta);
    if (rope->kind == FSDP_ROPE_DEFAULT)
        return;
    fsdp_text_addf(
        text, "  \"rope_scaling\": {\n    \"rope_type\": \"%s\",\n    \"factor\": ", rope->type);
    fsdp_text_add_f64(text, rope->factor);
    if (rope->kind == FSDP_ROPE_LLAMA3) {
        fsdp_text_addf(text, ",\n    \"low_freq_factor\": ");
        fsdp_text_add_f64(text, rope->low_freq_factor);
        fsdp_text_addf(text, ",\n    \"high_freq_factor\": ");
        fsdp_text_add_f64(text, rope->high_freq_factor);
        fsdp_text_addf(text, ",\n    \"original_max_position_embeddings\": %lld",
                       (long long)rope->original_context);
    }
    fsdp_text_addf(text, "\n  },\n");
}

static void write_layer_types(const fsdp_transformer_config *config, fsdp_text *text)
{
    fsdp_text_addf(text, "  \"layer_types\": [");
    for (int64_t i = 0; i < config->layers; i++)
        fsdp_text_addf(text, "%s\"%s\"", i ? ", " : "",
                       config->window && config->is_windowed[i] ? "sliding_attention"
                                                                : "full_attention");
    fsdp_text_addf(text, "],\n");
}

static bool has(const fsdp_architecture *model, const char *member)
{
    return fsdp_architecture_member(model, member, strlen(member)) != NULL;
}

static bool follows(const fsdp_architecture *model, const char *member, const char *other)
{
    const fsdp_config_member *found = fsdp_architecture_member(model, member, strlen(member));
    return found && found->otherwise && strcmp(found->otherwise, other) == 0;
}

static void write_llama(const fsdp_transformer_config *config, const fsdp_architecture *model,
                        fsdp_text *text)
{
    add_real(text, "attention_dropout", 0);
    add_number(text, "head_dim", config->head_dim);
    fsdp_text_addf(text, "  \"hidden_act\": \"%s\",\n", function_names[config->activation]);
    add_number(text, "hidden_size", config->width);
    add_number(text, "intermediate_size", config->inner);
    add_number(text, "max_position_embeddings", config->context);
    add_number(text, "num_attention_heads", config->heads);
    add_number(text, "num_hidden_layers", config->layers);
    add_number(text, "num_key_value_heads", config->kv_heads);
    add_real(text, "rms_norm_eps", config->norm_eps);
    write_rope(&config->rope, text);
    if (follows(model, "$qkv_bias", "attention_bias"))
        add_bool(text, "attention_bias", config->attention_bias);
    if (!has(model, "sliding_window")) {
        add_bool(text, "mlp_bias", config->mlp_bias);
        return;
    }
    if (has(model, "use_sliding_window")) {
        add_bool(text, "use_sliding_window", config->window > 0);
        write_layer_types(config, text);
    }
    if (config->window)
        add_number(text, "sliding_window", config->window);
    else
        fsdp_text_addf(text, "  \"sliding_window\": null,\n");
}

static void write_config(const fsdp_transformer_config *config, const fsdp_architecture *model,
                         fsdp_text *text)
{
    fsdp_text_addf(text, "{\n  \"architectures\": [\"%s\"],\n", model->class_name);
    add_id(text, "bos_token_id", config->bos);
    add_id(text, "eos_token_id", config->eos);
    add_real(text, "initializer_range", config->initializer_range);
    if (has(model, "n_embd"))
        write_gpt2(config, text);
    else
        write_llama(config, model, text);
    fsdp_text_addf(text, "  \"model_type\": \"%s\",\n", config->model_type);
    add_bool(text, "tie_word_embeddings", config->is_tied);
    fsdp_text_addf(text, "  \"torch_dtype\": \"float32\",\n");
    fsdp_text_addf(text, "  \"vocab_size\": %lld\n}\n", (long long)config->vocab);
}

fsdp_status fsdp_transformer_config_write(const fsdp_transformer_config *config, fsdp_text *text,
                                          fsdp_error *err)
{
    fsdp_arena arena = {0};
    const fsdp_architecture *model;
    fsdp_status st = fsdp_model_describe(config, &arena, &model, err);
    if (st == FSDP_OK)
        write_config(config, model, text);
    if (st == FSDP_OK && text->failed)
        st = fsdp_fail_memory(err, "a model's config");
    fsdp_arena_release(&arena);
    return st;
}
