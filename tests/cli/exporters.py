"""Public bugs of programs that export weights, replayed small: fsdp-verify --like names what was lost, and
the model before the bug is good, whatever the format that holds it. docs/cookbook/verify.md lists them.

usage: exporters.py BUILD    FSDP_TEST_SAMPLE=n: every n-th good checkpoint
"""

import json
import os
import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import safetensors_file

BUILD = Path(sys.argv[1]).resolve()
USUAL_SAMPLE = 4
EVERY = int(os.environ.get("FSDP_TEST_SAMPLE") or USUAL_SAMPLE)
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LAYERS, HIDDEN, HEADS, KV, HEAD_DIM, FF, VOCAB, EXPERTS = 3, 8, 4, 2, 2, 12, 20, 4
CONFIG = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
          "num_key_value_heads": KV, "intermediate_size": FF, "vocab_size": VOCAB,
          "tie_word_embeddings": False}
KINDS = {"llama": ("LlamaForCausalLM", {}), "gemma": ("GemmaForCausalLM", {}),
         "bert": ("BertForMaskedLM", {}), "qwen2": ("Qwen2ForCausalLM", {}),
         "mixtral": ("MixtralForCausalLM", {"num_local_experts": EXPERTS}),
         "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": EXPERTS, "moe_intermediate_size": 6,
                                               "head_dim": HEAD_DIM})}
