/* config.json as key-value pairs of GGUF: see gguf_values.h. */
#include "statedict/gguf_model/gguf_values.h"

#include "base/core/mem.h"
#include "base/data/json.h"
#include "base/text.h"
#include "formats/frameworks.h"
#include "statedict/expect/expect.h"
#include "statedict/sd/layout_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* --- members of config.json ------------------------------------------------------------------- */

/* A member and the one that means the same in GPT-2. */
typedef enum config_number {
    LAYERS,
    LENGTH,
    WIDTH,
    INNER,
    HEADS,
    GROUPS,
    HEAD_WIDTH,
    VOCAB,
    EXPERTS,
    EXPERTS_USED,
    EXPERT_INNER,
    BOS,
    EOS,
    EPSILON,
    LAYER_EPSILON,
    THETA,
    /* of rope_parameters; not below it */
    SCALE,
    SCALED_LENGTH,
    ROPE_PART,
    ATTENTION_FACTOR,
    BETA_FAST,
    BETA_SLOW,
    MSCALE,
    MSCALE_ALL,
    TRUNCATE,
    /* what llama.cpp cannot be told */
    WINDOW,
    USES_WINDOW,
    FULL_LAYERS,
    SCALES_BY_LAYER,
    SCALES_WEIGHTS,
    NUMBERS
} config_number;

typedef struct number_name {
    const char *name; /* NULL after the last */
    config_number number;
} number_name;

static const number_name number_names[] = {
    {"num_hidden_layers", LAYERS},
    {"n_layer", LAYERS},
    {"max_position_embeddings", LENGTH},
    {"n_positions", LENGTH},
    {"hidden_size", WIDTH},
    {"n_embd", WIDTH},
    {"intermediate_size", INNER},
    {"n_inner", INNER},
    {"num_attention_heads", HEADS},
    {"n_head", HEADS},
    {"num_key_value_heads", GROUPS},
    {"head_dim", HEAD_WIDTH},
    {"vocab_size", VOCAB},
    {"num_local_experts", EXPERTS},
    {"num_experts", EXPERTS},
    {"num_experts_per_tok", EXPERTS_USED},
    {"moe_intermediate_size", EXPERT_INNER},
    {"bos_token_id", BOS},
    {"eos_token_id", EOS},
    {"rms_norm_eps", EPSILON},
    {"layer_norm_epsilon", LAYER_EPSILON},
    {"rope_theta", THETA},
    {"original_max_position_embeddings", SCALED_LENGTH},
    {"partial_rotary_factor", ROPE_PART},
    {"sliding_window", WINDOW},
    {"use_sliding_window", USES_WINDOW},
    {"max_window_layers", FULL_LAYERS},
    {"scale_attn_by_inverse_layer_idx", SCALES_BY_LAYER},
    {"scale_attn_weights", SCALES_WEIGHTS},
    {0},
};

/* Members of rope_parameters. */
static const number_name rope_names[] = {
    {"rope_theta", THETA},
    {"factor", SCALE},
    {"original_max_position_embeddings", SCALED_LENGTH},
    {"partial_rotary_factor", ROPE_PART},
    {"attention_factor", ATTENTION_FACTOR},
    {"beta_fast", BETA_FAST},
    {"beta_slow", BETA_SLOW},
    {"mscale", MSCALE},
    {"mscale_all_dim", MSCALE_ALL},
    {"truncate", TRUNCATE},
    {0},
};

typedef struct model_config {
    const char *path;
    char type[64];
    bool has[NUMBERS];
    double numbers[NUMBERS];
    char rope_type[32], activation[32];
    bool has_layer_types, has_sliding_layer;
    bool has_no_window;    /* null: sliding_window is not left out */
    bool has_usual_window; /* it is left out */
    bool has_many_ropes;   /* rope_parameters by type of layer */
} model_config;

static fsdp_status take_text(fsdp_json *json, char *out, size_t room, fsdp_error *err)
{
    const char *data;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &data, &size, err));
    if (size < room && !memchr(data, '\0', size)) {
        memcpy(out, data, size);
        out[size] = '\0';
    }
    return FSDP_OK;
}

