#!/usr/bin/env python3
"""Checkpoints of Megatron: torch_dist of Megatron-Core, and the files of tensor and pipeline ranks.

usage: megatron.py BIN GOLDEN

Of tests/golden/megatron the tensors are listed as expected, and kept by conversions; damage is named. The
files of ranks are written here, for two tensor and two pipeline ranks, and joined into a Llama.
"""

import hashlib
import json
import shutil
import struct
import sys
import tempfile
from pathlib import Path

import deepspeed_files as made
from tools import check, listing, problems, run

GOLDEN = Path(sys.argv[2]) / "megatron"
TARGETS = {"dcp": ["--to", "dcp", "--world-size", "3"], "fsdp": ["--world-size", "2"]}
LAYERS, HIDDEN, HEADS, GROUPS, WIDTH, INNER, VOCAB, PADDED = 3, 8, 4, 2, 2, 6, 10, 12
STAGES = [[0, 1], [2]]
RANKS = 2


def same(told, expected):
    kept = ("dtype", "shape", "sha256")
    return [name for name, tensor in expected.items()
            if {key: told.get(name, {}).get(key) for key in kept} != {key: tensor[key] for key in kept}]


def check_case(case, folder):
    expected = json.loads((case / "expected.json").read_text())["tensors"]
    check(not (differ := same(listing(case / "data")["tensors"], expected)), f"{case.name}: {differ}")
    for target, options in TARGETS.items():
        ran = run("fsdp-convert", case / "data", folder / target, "--opaque", "copy", *options)
        check(ran.returncode == 0, f"{case.name} -> {target}: {ran.stderr}")
        check(not (differ := same(listing(folder / target)["tensors"], expected)), f"{target}: {differ}")
        ran = run("fsdp-diff", case / "data", folder / target)
        check(ran.returncode == 0, f"{case.name} -> {target}: {ran.stdout}{ran.stderr}")
    ran = run("fsdp-convert", case / "data", folder / "hf")
    check(ran.returncode == 0, f"{case.name} -> hf: {ran.stderr}")
    told = listing(folder / "hf")["tensors"]
    check(told and not same(told, {name: expected[name] for name in told if name in expected}),
          f"{case.name} -> hf: other tensors")


METADATA = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
            "common_backend_version": 1}


def check_written(case, folder):
    """A checkpoint of Megatron stays one, with its common state where Megatron looks for it."""
    kept, common, data = folder / "kept", folder / "common", case / "data"
    values = {name for name in listing(data)["values"] if name.startswith("common.")}
    others = {"common.args.dtype"} & values  # an object, which common.pt is not given
    ran = run("fsdp-convert", data, kept, "--to", "megatron", "--opaque", "copy",
              *(word for name in others for word in ("--drop", f"^{name}$")))
    check(ran.returncode == 0, f"{case.name} -> megatron: {ran.stderr}")
    if ran.returncode:
        return
    check(json.loads((kept / "metadata.json").read_text()) == METADATA, f"{case.name}: other metadata.json")
    ran = run("fsdp-diff", data, kept, *(word for name in others for word in ("--exclude", f"^{name}$")))
    check(ran.returncode == 0, f"{case.name} -> megatron: {ran.stdout}{ran.stderr}")
    ran = run("fsdp-convert", kept / "common.pt", common, "--to", "fsdp")
    check(ran.returncode == 0, f"{case.name}: common.pt: {ran.stderr}")
    told = {f"common.{name}" for name in listing(common)["values"]}
    check(told == values - others, f"{case.name}: common.pt: {told ^ values}")


def check_common(folder):
    """Keys of the common state stay whole, and arguments are those of argparse; objects have no place."""
    state = {"common": {"args": {"a.b": 1, "hidden_size": 32}, "iteration": 7}, "w": made.tensor([1.0, 2.0])}
    made.save(folder / "state.pt", state)
    ran = run("fsdp-convert", folder / "state.pt", folder / "kept", "--to", "megatron")
    check(ran.returncode == 0, f"a common state: {ran.stderr}")
    text = (folder / "kept/common.pt").read_bytes()
    check(b"a.b" in text and b"argparse" in text and b"Namespace" in text, f"common.pt: {text}")
    told = listing(folder / "kept")["values"]
    check(told == {"common.args.a.b": 1, "common.args.hidden_size": 32, "common.iteration": 7}, f"{told}")


