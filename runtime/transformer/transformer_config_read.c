/*
 * config.json -> fsdp_transformer_config. Members are collected first, since later ones (model_type,
 * layer_types) decide what earlier ones mean; a null counts as absent, as it does in transformers.
 */
#include "runtime/transformer/transformer_config.h"

#include "base/core/mem.h"
#include "base/data/json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* --- members ------------------------------------------------------------------------------------- */

typedef enum config_member {
    MODEL_TYPE,
    ACTIVATION_FUNCTION,
    HIDDEN_ACT,
    N_LAYER,
    NUM_HIDDEN_LAYERS,
    N_HEAD,
    NUM_ATTENTION_HEADS,
    NUM_KEY_VALUE_HEADS,
    N_EMBD,
    HIDDEN_SIZE,
    N_INNER,
    INTERMEDIATE_SIZE,
    HEAD_DIM,
    N_POSITIONS,
    MAX_POSITIONS,
    VOCAB_SIZE,
    LAYER_NORM_EPSILON,
    RMS_NORM_EPS,
    INITIALIZER_RANGE,
    TIE_WORD_EMBEDDINGS,
    ATTENTION_BIAS,
    MLP_BIAS,
    SCALE_ATTN_WEIGHTS,
    SCALE_BY_LAYER,
    ROPE_THETA,
    ROPE_SCALING,
    ROPE_PARAMETERS,
    SLIDING_WINDOW,
    USE_SLIDING_WINDOW,
    MAX_WINDOW_LAYERS,
    LAYER_TYPES,
    BOS,
    EOS,
    ATTN_PDROP,
    EMBD_PDROP,
    RESID_PDROP,
    ATTENTION_DROPOUT,
    ADD_CROSS_ATTENTION,
    PRETRAINING_TP,
    PARTIAL_ROTARY_FACTOR,
    QUANTIZATION_CONFIG,
    MEMBERS
} config_member;

static const char *const member_names[MEMBERS] = {"model_type",
                                                  "activation_function",
                                                  "hidden_act",
                                                  "n_layer",
                                                  "num_hidden_layers",
                                                  "n_head",
                                                  "num_attention_heads",
                                                  "num_key_value_heads",
                                                  "n_embd",
                                                  "hidden_size",
                                                  "n_inner",
                                                  "intermediate_size",
                                                  "head_dim",
                                                  "n_positions",
                                                  "max_position_embeddings",
                                                  "vocab_size",
                                                  "layer_norm_epsilon",
                                                  "rms_norm_eps",
                                                  "initializer_range",
                                                  "tie_word_embeddings",
                                                  "attention_bias",
                                                  "mlp_bias",
                                                  "scale_attn_weights",
                                                  "scale_attn_by_inverse_layer_idx",
                                                  "rope_theta",
                                                  "rope_scaling",
                                                  "rope_parameters",
                                                  "sliding_window",
                                                  "use_sliding_window",
                                                  "max_window_layers",
                                                  "layer_types",
                                                  "bos_token_id",
                                                  "eos_token_id",
                                                  "attn_pdrop",
                                                  "embd_pdrop",
                                                  "resid_pdrop",
                                                  "attention_dropout",
                                                  "add_cross_attention",
                                                  "pretraining_tp",
                                                  "partial_rotary_factor",
                                                  "quantization_config"};

enum { TEXT = 64 };

/* A member's value, of one of the kinds that members have. */
typedef struct value {
    fsdp_json_kind kind; /* NULL: absent */
    double number;       /* also of a bool */
    char text[TEXT];     /* cut, which no known word is */
} value;

typedef struct reader {
    fsdp_json json;
    const char *origin;
    value members[MEMBERS];
    fsdp_rope rope;
    bool is_there[MEMBERS]; /* maybe null */
    bool has_rope, has_original_context, has_factor;
    int64_t layer_types;
    bool is_windowed[FSDP_MODEL_LAYERS];
} reader;

static fsdp_status fail_member(const reader *from, const char *name, const char *reason,
                               fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "'%s': this trainer cannot do %s: %s", from->origin, name,
                     reason);
}

static fsdp_status read_text(fsdp_json *json, char *text_out, fsdp_error *err)
{
    const char *text;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &text, &size, err));
    snprintf(text_out, TEXT, "%s", text);
    return FSDP_OK;
}

