"""Names of transformers' memory become those of its files, and the way back, for the class in config.json:
with --names hub, by the weights of the directory that the result is made like, and below a key.

usage: hub_classes.py BIN
tests/peers/hub_converts.py compares the results with what transformers saves.
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import deepspeed_files as made

BIN = Path(sys.argv[1])
USAGE, EXPERTS = 2, 11
LLAVA, MOE = "LlavaForConditionalGeneration", "Qwen2MoeForCausalLM"
MEMORY = {"lm_head.weight": (4, 2), "model.multi_modal_projector.linear.weight": (2, 3),
          "model.language_model.norm.weight": (5,), "model.vision_tower.patch.weight": (3, 2)}
FILES = {"language_model.lm_head.weight": "lm_head.weight",
         "multi_modal_projector.linear.weight": "model.multi_modal_projector.linear.weight",
         "language_model.model.norm.weight": "model.language_model.norm.weight",
         "vision_tower.patch.weight": "model.vision_tower.patch.weight"}


def run(program, *words, status=0):
    done = subprocess.run([BIN / program, *map(str, words)], capture_output=True, text=True, timeout=60,
                          check=False)
    assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def tensors(path):
    told = json.loads(run("fsdp-ls", "-q", "--json", "--digest", "sha256", path))["tensors"]
    return {name: (tuple(one["shape"]), one["sha256"]) for name, one in told.items()}


def convert(source, out, *options, status=0):
    if out.is_dir():
        shutil.rmtree(out)
    return run("fsdp-convert", source, out, "--no-sync", *options, status=status)


def weights(shapes):
    """Every element has a number of its own."""
    found, at = {}, 0
    for name, shape in shapes.items():
        found[name] = made.tensor([float(at + i) for i in range(math.prod(shape))], shape)
        at += math.prod(shape)
    return found


def directory(path, class_name, source=None):
    """One with config.json, and with weights when there is a source."""
    if source:
        convert(source, path, "--to", "hf", "--names", "keep")
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "none", "architectures": [class_name]}))
    return path


def files_of(source):
    return {name: tensors(source)[memory] for name, memory in FILES.items()}


def names_of_files(folder):
    source, out = folder / "memory.pt", folder / "out"
    made.save(source, weights(MEMORY))
    wanted, config = files_of(source), directory(folder / "config", LLAVA)
    said = convert(source, out, "--to", "hf", "--copy-from", config)
    assert "--names hub gives" in said and tensors(out) == tensors(source), said
    said = convert(source, out, "--to", "hf", "--copy-from", config, "--names", "hub")
    assert "--names hub gives" not in said and tensors(out) == wanted, said
    hub, plain = directory(folder / "hub", LLAVA, out), directory(folder / "plain", LLAVA, source)
    said = convert(source, out, "--to", "hf", "--copy-from", hub)
    assert "--names hub gives" not in said and tensors(out) == wanted, said
    said = convert(source, out, "--to", "hf", "--copy-from", plain)
    assert "--names hub gives" in said and tensors(out) == tensors(source), said
    for options in ((), ("--names", "hub")):  # they are those of files already
        said = convert(hub, out, "--to", "hf", *options)
        assert "--names hub gives" not in said and tensors(out) == wanted, said
    convert(hub, folder / "back.dcp", "--to", "dcp", "--map", "hub")
    assert tensors(folder / "back.dcp") == tensors(source)


def names_below_a_key(folder):
    source, out, plain = folder / "below.pt", folder / "out", folder / "memory.pt"
    made.save(plain, weights(MEMORY))
    made.save(source, {"model": weights(MEMORY), "step": 3})
    config = directory(folder / "config", LLAVA)
    convert(source, out, "--to", "hf", "--copy-from", config, "--names", "hub")
    assert tensors(out) == files_of(plain)
    convert(directory(folder / "hub", LLAVA, out), folder / "back.dcp", "--to", "dcp", "--map", "hub",
            "--under", "model")
    assert tensors(folder / "back.dcp") == tensors(source)


def maps_of_gguf_take_no_part(folder):
    """The map of GGUF for this family has these names, and they are not those of files."""
    source, out, config = folder / "neox.pt", folder / "out", folder / "neox"
    made.save(source, {"model": weights({
        "gpt_neox.embed_in.weight": (5, 2), "gpt_neox.final_layer_norm.weight": (2,),
        "gpt_neox.final_layer_norm.bias": (2,), "lm_head.weight": (5, 2)})})
    config.mkdir()
    (config / "config.json").write_text(json.dumps({
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "vocab_size": 5, "hidden_size": 2,
        "num_hidden_layers": 0, "num_attention_heads": 1, "intermediate_size": 4}))
    said = convert(source, out, "--to", "hf", "--copy-from", config)
    assert "--names hub gives" in said, said
    convert(source, out, "--to", "hf", "--copy-from", config, "--names", "hub")
    assert "embed_out.weight" in tensors(out), tensors(out)


def moments_are_not_renamed(folder):
    source, config = folder / "optim.pt", directory(folder / "config", LLAVA)
    moments = {name: {"exp_avg": one} for name, one in weights(MEMORY).items()}
    made.save(source, {"model": weights(MEMORY), "optim": {"state": moments, "param_groups": []}})
    said = convert(source, folder / "out.dcp", "--to", "dcp", "--copy-from", config, "--map", "hub",
                   status=USAGE)
    assert "changes the model but not 'optim.state." in said and "--only model" in said, said
    convert(source, folder / "out", "--to", "hf", "--copy-from", config, "--map", "hub")


def experts_keep_their_order(folder):
    """More than ten, so that numbers and words have other orders."""
    at = "model.layers.{0}.mlp.experts."
    shapes = {at.format(layer) + name: shape for layer in range(2)
              for name, shape in (("down_proj", (EXPERTS, 2, 3)), ("gate_up_proj", (EXPERTS, 6, 2)))}
    source, out, config = folder / "moe.pt", folder / "out", directory(folder / "config", MOE)
    made.save(source, weights(shapes))
    convert(source, out, "--to", "hf", "--copy-from", config, "--names", "hub")
    whole, parts, first = weights(shapes), {}, 0
    for name, shape in shapes.items():
        numbers = [float(first + i) for i in range(math.prod(shape))]
        first += len(numbers)
        each = len(numbers) // EXPERTS
        for expert in range(EXPERTS):
            own = numbers[expert * each : (expert + 1) * each]
            under = name.rpartition(".")[0] + f".{expert}."
            if name.endswith("down_proj"):
                parts[under + "down_proj.weight"] = made.tensor(own, shape[1:])
            else:
                for half, word in enumerate(("gate", "up")):
                    part = own[half * each // 2 : (half + 1) * each // 2]
                    parts[f"{under}{word}_proj.weight"] = made.tensor(part, (shape[1] // 2, shape[2]))
    assert len(whole) == 4
    made.save(folder / "parts.pt", parts)
    assert tensors(out) == tensors(folder / "parts.pt")
    convert(out, folder / "back.pt", "--map", "hub")
    assert tensors(folder / "back.pt") == tensors(source)


def classes_are_known_by_their_whole_name(folder):
    source, out = folder / "memory.pt", folder / "out"
    made.save(source, weights(MEMORY))
    for name in (LLAVA[:-1], LLAVA + "2", "", "Nothing"):
        config = directory(folder / "config", name)
        said = convert(source, out, "--to", "hf", "--copy-from", config, "--names", "hub", status=USAGE)
        assert f"no names of the hub are known for the class '{name}'" in said, said
        said = convert(source, out, "--to", "hf", "--copy-from", config)
        assert "--names hub gives" not in said, said
    for name in ("LlamaForCausalLM", "LlamaForTokenClassification"):  # names in memory are those of files
        convert(source, out, "--to", "hf", "--copy-from", directory(folder / "config", name), "--names",
                "hub")
        assert tensors(out) == tensors(source)


def main():
    for check in (names_of_files, names_below_a_key, maps_of_gguf_take_no_part, moments_are_not_renamed,
                  experts_keep_their_order, classes_are_known_by_their_whole_name):
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder))
            print(check.__name__)


main()
