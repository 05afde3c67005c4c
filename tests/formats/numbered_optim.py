"""An optimizer of Trainer, which numbers its parameters, gets names on the way to DCP and to DeepSpeed's
universal checkpoints, or is refused. tests/peers/trainer_optim.py has PyTorch load the results.

usage: numbered_optim.py BIN GOLDEN
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import deepspeed_files as made

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
    """Norms are the second group of Trainer; q_proj is before k_proj, and mlp after it."""
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
        assert "'optim' numbers its" in said and "no order of the parameters is known" in said, said
        assert "--only model" in said, said
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


# --- one file of torch.save, whose model is in the order of its parameters -------------------------------

def tensor(shape, first=0.0):
    return made.tensor([first + i for i in range(math.prod(shape))], shape)


def states(count, shapes=None):
    """The moment of a parameter begins with a hundred times its number; without shapes they have none."""
    return {n: {"step": 3.0} | ({"exp_avg": tensor(shapes[n], 100.0 * (n + 1))} if shapes else {})
            for n in range(count)}


def groups(*lists):
    return [{"lr": 0.1, "params": list(numbers)} for numbers in lists]


def save(folder, model, optim, config=None, **more):
    source = folder / "one"
    shutil.rmtree(source, ignore_errors=True)
    weights = {name: tensor(shape) if isinstance(shape, tuple) else shape for name, shape in model.items()}
    made.save(source / "file.pt", {"model": weights, "optim": optim, **more})
    if config:
        (source / "config.json").write_text(json.dumps({"model_type": config}))
    return source / "file.pt"


def moments(folder, source):
    """The name of the parameter that each number became."""
    shutil.rmtree(folder / "one.dcp", ignore_errors=True)
    convert(source, folder / "one.dcp", "--to", "dcp")
    was, found = tensors(source), tensors(folder / "one.dcp")
    names = {}
    for name, one in found.items():
        if name.startswith("optim.state.") and name.endswith(".exp_avg"):
            number, = (n for n in range(99) if was.get(f"optim.state.{n}.exp_avg", {}).get("sha256")
                       == one["sha256"])
            names[number] = name[len("optim.state."):-len(".exp_avg")]
    return [names[number] for number in sorted(names)]


def groups_of_trainer_follow_names(folder):
    """A plain vector has a decay, and a matrix that is a bias has none: groups by dims do not fit."""
    model = {"w.weight": (2, 3), "normal.weight": (5,), "a.q_norm.weight": (4,), "rmsnorm.weight": (7,),
             "b.bias": (1, 3), "norm.weight": (6,), "layernorm.weight": (8,), "enorm.weight": (9,)}
    order = ["w.weight", "normal.weight", "enorm.weight", "a.q_norm.weight", "rmsnorm.weight", "b.bias",
             "norm.weight", "layernorm.weight"]
    state = states(8, [model[name] for name in order])
    optim = {"state": state, "param_groups": groups(range(3), range(3, 8))}
    assert moments(folder, save(folder, model, optim)) == order
    ours = {"transformer.wte.weight": (4, 2), "transformer.h.0.ln_1.weight": (2,),
            "transformer.h.0.attn.c_attn.weight": (2, 6), "transformer.h.0.attn.c_attn.bias": (1, 6)}
    order = [name for name in ours if "wte" in name or "c_attn.weight" in name]
    order += [name for name in ours if name not in order]
    optim = {"state": states(4, [ours[name] for name in order]),
             "param_groups": groups(range(2), range(2, 4))}
    assert moments(folder, save(folder, ours, optim, "gpt2")) == order


def buffers_have_no_number(folder):
    model = {"bn.weight": (3,), "bn.bias": (3,), "bn.running_mean": (3,), "bn.running_var": (3,),
             "bn.num_batches_tracked": made.tensor([5], (), "q"), "out.weight": (2, 3)}
    optim = {"state": states(3, [(3,), (3,), (2, 3)]), "param_groups": groups(range(3))}
    assert moments(folder, save(folder, model, optim)) == ["bn.weight", "bn.bias", "out.weight"]


def what_does_not_fit_is_refused(folder):
    """In addition to a config.json; a file alone may have numbers because a program wanted them."""
    model = {"a.weight": (2, 2), "v.weight": (2,), "z.bias": (2, 2)}
    fits = {"state": states(3, [(2, 2), (2,), (2, 2)]), "param_groups": groups(range(3))}
    for optim, words in (
            ({**fits, "state": states(3, [(2, 2), (2,), (2, 3)])}, "does not have the shape of 'z.bias'"),
            ({"state": states(3), "param_groups": groups((0, 1), (2,))}, "two ways to name them fit"),
            ({"state": states(2), "param_groups": groups((0, 1))}, "the model has 3"),
            ({"state": states(2), "param_groups": groups((0, 1, 1))}, "a number appears twice")):
        said = convert(save(folder, model, optim, "other"), folder / "no", "--to", "dcp", status=USAGE)
        assert "'optim' numbers its" in said and words in said, said
        source = save(folder, model, optim)
        shutil.rmtree(folder / "one.dcp", ignore_errors=True)
        convert(source, folder / "one.dcp", "--to", "dcp")
        names = [name for name in tensors(source) if name.startswith("optim.")]
        assert all(name in tensors(folder / "one.dcp") for name in names), names
    assert moments(folder, save(folder, model, fits, "other")) == list(model)


def lists_of_other_things_stay(folder):
    """Numbers of two optimizers, and a list whose name only ends like that of groups."""
    model = {"a.weight": (2, 2), "v.weight": (2,)}
    shapes = list(model.values())
    for optim, more in (
            ({"state": states(2, shapes), "param_groups": {0: {"params": [0, 1]}}},
             {"second": {"state": states(2, shapes), "param_groups": {1: {"params": [2, 3]}}}}),
            ({}, {"my_param_groups": [{"params": [0, 1]}]})):
        source = save(folder, model, optim, "other", **more)
        shutil.rmtree(folder / "one.dcp", ignore_errors=True)
        convert(source, folder / "one.dcp", "--to", "dcp")
        said = run("fsdp-diff", source, folder / "one.dcp")
        assert " 0 differ" in said, said


def main():
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        shutil.copytree(GOLDEN / STEP, folder / "step")
        names_follow_the_order_of_the_model(folder)
        the_typed_comparison_is_equal(folder)
        what_has_no_names_is_refused(folder)
        a_state_of_no_group_is_refused(folder)
        groups_of_trainer_follow_names(folder)
        buffers_have_no_number(folder)
        what_does_not_fit_is_refused(folder)
        lists_of_other_things_stay(folder)


if __name__ == "__main__":
    main()
