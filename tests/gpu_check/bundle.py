"""Completes build/gpu next to its programs: sources and archives for gpu-check --build, a training to try,
a README with the driver that is needed, and a manifest of versions. Run by ./dev gpu-bundle.

usage: bundle.py BUNDLE_JSON
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

PLAN = json.loads(Path(sys.argv[1]).read_text())
ROOT, BUNDLE = Path(PLAN["repository"]), Path(PLAN["bundle"])
ARCHIVES = [Path(path) for path in PLAN["archives"].split(";")]
MOST = 40 << 20

SCRIPT = """#!/bin/sh
# Compiles the kernels by this machine's nvcc and links gpu-check with them: of the archives, the linker takes
# what is still missing. usage: build.sh PROGRAM
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
running=
for file in @SOURCES@; do
    "$nvcc" @FLAGS@ -I"$here" -I"$here/include" -c "$here/$file" -o "$objects/$(basename "$file").o" &
    running="$running $!"
done
for process in $running; do
    wait "$process"
done
cd "$here/archives"
"${CC:-cc}" -s -o "$objects/program" gpu_check.o "$objects"/*.cu.o @ARCHIVES@ -lpthread -lm -lrt -ldl
mv "$objects/program" "$1"
"""

README = """Programs of fsdp for a machine with an NVIDIA GPU.

This machine needs libc (glibc 2.36 or later) and a driver. The programs are built with @RUNTIME@.
nvidia-smi shows the driver's number.

    ./gpu-check --quick              measures and checks all that fsdp does on a GPU: run it first
    ./gpu-check --json rows.json     with more data
    ./gpu-check --build              compiles the kernels by the nvcc of this machine, and checks those
    ./fsdp-train fixtures/train.conf --data.path fixtures/train.txt --run run     trains on the host

docs/gpu.md describes the rows. manifest.json has the commit and the versions.
"""

CONFIGURATION = """# fsdp-train train.conf --run run: a small GPT-2 on bytes
[data]
path = train.txt

[train]
steps = 200
batch = 8

[save]
every = 100
"""


def git(*arguments):
    done = subprocess.run(["git", "-C", ROOT, *arguments], text=True, capture_output=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def copy_sources(folder):
    """The kernels, all headers that they may include, and those with angle brackets."""
    for name in ("base", "kernels"):
        for path in (ROOT / name).rglob("*.*"):
            if path.suffix in (".h", ".cuh", ".cu"):
                target = folder / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    shutil.copytree(PLAN["headers"], folder / "include/fsdp")


def copy_archives(folder):
    folder.mkdir()
    shutil.copyfile(PLAN["main"], folder / "gpu_check.o")
    for path in ARCHIVES:
        shutil.copyfile(path, folder / path.name)
    subprocess.run(["strip", "--strip-debug", *folder.iterdir()], check=True)


def write_script(path):
    text = SCRIPT.replace("@SOURCES@", PLAN["sources"].replace(";", " "))
    flags = " ".join(f"'{flag}'" for flag in PLAN["flags"].split())
    text = text.replace("@FLAGS@", flags).replace("@ARCHIVES@", " ".join(path.name for path in ARCHIVES))
    path.write_text(text)


def write_fixtures(folder):
    folder.mkdir()
    (folder / "train.conf").write_text(CONFIGURATION)
    pages = sorted((ROOT / "docs").glob("*.md"))
    (folder / "train.txt").write_text("\n\n".join(page.read_text() for page in pages))


def write_readme(path):
    """gpu-check says itself which driver its runtime needs."""
    done = subprocess.run([BUNDLE / "gpu-check", "--version"], text=True, capture_output=True, check=True)
    path.write_text(README.replace("@RUNTIME@", done.stdout.splitlines()[1]))


def write_manifest(path):
    commit = git("rev-parse", "HEAD") or "unknown"
    manifest = {"commit": commit, "changed": bool(git("status", "--porcelain")), **PLAN["versions"]}
    path.write_text(json.dumps(manifest, indent=1) + "\n")


def main():
    for name in ("sources", "fixtures"):
        shutil.rmtree(BUNDLE / name, ignore_errors=True)
    for name in ("gpu-check-built", "build.log"):
        (BUNDLE / name).unlink(missing_ok=True)
    copy_sources(BUNDLE / "sources")
    copy_archives(BUNDLE / "sources/archives")
    write_script(BUNDLE / "sources/build.sh")
    write_fixtures(BUNDLE / "fixtures")
    write_readme(BUNDLE / "README")
    write_manifest(BUNDLE / "manifest.json")
    size = sum(path.stat().st_size for path in BUNDLE.rglob("*") if path.is_file())
    print(f"{BUNDLE}: {size / (1 << 20):.1f} MiB of at most {MOST >> 20}")
    return size > MOST


sys.exit(main())