/* A number, or the first of a list of them (eos_token_id); true is 1. */
static fsdp_status take_number(fsdp_json *json, model_config *config, config_number at,
                               fsdp_error *err)
{
    fsdp_json_kind kind = fsdp_json_peek(json);
    if (kind == FSDP_JSON_NUMBER) {
        config->has[at] = true;
        return fsdp_json_f64(json, &config->numbers[at], err);
    }
    if (kind == FSDP_JSON_BOOL) {
        bool truth = false;
        FSDP_TRY(fsdp_json_bool(json, &truth, err));
        config->numbers[at] = truth;
        config->has[at] = true;
        return FSDP_OK;
    }
    if (kind != FSDP_JSON_ARRAY)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (bool more = true, is_first = true;; is_first = false) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        bool takes = is_first && fsdp_json_peek(json) == FSDP_JSON_NUMBER;
        config->has[at] = config->has[at] || takes;
        FSDP_TRY(takes ? fsdp_json_f64(json, &config->numbers[at], err)
                       : fsdp_json_skip(json, err));
    }
}

static const number_name *find_number(const number_name *list, const char *key, size_t size)
{
    while (list->name && !fsdp_bytes_are(key, size, list->name))
        list++;
    return list->name ? list : NULL;
}

/* rope_parameters of transformers 5, rope_scaling of version 4. */
static fsdp_status take_rope(fsdp_json *json, model_config *config, fsdp_error *err)
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
        fsdp_json_kind kind = fsdp_json_peek(json);
        const number_name *number = find_number(rope_names, key, size);
        bool is_type = fsdp_bytes_are(key, size, "rope_type") || fsdp_bytes_are(key, size, "type");
        config->has_many_ropes = config->has_many_ropes || kind == FSDP_JSON_OBJECT;
        if (number)
            FSDP_TRY(take_number(json, config, number->number, err));
        else if (is_type && kind == FSDP_JSON_STRING)
            FSDP_TRY(take_text(json, config->rope_type, sizeof config->rope_type, err));
        else
            FSDP_TRY(fsdp_json_skip(json, err));
    }
}

static fsdp_status take_layer_types(fsdp_json *json, model_config *config, fsdp_error *err)
{
    bool more;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    config->has_layer_types = true;
    for (;;) {
        char type[32] = "";
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(fsdp_json_peek(json) == FSDP_JSON_STRING ? take_text(json, type, sizeof type, err)
                                                          : fsdp_json_skip(json, err));
        config->has_sliding_layer =
            config->has_sliding_layer || strcmp(type, "sliding_attention") == 0;
    }
}

static fsdp_status take_member(fsdp_json *json, const char *key, size_t size, model_config *config,
                               fsdp_error *err)
{
    fsdp_json_kind kind = fsdp_json_peek(json);
    const number_name *number = find_number(number_names, key, size);
    config->has_no_window =
        config->has_no_window || (kind == FSDP_JSON_NULL && number && number->number == WINDOW);
    bool is_activation =
        fsdp_bytes_are(key, size, "hidden_act") || fsdp_bytes_are(key, size, "activation_function");
    if (number)
        return take_number(json, config, number->number, err);
    if (fsdp_bytes_are(key, size, "rope_parameters") || fsdp_bytes_are(key, size, "rope_scaling"))
        return take_rope(json, config, err);
    if (fsdp_bytes_are(key, size, "layer_types") && kind == FSDP_JSON_ARRAY)
        return take_layer_types(json, config, err);
    if (is_activation && kind == FSDP_JSON_STRING)
        return take_text(json, config->activation, sizeof config->activation, err);
    if (fsdp_bytes_are(key, size, "model_type") && kind == FSDP_JSON_STRING)
        return take_text(json, config->type, sizeof config->type, err);
    return fsdp_json_skip(json, err);
}

static fsdp_status read_config(fsdp_json *json, model_config *config, fsdp_error *err)
{
    const char *key;
    size_t size;
    bool more;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            return fsdp_json_finish(json, err);
        FSDP_TRY(take_member(json, key, size, config, err));
    }
}

/* --- pairs ------------------------------------------------------------------------------------ */

#define SILU "silu|swish"
#define GELU "gelu_new|gelu_pytorch_tanh|gelu_fast"
typedef enum window_use { NO_WINDOW, ALWAYS, IF_USED } window_use;

/* Models by model_type: llama.cpp's name, that of the pattern of words of its tokenizer, the activations that
 * llama.cpp computes for it, and whether transformers gives it a sliding window. After these are the numbers
 * that transformers takes where config.json leaves them out, 0 where it takes none: llama.cpp has others, or
 * asks for the key. */
