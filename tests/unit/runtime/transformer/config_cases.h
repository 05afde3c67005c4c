/* Made by config_cases.py: config.json and what transformers reads in it. */
#ifndef FSDP_CONFIG_CASES_H
#define FSDP_CONFIG_CASES_H

static const config_case cases[] = {
    {"{\"model_type\": \"gpt2\"}",
     "gpt2", 12, 768, 3072, 12, 12, 64, 50257, 1024, 1e-05, 0.02, FSDP_NN_GELU_TANH, true, true,
     true, true, false, FSDP_ROPE_DEFAULT, 0, 0, 0, 0, 0, 0, "000000000000", 50256, 50256},
    {"{\"model_type\": \"gpt2\", \"n_embd\": 36, \"n_head\": 6, \"n_layer\":"
     " 3, \"n_inner\": 50, \"n_positions\": 77, \"vocab_size\": 99, "
     "\"activation_function\": \"relu\", \"layer_norm_epsilon\": 1e-06, "
     "\"initializer_range\": 0.1, \"scale_attn_by_inverse_layer_idx\":"
     " true, \"scale_attn_weights\": false, \"bos_token_id\": null, "
     "\"eos_token_id\": 7}",
     "gpt2", 3, 36, 50, 6, 6, 6, 99, 77, 1e-06, 0.1, FSDP_NN_RELU, true, true, true, false,
     true, FSDP_ROPE_DEFAULT, 0, 0, 0, 0, 0, 0, "000", -1, 7},
    {"{\"model_type\": \"gpt2\", \"n_inner\": null, \"n_embd\": 24, "
     "\"n_head\": 2, \"activation_function\": \"gelu\", "
     "\"tie_word_embeddings\": false}",
     "gpt2", 12, 24, 96, 2, 2, 12, 50257, 1024, 1e-05, 0.02, FSDP_NN_GELU, false, true, true,
     true, false, FSDP_ROPE_DEFAULT, 0, 0, 0, 0, 0, 0, "000000000000", 50256, 50256},
    {"{\"model_type\": \"gpt2\", \"hidden_size\": 36, \"n_head\": 4, "
     "\"num_attention_heads\": 6, \"num_hidden_layers\": 3, "
     "\"max_position_embeddings\": 77}",
     "gpt2", 3, 36, 144, 6, 6, 6, 50257, 77, 1e-05, 0.02, FSDP_NN_GELU_TANH, true, true, true,
     true, false, FSDP_ROPE_DEFAULT, 0, 0, 0, 0, 0, 0, "000", 50256, 50256},
    {"{\"model_type\": \"llama\"}",
     "llama", 32, 4096, 11008, 32, 32, 128, 32000, 2048, 1e-06, 0.02, FSDP_NN_SILU, false,
     false, false, true, false, FSDP_ROPE_DEFAULT, 10000.0, 1, 0, 0, 0, 0,
     "00000000000000000000000000000000", 1, 2},
    {"{\"model_type\": \"llama\", \"hidden_size\": 64, "
     "\"num_attention_heads\": 4, \"num_hidden_layers\": 2, "
     "\"intermediate_size\": 100, \"vocab_size\": 300, "
     "\"max_position_embeddings\": 128}",
     "llama", 2, 64, 100, 4, 4, 16, 300, 128, 1e-06, 0.02, FSDP_NN_SILU, false, false, false,
     true, false, FSDP_ROPE_DEFAULT, 10000.0, 1, 0, 0, 0, 0, "00", 1, 2},
    {"{\"model_type\": \"llama\", \"hidden_size\": 64, "
     "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
     "\"head_dim\": 24, \"rope_theta\": 500000.0, \"rope_scaling\": "
     "{\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": "
     "1.0, \"high_freq_factor\": 4.0, "
     "\"original_max_position_embeddings\": 64}, "
     "\"max_position_embeddings\": 512, \"attention_bias\": true, "
     "\"mlp_bias\": true, \"tie_word_embeddings\": true}",
     "llama", 32, 64, 11008, 4, 2, 24, 32000, 512, 1e-06, 0.02, FSDP_NN_SILU, true, true, true,
     true, false, FSDP_ROPE_LLAMA3, 500000.0, 8.0, 1.0, 4.0, 64, 0,
     "00000000000000000000000000000000", 1, 2},
    {"{\"model_type\": \"llama\", \"hidden_size\": 64, "
     "\"num_attention_heads\": 4, \"head_dim\": null, "
     "\"num_key_value_heads\": null, \"rope_scaling\": {\"type\": "
     "\"linear\", \"factor\": 4.0}, \"rope_theta\": 20000.0}",
     "llama", 32, 64, 11008, 4, 4, 16, 32000, 2048, 1e-06, 0.02, FSDP_NN_SILU, false, false,
     false, true, false, FSDP_ROPE_LINEAR, 20000.0, 4.0, 0, 0, 0, 0,
     "00000000000000000000000000000000", 1, 2},
    {"{\"model_type\": \"llama\", \"rope_parameters\": {\"rope_type\": "
     "\"linear\", \"factor\": 2.0, \"rope_theta\": 30000.0}}",
     "llama", 32, 4096, 11008, 32, 32, 128, 32000, 2048, 1e-06, 0.02, FSDP_NN_SILU, false,
     false, false, true, false, FSDP_ROPE_LINEAR, 30000.0, 2.0, 0, 0, 0, 0,
     "00000000000000000000000000000000", 1, 2},
    {"{\"model_type\": \"llama\", \"rope_parameters\": {\"rope_type\": "
     "\"llama3\", \"rope_theta\": 500000.0, \"factor\": 8.0, "
     "\"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0, "
     "\"original_max_position_embeddings\": 64}}",
     "llama", 32, 4096, 11008, 32, 32, 128, 32000, 2048, 1e-06, 0.02, FSDP_NN_SILU, false,
     false, false, true, false, FSDP_ROPE_LLAMA3, 500000.0, 8.0, 1.0, 4.0, 64, 0,
     "00000000000000000000000000000000", 1, 2},
    {"{\"model_type\": \"llama\", \"rope_parameters\": {\"rope_type\": "
     "\"default\", \"rope_theta\": 12345.0}}",
     "llama", 32, 4096, 11008, 32, 32, 128, 32000, 2048, 1e-06, 0.02, FSDP_NN_SILU, false,
     false, false, true, false, FSDP_ROPE_DEFAULT, 12345.0, 1, 0, 0, 0, 0,
     "00000000000000000000000000000000", 1, 2},
    {"{\"model_type\": \"llama\", \"rope_scaling\": null, \"rope_theta\": "
     "777.0, \"pretraining_tp\": 1}",
     "llama", 32, 4096, 11008, 32, 32, 128, 32000, 2048, 1e-06, 0.02, FSDP_NN_SILU, false,
     false, false, true, false, FSDP_ROPE_DEFAULT, 777.0, 1, 0, 0, 0, 0,
     "00000000000000000000000000000000", 1, 2},
    {"{\"model_type\": \"mistral\"}",
     "mistral", 32, 4096, 14336, 32, 8, 128, 32000, 131072, 1e-06, 0.02, FSDP_NN_SILU, false,
     false, false, true, false, FSDP_ROPE_DEFAULT, 10000.0, 1, 0, 0, 0, 4096,
     "11111111111111111111111111111111", 1, 2},
    {"{\"model_type\": \"mistral\", \"num_hidden_layers\": 3, "
     "\"sliding_window\": 5, \"hidden_size\": 64, "
     "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
     "\"head_dim\": 10}",
     "mistral", 3, 64, 14336, 4, 2, 10, 32000, 131072, 1e-06, 0.02, FSDP_NN_SILU, false, false,
     false, true, false, FSDP_ROPE_DEFAULT, 10000.0, 1, 0, 0, 0, 5, "111", 1, 2},
    {"{\"model_type\": \"mistral\", \"num_hidden_layers\": 3, "
     "\"sliding_window\": null, \"head_dim\": null}",
     "mistral", 3, 4096, 14336, 32, 8, 128, 32000, 131072, 1e-06, 0.02, FSDP_NN_SILU, false,
     false, false, true, false, FSDP_ROPE_DEFAULT, 10000.0, 1, 0, 0, 0, 0, "000", 1, 2},
    {"{\"model_type\": \"mistral\", \"num_hidden_layers\": 3, "
     "\"sliding_window\": 5, \"use_sliding_window\": false}",
     "mistral", 3, 4096, 14336, 32, 8, 128, 32000, 131072, 1e-06, 0.02, FSDP_NN_SILU, false,
     false, false, true, false, FSDP_ROPE_DEFAULT, 10000.0, 1, 0, 0, 0, 5, "111", 1, 2},
    {"{\"model_type\": \"qwen2\"}",
     "qwen2", 32, 4096, 22016, 32, 32, 128, 151936, 32768, 1e-06, 0.02, FSDP_NN_SILU, false,
     true, false, true, false, FSDP_ROPE_DEFAULT, 10000.0, 1, 0, 0, 0, 0,
     "00000000000000000000000000000000", -1, -1},
    {"{\"model_type\": \"qwen2\", \"num_hidden_layers\": 4, "
     "\"hidden_size\": 64, \"num_attention_heads\": 4, "
     "\"num_key_value_heads\": 2, \"use_sliding_window\": true, "
     "\"sliding_window\": 9, \"max_window_layers\": 2}",
     "qwen2", 4, 64, 22016, 4, 2, 16, 151936, 32768, 1e-06, 0.02, FSDP_NN_SILU, false, true,
     false, true, false, FSDP_ROPE_DEFAULT, 10000.0, 1, 0, 0, 0, 9, "0011", -1, -1},
    {"{\"model_type\": \"qwen2\", \"num_hidden_layers\": 4, "
     "\"use_sliding_window\": false, \"sliding_window\": 9, "
     "\"max_window_layers\": 2}",
     "qwen2", 4, 4096, 22016, 32, 32, 128, 151936, 32768, 1e-06, 0.02, FSDP_NN_SILU, false,
     true, false, true, false, FSDP_ROPE_DEFAULT, 10000.0, 1, 0, 0, 0, 0, "0000", -1, -1},
    {"{\"model_type\": \"qwen2\", \"num_hidden_layers\": 2, "
     "\"use_sliding_window\": true, \"sliding_window\": 9, "
     "\"layer_types\": [\"sliding_attention\", \"full_attention\"]}",
     "qwen2", 2, 4096, 22016, 32, 32, 128, 151936, 32768, 1e-06, 0.02, FSDP_NN_SILU, false,
     true, false, true, false, FSDP_ROPE_DEFAULT, 10000.0, 1, 0, 0, 0, 9, "10", -1, -1},
    {"{\"model_type\": \"qwen2\", \"num_hidden_layers\": 2, "
     "\"tie_word_embeddings\": true, \"rope_theta\": 1000000.0}",
     "qwen2", 2, 4096, 22016, 32, 32, 128, 151936, 32768, 1e-06, 0.02, FSDP_NN_SILU, true, true,
     false, true, false, FSDP_ROPE_DEFAULT, 1000000.0, 1, 0, 0, 0, 0, "00", -1, -1},
    {"{\"model_type\": \"qwen3\"}",
     "qwen3", 32, 4096, 22016, 32, 32, 128, 151936, 32768, 1e-06, 0.02, FSDP_NN_SILU, false,
     false, false, true, false, FSDP_ROPE_DEFAULT, 10000.0, 1, 0, 0, 0, 0,
     "00000000000000000000000000000000", -1, -1},
    {"{\"model_type\": \"qwen3\", \"num_hidden_layers\": 4, "
     "\"hidden_size\": 48, \"num_attention_heads\": 6, "
     "\"num_key_value_heads\": 2, \"head_dim\": 10, \"attention_bias\": "
     "true, \"use_sliding_window\": true, \"sliding_window\": 9, "
     "\"max_window_layers\": 3, \"rope_theta\": 1000000.0}",
     "qwen3", 4, 48, 22016, 6, 2, 10, 151936, 32768, 1e-06, 0.02, FSDP_NN_SILU, false, true,
     false, true, false, FSDP_ROPE_DEFAULT, 1000000.0, 1, 0, 0, 0, 9, "0001", -1, -1},
};

#endif
