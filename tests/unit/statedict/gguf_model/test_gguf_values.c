/* config.json and the tokenizer's files as key-value pairs of GGUF. */
#include "tests/unit/statedict/gguf_model/model_pairs.h"

#include "base/core/mem.h"

#include <math.h>

TestSuite(gguf_values, .init = begin, .fini = end);

static void put(const char *name, const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    cr_assert_eq(fsdp_io_replace_file(fsdp_io_posix(), path, text, strlen(text), &err), FSDP_OK);
}

static const char llama[] =
    "{\"model_type\": \"llama\", \"num_hidden_layers\": 2, \"hidden_size\": 64, "
    "\"intermediate_size\": 96, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
    "\"max_position_embeddings\": 128, \"vocab_size\": 7, \"rms_norm_eps\": 1e-05, "
    "\"rope_parameters\": {\"rope_theta\": 500000.0, \"rope_type\": \"linear\", \"factor\": 4}, "
    "\"bos_token_id\": 0, \"eos_token_id\": [1, 2], \"architectures\": [\"LlamaForCausalLM\"]}";

Test(gguf_values, a_config_gives_the_numbers_of_the_architecture)
{
    config = llama;
    cr_assert_eq(read_all(), FSDP_OK, "%s", err.text);
    cr_assert_str_eq(text_of(find("general.architecture")), "llama");
    cr_assert_eq(number("llama.block_count"), 2);
    cr_assert_eq(number("llama.embedding_length"), 64);
    cr_assert_eq(number("llama.feed_forward_length"), 96);
    cr_assert_eq(number("llama.attention.head_count_kv"), 2);
    cr_assert_eq(number("llama.rope.dimension_count"), 16);
    cr_assert_eq(number("llama.vocab_size"), 7);
    cr_assert_eq(find("llama.rope.freq_base")->as.f64, 500000);
    cr_assert_eq(find("llama.attention.layer_norm_rms_epsilon")->as.f64, (double)1e-5F);
    cr_assert_str_eq(text_of(find("llama.rope.scaling.type")), "linear");
    cr_assert_null(find("tokenizer.ggml.model"), "there is no tokenizer");
    cr_assert_null(find("llama.expert_count"));
}

Test(gguf_values, gpt2_has_other_names_and_no_inner_size)
{
    config = "{\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_embd\": 8, \"n_head\": 2, "
             "\"n_positions\": 16, \"n_inner\": null, \"layer_norm_epsilon\": 1e-5}";
    cr_assert_eq(read_all(), FSDP_OK, "%s", err.text);
    cr_assert_eq(number("gpt2.feed_forward_length"), 32);
    cr_assert_eq(number("gpt2.context_length"), 16);
    cr_assert_null(find("gpt2.rope.dimension_count"));
}

/* --- numbers of tensors --------------------------------------------------------------------------- */

static void add_dims(const char *name, int ndim, const int64_t *shape)
{
    static fsdp_mesh *mesh;
    if (!mesh)
        cr_assert_eq(
            fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"rank"}, NULL, &mesh, &err),
            FSDP_OK);
    const fsdp_tensor tensor = {FSDP_F32, ndim, shape, {.mesh = mesh}, NULL};
    if (!tensors)
        cr_assert_eq(fsdp_sd_create(&tensors, &err), FSDP_OK);
    cr_assert_eq(fsdp_sd_add_tensor(tensors, name, strlen(name), &tensor, &err), FSDP_OK, "%s",
                 err.text);
}

static void add_tensor(const char *name, int64_t rows, int64_t columns)
{
    add_dims(name, 2, (int64_t[]){rows, columns});
}

static const char bare[] =
    "{\"model_type\": \"qwen3\", \"num_attention_heads\": 4, \"max_position_embeddings\": 128}";

Test(gguf_values, numbers_that_the_config_lacks_are_those_of_the_tensors)
{
    config = bare;
    add_tensor("token_embd.weight", 9, 64);
    add_tensor("blk.0.attn_q.weight", 4 * 24, 64);
    add_tensor("blk.0.attn_k.weight", 2 * 24, 64);
    add_tensor("blk.0.ffn_up.weight", 80, 64);
    add_tensor("blk.10.ffn_up.weight", 80, 64);
    cr_assert_eq(read_all(), FSDP_OK, "%s", err.text);
    cr_assert_eq(number("qwen3.block_count"), 11);
    cr_assert_eq(number("qwen3.embedding_length"), 64);
    cr_assert_eq(number("qwen3.feed_forward_length"), 80);
    cr_assert_eq(number("qwen3.vocab_size"), 9);
    cr_assert_eq(number("qwen3.attention.head_count_kv"), 2);
    cr_assert_eq(number("qwen3.attention.key_length"), 24);
    cr_assert_eq(number("qwen3.rope.dimension_count"), 24);
}

Test(gguf_values, the_usual_width_of_heads_has_no_key)
{
    config = bare;
    add_tensor("token_embd.weight", 9, 64);
    add_tensor("blk.0.attn_q.weight", 64, 64);
    add_tensor("blk.0.attn_k.weight", 32, 64);
    cr_assert_eq(read_all(), FSDP_OK, "%s", err.text);
    cr_assert_null(find("qwen3.attention.key_length"));
    cr_assert_eq(number("qwen3.rope.dimension_count"), 16);
}

Test(gguf_values, experts_are_counted_in_their_tensor)
{
    config = "{\"model_type\": \"mixtral\", \"num_attention_heads\": 4, \"intermediate_size\": 12, "
             "\"max_position_embeddings\": 128}";
    add_tensor("token_embd.weight", 9, 64);
    add_dims("blk.0.ffn_up_exps.weight", 3, (int64_t[]){6, 12, 64});
    cr_assert_eq(read_all(), FSDP_OK, "%s", err.text);
    cr_assert_eq(number("llama.expert_count"), 6);
    cr_assert_eq(number("llama.feed_forward_length"), 12);
}

Test(gguf_values, numbers_that_contradict_the_tensors_are_damage)
{
    static const struct {
        const char *tensor;
        int64_t rows, columns;
        const char *said;
    } odd[] = {
        {"token_embd.weight", 8, 64, "vocab_size 7, but 'token_embd.weight' has 8"},
        {"token_embd.weight", 7, 60, "hidden_size 64, but 'token_embd.weight' has 60"},
        {"blk.0.ffn_up.weight", 95, 64, "intermediate_size 96, but 'blk.0.ffn_up.weight' has 95"},
        {"blk.0.attn_k.weight", 16, 64, "num_key_value_heads 2, but 'blk.0.attn_k.weight' has 1"},
        {"blk.0.attn_k.weight", 17, 64, "num_attention_heads 4, and that many are not in the 64"},
    };
    config = llama;
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        add_tensor(odd[i].tensor, odd[i].rows, odd[i].columns);
        if (strstr(odd[i].tensor, "attn_k"))
            add_tensor("blk.0.attn_q.weight", 64, 64);
        cr_assert_eq(read_all(), FSDP_ERR_DAMAGED, "%zu", i);
        cr_assert(strstr(err.text, odd[i].said), "%s", err.text);
        fsdp_named_values_release(&values);
        fsdp_sd_free(tensors);
        tensors = NULL;
    }
}

/* --- what llama.cpp has keys for ------------------------------------------------------------------ */

