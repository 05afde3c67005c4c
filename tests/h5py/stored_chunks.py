"""Chunks of other programs' HDF5 files: h5py's are read as h5py reads them, whatever their filters, in a
.keras file, too; one that is shorter than it says is an error, and never bytes of memory.

    stored_chunks.py BIN
"""
import hashlib
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

import h5py
import numpy as np

BIN = Path(sys.argv[1])
CONVERSIONS = 2 if "FSDP_TEST_FEWER" in os.environ else 4  # of one file, which must be equal
COUNT = 4000
checks = 0


def check(condition, what):
    global checks
    checks += 1
    if not condition:
        sys.exit(f"FAILED: {what}")


def convert(source, target):
    command = [BIN / "fsdp-convert", "-q", "--no-sync", "--overwrite", source, target]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# --- files that are whole -------------------------------------------------------------------------


def add_valid(file):
    """Every width of scale-offset, of both signs, with and without other filters and fill values."""
    random = np.random.default_rng(15)
    edge = {"shape": (7, 9), "chunks": (4, 5)}
    for kind, widest in (("i1", 8), ("u2", 16), ("i4", 32), ("u8", 64)):
        for bits in range(0, widest + 1, 1 if widest < 32 else 5):
            numbers = random.integers(0, 2 ** max(min(bits, widest) - 1, 0), (7, 9), endpoint=True)
            for name, options in (("", {}), ("_filled", {"fillvalue": 3}),
                                  ("_packed", {"shuffle": True, "compression": "gzip"})):
                file.create_dataset(f"{kind}_{bits}{name}", dtype=kind, scaleoffset=bits,
                                    data=numbers.astype(kind), **edge, **options)
    for kind in ("f4", "f8"):
        for digits in range(6):
            file.create_dataset(f"{kind}_{digits}", dtype=kind, scaleoffset=digits, **edge,
                                data=random.normal(size=(7, 9)))
    for name, options in (("lzf", {"compression": "lzf"}), ("plain", {}),
                          ("sum", {"fletcher32": True, "shuffle": True, "compression": "gzip"})):
        file.create_dataset(name, data=random.normal(size=(7, 9)), **edge, **options)
    file.create_dataset("absent", dtype="f4", scaleoffset=2, fillvalue=1.5, **edge)
    part = file.create_dataset("partly", dtype="i4", compression="gzip", fillvalue=7, **edge)
    part[0, 0] = 1
    for name in ("lzf", "i4_5", "f4_2"):
        layout = h5py.VirtualLayout(shape=(7, 9), dtype=file[name].dtype)
        layout[...] = h5py.VirtualSource(file[name])
        file.create_virtual_dataset(f"virtual_{name}", layout)


def read_valid(folder):
    for version in ("earliest", "latest"):
        with h5py.File(folder / "valid.h5", "w", libver=version) as file:
            add_valid(file)
        ran = convert(folder / "valid.h5", folder / "valid.npz")
        check(ran.returncode == 0, f"valid {version}: {ran.stderr}")
        with h5py.File(folder / "valid.h5") as file, np.load(folder / "valid.npz") as read:
            check(set(file) == set(read.files), "names of valid.h5")
            for name in file:
                check(file[name][()].tobytes() == read[name].tobytes(), f"{version}: {name} differs")


# --- files that lie -------------------------------------------------------------------------------


def with_chunk(path, data, mask=0, **options):
    with h5py.File(path, "w") as file:
        set_ = file.create_dataset("w", shape=(COUNT,), chunks=(COUNT,), **options)
        set_.id.write_direct_chunk((0,), data, mask)


def scaled(bits, size):
    return struct.pack("<IB16s", bits, 8, b"") + b"\x55" * size


