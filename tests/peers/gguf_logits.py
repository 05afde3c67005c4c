"""transformers loads the GGUF files that we make of its models, and computes the same logits.

usage: gguf_logits.py CONVERT

transformers reads the weights and the key-value pairs of llama.cpp. It does not read the factors of Llama 3's
scaled rotary frequencies, so the models here have none; unit_map compares those numbers. Families whose GGUF
it does not read come back as transformers' model, and their tensors have the names of gguf-py. Of an encoder
the hidden states are compared.
"""

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import gguf
import torch
import transformers
from maps_common import CONVERT, TOKENS, logits
from safetensors.torch import load_file, save_file

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "rms_norm_eps": 1e-4}
SHARED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2,
          "first_k_dense_replace": 1, "routed_scaling_factor": 1.75}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10,
          "v_head_dim": 14}
MODELS = {
    "llama": (transformers.LlamaConfig, {"rope_theta": 30000.0}),
    "llama with other heads": (transformers.LlamaConfig, {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "qwen2": (transformers.Qwen2Config, {"rope_theta": 50000.0}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 128}),  # transformers reads no other one
}
CIRCLES = {
    "cohere2": (transformers.Cohere2Config, {"num_hidden_layers": 5, "sliding_window": 5, "logit_scale": 0.3,
                                             "layer_norm_eps": 3e-4}),
    "falcon": (transformers.FalconConfig, {"layer_norm_epsilon": 3e-4, "ffn_hidden_size": 48}),
    "falcon in groups": (transformers.FalconConfig, {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma": (transformers.GemmaConfig, {"head_dim": 16}),
    "gemma2": (transformers.Gemma2Config, {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5, "attn_logit_softcapping": 7.0,
        "final_logit_softcapping": 3.0}),
    "gemma3": (transformers.Gemma3TextConfig, {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5, "final_logit_softcapping": 3.0,
        "num_hidden_layers": 7,
        "rope_parameters": {"full_attention": {"rope_theta": 30000.0, "rope_type": "linear", "factor": 4.0},
                            "sliding_attention": {"rope_theta": 700.0, "rope_type": "default"}}}),
    "glm4": (transformers.Glm4Config, {"head_dim": 16, "eos_token_id": 1, "rope_parameters": {
        "rope_theta": 30000.0, "rope_type": "default", "partial_rotary_factor": 0.25}, "pad_token_id": 0}),
    "gpt_neox": (transformers.GPTNeoXConfig, {
        "layer_norm_eps": 3e-4, "use_parallel_residual": False,
        "rope_parameters": {"rope_theta": 30000.0, "rope_type": "default", "partial_rotary_factor": 0.5}}),
    "granite": (transformers.GraniteConfig, {"embedding_multiplier": 12.0, "logits_scaling": 8.0,
                                             "attention_multiplier": 0.25, "residual_multiplier": 0.5}),
    "mamba2": (transformers.Mamba2Config, {
        "num_heads": 8, "head_dim": 12, "expand": 3, "n_groups": 2, "state_size": 6, "conv_kernel": 3,
        "layer_norm_epsilon": 3e-4, "chunk_size": 4, "pad_token_id": 0}),
    "mamba2 whose output is the embedding": (transformers.Mamba2Config, {
        "num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 16, "tie_word_embeddings": True}),
    "olmo2": (transformers.Olmo2Config, {"rope_theta": 500000.0}),
    "olmo3": (transformers.Olmo3Config, {
        "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": {"rope_theta": 30000.0, "rope_type": "yarn", "factor": 4.0,
                                               "original_max_position_embeddings": 16},
                            "sliding_attention": {"rope_theta": 30000.0, "rope_type": "default"}}}),
    "phi3": (transformers.Phi3Config, {"pad_token_id": 0, "rope_parameters": {
        "rope_theta": 30000.0, "rope_type": "default", "partial_rotary_factor": 0.5}}),
    "smollm3": (transformers.SmolLM3Config, {"num_hidden_layers": 5, "pad_token_id": 0,
                                             "rms_norm_eps": 3e-4}),
    "starcoder2": (transformers.Starcoder2Config, {"norm_epsilon": 3e-4}),
    "qwen2_moe": (transformers.Qwen2MoeConfig, {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen2_moe without biases": (transformers.Qwen2MoeConfig, {**EXPERTS, "qkv_bias": False}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "deepseek_v3": (transformers.DeepseekV3Config, {**SHARED, **LATENT, "q_lora_rank": 12, "n_group": 3,
                                                    "topk_group": 2}),
    "deepseek_v3 without a latent query": (transformers.DeepseekV3Config, {
        **SHARED, **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                            "rope_theta": 20000.0, "mscale": 0.75, "mscale_all_dim": 0.75}}),
    "gpt_oss": (transformers.GptOssConfig, {
        "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
    "gpt_oss as it is published": (transformers.GptOssConfig, {
        "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 4,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False,
                            "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 16}}),
    "glm4_moe": (transformers.Glm4MoeConfig, {**SHARED, "use_qk_norm": True, "attention_bias": True,
                                              "head_dim": 16, "partial_rotary_factor": 0.25}),
    "glm4_moe in groups": (transformers.Glm4MoeConfig, {**SHARED, "n_group": 3, "topk_group": 2,
                                                        "norm_topk_prob": False}),
}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_heads": 4, "num_layers": 3,
      "num_decoder_layers": 2, "relative_attention_num_buckets": 20, "layer_norm_epsilon": 3e-3,
      "decoder_start_token_id": 5}
GATED = {"feed_forward_proj": "gated-gelu"}
ENCODED = {
    "t5": (T5, False),
    "t5 with a gate": ({**T5, **GATED}, False),
    "t5 whose output is not scaled": ({**T5, "tie_word_embeddings": False}, False),
    "t5 with an output of its own": ({**T5, **GATED, "tie_word_embeddings": False}, True),
    "t5 with an output that is scaled": (T5, True),
}
ENCODER = {"layer_norm_eps": 3e-4, "type_vocab_size": 3, "hidden_act": "gelu"}
EXACT, ROUNDED = 1e-5, 0.1


def difference(model, folder, *options):
    """The largest difference of a logit, of the model and of its GGUF file."""
    subprocess.run([CONVERT, folder / "hf", folder / "model.gguf", "-q", "--overwrite", *options], check=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf",
                                                               dtype=torch.float32)
    return (logits(loaded) - logits(model)).abs().max().item()


def check(name, folder):
    kind, more = MODELS[name]
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(kind(**SIZES, **more))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)  # norms that are not 1, biases that are not 0
    model.save_pretrained(folder / "hf")
    exact, rounded = difference(model, folder), difference(model, folder, "--dtype", "q8_0")
    assert exact <= EXACT, (name, exact)
    assert 0 < rounded <= ROUNDED, (name, rounded)
    return exact


def gguf_names(file, saved):
    """The names of gguf-py for the tensors that transformers saved; the experts of a layer are one."""
    architecture = file.fields["general.architecture"].contents()
    number = next(key for key, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(number, 8)  # more layers than a model here has
    merged = {re.sub(r"experts\.\d+\.", "experts.", one).replace("correction_bias", "correction.bias")
              for one in saved}
    merged = {re.sub("_proj_bias$", "_proj.bias", one).replace("dt_bias", "dt_proj.bias") for one in merged}
    merged = {re.sub(r"(experts\.\w+|sinks)$", r"\1.weight", one) for one in merged}
    parts = {one.replace("kv_b_proj", part).replace("experts.gate_up", f"experts.{other}")
             for one in merged for part, other in (("k_b_proj", "gate"), ("v_b_proj", "up"))}
    return {names.get_name(one, try_suffixes=(".weight", ".bias")) for one in parts}


def check_memory(model, folder):
    """The names of transformers' memory, where the experts of a layer are one, give the same file."""
    memory = folder / "memory.pt", folder / "memory.gguf"
    torch.save(model.state_dict(), memory[0])
    subprocess.run([CONVERT, *memory, "-q", "--copy-from", folder / "hf"], check=True)
    files = [{tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(folder / name).tensors}
             for name in ("model.gguf", "memory.gguf")]
    assert files[0] == files[1]


def check_half(folder):
    """llama.cpp adds biases, and multiplies by norms and numbers of a state, in f32 alone, whatever the model
    is cast to."""
    always = "norm.weight", "bias", "token_types.weight", "ssm_a", "ssm_d", "ssm_conv1d.weight"
    for dtype in "bf16", "q8_0":
        subprocess.run([CONVERT, folder / "hf", folder / "half.gguf", "-q", "--overwrite", "--dtype", dtype],
                       check=True)
        types = {tensor.name: tensor.tensor_type.name
                 for tensor in gguf.GGUFReader(folder / "half.gguf").tensors}
        vectors = {one for name, one in types.items() if name.endswith(always)}
        assert vectors == {"F32"}, types
        assert dtype.upper() in types.values()


def check_stored_output(folder):
    """The output of these families is always the embedding; llama.cpp loads no file that has it as well."""
    saved = load_file(folder / "hf/model.safetensors")
    saved["lm_head.weight"] = saved["model.embed_tokens.weight"].clone()
    (folder / "stored").mkdir()
    shutil.copy(folder / "hf/config.json", folder / "stored")
    save_file(saved, folder / "stored/model.safetensors", metadata={"format": "pt"})
    subprocess.run([CONVERT, folder / "stored", folder / "stored.gguf", "-q"], check=True)
    names = [[tensor.name for tensor in gguf.GGUFReader(folder / file).tensors]
             for file in ("model.gguf", "stored.gguf")]
    assert names[0] == names[1], names[1]


def come_back(name, folder):
    kind, more = CIRCLES[name]
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**SIZES, **more}))
    with torch.no_grad():
        for parameter in [*model.parameters(), *(one for one in model.buffers() if one.dim() == 1
                                                 and len(one) == more.get("n_routed_experts"))]:
            parameter.normal_(0, 0.1)
    model.save_pretrained(folder / "hf")
    for source, target in ("hf", "model.gguf"), ("model.gguf", "again"):
        subprocess.run([CONVERT, folder / source, folder / target, "-q"], check=True)
    file = gguf.GGUFReader(folder / "model.gguf")
    made = {tensor.name for tensor in file.tensors}
    wanted = gguf_names(file, load_file(folder / "hf/model.safetensors"))
    assert made == wanted, (name, made ^ wanted)
    check_memory(model, folder)
    check_half(folder)
    if kind in (transformers.Gemma2Config, transformers.Gemma3TextConfig, transformers.Cohere2Config):
        check_stored_output(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "again", dtype=torch.float32)
    assert type(loaded) is type(model)
    exact = (logits(loaded) - logits(model)).abs().max().item()
    assert exact <= EXACT, (name, exact)
    return exact


def encoded_logits(model):
    """Contexts that are longer than the exact distances of the relative positions."""
    sources, targets = (torch.arange(1, 2 * count + 1).reshape(2, count) * 7 % 64 for count in (70, 40))
    with torch.no_grad():
        return model.eval()(input_ids=sources, decoder_input_ids=targets).logits


def encode_and_come_back(name, folder):
    """llama.cpp multiplies the output by nothing, so that a file has the output that transformers scales."""
    members, has_output = ENCODED[name]
    torch.manual_seed(len(name))
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**members))
    if has_output:
        model.lm_head.weight = torch.nn.Parameter(model.shared.weight.detach().clone())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    model.save_pretrained(folder / "hf")
    for source, target in ("hf", "model.gguf"), ("model.gguf", "again"):
        subprocess.run([CONVERT, folder / source, folder / target, "-q"], check=True)
    file = gguf.GGUFReader(folder / "model.gguf")
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in file.tensors}
    wanted = gguf_names(file, load_file(folder / "hf/model.safetensors"))
    assert tensors.keys() == wanted | {"output.weight"}, (name, tensors.keys() ^ wanted)
    factor = members["d_model"] ** -0.5 if model.config.scale_decoder_outputs else 1
    assert torch.equal(tensors["output.weight"], model.lm_head.weight.detach() * factor)
    check_half(folder)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "again", dtype=torch.float32)
    exact = (encoded_logits(loaded) - encoded_logits(model)).abs().max().item()
    assert exact <= EXACT, (name, exact)
    return exact