/* transformers has these numbers for a config.json without them, and llama.cpp others, or none. */
Test(gguf_values, numbers_that_a_config_leaves_out_are_those_of_the_family)
{
    static const struct {
        const char *type, *architecture;
        double epsilon, theta;
        int64_t experts;
    } families[] = {{"llama", "llama", 1e-6, 1e4, -1},       {"mistral", "llama", 1e-6, 1e4, -1},
                    {"mixtral", "llama", 1e-5, 1e6, 2},      {"qwen2", "qwen2", 1e-6, 1e4, -1},
                    {"qwen3_moe", "qwen3moe", 1e-6, 1e4, 8}, {"granite", "granite", 1e-6, 1e4, -1},
                    {"olmo2", "olmo2", 1e-5, 1e4, -1}};
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        char key[64];
        cr_assert_eq(
            read_with(families[i].type, "\"sliding_window\": null, \"norm_topk_prob\": true"),
            FSDP_OK, "%s", err.text);
        snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", families[i].architecture);
        cr_assert(find(key), "%s", key);
        cr_assert_eq(find(key)->as.f64, (double)(float)families[i].epsilon, "%s", key);
        snprintf(key, sizeof key, "%s.rope.freq_base", families[i].architecture);
        cr_assert(find(key), "%s", key);
        cr_assert_eq(find(key)->as.f64, families[i].theta, "%s", key);
        snprintf(key, sizeof key, "%s.expert_used_count", families[i].architecture);
        cr_assert_eq(number(key), families[i].experts, "%s", key);
    }
    config = "{\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_embd\": 8, \"n_head\": 2, "
             "\"n_positions\": 16}";
    cr_assert_eq(read_all(), FSDP_OK, "%s", err.text);
    cr_assert_eq(find("gpt2.attention.layer_norm_epsilon")->as.f64, (double)1e-5F);
    config = "{\"model_type\": \"mistral\", \"num_hidden_layers\": 2, \"hidden_size\": 64, "
             "\"num_attention_heads\": 4, \"max_position_embeddings\": 32768}";
    cr_assert_eq(read_all(), FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, "sliding_window 4096 in a context of 32768"), "%s", err.text);
    config = "{\"model_type\": \"mistral\", \"num_hidden_layers\": 2, \"hidden_size\": 64, "
             "\"num_attention_heads\": 4, \"max_position_embeddings\": 32768, "
             "\"sliding_window\": null}";
    fsdp_named_values_release(&values);
    cr_assert_eq(read_all(), FSDP_OK, "null is no window, not the usual one: %s", err.text);
}

Test(gguf_values, granite_has_scales_of_its_own)
{
    cr_assert_eq(read_with("granite", "\"embedding_multiplier\": 12.0, \"logits_scaling\": 8, "
                                      "\"attention_multiplier\": 0.25"),
                 FSDP_OK, "%s", err.text);
    cr_assert_eq(find("granite.embedding_scale")->as.f64, 12);
    cr_assert_eq(find("granite.logit_scale")->as.f64, 8);
    cr_assert_eq(find("granite.attention.scale")->as.f64, 0.25);
    cr_assert_eq(find("granite.residual_scale")->as.f64, 1, "transformers' own");
    cr_assert_str_eq(text_of(find("general.architecture")), "granite");
}

/* transformers takes null for its default, and rope_scaling before rope_parameters. */
Test(gguf_values, null_is_the_default_and_rope_scaling_counts)
{
    cr_assert_eq(read_with("mixtral", "\"rms_norm_eps\": null, \"rope_theta\": null, "
                                      "\"num_experts_per_tok\": null"),
                 FSDP_OK, "%s", err.text);
    cr_assert_eq(find("llama.attention.layer_norm_rms_epsilon")->as.f64, (double)1e-5F);
    cr_assert_eq(find("llama.rope.freq_base")->as.f64, 1e6);
    cr_assert_eq(number("llama.expert_used_count"), 2);
    cr_assert_eq(read_with("llama", "\"rope_parameters\": {\"rope_type\": \"default\"}, "
                                    "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 4}"),
                 FSDP_OK, "%s", err.text);
    cr_assert_eq(find("llama.rope.scaling.factor")->as.f64, 4);
    cr_assert_eq(read_with("llama", "\"rope_scaling\": {}, \"rope_parameters\": {\"rope_type\": "
                                    "\"linear\", \"factor\": 2, \"rope_theta\": 5}"),
                 FSDP_OK, "%s", err.text);
    cr_assert_eq(find("llama.rope.scaling.factor")->as.f64, 2);
    cr_assert_eq(find("llama.rope.freq_base")->as.f64, 5);
}

Test(gguf_values, numbers_that_gguf_cannot_hold_are_refused)
{
    static const struct {
        const char *type, *members, *said;
        fsdp_status status;
    } odd[] = {
        {"granite", "\"embedding_multiplier\": 1e300",
         "embedding_multiplier 1e+300 is out of range", FSDP_ERR_USAGE},
        {"llama", "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 1e300}",
         "factor 1e+300 is out of range", FSDP_ERR_USAGE},
        {"llama",
         "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, "
         "\"original_max_position_embeddings\": 1e300}",
         "original_max_position_embeddings 1e+300 is out of range", FSDP_ERR_USAGE},
        {"granite", "\"attention_multiplier\": \"0.5\"",
         "attention_multiplier is a text, not a number", FSDP_ERR_DAMAGED},
        {"olmo2", "\"tie_word_embeddings\": true", "tie_word_embeddings true", FSDP_ERR_USAGE},
        {"olmo2", "\"rope_scaling\": {\"type\": \"llama3\", \"factor\": 8}", "rope_type 'llama3'",
         FSDP_ERR_USAGE},
        {"qwen2", "\"rope_scaling\": {\"type\": \"llama3\", \"factor\": 8}", "rope_type 'llama3'",
         FSDP_ERR_USAGE},
    };
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        cr_assert_eq(read_with(odd[i].type, odd[i].members), odd[i].status, "%zu: %s", i, err.text);
        cr_assert(strstr(err.text, odd[i].said), "%s", err.text);
    }
    cr_assert_eq(read_with("granite", "\"rope_scaling\": {\"type\": \"llama3\", \"factor\": 8}"),
                 FSDP_OK, "%s", err.text);
}

Test(gguf_values, yarn_has_the_length_before_it)
{
    cr_assert_eq(read_with("qwen2", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4.0, "
                                    "\"original_max_position_embeddings\": 32, "
                                    "\"beta_fast\": 32, \"attention_factor\": 1.1386294361119891}"),
                 FSDP_OK, "%s", err.text);
    cr_assert_str_eq(text_of(find("qwen2.rope.scaling.type")), "yarn");
    cr_assert_eq(find("qwen2.rope.scaling.factor")->as.f64, 4);
    cr_assert_eq(number("qwen2.rope.scaling.original_context_length"), 32);
    /* as in transformers, the context is that of before where no other one is said */
    cr_assert_eq(
        read_with("qwen2", "\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 2}"),
        FSDP_OK, "%s", err.text);
    cr_assert_eq(number("qwen2.rope.scaling.original_context_length"), 128);
}

Test(gguf_values, what_has_no_key_is_refused_by_name)
{
    static const struct {
        const char *type, *members, *said;
    } odd[] = {
        {"llama", "\"hidden_act\": \"gelu\"", "hidden_act 'gelu'"},
        {"gpt2", "\"activation_function\": \"relu\"", "activation_function 'relu'"},
        {"gpt2", "\"scale_attn_by_inverse_layer_idx\": true", "scale_attn_by_inverse_layer_idx 1"},
        {"gpt2", "\"scale_attn_weights\": false", "scale_attn_weights 0"},
        {"qwen3_moe", "\"vocab_size\": 8",
         "norm_topk_prob 0, but llama.cpp computes every 'qwen3moe'"},
        {"qwen2_moe", "\"norm_topk_prob\": true", "norm_topk_prob 1"},
        {"deepseek_v3", "\"norm_topk_prob\": null", "norm_topk_prob null"},
        {"deepseek_v3", "\"norm_topk_prob\": true, \"rope_interleave\": null", "rope_interleave 0"},
        {"gpt_neox", "\"rotary_emb_base\": 777, \"rope_parameters\": {\"rope_theta\": 500}",
         "rotary_emb_base 777 and rope_theta 500"},
        {"qwen2_moe", "\"mlp_only_layers\": [0]", "mlp_only_layers 1"},
        {"llama", "\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2}",
         "rope_type 'dynamic'"},
        {"llama", "\"rope_scaling\": {\"type\": \"longrope\"}", "rope_type 'longrope'"},
        {"llama", "\"rope_scaling\": {\"type\": \"yarn\"}", "'yarn' without a factor"},
        {"llama", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, \"beta_fast\": 64}",
         "beta_fast 64"},
        {"llama", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, \"mscale\": 1}", "mscale"},
        {"llama", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, \"attention_factor\": 1}",
         "attention_factor"},
        {"llama", "\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"default\"}}",
         "several types of layers"},
        {"llama", "\"partial_rotary_factor\": 0.5", "partial_rotary_factor 0.5"},
        {"mistral", "\"sliding_window\": 127", "sliding_window 127 in a context of 128"},
        {"qwen2", "\"sliding_window\": 64, \"use_sliding_window\": true, \"max_window_layers\": 1",
         "sliding_window 64"},
        {"qwen3",
         "\"sliding_window\": 64, \"use_sliding_window\": true, \"layer_types\": "
         "[\"full_attention\", \"sliding_attention\"]",
         "sliding_window 64"},
    };
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        cr_assert_eq(read_with(odd[i].type, odd[i].members), FSDP_ERR_USAGE, "%s", odd[i].members);
        cr_assert(strstr(err.text, odd[i].said), "%s", err.text);
    }
}

