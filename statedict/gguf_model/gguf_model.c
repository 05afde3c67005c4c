/*
 * config.json of a model out of the key-value pairs of a GGUF file: the inverse of gguf_config.c. See
 * gguf_values.h.
 */
#include "base/core/mem.h"
#include "statedict/gguf_model/gguf_values.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct gguf_model {
    const char *architecture;
    bool has_experts;
    const char *type, *class_name;
} models[] = {
    {"llama", false, "llama", "LlamaForCausalLM"},
    {"llama", true, "mixtral", "MixtralForCausalLM"},
    {"qwen2", false, "qwen2", "Qwen2ForCausalLM"},
    {"qwen3", false, "qwen3", "Qwen3ForCausalLM"},
    {"qwen3moe", true, "qwen3_moe", "Qwen3MoeForCausalLM"},
    {"gpt2", false, "gpt2", "GPT2LMHeadModel"},
};

/* Keys below the architecture, and their members: in GPT-2, where NULL is none, and elsewhere. */
static const struct {
    const char *key, *member, *gpt2;
    bool is_needed;
} members[] = {
    {"block_count", "num_hidden_layers", "n_layer", true},
    {"context_length", "max_position_embeddings", "n_positions", true},
    {"embedding_length", "hidden_size", "n_embd", true},
    {"feed_forward_length", "intermediate_size", "n_inner", false},
    {"attention.head_count", "num_attention_heads", "n_head", true},
    {"attention.head_count_kv", "num_key_value_heads", NULL, false},
    {"attention.key_length", "head_dim", NULL, false},
    {"attention.layer_norm_rms_epsilon", "rms_norm_eps", NULL, false},
    {"attention.layer_norm_epsilon", NULL, "layer_norm_epsilon", false},
    {"rope.freq_base", "rope_theta", NULL, false},
    {"expert_used_count", "num_experts_per_tok", NULL, false},
    {"expert_feed_forward_length", "moe_intermediate_size", NULL, false},
};

static const fsdp_value *find_value(const fsdp_sd *sd, const char *name)
{
    int64_t at = fsdp_sd_find(sd, name, strlen(name));
    const fsdp_entry *entry = at < 0 ? NULL : fsdp_sd_at(sd, (size_t)at);
    return entry && entry->kind == FSDP_ENTRY_VALUE ? &entry->value : NULL;
}

static const fsdp_value *find_below(const fsdp_sd *sd, const char *architecture, const char *key)
{
    char name[128];
    snprintf(name, sizeof name, "%s.%s", architecture, key);
    return find_value(sd, name);
}

/* GGUF's floats are f32: the fewest digits that come back as the same one. */
static void add_float(fsdp_text *out, double value)
{
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtof(text, NULL) == (float)value)
            break;
    }
    fsdp_text_addf(out, "%s%s", text, strpbrk(text, ".e") ? "" : ".0");
}

static bool is_number(const fsdp_value *value)
{
    return value && (value->kind == FSDP_VALUE_I64 ||
                     (value->kind == FSDP_VALUE_F64 && isfinite(value->as.f64)));
}

static void add_member(fsdp_text *out, const char *member, const fsdp_value *value)
{
    fsdp_text_addf(out, ",\n  \"%s\": ", member);
    if (value->kind == FSDP_VALUE_I64)
        fsdp_text_addf(out, "%" PRId64, value->as.i64);
    else
        add_float(out, value->as.f64);
}

static fsdp_status add_members(const fsdp_sd *sd, const struct gguf_model *model, fsdp_text *out,
                               fsdp_error *err)
{
    bool is_gpt2 = strcmp(model->architecture, "gpt2") == 0;
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        const char *member = is_gpt2 ? members[i].gpt2 : members[i].member;
        const fsdp_value *value = find_below(sd, model->architecture, members[i].key);
        if (member && is_number(value))
            add_member(out, member, value);
        else if (members[i].is_needed)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "there is no number '%s.%s', which a config.json needs",
                             model->architecture, members[i].key);
    }
    return FSDP_OK;
}

static double number_of(const fsdp_value *value)
{
    return value->kind == FSDP_VALUE_I64 ? (double)value->as.i64 : value->as.f64;
}

