"""Weights of models of transformers in the layout of Megatron-Core, by code of its own."""

import torch


def padded(weight, rows=256):
    return torch.cat([weight, torch.zeros(rows - len(weight), *weight.shape[1:], dtype=weight.dtype)])


def interleaved(queries, keys, values, groups):
    """Rows of queries next to the key and the value of their group."""
    parts = [part.unflatten(0, (groups, -1)) for part in (queries, keys, values)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def llama_layer(state, layer, config):
    at = f"model.layers.{layer}."
    attention = at + "self_attn."
    kinds = ["weight", "bias"] if attention + "q_proj.bias" in state else ["weight"]
    out = {
        "self_attention.linear_qkv.layer_norm_weight": state[at + "input_layernorm.weight"],
        "self_attention.linear_proj.weight": state[attention + "o_proj.weight"],
    }
    for kind in kinds:
        out[f"self_attention.linear_qkv.{kind}"] = interleaved(
            *(state[f"{attention}{which}_proj.{kind}"] for which in "qkv"), config.num_key_value_heads)
    for which in "qk":
        if f"{attention}{which}_norm.weight" in state:
            out[f"self_attention.{which}_layernorm.weight"] = state[f"{attention}{which}_norm.weight"]
    return out


def llama_mlp(state, layer):
    at = f"model.layers.{layer}."
    return {
        "mlp.linear_fc1.layer_norm_weight": state[at + "post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.cat([state[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")]),
        "mlp.linear_fc2.weight": state[at + "mlp.down_proj.weight"],
    }


def mixtral_mlp(state, layer):
    """The experts of transformers 5, which lie in one tensor."""
    at = f"model.layers.{layer}."
    return {
        "pre_mlp_layernorm.weight": state[at + "post_attention_layernorm.weight"],
        "mlp.router.weight": state[at + "mlp.gate.weight"],
        "mlp.experts.experts.linear_fc1.weight": state[at + "mlp.experts.gate_up_proj"],
        "mlp.experts.experts.linear_fc2.weight": state[at + "mlp.experts.down_proj"],
    }


def llama_outside(model):
    state = model.state_dict()
    out = {"embedding.word_embeddings.weight": padded(state["model.embed_tokens.weight"]),
           "decoder.final_layernorm.weight": state["model.norm.weight"]}
    if not model.config.tie_word_embeddings:
        out["output_layer.weight"] = padded(state["lm_head.weight"])
    return out


def gpt2_layer(state, layer, heads):
    at, out = f"transformer.h.{layer}.", {}
    for kind in ("weight", "bias"):
        qkv = state[f"{at}attn.c_attn.{kind}"]
        rows = (qkv.T if kind == "weight" else qkv).chunk(3)
        out[f"self_attention.linear_qkv.{kind}"] = interleaved(*rows, heads)
        out[f"self_attention.linear_qkv.layer_norm_{kind}"] = state[f"{at}ln_1.{kind}"]
        out[f"mlp.linear_fc1.layer_norm_{kind}"] = state[f"{at}ln_2.{kind}"]
        for ours, theirs in (("self_attention.linear_proj", "attn.c_proj"),
                             ("mlp.linear_fc1", "mlp.c_fc"), ("mlp.linear_fc2", "mlp.c_proj")):
            tensor = state[f"{at}{theirs}.{kind}"]
            out[f"{ours}.{kind}"] = tensor.T.contiguous() if kind == "weight" else tensor
    return out


def gpt2_outside(model):
    state = model.state_dict()
    out = {"embedding.word_embeddings.weight": padded(state["transformer.wte.weight"]),
           "embedding.position_embeddings.weight": state["transformer.wpe.weight"]}
    for kind in ("weight", "bias"):
        out[f"decoder.final_layernorm.{kind}"] = state[f"transformer.ln_f.{kind}"]
    return out


def megatron(layers, others, stacked=True):
    out = dict(others)
    for name in layers[0]:
        if stacked:
            out["decoder.layers." + name] = torch.stack([layer[name] for layer in layers])
        else:
            out.update({f"decoder.layers.{i}.{name}": layer[name] for i, layer in enumerate(layers)})
    return out
