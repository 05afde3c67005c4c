"""Files that fsdp-convert writes for PyTorch, read with nothing but Python's own zipfile and pickle.

usage: python_reads.py BIN GOLDEN
"""

import io
import pickle
import subprocess
import sys
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path

BIN, GOLDEN = Path(sys.argv[1]), Path(sys.argv[2])
VALUES = GOLDEN / "torchsave/plain_values/data/plain_values.pt"
TENSORS = GOLDEN / "safetensors/all_dtypes/data"


class Known:
    """An object of a class of torch: what made it, and its state."""

    def __init__(self, *args):
        self.args = args

    def __setstate__(self, state):
        self.state = state

    def __hash__(self):
        return id(self)


class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) == ("torch", "Size"):
            return tuple
        if module.split(".")[0] == "torch":
            return type(name, (Known,), {})
        return super().find_class(module, name)

    def persistent_load(self, pid):
        return pid


def convert(source, target, *options):
    subprocess.run([str(BIN / "fsdp-convert"), str(source), str(target), *options], check=True)
    return target


def archive(file):
    """The object of an archive and the bytes of its records."""
    with zipfile.ZipFile(file) as opened:
        assert opened.testzip() is None
        records = {name.split("/", 1)[1]: opened.read(name) for name in opened.namelist()}
    return Reader(io.BytesIO(records["data.pkl"])).load(), records


def flat(item, path=()):
    """As dicts are listed; lists of dicts are not part of this test."""
    if isinstance(item, (dict, OrderedDict)) and (item or not path):
        for key, value in item.items():
            yield from flat(value, (*path, str(key)))
    else:
        yield ".".join(path), item


def plain(item):
    """Gives both sides the types that some formats store in place of others."""
    if isinstance(item, (list, tuple)):
        return [plain(part) for part in item]
    return repr(bytes(item)) if isinstance(item, bytearray) else repr(item)


def values(folder):
    theirs, _ = archive(VALUES)
    mine, records = archive(convert(VALUES, folder / "values.pt", "--drop", "opaque"))
    theirs = dict(flat(theirs))
    assert mine and len(mine) > 10, "values are missing"
    for name, value in flat(mine):
        if isinstance(value, Known):  # a tensor
            continue
        assert plain(value) == plain(theirs[name]), f"{name}: {value!r}, not {theirs[name]!r}"
    assert records["byteorder"] == b"little" and records["version"] == b"3\n"
    assert len(records[".data/serialization_id"]) == 40


def places(folder):
    source = next(TENSORS.iterdir())
    path = convert(source, folder / "tensors.dcp", "--world-size", "3")
    metadata = Reader(io.BytesIO((path / ".metadata").read_bytes())).load().state
    assert metadata["version"] == "1.0.0" and metadata["storage_meta"] is None
    assert set(metadata["planner_data"]) == set(metadata["state_dict_metadata"])
    ends = {}
    for item in sorted((i.state for i in metadata["storage_data"].values()), key=lambda i: i["offset"]):
        file = path / item["relative_path"]
        assert item["offset"] == ends.get(file, 0), item
        ends[file] = item["offset"] + item["length"]
        data = file.read_bytes()[item["offset"] : ends[file]]
        tensor, records = archive(io.BytesIO(data))
        assert type(tensor).__name__ in ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
        assert ".format_version" in records and "data/0" in records
    assert len(ends) == 3
    for file, end in ends.items():
        assert file.stat().st_size == end, file


with tempfile.TemporaryDirectory() as place:
    for test in (values, places):
        test(Path(place))
        print(f"{test.__name__}: as it should be")
