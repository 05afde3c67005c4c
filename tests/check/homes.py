"""Checks that what a header declares is defined in the header's own folder: with layers.py this keeps calls
going down, too. Unit tests lie in the folder and the room of what they test, no two sources have one file
name, and the include guard of a header is FSDP_ and the file's name.

usage: homes.py REPOSITORY
"""

import re
import subprocess
import sys
from pathlib import Path, PurePath

from rooms import HEADERS, SOURCES, sources

ROOT = Path(sys.argv[1])
FOLDERS = ["base", "kernels", "formats", "statedict", "runtime", "tools"]
NAMED = [*FOLDERS, "tests"]


def tags():
    """For every function: its name, the file's path, whether it is declared or defined there."""
    files = [str(path.relative_to(ROOT)) for name in FOLDERS for path in sources(ROOT / name)]
    command = ["ctags", "--kinds-C=fp", "--kinds-CUDA=fp", "--fields=k", "--extras=-F", "-f", "-", "-L", "-"]
    listed = subprocess.run(command, cwd=ROOT, input="\n".join(files), stdout=subprocess.PIPE, text=True,
                            check=True)
    for line in listed.stdout.splitlines():
        fields = line.split("\t")
        yield fields[0], PurePath(fields[1]), fields[-1]


def tests_elsewhere():
    """Test files for which the product (tests/support: tests) has no room of that name."""
    for test in sorted((ROOT / "tests/unit").rglob("test_*.c")):
        room = test.parent.relative_to(ROOT / "tests/unit")
        if len(room.parts) != 2 or not any((ROOT / top / room).is_dir() for top in (".", "tests")):
            yield f"{test.relative_to(ROOT)}: there is no room {room}"


def repeated_names():
    """A problem for every name that several sources or scripts of the product and the tests have."""
    paths = {}
    for folder in NAMED:
        for path in sources(ROOT / folder, (*SOURCES, *HEADERS, ".py", ".sh")):
            if not path.is_relative_to(ROOT / "tests/golden/layouts"):  # directories of frameworks
                paths.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    for name, where in sorted(paths.items()):
        if len(where) > 1:
            yield f"{name} is the name of {' and '.join(sorted(where))}"


def other_guards():
    """Headers whose include guard has another name than the file."""
    for folder in NAMED:
        for path in sorted(sources(ROOT / folder, HEADERS)):
            guard = re.search(r"^#ifndef\s+(\w+)", path.read_text(), re.M)
            wanted = f"FSDP_{path.stem.upper()}_{path.suffix[1:].upper()}"
            if not guard or guard[1] != wanted:
                yield f"{path.relative_to(ROOT)}: its include guard is not {wanted}"


def main():
    declared, defined = [], {}
    for name, path, kind in tags():
        if kind == "f":
            defined.setdefault(name, set()).add(path)
        elif path.suffix in HEADERS and name.startswith("fsdp_"):
            declared.append((name, path))
    problems = [*tests_elsewhere(), *repeated_names(), *other_guards()]
    for name, header in declared:
        homes = defined.get(name, set())
        if not any(home.is_relative_to(header.parent) for home in homes):
            where = ", ".join(map(str, sorted(homes))) or "nowhere"
            problems.append(f"{header}: {name} is defined in {where}")
    print("\n".join(problems) or f"{len(declared)} declarations, each defined at home; no file name twice")
    return 1 if problems or not declared else 0


sys.exit(main())
