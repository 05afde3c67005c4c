"""A checkpoint in one HDF5 file: h5py sees its tensors, our tools a checkpoint of ours, and damage
anywhere in what we read of it is found.

usage: one_file.py BIN MAKE_SAMPLE
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy

from tools import check, listing, problems, run

SAMPLE = sys.argv[2]
NUMPY_HAS = {"f64", "f32", "f16", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8"}
DAMAGED, EXISTS, USAGE = 4, 6, 2


def parts(listed):
    return {key: listed.get(key) for key in ("tensors", "values")}


def link_of(name):
    return name.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")


def check_h5py(path, npz):
    """h5py reads the tensors that .npz has, too."""
    expected = numpy.load(npz)
    names = list(listing(npz)["tensors"].items())
    with h5py.File(path, "r") as file:
        check({link_of(name) for name, _ in names} <= set(file), f"{path}: h5py lacks names")
        for name, tensor in names:
            got = file[link_of(name)]
            check(list(got.shape) == tensor["shape"], f"{path}: {name} has shape {got.shape}")
            if tensor["dtype"] in NUMPY_HAS:
                same = got[()].tobytes() == expected[name].tobytes()
                check(same, f"{path}: {name} has other values in h5py")
    return len(names)


def check_ours(source, path):
    told = listing(path)
    check(told.get("format", "").startswith("fsdp"), f"{path}: listed as {told.get('format')}")
    check(parts(told) == parts(listing(source)), f"{source} is not the same as {path}")
    verified = run("fsdp-verify", "--deep", path)
    check(verified.returncode == 0, f"{path}: {verified.stdout}{verified.stderr}")
    same = run("fsdp-diff", source, path)
    check(same.returncode == 0, f"{path}: {same.stdout}{same.stderr}")


def spoiled(path, folder, at):
    copy = folder / "spoiled.h5"
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    copy.write_bytes(data)
    return copy


def end_of_hdf5(path):
    return int.from_bytes(path.read_bytes()[40:48], "little")


def check_damage(path, folder):
    size, text = path.stat().st_size, end_of_hdf5(path)
    for at in (text, text + 1, text + 3, (text + size) // 2, size - 1, size - 20, 40, 41):
        ran = run("fsdp-verify", spoiled(path, folder, at))
        check(ran.returncode == 1, f"byte {at} of {size}, manifest at {text}: {ran.returncode}")
        ran = run("fsdp-convert", spoiled(path, folder, at), folder / "none")
        check(ran.returncode == DAMAGED, f"byte {at} of {size}: {ran.returncode} {ran.stderr}")
    for kept in (text + 25, size - 1):
        cut = folder / "cut.h5"
        cut.write_bytes(path.read_bytes()[:kept])
        check(run("fsdp-verify", cut).returncode == 1, f"cut at {kept} of {size}, and not seen")


def check_place(source, path, folder):
    before = path.read_bytes()
    ran = run("fsdp-convert", source, path)
    check(ran.returncode == EXISTS and path.read_bytes() == before, "an existing file is replaced")
    check(run("fsdp-convert", source, path, "--overwrite").returncode == 0, "no overwrite")
    check(path.read_bytes() == before, "the same state gives other bytes")
    for options in (["--world-size", "2"], ["--mesh", "dp=2"]):
        ran = run("fsdp-convert", source, folder / "ranks.h5", *options)
        check(ran.returncode == USAGE, f"{options}: {ran.returncode}")
    ran = run("fsdp-convert", path, path, "--overwrite")
    check(ran.returncode == USAGE, f"onto itself: {ran.returncode}")
    (folder / "link.h5").symlink_to(path)
    check(parts(listing(folder / "link.h5")) == parts(listing(path)), "a link to it is not read")
    left = [name for name in os.listdir(folder) if ".tmp-" in name]
    check(not left, f"staging files stay: {left}")


def check_compressed(source, folder):
    packed = folder / "packed.hdf5"
    ran = run("fsdp-convert", source, packed, "--compress", "zstd")
    check(ran.returncode == 0, ran.stderr)
    check_ours(source, packed)
    check(listing(packed).get("compressed") is True, "nothing was compressed")


def main():
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        sample, one, npz = folder / "sample", folder / "one.h5", folder / "all.npz"
        subprocess.run([SAMPLE, "sharded", "3", str(sample)], check=True, cwd=folder)
        check(run("fsdp-convert", sample, one).returncode == 0, "the sample is not converted")
        check_ours(sample, one)
        options = ["--only", "all", "--drop", "values", "--drop", "opaque"]
        for dtype in ("bf16", "f8_e4m3fn", "f4_e2m1fn_x2", "f6_e2m3"):
            options += ["--drop", f"dtype:{dtype}"]
        ran = run("fsdp-convert", sample, npz, *options)
        check(ran.returncode == 0, ran.stderr)
        check(check_h5py(one, npz) > 5, "too little was compared")
        check_damage(one, folder)
        check_place(sample, one, folder)
        check_compressed(sample, folder)
        back = folder / "back"
        check(run("fsdp-convert", one, back, "--world-size", "2").returncode == 0, "not back")
        check(parts(listing(back)) == parts(listing(sample)), "another state comes back")
        moved = folder / "deep" / "er.hdf5"
        moved.parent.mkdir()
        shutil.move(one, moved)
        check_ours(sample, moved)
    print("\n".join(problems) or "one file holds a checkpoint")
    return 1 if problems else 0


sys.exit(main())
