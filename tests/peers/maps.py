"""Models of transformers in the layouts of other frameworks, which this script writes by its own code, become
models of transformers with the same bits and outputs, and go back with the same bits.

usage: maps.py FSDP_CONVERT [CASE...]
"""

import json
import os
import shutil
import subprocess

import torch
import torch.distributed.checkpoint as dcp
import transformers
from maps_common import CONVERT, check_model, convert, gpt2, read_dcp, run_cases, same, sizes, write_dcp
from megatron_layouts import (gpt2_layer, gpt2_outside, llama_layer, llama_mlp, llama_outside, megatron,
                              mixtral_mlp)
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def both_ways(model, foreign, name, write=torch.save, read=None, options=(), back=(), by_itself=True):
    """foreign: the tensors in the layout of the map `name`, which `write` writes."""
    model.save_pretrained("hf")
    write(foreign, "foreign")
    maps = [["--map", name]] + ([[]] if by_itself else [])
    for number, chosen in enumerate(maps):
        out = f"out{number}"
        convert("foreign", out, "--to", "hf", "--copy-from", "hf", *chosen, *options)
        check_model(out, model)
    same(load_file("out0/model.safetensors"), load_file("hf/model.safetensors"))
    convert("hf", "again", "--to", "dcp", "--map", name, *back)
    same(read_dcp("again"), {key: value for key, value in foreign.items() if key not in read})


# --- Megatron-Core ------------------------------------------------------------------------------------


def check_llama(model, mlp=llama_mlp, name="megatron-llama", stacked=True):
    state, config = model.state_dict(), model.config
    layers = [{**llama_layer(state, i, config), **mlp(state, i)} for i in range(config.num_hidden_layers)]
    foreign = megatron(layers, llama_outside(model))
    both_ways(model, foreign, name, write_dcp, read=())
    write_dcp(megatron(layers, llama_outside(model), stacked=False), "single")
    convert("single", "from_single", "--copy-from", "hf", "--to", "hf")
    check_model("from_single", model)


@case
def megatron_llama():
    check_llama(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes(tie_word_embeddings=False))))


@case
def megatron_llama_tied():
    check_llama(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes(tie_word_embeddings=True))))


@case
def megatron_llama_wide_heads():
    config = transformers.LlamaConfig(**sizes(tie_word_embeddings=False, head_dim=24))
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():  # not the frequencies, which stay f32
        parameter.data = parameter.data.bfloat16()
    check_llama(model)


@case
def megatron_qwen2():
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes(tie_word_embeddings=False)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    check_llama(model)


@case
def megatron_qwen3():
    config = transformers.Qwen3Config(**sizes(head_dim=16, tie_word_embeddings=True))
    model = transformers.Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter)
    check_llama(model)


@case
def megatron_mixtral():
    config = transformers.MixtralConfig(**sizes(num_local_experts=4, num_experts_per_tok=2))
    check_llama(transformers.MixtralForCausalLM(config), mixtral_mlp, "megatron-mixtral")


def optimizer_state(layout, states):
    """The state of a parameter, with the name and the shape of the parameter."""
    return {f"optimizer.state.{kind}.{name}": tensor
            for kind, model in states.items() for name, tensor in layout(model).items()}


@case
def megatron_moments():
    """Moments and masters of a distributed optimizer in model space are mapped as their parameters are."""
    config = transformers.LlamaConfig(**sizes(tie_word_embeddings=False))
    model, mean, square, master = (transformers.LlamaForCausalLM(config) for _ in range(4))

    def layout(of, stacked=True):
        state = of.state_dict()
        layers = [{**llama_layer(state, i, config), **llama_mlp(state, i)} for i in range(3)]
        return megatron(layers, llama_outside(of), stacked)

    model.save_pretrained("like")
    wanted = dict(model.state_dict())
    for kind, of in (("exp_avg", mean), ("exp_avg_sq", square), ("master", master)):
        wanted |= {f"optim.state.{name}.{kind}": tensor for name, tensor in of.state_dict().items()}
    for name, kind, stacked in (("stacked", "param", True), ("single", "fp32_param", False)):
        foreign = layout(model, stacked) | optimizer_state(
            lambda of: layout(of, stacked), {"exp_avg": mean, "exp_avg_sq": square, kind: master})
        write_dcp(foreign, name)
        convert(name, f"{name}_mapped", "--to", "dcp", "--map", "megatron-llama", "--copy-from", "like")
        same(read_dcp(f"{name}_mapped"), wanted)
        convert(name, f"{name}_model", "--copy-from", "like")
        check_model(f"{name}_model", model)
    convert("stacked_mapped", "back", "--to", "megatron", "--copy-from", "like")
    same(read_dcp("back"), layout(model) | optimizer_state(
        layout, {"exp_avg": mean, "exp_avg_sq": square, "param": master}))


