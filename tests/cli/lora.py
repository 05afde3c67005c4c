"""fsdp-convert --adapter without PEFT: the modules and factors that adapter_config.json names, settings that
contradict the adapter, and the paths that people type.

usage: lora.py BUILD [CASE...]
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import safetensors_file

BUILD = Path(sys.argv[1]).resolve()
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RANK, ALPHA, SIZE = 2, 8, 4
MODULES = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1, 12) for name in "qv"]
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


# --- files ------------------------------------------------------------------------------------------

def write_tensors(path, tensors, texts=None):
    """{name: (shape, values)}"""
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors_file.write(path, {name: ("F32", shape, struct.pack(f"<{len(values)}f", *values))
                                  for name, (shape, values) in tensors.items()}, texts)


def read_tensors(path):
    data = path.read_bytes()
    size, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        first, end = (8 + size + offset for offset in entry["data_offsets"])
        found[name] = list(struct.unpack(f"<{(end - first) // 4}f", data[first:end]))
    return found


def write_base(path="base"):
    write_tensors(Path(path) / "model.safetensors", {f"{name}.weight": ([SIZE, SIZE], [0.5] * SIZE * SIZE)
                                                     for name in MODULES})
    (Path(path) / "config.json").write_text('{"model_type": "unknown"}')


def pair(module, rank=RANK, b=1.0):
    return {f"base_model.model.{module}.lora_A.weight": ([rank, SIZE], [1.0] * rank * SIZE),
            f"base_model.model.{module}.lora_B.weight": ([SIZE, rank], [b] * rank * SIZE)}


def lengths(module, value=2.0):
    return {f"base_model.model.{module}.lora_magnitude_vector": ([SIZE], [value] * SIZE)}


def write_adapter(path="adapter", tensors=None, text=None, **settings):
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj"],
              **settings}
    if tensors is None:
        tensors = {name: value for module in MODULES for name, value in pair(module).items()}
    write_tensors(Path(path) / "adapter_model.safetensors", tensors)
    (Path(path) / "adapter_config.json").write_text(text or json.dumps(config))


def convert(*arguments):
    command = [BUILD / "bin" / "fsdp-convert", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def merge(adapter="adapter"):
    shutil.rmtree("ours", ignore_errors=True)
    return convert("-q", "base", "ours", "--to", "hf", "--adapter", adapter)


def factors(adapter="adapter"):
    """The factor of each module's product, which is RANK times the factor everywhere."""
    done = merge(adapter)
    assert done.returncode == 0, done.stderr
    merged = read_tensors(Path("ours/model.safetensors"))
    found = []
    for module in MODULES:
        values = set(merged[f"{module}.weight"])
        assert len(values) == 1, values
        found.append((values.pop() - 0.5) / RANK)
    return found


def refused(status, words, **settings):
    write_adapter(**settings)
    done = merge()
    assert done.returncode == status and words in done.stderr, (settings, done.returncode, done.stderr)
    assert not os.path.exists("ours"), settings


# --- modules and factors ----------------------------------------------------------------------------

@case
def factors_follow_expressions_of_python():
    usual = ALPHA / RANK
    for patterns, expected in (
            ({}, [usual] * 6),
            ({r"model\.layers\.\d+\.self_attn\.q_proj": 64}, [32, usual] * 3),
            ({r"layers\.\d\.self_attn\.q_proj": 64}, [32, usual, 32, usual, usual, usual]),
            ({r"v_pro": 64, "_proj": 6, r"elf_attn\.q_proj": 2}, [usual] * 6),
            ({"v_proj": 6, r"[qv]_proj": 2}, [1, 3] * 3),
            ({"q_proj|v_proj": 6}, [3] * 6),
            ({r"layers.1.self_attn.(?:q|v)_proj": 6}, [usual, usual, 3, 3, usual, usual]),
            ({r"^(?!.*\.12\.).*v_proj": 6}, [usual, 3, usual, 3, usual, usual])):
        write_adapter(alpha_pattern=patterns)
        assert factors() == expected, (patterns, factors())
    # a dict of Python: the last number of a key, in the place of the first
    write_adapter(text='{"peft_type": "LORA", "r": 2, "lora_alpha": 8, "alpha_pattern": '
                       '{"q_proj": 2, ".*_proj": 6, "q_proj": 64}}')
    assert factors() == [32, 3] * 3
    write_adapter(use_rslora=True, alpha_pattern={"q_proj": 2 * 2**0.5})
    assert [round(factor, 5) for factor in factors()[::2]] == [2] * 3