Test(gguf_values, a_model_of_more_layers_than_any_has_is_refused)
{
    config = "{\"model_type\": \"llama\", \"num_hidden_layers\": 5000, \"hidden_size\": 64, "
             "\"num_attention_heads\": 4, \"max_position_embeddings\": 128, \"vocab_size\": 8}";
    fsdp_named_values_release(&values);
    cr_expect_eq(read_all(), FSDP_ERR_LIMIT);
    cr_expect(strstr(err.text, "5000 layers"), "%s", err.text);
}

Test(gguf_values, what_changes_nothing_is_written)
{
    static const struct {
        const char *type, *members;
    } fine[] = {
        {"llama", "\"hidden_act\": \"silu\", \"rope_scaling\": null, \"sliding_window\": 8"},
        {"gpt2", "\"activation_function\": \"gelu_new\", \"scale_attn_weights\": true"},
        {"mistral", "\"sliding_window\": 128"},
        {"mistral", "\"sliding_window\": null"},
        {"qwen2",
         "\"sliding_window\": 64, \"use_sliding_window\": false, \"max_window_layers\": 1"},
        {"qwen2", "\"sliding_window\": 64, \"use_sliding_window\": true, \"max_window_layers\": 2"},
        {"qwen2", "\"sliding_window\": 64, \"use_sliding_window\": true, \"layer_types\": "
                  "[\"full_attention\", \"full_attention\"], \"max_window_layers\": 0"},
        {"llama", "\"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 8}"},
        {"llama", "\"rope_parameters\": {\"rope_type\": \"default\", \"beta_fast\": 1}"},
    };
    for (size_t i = 0; i < sizeof fine / sizeof *fine; i++) {
        cr_assert_eq(read_with(fine[i].type, fine[i].members), FSDP_OK, "%s", err.text);
        cr_assert_null(find("llama.rope.scaling.type"));
    }
}

Test(gguf_values, a_tokenizer_of_bytes_gives_tokens_types_and_merges)
{
    config = llama;
    put("tokenizer.json",
        "{\"added_tokens\": [{\"id\": 3, \"content\": \"<s>\", \"special\": true}, "
        "{\"id\": 4, \"content\": \"<tool>\", \"special\": false}], \"model\": {\"type\": \"BPE\", "
        "\"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [\"a b\", [\"ab\", \"a\"]]}}");
    put("tokenizer_config.json", "{\"bos_token\": {\"content\": \"<s>\"}, \"add_bos_token\": true, "
                                 "\"pad_token\": \"b\", \"chat_template\": \"{{ x }}\"}");
    cr_assert_eq(read_all(), FSDP_OK, "%s", err.text);
    cr_assert_str_eq(text_of(find("tokenizer.ggml.model")), "gpt2");
    cr_assert_str_eq(text_of(find("tokenizer.ggml.pre")), "llama-bpe");
    const char *const tokens[] = {"a", "b", "ab", "<s>", "<tool>", "[PAD5]", "[PAD6]"};
    const int64_t types[] = {1, 1, 1, 3, 4, 5, 5};
    for (size_t i = 0; i < 7; i++) {
        cr_assert_str_eq(text_of(item("tokenizer.ggml.tokens", i)), tokens[i]);
        cr_assert_eq(item("tokenizer.ggml.token_type", i)->as.i64, types[i], "%zu", i);
    }
    cr_assert_eq(find("tokenizer.ggml.tokens")->as.list.count, 7);
    cr_assert_str_eq(text_of(item("tokenizer.ggml.merges", 1)), "ab a");
    cr_assert_eq(number("tokenizer.ggml.bos_token_id"), 3, "tokenizer_config.json comes first");
    cr_assert_eq(number("tokenizer.ggml.eos_token_id"), 1, "the first of config.json");
    cr_assert_eq(number("tokenizer.ggml.padding_token_id"), 1);
    cr_assert(find("tokenizer.ggml.add_bos_token")->as.boolean);
    cr_assert_str_eq(text_of(find("tokenizer.chat_template")), "{{ x }}");
    cr_assert_null(find("tokenizer.ggml.scores"));
}

Test(gguf_values, byte_fallback_and_unigrams_are_sentencepiece)
{
    config = llama;
    put("tokenizer.json", "{\"model\": {\"type\": \"Unigram\", \"vocab\": [[\"<unk>\", 0], "
                          "[\"<0x0A>\", 0.0], [\"\xE2\x96\x81"
                          "a\", -2.5]]}}");
    put("tokenizer_config.json", "{\"unk_token\": \"<unk>\"}");
    cr_assert_eq(read_all(), FSDP_OK, "%s", err.text);
    cr_assert_str_eq(text_of(find("tokenizer.ggml.model")), "llama");
    cr_assert_eq(item("tokenizer.ggml.scores", 2)->as.f64, -2.5);
    const int64_t types[] = {2, 6, 1};
    for (size_t i = 0; i < 3; i++)
        cr_assert_eq(item("tokenizer.ggml.token_type", i)->as.i64, types[i], "%zu", i);
}

/* The first merge that makes a token gives its score; parts that hold a space are no other merge. */
Test(gguf_values, merges_of_byte_fallback_become_scores)
{
    config = llama;
    put("tokenizer.json", "{\"model\": {\"type\": \"BPE\", \"byte_fallback\": true, \"merges\": "
                          "[\"a a\", [\"a \", \"b\"], [\"a\", \" b\"], \"b a\"], \"vocab\": "
                          "{\"a\": 0, \"b\": 1, \"aa\": 2, \"a b\": 3, \"ba\": 4, \"</s>\": 5}}, "
                          "\"added_tokens\": [{\"id\": 4, \"content\": \"ba\", \"special\": "
                          "true}]}");
    cr_assert_eq(read_all(), FSDP_OK, "%s", err.text);
    const double scores[] = {-1e6, -1e6, 0, -1, -1e6, -1e6};
    for (size_t i = 0; i < 6; i++)
        cr_assert_eq(item("tokenizer.ggml.scores", i)->as.f64, scores[i], "%zu", i);
    cr_assert_str_eq(text_of(item("tokenizer.ggml.merges", 1)), "a  b");
}

/* The programs that write tokenizer.json put the added tokens first, and the model has them, too. */
Test(gguf_values, a_token_of_the_model_that_is_added_too_has_the_type_of_that)
{
    config = llama;
    put("tokenizer.json",
        "{\"added_tokens\": [{\"id\": 0, \"content\": \"<unk>\", \"special\": true}, "
        "{\"id\": 1, \"content\": \"<s>\", \"special\": true}, {\"id\": 2, \"content\": "
        "\"<0x0A>\", "
        "\"special\": true}, {\"id\": 3, \"content\": \"<t>\", \"special\": false}], "
        "\"model\": {\"byte_fallback\": true, \"vocab\": {\"<unk>\": 0, \"<s>\": 1, \"<0x0A>\": 2, "
        "\"<t>\": 3, \"a\": 4}, \"merges\": []}}");
    put("tokenizer_config.json", "{\"unk_token\": \"<unk>\"}");
    cr_assert_eq(read_all(), FSDP_OK, "%s", err.text);
    const int64_t types[] = {2, 3, 6, 4, 1};
    for (size_t i = 0; i < 5; i++)
        cr_assert_eq(item("tokenizer.ggml.token_type", i)->as.i64, types[i], "%zu", i);
}

