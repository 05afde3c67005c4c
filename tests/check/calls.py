"""Checks that calls only go down the layers and rooms, by the symbols of the objects. Includes alone do not
show it: a room may include the face of its folder, which rooms above it define.

usage: calls.py REPOSITORY BUILD
"""

import subprocess
import sys
from pathlib import Path

from rooms import ROOMS, room

ROOT = Path(sys.argv[1])
OBJECTS = Path(sys.argv[2]) / "CMakeFiles/fsdp_objects.dir"
FOLDERS = list(ROOMS)
# Files that may call up, each with its reason.
REGISTRIES = {
    "kernels/dispatch.c": "the table of kernels names every variant",
}


def symbols():
    """The file that defines each symbol, and the symbols that each file uses."""
    defined, used = {}, {}
    objects = [path for path in sorted(OBJECTS.rglob("*.o")) if (ROOT / source_of(path)).is_file()]
    listed = subprocess.run(["nm", "-A", *objects], stdout=subprocess.PIPE, text=True, check=True)
    for line in listed.stdout.splitlines():
        path, _, symbol = line.partition(":")
        *_, kind, name = symbol.split()
        if kind == "U":
            used.setdefault(source_of(Path(path)), []).append(name)
        elif kind in "TDRBCV":
            defined[name] = source_of(Path(path))
    return defined, used


def source_of(path):
    return path.relative_to(OBJECTS).as_posix().removesuffix(".o")


def height(source):
    folder = source.split("/")[0]
    return FOLDERS.index(folder), ROOMS[folder].index(room(source))


def main():
    defined, used = symbols()
    calls, problems = 0, []
    for source, names in used.items():
        for name in names:
            home = defined.get(name)
            if home is None or home == source:
                continue
            calls += 1
            if height(home) > height(source) and source not in REGISTRIES:
                problems.append(f"{source} uses {name} of {home}, which is above it")
    problems += [f"{source} is a registry that is not there" for source in REGISTRIES if source not in used]
    print("\n".join(problems) or f"{calls} uses of symbols, each goes down")
    return 1 if problems or calls == 0 else 0


sys.exit(main())
