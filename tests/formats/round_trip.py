"""Real files are copied into every format that is written, and hold the same afterwards.

usage: round_trip.py BIN GOLDEN
With FSDP_TEST_FEWER (a slow build) every second one goes into one format, all formats in turn; the others go
into those of write_formats.py.
Files that the library of a format wrote itself come out byte for byte; NumPy reads what is written.
"""

import json
import os
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy

from cases import sources
from tools import TENSOR_KINDS, check, every_name, listing, problems, run

GOLDEN = Path(sys.argv[2])
NOT_IN = {
    "safetensors": {"c128", "complex32", "bcomplex32"},
    "hf": {"c128", "complex32", "bcomplex32"},
    "npz": {"bf16", "complex32", "bcomplex32", "f8_e4m3fn", "f8_e4m3fnuz", "f8_e5m2", "f8_e5m2fnuz",
            "f8_e8m0fnu", "f6_e2m3", "f6_e3m2", "f4_e2m1fn_x2"},
}
GROUPS = ("safetensors", "hf", "npz", "dcp", "torchsave", "rankfiles", "fsdp1")
SMALL_SHARDS = 3000
# every n-th target of the cases
USUAL_SAMPLE = 2 * len(NOT_IN) if "FSDP_TEST_FEWER" in os.environ else 1
EVERY = int(os.environ.get("FSDP_TEST_SAMPLE") or USUAL_SAMPLE)


def convert(source, target, path, *options):
    ran = run("fsdp-convert", source, path, "--to", target, "--only", "all", "--no-sync", *options)
    check(ran.returncode == 0, f"{source} -> {target}: {ran.stderr}")
    return ran.returncode == 0


def held(tensors, target):
    """The entries that the target can hold."""
    absent = NOT_IN[target]
    return {
        name: {key: tensor[key] for key in ("dtype", "shape", "sha256")}
        for name, tensor in tensors.items()
        if tensor["dtype"] not in absent
    }


def check_hf(path, expected):
    index = path / "model.safetensors.index.json"
    if not index.exists():
        check((path / "model.safetensors").exists(), f"{path}: neither index nor model.safetensors")
        return
    said = json.loads(index.read_text())
    files = sorted(set(said["weight_map"].values()))
    wanted = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    check(files == wanted, f"{path}: files are {files}")
    check(set(said["weight_map"]) == set(expected), f"{path}: weight_map has other names")
    sizes = sum((path / name).stat().st_size for name in files)
    check(0 < said["metadata"]["total_size"] <= sizes, f"{path}: total_size {said['metadata']}")


def check_numpy(path, expected):
    with zipfile.ZipFile(path) as archive:
        check(archive.testzip() is None, f"{path}: zipfile finds a wrong CRC")
        for member in archive.infolist():
            with path.open("rb") as file:
                file.seek(member.header_offset + 26)
                sizes = file.read(4)
            data = member.header_offset + 30 + sizes[0] + 256 * sizes[1] + sizes[2] + 256 * sizes[3]
            check(data % 64 == 0, f"{path}: {member.filename} begins at {data}")
    arrays = numpy.load(path)
    for name, tensor in expected.items():
        leads_out = name.startswith("/") or ".." in name.split("/") or "\\" in name or name[1:2] == ":"
        if "\0" in name or leads_out:  # escaped, with its true name in %names
            check("%names" in arrays, f"{path}: the true name of {name!r} is not kept")
            continue
        check(list(arrays[name].shape) == tensor["shape"], f"{path}: {name} has another shape")


def check_copy(case, source, listed, target, folder):
    path = folder / f"copy.{target}"
    before = held(every_name(listed) if target == "npz" else listed["tensors"], target)
    if not before:
        return 0
    drops = ["values", "opaque", *TENSOR_KINDS, *(f"dtype:{dtype}" for dtype in NOT_IN[target])]
    options = [word for drop in drops for word in ("--drop", drop)]
    if target == "hf":
        options += ["--max-shard-size", str(SMALL_SHARDS)]
    if not convert(source, target, path, *options):
        return 0
    after = listing(path)["tensors"]
    check(before == after, f"{case.name} -> {target}: the tensors differ")
    if target == "hf":
        check_hf(path, before)
    if target == "npz":
        check_numpy(path, before)
    return 1


def check_copies(case, source, number):
    targets, listed = list(NOT_IN), listing(source)
    # a case begins with the next target
    targets = [target for i, target in enumerate(targets)
               if (number * len(targets) + (i + number) % len(targets)) % EVERY == 0]
    with tempfile.TemporaryDirectory() as folder:
        return sum(check_copy(case, source, listed, target, Path(folder)) for target in targets)


def is_canonical(path):
    """The library's own order: the file can be told again from its tensors and metadata."""
    head = path.read_bytes()
    size = int.from_bytes(head[:8], "little")
    return json.loads(head[8 : 8 + size]).get("__metadata__") == {"format": "pt"}


def same_bytes(folder):
    """The number of the library's own files that come out as they were."""
    count = 0
    for number, path in enumerate(sorted(GOLDEN.glob("*/*/data/**/*.safetensors"))):
        if not {"hostile", "layouts"} & set(path.parts) and is_canonical(path):
            copy = folder / f"{number}.safetensors"
            convert(path, "safetensors", copy)
            check(path.read_bytes() == copy.read_bytes(), f"{path}: other bytes than the library's")
            count += 1
    return count


def main():
    copied = seen = 0
    for expected in sorted(GOLDEN.glob("*/*/expected.json")):
        case = expected.parent
        told = json.loads(expected.read_text())
        if case.parent.name not in GROUPS or not (case / "data").is_dir():
            continue
        if told.get("refuse_or_read") or not told["tensors"]:
            continue
        for source in sources(case):
            copied += check_copies(case, source, seen)
            seen += 1
    with tempfile.TemporaryDirectory() as folder:
        same = same_bytes(Path(folder))
    check(copied > 40 // EVERY and same > 5, "too little was compared")
    print(f"{copied} copies, {same} files compared byte for byte")


main()
print("\n".join(problems) or "all as before")
sys.exit(1 if problems else 0)
