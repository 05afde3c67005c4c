"""FSDP2 checkpoints of models whose names in memory are not those of the hub get the names that transformers
saves, and the way back: names and values are equal. Without a directory that has such names, a note says so.

usage: hub_converts.py FSDP_CONVERT [CASE...]
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from hub_cases import CASES
from safetensors.torch import load_file

CONVERT = Path(sys.argv[1]).resolve()


def convert(*words):
    done = subprocess.run([CONVERT, *map(str, words), "--no-sync"], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def same(found, wanted):
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:6]
    wrong = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not wrong, wrong[:6]


def check(make, folder):
    model = make().eval()
    state = model.state_dict()
    for number, one in enumerate(state.values()):
        if one.is_floating_point():
            one.copy_(torch.rand(one.shape, generator=torch.Generator().manual_seed(number)))
    model.save_pretrained(folder / "hf")
    wanted = load_file(folder / "hf/model.safetensors")
    assert wanted.keys() != state.keys()
    (folder / "config").mkdir()
    shutil.copy(folder / "hf/config.json", folder / "config")
    dcp.save({"model": state}, checkpoint_id=folder / "below", no_dist=True)
    dcp.save(dict(state), checkpoint_id=folder / "plain", no_dist=True)

    convert(folder / "below", folder / "by_itself", "--to", "hf", "--copy-from", folder / "hf")
    same(load_file(folder / "by_itself/model.safetensors"), wanted)
    for source in ("below", "plain"):
        said = convert(folder / source, folder / f"memory_{source}", "--to", "hf", "--copy-from",
                       folder / "config")
        assert "--names hub gives" in said, said
        convert(folder / source, folder / f"hub_{source}", "--to", "hf", "--copy-from", folder / "config",
                "--names", "hub")
        same(load_file(folder / f"hub_{source}/model.safetensors"), wanted)
    kept = load_file(folder / "memory_below/model.safetensors")
    assert kept.keys() <= state.keys()
    convert(folder / "hf", folder / "again", "--to", "hf", "--names", "hub")
    same(load_file(folder / "again/model.safetensors"), wanted)

    convert(folder / "hf", folder / "back", "--to", "dcp", "--map", "hub", "--under", "model")
    loaded = {"model": {name: torch.zeros_like(one) for name, one in state.items() if name in kept}}
    dcp.load(loaded, checkpoint_id=folder / "back", no_dist=True)
    same(loaded["model"], {name: state[name] for name in kept})


def main():
    transformers.logging.set_verbosity_error()
    failed = []
    for name in sys.argv[2:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(CASES[name], Path(folder))
                print(f"{name}: equal both ways", flush=True)
            except AssertionError as error:
                failed.append(name)
                print(f"{name}: {str(error)[:600]}", flush=True)
    sys.exit(f"not equal: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