/* Anything but a plain value is skipped, and keeps its kind. */
static fsdp_status read_value(fsdp_json *json, value *value_out, fsdp_error *err)
{
    value_out->kind = fsdp_json_peek(json);
    if (value_out->kind == FSDP_JSON_STRING)
        return read_text(json, value_out->text, err);
    if (value_out->kind == FSDP_JSON_NUMBER)
        return fsdp_json_f64(json, &value_out->number, err);
    if (value_out->kind == FSDP_JSON_BOOL) {
        bool is_set;
        FSDP_TRY(fsdp_json_bool(json, &is_set, err));
        value_out->number = is_set;
        return FSDP_OK;
    }
    return fsdp_json_skip(json, err);
}

/* --- rotary positions ---------------------------------------------------------------------------- */

static fsdp_status set_rope_kind(reader *from, const char *member, const char *kind,
                                 fsdp_error *err)
{
    if (strcmp(kind, "default") == 0)
        from->rope.kind = FSDP_ROPE_DEFAULT;
    else if (strcmp(kind, "linear") == 0)
        from->rope.kind = FSDP_ROPE_LINEAR;
    else if (strcmp(kind, "llama3") == 0)
        from->rope.kind = FSDP_ROPE_LLAMA3;
    else {
        char reason[160];
        snprintf(reason, sizeof reason, "'%s' is none of default, linear, llama3", kind);
        return fail_member(from, member, reason, err);
    }
    return FSDP_OK;
}

/* rope_scaling (transformers 4) or rope_parameters (5). */
static fsdp_status read_rope(reader *from, const char *member, fsdp_error *err)
{
    static const char *const names[] = {"rope_type",        "type",
                                        "factor",           "low_freq_factor",
                                        "high_freq_factor", "original_max_position_embeddings",
                                        "rope_theta",       "partial_rotary_factor",
                                        "full_attention",   "sliding_attention"};
    fsdp_json_members members = {names, sizeof names / sizeof *names, 0};
    double *const numbers[] = {NULL,
                               NULL,
                               &from->rope.factor,
                               &from->rope.low_freq_factor,
                               &from->rope.high_freq_factor,
                               &from->rope.original_context,
                               &from->rope.theta};
    if (fsdp_json_peek(&from->json) != FSDP_JSON_OBJECT)
        return fsdp_json_skip(&from->json, err);
    from->has_rope = true;
    FSDP_TRY(fsdp_json_enter_object(&from->json, err));
    for (;;) {
        int which;
        value got;
        FSDP_TRY(fsdp_json_next_member(&from->json, &members, &which, err));
        if (which < 0)
            return FSDP_OK;
        FSDP_TRY(read_value(&from->json, &got, err));
        if (which >= 8)
            return fail_member(from, member, "it differs between layers", err);
        if (which < 2 && got.kind == FSDP_JSON_STRING)
            FSDP_TRY(set_rope_kind(from, member, got.text, err));
        if (which == 7 && got.kind == FSDP_JSON_NUMBER && got.number != 1)
            return fail_member(from, "partial_rotary_factor", "heads are rotated whole", err);
        if (which >= 2 && which < 7 && got.kind == FSDP_JSON_NUMBER)
            *numbers[which] = got.number;
        from->has_original_context |= which == 5 && got.kind == FSDP_JSON_NUMBER;
        from->has_factor |= which == 2 && got.kind == FSDP_JSON_NUMBER;
    }
}