Test(gguf_values, what_makes_no_sense_is_refused)
{
    static const struct {
        const char *config, *tokenizer;
        fsdp_status status;
    } cases[] = {
        {"{\"model_type\": \"bert\"}", NULL, FSDP_ERR_USAGE},
        {"{\"model_type\": \"llama\"}", NULL, FSDP_ERR_USAGE},
        {"{\"model_type\": \"gpt2\", \"n_layer\": 1e99, \"n_embd\": 8, \"n_head\": 2, "
         "\"n_positions\": 16}",
         NULL, FSDP_ERR_USAGE},
        {"[]", NULL, FSDP_ERR_DAMAGED},
        {llama, "{\"model\": {\"vocab\": {\"a\": -1}}}", FSDP_ERR_DAMAGED},
        {llama, "{\"model\": {\"vocab\": {\"a\": 99999999999}}}", FSDP_ERR_DAMAGED},
        {llama, "{\"model\": {\"vocab\": 3}}", FSDP_ERR_DAMAGED},
        {llama, "{\"model\": {\"vocab\": [[\"a\", 1, 2]]}}", FSDP_ERR_DAMAGED},
        {llama, "{\"added_tokens\": [{\"id\": 1}]}", FSDP_ERR_DAMAGED},
        {llama, "{\"added_tokens\": [{\"content\": \"a\"}]}", FSDP_ERR_DAMAGED},
        {llama, "{\"model\": {\"vocab\": {\"a\": 0}, \"merges\": [\"aa\"]}}", FSDP_ERR_DAMAGED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        config = cases[i].config;
        put("tokenizer.json", cases[i].tokenizer ? cases[i].tokenizer : "{}");
        fsdp_named_values_release(&values);
        cr_assert_eq(read_all(), cases[i].status, "case %zu: %s", i, err.text);
    }
}

/* --- families --- */

Test(gguf_values, gemma2_has_windows_and_bounds_of_logits)
{
    static const char *const refused[][2] = {
        {"\"head_dim\": 16",
         "query_pre_attn_scalar 256, but llama.cpp computes every 'gemma2' with 16"},
        {"\"attn_logit_softcapping\": null", "attn_logit_softcapping null or 0, but llama.cpp"},
        {"\"final_logit_softcapping\": 0", "final_logit_softcapping null or 0"},
        {"\"sliding_window\": null", "layers of sliding attention, but no sliding_window"},
        {"\"layer_types\": [\"full_attention\", \"full_attention\"]", "a multiple of 2"},
        {"\"layer_types\": [\"full_attention\", \"sliding_attention\"]", "a multiple of 2"},
        {"\"layer_types\": [\"sliding_attention\", \"chunked_attention\"]", "other layer_types"},
        {"\"use_bidirectional_attention\": true", "use_bidirectional_attention 1"},
        {"\"attention_bias\": true", "attention_bias 1"},
        {"\"tie_word_embeddings\": false", "takes the embedding for the output of every 'gemma2'"},
        {"\"hidden_activation\": \"gelu\"", "hidden_activation 'gelu'"},
    };
    cr_assert_eq(read_with("gemma2", "\"hidden_act\": \"gelu\", \"sliding_window\": 32"), FSDP_OK,
                 "%s", err.text);
    cr_expect_eq(number("gemma2.attention.sliding_window"), 32);
    cr_expect_eq(find("gemma2.attn_logit_softcapping")->as.f64, 50);
    cr_expect_eq(find("gemma2.final_logit_softcapping")->as.f64, 30);
    cr_expect_null(find("gemma2.attention.sliding_window_pattern"), "llama.cpp knows it");
    EXPECT_REFUSED("gemma2", refused);
    /* the 27B model, whose scale follows from other numbers */
    cr_assert_eq(read_with("gemma2", "\"num_hidden_layers\": 46, \"query_pre_attn_scalar\": 16"),
                 FSDP_ERR_DAMAGED, "two numbers of layers");
    config = "{\"model_type\": \"gemma2\", \"num_hidden_layers\": 46, \"hidden_size\": 64, "
             "\"num_attention_heads\": 4, \"max_position_embeddings\": 128, "
             "\"query_pre_attn_scalar\": 16}";
    cr_expect_eq(read_all(), FSDP_OK, "%s", err.text);
}

#define FULL_ROPE \
    "\"full_attention\": {\"rope_type\": \"linear\", \"factor\": 8, \"rope_theta\": 9}"

Test(gguf_values, gemma3_has_rotary_numbers_per_type_of_layers)
{
    static const char *const refused[][2] = {
        {"\"rope_parameters\": {\"rope_theta\": 5}", "rope_parameters that are not those of types"},
        {"\"rope_parameters\": {" FULL_ROPE "}, \"rope_scaling\": {\"type\": \"linear\"}",
         "rope_parameters that are not those of types"},
        {"\"rope_parameters\": {" FULL_ROPE
         ", \"sliding_attention\": {\"rope_type\": \"linear\", \"factor\": 8}}",
         "a scaling of rotary positions in layers of sliding attention"},
        {"\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 8}",
         "a scaling of rotary positions in layers of sliding attention"},
        {"\"attn_logit_softcapping\": 50", "attn_logit_softcapping 50"},
        {"\"sliding_window_pattern\": 2", "a multiple of 6"},
    };
    cr_assert_eq(read_with("gemma3_text", "\"rope_parameters\": {" FULL_ROPE
                                          ", \"sliding_attention\": {\"rope_theta\": 7}}"),
                 FSDP_OK, "%s", err.text);
    cr_expect_eq(find("gemma3.rope.freq_base")->as.f64, 9);
    cr_expect_eq(find("gemma3.rope.freq_base_swa")->as.f64, 7);
    cr_expect_eq(find("gemma3.rope.scaling.factor")->as.f64, 8);
    cr_expect_eq(number("gemma3.attention.sliding_window"), 4096);
    cr_assert_eq(read_with("gemma3_text",
                           "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 8}, "
                           "\"rope_theta\": 9, \"rope_local_base_freq\": 7, "
                           "\"sliding_window_pattern\": 1"),
                 FSDP_OK, "as transformers 4 has them: %s", err.text);
    cr_expect_eq(find("gemma3.rope.freq_base")->as.f64, 9);
    cr_expect_eq(find("gemma3.rope.freq_base_swa")->as.f64, 7);
    cr_expect_eq(find("gemma3.rope.scaling.factor")->as.f64, 8);
    cr_expect_null(find("gemma3.attention.sliding_window"), "no layer has one");
    cr_assert_eq(read_with("gemma3_text", "\"head_dim\": 256"), FSDP_OK, "%s", err.text);
    cr_expect_eq(find("gemma3.rope.freq_base")->as.f64, 1e6);
    cr_expect_eq(find("gemma3.rope.freq_base_swa")->as.f64, 1e4);
    EXPECT_REFUSED("gemma3_text", refused);
}

Test(gguf_values, olmo3_lists_its_windows_and_olmo2_has_none)
{
    static const char *const refused2[][2] = {
        {"\"head_dim\": 8", "head_dim 8, but llama.cpp computes every 'olmo2' with 16"},
        {"\"attention_bias\": true", "attention_bias 1"},
        {"\"tie_word_embeddings\": true", "llama.cpp loads no 'olmo2' whose output"}};
    static const char *const refused3[][2] = {
        {"\"layer_types\": [\"full_attention\", \"full_attention\"]",
         "no layer of sliding attention"},
        {"\"head_dim\": 8", "head_dim 8"},
        {"\"sliding_window\": null", "layers of sliding attention, but no sliding_window"},
        {"\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 5}, \"sliding_attention\": "
         "{\"rope_theta\": 7}}",
         "another rope_theta for layers of sliding attention"}};
    cr_assert_eq(read_with("olmo2", "\"head_dim\": 16"), FSDP_OK, "%s", err.text);
    cr_expect_null(find("olmo2.attention.sliding_window_pattern"));
    EXPECT_REFUSED("olmo2", refused2);
    cr_assert_eq(read_with("olmo3",
                           "\"sliding_window\": 8, \"rope_theta\": 9, \"layer_types\": "
                           "[\"full_attention\", \"sliding_attention\"], \"rope_scaling\": "
                           "{\"rope_type\": \"yarn\", \"factor\": 2}"),
                 FSDP_OK, "%s", err.text);
    cr_assert_str_eq(text_of(find("general.architecture")), "olmo2");
    cr_expect_eq(number("olmo2.attention.sliding_window"), 8);
    cr_expect_not(item("olmo2.attention.sliding_window_pattern", 0)->as.boolean);
    cr_expect(item("olmo2.attention.sliding_window_pattern", 1)->as.boolean);
    EXPECT_REFUSED("olmo3", refused3);
}

Test(gguf_values, numbers_that_llama_cpp_has_built_in_are_no_others)
{
    static const char *const cohere[][2] = {
        {"\"logit_scale\": 0", "logit_scale null or 0"},
        {"\"sliding_window\": null", "no sliding_window"},
        {"\"sliding_window_pattern\": 2", "a multiple of 4"},
        {"\"attention_bias\": true", "attention_bias 1"},
        {"\"tie_word_embeddings\": false", "takes the embedding for the output"}};
    static const char *const smollm[][2] = {
        {"\"no_rope_layers\": [1, 0]", "no_rope_layers 0 for layer 1"},
        {"\"no_rope_layer_interval\": 2", "no_rope_layer_interval 2"},
        {"\"use_sliding_window\": true, \"sliding_window\": 8", "sliding_window 8 in a context"}};
    static const char *const starcoder[][2] = {
        {"\"use_bias\": false", "use_bias 0"},
        {"\"sliding_window\": 8", "sliding_window 8 in a context of 128"},
        {"\"hidden_act\": \"gelu\"", "hidden_act 'gelu'"}};
    static const char *const phi[][2] = {
        {"\"sliding_window\": 8", "sliding_window 8 in a context of 128"},
        {"\"head_dim\": 8", "head_dim 8"}};
    EXPECT_REFUSED("cohere2", cohere);
    EXPECT_REFUSED("smollm3", smollm);
    EXPECT_REFUSED("starcoder2", starcoder);
    EXPECT_REFUSED("phi3", phi);
    cr_assert_eq(read_with("smollm3", "\"no_rope_layers\": [true, 1, 0]"), FSDP_OK, "%s", err.text);
    cr_assert_eq(read_with("starcoder2", "\"norm_epsilon\": 0.5"), FSDP_OK, "%s", err.text);
    cr_expect_eq(find("starcoder2.attention.layer_norm_epsilon")->as.f64, 0.5);
    cr_expect_null(find("starcoder2.attention.layer_norm_rms_epsilon"));
    cr_assert_eq(read_with("phi3", "\"partial_rotary_factor\": 0.5"), FSDP_OK, "%s", err.text);
    cr_expect_eq(number("phi3.rope.dimension_count"), 8);
    cr_expect_eq(number("phi3.attention.sliding_window"), 0);
    cr_expect_null(find("phi3.attention.key_length"));
}

#define LONG_ROPE "\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1, 1.5], "

Test(gguf_values, phi3_has_factors_of_long_contexts_in_tensors)
{
    static const char part[] = "\"partial_rotary_factor\": 0.25, " LONG_ROPE;
    char members[300];
    snprintf(members, sizeof members, "%s%s", part,
             "\"long_factor\": [2, 3.5]}, \"original_max_position_embeddings\": 32");
    cr_assert_eq(read_with("phi3", members), FSDP_OK, "%s", err.text);
    cr_expect_eq(number("phi3.rope.scaling.original_context_length"), 32);
    cr_expect_float_eq(find("phi3.rope.scaling.attn_factor")->as.f64, sqrt(1 + log(4) / log(32)),
                       1e-6);
    cr_expect_null(find("phi3.rope.scaling.type"));
    snprintf(members, sizeof members, "%s%s", part,
             "\"long_factor\": [2, 3.5], \"attention_factor\": 1.5, "
             "\"original_max_position_embeddings\": 16}");
    cr_assert_eq(read_with("phi3", members), FSDP_OK, "%s", err.text);
    cr_expect_eq(find("phi3.rope.scaling.attn_factor")->as.f64, 1.5);
    cr_expect_eq(number("phi3.rope.scaling.original_context_length"), 16);
    snprintf(members, sizeof members, "%s%s", part, "\"long_factor\": [2, 3.5]}");
    cr_expect_eq(read_with("phi3", members), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "without original_max_position_embeddings"), "%s", err.text);
    snprintf(members, sizeof members, "%s%s", part, "\"long_factor\": [2]}");
    cr_expect_eq(read_with("phi3", members), FSDP_ERR_DAMAGED);
    cr_expect(strstr(err.text, "long_factor is not a list of 2 numbers"), "%s", err.text);
    cr_expect_eq(read_with("smollm3", LONG_ROPE "\"long_factor\": [2]}"), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "rope_type 'longrope'"), "%s", err.text);
}

