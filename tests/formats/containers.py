"""Containers of a pickle hold for the tools what they hold for Python: OrderedDicts as Python 2 wrote them,
containers that are made of their items, equal keys. Storages without tensors are damage.

usage: containers.py BIN
"""

import io
import pickle
import struct
import sys
import tempfile
import zipfile
from pathlib import Path

from tools import check, listing, problems, run

DAMAGED = 4
DATA = {"0": struct.pack("<3f", 1, 2, 3), "1": struct.pack("<2f", 4, 5)}


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def items(*nodes):
    return b"(" + b"".join(nodes) + b"t"


def listed(*nodes):
    return b"](" + b"".join(nodes) + b"e"


def storage(key):
    return items(text("storage"), b"ctorch\nFloatStorage\n", text(key), text("cpu"),
                 b"K" + bytes([len(DATA[key]) // 4])) + b"Q"


def tensor(key, count=None, flags=b""):
    count = len(DATA[key]) // 4 if count is None else count
    no_hooks = b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + items(
        storage(key), b"K\0", b"K" + bytes([count]) + b"\x85", b"K\1\x85", b"\x89", no_hooks, flags) + b"R"


class Loaded:
    """A tensor, as its storage and its flags."""

    def __init__(self, storage, offset, shape, strides, grad, hooks, flags=None):
        self.data, self.is_negative = DATA[storage], bool((flags or {}).get("neg"))
        del offset, shape, strides, grad, hooks


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if module == "torch._utils":
            return Loaded
        return name if module == "torch" else super().find_class(module, name)

    def persistent_load(self, pid):
        return pid[2]


def named(value, name=""):
    """Values that Python loaded, by the names that the tools give."""
    if isinstance(value, Loaded):
        return {name: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = {}
    for key, item in pairs:
        found.update(named(item, f"{name}.{key}" if name else str(key)))
    return found


def write(path, pickled):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        for key, data in DATA.items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", "3\n")


def spelled(value):
    """The kinds of all containers, and what is in them."""
    if isinstance(value, Loaded):
        return value.data
    if isinstance(value, dict):
        return {"dict": [(key, spelled(item)) for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [spelled(item) for item in value]}
    return value


def loaded_from(path):
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if "/data/" in name]
        DATA.update((name.split("/")[-1], archive.read(name)) for name in names)
        return spelled(Unpickler(io.BytesIO(archive.read("archive/data.pkl"))).load())


def number(value):
    return b"K" + bytes([value])


def shapes():
    """Objects whose containers are the same after a copy, by the way of a native checkpoint, too."""
    pair, empty, sequence = items(tensor("0"), tensor("1")), b")", listed(tensor("0"), tensor("1"))
    return {
        "tensor": tensor("0"), "list": sequence, "tuple": pair, "value": number(5), "no list": b"]",
        "tuple of values": items(number(3), items(number(1), number(2)), b"N"),
        "tuple and value": items(tensor("0"), number(2)),
        "key": b"}(" + text("") + tensor("0") + b"u",
        "tuples": b"}(" + text("t") + pair + text("e") + empty + text("n") + listed(empty, items(number(1)))
                  + text("d") + items(listed(tensor("0")), b"}(" + text("x") + items(tensor("1")) + b"u")
                  + text("state") + b"}(K\0}(" + text("x") + items(tensor("0"), empty) + b"uu" + b"u",
    }  # fmt: skip


OTHER_SHAPES = [("list", "tuple"), ("tensor", "key"), ("no list", "no tuple")]


def check_shapes(folder):
    made = {**shapes(), "no tuple": b")"}
    stored = dict(DATA)
    for name, pickled in made.items():
        DATA.clear()
        DATA.update(stored)
        source, native = folder / f"{name}.pt", folder / "native"
        write(source, b"\x80\2" + pickled + b".")
        expected = loaded_from(source)
        for path, *options in ((folder / "copy.pt", source), (native, source, "--to", "fsdp"),
                               (folder / "back.pt", native)):
            ran = run("fsdp-convert", *options, path, "--overwrite")
            check(ran.returncode == 0, f"{name}: {ran.stderr}")
            compared = run("fsdp-diff", source, path)
            check(compared.returncode == 0, f"{name}: {compared.stdout}")
            found = expected if path == native else loaded_from(path)
            check(found == expected, f"{name}: {found}, not {expected}")
    for one, other in OTHER_SHAPES:
        compared = run("fsdp-diff", folder / f"{one}.pt", folder / f"{other}.pt")
        check(compared.returncode == 1 and "= 0 equal" in compared.stdout, f"{one}: {compared.stdout}")
    DATA.clear()
    DATA.update(stored)


def global_of(name, *args):
    module = "__builtin__" if name == "list" else "collections"
    return f"c{module}\n{name}\n".encode() + (items(*args) + b"R" if args else b"")


PAIRS = listed(listed(text("a"), tensor("0")), listed(text("b"), tensor("1")))
CASES = {
    "ordered": global_of("OrderedDict", PAIRS),
    "tuples": global_of("OrderedDict", listed(items(text("a"), tensor("0")))),
    "default": global_of("defaultdict", global_of("list"), PAIRS),
    "of a dict": global_of("OrderedDict", b"}(" + text("a") + tensor("0") + b"u"),
    "and more": global_of("OrderedDict", PAIRS) + b"(" + text("c") + tensor("0") + b"u",
    "inside": b"}(" + text("model") + global_of("OrderedDict", PAIRS) + b"u",
    "deque": b"}(" + text("q") + global_of("deque", listed(tensor("0"), tensor("1")), b"K\2") + b"u",
    "equal keys": b"}(K\1" + tensor("0") + b"G" + struct.pack(">d", 1) + tensor("0") + b"\x88" + tensor("1")
                  + text("x") + tensor("1") + text("x") + tensor("0") + b"u",
    "negative": b"}(" + text("a") + tensor("0", flags=b"}(" + text("neg") + b"K\1u") + text("b")
                + tensor("1", flags=b"}(" + text("neg") + b"K\0u") + b"u",
}  # fmt: skip
WITHOUT_TENSORS = {
    "a storage": b"}(" + text("a") + storage("0") + b"u",
    "no elements": b"}(" + text("a") + tensor("0", count=0) + b"u",
}


def check_case(folder, name, pickled):
    path = folder / "case.pt"
    write(path, b"\x80\2" + pickled + b".")
    expected = named(Unpickler(io.BytesIO(b"\x80\2" + pickled + b".")).load())
    found = (listing(path) or {"tensors": {}})["tensors"]
    check(sorted(found) == sorted(expected), f"{name}: {sorted(found)}, not {sorted(expected)}")
    run("fsdp-convert", "-q", path, folder / "case.npz", "--to", "npz", "--overwrite")
    with zipfile.ZipFile(folder / "case.npz") as archive:
        for key, loaded in expected.items():
            count = len(loaded.data) // 4
            sign = -1 if loaded.is_negative else 1
            wanted = [sign * x for x in struct.unpack(f"<{count}f", loaded.data)]
            data = archive.read(f"{key}.npy")[-4 * count:]
            check(list(struct.unpack(f"<{count}f", data)) == wanted, f"{name}: {key} has other values")


def main():
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, pickled in CASES.items():
            check_case(folder, name, pickled)
        check_shapes(folder)
        for name, pickled in WITHOUT_TENSORS.items():
            write(folder / "none.pt", b"\x80\2" + pickled + b".")
            refused = run("fsdp-ls", folder / "none.pt")
            check(refused.returncode == DAMAGED and "no tensor with elements" in refused.stderr,
                  f"{name}: {refused.returncode} {refused.stderr}")
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(CASES)} pickles are listed as Python loads them, {len(WITHOUT_TENSORS)} are damage")


main()