@case
def a_name_beyond_expressions_is_its_own_key():
    module = "model.a(b.q_proj"
    write_tensors(Path("base/model.safetensors"), {f"{module}.weight": ([SIZE, SIZE], [0.5] * SIZE * SIZE)})
    refused(2, "a group is not closed", tensors=pair(module), alpha_pattern={module: 64})
    module = "model.a+b.q_proj"
    write_tensors(Path("base/model.safetensors"), {f"{module}.weight": ([SIZE, SIZE], [0.5] * SIZE * SIZE)})
    write_adapter(tensors=pair(module), alpha_pattern={module: 64})
    assert merge().returncode == 0
    assert set(read_tensors(Path("ours/model.safetensors"))[f"{module}.weight"]) == {0.5 + 32 * RANK}


@case
def ranks_are_those_of_the_settings():
    tensors = {name: value for module in MODULES
               for name, value in pair(module, 4 if ".12." in module else RANK).items()}
    write_adapter(tensors=tensors, rank_pattern={r"layers\.\d\d\..*": 4})
    assert merge().returncode == 0
    for patterns in ({}, {r"layers\.\d\..*": 4}, {".*": 4}):
        refused(4, "_proj': its product has the rank", tensors=tensors, rank_pattern=patterns)
    refused(4, "its product has the rank 2, but adapter_config.json says 8", text='{"peft_type": "LORA"}')


@case
def targets_are_those_of_the_settings():
    some = pair("model.layers.1.self_attn.q_proj") | pair("model.layers.12.self_attn.q_proj")
    for settings in ({"target_modules": r".*\.(q|v)_proj"}, {"target_modules": r"^(?!.*visual).*self_attn.*"},
                     {"target_modules": None}, {"target_modules": "all-linear"},
                     {"target_modules": ["layers.1.self_attn.q_proj", "model.layers.12.self_attn.q_proj"]},
                     {"layers_to_transform": [1, 12]},
                     {"layers_to_transform": [1, 12], "layers_pattern": "layers"},
                     {"layers_to_transform": [12, 1], "layers_pattern": ["h", "model.layers"]},
                     {"layers_to_transform": [], "exclude_modules": ["v_proj"]},
                     {"target_modules": [f"model.layers.{n}.self_attn.q_proj" for n in (1, 12)],
                      "layers_to_transform": 0}, {"exclude_modules": r".*\.0\..*"}):
        write_adapter(tensors=some, **settings)
        assert merge().returncode == 0, (settings, merge().stderr)
    for member, settings in (("target_modules", {"target_modules": ["k_proj", "roj"]}),
                             ("target_modules", {"target_modules": r".*\.v_proj"}),
                             ("target_modules", {"target_modules": []}),
                             ("layers_to_transform", {"layers_to_transform": [1, 2]}),
                             ("layers_to_transform", {"layers_to_transform": 1}),
                             ("layers_to_transform", {"layers_to_transform": [1, 12], "layers_pattern": "h"}),
                             ("exclude_modules", {"exclude_modules": ["q_proj"]}),
                             ("exclude_modules", {"exclude_modules": r".*\.\d\d\..*"})):
        refused(4, f"and {member} of adapter_config.json", tensors=some, **settings)
    refused(2, "layers_pattern 'h|layers'", layers_to_transform=1, layers_pattern="h|layers")