typedef struct gguf_family {
    const char *type, *architecture, *pre, *activations;
    window_use window;
    double usual_epsilon, usual_theta, usual_experts, usual_window;
} gguf_family;

static const gguf_family families[] = {
    {"llama", "llama", "llama-bpe", SILU, NO_WINDOW, 1e-6, 1e4, 0, 0},
    {"mistral", "llama", "default", SILU, ALWAYS, 1e-6, 1e4, 0, 4096},
    {"mixtral", "llama", "default", SILU, ALWAYS, 1e-5, 1e6, 2, 0},
    {"qwen2", "qwen2", "qwen2", SILU, IF_USED, 1e-6, 1e4, 0, 4096},
    {"qwen3", "qwen3", "qwen2", SILU, IF_USED, 1e-6, 1e4, 0, 4096},
    {"qwen3_moe", "qwen3moe", "qwen2", SILU, IF_USED, 1e-6, 1e4, 8, 4096},
    {"gpt2", "gpt2", "gpt-2", GELU, NO_WINDOW, 1e-5, 0, 0, 0},
};

/* Numbers in the order of the file. f32: readers ask for a float. */
static const struct {
    const char *key;
    config_number number;
    bool f32;
} pairs[] = {
    {"block_count", LAYERS, false},
    {"context_length", LENGTH, false},
    {"embedding_length", WIDTH, false},
    {"feed_forward_length", INNER, false},
    {"attention.head_count", HEADS, false},
    {"attention.head_count_kv", GROUPS, false},
    {"rope.freq_base", THETA, true},
    {"attention.layer_norm_rms_epsilon", EPSILON, true},
    {"attention.layer_norm_epsilon", LAYER_EPSILON, true},
    {"expert_count", EXPERTS, false},
    {"expert_used_count", EXPERTS_USED, false},
    {"expert_feed_forward_length", EXPERT_INNER, false},
    {"attention.key_length", HEAD_WIDTH, false},
    {"attention.value_length", HEAD_WIDTH, false},
    {"vocab_size", VOCAB, false},
};

static fsdp_status add_number(fsdp_named_values *out, const char *architecture, const char *key,
                              double number, bool f32, fsdp_error *err)
{
    char name[128];
    snprintf(name, sizeof name, "%s.%s", architecture, key);
    fsdp_value value =
        f32 ? fsdp_value_f64((double)(float)number) : fsdp_value_i64((int64_t)number);
    return fsdp_named_values_add(out, name, &value, err);
}

/* --- the numbers of the tensors --------------------------------------------------------------- */

static const fsdp_entry *find_tensor(const fsdp_sd *sd, const char *name)
{
    int64_t at = fsdp_sd_find(sd, name, strlen(name));
    const fsdp_entry *entry = at < 0 ? NULL : fsdp_sd_at(sd, (size_t)at);
    return entry && entry->kind != FSDP_ENTRY_VALUE
               ? fsdp_sd_at(sd, fsdp_sd_tensor_of(sd, (size_t)at))
               : NULL;
}

/* The tensor decides where config.json has no such number, and two numbers are a contradiction. */
static fsdp_status set_number(model_config *config, config_number number, double value,
                              const char *tensor, fsdp_error *err)
{
    if (config->has[number] && config->numbers[number] != value) {
        const number_name *name = number_names;
        while (name->number != number)
            name++;
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' says %s %g, and '%s' has %g: --copy-from takes the config of the "
                         "same model",
                         config->path, name->name, config->numbers[number], tensor, value);
    }
    config->has[number] = true;
    config->numbers[number] = value;
    return FSDP_OK;
}

/* Numbers that are a dim of a tensor. */
static fsdp_status take_dims(model_config *config, const fsdp_sd *sd, fsdp_error *err)
{
    static const struct {
        const char *tensor;
        int dim;
        config_number number;
    } dims[] = {
        {"token_embd.weight", 0, VOCAB},          {"token_embd.weight", 1, WIDTH},
        {"position_embd.weight", 0, LENGTH},      {"blk.0.ffn_up.weight", 0, INNER},
        {"blk.0.ffn_up_exps.weight", 0, EXPERTS}, {"blk.0.ffn_up_exps.weight", 1, INNER},
    };
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        const fsdp_entry *tensor = find_tensor(sd, dims[i].tensor);
        config_number number = dims[i].number;
        if (number == INNER && config->has[EXPERT_INNER] && tensor && tensor->ndim == 3)
            number = EXPERT_INNER;
        if (tensor && tensor->ndim > dims[i].dim)
            FSDP_TRY(set_number(config, number, (double)tensor->shape[dims[i].dim], dims[i].tensor,
                                err));
    }
    return FSDP_OK;
}