def hidden_states(model):
    with torch.no_grad():
        return model.eval()(TOKENS).last_hidden_state


def embed(folder):
    """An encoder has no logits: its hidden states come back, without its pooler. A head must be left out."""
    torch.manual_seed(1)
    config = transformers.BertConfig(**{**SIZES, **ENCODER})
    models = {"hf": transformers.BertModel(config), "head": transformers.BertForMaskedLM(config)}
    for name, model in models.items():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.1)
        model.save_pretrained(folder / name)
    for source, target in ("hf", "model.gguf"), ("model.gguf", "again"):
        subprocess.run([CONVERT, folder / source, folder / target, "-q"], check=True)
    file = gguf.GGUFReader(folder / "model.gguf")
    made = {tensor.name for tensor in file.tensors}
    saved = [name for name in load_file(folder / "hf/model.safetensors") if not name.startswith("pooler.")]
    assert made == gguf_names(file, saved), made ^ gguf_names(file, saved)
    assert file.fields["bert.attention.causal"].contents() is False
    loaded = transformers.BertModel.from_pretrained(folder / "again", add_pooling_layer=False)
    exact = (hidden_states(loaded) - hidden_states(models["hf"])).abs().max().item()
    assert exact <= EXACT, exact
    refused = subprocess.run([CONVERT, folder / "head", folder / "head.gguf", "-q"], capture_output=True)
    assert refused.returncode == 2 and b"gguf-bert" in refused.stderr, refused.stderr
    subprocess.run([CONVERT, folder / "head", folder / "head.gguf", "-q", "--drop", r"^cls\."], check=True)
    assert {tensor.name for tensor in gguf.GGUFReader(folder / "head.gguf").tensors} == made
    check_half(folder)
    return exact


