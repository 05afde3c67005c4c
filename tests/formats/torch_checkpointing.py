"""Directories of torch_checkpointing: written from every kind of file, read in every form, refused.

usage: torch_checkpointing.py BIN GOLDEN
"""

import collections
import hashlib
import json
import os
import pickle
import shutil
import struct
import sys
import tempfile
from pathlib import Path

from cases import sources
from check_listing import differences
from tools import TENSOR_KINDS, check, every_name, listing, problems, run

GOLDEN = Path(sys.argv[2])
CASES = GOLDEN / "torch_checkpointing"
GROUPS = ["safetensors", "torchsave", "dcp", "rankfiles", "torch_checkpointing"]
DROPS = [word for what in ("opaque", "dtype:f6_e2m3", "dtype:f6_e3m2", *TENSOR_KINDS)
         for word in ("--drop", what)]
USAGE, UNKNOWN, DAMAGED, REFUSED = 2, 3, 4, 5
FEWER = "FSDP_TEST_FEWER" in os.environ
ITEMS = ("", "model.", "optim.", "other.")


# --- written ---

def is_opaque(value):
    if isinstance(value, dict):
        return not {"opaque", "tensor", "per_rank"}.isdisjoint(value) or any(map(is_opaque, value.values()))
    return isinstance(value, list) and any(map(is_opaque, value))


def has_dict(value):
    if isinstance(value, dict):
        return "dict" in value
    return isinstance(value, list) and any(map(has_dict, value))


def named_as_written(before, after):
    """The listing with each name in the item that it got."""
    found = {"tensors": {}, "values": {}}
    for kind, entries in before.items():
        for name, entry in entries.items():
            names = [item + name if name else item[:-1] for item in ITEMS]
            found[kind][next((new for new in names if new in after[kind]), name)] = entry
    return found


def check_written(source, target, options):
    before = listing(source)
    if before is None:
        return False
    expected = {
        "tensors": {k: v for k, v in every_name(before).items() if not v["dtype"].startswith("f6_")},
        "values": {k: v for k, v in before["values"].items() if not is_opaque(v) and not has_dict(v)},
    }
    drops = [word for name, value in before["values"].items() if has_dict(value)
             for word in ("--drop", f"^{name}$")]
    if not expected["tensors"]:
        return False
    ran = run("fsdp-convert", source, target, "--to", "torch_checkpointing", *options, *DROPS, *drops,
              "--names", "keep")
    where = f"{source.parent.name}/{source.name}"
    if ran.returncode == USAGE and "cannot be a value and have entries" in ran.stderr:
        return False
    check(ran.returncode == 0, f"{where}: status {ran.returncode}: {ran.stderr}")
    after = listing(target)
    if ran.returncode != 0 or after is None:
        return True
    after = {"tensors": every_name(after), "values": after["values"]}
    for line in differences(named_as_written(expected, after), after):
        check(False, f"{where}: {line}")
    return True


def every_kind_is_written(place):
    layouts = [["--world-size", "3"], ["--mesh", "rep=2,dp=2"], ["--mesh", "dp=2,tp=2", "--shard-dim", "1"]]
    cases = [data.parent for group in GROUPS for data in sorted((GOLDEN / group).glob("*/data"))]
    count = 0
    for number, source in enumerate(path for case in cases for path in sources(case)):
        if FEWER and number % 6:
            continue
        count += check_written(source, place / f"written-{number}", layouts[number % 3])
    check(count > (3 if FEWER else 20), f"only {count} files were written")


# --- read ---

def copy(place, case, name):
    path = place / name
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(CASES / case / "data", path)
    return path


def metadata_of(path):
    return pickle.loads((path / "metadata.pkl").read_bytes())


def put_metadata(path, metadata):
    (path / "metadata.pkl").write_bytes(pickle.dumps(metadata, protocol=2))


def check_same(expected, path, what):
    after = listing(path)
    check(after is not None, f"{what}: {run('fsdp-ls', path).stderr}")
    if after is not None:
        for line in differences(expected, after):
            check(False, f"{what}: {line}")


def old_metadata(metadata):
    """Version 1.0 of the same."""
    items = metadata["metadata"]
    return {
        "metadata": {json.dumps([item, *json.loads(path)]): groups for item, table in items.items()
                     for path, groups in table["nested_path_to_metadata"].items()},
        "rank_to_layout_info_mappings": {
            str(rank): {item: table["rank_to_layout_info"][rank] for item, table in items.items()}
            for rank in range(metadata["world_size"])},
        "world_size": metadata["world_size"],
    }