/* Heads by the rows of queries and keys. */
static fsdp_status take_heads(model_config *config, const fsdp_sd *sd, fsdp_error *err)
{
    const char *names[] = {"blk.0.attn_q.weight", "blk.0.attn_k.weight"};
    const fsdp_entry *queries = find_tensor(sd, names[0]), *keys = find_tensor(sd, names[1]);
    if (!queries || !keys || queries->ndim != 2 || keys->ndim != 2 || !config->has[HEADS] ||
        config->numbers[HEADS] < 1)
        return FSDP_OK;
    double width = (double)queries->shape[0] / config->numbers[HEADS];
    double groups = (double)keys->shape[0] / width;
    if (width != floor(width) || groups != floor(groups))
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' says num_attention_heads %g, and that many are not in the %" PRId64
                         " rows of '%s': --copy-from takes the config of the same model",
                         config->path, config->numbers[HEADS], queries->shape[0], names[0]);
    bool is_usual =
        !config->has[HEAD_WIDTH] && width * config->numbers[HEADS] == config->numbers[WIDTH];
    if (!is_usual)
        FSDP_TRY(set_number(config, HEAD_WIDTH, width, names[0], err));
    return set_number(config, GROUPS, groups, names[1], err);
}

static void count_layers(model_config *config, const fsdp_sd *sd)
{
    int64_t most = -1, layer;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        char name[32];
        size_t size = entry->name_size < sizeof name - 1 ? entry->name_size : sizeof name - 1;
        memcpy(name, entry->name, size);
        name[size] = '\0';
        if (entry->kind != FSDP_ENTRY_VALUE && sscanf(name, "blk.%9" SCNd64 ".", &layer) == 1 &&
            layer > most)
            most = layer;
    }
    if (most < 0)
        return;
    config->has[LAYERS] = true;
    config->numbers[LAYERS] = (double)(most + 1);
}

/* Numbers that config.json leaves out where they follow from others. */
static fsdp_status complete(model_config *config, const fsdp_sd *sd, fsdp_error *err)
{
    static const struct {
        config_number number;
        const char *name;
    } needed[] = {{LAYERS, "num_hidden_layers"},
                  {WIDTH, "hidden_size"},
                  {HEADS, "num_attention_heads"},
                  {LENGTH, "max_position_embeddings"}};
    for (int i = 0; i < EPSILON; i++) {
        if (config->has[i] && !(config->numbers[i] >= -1 && config->numbers[i] <= INT32_MAX))
            return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' holds the number %g where a size belongs",
                             config->path, config->numbers[i]);
    }
    if (sd) {
        count_layers(config, sd);
        FSDP_TRY(take_dims(config, sd, err));
        FSDP_TRY(take_heads(config, sd, err));
    }
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!config->has[needed[i].number] || config->numbers[needed[i].number] < 1)
            return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no %s, which GGUF needs", config->path,
                             needed[i].name);
    if (!config->has[INNER]) {
        config->numbers[INNER] = 4 * config->numbers[WIDTH];
        config->has[INNER] = true;
    }
    return FSDP_OK;
}

/* Numbers that config.json leaves out, as transformers takes them. */
static void take_usual(model_config *config, const gguf_family *family)
{
    const struct {
        config_number number;
        double value;
    } usual[] = {
        {strcmp(family->type, "gpt2") == 0 ? LAYER_EPSILON : EPSILON, family->usual_epsilon},
        {THETA, family->usual_theta},
        {EXPERTS_USED, family->usual_experts},
        {WINDOW, config->has_no_window ? 0 : family->usual_window},
    };
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++) {
        if (config->has[usual[i].number] || usual[i].value == 0)
            continue;
        config->has[usual[i].number] = true;
        config->numbers[usual[i].number] = usual[i].value;
        config->has_usual_window = config->has_usual_window || usual[i].number == WINDOW;
    }
}

