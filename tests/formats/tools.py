"""Runs the tools, whose directory is the first argument of every test here, and collects what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.argv[1])
SECONDS = 60
# what --drop calls tensors that are values of a listing
TENSOR_KINDS = [f"tensors:{kind}" for kind in ("quantized", "sparse", "jagged", "meta", "void", "other")]
problems = []


def run(program, *arguments, **more):
    command = [str(BIN / program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, **more)


def list_path(path, **more):
    """The listing as text, with the digests of all tensors."""
    return run("fsdp-ls", "--json", "--digest", "sha256", path, **more)


def listing(path):
    """None for what cannot be listed."""
    ran = list_path(path)
    return json.loads(ran.stdout) if ran.returncode == 0 else None


def follow_next(said, **more):
    """Runs the line that a conversion printed as its next one; None where it printed none."""
    line = next((line[6:] for line in said.splitlines() if line.startswith("next  ")), None)
    path = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    return line and subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=SECONDS,
                                   check=False, env=path, **more)


def every_name(listed):
    """The tensors of a listing, with names that are only noted in it: elsewhere they are tensors."""
    tensors = listed["tensors"]
    return tensors | {name: tensors[kept] for name, kept in listed.get("aliases", {}).items()}


def check(truth, told):
    if not truth:
        problems.append(told)