def long_contexts(folder):
    """Phi-3's factors of rotary frequencies are tensors, and come back with the model's own config.json."""
    factors = {"short_factor": [1.5, 2.5], "long_factor": [2.0, 3.5]}
    config = transformers.Phi3Config(**SIZES, pad_token_id=0, rope_parameters={
        "rope_type": "longrope", "rope_theta": 30000.0, "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 4, **factors})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "hf")
    for source, target in ("hf", "model.gguf"), ("model.gguf", "again"):
        subprocess.run([CONVERT, folder / source, folder / target, "-q", "--copy-from", folder / "hf"],
                       check=True)
    tensors = {tensor.name: tensor.data.tolist() for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}
    for name, wanted in factors.items():
        assert tensors[f"rope_factors_{name.removesuffix('_factor')}.weight"] == wanted, name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "again", dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(model))


def scale_by_default(folder):
    """Divisors of rotary frequencies count from the base that transformers has where config.json has none."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024}
    config = transformers.MixtralConfig(**SIZES, num_local_experts=3,
                                        rope_parameters={**rope, "rope_theta": 1e6})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "hf")
    written = json.loads((folder / "hf/config.json").read_text())
    (folder / "hf/config.json").write_text(json.dumps({**written, "rope_parameters": rope}))
    subprocess.run([CONVERT, folder / "hf", folder / "model.gguf", "-q"], check=True)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}
    scaled = model.model.rotary_emb.inv_freq
    usual = 1e6 ** -(torch.arange(0, len(scaled)) / len(scaled))
    assert torch.allclose(torch.tensor(tensors["rope_freqs.weight"]), usual / scaled, rtol=1e-4)


def main():
    with tempfile.TemporaryDirectory() as folder:
        scale_by_default(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        long_contexts(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        print(f"bert: {embed(Path(folder)):.1e}")
    for name in CIRCLES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {come_back(name, Path(folder)):.1e}")
    for name in ENCODED:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {encode_and_come_back(name, Path(folder)):.1e}")
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {check(name, Path(folder)):.1e}")


main()
