"""Up to 64 dimensions and values 1,000 deep are taken by every format that has them; more is exit 9.
So are names of which a long beginning stands before many others. Archives of torch.save are stored
and have a version that is known.

usage: limits.py BIN
"""

import json
import pickle
import struct
import sys
import tempfile
import zipfile
from pathlib import Path

import h5py

from tools import check, list_path, problems, run

DIMS, DEPTH, DATASET_DIMS = 64, 1000, 32
UNKNOWN, DAMAGED, REFUSED, LIMIT = 3, 4, 5, 9


def shape_of(dims):
    """Long at both ends."""
    return [4, *[1] * (dims - 3), 3, 2]


def write_safetensors(path, shape):
    head = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 96]}}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + struct.pack("<24f", *range(24)))


def write_npy(path, shape):
    head = str({"descr": "<f4", "fortran_order": False, "shape": tuple(shape)}).encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    path.write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + struct.pack("<24f", *range(24)))


def write_torch(path, item):
    """item: what the pickle holds, opcodes of protocol 2."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\2" + item + b".")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")


def write_records(path, records, packed=()):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            way = zipfile.ZIP_DEFLATED if name in packed else zipfile.ZIP_STORED
            archive.writestr(f"archive/{name}", data, way)


def deep_list(depth):
    return b"}U\1v" + b"]" * depth + b"a" * (depth - 1) + b"s"


def tensors(path):
    ran = list_path(path)
    check(ran.returncode == 0, f"{path.name}: {ran.stderr}")
    return json.loads(ran.stdout)["tensors"] if ran.returncode == 0 else None


def convert(source, target, *options):
    ran = run("fsdp-convert", source, target, *options)
    check(ran.returncode == 0, f"{source.name} -> {target.name}: {ran.returncode} {ran.stderr}")
    return target


def many_dims(folder):
    source = folder / "source.safetensors"
    write_safetensors(source, shape_of(DIMS))
    expected = tensors(source)
    check(expected["w"]["shape"] == shape_of(DIMS), f"another shape: {expected}")
    targets = [("one.h5",), ("a.npz",), ("a.pt",), ("a.dcp", "--world-size", "3")]
    targets += [("sharded", "--world-size", "3"), ("columns", "--world-size", "3", "--shard-dim", "62")]
    targets += [("local", "--kind", "local", "--world-size", "2"), ("full", "--kind", "full")]
    for name, *options in targets:
        target = convert(source, folder / name, *options)
        check(tensors(target) == expected, f"{name}: {tensors(target)}")
        back = convert(target, folder / f"{name}.safetensors", "--only", "all")
        check(tensors(back) == expected, f"{name} and back: {tensors(back)}")
        verified = run("fsdp-verify", "--deep", target)
        check(verified.returncode == 0, f"{name}: {verified.stdout} {verified.stderr}")
    with h5py.File(folder / "one.h5") as file:
        folded = [4, *[1] * (DATASET_DIMS - 2), 6]
        check(list(file["w"].shape) == folded, f"h5py sees {file['w'].shape}")
        check(list(file["w"][()].ravel()) == list(range(24)), "h5py sees other elements")
    with h5py.File(folder / "sharded" / "index.h5") as file:
        check("w" not in file, "the view shows what it cannot")


def too_many_dims(folder):
    for name, write in (("a.safetensors", write_safetensors), ("a.npy", write_npy)):
        write(folder / name, shape_of(DIMS))
        check(list(tensors(folder / name).values())[0]["shape"] == shape_of(DIMS), name)
        write(folder / name, shape_of(DIMS + 1))
        ran = run("fsdp-ls", folder / name)
        check(ran.returncode == LIMIT, f"{name} of {DIMS + 1} dims: {ran.returncode} {ran.stderr}")


def deep_values(folder):
    source = folder / "deep.pt"
    write_torch(source, deep_list(DEPTH - 1))
    for name, *options in (("native", "--to", "fsdp"), ("b.h5",), ("b.dcp", "--to", "dcp"), ("b.pt",)):
        target = convert(source, folder / name, *options)
        listings = [run("fsdp-ls", "--json", path) for path in (source, target)]
        failed = [ran for ran in listings if ran.returncode != 0 or '"values"' not in ran.stdout]
        for ran in failed:
            check(False, f"{name}: {ran.args}: {ran.returncode} {ran.stderr} {ran.stdout[:200]}")
        if failed:
            continue
        values = [ran.stdout[ran.stdout.index('"values"') :].split("}")[0] for ran in listings]
        check(values[0] == values[1] and values[0].count("[") == DEPTH - 1, f"{name}: other values")
    write_torch(source, deep_list(DEPTH + 1))
    ran = run("fsdp-ls", source)
    check(ran.returncode == LIMIT, f"lists {DEPTH + 1} deep: {ran.returncode} {ran.stderr}")
    pickle.loads(b"\x80\2" + deep_list(3) + b".")  # it is what Python means


def text(data):
    return b"X" + struct.pack("<I", len(data)) + data


def long_names(folder):
    """A key of 60,000 bytes before the keys of 60,000 numbers: 3.6 GB of names in a file of 420 KB."""
    numbers = b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(60000))
    source = folder / "names.pt"
    tree = b"}" + text(b"k" * 60000) + b"}(" + numbers + b"us"
    write_torch(source, tree)
    (folder / "ranks").mkdir()
    for rank in range(2):
        write_torch(folder / "ranks" / f"model_rank_{rank}.pt", tree)
    for path in (source, folder / "ranks" / "model_rank_{r}.pt"):
        ran = run("fsdp-ls", path)
        check(ran.returncode == LIMIT, f"{path.name}: {ran.returncode} {ran.stderr[:200]}")
        check("names take over 256 MiB" in ran.stderr, f"{path.name}: {ran.stderr[:200]}")


def many_attributes(folder):
    """An object made of 300,000 numbers, which has as many attributes, none of which it was made of."""
    count = 300000
    numbers = [b"J" + struct.pack("<i", i) for i in range(count)]
    made = b"cmine\nThing\n(" + b"".join(numbers) + b"tR"
    attributes = b"}(" + b"".join(number * 2 for number in numbers) + b"ub"
    source = folder / "attributes.pt"
    write_torch(source, b"}" + text(b"o") + made + attributes + b"s")
    ran = run("fsdp-ls", source)
    check(ran.returncode == 0 and "o.#" in ran.stdout, f"{source.name}: {ran.returncode} {ran.stderr[:200]}")


def made(module, name, **attributes):
    """An object with these attributes, each as opcodes."""
    state = b"".join(text(key.encode()) + value for key, value in attributes.items())
    return f"c{module}\n{name}\n".encode() + b")\x81}(" + state + b"ub"


def shared_boxes(folder):
    """20,000 tensors of DCP share a list of 500,000 boxes without elements: ten thousand million in 3 MB."""
    module, size = "torch.distributed.checkpoint.metadata", b"ctorch\nSize\n(K\0t\x85R"
    properties = made(module, "TensorProperties")[:-4] + b"(ctorch\nfloat32\n\x89tb"
    box = made(module, "ChunkStorageMetadata", offsets=size, sizes=size)
    boxes = b"](" + box + b"q\0" + b"h\0" * 499999 + b"eq\1"
    tensors = b"".join(
        text(b"t%d" % i)
        + made(module, "TensorStorageMetadata", properties=properties, size=size,
               chunks=b"h\1" if i else boxes)
        for i in range(20000)
    )
    entries = b"}(" + tensors + b"u"
    source = folder / "boxes.dcp"
    source.mkdir()
    data = made(module, "Metadata", state_dict_metadata=entries, planner_data=b"N", storage_data=b"}")
    (source / ".metadata").write_bytes(b"\x80\2" + data + b".")
    ran = run("fsdp-ls", source)
    check(ran.returncode == LIMIT and "boxes" in ran.stderr, f"boxes: {ran.returncode} {ran.stderr[:200]}")


def records(folder):
    plain = {"data.pkl": b"\x80\2}" + text(b"v") + b"K\1s.", "byteorder": "little", "version": "3\n"}
    several = folder / "records.pt"

    def expect(status, told, words, packed=(), **changed):
        write_records(several, {**plain, **changed}, packed)
        ran = run("fsdp-ls", several)
        check(ran.returncode == status, f"{told}: {ran.returncode} {ran.stderr}")
        check(words in ran.stderr, f"{told}: {ran.stderr}")

    expect(0, "plain", "")
    for name in plain:
        expect(REFUSED, f"{name} deflated", "is deflated", packed=(name,))
    for version in ("1\n", "10\n", "10"):
        expect(0, f"version {version!r}", "", version=version)
    for version in ("", "0\n", "-3\n", "three\n", "3 4\n", "3\0"):
        expect(DAMAGED, f"version {version!r}", "is not a number", version=version)
    for version in ("11\n", "9" * 60):
        expect(UNKNOWN, f"version {version!r}", "use a newer fsdp", version=version)


def main():
    with tempfile.TemporaryDirectory() as place:
        for test in (many_dims, too_many_dims, deep_values, long_names, many_attributes, shared_boxes,
                     records):
            test(Path(place))
    print("\n".join(problems) or "everything within the limits")
    return 1 if problems else 0


sys.exit(main())