/* --- what llama.cpp has no key for ------------------------------------------------------------ */

static fsdp_status refuse(const model_config *config, const gguf_family *family, const char *what,
                          fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' says %s, and llama.cpp has no key for that in '%s': --copy-from DIR "
                     "with a config.json without it writes the model without it",
                     config->path, what, family->architecture);
}

/* Numbers that are the same for all models that llama.cpp runs. */
static fsdp_status check_fixed(const model_config *config, const gguf_family *family,
                               fsdp_error *err)
{
    static const struct {
        config_number number;
        double value;
        const char *name;
        bool of_yarn;
    } fixed[] = {
        {ROPE_PART, 1, "partial_rotary_factor", false},
        {BETA_FAST, 32, "beta_fast", true},
        {BETA_SLOW, 1, "beta_slow", true},
        {TRUNCATE, 1, "truncate", true},
        {SCALES_BY_LAYER, 0, "scale_attn_by_inverse_layer_idx", false},
        {SCALES_WEIGHTS, 1, "scale_attn_weights", false},
    };
    bool is_yarn = strcmp(config->rope_type, "yarn") == 0;
    char what[96];
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) {
        double value = config->numbers[fixed[i].number];
        if (!config->has[fixed[i].number] || value == fixed[i].value ||
            (fixed[i].of_yarn && !is_yarn))
            continue;
        snprintf(what, sizeof what, "%s %g", fixed[i].name, value);
        return refuse(config, family, what, err);
    }
    return FSDP_OK;
}

/* llama.cpp scales attention of YaRN by 0.1 ln(factor) + 1. */
static bool has_usual_attention(const model_config *config)
{
    double usual = 1 + 0.1 * log(config->numbers[SCALE]);
    if (config->has[ATTENTION_FACTOR])
        return fabs(config->numbers[ATTENTION_FACTOR] - usual) <= 1e-6 * usual;
    return !config->has[MSCALE] && !config->has[MSCALE_ALL];
}

static fsdp_status check_rope(const model_config *config, const gguf_family *family,
                              fsdp_error *err)
{
    const char *type = config->rope_type;
    bool is_yarn = strcmp(type, "yarn") == 0;
    bool has_key = is_yarn || strcmp(type, "linear") == 0;
    char what[96];
    bool is_plain = !type[0] || strcmp(type, "default") == 0 || strcmp(type, "llama3") == 0;
    if (config->has_many_ropes)
        return refuse(config, family, "rope_parameters for several types of layers", err);
    if (!has_key && !is_plain) {
        snprintf(what, sizeof what, "rope_type '%s'", type);
        return refuse(config, family, what, err);
    }
    if (has_key && !(config->has[SCALE] && config->numbers[SCALE] > 0))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' says rope_type '%s' without a factor",
                         config->path, type);
    if (is_yarn && !has_usual_attention(config))
        return refuse(config, family, "an attention_factor or mscale of YaRN", err);
    return FSDP_OK;
}

/* A window that is as long as the context changes nothing. */
static bool slides(const model_config *config, const gguf_family *family)
{
    bool is_used = family->window == ALWAYS ||
                   (family->window == IF_USED && config->numbers[USES_WINDOW] != 0);
    double full = config->has[FULL_LAYERS] ? config->numbers[FULL_LAYERS] : 28;
    if (family->window == IF_USED && is_used)
        is_used =
            config->has_layer_types ? config->has_sliding_layer : full < config->numbers[LAYERS];
    return is_used && config->has[WINDOW] && config->numbers[WINDOW] < config->numbers[LENGTH];
}

static fsdp_status check_told(const model_config *config, const gguf_family *family,
                              fsdp_error *err)
{
    char what[96];
    if (config->activation[0] &&
        !fsdp_framework_matches(family->activations, config->activation, NULL)) {
        snprintf(what, sizeof what, "%s '%s'",
                 strcmp(family->type, "gpt2") == 0 ? "activation_function" : "hidden_act",
                 config->activation);
        return refuse(config, family, what, err);
    }
    if (slides(config, family))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' %s sliding_window %.0f in a context of %.0f, and llama.cpp has no "
                         "key for that in '%s': --copy-from DIR with a config.json that has null "
                         "there writes the model without",
                         config->path,
                         config->has_usual_window ? "has no sliding_window, which means" : "says",
                         config->numbers[WINDOW], config->numbers[LENGTH], family->architecture);
    FSDP_TRY(check_fixed(config, family, err));
    return strcmp(family->type, "gpt2") == 0 ? FSDP_OK : check_rope(config, family, err);
}