@case
def megatron_gpt2():
    model = gpt2()
    layers = [gpt2_layer(model.state_dict(), i, model.config.n_head) for i in range(2)]
    both_ways(model, megatron(layers, gpt2_outside(model)), "megatron-gpt2", write_dcp, read=())


# --- Meta and torchtitan, nanoGPT -----------------------------------------------------------------------

NAMES_OF_META = {
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj"}


def neighbours(weight, heads):
    """Rows of a head in the order in which Meta rotates them: an element next to its partner."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


def meta_state(model):
    state, config = model.state_dict(), model.config
    out = {"tok_embeddings.weight": state["model.embed_tokens.weight"],
           "norm.weight": state["model.norm.weight"], "output.weight": state["lm_head.weight"]}
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        for ours, theirs in NAMES_OF_META.items():
            out[f"layers.{i}.{ours}.weight"] = state[f"{at}{theirs}.weight"]
        for which, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            out[f"layers.{i}.attention.w{which}.weight"] = neighbours(
                state[f"{at}self_attn.{which}_proj.weight"], heads)
    return out


def apart(weight, cos, sin):
    """Rotates neighbouring rows of one head: (even + i odd) times (cos + i sin)."""
    even, odd = weight[0::2], weight[1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], 1).flatten(0, 1)


@case
def the_order_of_meta_is_that_of_its_rotation():
    """Meta's rotation of `neighbours` equals the rotation of transformers, in Meta's order."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    head = torch.randn(8, 1)
    angle = 0.3 * torch.arange(1, 5, dtype=torch.float32)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    both = torch.cat([angle, angle])[None, None]
    theirs, _ = apply_rotary_pos_emb(head.T[None, None], head.T[None, None], both.cos(), both.sin())
    assert torch.allclose(apart(neighbours(head, 1), cos, sin), neighbours(theirs[0, 0].T, 1), atol=1e-6)


@case
def torchtitan_llama():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes(tie_word_embeddings=False)))
    both_ways(model, meta_state(model), "meta-llama", write_dcp, read=())


@case
def meta_llama():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes(tie_word_embeddings=False)))
    state = meta_state(model)
    both_ways(model, {**state, "rope.freqs": torch.ones(4)}, "meta-llama", write_pth, read=("rope.freqs",))


def write_pth(state, path):
    os.mkdir(path)
    torch.save(state, f"{path}/consolidated.00.pth")