def check_damage(case, folder):
    cut, lost = folder / "cut", folder / "lost"
    shutil.copytree(case / "data", cut)
    shutil.copytree(case / "data", lost)
    common = cut / "common.pt"
    common.write_bytes(common.read_bytes()[:700])
    ran = run("fsdp-ls", cut)
    check(ran.returncode == 4 and "common.pt" in ran.stderr, f"a torn common.pt: {ran.stderr}")
    missing = sorted(lost.glob("*.distcp"))[0]
    missing.unlink()
    ran = run("fsdp-ls", lost)
    check(ran.returncode in (3, 4) and missing.name in ran.stderr, f"a missing file: {ran.stderr}")


# --- files of ranks -----------------------------------------------------------------------------------


def numbers(rows, columns, start):
    return [[float(start + row * columns + column) for column in range(columns)] for row in range(rows)]


def model():
    """Rows of every weight, under transformers' names."""
    weights, start = {}, 1

    def add(name, rows, columns):
        nonlocal start
        weights[name] = numbers(rows, columns, start)
        start += rows * columns

    add("model.embed_tokens.weight", VOCAB, HIDDEN)
    add("lm_head.weight", VOCAB, HIDDEN)
    add("model.norm.weight", 1, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        add(at + "input_layernorm.weight", 1, HIDDEN)
        add(at + "post_attention_layernorm.weight", 1, HIDDEN)
        add(at + "self_attn.q_proj.weight", HEADS * WIDTH, HIDDEN)
        add(at + "self_attn.k_proj.weight", GROUPS * WIDTH, HIDDEN)
        add(at + "self_attn.v_proj.weight", GROUPS * WIDTH, HIDDEN)
        add(at + "self_attn.o_proj.weight", HIDDEN, HEADS * WIDTH)
        add(at + "mlp.gate_proj.weight", INNER, HIDDEN)
        add(at + "mlp.up_proj.weight", INNER, HIDDEN)
        add(at + "mlp.down_proj.weight", HIDDEN, INNER)
    return weights


def rows_of(rows, rank):
    part = len(rows) // RANKS
    return rows[rank * part : (rank + 1) * part]


def columns_of(rows, rank):
    part = len(rows[0]) // RANKS
    return [row[rank * part : (rank + 1) * part] for row in rows]


def groups_of(weights, at):
    """Each group: its queries, its key, its value."""
    queries = HEADS // GROUPS * WIDTH
    rows = []
    for group in range(GROUPS):
        rows += weights[at + "q_proj.weight"][group * queries : (group + 1) * queries]
        rows += weights[at + "k_proj.weight"][group * WIDTH : (group + 1) * WIDTH]
        rows += weights[at + "v_proj.weight"][group * WIDTH : (group + 1) * WIDTH]
    return rows


def layer_of(weights, layer, local, rank):
    at, to = f"model.layers.{layer}.", f"decoder.layers.{local}."
    return {
        to + "self_attention.linear_qkv.layer_norm_weight": weights[at + "input_layernorm.weight"],
        to + "self_attention.linear_qkv.weight": rows_of(groups_of(weights, at + "self_attn."), rank),
        to + "self_attention.linear_proj.weight": columns_of(weights[at + "self_attn.o_proj.weight"], rank),
        to + "mlp.linear_fc1.layer_norm_weight": weights[at + "post_attention_layernorm.weight"],
        to + "mlp.linear_fc1.weight": rows_of(weights[at + "mlp.gate_proj.weight"], rank)
        + rows_of(weights[at + "mlp.up_proj.weight"], rank),
        to + "mlp.linear_fc2.weight": columns_of(weights[at + "mlp.down_proj.weight"], rank),
    }


def part_of(weights, rank, stage):
    padding = [[0.0] * HIDDEN] * (PADDED - VOCAB)
    part = {}
    if stage == 0:
        part["embedding.word_embeddings.weight"] = rows_of(
            weights["model.embed_tokens.weight"] + padding, rank)
    else:
        part["output_layer.weight"] = rows_of(weights["lm_head.weight"] + padding, rank)
        part["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
    for local, layer in enumerate(STAGES[stage]):
        part |= layer_of(weights, layer, local, rank)
    return part


def as_tensor(name, rows):
    shape = (len(rows[0]),) if "norm" in name else (len(rows), len(rows[0]))
    return made.tensor([number for row in rows for number in row], shape)


def write_ranks(run_folder, weights, change=None):
    """change: a function that is given what each rank and stage saves, which has options of the run then."""
    for rank in range(RANKS):
        for stage in range(len(STAGES)):
            part = {name: as_tensor(name, rows) for name, rows in part_of(weights, rank, stage).items()}
            saved = {"checkpoint_version": 3.0, "iteration": 5, "model": part,
                     "optimizer": {"param_groups": [{"lr": 0.1}]}}
            if change:
                saved["args"] = {"swiglu": True, "num_attention_heads": HEADS, "rank": rank}
                change(saved, rank, stage)
            made.save(run_folder / f"iter_0000005/mp_rank_{rank:02d}_{stage:03d}/model_optim_rng.pt", saved)


def lacking(rank, stage, name):
    def change(saved, at_rank, at_stage):
        if (at_rank, at_stage) == (rank, stage):
            del saved["model"][name]
    return change


def sized(name, size):
    def change(saved, *_):
        saved["args"][name] = size
    return change


def setting(rank, stage, *keys, to):
    """Changes what one rank saves."""
    def change(saved, at_rank, at_stage):
        if (at_rank, at_stage) == (rank, stage):
            for key in keys[:-1]:
                saved = saved[key]
            saved[keys[-1]] = to
    return change


def check_contradictions(folder):
    """Files of ranks that say different things are not joined: what differs is named, with both files."""
    weights, layer = model(), "decoder.layers.0."
    norm = layer + "self_attention.linear_qkv.layer_norm_weight"
    half = made.tensor([0.0] * (PADDED // RANKS * HIDDEN), (PADDED // RANKS, HIDDEN), "e")
    nan = made.tensor([float("nan")] * HIDDEN, (HIDDEN,))
    first, last = "mp_rank_00_000/model_optim_rng.pt'", "mp_rank_01_001/model_optim_rng.pt'"
    cases = {
        "iteration": (setting(1, 1, "iteration", to=7), f"{first} says that iteration is 5, and",
                      f"{last} says 7"),
        "config": (setting(1, 1, "args", "swiglu", to=False), "args.swiglu is true", f"{last} says false"),
        "heads": (setting(0, 0, "args", "num_attention_heads", to=3), "num_attention_heads is 3", "says 4"),
        "norm": (setting(1, 0, "model", norm, to=made.tensor([9.0] * HIDDEN)),
                 f"{first} and", f"different values of 'model.{norm}'"),
        "nan": (setting(1, 1, "model", "decoder.final_layernorm.weight", to=nan),
                "mp_rank_00_001", "different values of 'model.decoder.final_layernorm.weight'"),
        "shape": (setting(1, 0, "model", norm, to=made.tensor([1.0])), f"{first} and", "different values"),
        "dtype": (setting(1, 0, "model", "embedding.word_embeddings.weight", to=half),
                  'stage 0 is "f32"', 'says "f16"'),
        "part": (lacking(1, 0, layer + "mlp.linear_fc1.weight"), f"{first} has 'model.{layer}mlp.linear_fc1",
                 "mp_rank_01_000/model_optim_rng.pt' does not"),
        "whole": (lacking(0, 1, "decoder.final_layernorm.weight"), f"{last} has", "mp_rank_00_001"),
        "fewer": (sized("tensor_model_parallel_size", 1), "folders of 2 ranks",
                  "args.tensor_model_parallel_size is 1")}
    for name, (change, *words) in cases.items():
        write_ranks(folder / name, weights, change)
        for command in (("fsdp-ls", folder / name), ("fsdp-convert", folder / name, folder / f"{name}-out")):
            ran = run(*command)
            check(ran.returncode == 4 and all(word in ran.stderr for word in words),
                  f"{name}: {ran.returncode} {ran.stderr}")
    for stage in range(len(STAGES)):
        at = folder / f"copy{stage}"
        write_ranks(at, weights)
        names = [f"mp_rank_{rank:02d}_{stage:03d}/model_optim_rng.pt" for rank in range(RANKS)]
        shutil.copy(at / "iter_0000005" / names[0], at / "iter_0000005" / names[1])
        ran = run("fsdp-ls", at)
        words = (*names, "one is a copy of the other")
        check(ran.returncode == 4 and all(word in ran.stderr for word in words),
              f"a copy in stage {stage}: {ran.returncode} {ran.stderr}")
    write_ranks(folder / "own", weights, setting(1, 1, "args", "rank", to=70))
    ran = run("fsdp-ls", folder / "own")
    check(ran.returncode == 0, f"what a rank has of its own: {ran.stderr}")


def check_pointer(folder):
    """The file of the newest iteration counts, not the highest number; one to nothing is named."""
    write_ranks(folder, model())
    shutil.copytree(folder / "iter_0000005", folder / "iter_0000009")
    (folder / "iter_0000009/mp_rank_00_000/model_optim_rng.pt").write_text("was not finished")
    pointer = folder / "latest_checkpointed_iteration.txt"
    for text, words, status in (("5", "is read as 'iter_0000005'", 0),
                                ("iter_0000005\n", "is read as 'iter_0000005'", 0),
                                ("7", "iteration.txt' names '7', which is missing", 4),
                                ("7", "has 'iter_0000005', 'iter_0000009'", 4), ("9", "iter_0000009", 3),
                                ("release", "names 'release', which", 4)):
        pointer.write_text(text)
        ran = run("fsdp-ls", folder)
        check(ran.returncode == status and words in ran.stderr,
              f"iteration {text}: {ran.returncode} {ran.stderr}")
    (folder / "iter_0000005").rename(folder / "release")
    ran = run("fsdp-ls", folder)
    check(ran.returncode == 0 and "is read as 'release'" in ran.stderr, f"a release: {ran.stderr}")


def check_links(folder):
    """The folder of a rank that is a link is followed on request only."""
    write_ranks(folder / "run", model())
    rank = folder / "run/iter_0000005/mp_rank_01_000"
    rank.rename(folder / "elsewhere")
    rank.symlink_to(folder / "elsewhere")
    for options, status in ((), 5), (("--follow-links",), 0):
        ran = run("fsdp-ls", folder / "run", *options)
        check(ran.returncode == status and (status == 0 or "mp_rank_01_000" in ran.stderr),
              f"a linked rank, {options}: {ran.returncode} {ran.stderr}")


def check_expert_ranks(folder):
    """All weights but those of experts are whole in each expert rank; the begin of large ones counts."""
    rows = 40000  # more than is compared
    for name, of_rank, changed in (("same", 0.0, None), ("late", 1.0, rows - 1), ("differs", 1.0, 5)):
        for expert in range(2):
            numbers = [0.0] * rows
            if changed is not None:
                numbers[changed] = of_rank * expert
            layer = "decoder.layers.0."
            saved = {"args": {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 1},
                     "model": {layer + "self_attention.linear_proj.weight": made.tensor(numbers, (rows, 1)),
                               layer + "mlp.experts.local_experts.0.linear_fc2.weight":
                                   made.tensor([float(expert)])}}
            made.save(folder / name / f"iter_0000005/mp_rank_00_{expert:03d}/model_optim_rng.pt", saved)
        ran = run("fsdp-ls", folder / name)
        check(ran.returncode == (4 if name == "differs" else 0), f"expert ranks, {name}: {ran.stderr}")


def check_copied_experts(folder):
    """An expert rank has the other weights alike, and experts of its own."""
    layer = "decoder.layers.0."
    for name, of_rank in (("own", 10.0), ("copied", 0.0)):
        for expert in range(3):
            shared = made.tensor([1.0, 2.0, 3.0], (3, 1))
            saved = {"args": {"expert_model_parallel_size": 3, "pipeline_model_parallel_size": 1},
                     "model": {layer + "self_attention.linear_proj.weight": shared,
                               layer + "mlp.experts.local_experts.0.linear_fc2.weight":
                                   made.tensor([number + of_rank * expert for number in (1.0, 2.0, 3.0)])}}
            made.save(folder / name / f"iter_0000005/mp_rank_00_{expert:03d}/model_optim_rng.pt", saved)
        ran = run("fsdp-ls", folder / name)
        wanted = (0, "") if name == "own" else (4, "one is a copy of the other")
        check(ran.returncode == wanted[0] and wanted[1] in ran.stderr, f"experts, {name}: {ran.stderr}")


def check_mapped(legacy, folder):
    """Files of ranks and a model of transformers become the same checkpoint of Megatron."""
    ways = {"joined": (legacy, "--to", "megatron"),
            "mapped": (folder / "llama", "--to", "dcp", "--map", "megatron-llama"),
            "named": (folder / "llama", "--to", "megatron")}
    for name, (source, *options) in ways.items():
        ran = run("fsdp-convert", source, folder / name, *options)
        check(ran.returncode == 0, f"{name}: {ran.stderr}")
        check((folder / name / "common.pt").exists(), f"{name}: no common.pt")
    for name in ("joined", "named"):
        ran = run("fsdp-diff", folder / name, folder / "mapped", "--exclude",
                  r"common\.iteration|\.word_emb|^output_l")
        check(ran.returncode == 0, f"{name}: {ran.stdout}{ran.stderr}")
    values = listing(folder / "mapped")["values"]
    objects = [name for name in values if name.endswith(f"._extra_state/shard_{LAYERS - 1}_{LAYERS}")]
    check(len(objects) == 5 and values["common.checkpoint_version"] == 3.0, f"mapped: {objects}")
    ran = run("fsdp-convert", legacy, folder / "odd", "--to", "megatron", "--map", "none")
    check(ran.returncode == 2 and "tp0.pp0.ep0.iteration" in ran.stderr, f"values elsewhere: {ran.stderr}")


def check_ranks(folder):
    weights, legacy, like = model(), folder / "run", folder / "like"
    write_ranks(legacy, weights)
    like.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
              "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
              "intermediate_size": INNER, "vocab_size": VOCAB, "tie_word_embeddings": False}
    (like / "config.json").write_text(json.dumps(config))
    ran = run("fsdp-convert", legacy, folder / "llama", "--copy-from", like)
    check(ran.returncode == 0, f"files of ranks: {ran.stderr}")
    told = listing(folder / "llama")["tensors"] if ran.returncode == 0 else {}
    check(set(told) == set(weights), f"files of ranks: {set(told) ^ set(weights)}")
    for name, rows in weights.items():
        packed = b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
        found = told.get(name, {}).get("sha256")
        check(found == hashlib.sha256(packed).hexdigest(), f"files of ranks: {name} is another tensor")
    check_mapped(legacy, folder)
    shutil.rmtree(legacy / "iter_0000005/mp_rank_01_000")
    ran = run("fsdp-convert", legacy, folder / "less", "--copy-from", like)
    check(ran.returncode == 4 and "mp_rank_01_000" in ran.stderr and not (folder / "less").exists(),
          f"a rank is missing: {ran.stderr}")


def main():
    cases = sorted(path.parent for path in GOLDEN.glob("*/expected.json"))
    check(len(cases) == 3, "there are other cases")
    for case in cases:
        for checked in (check_case, check_written, check_damage):
            with tempfile.TemporaryDirectory() as folder:
                checked(case, Path(folder))
    for checked in (check_common, check_ranks, check_contradictions, check_pointer, check_links,
                    check_expert_ranks, check_copied_experts):
        with tempfile.TemporaryDirectory() as folder:
            checked(Path(folder))
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
