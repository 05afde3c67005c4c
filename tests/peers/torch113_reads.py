"""PyTorch 1.13, the oldest that we write for, loads our torch.save files with the dtypes that it has, and
items of our DCP directories. Debian's python3-torch is one.

usage: torch113_reads.py FSDP_CONVERT     exit 77: no PyTorch 1.13, not required
"""

import io
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import torch
except ImportError:
    print("there is no PyTorch for the system's Python: ./dev peers installs it")
    sys.exit(77)

if not torch.__version__.startswith("1.13."):
    print(f"the system's PyTorch is {torch.__version__}: what 1.13 reads was not tried")
    sys.exit(77)
CONVERT = sys.argv[1]
DTYPES = """float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64
complex128""".split()
SHAPES = [(), (7,), (0, 3), (4, 3), (3, 5, 2)]


def made():
    state = {}
    for number, name in enumerate(DTYPES):
        for shape in SHAPES:
            count = torch.Size(shape).numel()
            dtype = getattr(torch, name)
            state[f"{name}.{shape}"] = (torch.arange(count) + number).reshape(shape).to(dtype)
    return state


def convert(source, target, *options):
    subprocess.run([CONVERT, str(source), str(target), *options], check=True, stdout=subprocess.DEVNULL)
    return target


def check(state, got, what):
    assert list(state) == list(got), f"{what}: {set(state) ^ set(got)}"
    for name, tensor in state.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), f"{what}: {name}"


def whole(folder, state):
    values = {"list": [1, 2.5, "a", None, True], "big": 2**70, "bytes": b"\xff\0", "complex": 1j}
    torch.save({**state, **values}, folder / "source.pt")
    path = convert(folder / "source.pt", folder / "written.pt")
    got = torch.load(path)
    check(state, {name: got[name] for name in state}, "written.pt")
    assert {name: got[name] for name in values} == values
    # weights_only of 1.13 knows fewer functions: tensors and plain values only.
    torch.save(state, folder / "source.pt")
    path = convert(folder / "source.pt", folder / "written.pt", "--overwrite")
    check(state, torch.load(path, weights_only=True), "written.pt, weights only")


class AnyClass:
    """1.13 has no torch.distributed.checkpoint: what its classes hold is in the members."""

    def __setstate__(self, state):
        self.state = state

    def __hash__(self):
        return id(self)


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if module.startswith("torch.distributed.checkpoint"):
            return (lambda number: number) if name == "_MEM_FORMAT_ENCODING" else type(name, (AnyClass,), {})
        return super().find_class(module, name)


def items(folder, state):
    torch.save(state, folder / "source.pt")
    path = convert(folder / "source.pt", folder / "written.dcp", "--world-size", "3")
    metadata = Unpickler(io.BytesIO((path / ".metadata").read_bytes())).load().state
    read = 0
    for index, place in metadata["storage_data"].items():
        index, place = index.state, place.state
        data = (path / place["relative_path"]).read_bytes()[place["offset"] :][: place["length"]]
        box = torch.load(io.BytesIO(data))
        whole = state[index["fqn"]]
        for dim, low in enumerate(index["offset"]):
            whole = whole.narrow(dim, low, box.shape[dim])
        assert torch.equal(whole, box), index
        read += 1
    assert read > len(state)


with tempfile.TemporaryDirectory() as place:
    for test in (whole, items):
        test(Path(place), made())
        print(f"PyTorch {torch.__version__}, {test.__name__}: as it should be")