Test(gguf_values, gpt_neox_and_falcon_have_names_of_their_own)
{
    static const char *const neox[][2] = {
        {"\"attention_bias\": false", "attention_bias 0"},
        {"\"tie_word_embeddings\": true", "llama.cpp loads no 'gptneox'"}};
    static const char *const falcon[][2] = {{"\"alibi\": true", "alibi 1"},
                                            {"\"bias\": true", "bias 1"},
                                            {"\"parallel_attn\": false", "parallel_attn 0"}};
    cr_assert_eq(read_with("gpt_neox", "\"rotary_pct\": 0.5, \"rotary_emb_base\": 7, "
                                       "\"use_parallel_residual\": false"),
                 FSDP_OK, "%s", err.text);
    cr_expect_eq(number("gptneox.rope.dimension_count"), 8);
    cr_expect_eq(find("gptneox.rope.freq_base")->as.f64, 7);
    cr_assert_eq(find("gptneox.use_parallel_residual")->kind, FSDP_VALUE_BOOL);
    cr_expect_not(find("gptneox.use_parallel_residual")->as.boolean);
    cr_assert_eq(read_with("gpt_neox", "\"rope_parameters\": {\"rope_theta\": 9}"), FSDP_OK, "%s",
                 err.text);
    cr_expect_eq(number("gptneox.rope.dimension_count"), 4, "a quarter is usual");
    cr_expect_eq(find("gptneox.rope.freq_base")->as.f64, 9);
    EXPECT_REFUSED("gpt_neox", neox);
    cr_assert_eq(read_with("falcon", "\"num_kv_heads\": 4"), FSDP_OK, "%s", err.text);
    cr_expect_eq(number("falcon.attention.head_count_kv"), 1, "multi_query counts");
    cr_assert_eq(read_with("falcon", "\"multi_query\": false"), FSDP_OK, "%s", err.text);
    cr_expect_eq(number("falcon.attention.head_count_kv"), 4);
    cr_assert_eq(read_with("falcon", "\"new_decoder_architecture\": true, \"num_kv_heads\": 2"),
                 FSDP_OK, "%s", err.text);
    cr_expect_eq(number("falcon.attention.head_count_kv"), 2);
    EXPECT_REFUSED("falcon", falcon);
}

/* --- the way back --- */

