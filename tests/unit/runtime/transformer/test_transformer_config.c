/* config.json of each family: members, defaults, spellings and refusals, against what transformers reads. */
#include "runtime/transformer/transformer_config.h"

#include <criterion/criterion.h>
#include <string.h>

typedef struct config_case {
    const char *text;
    const char *family;
    int64_t layers, width, inner, heads, kv_heads, head_dim, vocab, context;
    double norm_eps, initializer_range;
    fsdp_nn_function activation;
    bool is_tied, attention_bias, mlp_bias, scales_attention, scales_by_layer;
    fsdp_rope_kind rope;
    double theta, factor, low, high, original;
    int64_t window;
    const char *windows;
    int64_t bos, eos;
} config_case;

#include "tests/unit/runtime/transformer/config_cases.h"

static fsdp_transformer_config config, again;

static void expect_sizes(const fsdp_transformer_config *got, const config_case *wanted)
{
    cr_assert_str_eq(got->model_type, wanted->family);
    cr_expect_eq(got->layers, wanted->layers, "%s", wanted->text);
    cr_expect_eq(got->width, wanted->width, "%s", wanted->text);
    cr_expect_eq(got->inner, wanted->inner, "%s", wanted->text);
    cr_expect_eq(got->heads, wanted->heads, "%s", wanted->text);
    cr_expect_eq(got->kv_heads, wanted->kv_heads, "%s", wanted->text);
    cr_expect_eq(got->head_dim, wanted->head_dim, "%s: %lld", wanted->text,
                 (long long)got->head_dim);
    cr_expect_eq(got->vocab, wanted->vocab, "%s", wanted->text);
    cr_expect_eq(got->context, wanted->context, "%s", wanted->text);
    cr_expect_eq(got->bos, wanted->bos, "%s", wanted->text);
    cr_expect_eq(got->eos, wanted->eos, "%s", wanted->text);
}

static void expect_mathematics(const fsdp_transformer_config *got, const config_case *wanted)
{
    cr_expect_eq(got->norm_eps, wanted->norm_eps, "%s", wanted->text);
    cr_expect_eq(got->initializer_range, wanted->initializer_range, "%s", wanted->text);
    cr_expect_eq(got->activation, wanted->activation, "%s", wanted->text);
    cr_expect_eq(got->is_tied, wanted->is_tied, "%s", wanted->text);
    cr_expect_eq(got->attention_bias, wanted->attention_bias, "%s", wanted->text);
    cr_expect_eq(got->mlp_bias, wanted->mlp_bias, "%s", wanted->text);
    /* qwen2 has biases of q, k and v only */
    cr_expect_eq(got->output_bias, wanted->attention_bias && strcmp(wanted->family, "qwen2") != 0,
                 "%s", wanted->text);
    cr_expect_eq(got->scales_attention, wanted->scales_attention, "%s", wanted->text);
    cr_expect_eq(got->scales_by_layer, wanted->scales_by_layer, "%s", wanted->text);
}

static void expect_positions(const fsdp_transformer_config *got, const config_case *wanted)
{
    if (got->form.is_rotary) {
        cr_expect_eq(got->rope.kind, wanted->rope, "%s", wanted->text);
        cr_expect_eq(got->rope.theta, wanted->theta, "%s", wanted->text);
    }
    if (wanted->rope != FSDP_ROPE_DEFAULT)
        cr_expect_eq(got->rope.factor, wanted->factor, "%s", wanted->text);
    if (wanted->rope == FSDP_ROPE_LLAMA3) {
        cr_expect_eq(got->rope.low_freq_factor, wanted->low, "%s", wanted->text);
        cr_expect_eq(got->rope.high_freq_factor, wanted->high, "%s", wanted->text);
        cr_expect_eq(got->rope.original_context, wanted->original, "%s", wanted->text);
    }
    for (int64_t i = 0; i < wanted->layers; i++) {
        bool is_windowed = got->window > 0 && got->is_windowed[i];
        cr_expect_eq(is_windowed, wanted->windows[i] == '1', "%s layer %lld", wanted->text,
                     (long long)i);
        if (is_windowed)
            cr_expect_eq(got->window, wanted->window, "%s", wanted->text);
    }
}

static void parse(const char *text, fsdp_transformer_config *config_out)
{
    fsdp_error err = {0};
    cr_assert_eq(fsdp_transformer_config_parse(text, strlen(text), "c", config_out, &err), FSDP_OK,
                 "%s: %s", text, err.text);
}

Test(transformer_config, reads_what_transformers_reads)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        parse(cases[i].text, &config);
        expect_sizes(&config, &cases[i]);
        expect_mathematics(&config, &cases[i]);
        expect_positions(&config, &cases[i]);
    }
}

