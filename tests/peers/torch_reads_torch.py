"""torch.load(weights_only=True) gives what we wrote as torch.save files.

usage: torch_reads_torch.py FSDP_CONVERT GOLDEN
"""

import os
import random
import sys
import tempfile
import zipfile
from pathlib import Path

os.environ["TORCH_SERIALIZATION_DEBUG"] = "1"  # torch compares its computed places with the real ones

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_model
from states import check, golden, in_order, nested_state, run, tensors, tree_same, values

CONVERT, GOLDEN = sys.argv[1], Path(sys.argv[2])


def converted(source, folder):
    path = folder / "written.pt"
    run(CONVERT, source, path, "--overwrite")
    assert zipfile.ZipFile(path).testzip() is None
    return path


def load(path, **options):
    return torch.load(path, weights_only=True, **options)


def everything(folder):
    state = {**tensors(), **values()}
    torch.save(state, folder / "source.pt")
    path = converted(folder / "source.pt", folder)
    check(state, load(path), "everything")
    check(state, load(path, mmap=True), "everything, mapped")


def records(folder):
    """Our archive has the records of torch's own, at the same places."""
    state = {f"t{i}": torch.arange(i * 7, dtype=torch.int16) for i in range(12)}
    torch.save(state, folder / "archive.pt")
    ours = zipfile.ZipFile(converted(folder / "archive.pt", folder)).infolist()
    theirs = zipfile.ZipFile(folder / "archive.pt").infolist()
    for mine, torchs in zip(ours, theirs, strict=True):
        assert mine.filename == torchs.filename
        assert mine.flag_bits == torchs.flag_bits, mine.filename
        if mine.filename.startswith("archive/data/"):
            assert mine.CRC == torchs.CRC and mine.file_size == torchs.file_size, mine.filename


def fixtures(folder):
    for name, path in golden(GOLDEN, "safetensors"):
        if path.suffix == ".safetensors" and "f6" not in name:
            try:
                expected = load_file(path)
            except Exception as error:  # a dtype or a form that safetensors itself does not read
                print(f"{name}: {error}")
                continue
            with safe_open(path, "pt") as file:
                noted = file.metadata() or {}
            expected |= {name: expected[kept] for name, kept in noted.items() if kept in expected}
            check(expected, load(converted(path, folder)), name)


def optimizer(folder):
    """An optimizer finds its state again: it looks for it by numbers, and says nothing when there is none."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        adam.step()
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, folder / "adam.pt")
    run(CONVERT, folder / "adam.pt", folder / "adam.fsdp", "--to", "fsdp", "--world-size", "3")
    for source in ("adam.pt", "adam.fsdp"):
        got = load(converted(folder / source, folder))
        other = torch.optim.AdamW(model.parameters(), lr=1.0)
        other.load_state_dict(got["optimizer"])
        for parameter in model.parameters():
            check(adam.state[parameter], other.state[parameter], f"{source}: state of a parameter")
        assert other.param_groups[0]["lr"] == 0.01, source
    keys = {-5: torch.ones(1), 10**17: torch.zeros(1), 10**30: torch.ones(2), "07": torch.ones(3), True: 1}
    torch.save({"t": keys, 3: {"a": 1}}, folder / "keys.pt")
    got = load(converted(folder / "keys.pt", folder))
    assert set(got["t"]) == {-5, 10**17, str(10**30), "07", "True"} and got[3] == {"a": 1}, got


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def tied(folder):
    """Names of one tensor are one storage, and every name is there."""
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"z": weight, "a": weight, "in": {"a": weight}}
    state |= {"t": weight.t(), "row": weight[1], "n": weight + 1}
    torch.save(state, folder / "tied.pt")
    got = load(converted(folder / "tied.pt", folder))
    check({k: v for k, v in state.items() if k != "in"}, {k: v for k, v in got.items() if k != "in"}, "tied")
    assert address(got["z"]) == address(got["a"]) == address(got["in"]["a"])
    assert len({address(got[name]) for name in ("z", "t", "row", "n")}) == 4
    cast = folder / "cast.pt"
    run(CONVERT, folder / "tied.pt", cast, "--dtype", "bf16", "--dtype-for", "^a$=f16")
    got = load(cast)
    assert address(got["z"]) == address(got["in"]["a"]) != address(got["a"])
    assert got["a"].dtype == torch.float16


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(5, 4)
        self.lm_head = torch.nn.Linear(4, 5, bias=False)
        self.lm_head.weight = self.wte.weight


def noted(folder):
    """Names that save_model only notes are there for readers that ask for every name, in any way."""
    model = Tied()
    save_model(model, folder / "model.safetensors")
    run(CONVERT, folder / "model.safetensors", folder / "model.fsdp")
    run(CONVERT, folder / "model.safetensors", folder / "model.dcp")
    for way in ("safetensors", "fsdp", "dcp"):
        got = load(converted(folder / f"model.{way}", folder))
        model.load_state_dict(got, strict=True)
        assert way == "dcp" or address(got["lm_head.weight"]) == address(got["wte.weight"]), way


def nesting(folder):
    """Dicts and lists are as they were, whichever way the state came."""
    state = nested_state()
    state |= {"one": [{}], "deep": [[[{}], 1], {}, torch.ones(1)], "empty": {}, "list": [[], [1, "a"]]}
    torch.save(state, folder / "nested.pt")
    for way in ("direct", "fsdp", "hdf5", "dcp"):
        source = folder / "nested.pt"
        if way != "direct":
            run(CONVERT, source, folder / f"by.{way}", "--to", way)
            source = folder / f"by.{way}"
        got = load(converted(source, folder))
        spell = str if way == "dcp" else lambda key: key  # PyTorch's DCP has strings only
        assert tree_same(in_order(state), in_order(got), spell), f"{way}: {got}"
    names = {"model.a": torch.ones(1), "x.0": torch.ones(2), "optim.state.a.exp_avg": torch.ones(3)}
    torch.save(names, folder / "flat.pt")
    assert set(load(converted(folder / "flat.pt", folder))) == set(names), "what was flat was nested"


def tuples(folder):
    """Objects are what they were: tuples, and objects that are not dicts."""
    state = {"random": random.getstate(), "pair": (torch.ones(2), [torch.zeros(1), ()]), "none": (),
             "nested": ((1,), [(2.5, None)]), "state": {0: {"x": (torch.ones(3), 1)}},
             "param_groups": [{"betas": (0.9, 0.999), "params": [0]}]}
    objects = {"state": state, "tensor": torch.arange(3.0), "list": [torch.ones(1), {"a": torch.ones(2)}],
               "tuple": (torch.ones(2), 2), "random": random.getstate(), "number": 5, "empty": []}
    expected = [random.random() for _ in range(3)]
    for name, one in objects.items():
        source, native = folder / f"{name}.pt", folder / f"{name}.fsdp"
        torch.save(one, source)
        run(CONVERT, source, native, "--to", "fsdp")
        for path in (source, native):
            got = load(converted(path, folder))
            assert same(one, got), f"{path.name}: {got}"
            if name in ("state", "random"):
                random.setstate(got["random"] if name == "state" else got)
                assert [random.random() for _ in range(3)] == expected, path.name


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


with tempfile.TemporaryDirectory() as place:
    for test in (everything, records, fixtures, optimizer, tied, noted, nesting, tuples):
        test(Path(place))
        print(f"{test.__name__}: as it should be")