@case
def expressions_that_are_not_matched_are_named():
    for expression, words in ((r"(?P<n>q)_proj", "named group"), (r"(q)\1", "refers back"),
                              ("q**", "repeats"), (r"(?<=\.)q_proj", "looks behind")):
        for settings in ({"alpha_pattern": {expression: 3}}, {"rank_pattern": {expression: 3}},
                         {"target_modules": expression}, {"exclude_modules": expression}):
            refused(2, words, **settings)
    refused(9, "together", alpha_pattern={f"layers.{n}.{'x' * 60}": n for n in range(20000)})


# --- what contradicts itself ------------------------------------------------------------------------

@case
def lengths_and_use_dora_belong_together():
    module = MODULES[0]
    write_adapter(tensors=pair(module) | lengths(module), use_dora=True)
    assert merge().returncode == 0
    merged = read_tensors(Path("ours/model.safetensors"))[f"{module}.weight"]
    assert all(abs(value - 1) < 1e-6 for value in merged), merged  # rows of four of length 2
    refused(4, "says use_dora, but the adapter has no magnitudes", tensors=pair(module), use_dora=True)
    refused(4, "does not say use_dora", tensors=pair(module) | lengths(module))


@case
def one_of_a_pair_is_refused():
    for lost in pair(MODULES[0]):
        tensors = {name: value for name, value in pair(MODULES[0]).items() if name != lost}
        refused(4, f"has one matrix of the pair for '{MODULES[0]}'", tensors=tensors | pair(MODULES[1]))


@case
def layers_that_are_used_several_times_are_refused():
    refused(2, "has layer_replication", layer_replication=[[0, 2], [1, 3]])
    for none in (None, []):
        write_adapter(layer_replication=none)
        assert merge().returncode == 0


@case
def results_that_are_not_finite_are_named():
    nan, module = float("nan"), MODULES[0]
    refused(4, "a sum does not fit in f32", lora_alpha=1e308)
    refused(4, "a sum does not fit in f32", alpha_pattern={"v_proj": 1e39})
    refused(4, "a sum does not fit in f32", tensors=pair(module, b=nan))
    refused(4, "a sum does not fit in f32", tensors=pair(module, b=3e38))
    refused(4, "the number is out of range", text='{"peft_type": "LORA", "r": 2, "lora_alpha": 1e999}')
    nothing = pair(module, b=-0.5 * RANK / ALPHA / RANK)  # the sum's rows are zero
    refused(4, "row 0 cannot be scaled to the length 2", tensors=nothing | lengths(module), use_dora=True)
    refused(4, "cannot be scaled to the length",
            tensors=pair(module) | lengths(module, float("inf")), use_dora=True)


# --- paths ------------------------------------------------------------------------------------------

def copy_layout(case):
    shutil.copytree(GOLDEN / "layouts" / case / "data", ".", dirs_exist_ok=True)


@case
def an_output_that_was_trained_whole_is_untied():
    tied = {"model.embed_tokens.weight": ([3, SIZE], [0.5] * 3 * SIZE)}
    write_tensors(Path("base/model.safetensors"), tied)
    Path("base/config.json").write_text('{"model_type": "unknown", "tie_word_embeddings": true}')
    write_adapter(tensors={"base_model.model.lm_head.weight": ([3, SIZE], [2.0] * 3 * SIZE)},
                  target_modules=None)
    done = merge()
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("ours/config.json").read_text())["tie_word_embeddings"] is False
    assert read_tensors(Path("ours/model.safetensors"))["lm_head.weight"] == [2.0] * 3 * SIZE


@case
def hashes_of_the_base_are_left_out():
    weights = {f"{MODULES[0]}.weight": ([SIZE, SIZE], [0.5] * SIZE * SIZE)}
    write_tensors(Path("base/model.safetensors"), weights, {"sshs_model_hash": "1f", "note": "kept"})
    write_adapter(tensors=pair(MODULES[0]))
    assert merge().returncode == 0
    data = Path("ours/model.safetensors").read_bytes()
    texts = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"]
    assert texts["note"] == "kept" and "sshs_model_hash" not in texts, texts


