"""Writes config_cases.h: what transformers makes of the config.json of each case.

Run with the peers' Python, it prints the header.
"""
import json
import textwrap

from transformers import AutoConfig

L3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
CASES = [
    {"model_type": "gpt2"},
    {"model_type": "gpt2", "n_embd": 36, "n_head": 6, "n_layer": 3, "n_inner": 50, "n_positions": 77,
     "vocab_size": 99, "activation_function": "relu", "layer_norm_epsilon": 1e-6, "initializer_range": 0.1,
     "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "bos_token_id": None,
     "eos_token_id": 7},
    {"model_type": "gpt2", "n_inner": None, "n_embd": 24, "n_head": 2, "activation_function": "gelu",
     "tie_word_embeddings": False},
    {"model_type": "gpt2", "hidden_size": 36, "n_head": 4, "num_attention_heads": 6, "num_hidden_layers": 3,
     "max_position_embeddings": 77},
    {"model_type": "llama"},
    {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
     "intermediate_size": 100, "vocab_size": 300, "max_position_embeddings": 128},
    {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
     "head_dim": 24, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **L3},
     "max_position_embeddings": 512, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "head_dim": None,
     "num_key_value_heads": None, "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 20000.0},
    {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}},
    {"model_type": "llama", "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **L3}},
    {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}},
    {"model_type": "llama", "rope_scaling": None, "rope_theta": 777.0, "pretraining_tp": 1},
    {"model_type": "mistral"},
    {"model_type": "mistral", "num_hidden_layers": 3, "sliding_window": 5, "hidden_size": 64,
     "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10},
    {"model_type": "mistral", "num_hidden_layers": 3, "sliding_window": None, "head_dim": None},
    {"model_type": "mistral", "num_hidden_layers": 3, "sliding_window": 5, "use_sliding_window": False},
    {"model_type": "qwen2"},
    {"model_type": "qwen2", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
     "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": False, "sliding_window": 9,
     "max_window_layers": 2},
    {"model_type": "qwen2", "num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 9,
     "layer_types": ["sliding_attention", "full_attention"]},
    {"model_type": "qwen2", "num_hidden_layers": 2, "tie_word_embeddings": True, "rope_theta": 1e6},
    {"model_type": "qwen3"},
    {"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 48, "num_attention_heads": 6,
     "num_key_value_heads": 2, "head_dim": 10, "attention_bias": True, "use_sliding_window": True,
     "sliding_window": 9, "max_window_layers": 3, "rope_theta": 1e6},
]
FUNCTIONS = {"gelu": "GELU", "gelu_new": "GELU_TANH", "silu": "SILU", "relu": "RELU"}


def rope_of(config):
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    rest = [rope.get(name, 0) if kind == "llama3" else 0 for name in
            ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")]
    return [f"FSDP_ROPE_{kind.upper()}", rope.get("rope_theta", 0), rope.get("factor", 1), *rest]


def windows_of(config, model):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
    if model == "qwen3":
        got = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
    elif model == "qwen2":
        got = [Qwen2Attention(config, i).sliding_window for i in range(config.num_hidden_layers)]
    else:
        window = getattr(config, "sliding_window", None) if model == "mistral" else None
        got = [window] * config.num_hidden_layers
    return max(w or 0 for w in got), "".join("1" if w else "0" for w in got)


def row(case):
    config = AutoConfig.for_model(**json.loads(json.dumps(case)))
    model, heads = config.model_type, config.num_attention_heads
    gpt2 = model == "gpt2"
    inner = (config.n_inner or 4 * config.n_embd) if gpt2 else config.intermediate_size
    window, layers = (0, "0" * config.n_layer) if gpt2 else windows_of(config, model)
    bias = gpt2 or (model == "qwen2") or getattr(config, "attention_bias", False)
    values = [json.dumps(json.dumps(case)), json.dumps(model), config.num_hidden_layers,
              config.hidden_size, inner, heads,
              getattr(config, "num_key_value_heads", None) or heads,
              getattr(config, "head_dim", None) or config.hidden_size // heads, config.vocab_size,
              config.max_position_embeddings, config.layer_norm_epsilon if gpt2 else config.rms_norm_eps,
              config.initializer_range,
              "FSDP_NN_" + FUNCTIONS[config.activation_function if gpt2 else config.hidden_act],
              config.tie_word_embeddings, bias, gpt2 or getattr(config, "mlp_bias", False),
              getattr(config, "scale_attn_weights", True),
              getattr(config, "scale_attn_by_inverse_layer_idx", False),
              *(["FSDP_ROPE_DEFAULT", 0, 0, 0, 0, 0] if gpt2 else rope_of(config)), window,
              json.dumps(layers),
              -1 if config.bos_token_id is None else config.bos_token_id,
              -1 if config.eos_token_id is None else config.eos_token_id]
    words = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    return words


def lay_out(text, words):
    """A row of at most 100 columns: literals of the JSON text, then numbers."""
    literals = [json.dumps(part) for part in textwrap.wrap(json.loads(text), 60, drop_whitespace=False)]
    numbers = textwrap.fill(", ".join(words), 96, initial_indent="     ", subsequent_indent="     ")
    return "    {" + "\n     ".join(literals) + ",\n" + numbers + "},"


def main():
    print("/* Made by config_cases.py: config.json and what transformers reads in it. */")
    print("#ifndef FSDP_CONFIG_CASES_H\n#define FSDP_CONFIG_CASES_H\n")
    print("static const config_case cases[] = {")
    for case in CASES:
        text, *words = row(case)
        print(lay_out(text, words))
    print("};\n\n#endif")


if __name__ == "__main__":
    main()