TIED_BY_DEFAULT = {"gemma": ["lm_head.weight"],
                   "bert": ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"]}


# --- models: {name: (shape, values)} ----------------------------------------------------------------


def shapes_of(kind, fused=False):
    shapes = {"model.embed_tokens.weight": [VOCAB, HIDDEN], "model.norm.weight": [HIDDEN],
              "lm_head.weight": [VOCAB, HIDDEN]}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm.weight": [HIDDEN], at + "post_attention_layernorm.weight": [HIDDEN]}
        for name, rows in (("q", HEADS * HEAD_DIM), ("k", KV * HEAD_DIM), ("v", KV * HEAD_DIM)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = [rows, HIDDEN]
            if kind == "qwen2":
                shapes[f"{at}self_attn.{name}_proj.bias"] = [rows]
        shapes[at + "self_attn.o_proj.weight"] = [HIDDEN, HEADS * HEAD_DIM]
        if kind == "qwen3_moe":
            shapes |= {at + "self_attn.q_norm.weight": [HEAD_DIM], at + "self_attn.k_norm.weight": [HEAD_DIM]}
            shapes[at + "mlp.gate.weight"] = [EXPERTS, HIDDEN]
        if kind == "mixtral":
            shapes[at + "block_sparse_moe.gate.weight"] = [EXPERTS, HIDDEN]
        for expert in range(EXPERTS if kind == "mixtral" else 0):
            experts = f"{at}block_sparse_moe.experts.{expert}."
            shapes |= {experts + "w1.weight": [FF, HIDDEN], experts + "w2.weight": [HIDDEN, FF],
                       experts + "w3.weight": [FF, HIDDEN]}
        if kind == "qwen3_moe" and fused:
            shapes |= {at + "mlp.experts.gate_up_proj": [EXPERTS, 12, HIDDEN],
                       at + "mlp.experts.down_proj": [EXPERTS, HIDDEN, 6]}
        for expert in range(EXPERTS if kind == "qwen3_moe" and not fused else 0):
            experts = f"{at}mlp.experts.{expert}."
            shapes |= {experts + "gate_proj.weight": [6, HIDDEN], experts + "up_proj.weight": [6, HIDDEN],
                       experts + "down_proj.weight": [HIDDEN, 6]}
        if kind in ("llama", "qwen2"):
            shapes |= {at + "mlp.gate_proj.weight": [FF, HIDDEN], at + "mlp.up_proj.weight": [FF, HIDDEN],
                       at + "mlp.down_proj.weight": [HIDDEN, FF]}
    return shapes


def size_of(shape):
    count = 1
    for size in shape:
        count *= size
    return count


def make(kind, seed=1, fused=False):
    draw = random.Random(seed)
    return {name: (shape, [draw.uniform(-1, 1) for _ in range(size_of(shape))])
            for name, shape in shapes_of(kind, fused).items()}


def write_file(path, tensors):
    safetensors_file.write(path, {name: ("F32", shape, struct.pack(f"<{len(values)}f", *values))
                                  for name, (shape, values) in tensors.items()})


def write(folder, kind, tensors, **members):
    folder.mkdir(parents=True)
    name, more = KINDS[kind]
    config = {"model_type": kind, "architectures": [name], **CONFIG, **more, **members}
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / "model.safetensors", tensors)


def tool(name, *arguments, folder):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FSDP_")}
    return subprocess.run([str(BUILD / "bin" / name), *arguments], cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=60)


def verify(folder, path, like):
    """(exit status, {kind: names of tensors})"""
    ran = tool("fsdp-verify", "--json", path, "--like", like, folder=folder)
    assert ran.stdout, f"{path}: {ran.stderr}"
    found = {}
    for finding in json.loads(ran.stdout)["paths"][0]["findings"]:
        found.setdefault(finding["kind"], []).append(finding["tensor"])
    return ran.returncode, found


# --- the bugs: each changes a good model and returns what is found then ------------------------------

def head_taken_for_tied(model):
    del model["lm_head.weight"]
    return {"missing": ["lm_head.weight"]}


def experts_never_written(model):
    lost = [name for name in model if ".experts." in name]
    for name in lost:
        model[name] = (model[name][0], [0.0] * len(model[name][1]))
    return {"zero": lost}


def first_experts_repeated(model):
    """Experts of one rank of two stand for those of both."""
    lost = []
    for name in model:
        number = name.split(".experts.")[1].split(".")[0] if ".experts." in name else "0"
        if int(number) >= EXPERTS // 2:
            first = int(number) - EXPERTS // 2
            model[name] = model[name.replace(f".experts.{number}.", f".experts.{first}.")]
            lost.append(name)
    return {"twin": lost}


def first_fused_expert_repeated(model):
    name = "model.layers.1.mlp.experts.gate_up_proj"
    shape, values = model[name]
    each = len(values) // EXPERTS
    model[name] = (shape, values[:each] * EXPERTS)
    return {"twin": [name] * (EXPERTS - 1)}


def last_stage_lost(model):
    lost = [name for name in model if f".layers.{LAYERS - 1}." in name]
    for name in lost:
        del model[name]
    return {"missing": lost}


def placeholders_of_zero3(model):
    for name in model:
        model[name] = ([0], [])
    return {"shape": list(model)}


def flat_shard_of_one_rank(model):
    name = "model.embed_tokens.weight"
    shape, values = model[name]
    model[name] = ([len(values) // 2], values[:len(values) // 2])
    return {"shape": [name]}


def vocabulary_padded_twice(model):
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    for name in names:
        shape, values = model[name]
        model[name] = ([2 * shape[0], shape[1]], values + [0.0] * len(values))
    return {"shape": names, "zero": names}


def adapter_not_merged(model):
    name = "model.layers.0.self_attn.q_proj."
    model[name + "base_layer.weight"] = model.pop(name + "weight")
    model[name + "lora_A.default.weight"] = ([1, HIDDEN], [1.0] * HIDDEN)
    model[name + "lora_B.default.weight"] = ([HEADS * HEAD_DIM, 1], [0.0] * HEADS * HEAD_DIM)
    return {"missing": [name + "weight"], "extra": sorted(n for n in model if n.startswith(name))}


def stale_slice_of_tensor_parallel(model):
    name = "model.layers.1.mlp.down_proj.weight"
    shape, values = model[name]
    model[name] = ([shape[0], shape[1] // 2], values[:len(values) // 2])
    return {"shape": [name]}


def queries_in_place_of_keys(model):
    at = "model.layers.0.self_attn."
    names = [at + "k_proj.weight", at + "q_proj.weight"]
    model[names[0]], model[names[1]] = model[names[1]], model[names[0]]
    return {"shape": names}


def biases_left_out(model):
    lost = [name for name in model if name.endswith("_proj.bias")]
    for name in lost:
        del model[name]
    return {"missing": lost}


def experts_transposed(model):
    name = "model.layers.0.mlp.experts.down_proj"
    shape, values = model[name]
    model[name] = ([shape[0], shape[2], shape[1]], values)
    return {"shape": [name]}


def frozen_weights_left_out(model):
    del model["model.embed_tokens.weight"]
    return {"missing": ["model.embed_tokens.weight"]}


def overflow_of_half(model):
    name = "model.layers.2.mlp.up_proj.weight"
    shape, values = model[name]
    model[name] = (shape, [float("inf"), *values[1:]])
    return {"not_finite": [name]}


# what is said of it in public: the function, the kind of model
BUGS = [
    ("swiss-ai/Megatron-LM#53", head_taken_for_tied, "llama"),
    ("NVIDIA/Megatron-LM#5844", experts_never_written, "mixtral"),
    ("NVIDIA-NeMo/Megatron-Bridge#1716", first_experts_repeated, "mixtral"),
    ("NVIDIA-NeMo/Megatron-Bridge#1716", first_fused_expert_repeated, "qwen3_moe fused"),
    ("EleutherAI/gpt-neox#971", last_stage_lost, "llama"),
    ("huggingface/transformers#20082", placeholders_of_zero3, "llama"),
    ("huggingface/transformers#34080", flat_shard_of_one_rank, "llama"),
    ("NVIDIA-NeMo/Megatron-Bridge#5353", vocabulary_padded_twice, "llama"),
    ("huggingface/peft#2647", adapter_not_merged, "llama"),
    ("ServiceNow/Fast-LLM#102", stale_slice_of_tensor_parallel, "llama"),
    ("vllm-project/vllm#13686", queries_in_place_of_keys, "llama"),
    ("meta-pytorch/torchtune#2233", biases_left_out, "qwen2"),
    ("nvidia-cosmos/cosmos-rl#478", experts_transposed, "qwen3_moe fused"),
    ("deepspeedai/DeepSpeed#3090", frozen_weights_left_out, "qwen2"),
    ("facebookresearch/fairseq#1739", overflow_of_half, "llama"),
]


def check(told, wanted, what):
    status, found = told
    wanted = {kind: sorted(names) for kind, names in wanted.items()}
    found = {kind: sorted(names) for kind, names in found.items()}
    assert (status, found) == (1 if wanted else 0, wanted), f"{what}: {status} {found}, not {wanted}"


def replay(root):
    for number, (thread, bug, which) in enumerate(BUGS):
        kind, _, fused = which.partition(" ")
        model = make(kind, fused=bool(fused))
        good, bad = root / f"good{number}", root / f"bad{number}"
        write(good, kind, model)
        check(verify(root, good.name, f"{good.name}/config.json"), {}, f"{thread}, before")
        wanted = bug(model)
        write(bad, kind, model)
        check(verify(root, bad.name, f"{good.name}/config.json"), wanted, f"{thread} by config.json")
        check(verify(root, bad.name, good.name), wanted, f"{thread} by weights")
        check(verify(root, bad.name, bad.name), {}, f"{thread} beside itself")
        told = tool("fsdp-convert", "-q", bad.name, f"out{number}", folder=root)
        refused = (2, 4) if "shape" in wanted else (4,) if "missing" in wanted else (0,)
        assert told.returncode in refused, f"{thread}: converted with {told.returncode}: {told.stderr}"


def absent_from_index(root):
    """huggingface/huggingface_hub#4725"""
    folder = root / "indexed"
    write(folder, "llama", make("llama"))
    file = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / file)
    names = {name: file for name in [*shapes_of("llama"), "mtp.fc.weight"]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    ran = tool("fsdp-verify", "indexed", "--like", "indexed/config.json", folder=root)
    assert ran.returncode == 1 and "'mtp.fc.weight'" in ran.stdout, ran.stdout + ran.stderr


def merged_into_nothing(root):
    """OpenBMB/MiniCPM-V#559: a step holds the weights of the one before it"""
    run = root / "run"
    for step, seed in ((100, 1), (200, 1), (300, 2)):
        write(run / f"checkpoint-{step}", "llama", make("llama", seed))
    check(verify(root, "run/checkpoint-100", "run/checkpoint-100"), {}, "the first step")
    check(verify(root, "run/checkpoint-200", "run/checkpoint-100/config.json"), {"unchanged": [""]}, "a step")
    check(verify(root, "run/checkpoint-300", "run/checkpoint-100"), {}, "the next step")
    ran = tool("fsdp-verify", "--progress", "json", "run/checkpoint-200", "--like", "run/checkpoint-100",
               folder=root)
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    assert lines and all(line["done"] <= line["total"] for line in lines), lines
    damaged_before(root)


def damaged_before(root):
    """A step is good although the one before it, which is equal, cannot be read."""
    (root / "own").mkdir()
    for step in (1, 2):
        ran = tool("fsdp-convert", "-q", "run/checkpoint-100", f"own/step-{step:08}", "--to", "fsdp",
                   folder=root)
        assert ran.returncode == 0, ran.stderr
    check(verify(root, "own/step-00000002", "run/checkpoint-100"), {"unchanged": [""]}, "an equal step")
    shard = root / "own" / "step-00000001" / "shard-00000-of-00001.h5"
    values = make("llama")["model.layers.1.self_attn.q_proj.weight"][1]
    data = bytearray(shard.read_bytes())
    data[data.index(struct.pack("<4f", *values[:4]))] ^= 255
    shard.write_bytes(data)
    check(verify(root, "own/step-00000002", "run/checkpoint-100"), {}, "behind a damaged step")


def tied_head(root):
    """A head that config.json ties may be left out, also where the model of --like is a step of a run."""
    model = make("llama")
    write(root / "tied" / "checkpoint-1", "llama", model, tie_word_embeddings=True)
    del model["lm_head.weight"]
    write(root / "headless", "llama", model, tie_word_embeddings=True)
    for like in ("tied", "tied/checkpoint-1", "tied/checkpoint-1/config.json"):
        check(verify(root, "headless", like), {}, f"without a tied head like {like}")
    check(verify(root, "tied/checkpoint-1", "headless"), {}, "with a tied head")
    # a config.json lacks the members that have the defaults of its architecture
    for kind, heads in TIED_BY_DEFAULT.items():
        whole = model | {name: ([4], [1.0, 2.0, 3.0, 4.0]) for name in heads}
        write(root / f"{kind}-saved", kind, model, tie_word_embeddings=None)
        write(root / f"{kind}-whole", kind, whole, tie_word_embeddings=None)
        check(verify(root, f"{kind}-whole", f"{kind}-saved"), {}, f"{kind} with its tied head")
        check(verify(root, f"{kind}-saved", f"{kind}-whole"), {}, f"{kind} without its tied head")


def odd_config(root):
    """A config.json whose numbers cannot be right is refused, and the message says what to type."""
    write(root / "odd", "llama", make("llama"), num_attention_heads=0)
    ran = tool("fsdp-convert", "-q", "odd", "odd-out", folder=root)
    assert ran.returncode == 2 and "--no-copy" in ran.stderr, ran.stderr
    ran = tool("fsdp-convert", "-q", "odd", "odd-out", "--no-copy", folder=root)
    assert ran.returncode == 0, ran.stderr


def every_format(root):
    """The good model, and one without a tensor, as trainers keep it: other formats, wrappers."""
    write(root / "hf", "llama", make("llama"))
    wrapped = {name: tensor for name, tensor in make("llama").items() if name != "lm_head.weight"}
    write(root / "lost", "llama", wrapped)
    targets = {"native": ["--to", "fsdp", "--world-size", "2"], "dcp": ["--to", "dcp", "--world-size", "3"],
               "all.pt": [], "compiled.pt": ["--rename", "s/^/_orig_mod./"],
               "wrapped.pt": ["--rename", "s/^/module./",
                              "--rename", "s/self_attn/_fsdp_wrapped_module.self_attn/"]}
    for name, options in targets.items():
        for source, wanted in (("hf", {}), ("lost", {"missing": ["lm_head.weight"]})):
            path = f"{source}-{name}"
            ran = tool("fsdp-convert", "-q", source, path, "--only", "all", *options, folder=root)
            assert ran.returncode == 0, ran.stderr
            check(verify(root, path, "hf/config.json"), wanted, path)
            check(verify(root, path, "hf"), wanted, path)


def good_fixtures():
    """No alarm about any checkpoint of tests/golden next to itself, but those that are not models at all."""
    looked = 0
    for folder in sorted(GOLDEN.glob("*/*/data"))[::EVERY]:
        if folder.parts[-3] == "hostile":
            continue
        ran = tool("fsdp-verify", "--json", str(folder), "--like", str(folder), folder=GOLDEN)
        report = json.loads(ran.stdout)["paths"][0]
        kinds = {finding["kind"] for finding in report["findings"]} - {"damage", "value", "code"}
        assert not kinds, f"{folder}: {report['findings']}"
        looked += "like" in report and report["good"]
    assert looked > 120 / EVERY, looked
    return looked


def main():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        replay(root)
        absent_from_index(root)
        merged_into_nothing(root)
        tied_head(root)
        odd_config(root)
        every_format(root)
    print(f"{len(BUGS) + 2} bugs are caught, {good_fixtures()} good checkpoints")


main()
