"""An optimizer of Trainer, which numbers its parameters, gets names on the way to DCP and to DeepSpeed's
universal checkpoints, or is refused. tests/peers/trainer_optim.py has PyTorch load the results.

usage: numbered_optim.py BIN GOLDEN
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BIN, GOLDEN = Path(sys.argv[1]), Path(sys.argv[2])
STEP = "layouts/hf_trainer/data/run/checkpoint-2"
USAGE = 2


def run(program, *words, status=0):
    done = subprocess.run([BIN / program, *map(str, words)], capture_output=True, text=True, timeout=60,
                          check=False)
    assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def tensors(path):
    return json.loads(run("fsdp-ls", "-q", "--json", "--digest", "sha256", path))["tensors"]


def convert(source, out, *options, status=0):
    return run("fsdp-convert", source, out, "--no-sync", *options, status=status)


def names_follow_the_order_of_the_model(folder):
    """Norms are the second group of Trainer; q_proj is before k_proj, and mlp behind it."""
    layer = "model.layers.0."
    decayed = ["model.embed_tokens.weight", *(f"{layer}self_attn.{one}_proj.weight" for one in "qkvo"),
               *(f"{layer}mlp.{one}_proj.weight" for one in ("gate", "up", "down")), "lm_head.weight"]
    others = [f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight",
              "model.norm.weight"]
    source = tensors(folder / "step")
    convert(folder / "step", folder / "out.dcp", "--to", "dcp")
    found = tensors(folder / "out.dcp")
    for number, name in enumerate(decayed + others):
        for moment in ("exp_avg", "exp_avg_sq"):
            ours, theirs = found[f"optim.state.{name}.{moment}"], source[f"optim.state.{number}.{moment}"]
            assert (ours["shape"], ours["sha256"]) == (theirs["shape"], theirs["sha256"]), (name, moment)
            assert ours["shape"] == found[f"model.{name}"]["shape"], name
    assert not any(one.startswith("optim.state.0.") for one in found)
    convert(folder / "step", folder / "out.universal", "--to", "universal")
    zero = next((folder / "out.universal").rglob("zero"))
    assert {one.name for one in zero.iterdir() if one.is_dir()} == set(decayed + others)


def the_typed_comparison_is_equal(folder):
    said = convert(folder / "step", folder / "again.dcp", "--to", "dcp")
    command = next(line for line in said.splitlines() if line.startswith("next")).split(None, 1)[1]
    done = subprocess.run(command.replace("fsdp-", f"{BIN}/fsdp-", 1), shell=True, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)


def what_has_no_names_is_refused(folder):
    config = folder / "step/config.json"
    text = config.read_text()
    config.write_text(text.replace('"llama"', '"another"'))
    for target in ("dcp", "universal"):
        said = convert(folder / "step", folder / "no", "--to", target, status=USAGE)
        assert "'optim' numbers its" in said and "--only model" in said, said
    convert(folder / "step", folder / "model.dcp", "--to", "dcp", "--only", "model")
    convert(folder / "step", folder / "numbers.dcp", "--to", "dcp", "--names", "keep")
    assert "optim.state.0.exp_avg" in tensors(folder / "numbers.dcp")
    convert(folder / "numbers.dcp", folder / "same.dcp", "--to", "dcp")
    config.write_text(text)


def a_state_of_no_group_is_refused(folder):
    (folder / "stray").mkdir()
    shutil.copy(folder / "step/config.json", folder / "stray")
    convert(folder / "step", folder / "stray/made.pt", "--to", "torch", "--rename",
            r"s/optim\.state\.0\./optim.state.99./")
    said = convert(folder / "stray/made.pt", folder / "stray.dcp", "--to", "dcp", status=USAGE)
    assert "has states of a number that is in no group" in said, said


def main():
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        shutil.copytree(GOLDEN / STEP, folder / "step")
        names_follow_the_order_of_the_model(folder)
        the_typed_comparison_is_equal(folder)
        what_has_no_names_is_refused(folder)
        a_state_of_no_group_is_refused(folder)


if __name__ == "__main__":
    main()