def layout(path, form):
    return {"file_path": path, "serialization_format": {"type": f"{form}Serialization"}}


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes)"""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in tensors.values()))


def whole_tensors(path, place):
    """name -> (dtype, shape, bytes), by way of one safetensors file."""
    file = place / "whole.safetensors"
    file.unlink(missing_ok=True)
    ran = run("fsdp-convert", path, file, "-I", "^model", "--names", "keep")
    check(ran.returncode == 0, ran.stderr)
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return {name: (one["dtype"], one["shape"], data[8 + size:][slice(*one["data_offsets"])])
            for name, one in header.items()}


def rows_of(tensor, rank, world):
    """The rank's part of dim 0, and its first row, as torch.chunk cuts."""
    dtype, shape, data = tensor
    if not shape:
        return 0, tensor
    step = -(-shape[0] // world)
    lo, end = min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
    row = len(data) // shape[0]
    return lo, (dtype, [end - lo, *shape[1:]], data[lo * row:end * row])


def as_safetensors(place, path, by_pieces):
    """The item `model` as plain parts in safetensors files, which the metadata places."""
    metadata = metadata_of(path)
    world, item = metadata["world_size"], metadata["metadata"]["model"]
    tables = item["nested_path_to_metadata"]
    tensors = {name.removeprefix("model."): one for name, one in whole_tensors(path, place).items()}
    (path / "shards").mkdir()
    pieces = {name: [] for name in tensors}
    for rank in range(world):
        (path / f"model_{rank}.pt").unlink()
        item["rank_to_layout_info"][rank] = layout(f"shards/m{rank}.safetensors", "Safetensors")
        own = {}
        for name, tensor in tensors.items():
            (group,) = tables[json.dumps([name])]
            cut = group["sharding_metadata"]["data"]["placements"][-1]["type"] == "Shard"
            lo, own[name] = rows_of(tensor, rank, world) if cut else (0, tensor)
            pieces[name].append((cut, lo, own[name][1]))
        write_safetensors(path / "shards" / f"m{rank}.safetensors", own)
    for name, tensor in tensors.items():
        (group,) = tables[json.dumps([name])]
        data = group["sharding_metadata"]["data"]
        if by_pieces and pieces[name][0][0]:
            rest = [0] * (len(tensor[1]) - 1)
            tables[json.dumps([name])] = [
                {"ranks": (rank,), "sharding_metadata": {"type": "default_tensor_v1", "data": {
                    "global_shape": data["global_shape"], "dtype": data["dtype"],
                    "global_offsets": [[lo, *rest]], "local_offsets": [[0, *rest]],
                    "local_sizes": [shape]}}}
                for rank, (_, lo, shape) in enumerate(pieces[name])]
    put_metadata(path, metadata)


def every_form_is_read(place):
    expected = listing(CASES / "plain-w3" / "data")
    path = copy(place, "hsdp-w4", "no-metadata")
    (path / "metadata.pkl").unlink()
    check_same(listing(CASES / "hsdp-w4" / "data"), path, "without metadata")
    path = copy(place, "plain-w3", "old")
    put_metadata(path, old_metadata(metadata_of(path)))
    check_same(expected, path, "version 1.0")
    for by_pieces in (False, True):
        path = copy(place, "plain-w3", f"packed-{by_pieces}")
        as_safetensors(place, path, by_pieces)
        check_same(expected, path, f"safetensors, by pieces: {by_pieces}")
    path = copy(place, "plain-w3", "values")
    for rank in range(3):
        big = "1" + "0" * 30
        (path / f"config_{rank}.json").write_text(f'{{"a": [1, 2.5, null, true], "b": "x", "big": {big}}}')
        (path / f"own_{rank}.json").write_text(str(rank))
        (path / f"raw_{rank}.dat").write_bytes(b"\0\1")
    values = listing(path)["values"]
    check(values["config"] == {"dict": [["a", [1, 2.5, None, True]], ["b", "x"],
                                        ["big", {"int": "1" + "0" * 30}]]}, values.get("config"))
    check(values["raw"] == {"bytes": 2, "sha256": hashlib.sha256(b"\0\1").hexdigest()}, values.get("raw"))
    check(values["own"] == {"per_rank": [0, 1, 2]}, values.get("own"))


# --- refused ---

class Runs:
    def __reduce__(self):
        return (open, ("executed", "w"))


def tensor_of(metadata, name="emb.weight"):
    (group,) = metadata["metadata"]["model"]["nested_path_to_metadata"][json.dumps([name])]
    return group["sharding_metadata"]["data"]


def changed(place, name, change):
    path = copy(place, "plain-w3", name)
    metadata = metadata_of(path)
    change(metadata, metadata["metadata"]["model"])
    put_metadata(path, metadata)
    return path


def mesh_of(*ranks):
    return {"device_type": "cpu", "mesh_shape": (3,), "mesh_data": ranks, "mesh_dim_names": None}


def damages():
    """name -> (status, words, change of the metadata and its item `model`)"""
    def set_layout(path):
        def change(_, item):
            item["rank_to_layout_info"][1] = layout(path, "Torch")
        return change

    def set_data(member, value):
        return lambda metadata, _: tensor_of(metadata).update({member: value})

    return {
        "world": (DAMAGED, "world size is 2", lambda m, _: m.update(world_size=2)),
        "no-world": (DAMAGED, "world size", lambda m, _: m.update(world_size=0)),
        "huge-world": (DAMAGED, "world size", lambda m, _: m.update(world_size=1 << 62)),
        "version": (REFUSED, "version '9", lambda m, _: m.update(version="9")),
        "call": (REFUSED, "nothing was run", lambda m, _: m.update(more=Runs())),
        "object": (REFUSED, "object of", lambda m, _: m.update(more=collections.OrderedDict(a=1))),
        "escape": (REFUSED, "not below", set_layout("../model_1.pt")),
        "absolute": (REFUSED, "not below", set_layout("/etc/passwd")),
        "one-file": (DAMAGED, "two items or ranks", set_layout("model_0.pt")),
        "no-file": (DAMAGED, "files of 2 ranks", lambda _, item: item["rank_to_layout_info"].pop(1)),
        "dtype": (DAMAGED, "different dtype", set_data("dtype", "torch.float16")),
        "shape": (DAMAGED, "different shape", set_data("global_shape", [12, 6])),
        "placement": (DAMAGED, "different placement", set_data("placements", [{"type": "Shard", "dim": 1}])),
        "cut": (DAMAGED, "dim", set_data("placements", [{"type": "Shard", "dim": 2}])),
        "kind": (REFUSED, "placement", set_data("placements", [{"type": "Partial"}])),
        "mesh": (DAMAGED, "device mesh", set_data(
            "mesh_spec", mesh_of(0, 2, 1))),
        "mesh-rank": (DAMAGED, "device mesh", set_data(
            "mesh_spec", mesh_of(0, 1, 3))),
        "absent": (DAMAGED, "model.gone", lambda _, item: item["nested_path_to_metadata"].update(
            {'["gone"]': item["nested_path_to_metadata"]['["emb.weight"]']})),
        "key": (DAMAGED, "name of an item", lambda m, item: m["metadata"].update({"a/b": item})),
    }


def check_refused(path, status, words, what):
    ran = run("fsdp-ls", path)
    check(ran.returncode == status and words in ran.stderr, f"{what}: {ran.returncode}: {ran.stderr}")


def damaged_ones_are_refused(place):
    for name, (status, words, change) in damages().items():
        check_refused(changed(place, f"bad-{name}", change), status, words, name)
    check(not Path("executed").exists(), "the pickle ran")
    path = copy(place, "plain-w3", "lost")
    (path / "model_1.pt").unlink()
    check_refused(path, DAMAGED, "there is no 'model_1.pt'", "a rank without its file")
    ran = run("fsdp-convert", path, place / "rest.dcp", "--allow-missing", "^model")
    check(ran.returncode == 0, f"the rest: {ran.stderr}")
    rest = listing(place / "rest.dcp")
    check(rest and "model.count" in rest["tensors"] and "model.emb.weight" not in rest["tensors"], "the rest")
    path = copy(place, "plain-w3", "lost-value")
    (path / "step_2.pt").unlink()
    check_refused(path, DAMAGED, "there is no 'step_2.pt'", "a rank without its value")
    path = copy(place, "plain-w3", "stray")
    shutil.copy(path / "model_0.pt", path / "model_3.pt")
    check_refused(path, DAMAGED, "'model_3.pt' is of rank 3", "a rank too many")
    path = copy(place, "plain-w3", "swapped")
    (path / "model_0.pt").rename(path / "x")
    (path / "model_1.pt").rename(path / "model_0.pt")
    (path / "x").rename(path / "model_1.pt")
    check_refused(path, DAMAGED, "", "files of swapped ranks")
    for name in ("metadata.pkl", "model_2.pt"):
        data = (CASES / "plain-w3" / "data" / name).read_bytes()
        path = copy(place, "plain-w3", "short")
        for size in range(0, len(data) - 1, max(1, len(data) // 40)):
            (path / name).write_bytes(data[:size])
            ran = run("fsdp-ls", path)
            check(ran.returncode in (UNKNOWN, DAMAGED, REFUSED), f"{name} of {size} bytes: {ran.returncode}")


def values_need_an_item(place):
    """Names that no item can have."""
    path = place / "key.pt"
    ran = run("fsdp-convert", CASES / "plain-w3" / "data", path, "--rename", "s/^step$/a value/",
              "--names", "keep")
    check(ran.returncode == 0, ran.stderr)
    ran = run("fsdp-convert", path, place / "keyed", "--to", "torch_checkpointing")
    check(ran.returncode == 0, ran.stderr)
    keyed = listing(place / "keyed") or {"values": {}}
    check("other.a value" in keyed["values"], "a value without an item")


with tempfile.TemporaryDirectory() as folder:
    every_form_is_read(Path(folder))
    damaged_ones_are_refused(Path(folder))
    values_need_an_item(Path(folder))
    every_kind_is_written(Path(folder))
print("\n".join(map(str, problems)) or "directories of torch_checkpointing are written, read and refused")
sys.exit(1 if problems else 0)
