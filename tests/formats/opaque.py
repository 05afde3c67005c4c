"""Values that only Python understands: out of torch.save files and sets of rank files, into what holds blobs,
and listed there as they were.

usage: opaque.py BIN
The pickles are made of stand-ins for the classes of torch, which are written by name.
"""

import datetime
import io
import json
import pathlib
import pickle
import struct
import subprocess
import sys
import tempfile
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

BIN = Path(sys.argv[1])
USAGE = 2
problems = []


def stand_in(module, name, base=object):
    sys.modules.setdefault(module, types.ModuleType(module))
    made = type(name, (base,), {"__module__": module, "__qualname__": name})
    setattr(sys.modules[module], name, made)
    return made


def rebuild_tensor():
    pass


rebuild_tensor.__module__, rebuild_tensor.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
sys.modules["torch._utils"] = types.ModuleType("torch._utils")
sys.modules["torch._utils"]._rebuild_tensor_v2 = rebuild_tensor
FloatStorage = stand_in("torch", "FloatStorage")
Config, Table, Rows = (stand_in("mine", name, base) for name, base in
                       (("Config", object), ("Table", dict), ("Rows", list)))


class Storage:
    def __init__(self, values):
        self.data = struct.pack(f"<{len(values)}f", *values)


class Tensor:
    def __init__(self, storage, offset, count):
        self.arguments = storage, offset, (count,), (1,), False, OrderedDict()

    def __reduce__(self):
        return rebuild_tensor, self.arguments


def tensor(*values):
    return Tensor(Storage(values), 0, len(values))


class Pickler(pickle.Pickler):
    def __init__(self, file, protocol):
        super().__init__(file, protocol)
        self.storages = []

    def persistent_id(self, one):
        if not isinstance(one, Storage):
            return None
        if one not in self.storages:
            self.storages.append(one)
        return "storage", FloatStorage, str(self.storages.index(one)), "cpu", len(one.data) // 4


def save(path, state, protocol=2):
    data = io.BytesIO()
    pickler = Pickler(data, protocol)
    pickler.dump(state)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data.getvalue())
        for number, storage in enumerate(pickler.storages):
            archive.writestr(f"archive/data/{number}", storage.data)
        archive.writestr("archive/version", "3\n")


def run(program, *arguments):
    command = [str(BIN / program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def check(truth, told):
    if not truth:
        problems.append(told)


def listing(path):
    ran = run("fsdp-ls", "--json", "--digest", "sha256", path)
    check(ran.returncode == 0, f"{path}: {ran.stderr}")
    listed = json.loads(ran.stdout) if ran.returncode == 0 else {}
    return {key: listed.get(key) for key in ("tensors", "values")}


def check_same(source, expected, folder, targets):
    for name, *options in targets:
        path = folder / name
        ran = run("fsdp-convert", source, path, *options, "--overwrite")
        check(ran.returncode == 0, f"{source} -> {name}: {ran.returncode} {ran.stderr}")
        check(ran.returncode != 0 or listing(path) == expected, f"{source} -> {name}: {listing(path)}")


def objects():
    shared, cycle = Storage([0.5, 1.5, 2.5, 3.5]), []
    cycle.append(cycle)
    config, table, rows = Config(), Table(a=tensor(7.0)), Rows([1, tensor(8.0)])
    config.weight, config.view = Tensor(shared, 0, 4), Tensor(shared, 1, 2)
    config.big, config.raw, config.text = 1 << 70, b"\xff\0", "grün"
    config.pair = (config.weight, {2, 3})
    return {"config": config, "again": {"config": config}, "table": table, "rows": rows, "set": {1, 2},
            "frozen": frozenset([3]), "mixed": [1, {2, 3}], "when": datetime.datetime(2020, 1, 2),
            "path": pathlib.PurePosixPath("/a"), "class": Config, "weight": config.weight, "inside": cycle,
            "empty": tensor()}


EVERYWHERE = [("a.dcp", "--world-size", "2"), ("a.h5",), ("native", "--to", "fsdp", "--world-size", "2")]


def of_torch_save(folder):
    for protocol in (2, 3, 4, 5):
        source = folder / f"objects-{protocol}.pt"
        save(source, objects(), protocol)
        expected = listing(source)
        check(expected["values"]["config"] == {"opaque": "mine.Config"}, f"{expected}")
        check_same(source, expected, folder, EVERYWHERE)
        check_same(folder / "native", expected, folder, [("from-native.dcp",)])
        check_same(folder / "from-native.dcp", expected, folder, [("from-dcp", "--to", "fsdp")])
        ran = run("fsdp-convert", source, folder / "no.pt")
        check(ran.returncode == USAGE and "--drop opaque" in ran.stderr, f"torch took it: {ran.stderr}")


def too_large(folder):
    """More than fits into memory is not carried, and that is said before work starts."""
    large = Config()
    large.weight = Tensor(Storage([0.0] * (17 << 20)), 0, 17 << 20)
    save(folder / "large.pt", {"large": large})
    ran = run("fsdp-convert", folder / "large.pt", folder / "large.dcp", "-n")
    check(ran.returncode == USAGE and "'large'" in ran.stderr, f"{ran.returncode} {ran.stderr}")


def of_ranks(folder):
    """Tensors that differ from rank to rank, objects beside them."""
    (folder / "ranks").mkdir()
    for rank in range(3):
        values = {"rng": tensor(rank, 1.0), "same": tensor(4.0), "nest": {"of": [Config(), rank]}}
        save(folder / f"ranks/state_rank_{rank}.pt", values)
    expected = listing(folder / "ranks")
    inner = expected["values"]["rng"]["per_rank"]
    check(len(inner) == 3 and all("tensor" in one for one in inner), f"{expected}")
    check_same(folder / "ranks", expected, folder, EVERYWHERE[1:])
    ran = run("fsdp-convert", folder / "ranks", folder / "ranks.dcp")
    check(ran.returncode == USAGE and "'rng'" in ran.stderr, f"dcp took it: {ran.stderr}")


with tempfile.TemporaryDirectory() as place:
    for test in (of_torch_save, too_large, of_ranks):
        test(Path(place))
print("\n".join(problems) or "what only Python understands goes along")
sys.exit(1 if problems else 0)