static fsdp_status read_layer_types(reader *from, fsdp_error *err)
{
    bool more;
    char kind[TEXT];
    if (fsdp_json_peek(&from->json) != FSDP_JSON_ARRAY)
        return fsdp_json_skip(&from->json, err);
    FSDP_TRY(fsdp_json_enter_array(&from->json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_item(&from->json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(read_text(&from->json, kind, err));
        if (from->layer_types == FSDP_MODEL_LAYERS)
            return fail_member(from, "layer_types", "too many layers", err);
        if (strcmp(kind, "full_attention") != 0 && strcmp(kind, "sliding_attention") != 0)
            return fail_member(from, "layer_types",
                               "a layer is neither full_attention nor sliding_attention", err);
        from->is_windowed[from->layer_types++] = kind[0] == 's';
    }
}

static fsdp_status read_members(reader *from, fsdp_error *err)
{
    fsdp_json_members members = {member_names, MEMBERS, 0};
    FSDP_TRY(fsdp_json_enter_object(&from->json, err));
    for (;;) {
        int which;
        FSDP_TRY(fsdp_json_next_member(&from->json, &members, &which, err));
        if (which < 0)
            return fsdp_json_finish(&from->json, err);
        from->members[which].kind = fsdp_json_peek(&from->json);
        from->is_there[which] = true;
        if (which == ROPE_SCALING || which == ROPE_PARAMETERS)
            FSDP_TRY(read_rope(from, member_names[which], err));
        else if (which == LAYER_TYPES)
            FSDP_TRY(read_layer_types(from, err));
        else
            FSDP_TRY(read_value(&from->json, &from->members[which], err));
    }
}

/* --- from members to a config -------------------------------------------------------------------- */

static bool has(const reader *from, config_member which)
{
    return from->members[which].kind != FSDP_JSON_NULL;
}

/* For members where null does not mean the default. */
static bool is_null(const reader *from, config_member which)
{
    return from->is_there[which] && !has(from, which);
}

static bool is_on(const reader *from, config_member which)
{
    return from->members[which].kind == FSDP_JSON_BOOL && from->members[which].number != 0;
}

static fsdp_status take_number(const reader *from, config_member which, double *number,
                               fsdp_error *err)
{
    if (!has(from, which))
        return FSDP_OK;
    if (from->members[which].kind != FSDP_JSON_NUMBER)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': %s is not a number", from->origin,
                         member_names[which]);
    *number = from->members[which].number;
    return FSDP_OK;
}

static fsdp_status take_count(const reader *from, config_member which, int64_t *count,
                              fsdp_error *err)
{
    double number = (double)*count;
    FSDP_TRY(take_number(from, which, &number, err));
    if (!(number >= -1) || number > 9e15 || number != floor(number))
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': %s is not a whole number", from->origin,
                         member_names[which]);
    *count = (int64_t)number;
    return FSDP_OK;
}

/* A null is false in transformers 4 and an error in 5: refused where the default is true. */
static fsdp_status take_bool(const reader *from, config_member which, bool *is_set, fsdp_error *err)
{
    if (is_null(from, which) && *is_set)
        return fail_member(from, member_names[which], "it is null; write true or false", err);
    if (!has(from, which))
        return FSDP_OK;
    if (from->members[which].kind != FSDP_JSON_BOOL)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': %s is neither true nor false", from->origin,
                         member_names[which]);
    *is_set = from->members[which].number != 0;
    return FSDP_OK;
}

static fsdp_status take_activation(const reader *from, config_member which,
                                   fsdp_nn_function *function, fsdp_error *err)
{
    static const struct {
        const char *name;
        fsdp_nn_function function;
    } known[] = {{"gelu", FSDP_NN_GELU},          {"gelu_python", FSDP_NN_GELU},
                 {"gelu_new", FSDP_NN_GELU_TANH}, {"gelu_pytorch_tanh", FSDP_NN_GELU_TANH},
                 {"silu", FSDP_NN_SILU},          {"swish", FSDP_NN_SILU},
                 {"relu", FSDP_NN_RELU}};
    const char *name = from->members[which].text;
    if (!has(from, which))
        return FSDP_OK;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(name, known[i].name) == 0) {
            *function = known[i].function;
            return FSDP_OK;
        }
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s': this trainer cannot do %s '%s'; it can do gelu, gelu_new, silu, relu",
                     from->origin, member_names[which], name);
}

static fsdp_status refuse_others(const reader *from, fsdp_error *err)
{
    double one = 1;
    if (has(from, QUANTIZATION_CONFIG))
        return fail_member(from, "quantization_config", "its weights are not floats", err);
    if (is_on(from, ADD_CROSS_ATTENTION))
        return fail_member(from, "add_cross_attention", "there is no encoder", err);
    FSDP_TRY(take_number(from, PRETRAINING_TP, &one, err));
    if (one != 1)
        return fail_member(from, "pretraining_tp", "it is not 1", err);
    FSDP_TRY(take_number(from, PARTIAL_ROTARY_FACTOR, &one, err));
    if (one != 1)
        return fail_member(from, "partial_rotary_factor", "heads are rotated whole", err);
    return FSDP_OK;
}