@case
def an_adapter_beside_its_base():
    """The settings of an adapter are copied with the adapter, and only with it."""
    copy_layout("peft_beside_base")
    for options in ((), ("--copy-from", "model")):
        done = convert("model", "plain", "--to", "hf", "--overwrite", *options)
        assert done.returncode == 0, done.stderr
        assert "--adapter model merges the adapter" in done.stderr, done.stderr
        assert sorted(os.listdir("plain")) == ["README.md", "config.json", "generation_config.json",
                                               "model.safetensors"]
    assert read_tensors(Path("plain/model.safetensors")) == read_tensors(Path("model/model.safetensors"))
    done = convert("model", "ours", "--to", "hf", "--adapter", "model")
    assert done.returncode == 0 and "not read" not in done.stderr, done.stderr
    assert "adapter_config.json" not in os.listdir("ours")
    ours, base = (read_tensors(Path(f"{name}/model.safetensors")) for name in ("ours", "model"))
    changed = {name for name in base if base[name] != ours[name]}
    assert changed == {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qv"}, changed
    os.makedirs("adapter")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(f"model/{name}", "adapter")
    # a base in another format is the model, too
    shutil.copytree("model", "older")
    os.remove("older/model.safetensors")
    done = convert("model/model.safetensors", "older/pytorch_model.bin", "--to", "torch")
    assert done.returncode == 0, done.stderr
    done = convert("older", "newer", "--to", "hf")
    assert done.returncode == 0 and "'older' is read as 'pytorch_model.bin'" in done.stderr, done.stderr
    assert read_tensors(Path("newer/model.safetensors")) == base
    assert "adapter_config.json" not in os.listdir("newer")
    done = convert("adapter", "copied", "--to", "hf")
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir("copied")) == ["adapter_config.json", "adapter_model.safetensors"]


@case
def checkpoints_of_trainers():
    copy_layout("peft_beside_base")
    copy_layout("hf_trainer_lora")
    merged = []
    for path in ("run/checkpoint-2", "run/checkpoint-2/.", "run"):
        shutil.rmtree("ours", ignore_errors=True)
        done = convert("model", "ours", "--to", "hf", "--adapter", path)
        assert done.returncode == 0, (path, done.stderr)
        assert done.stderr.count("'run' is read as 'checkpoint-2'") == (path == "run"), done.stderr
        merged.append(read_tensors(Path("ours/model.safetensors")))
    assert merged[0] == merged[1] == merged[2] != read_tensors(Path("model/model.safetensors"))
    # the newest, by number, that opens
    shutil.copytree("run/checkpoint-2", "run/checkpoint-10")
    settings = json.loads(Path("run/checkpoint-2/adapter_config.json").read_text())
    Path("run/checkpoint-10/adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 800}))
    shutil.rmtree("ours")
    assert convert("-q", "model", "ours", "--to", "hf", "--adapter", "run").returncode == 0
    assert read_tensors(Path("ours/model.safetensors")) != merged[0]
    # what the trainer saved at its end
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(f"run/checkpoint-2/{name}", "run")
    shutil.rmtree("ours")
    assert convert("-q", "model", "ours", "--to", "hf", "--adapter", "run").returncode == 0
    assert read_tensors(Path("ours/model.safetensors")) == merged[0]


@case
def directories_that_are_no_adapters():
    write_adapter()
    os.mkdir("torn")
    Path("torn/latest").write_text("global_step5")
    for source, adapter, status, words in (
            ("adapter", "base", 2, "'adapter' is an adapter, and 'base' is not: the two are swapped"),
            ("base", "base", 3, "'base' is not an adapter of PEFT"),
            ("base", "nowhere", 3, "cannot open 'nowhere'"),
            ("base", ".", 3, "'.' is not an adapter of PEFT"),
            ("base", "torn", 4, "'torn/latest' names 'global_step5', which is missing"),
            ("base", "base/model.safetensors", 3, "is not an adapter of PEFT")):
        done = convert(source, "ours", "--to", "hf", "--adapter", adapter)
        assert done.returncode == status and words in done.stderr, (source, adapter, done.stderr)
        assert not os.path.exists("ours")


def main():
    for name in sys.argv[2:] or CASES:
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            write_base()
            CASES[name]()
            os.chdir("/")
        print(name)


main()
