/* Models: families, defaults, sizes that fit together, and the config.json of a new model. */
#include "runtime/transformer/transformer_config.h"

#include <math.h>
#include <string.h>

static const char *const family_names[] = {[FSDP_GPT2] = "gpt2",
                                           [FSDP_LLAMA] = "llama",
                                           [FSDP_MISTRAL] = "mistral",
                                           [FSDP_QWEN2] = "qwen2"};

const char *fsdp_family_name(fsdp_family family)
{
    return family_names[family];
}

bool fsdp_family_find(const char *name, fsdp_family *family_out)
{
    for (size_t i = 0; i < sizeof family_names / sizeof *family_names; i++)
        if (strcmp(name, family_names[i]) == 0) {
            *family_out = (fsdp_family)i;
            return true;
        }
    return false;
}

/* --- defaults, as the classes of transformers have them ----------------------------------------- */

static void init_gpt2(fsdp_transformer_config *config)
{
    config->layers = config->heads = 12;
    config->width = 768;
    config->vocab = 50257;
    config->context = 1024;
    config->norm_eps = 1e-5;
    config->activation = FSDP_NN_GELU_TANH;
    config->is_tied = config->scales_attention = true;
    config->attention_bias = config->output_bias = config->mlp_bias = true;
    config->bos = config->eos = 50256;
}

static void init_llama(fsdp_transformer_config *config)
{
    config->layers = config->heads = 32;
    config->width = 4096;
    config->inner = 11008;
    config->vocab = 32000;
    config->context = 2048;
    config->norm_eps = 1e-6;
    config->activation = FSDP_NN_SILU;
    config->scales_attention = true;
    config->rope = (fsdp_rope){.theta = 10000, .factor = 1};
    config->bos = 1;
    config->eos = 2;
}

static const fsdp_transformer_form forms[] = {
    {.embedding = "transformer.wte.weight",
     .has_packed_qkv = true,
     .is_in_by_out = true,
     .has_layer_norm = true,
     .scales_projections = true},
    {.embedding = "model.embed_tokens.weight", .is_rotary = true, .is_gated = true}};

void fsdp_transformer_config_init(fsdp_transformer_config *config, fsdp_family family)
{
    *config = (fsdp_transformer_config){
        .family = family, .initializer_range = 0.02, .bos = -1, .eos = -1};
    config->form = forms[family != FSDP_GPT2];
    if (family == FSDP_GPT2) {
        init_gpt2(config);
        return;
    }
    init_llama(config);
    if (family == FSDP_MISTRAL) {
        config->inner = 14336;
        config->kv_heads = 8;
        config->context = 4096 * 32;
        config->window = 4096;
        memset(config->is_windowed, true, sizeof config->is_windowed);
    }
    if (family == FSDP_QWEN2) {
        config->inner = 22016;
        config->vocab = 151936;
        config->context = 32768;
        config->kv_heads = 32;
        config->window = 4096; /* where use_sliding_window asks for it */
        config->attention_bias = true;
        config->bos = config->eos = -1;
    }
}

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
    if (config->family == FSDP_GPT2 && config->kv_heads != config->heads)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "'%s': gpt2 has no key-value heads of its own: %lld are not the %lld heads", origin,
            (long long)config->kv_heads, (long long)config->heads);
    if (config->family != FSDP_GPT2 && config->head_dim % 2 != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s': rotary positions need heads of an even width, not %lld", origin,
                         (long long)config->head_dim);
    if (config->family == FSDP_GPT2 && config->head_dim * config->heads != config->width)
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
    fsdp_text_addf(text, "  \"rope_scaling\": {\n    \"rope_type\": \"%s\",\n    \"factor\": ",
                   rope->kind == FSDP_ROPE_LINEAR ? "linear" : "llama3");
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

static void write_llama(const fsdp_transformer_config *config, fsdp_text *text)
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
    if (config->family == FSDP_LLAMA) {
        add_bool(text, "attention_bias", config->attention_bias);
        add_bool(text, "mlp_bias", config->mlp_bias);
        return;
    }
    if (config->family == FSDP_QWEN2) {
        add_bool(text, "use_sliding_window", config->window > 0);
        write_layer_types(config, text);
    }
    if (config->window)
        add_number(text, "sliding_window", config->window);
    else
        fsdp_text_addf(text, "  \"sliding_window\": null,\n");
}

void fsdp_transformer_config_write(const fsdp_transformer_config *config, fsdp_text *text)
{
    static const char *const classes[] = {[FSDP_GPT2] = "GPT2LMHeadModel",
                                          [FSDP_LLAMA] = "LlamaForCausalLM",
                                          [FSDP_MISTRAL] = "MistralForCausalLM",
                                          [FSDP_QWEN2] = "Qwen2ForCausalLM"};
    fsdp_text_addf(text, "{\n  \"architectures\": [\"%s\"],\n", classes[config->family]);
    add_id(text, "bos_token_id", config->bos);
    add_id(text, "eos_token_id", config->eos);
    add_real(text, "initializer_range", config->initializer_range);
    if (config->family == FSDP_GPT2)
        write_gpt2(config, text);
    else
        write_llama(config, text);
    fsdp_text_addf(text, "  \"model_type\": \"%s\",\n", family_names[config->family]);
    add_bool(text, "tie_word_embeddings", config->is_tied);
    fsdp_text_addf(text, "  \"torch_dtype\": \"float32\",\n");
    fsdp_text_addf(text, "  \"vocab_size\": %lld\n}\n", (long long)config->vocab);
}