static fsdp_status take_gpt2(const reader *from, fsdp_transformer_config *config, fsdp_error *err)
{
    FSDP_TRY(take_count(from, N_LAYER, &config->layers, err));
    FSDP_TRY(take_count(from, N_HEAD, &config->heads, err));
    FSDP_TRY(take_count(from, N_EMBD, &config->width, err));
    FSDP_TRY(take_count(from, N_INNER, &config->inner, err));
    FSDP_TRY(take_count(from, N_POSITIONS, &config->context, err));
    /* transformers takes these names of other families, too, and they win */
    FSDP_TRY(take_count(from, NUM_HIDDEN_LAYERS, &config->layers, err));
    FSDP_TRY(take_count(from, NUM_ATTENTION_HEADS, &config->heads, err));
    FSDP_TRY(take_count(from, HIDDEN_SIZE, &config->width, err));
    FSDP_TRY(take_count(from, MAX_POSITIONS, &config->context, err));
    FSDP_TRY(take_number(from, LAYER_NORM_EPSILON, &config->norm_eps, err));
    FSDP_TRY(take_activation(from, ACTIVATION_FUNCTION, &config->activation, err));
    FSDP_TRY(take_bool(from, SCALE_ATTN_WEIGHTS, &config->scales_attention, err));
    FSDP_TRY(take_bool(from, SCALE_BY_LAYER, &config->scales_by_layer, err));
    for (config_member which = ATTN_PDROP; which <= RESID_PDROP; which++)
        config->has_dropout |= has(from, which) && from->members[which].number != 0;
    return FSDP_OK;
}

/* Which layers have a window, as each family's class decides it. */
static fsdp_status take_windows(const reader *from, fsdp_transformer_config *config,
                                fsdp_error *err)
{
    bool use = config->family == FSDP_MISTRAL, is_any = false;
    int64_t full_layers = 28;
    if (config->family == FSDP_LLAMA)
        return FSDP_OK;
    if (is_null(from, SLIDING_WINDOW))
        config->window = 0;
    if (config->family == FSDP_QWEN2) /* mistral has no such member: transformers ignores it */
        FSDP_TRY(take_bool(from, USE_SLIDING_WINDOW, &use, err));
    FSDP_TRY(take_count(from, MAX_WINDOW_LAYERS, &full_layers, err));
    FSDP_TRY(take_count(from, SLIDING_WINDOW, &config->window, err));
    if (!use)
        config->window = 0;
    if (config->window < 0)
        return fail_member(from, "sliding_window", "it is negative", err);
    for (int64_t i = 0; i < config->layers && i < FSDP_MODEL_LAYERS; i++) {
        config->is_windowed[i] = from->layer_types > 0          ? from->is_windowed[i]
                                 : config->family == FSDP_QWEN2 ? i >= full_layers
                                                                : true;
        is_any |= config->is_windowed[i];
    }
    if (use && is_any && config->window == 0 && has(from, SLIDING_WINDOW))
        return fail_member(from, "sliding_window",
                           "a window of 0 hides every token; null is no window", err);
    if (from->layer_types > 0 && from->layer_types != config->layers)
        return fail_member(from, "layer_types", "its length is not the number of layers", err);
    return FSDP_OK;
}

static fsdp_status take_rope(const reader *from, fsdp_transformer_config *config, fsdp_error *err)
{
    double theta = config->rope.theta;
    FSDP_TRY(take_number(from, ROPE_THETA, &theta, err));
    if (from->has_rope)
        config->rope = from->rope;
    if (config->rope.theta == 0 || !from->has_rope)
        config->rope.theta = theta;
    const fsdp_rope *rope = &config->rope;
    if (rope->kind != FSDP_ROPE_DEFAULT && !from->has_factor)
        return fail_member(from,
                           from->is_there[ROPE_PARAMETERS] ? "rope_parameters" : "rope_scaling",
                           "it has no factor", err);
    if (rope->kind == FSDP_ROPE_LLAMA3 && !from->has_original_context)
        config->rope.original_context = (double)config->context;
    if (!(rope->theta > 0) || !isfinite(rope->theta) ||
        (rope->kind != FSDP_ROPE_DEFAULT && !(rope->factor > 0)) ||
        (rope->kind == FSDP_ROPE_LLAMA3 &&
         (!(rope->low_freq_factor > 0) || !(rope->high_freq_factor > rope->low_freq_factor) ||
          !(rope->original_context > 0))))
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': the factors of rotary positions are wrong",
                         from->origin);
    return FSDP_OK;
}

