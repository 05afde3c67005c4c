"""Checks sizes: functions have at most 80 lines (19 of 20 at most 50) and six parameters, sources at most
1,200 lines; all public headers declare at most 266 functions.

usage: sizes.py REPOSITORY
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from rooms import SOURCES, sources

ROOT = Path(sys.argv[1])
FOLDERS = ["base", "kernels", "formats", "statedict", "runtime", "tools"]
HARD, USUAL, FILE, PARAMETERS, PUBLIC = 80, 50, 1200, 6, 266


def tags(kind, paths):
    command = ["ctags", "--output-format=json", "--fields=+neS", f"--kinds-C={kind}", f"--kinds-CUDA={kind}",
               "-o", "-", *paths]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return map(json.loads, listed.splitlines())


def functions(paths):
    for tag in tags("f", paths):
        if "end" in tag:
            yield tag["path"], tag["line"], tag["name"], tag["end"] - tag["line"] + 1


def parameters(signature):
    """The number of parameters; commas of callbacks among them do not count."""
    inside = signature[1:-1]
    while "(" in inside:
        inside = re.sub(r"\([^()]*\)", "", inside)
    return inside.count(",") + 1


def too_many_parameters():
    paths = [str(path) for folder in FOLDERS for path in sorted(sources(ROOT / folder))]
    for tag in tags("fp", paths):
        count = parameters(tag.get("signature", "()"))
        if count > PARAMETERS:
            yield f"{tag['path']}:{tag['line']}: {tag['name']} has {count} parameters, more than {PARAMETERS}"


def public_functions():
    lists = re.findall(r"set\(FSDP_(?:PUBLIC|MPI)_HEADERS([^)]*)\)", (ROOT / "CMakeLists.txt").read_text())
    headers = [str(ROOT / header) for header in " ".join(lists).split()]
    return {tag["name"] for tag in tags("p", headers) if tag["name"].startswith("fsdp_")}


def main():
    paths = sorted(path for folder in FOLDERS for path in sources(ROOT / folder, (*SOURCES, ".cuh")))
    problems = []
    for source in paths:
        lines = len(source.read_text().splitlines())
        if lines > FILE:
            problems.append(f"{source}: {lines} lines, {FILE} are allowed")
    lengths = []
    for path, line, name, length in functions(map(str, paths)):
        lengths.append(length)
        if length > HARD:
            problems.append(f"{path}:{line}: {name} has {length} lines, {HARD} are allowed")
    long = sum(length > USUAL for length in lengths)
    if long * 20 > len(lengths):
        problems.append(f"{long} of {len(lengths)} functions have more than {USUAL} lines")
    problems.extend(too_many_parameters())
    public = len(public_functions())
    if public > PUBLIC:
        problems.append(f"{public} public functions, {PUBLIC} are allowed")
    print("\n".join(problems) or f"{len(lengths)} functions, {long} over {USUAL} lines; {public} public")
    return 1 if problems or not lengths else 0


sys.exit(main())
