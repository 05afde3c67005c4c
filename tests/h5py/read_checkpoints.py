#!/usr/bin/python3
"""Whole checkpoints as h5py, h5ls and h5dump see them: right names, shapes and values, from another
working directory and after the checkpoint was moved.

Usage: read_checkpoints.py WRITE_CHECKPOINTS PLUGIN_DIR|none
"""
import os
import shutil
import subprocess
import sys
import tempfile

WRITER, PLUGIN = sys.argv[1], sys.argv[2]
os.environ["HDF5_PLUGIN_PATH"] = PLUGIN

import h5py  # noqa: E402  (reads HDF5_PLUGIN_PATH when it is loaded)
import numpy  # noqa: E402


def count(n):
    return numpy.arange(n, dtype=numpy.int64)


def bf16(bits):
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


# Computes the elements that put_element in write_checkpoints.c stores.
EXPECTED = {
    "rows.f32": ((7, 5), lambda n: (count(n) * 0.5).astype(numpy.float32)),
    "columns.f32": ((6, 11), lambda n: (count(n) * 0.5).astype(numpy.float32)),
    "large.f32": ((300, 1000), lambda n: (count(n) * 0.5).astype(numpy.float32)),
    "large.columns.f32": ((200, 1001), lambda n: (count(n) * 0.5).astype(numpy.float32)),
    "half.f16": ((50,), lambda n: (0x3C00 + count(n)).astype(numpy.uint16).view(numpy.float16)),
    "brain.bf16": ((9, 4), lambda n: bf16((0x3C00 + count(n)).astype(numpy.uint16))),
    "flags.bool": ((10,), lambda n: count(n) % 3 == 0),
    "waves.c64": ((4, 3), lambda n: (count(n) - 1j * count(n)).astype(numpy.complex64)),
    "ids.i64": ((2, 3, 4), lambda n: count(n) * 1000000007 + 3),
    "a%2Fb%25c.f64": ((2,), lambda n: count(n) + 0.25),
    "copied.u8": ((20,), lambda n: (count(n) * 7).astype(numpy.uint8)),
    "step.i64": ((), lambda n: count(n) * 1000000007 + 3),
    "nothing.f32": ((0, 4), lambda n: count(n).astype(numpy.float32)),
}


def open_file(checkpoint):
    full = os.path.join(checkpoint, "shard-00000-of-00001.h5")
    return full if os.path.exists(full) else os.path.join(checkpoint, "index.h5")


def check(checkpoint):
    path = open_file(checkpoint)
    with h5py.File(path, "r") as f:
        names = {name for name in f if not name.startswith("%index")}
        assert names == set(EXPECTED) | {"tied"}, (path, names ^ (set(EXPECTED) | {"tied"}))
        assert f["tied"] == f["rows.f32"], f"{path}: the alias is no hard link"
        for name, (shape, function) in EXPECTED.items():
            want = function(int(numpy.prod(shape, dtype=numpy.int64))).reshape(shape)
            got = f[name][()]
            assert numpy.shape(got) == shape, (path, name, numpy.shape(got))
            assert numpy.array_equal(got, want), f"{path}: {name} differs"
            assert numpy.asarray(got).dtype.kind == want.dtype.kind, (path, name, got.dtype)
    return len(EXPECTED)


def run_tools(checkpoint):
    for file in sorted(os.listdir(checkpoint)):
        if file.endswith(".h5"):
            for tool in (["h5ls"], ["h5dump", "-H"]):
                subprocess.run(tool + [os.path.join(checkpoint, file)], check=True,
                               stdout=subprocess.DEVNULL)
    listing = subprocess.run(["h5ls", open_file(checkpoint)], check=True, capture_output=True,
                             text=True).stdout
    assert "rows.f32" in listing and "{7, 5}" in listing, listing


def main():
    directory = tempfile.mkdtemp(prefix="fsdp-h5py-")
    checked = 0
    try:
        saved = os.path.join(directory, "saved")
        moved = os.path.join(directory, "elsewhere", "moved")
        os.makedirs(saved)
        subprocess.run([WRITER, saved], check=True)
        os.makedirs(os.path.dirname(moved))
        os.rename(saved, moved)
        os.chdir("/")
        for name in sorted(os.listdir(moved)):
            if "zstd" in name and PLUGIN == "none":
                continue
            checked += check(os.path.join(moved, name))
            run_tools(os.path.join(moved, name))
    finally:
        shutil.rmtree(directory)
    print(f"{checked} tensors are right")
    return 0 if checked else 1


if __name__ == "__main__":
    sys.exit(main())