SHORT = b"\1\2\3\4" * 100
LIES = {
    "deflate": (zlib.compress(SHORT), {"dtype": "f4", "compression": "gzip"}),
    "deflate_cut": (zlib.compress(bytes(range(256)) * 70)[:200],
                    {"dtype": "f4", "compression": "gzip"}),
    "shuffle": (SHORT, {"dtype": "f4", "shuffle": True}),
    "left_out": (SHORT, {"dtype": "f4", "compression": "gzip", "mask": 1}),
    "lzf": (bytes([31]) + b"\1" * 32, {"dtype": "f4", "compression": "lzf"}),
    "checksum": (SHORT, {"dtype": "f4", "fletcher32": True}),
    "integers": (scaled(17, 60), {"dtype": "i4", "scaleoffset": 17}),
    "one_byte_less": (scaled(17, COUNT * 17 // 8), {"dtype": "i4", "scaleoffset": 17}),
    "floats": (scaled(17, 60), {"dtype": "f4", "scaleoffset": 3}),
    "all_bits": (scaled(32, 60), {"dtype": "i4", "scaleoffset": 17}),
    "too_many_bits": (scaled(200, 5 * COUNT), {"dtype": "i4", "scaleoffset": 17}),
    "no_header": (scaled(3, 0)[:8], {"dtype": "i4", "scaleoffset": 17}),
    "deflated_header": (zlib.compress(scaled(17, 60)),
                        {"dtype": "i4", "scaleoffset": 17, "compression": "gzip"}),
}


def outcome(source, folder):
    target = folder / "lie.npz"
    target.unlink(missing_ok=True)
    ran = convert(source, target)
    data = target.read_bytes() if target.exists() else b""
    return ran.returncode, ran.stderr, hashlib.sha256(data).hexdigest()


def read_lies(folder):
    for name, (data, options) in LIES.items():
        path = folder / f"{name}.h5"
        with_chunk(path, data, **options)
        outcomes = {outcome(path, folder) for _ in range(CONVERSIONS)}
        code, text, _ = next(iter(outcomes))
        check(len(outcomes) == 1, f"{name}: {len(outcomes)} results of {CONVERSIONS} conversions")
        check(code == 4 and "the chunk at [0]" in text, f"{name}: {code}, {text}")


def read_lies_without_filters(folder):
    """The length of a chunk in the B-tree counts for nothing where there are no filters."""
    path, numbers = folder / "plain.h5", np.arange(COUNT, dtype="f4")
    with h5py.File(path, "w") as file:
        file.create_dataset("w", data=numbers, chunks=(COUNT,))
    data = bytearray(path.read_bytes())
    at = data.find(struct.pack("<IIQQ", numbers.nbytes, 0, 0, 0))
    check(at > 0, "the key of the chunk is found")
    data[at : at + 4] = struct.pack("<I", 100)
    path.write_bytes(data)
    ran = convert(path, folder / "plain.npz")
    check(ran.returncode == 0, ran.stderr)
    check(np.load(folder / "plain.npz")["w"].tobytes() == numbers.tobytes(), "plain.h5 differs")


def read_lies_about_length(folder):
    """A chunk of no bytes, and one longer than the file."""
    path = folder / "length.h5"
    for length, said in ((0, "it has no bytes"), (1 << 31, "exceeds that of the file")):
        with_chunk(path, scaled(5, COUNT * 5 // 8 + 1), dtype="i4", scaleoffset=5)
        data = bytearray(path.read_bytes())
        at = data.find(struct.pack("<IIQQ", 21 + COUNT * 5 // 8 + 1, 0, 0, 0))
        check(at > 0, "the key of the chunk is found")
        data[at : at + 4] = struct.pack("<I", length)
        path.write_bytes(data)
        code, text, _ = outcome(path, folder)
        check(code == 4 and said in text, f"a chunk of {length} bytes: {code}, {text}")


# --- .keras files ---------------------------------------------------------------------------------


def write_keras(path, members, packing):
    """As Keras 3 writes it: config.json may be longer than what is read to recognise a file."""
    with zipfile.ZipFile(path, "w", packing) as archive:
        archive.writestr("metadata.json", '{"keras_version": "3.15.1"}')
        archive.writestr("config.json", '{"name": "' + "n" * 9000 + '"}')
        for name, data in members.items():
            archive.writestr(name, data)


def read_keras(folder):
    """The chunks of valid.h5 and plain bytes, stored and deflated."""
    data = (folder / "valid.h5").read_bytes()
    path, wanted = folder / "model.keras", np.load(folder / "valid.npz")
    for packing in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        write_keras(path, {"model.weights.h5": data}, packing)
        ran = convert(path, folder / "keras.npz")
        check(ran.returncode == 0, f"packing {packing}: {ran.stderr}")
        with np.load(folder / "keras.npz") as read:
            check(set(wanted.files) == set(read.files), "names of model.keras")
            for name in wanted.files:
                check(wanted[name].tobytes() == read[name].tobytes(), f"packing {packing}: {name}")


def read_lies_of_keras(folder):
    path = folder / "lie.keras"
    with h5py.File(folder / "one.h5", "w") as file:
        file["w"] = np.arange(COUNT, dtype="f4")
    data = (folder / "one.h5").read_bytes()
    for members, status, said in (
            ({"model.weights.json": "{}"}, 3, "without max_shard_size"),
            ({}, 3, "lacks 'model.weights.h5'"),
            ({"model.weights.h5": b"no HDF5"}, (4, 6), "lie.keras"),
            ({"model.weights.h5": data[:-2000], "behind": bytes(4000)}, (4, 6), "lie.keras")):
        write_keras(path, members, zipfile.ZIP_STORED)
        code, text, _ = outcome(path, folder)
        codes = status if isinstance(status, tuple) else (status,)
        check(code in codes and said in text, f"{list(members)}: {code}, {text}")
    write_keras(path, {"model.weights.h5": data}, zipfile.ZIP_STORED)
    whole = bytearray(path.read_bytes())
    at = whole.find(np.arange(8, dtype="f4").tobytes())
    whole[at] ^= 1
    path.write_bytes(whole)
    code, text, _ = outcome(path, folder)
    check(code == 4 and "model.weights.h5" in text, f"a wrong checksum: {code}, {text}")


def read_mutations(folder):
    """The result of a chunk does not depend on memory, with any bytes in its header."""
    path = folder / "mutated.h5"
    with_chunk(path, scaled(5, COUNT * 5 // 8 + 1), dtype="i4", scaleoffset=5)
    data = path.read_bytes()
    at = data.find(struct.pack("<IB16s", 5, 8, b""))
    check(at > 0, "the header of the chunk is found")
    for byte in range(6):
        for flip in (1, 2, 16, 128):
            mutated = bytearray(data)
            mutated[at + byte] ^= flip
            path.write_bytes(mutated)
            check(outcome(path, folder) == outcome(path, folder), f"byte {byte} ^ {flip}")


with tempfile.TemporaryDirectory() as name:
    read_valid(Path(name))
    read_lies(Path(name))
    read_lies_without_filters(Path(name))
    read_lies_about_length(Path(name))
    read_mutations(Path(name))
    read_keras(Path(name))
    read_lies_of_keras(Path(name))
print(f"{checks} checks")