Test(transformer_config, is_written_and_read_back)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_text text = {0};
        parse(cases[i].text, &config);
        cr_assert_eq(fsdp_transformer_config_write(&config, &text, NULL), FSDP_OK);
        parse(text.data, &again);
        expect_sizes(&again, &cases[i]);
        expect_mathematics(&again, &cases[i]);
        expect_positions(&again, &cases[i]);
        fsdp_text_release(&text);
    }
}

static void expect_refusal(const char *text, fsdp_status status, const char *word)
{
    fsdp_error err = {0};
    cr_expect_eq(fsdp_transformer_config_parse(text, strlen(text), "c", &config, &err), status,
                 "%s: %s", text, err.text);
    cr_expect(strstr(err.text, word), "%s: '%s' does not say %s", text, err.text, word);
}

#define REFUSED(members, word) expect_refusal("{" members "}", FSDP_ERR_USAGE, word)
#define LLAMA "\"model_type\": \"llama\", "

Test(transformer_config, refuses_by_name)
{
    REFUSED("\"model_type\": \"mixtral\"", "mixtral");
    REFUSED("\"hidden_size\": 4", "model_type");
    REFUSED(LLAMA "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 2.0}", "yarn");
    REFUSED(LLAMA "\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2.0}", "dynamic");
    REFUSED(LLAMA "\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"default\"}}",
            "differs");
    REFUSED(LLAMA "\"quantization_config\": {\"bits\": 4}", "quantization_config");
    REFUSED(LLAMA "\"partial_rotary_factor\": 0.5", "partial_rotary_factor");
    REFUSED(LLAMA "\"rope_parameters\": {\"partial_rotary_factor\": 0.5}", "partial_rotary_factor");
    REFUSED(LLAMA "\"hidden_act\": \"mish\"", "mish");
    REFUSED(LLAMA "\"pretraining_tp\": 2", "pretraining_tp");
    REFUSED("\"model_type\": \"gpt2\", \"activation_function\": \"quick_gelu\"", "quick_gelu");
    REFUSED("\"model_type\": \"gpt2\", \"add_cross_attention\": true", "add_cross_attention");
    REFUSED("\"model_type\": \"gpt2\", \"n_embd\": 10, \"n_head\": 3", "heads");
    REFUSED(LLAMA "\"num_attention_heads\": 4, \"num_key_value_heads\": 3", "key-value heads");
    REFUSED(LLAMA "\"num_hidden_layers\": 0", "layers");
    REFUSED("\"model_type\": \"qwen2\", \"num_hidden_layers\": 2, \"layer_types\": "
            "[\"full_attention\"]",
            "layer_types");
    REFUSED("\"model_type\": \"qwen2\", \"layer_types\": [\"chunked_attention\"]", "layer_types");
}

/* transformers 5 fails on each of them: in its config, or in the first forward. */
Test(transformer_config, refuses_values_that_transformers_cannot_run)
{
    REFUSED("\"model_type\": \"mistral\", \"sliding_window\": 0", "sliding_window");
    REFUSED("\"model_type\": \"qwen2\", \"use_sliding_window\": true, \"sliding_window\": 0, "
            "\"max_window_layers\": 0",
            "sliding_window");
    REFUSED("\"model_type\": \"gpt2\", \"scale_attn_weights\": null", "scale_attn_weights");
    REFUSED("\"model_type\": \"gpt2\", \"tie_word_embeddings\": null", "tie_word_embeddings");
    REFUSED(LLAMA "\"rope_scaling\": {\"rope_type\": \"linear\"}",
            "rope_scaling: it has no factor");
    REFUSED(LLAMA "\"rope_scaling\": {\"type\": \"linear\", \"factor\": null}", "no factor");
    REFUSED(LLAMA "\"rope_parameters\": {\"rope_type\": \"llama3\", \"low_freq_factor\": 1.0, "
                  "\"high_freq_factor\": 4.0}",
            "rope_parameters: it has no factor");
    parse("{\"model_type\": \"qwen2\", \"sliding_window\": 0}", &config);
    parse("{\"model_type\": \"gpt2\", \"scale_attn_by_inverse_layer_idx\": null}", &config);
}

Test(transformer_config, wrong_members_are_damage)
{
    expect_refusal("{" LLAMA "\"hidden_size\": \"wide\"}", FSDP_ERR_DAMAGED, "hidden_size");
    expect_refusal("{" LLAMA "\"hidden_size\": 1.5}", FSDP_ERR_DAMAGED, "hidden_size");
    expect_refusal("{" LLAMA "\"attention_bias\": 3}", FSDP_ERR_DAMAGED, "attention_bias");
    expect_refusal("{" LLAMA "\"rope_theta\": -1}", FSDP_ERR_DAMAGED, "rotary");
    expect_refusal("{" LLAMA "\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0}}",
                   FSDP_ERR_DAMAGED, "rotary");
    expect_refusal("[]", FSDP_ERR_DAMAGED, "c");
    expect_refusal("{\"model_type\": \"llama\"", FSDP_ERR_DAMAGED, "c");
}
