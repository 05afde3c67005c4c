"""Reads what write_samples.c wrote as a user would: h5py, h5ls and h5dump, from another directory,
before and after the files were moved.

    read_samples.py WRITE_SAMPLES_PROGRAM PLUGIN_DIR

PLUGIN_DIR "none" leaves out the values of compressed datasets (a plugin with a sanitizer in it does
not load into Python).
"""
import os
import shutil
import subprocess
import sys
import tempfile

plugin_dir = sys.argv[2]
if plugin_dir != "none":
    os.environ["HDF5_PLUGIN_PATH"] = plugin_dir
import h5py  # noqa: E402, after the path of its plugins
import numpy as np  # noqa: E402

FLOATS = np.array([(i - 2) * 0.5 for i in range(10)]).reshape(2, 5)
WHOLE = np.arange(10).reshape(2, 5)
MARKED = ["f8_e4m3fn", "f8_e4m3fnuz", "f8_e5m2fnuz", "f8_e8m0fnu", "f4_e2m1fn_x2", "f6_e2m3",
          "f6_e3m2"]
checks = 0


def check(condition, what):
    global checks
    checks += 1
    if not condition:
        sys.exit(f"FAILED: {what}")


def check_equal(got, expected, what):
    got, expected = np.asarray(got), np.asarray(expected)
    check(got.shape == expected.shape, f"{what}: shape {got.shape}, not {expected.shape}")
    check(np.array_equal(got, expected), f"{what}: {got!r}, not {expected!r}")


def read_types(path):
    with h5py.File(path, "r") as f:
        for name in ["f64", "f32", "f16", "bf16", "f8_e5m2"]:
            check_equal(f[name][()], FLOATS, name)
        for name, dtype in [("f64", "<f8"), ("f32", "<f4"), ("f16", "<f2")]:
            check(f[name].dtype == np.dtype(dtype), f"{name} is {f[name].dtype}")
        for bits in [8, 16, 32, 64]:
            for kind in "iu":
                name = f"{kind}{bits}"
                check(f[name].dtype == np.dtype(f"<{kind}{bits // 8}"), f"{name} is {f[name].dtype}")
                check_equal(f[name][()], WHOLE, name)
        check(f["bool"].dtype == np.dtype(bool), "bool")
        check_equal(f["bool"][()], WHOLE % 2 == 1, "bool")
        check(f["c64"].dtype == np.dtype("<c8"), "c64")
        check(f["c128"].dtype == np.dtype("<c16"), "c128")
        for name in ["c64", "c128"]:
            check_equal(f[name][()], FLOATS - 1j * FLOATS, name)
        read_marked(f)
        read_blocks(f)
        check(f["scalar"].shape == () and f["scalar"][()] == 1.5, "scalar")
        check(f["empty"].shape == (0, 5) and f["empty"][()].size == 0, "empty")
        check(bytes(f["%index"][()]) == b"index", "%index")
        read_names(f)
        check(all(f[name].chunks is None for name in f), "types.h5 is contiguous")


BLOCKS = {"q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34, "q2_k": 84, "q3_k": 110, "q4_k": 144,
          "q5_k": 176, "q6_k": 210}


def read_blocks(f):
    for name, size in BLOCKS.items():
        check(f[name].dtype == np.dtype(f"V{size}"), f"{name} is {f[name].dtype}")
        check(f[name].attrs["dtype"].decode() == name, f"{name}: attribute dtype")
        check([bytes(x)[0] for x in f[name][()].ravel()] == list(range(10)), f"values of {name}")


def read_marked(f):
    """Types that HDF5 cannot describe: bytes and an attribute with the type's name."""
    for name in MARKED:
        check(f[name].dtype == np.dtype("u1"), f"{name} is {f[name].dtype}")
        check(f[name].attrs["dtype"].decode() == name, f"{name}: attribute dtype")
    check(len(f["f32"].attrs) == 0, "f32 has no attribute")