def meta_parts(state, files, by_words):
    """The state of each of Meta's files: fairscale's parallel layers. With fewer heads of keys than files,
    neighbouring files have the same ones."""
    rows = ["wq", "w1", "w3", "output"] + ["tok_embeddings"] * by_words
    columns = ["wo", "w2"] + ["tok_embeddings"] * (not by_words)
    parts = [{} for _ in range(files)]
    for name, tensor in state.items():
        layer = name.split(".")[-2]
        for i, part in enumerate(parts):
            if layer in ("wk", "wv"):
                heads = tensor.unflatten(0, (-1, 8))
                copies = max(files // len(heads), 1)
                part[name] = heads.chunk(files // copies)[i // copies].flatten(0, 1).clone()
            elif layer in rows + columns:
                part[name] = tensor.chunk(files, int(layer in columns))[i].clone()
            else:
                part[name] = tensor
        assert layer not in rows or sum(len(part[name]) for part in parts) == len(tensor)
    return parts


def write_meta_parts(parts, path, config):
    os.mkdir(path)
    for i, part in enumerate(parts):
        torch.save(part, f"{path}/consolidated.{i:02d}.pth")
    params = {"dim": config.hidden_size, "n_layers": config.num_hidden_layers, "vocab_size": -1,
              "n_heads": config.num_attention_heads, "norm_eps": config.rms_norm_eps}
    if config.num_key_value_heads != config.num_attention_heads:
        params["n_kv_heads"] = config.num_key_value_heads
    with open(f"{path}/params.json", "w") as file:
        json.dump(params, file)


@case
def meta_llama_without_a_config():
    """The numbers of params.json become a config.json with which transformers loads the same model."""
    config = transformers.LlamaConfig(**{**sizes(tie_word_embeddings=False, rms_norm_eps=1e-6),
                                         "max_position_embeddings": 4096})
    model = transformers.LlamaForCausalLM(config)
    write_meta_parts(meta_parts(meta_state(model), 2, True), "alone", config)
    with open("alone/tokenizer.model", "w") as file:
        file.write("words")
    convert("alone", "loaded", "--map", "meta-llama")
    check_model("loaded", model)
    assert open("loaded/tokenizer.model").read() == "words"
    loaded = transformers.LlamaForCausalLM.from_pretrained("loaded").config
    for member in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "num_key_value_heads",
                   "max_position_embeddings", "tie_word_embeddings", "rope_parameters"):
        assert getattr(loaded, member) == getattr(config, member), member
    os.remove("alone/tokenizer.model")
    convert("alone", "alone.gguf", "--dtype", "f32")
    convert("alone.gguf", "again")
    check_model("again", model)


@case
def meta_llama_in_parts():
    """Llama 1 and 2 cut embeddings by columns, Llama 3 by words; with and without groups of queries."""
    for files, groups, by_words in ((2, 8, False), (4, 8, True), (2, 2, True), (4, 2, False), (4, 1, True)):
        config = transformers.LlamaConfig(**{**sizes(tie_word_embeddings=False), "vocab_size": 256,
                                             "num_key_value_heads": groups})
        model = transformers.LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter)
        state = {**meta_state(model), "rope.freqs": torch.ones(4)}
        at = f"{files}_{groups}"
        model.save_pretrained(f"hf_{at}")
        write_meta_parts(meta_parts(state, files, by_words), at, config)
        convert(at, f"out_{at}", "--to", "hf", "--copy-from", f"hf_{at}")
        check_model(f"out_{at}", model)
        convert(at, f"named_{at}.safetensors", "--map", "meta-llama")  # with the numbers of params.json
        same(load_file(f"named_{at}.safetensors"), load_file(f"hf_{at}/model.safetensors"))
        convert(at, f"whole_{at}.pt")
        same(torch.load(f"whole_{at}.pt"), state)


def refused(path, *words):
    command = [CONVERT, path, "refused", "--to", "hf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and not os.path.exists("refused"), (path, done.stdout)
    assert all(word in done.stderr for word in words), (words, done.stderr)


@case
def meta_llama_lacks_a_part():
    config = transformers.LlamaConfig(**{**sizes(tie_word_embeddings=False), "vocab_size": 256})
    parts = meta_parts(meta_state(transformers.LlamaForCausalLM(config)), 4, True)
    write_meta_parts(parts, "parts", config)
    for i in range(4):
        name = f"parts/consolidated.{i:02d}.pth"
        os.rename(name, "away")
        refused("parts", f"'consolidated.{i:02d}.pth' is missing")
        os.rename("away", name)
    parts[3]["norm.weight"] = parts[3]["norm.weight"] + 1
    write_meta_parts(parts, "differ", config)
    refused("differ", "'norm.weight' differs between 'consolidated.00.pth' and 'consolidated.03.pth'")
    write_meta_parts(parts[:1], "single", config)
    refused("single", "'consolidated.01.pth' is missing")


def bytes_of(path):
    files = [path] if os.path.isfile(path) else [f"{path}/{name}" for name in os.listdir(path)]
    return sum(os.path.getsize(name) for name in files if not name.endswith(".json"))


@case
def tied_models_stay_tied():
    """A state with both names of the embeddings, as torch.save has it: no result is larger, and each of them
    gives the model again, and its state."""
    ways = [("megatron-llama", "dcp"), ("megatron-llama", "fsdp"), ("megatron-gpt2", "dcp"),
            ("meta-llama", "torch"), ("meta-llama", "fsdp"), ("nanogpt", "torch")]
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes(tie_word_embeddings=True)))
    for name, target in ways:
        model = gpt2() if "gpt" in name else llama
        at = f"{name}-{target}"
        model.save_pretrained(f"hf_{at}")
        os.mkdir(f"state_{at}")
        torch.save(model.state_dict(), f"state_{at}/pytorch_model.bin")
        shutil.copy(f"hf_{at}/config.json", f"state_{at}")
        most = bytes_of(f"state_{at}") + 0.8 * model.get_output_embeddings().weight.nbytes  # headers, padding
        convert(f"state_{at}", at, "--to", target, "--map", name)
        convert(at, f"back_{at}", "--to", "hf", "--copy-from", f"hf_{at}", "--map", name)
        check_model(f"back_{at}", model)
        assert bytes_of(at) < most and bytes_of(f"back_{at}") < most, (at, bytes_of(at), most)
        if "megatron" in name:  # which has no name for tied output
            continue
        convert(at, f"{at}.pt", "--to", "torch", "--copy-from", f"hf_{at}", "--map", name)
        state = torch.load(f"{at}.pt")
        same(state, model.state_dict())
        head, words = (state[key] for key in state if key in ("lm_head.weight", "model.embed_tokens.weight",
                                                              "transformer.wte.weight"))
        assert head.data_ptr() == words.data_ptr()


