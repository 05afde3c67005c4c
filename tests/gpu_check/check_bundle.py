"""The bundle of ./dev gpu-bundle: its size, the libraries that its programs need, and that they run where
only libc is. gpu-check --build links, with the objects of this build in place of nvcc's.

usage: check_bundle.py CMAKE BUILD
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CMAKE, BUILD = sys.argv[1:]
BUNDLE = Path(BUILD) / "gpu"
PROGRAMS = ("gpu-check", "fsdp-train")
MOST = 40 << 20
LIBC = {"libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "ld-linux-x86-64.so.2"}
NEWEST = (2, 36)
LIMIT = 120
problems = []

# In place of nvcc: the preprocessor finds all headers, and the object is that of this build.
NVCC = """#!/bin/sh
set -eu
includes= output= input=
while [ $# -gt 0 ]; do
    case $1 in
    -I*) includes="$includes $1" ;;
    -o) output=$2 && shift ;;
    *.cu) input=$1 ;;
    esac
    shift
done
c++ -x c++ -M -MG $includes "$input" | tr -d '\\\\' | tr -s ' \\n' '\\n' >"$output.headers"
for header in $(grep -E '^(kernels|base|fsdp)/' "$output.headers"); do
    echo "$input includes $header, which is not in the bundle" >&2
    exit 1
done
cp "@OBJECTS@/kernels/cuda/$(basename "$input").o" "$output"
"""


def expect(condition, text):
    if not condition:
        problems.append(text)


def output_of(*command):
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout


def check_libraries(program):
    dynamic = output_of("readelf", "-d", program)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    expect(needed <= LIBC and needed, f"{program.name} needs {sorted(needed - LIBC)}")
    expect("RPATH" not in dynamic and "RUNPATH" not in dynamic, f"{program.name} has a path for libraries")
    versions = re.findall(r"Name: GLIBC_([\d.]+)", output_of("readelf", "-V", program))
    late = [version for version in versions if tuple(map(int, version.split("."))) > NEWEST]
    expect(versions and not late, f"{program.name} needs symbols of glibc {late}")


def check_files():
    size = sum(path.stat().st_size for path in BUNDLE.rglob("*") if path.is_file())
    expect(size <= MOST, f"{size} bytes, and at most {MOST} are allowed")
    manifest = json.loads((BUNDLE / "manifest.json").read_text())
    for name in ("commit", "compiler", "nvcc", "cuda", "hdf5", "zstd", "zlib", "xxhash"):
        expect(manifest.get(name), f"the manifest has no {name}")
    for program in PROGRAMS:
        check_libraries(BUNDLE / program)


def check_driver():
    """The least driver of the runtime that is linked stands in the README, and gpu-check prints it."""
    cuda = json.loads((BUNDLE / "manifest.json").read_text())["cuda"]
    number = {"12": "530.30.02", "13": "580.65.06"}[cuda.split(".")[0]]
    for text in (output_of(BUNDLE / "gpu-check", "--version"), (BUNDLE / "README").read_text()):
        expect(f"CUDA {cuda}, which needs NVIDIA driver {number} or later" in text, f"no driver in: {text}")


def make_root(folder):
    """The bundle, libc's files, and nothing else."""
    root = Path(folder) / "root"
    shutil.copytree(BUNDLE, root / "gpu", ignore=shutil.ignore_patterns("sources"))
    (root / "tmp").mkdir()
    listed = "".join(output_of("ldd", BUNDLE / name) for name in PROGRAMS)
    for path in set(re.findall(r"(/\S+) \(0x", listed)):
        target = root / path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(os.path.realpath(path), target)
        target.chmod(0o755)
    return root


def run_in(root, *command):
    chroot = shutil.which("chroot", path="/usr/sbin:/sbin:/usr/bin") or "chroot"
    enter = [chroot] if os.geteuid() == 0 else ["/usr/bin/unshare", "-r", chroot]
    return subprocess.run([*enter, root, *command], env={"HOME": "/tmp"}, text=True, capture_output=True,
                          timeout=LIMIT, check=False)


def expect_run(root, command, code, words):
    done = run_in(root, *command)
    expect(done.returncode == code and words in done.stdout + done.stderr,
           f"{command}: exit code {done.returncode}, not {code}: {done.stdout}{done.stderr}")


def check_in_root(folder):
    root = make_root(folder)
    if run_in(root, "/gpu/gpu-check", "--list").returncode == 125:
        print("chroot is not allowed here")
        return False
    expect_run(root, ["/gpu/gpu-check", "--list"], 0, "kernel/adamw")
    expect_run(root, ["/gpu/gpu-check", "--quick"], 2, "there is no NVIDIA driver")
    expect_run(root, ["/gpu/gpu-check", "--build"], 3, "sources/build.sh")
    expect_run(root, ["/gpu/fsdp-train", "--version"], 0, "there is no NVIDIA driver")
    # on the host, for its models compute there
    expect_run(root, ["/gpu/fsdp-train", "/gpu/fixtures/train.conf", "--run", "/tmp/run", "--data.path",
                      "/gpu/fixtures/train.txt", "--steps", "1", "--threads", "2"], 0, "")
    expect(list((root / "tmp/run").glob("step-*/manifest.json")), "the trainer saved nothing")
    return True


def check_building(folder):
    copy, nvcc = Path(folder) / "copy", Path(folder) / "nvcc"
    shutil.copytree(BUNDLE, copy)
    nvcc.write_text(NVCC.replace("@OBJECTS@", f"{BUILD}/CMakeFiles/fsdp_cuda.dir"))
    nvcc.chmod(0o755)
    environment = {**os.environ, "NVCC": str(nvcc)}
    done = subprocess.run([copy / "gpu-check", "--build"], env=environment, text=True, timeout=LIMIT,
                          capture_output=True, check=False)
    listed = output_of(copy / "gpu-check-built", "--list") if done.returncode in (0, 1, 2) else ""
    expect("kernel/adamw" in listed, f"--build: exit code {done.returncode}: {done.stderr}")
    (copy / "sources/kernels/kernels.h").unlink()
    done = subprocess.run([copy / "gpu-check", "--build"], env=environment, text=True, timeout=LIMIT,
                          capture_output=True, check=False)
    expect(done.returncode == 70 and "kernels.h" in done.stderr, f"--build without a header: {done.stderr}")


def main():
    subprocess.run([CMAKE, "--build", BUILD, "--target", "gpu_bundle"], stdout=subprocess.DEVNULL, check=True)
    check_files()
    check_driver()
    with tempfile.TemporaryDirectory() as folder:
        check_building(folder)
        is_whole = check_in_root(folder)
    print("\n".join(problems) or "all as expected")
    return 1 if problems else 0 if is_whole else 77


sys.exit(main())