/* --- pairs of all ----------------------------------------------------------------------------- */

static fsdp_status add_rope(const model_config *config, const char *architecture,
                            fsdp_named_values *out, fsdp_error *err)
{
    if (strcmp(architecture, "gpt2") == 0)
        return FSDP_OK;
    double width = config->has[HEAD_WIDTH] ? config->numbers[HEAD_WIDTH]
                                           : config->numbers[WIDTH] / config->numbers[HEADS];
    FSDP_TRY(add_number(out, architecture, "rope.dimension_count", width, false, err));
    bool is_yarn = strcmp(config->rope_type, "yarn") == 0;
    if (!is_yarn && strcmp(config->rope_type, "linear") != 0)
        return FSDP_OK;
    char name[128];
    snprintf(name, sizeof name, "%s.rope.scaling.type", architecture);
    FSDP_TRY(fsdp_named_values_add_text(out, name, config->rope_type, err));
    FSDP_TRY(
        add_number(out, architecture, "rope.scaling.factor", config->numbers[SCALE], true, err));
    double length = config->numbers[config->has[SCALED_LENGTH] ? SCALED_LENGTH : LENGTH];
    return is_yarn ? add_number(out, architecture, "rope.scaling.original_context_length", length,
                                false, err)
                   : FSDP_OK;
}

static fsdp_status add_pairs(const model_config *config, const char *architecture,
                             const char *directory, fsdp_named_values *out, fsdp_error *err)
{
    size_t size = strlen(directory);
    while (size > 0 && directory[size - 1] == '/')
        size--;
    size_t first = size;
    while (first > 0 && directory[first - 1] != '/')
        first--;
    char name[200];
    snprintf(name, sizeof name, "%.*s", (int)(size - first), directory + first);
    FSDP_TRY(fsdp_named_values_add_text(out, "general.architecture", architecture, err));
    FSDP_TRY(fsdp_named_values_add_text(out, "general.type", "model", err));
    FSDP_TRY(fsdp_named_values_add_text(out, "general.name",
                                        fsdp_utf8_valid(name, strlen(name)) ? name : "model", err));
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        if (config->has[pairs[i].number])
            FSDP_TRY(add_number(out, architecture, pairs[i].key, config->numbers[pairs[i].number],
                                pairs[i].f32, err));
    return add_rope(config, architecture, out, err);
}

static fsdp_status make_values(const fsdp_gguf_model *model, model_config *config,
                               fsdp_named_values *out, fsdp_gguf_tokens *tokens_out,
                               fsdp_error *err)
{
    size_t i = 0, count = sizeof families / sizeof *families;
    while (i < count && strcmp(families[i].type, config->type) != 0)
        i++;
    if (i == count)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is of a model of type '%s', and the numbers of that are not known; "
                         "convert_hf_to_gguf.py of llama.cpp knows more families",
                         config->path, config->type);
    FSDP_TRY(complete(config, model->sd, err));
    take_usual(config, &families[i]);
    FSDP_TRY(check_told(config, &families[i], err));
    FSDP_TRY(add_pairs(config, families[i].architecture, model->directory, out, err));
    *tokens_out =
        (fsdp_gguf_tokens){.pre = families[i].pre,
                           .vocab_size = config->has[VOCAB] ? (int64_t)config->numbers[VOCAB] : -1,
                           .bos = config->has[BOS] ? (int64_t)config->numbers[BOS] : -1,
                           .eos = config->has[EOS] ? (int64_t)config->numbers[EOS] : -1};
    return FSDP_OK;
}

fsdp_status fsdp_gguf_config(const fsdp_gguf_model *model, fsdp_named_values *out,
                             fsdp_gguf_tokens *tokens_out, fsdp_error *err)
{
    model_config config = {.path = model->config_path};
    fsdp_json json;
    fsdp_json_init(&json, model->config, model->config_size, model->config_path);
    fsdp_status st = read_config(&json, &config, err);
    fsdp_json_release(&json);
    return st == FSDP_OK ? make_values(model, &config, out, tokens_out, err) : st;
}