static fsdp_status take_llama(const reader *from, fsdp_transformer_config *config, fsdp_error *err)
{
    FSDP_TRY(take_count(from, NUM_HIDDEN_LAYERS, &config->layers, err));
    FSDP_TRY(take_count(from, NUM_ATTENTION_HEADS, &config->heads, err));
    FSDP_TRY(take_count(from, NUM_KEY_VALUE_HEADS, &config->kv_heads, err));
    FSDP_TRY(take_count(from, HIDDEN_SIZE, &config->width, err));
    FSDP_TRY(take_count(from, INTERMEDIATE_SIZE, &config->inner, err));
    FSDP_TRY(take_count(from, HEAD_DIM, &config->head_dim, err));
    FSDP_TRY(take_count(from, MAX_POSITIONS, &config->context, err));
    FSDP_TRY(take_number(from, RMS_NORM_EPS, &config->norm_eps, err));
    FSDP_TRY(take_activation(from, HIDDEN_ACT, &config->activation, err));
    if (config->family == FSDP_LLAMA) {
        FSDP_TRY(take_bool(from, ATTENTION_BIAS, &config->attention_bias, err));
        FSDP_TRY(take_bool(from, MLP_BIAS, &config->mlp_bias, err));
        config->output_bias = config->attention_bias;
    }
    config->has_dropout |=
        has(from, ATTENTION_DROPOUT) && from->members[ATTENTION_DROPOUT].number != 0;
    FSDP_TRY(take_windows(from, config, err));
    return take_rope(from, config, err);
}

/* Sizes that follow from others when they are absent or null. */
static void fill_sizes(fsdp_transformer_config *config)
{
    if (config->kv_heads < 1)
        config->kv_heads = config->heads;
    if (config->head_dim < 1 && config->heads > 0)
        config->head_dim = config->width / config->heads;
    if (config->inner < 1 && config->width < (1 << 24))
        config->inner = 4 * config->width;
}

/* Lists of ids leave the default. */
static fsdp_status take_token(const reader *from, config_member which, int64_t *id, fsdp_error *err)
{
    if (is_null(from, which))
        *id = -1;
    return from->members[which].kind == FSDP_JSON_NUMBER ? take_count(from, which, id, err)
                                                         : FSDP_OK;
}

static fsdp_status take_members(const reader *from, fsdp_transformer_config *config,
                                fsdp_error *err)
{
    fsdp_family family;
    const char *name = from->members[MODEL_TYPE].text;
    if (from->members[MODEL_TYPE].kind != FSDP_JSON_STRING)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no model_type", from->origin);
    if (!fsdp_family_find(name, &family))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s': this trainer cannot do model_type '%s'; it can do gpt2, llama, "
                         "mistral, qwen2",
                         from->origin, name);
    fsdp_transformer_config_init(config, family);
    FSDP_TRY(refuse_others(from, err));
    FSDP_TRY(family == FSDP_GPT2 ? take_gpt2(from, config, err) : take_llama(from, config, err));
    FSDP_TRY(take_count(from, VOCAB_SIZE, &config->vocab, err));
    FSDP_TRY(take_number(from, INITIALIZER_RANGE, &config->initializer_range, err));
    FSDP_TRY(take_bool(from, TIE_WORD_EMBEDDINGS, &config->is_tied, err));
    FSDP_TRY(take_token(from, BOS, &config->bos, err));
    FSDP_TRY(take_token(from, EOS, &config->eos, err));
    fill_sizes(config);
    return fsdp_transformer_config_check(config, from->origin, err);
}

fsdp_status fsdp_transformer_config_parse(const char *text, size_t size, const char *origin,
                                          fsdp_transformer_config *config_out, fsdp_error *err)
{
    reader *from = fsdp_alloc(1, sizeof *from);
    if (!from)
        return fsdp_fail_memory(err, "a model's config");
    from->origin = origin;
    from->rope.factor = 1;
    fsdp_json_init(&from->json, text, size, origin);
    fsdp_status st = read_members(from, err);
    if (st == FSDP_OK)
        st = take_members(from, config_out, err);
    fsdp_json_release(&from->json);
    fsdp_free(from);
    return st;
}