static void comes_back(const char *family)
{
    fsdp_sd *sd = NULL;
    fsdp_text text = {0};
    fsdp_named_values_release(&values);
    cr_assert_eq(read_all(), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    for (size_t i = 0; i < values.count; i++)
        add_value(sd, values.items[i].name, &values.items[i].value);
    cr_assert_eq(fsdp_gguf_config_text(sd, &text, &err), FSDP_OK, "%s", err.text);
    config = text.data;
    fsdp_named_values before = values;
    values = (fsdp_named_values){0};
    cr_assert_eq(read_all(), FSDP_OK, "%s: %s", err.text, text.data);
    for (size_t i = 0; i < before.count; i++) {
        const fsdp_value *after = find(before.items[i].name);
        bool is_vocab = strcmp(before.items[i].name, "llama.vocab_size") == 0; /* of a tensor */
        cr_assert(is_vocab || (after && fsdp_value_equal(after, &before.items[i].value)),
                  "%s in %s", before.items[i].name, text.data);
    }
    char member[64];
    snprintf(member, sizeof member, "\"model_type\": \"%s\"", family);
    cr_assert_not_null(strstr(text.data, member), "%s", text.data);
    cr_assert_not_null(strstr(text.data, "\"rms_norm_eps\": 1e-05"), "%s", text.data);
    cr_assert_not_null(strstr(text.data, "\"tie_word_embeddings\": true"));
    config = "{}"; /* the text goes */
    fsdp_named_values_release(&before);
    fsdp_text_release(&text);
    fsdp_sd_free(sd);
}

Test(gguf_values, a_config_comes_back_out_of_its_pairs)
{
    config = llama;
    comes_back("llama");
    cr_assert_eq(read_with("llama", "\"rms_norm_eps\": 1e-05, \"rope_scaling\": {\"type\": "
                                    "\"yarn\", \"factor\": 4, "
                                    "\"original_max_position_embeddings\": 32}"),
                 FSDP_OK);
    comes_back("llama");
    cr_assert_eq(read_with("mixtral", "\"rms_norm_eps\": 1e-05, \"num_local_experts\": 4"),
                 FSDP_OK);
    comes_back("mixtral");
}

Test(gguf_values, a_config_of_another_architecture_is_refused)
{
    fsdp_sd *sd = NULL;
    fsdp_text text = {0};
    fsdp_value value = {.kind = FSDP_VALUE_NULL};
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    cr_assert_eq(fsdp_gguf_config_text(sd, &text, &err), FSDP_ERR_USAGE, "no architecture");
    cr_assert_eq(fsdp_value_set_bytes(&value, FSDP_VALUE_STRING, "gpt2", 4, &err), FSDP_OK);
    add_value(sd, "general.architecture", &value);
    cr_assert_eq(fsdp_gguf_config_text(sd, &text, &err), FSDP_ERR_USAGE, "no numbers");
    fsdp_value_release(&value);
    static const char *const needed[] = {"gpt2.block_count", "gpt2.context_length",
                                         "gpt2.embedding_length", "gpt2.attention.head_count"};
    const fsdp_value two = fsdp_value_i64(2);
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        add_value(sd, needed[i], &two);
    cr_assert_eq(fsdp_gguf_config_text(sd, &text, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_value_set_bytes(&value, FSDP_VALUE_STRING, "longrope", 8, &err), FSDP_OK);
    add_value(sd, "gpt2.rope.scaling.type", &value);
    fsdp_value_release(&value);
    cr_assert_eq(fsdp_gguf_config_text(sd, &text, &err), FSDP_ERR_USAGE, "no such scaling");
    fsdp_text_release(&text);
    fsdp_sd_free(sd);
}

/* The config.json of a file whose pairs are those of the config, and one more tensor; NULL: refused. */
static char *made_with(const char *tensor)
{
    fsdp_text text = {0};
    fsdp_named_values_release(&values);
    cr_assert_eq(read_all(), FSDP_OK, "%s", err.text);
    add_tensor(tensor, 2, 64);
    for (size_t i = 0; i < values.count; i++)
        add_value(tensors, values.items[i].name, &values.items[i].value);
    fsdp_status st = fsdp_gguf_config_text(tensors, &text, &err);
    char *made = st == FSDP_OK ? fsdp_strndup(text.data, text.size) : NULL;
    cr_assert(made || st == FSDP_ERR_USAGE);
    fsdp_text_release(&text);
    fsdp_sd_free(tensors);
    tensors = NULL;
    return made;
}

static void makes(const char *tensor, const char *member, bool is_there)
{
    char *made = made_with(tensor);
    cr_assert_not_null(made, "%s", err.text);
    cr_expect_eq(strstr(made, member) != NULL, is_there, "%s in %s", member, made);
    fsdp_free(made);
}

Test(gguf_values, members_without_a_key_come_back)
{
    cr_assert_eq(read_with("qwen3_moe", "\"num_experts\": 4, \"norm_topk_prob\": true"), FSDP_OK,
                 "%s", err.text);
    makes("token_embd.weight", "\"norm_topk_prob\": true", true);
    makes("token_embd.weight", "\"decoder_sparse_step\"", false);
    cr_assert_eq(read_with("qwen2_moe", "\"num_experts\": 4"), FSDP_OK, "%s", err.text);
    makes("token_embd.weight", "\"qkv_bias\": false", true);
    makes("blk.0.attn_q.bias", "\"qkv_bias\": true", true);
}

static const char glm[] =
    "\"n_routed_experts\": 4, \"moe_intermediate_size\": 8, \"n_shared_experts\": 2, "
    "\"norm_topk_prob\": false, \"partial_rotary_factor\": 0.25, "
    "\"first_k_dense_replace\": 0";

Test(gguf_values, layers_that_predict_further_tokens_have_a_key)
{
    cr_assert_eq(read_with("glm4_moe", glm), FSDP_OK, "%s", err.text);
    cr_expect_eq(number("glm4moe.block_count"), 2);
    makes("token_embd.weight", "\"num_hidden_layers\": 2", true);
    add_tensor("blk.2.nextn.eh_proj.weight", 64, 128);
    cr_assert_eq(read_with("glm4_moe", glm), FSDP_OK, "%s", err.text);
    cr_expect_eq(number("glm4moe.block_count"), 3);
    cr_expect_eq(number("glm4moe.nextn_predict_layers"), 1);
    fsdp_named_values_release(&values);
    makes("token_embd.weight", "\"num_hidden_layers\": 2", true);
    add_tensor("blk.2.nextn.eh_proj.weight", 64, 128);
    cr_expect_eq(read_with("llama", "\"vocab_size\": 8"), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "num_hidden_layers 2, but there are tensors of 3 layers"), "%s",
              err.text);
}

/* A config.json without a member means transformers' number, and llama.cpp has another one. */
Test(gguf_values, numbers_of_llama_cpp_that_are_not_those_of_transformers_come_back)
{
    static const char *const members[] = {
        "\"norm_topk_prob\": false",       "\"first_k_dense_replace\": 0",
        "\"partial_rotary_factor\": 0.25", "\"attention_bias\": false",
        "\"num_nextn_predict_layers\": 0", "\"n_shared_experts\": 2"};
    cr_assert_eq(read_with("glm4_moe", glm), FSDP_OK, "%s", err.text);
    cr_expect_eq(number("glm4moe.rope.dimension_count"), 4);
    for (size_t i = 0; i < sizeof members / sizeof *members; i++)
        makes("token_embd.weight", members[i], true);
    makes("blk.0.attn_q.bias", "\"attention_bias\": true", true);
}

Test(gguf_values, a_flag_whose_key_a_file_lacks_is_false)
{
    fsdp_sd *sd = NULL;
    fsdp_text text = {0};
    cr_assert_eq(read_with("glm4_moe", glm), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    for (size_t i = 0; i < values.count; i++)
        if (strcmp(values.items[i].name, "glm4moe.expert_weights_norm") != 0)
            add_value(sd, values.items[i].name, &values.items[i].value);
    cr_assert_eq(fsdp_gguf_config_text(sd, &text, &err), FSDP_OK, "%s", err.text);
    cr_expect(strstr(text.data, "\"norm_topk_prob\": false"), "%s", text.data);
    fsdp_text_release(&text);
    fsdp_sd_free(sd);
}

Test(gguf_values, files_of_another_computation_are_refused)
{
    cr_assert_eq(read_with("glm4_moe", glm), FSDP_OK, "%s", err.text);
    fsdp_sd *sd = NULL;
    fsdp_text text = {0};
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    for (size_t i = 0; i < values.count; i++) {
        const fsdp_value softmax = fsdp_value_i64(1);
        bool is_gating = strcmp(values.items[i].name, "glm4moe.expert_gating_func") == 0;
        add_value(sd, values.items[i].name, is_gating ? &softmax : &values.items[i].value);
    }
    cr_expect_eq(fsdp_gguf_config_text(sd, &text, &err), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "'glm4moe.expert_gating_func' 1 where 2 is expected"), "%s",
              err.text);
    fsdp_text_release(&text);
    fsdp_sd_free(sd);
}

Test(gguf_values, files_that_rotate_a_part_of_a_head_are_refused)
{
    cr_assert_eq(read_with("llama", "\"vocab_size\": 8"), FSDP_OK, "%s", err.text);
    for (size_t i = 0; i < values.count; i++)
        if (strcmp(values.items[i].name, "llama.rope.dimension_count") == 0)
            values.items[i].value = fsdp_value_i64(8);
    fsdp_sd *sd = NULL;
    fsdp_text text = {0};
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    for (size_t i = 0; i < values.count; i++)
        add_value(sd, values.items[i].name, &values.items[i].value);
    cr_expect_eq(fsdp_gguf_config_text(sd, &text, &err), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "'llama.rope.dimension_count' 8 in heads of 16"), "%s", err.text);
    fsdp_text_release(&text);
    fsdp_sd_free(sd);
}

