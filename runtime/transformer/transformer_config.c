/* Models: sizes that fit together, and the config.json of a new model. */
#include "runtime/transformer/transformer_internal.h"

#include "base/core/mem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* --- sizes --------------------------------------------------------------------------------------- */

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
                         "'%s': %s has no key-value heads of its own: %lld are not the %lld heads",
                         origin, config->model_type, (long long)config->kv_heads,
                         (long long)config->heads);
    if (config->form.is_rotary && config->head_dim % 2 != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s': rotary positions need heads of an even width, not %lld", origin,
                         (long long)config->head_dim);
    if (!config->form.has_head_dim && config->head_dim * config->heads != config->width)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s': the width %lld is no multiple of %lld heads",
                         origin, (long long)config->width, (long long)config->heads);
    if (!(config->norm_eps >= 0) || !isfinite(config->norm_eps) ||
        !(config->initializer_range >= 0) || !isfinite(config->initializer_range))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s': the eps of norms and initializer_range are not negative numbers",
                         origin);
    return FSDP_OK;
}

/* --- config.json of a new model ------------------------------------------------------------------ */

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

fsdp_status fsdp_model_describe(const fsdp_transformer_config *config, fsdp_arena *arena,
                                const fsdp_architecture **model_out, fsdp_error *err)
{
    const char *type = config->model_type;
    FSDP_TRY(fsdp_architecture_find(arena, type, strlen(type), model_out, err));
    return *model_out ? FSDP_OK
                      : fsdp_fail(err, FSDP_ERR_USAGE, "model_type '%s' is not known", type);
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
