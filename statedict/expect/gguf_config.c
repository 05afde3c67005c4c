/* config.json as key-value pairs of GGUF: see gguf_values.h. */
#include "statedict/expect/gguf_values.h"

#include "base/core/mem.h"
#include "base/data/json.h"
#include "base/text.h"
#include "statedict/expect/expect.h"

#include <inttypes.h>
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
    NUMBERS
} config_number;

static const struct {
    const char *name;
    config_number number;
} number_names[] = {
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
};

typedef struct model_config {
    const char *path;
    char type[64];
    bool has[NUMBERS];
    double numbers[NUMBERS];
    char rope_type[32];
    double rope_factor;
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

/* A number, or the first of a list of them (eos_token_id). */
static fsdp_status take_number(fsdp_json *json, model_config *config, config_number at,
                               fsdp_error *err)
{
    fsdp_json_kind kind = fsdp_json_peek(json);
    if (kind == FSDP_JSON_NUMBER) {
        config->has[at] = true;
        return fsdp_json_f64(json, &config->numbers[at], err);
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
        bool is_type = fsdp_bytes_are(key, size, "rope_type") || fsdp_bytes_are(key, size, "type");
        if (fsdp_bytes_are(key, size, "rope_theta"))
            FSDP_TRY(take_number(json, config, THETA, err));
        else if (fsdp_bytes_are(key, size, "factor") && kind == FSDP_JSON_NUMBER)
            FSDP_TRY(fsdp_json_f64(json, &config->rope_factor, err));
        else if (is_type && kind == FSDP_JSON_STRING)
            FSDP_TRY(take_text(json, config->rope_type, sizeof config->rope_type, err));
        else
            FSDP_TRY(fsdp_json_skip(json, err));
    }
}

static fsdp_status take_member(fsdp_json *json, const char *key, size_t size, model_config *config,
                               fsdp_error *err)
{
    for (size_t i = 0; i < sizeof number_names / sizeof *number_names; i++)
        if (fsdp_bytes_are(key, size, number_names[i].name))
            return take_number(json, config, number_names[i].number, err);
    if (fsdp_bytes_are(key, size, "rope_parameters") || fsdp_bytes_are(key, size, "rope_scaling"))
        return take_rope(json, config, err);
    if (fsdp_bytes_are(key, size, "model_type") && fsdp_json_peek(json) == FSDP_JSON_STRING)
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

/* Models by model_type: llama.cpp's name, and that of the pattern of words of its tokenizer. */
static const struct {
    const char *type, *architecture, *pre;
} models[] = {
    {"llama", "llama", "llama-bpe"}, {"mistral", "llama", "default"},
    {"mixtral", "llama", "default"}, {"qwen2", "qwen2", "qwen2"},
    {"qwen3", "qwen3", "qwen2"},     {"qwen3_moe", "qwen3moe", "qwen2"},
    {"gpt2", "gpt2", "gpt-2"},
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

/* Numbers that config.json leaves out where they follow from others. */
static fsdp_status complete(model_config *config, fsdp_error *err)
{
    static const struct {
        config_number number;
        const char *name;
    } needed[] = {{LAYERS, "num_hidden_layers"},
                  {WIDTH, "hidden_size"},
                  {HEADS, "num_attention_heads"},
                  {LENGTH, "max_position_embeddings"}};
    for (int i = 0; i < NUMBERS; i++) {
        bool is_float = i == EPSILON || i == LAYER_EPSILON || i == THETA;
        if (config->has[i] && !is_float &&
            !(config->numbers[i] >= -1 && config->numbers[i] <= INT32_MAX))
            return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' holds the number %g where a size belongs",
                             config->path, config->numbers[i]);
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

static fsdp_status add_rope(const model_config *config, const char *architecture,
                            fsdp_named_values *out, fsdp_error *err)
{
    if (strcmp(architecture, "gpt2") == 0)
        return FSDP_OK;
    double width = config->has[HEAD_WIDTH] ? config->numbers[HEAD_WIDTH]
                                           : config->numbers[WIDTH] / config->numbers[HEADS];
    FSDP_TRY(add_number(out, architecture, "rope.dimension_count", width, false, err));
    bool is_linear = strcmp(config->rope_type, "linear") == 0;
    if ((!is_linear && strcmp(config->rope_type, "yarn") != 0) || config->rope_factor <= 0)
        return FSDP_OK;
    char name[128];
    snprintf(name, sizeof name, "%s.rope.scaling.type", architecture);
    FSDP_TRY(fsdp_named_values_add_text(out, name, config->rope_type, err));
    return add_number(out, architecture, "rope.scaling.factor", config->rope_factor, true, err);
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

static fsdp_status make_values(const char *directory, model_config *config, fsdp_named_values *out,
                               fsdp_gguf_tokens *tokens_out, fsdp_error *err)
{
    size_t i = 0, count = sizeof models / sizeof *models;
    while (i < count && strcmp(models[i].type, config->type) != 0)
        i++;
    if (i == count)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is of a model of type '%s', and GGUF is written for llama, mistral, "
                         "mixtral, qwen2, qwen3, qwen3_moe and gpt2",
                         config->path, config->type);
    FSDP_TRY(complete(config, err));
    FSDP_TRY(add_pairs(config, models[i].architecture, directory, out, err));
    *tokens_out =
        (fsdp_gguf_tokens){.pre = models[i].pre,
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
    return st == FSDP_OK ? make_values(model->directory, &config, out, tokens_out, err) : st;
}