static const char latent[] =
    "\"n_routed_experts\": 4, \"moe_intermediate_size\": 8, \"intermediate_size\": 16, "
    "\"kv_lora_rank\": 16, "
    "\"qk_rope_head_dim\": 8, \"qk_nope_head_dim\": 10, \"v_head_dim\": 14, \"q_lora_rank\": null";

Test(gguf_values, a_latent_attention_has_one_group_of_stored_keys)
{
    cr_assert_eq(read_with("deepseek_v3", latent), FSDP_OK, "%s", err.text);
    cr_expect_eq(number("deepseek2.attention.head_count_kv"), 1);
    cr_expect_eq(number("deepseek2.attention.key_length"), 24);
    cr_expect_eq(number("deepseek2.attention.value_length"), 16);
    cr_expect_eq(number("deepseek2.attention.key_length_mla"), 18);
    cr_expect_eq(number("deepseek2.rope.dimension_count"), 8);
    static const char *const members[] = {"\"num_key_value_heads\": 4",  "\"qk_nope_head_dim\": 10",
                                          "\"qk_rope_head_dim\": 8",     "\"kv_lora_rank\": 16",
                                          "\"q_lora_rank\": null",       "\"v_head_dim\": 14",
                                          "\"first_k_dense_replace\": 3"};
    for (size_t i = 0; i < sizeof members / sizeof *members; i++)
        makes("token_embd.weight", members[i], true);
}

/* With one more member, and for the way back with one pair replaced. */
static fsdp_status deepseek_with(const char *member, const char *key, double number)
{
    char members[512];
    fsdp_sd *sd = NULL;
    fsdp_text text = {0};
    snprintf(members, sizeof members, "%s%s", latent, member);
    fsdp_status st = read_with("deepseek_v3", members);
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    for (size_t i = 0; i < values.count; i++) {
        const fsdp_value other = fsdp_value_f64(number);
        add_value(sd, values.items[i].name,
                  strcmp(values.items[i].name, key) == 0 ? &other : &values.items[i].value);
    }
    if (st == FSDP_OK)
        st = fsdp_gguf_config_text(sd, &text, &err);
    cr_expect(st != FSDP_OK || !*key || strstr(text.data, "\"mscale_all_dim\": 0.75"));
    fsdp_text_release(&text);
    fsdp_sd_free(sd);
    return st;
}

Test(gguf_values, attention_is_scaled_as_transformers_does_or_refused)
{
    static const char yarn[] = ", \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, "
                               "\"mscale\": 0.75, \"mscale_all_dim\": 0.75}";
    static const char log[] = "deepseek2.rope.scaling.yarn_log_multiplier";
    cr_expect_eq(deepseek_with(yarn, log, (double)0.075F), FSDP_OK, "%s", err.text);
    cr_expect_eq(find(log)->as.f64, (double)0.075F);
    cr_expect_eq(deepseek_with(yarn, log, 0), FSDP_ERR_USAGE, "transformers would not scale by 1");
    cr_expect_eq(deepseek_with("", "deepseek2.attention.layer_norm_rms_epsilon", 1e-5),
                 FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "since transformers computes with 1e-6"), "%s", err.text);
    static const char *const odd[][2] = {
        {", \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4}", "mscale of YaRN"},
        {", \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, \"mscale\": 1, "
         "\"mscale_all_dim\": 0.75}",
         "mscale of YaRN"},
        {", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 4}", "rope_type 'linear'"},
        {", \"rms_norm_eps\": 1e-5", "rms_norm_eps 1e-05"},
        {", \"rope_interleave\": false", "rope_interleave 0"}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        cr_expect_eq(deepseek_with(odd[i][0], "", 0), FSDP_ERR_USAGE, "%s", odd[i][0]);
        cr_expect(strstr(err.text, odd[i][1]), "%s", err.text);
    }
}

/* transformers has YaRN's numbers for a GPT-OSS whose config.json says nothing of rotary positions. */
Test(gguf_values, rotary_positions_that_are_scaled_by_default_are_said)
{
    static const char plain[] = "\"num_local_experts\": 4, \"intermediate_size\": 8, "
                                "\"rope_parameters\": {\"rope_type\": \"default\"}";
    cr_assert_eq(read_with("gpt_oss", plain), FSDP_OK, "%s", err.text);
    cr_expect_eq(number("gpt-oss.expert_feed_forward_length"), 8);
    cr_expect_eq(number("gpt-oss.attention.sliding_window"), 128);
    makes("token_embd.weight", "\"rope_scaling\": {\"rope_type\": \"default\"", true);
    static const char scaled[] = "\"num_local_experts\": 4, \"intermediate_size\": 8, "
                                 "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, "
                                 "\"truncate\": false}";
    cr_assert_eq(read_with("gpt_oss", scaled), FSDP_OK, "%s", err.text);
    makes("token_embd.weight", "\"truncate\": false", true);
    static const char *const odd[][2] = {
        {"\"vocab_size\": 8", "neither rope_parameters nor rope_scaling"},
        {"\"attention_bias\": false", "attention_bias 0"},
        {"\"swiglu_limit\": 6.5", "swiglu_limit 6.5"},
        {"\"layer_types\": [\"full_attention\", \"full_attention\"]", "other layer_types"},
        {"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4}", "truncate 1"}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        char members[400];
        snprintf(members, sizeof members, "%s, %s", i == 0 ? "\"num_local_experts\": 4" : plain,
                 odd[i][0]);
        cr_expect_eq(read_with("gpt_oss", members), FSDP_ERR_USAGE, "%s", odd[i][0]);
        cr_expect(strstr(err.text, odd[i][1]), "%s", err.text);
    }
}

/* Makes config.json of the pairs, less one key, and with a number in its place unless that is 0. */
static fsdp_status config_without(const char *key, double number, fsdp_text *text)
{
    fsdp_sd *sd = NULL;
    const fsdp_value value =
        floor(number) == number ? fsdp_value_i64((int64_t)number) : fsdp_value_f64(number);
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    for (size_t i = 0; i < values.count; i++)
        if (strcmp(values.items[i].name, key) != 0)
            add_value(sd, values.items[i].name, &values.items[i].value);
    if (number != 0)
        add_value(sd, key, &value);
    fsdp_status st = fsdp_gguf_config_text(sd, text, &err);
    fsdp_sd_free(sd);
    return st;
}