def read_names(f):
    links = {"a/b": "a%2Fb", "..": "%2E%2E", "100%": "100%25", "gewicht.ü": "gewicht.ü", "": "%",
             "plain": "plain"}
    check(set(links.values()) < set(f), f"names: {sorted(f)}")


def read_compressed(path):
    with h5py.File(path, "r") as f:
        numbers = f["numbers"]
        check(numbers.chunks == (4, 300) and numbers.shuffle, "chunks and shuffle")
        check("32015" in numbers._filters, f"filters: {numbers._filters}")
        check(bytes(f["%index"][()]) == b"index", "%index")
        if plugin_dir != "none":
            check_equal(numbers[()], np.arange(3000, dtype="<f4").reshape(10, 300), "numbers")
            check_equal(numbers[7:9, 100:103], [[2200, 2201, 2202], [2500, 2501, 2502]], "a slice")


def read_view(path):
    with h5py.File(path, "r") as f:
        check(f["rows"].is_virtual, "rows is virtual")
        check_equal(f["rows"][()], np.arange(28).reshape(7, 4), "rows")
        check_equal(f["columns"][()], np.arange(24).reshape(4, 6), "columns")
        check_equal(f["flat"][()], np.arange(12).reshape(3, 4), "flat")
        check_equal(f["scalar"][()], 7, "scalar")
        check_equal(f["tied"][()], np.arange(28).reshape(7, 4), "tied")
        check(f["tied"].id.__hash__() == f["rows"].id.__hash__(), "tied is rows")
        check_equal(f["gone"][()], [-1, -1, -1], "gone")
        check(bool(np.isnan(f["gone.f32"][()]).all()), "gone.f32")
        check_equal(f["gone.f8"][()], [255, 255, 255], "gone.f8")
        check(f["gone.f8"].attrs["dtype"].decode() == "f8_e4m3fn", "gone.f8: attribute dtype")
        check(f["empty"].shape == (0, 3), "empty in the view")
        check_equal(f["rows"][2:5, 1:3], [[9, 10], [13, 14], [17, 18]], "a slice across shards")


def run_tool(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    check(done.returncode == 0 and not done.stderr, f"{command}: {done.stderr}")
    return done.stdout


def read_with_tools(directory):
    check("/%index" in run_tool("h5ls", "-r", f"{directory}/types.h5"), "h5ls")
    dump = run_tool("h5dump", "-y", "-d", "/bf16", f"{directory}/types.h5")
    check("-1, -0.5, 0, 0.5, 1" in dump, f"h5dump of bf16: {dump}")
    dump = run_tool("h5dump", "-y", "-d", "/bool", f"{directory}/types.h5")
    check("FALSE, TRUE, FALSE" in dump, f"h5dump of bool: {dump}")
    run_tool("h5dump", f"{directory}/types.h5")
    listing = run_tool("h5ls", f"{directory}/view/index.h5")
    check("Dataset {7, 4}" in listing and "same as /rows" in listing, f"h5ls: {listing}")
    dump = run_tool("h5dump", "-y", "-d", "/columns", f"{directory}/view/index.h5")
    check("18, 19, 20, 21, 22, 23" in dump, f"h5dump of the view: {dump}")
    run_tool("h5dump", f"{directory}/view/index.h5")
    if plugin_dir != "none":
        dump = run_tool("h5dump", "-y", "-d", "/numbers", f"{directory}/compressed.h5")
        check("2997, 2998, 2999" in dump, "h5dump of compressed values")


def read_all(directory):
    read_types(f"{directory}/types.h5")
    read_compressed(f"{directory}/compressed.h5")
    read_view(f"{directory}/view/index.h5")
    read_with_tools(directory)


def main():
    program = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as parent:
        written, moved = f"{parent}/written", f"{parent}/moved"
        os.mkdir(written)
        subprocess.run([program, "."], cwd=written, check=True)
        os.chdir("/")
        read_all(written)
        shutil.move(written, moved)
        read_all(moved)
        os.chdir(f"{moved}/view")
        read_view("index.h5")
        os.chdir("/")
    print(f"{checks} checks passed, HDF5 {h5py.version.hdf5_version}")


main()