/* Numbers of YaRN that get no member of config.json: only the usual ones change nothing. */
static fsdp_status check_yarn(const fsdp_sd *sd, const char *architecture, fsdp_error *err)
{
    static const struct {
        const char *key;
        double usual;
    } numbers[] = {{"attn_factor", 1},     {"yarn_ext_factor", 1}, {"yarn_attn_factor", 1},
                   {"yarn_beta_fast", 32}, {"yarn_beta_slow", 1},  {"yarn_log_multiplier", 0}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        char key[64];
        snprintf(key, sizeof key, "rope.scaling.%s", numbers[i].key);
        const fsdp_value *value = find_below(sd, architecture, key);
        if (is_number(value) && number_of(value) != numbers[i].usual)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "no config.json can be made of '%s.%s' %g: --copy-from DIR takes one",
                             architecture, key, number_of(value));
    }
    return FSDP_OK;
}

/* The scaling of rotary frequencies; "none" is none. */
static fsdp_status add_scaling(const fsdp_sd *sd, const char *architecture, fsdp_text *out,
                               fsdp_error *err)
{
    const fsdp_value *scaling = find_below(sd, architecture, "rope.scaling.type");
    const fsdp_value *factor = find_below(sd, architecture, "rope.scaling.factor");
    const fsdp_value *length = find_below(sd, architecture, "rope.scaling.original_context_length");
    const char *type =
        scaling && scaling->kind == FSDP_VALUE_STRING ? scaling->as.bytes.data : "none";
    bool is_yarn = strcmp(type, "yarn") == 0;
    if (strcmp(type, "none") == 0)
        return FSDP_OK;
    if ((!is_yarn && strcmp(type, "linear") != 0) || !is_number(factor))
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "no config.json can be made of '%s.rope.scaling.type' '%.40s': --copy-from "
            "DIR takes one",
            architecture, type);
    if (is_yarn)
        FSDP_TRY(check_yarn(sd, architecture, err));
    fsdp_text_addf(out, ",\n  \"rope_scaling\": {\"rope_type\": \"%s\"", type);
    add_member(out, "factor", factor);
    if (is_yarn && is_number(length))
        add_member(out, "original_max_position_embeddings", length);
    fsdp_text_addf(out, "}");
    return FSDP_OK;
}

/* Members that follow from several pairs, or from tensors. */
static void add_others(const fsdp_sd *sd, const struct gguf_model *model, fsdp_text *out)
{
    static const char *const tokens[][2] = {{"tokenizer.ggml.bos_token_id", "bos_token_id"},
                                            {"tokenizer.ggml.eos_token_id", "eos_token_id"},
                                            {"tokenizer.ggml.padding_token_id", "pad_token_id"}};
    const fsdp_value *experts = find_below(sd, model->architecture, "expert_count");
    if (model->has_experts && is_number(experts))
        add_member(out, strcmp(model->type, "mixtral") == 0 ? "num_local_experts" : "num_experts",
                   experts);
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        if (is_number(find_value(sd, tokens[i][0])))
            add_member(out, tokens[i][1], find_value(sd, tokens[i][0]));
    int64_t table = fsdp_sd_find(sd, "token_embd.weight", strlen("token_embd.weight"));
    const fsdp_entry *entry = table < 0 ? NULL : fsdp_sd_at(sd, (size_t)table);
    if (entry && entry->kind == FSDP_ENTRY_TENSOR && entry->ndim == 2)
        fsdp_text_addf(out, ",\n  \"vocab_size\": %" PRId64, entry->shape[0]);
    bool is_tied = fsdp_sd_find(sd, "output.weight", strlen("output.weight")) < 0;
    fsdp_text_addf(out, ",\n  \"tie_word_embeddings\": %s", is_tied ? "true" : "false");
}

fsdp_status fsdp_gguf_config_text(const fsdp_sd *sd, fsdp_text *out, fsdp_error *err)
{
    const fsdp_value *named = find_value(sd, "general.architecture");
    const char *architecture =
        named && named->kind == FSDP_VALUE_STRING ? named->as.bytes.data : "";
    bool has_experts = is_number(find_below(sd, architecture, "expert_count"));
    size_t i = 0, count = sizeof models / sizeof *models;
    while (i < count && (strcmp(models[i].architecture, architecture) != 0 ||
                         models[i].has_experts != has_experts))
        i++;
    if (i == count)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "no config.json can be made of the architecture '%.60s': known are llama, "
                         "qwen2, qwen3, qwen3moe and gpt2",
                         architecture);
    fsdp_text_addf(out, "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\"",
                   models[i].class_name, models[i].type);
    FSDP_TRY(add_members(sd, &models[i], out, err));
    FSDP_TRY(add_scaling(sd, architecture, out, err));
    add_others(sd, &models[i], out);
    fsdp_text_addf(out, "\n}\n");
    return out->failed ? fsdp_fail_memory(err, "config.json") : FSDP_OK;
}