Test(gguf_values, files_with_windows_or_without_a_scale_are_refused)
{
    static const char *const cases[][2] = {{"qwen3", "qwen3.attention.sliding_window"},
                                           {"granite", "granite.attention.scale"},
                                           {"gemma2", "gemma2.attn_logit_softcapping"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_text text = {0};
        cr_assert_eq(read_with(cases[i][0], "\"vocab_size\": 8, \"query_pre_attn_scalar\": 256"),
                     FSDP_OK, "%s", err.text);
        cr_assert_eq(config_without("", 0, &text), FSDP_OK, "%s", err.text);
        cr_expect_eq(config_without(cases[i][1], i == 0 ? 8 : 0, &text), FSDP_ERR_USAGE, "%s",
                     cases[i][1]);
        fsdp_text_release(&text);
    }
}

Test(gguf_values, a_period_of_windows_is_a_whole_number)
{
    static const double periods[] = {0.5, 2.5, -1, 5000};
    fsdp_text text = {0};
    cr_assert_eq(read_with("gemma3_text", "\"head_dim\": 256"), FSDP_OK, "%s", err.text);
    for (size_t i = 0; i < sizeof periods / sizeof *periods; i++) {
        cr_expect_eq(config_without("gemma3.attention.sliding_window_pattern", periods[i], &text),
                     FSDP_ERR_DAMAGED, "%g", periods[i]);
        cr_expect(strstr(err.text, "does not fit 2 layers"), "%s", err.text);
    }
    cr_expect_eq(config_without("gemma3.block_count", -2, &text), FSDP_ERR_DAMAGED);
    fsdp_text_release(&text);
}

/* OLMo 3 has the architecture of OLMo 2, and a window. */
Test(gguf_values, a_file_of_olmo2_with_a_window_is_olmo3)
{
    fsdp_text text = {0};
    cr_assert_eq(read_with("olmo2", "\"vocab_size\": 8"), FSDP_OK, "%s", err.text);
    cr_assert_eq(config_without("olmo2.attention.sliding_window", 8, &text), FSDP_OK, "%s",
                 err.text);
    cr_expect(strstr(text.data, "\"model_type\": \"olmo3\"") &&
                  strstr(text.data, "\"sliding_window\": 8") &&
                  strstr(text.data, "[\"sliding_attention\", \"sliding_attention\"]") &&
                  strstr(text.data, "\"sliding_attention\": {\"rope_type\": \"default\""),
              "%s", text.data);
    fsdp_text_release(&text);
}

/* Numbers that transformers computes from others are those of the file. */
Test(gguf_values, a_fixed_number_of_a_file_may_follow_from_others)
{
    fsdp_text text = {0};
    cr_assert_eq(read_with("cohere2", "\"head_dim\": 16, \"vocab_size\": 8"), FSDP_OK, "%s",
                 err.text);
    cr_expect_eq(config_without("", 0, &text), FSDP_OK, "%s", err.text);
    cr_expect_eq(config_without("cohere2.attention.key_length", 8, &text), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "computes with hidden_size / num_attention_heads"), "%s", err.text);
    fsdp_text_release(&text);
}

/* transformers asks for a number even where no layer slides. */
Test(gguf_values, a_file_without_windows_has_layers_of_full_attention)
{
    fsdp_text text = {0};
    cr_assert_eq(read_with("gemma3_text", "\"sliding_window_pattern\": 1, \"vocab_size\": 8"),
                 FSDP_OK, "%s", err.text);
    cr_assert_eq(config_without("", 0, &text), FSDP_OK, "%s", err.text);
    cr_expect(strstr(text.data, "[\"full_attention\", \"full_attention\"]") &&
                  !strstr(text.data, "sliding_window"),
              "%s", text.data);
    fsdp_text_release(&text);
}

/* Without the key llama.cpp takes 10000, and the default of SmolLM3 is another one. */
Test(gguf_values, a_base_that_a_file_leaves_out_is_that_of_llama_cpp)
{
    fsdp_text text = {0};
    cr_assert_eq(read_with("smollm3", "\"vocab_size\": 8"), FSDP_OK, "%s", err.text);
    cr_expect_eq(find("smollm3.rope.freq_base")->as.f64, 2e6);
    cr_assert_eq(config_without("smollm3.rope.freq_base", 0, &text), FSDP_OK, "%s", err.text);
    cr_expect(strstr(text.data, "\"rope_theta\": 1e+04") &&
                  strstr(text.data, "\"pad_token_id\": null"),
              "%s", text.data);
    fsdp_text_release(&text);
}

Test(gguf_values, a_list_in_the_place_of_a_number_is_refused)
{
    fsdp_sd *sd = NULL;
    fsdp_text text = {0};
    fsdp_value list = {.kind = FSDP_VALUE_NULL};
    cr_assert_eq(read_with("granite", "\"vocab_size\": 8"), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    for (size_t i = 0; i < values.count; i++)
        if (strcmp(values.items[i].name, "granite.attention.head_count_kv") != 0)
            add_value(sd, values.items[i].name, &values.items[i].value);
    cr_assert_eq(fsdp_value_set_items(&list, FSDP_VALUE_LIST, 2, &err), FSDP_OK);
    list.as.list.items[0] = list.as.list.items[1] = fsdp_value_i64(2);
    add_value(sd, "granite.attention.head_count_kv", &list);
    cr_assert_eq(fsdp_gguf_config_text(sd, &text, &err), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "'granite.attention.head_count_kv' has a number for each layer"),
              "%s", err.text);
    fsdp_value_release(&list);
    fsdp_text_release(&text);
    fsdp_sd_free(sd);
}

/* The config of a llama with YaRN whose file has one pair more. */
static fsdp_status config_with(const char *key, double number)
{
    fsdp_sd *sd = NULL;
    fsdp_text text = {0};
    const fsdp_value more = fsdp_value_f64(number);
    cr_assert_eq(read_with("llama", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4}"),
                 FSDP_OK);
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    for (size_t i = 0; i < values.count; i++)
        add_value(sd, values.items[i].name, &values.items[i].value);
    add_value(sd, key, &more);
    fsdp_status st = fsdp_gguf_config_text(sd, &text, &err);
    config = "{}"; /* the text goes */
    fsdp_text_release(&text);
    fsdp_sd_free(sd);
    return st;
}

Test(gguf_values, numbers_of_yarn_without_a_member_are_refused)
{
    cr_expect_eq(config_with("llama.rope.scaling.yarn_beta_fast", 32), FSDP_OK, "%s", err.text);
    cr_expect_eq(config_with("llama.rope.scaling.attn_factor", 1), FSDP_OK, "%s", err.text);
    cr_expect_eq(config_with("llama.rope.scaling.yarn_beta_fast", 16), FSDP_ERR_USAGE);
    cr_expect_eq(config_with("llama.rope.scaling.attn_factor", 0.5), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "'llama.rope.scaling.attn_factor' 0.5"), "%s", err.text);
}

/* Every allocation fails once. */
Test(gguf_values, memory_that_is_not_there_is_an_error)
{
    fsdp_status st = FSDP_ERR_LIMIT;
    config = llama;
    put("tokenizer.json", "{\"model\": {\"vocab\": {\"a\": 0, \"b\": 1}, \"merges\": [\"a b\"]}}");
    for (int64_t n = 0; st != FSDP_OK && n < 1000; n++) {
        fsdp_named_values_release(&values);
        fsdp_mem_fail_after(n, false);
        st = read_all();
        fsdp_mem_fail_after(-1, false);
        cr_assert(st == FSDP_OK || st == FSDP_ERR_LIMIT, "%d: %s", (int)st, err.text);
    }
    cr_assert_eq(st, FSDP_OK);
}