@case
def nanogpt():
    model = gpt2()
    state = {name: tensor.T.contiguous() if name.endswith("weight") and (".c_" in name) else tensor
             for name, tensor in model.state_dict().items()}
    both_ways(model, state, "nanogpt", write_pt, read=("lm_head.weight",), by_itself=False)


def write_pt(state, path):
    torch.save({"model": state, "iter_num": 3}, path)


# --- experts of transformers 4 and 5 -----------------------------------------------------------------------


@case
def experts_of_mixtral():
    config = transformers.MixtralConfig(**sizes(num_local_experts=4, num_experts_per_tok=2))
    model = transformers.MixtralForCausalLM(config)
    packed = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    single = {}
    for name, tensor in packed.items():
        start = name.partition(".mlp.")[0] + ".block_sparse_moe."
        if name.endswith("gate_up_proj"):
            for i, expert in enumerate(tensor):
                for which, part in zip((1, 3), expert.chunk(2)):
                    single[f"{start}experts.{i}.w{which}.weight"] = part
        elif name.endswith("experts.down_proj"):
            single.update({f"{start}experts.{i}.w2.weight": expert for i, expert in enumerate(tensor)})
        else:
            single[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = tensor
    write_dcp(single, "single")
    convert("single", "packed", "--to", "dcp", "--map", "mixtral-experts")
    same(read_dcp("packed"), packed)
    convert("packed", "again", "--to", "dcp", "--map", "mixtral-experts")
    same(read_dcp("again"), single)


@case
def experts_below_the_key_of_a_model():
    """{"model": ...} of FSDP2, and the way back below that key, as Accelerate and others load it."""
    config = transformers.Qwen3MoeConfig(**sizes(num_experts=4, num_experts_per_tok=2,
                                                 moe_intermediate_size=8, decoder_sparse_step=1))
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained("hf")
    below = {"model": model.state_dict(), "step": 3}
    dcp.save(below, checkpoint_id="below", no_dist=True)
    convert("below", "out", "--to", "hf", "--copy-from", "hf", "--map", "qwen3-moe-experts")
    same(load_file("out/model.safetensors"), load_file("hf/model.safetensors"))
    convert("hf", "again", "--to", "dcp", "--map", "qwen3-moe-experts", "--under", "model")
    loaded = {"model": {name: torch.zeros_like(one) for name, one in model.state_dict().items()}}
    dcp.load(loaded, checkpoint_id="again", no_dist=True)
    same(loaded["model"], model.state_dict())
    dcp_to_torch_save("again", "again.pt")
    same(torch.load("again.pt")["model"], model.state_dict())
    moments = {name: {"exp_avg": torch.zeros_like(one)} for name, one in model.state_dict().items()}
    dcp.save(below | {"optim": {"state": moments}}, checkpoint_id="with_optim", no_dist=True)
    done = subprocess.run([CONVERT, "with_optim", "no", "--to", "dcp", "--map", "qwen3-moe-experts"],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "changes the model but not 'optim.state." in done.stderr, done.stderr


run_cases(CASES)
