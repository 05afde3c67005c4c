"""Checks that what is installed is used: each public function has a user in the product outside its own room
(the Python package included), or in docs/examples, or a row of a table in docs/runtime.md whose first column
is PyTorch's; and each member of a public struct of options is set there, or has such a row.

usage: installed.py REPOSITORY [--list]

A member is set where it is assigned or initialised by its name, whatever the struct is, and where the table
of a conversion's options names it. The count of a list is set with its list. Names in rows that no
installed header declares are problems, too.

--list prints each function and member that only a row names.
"""

import re
import subprocess
import sys
from pathlib import Path

from rooms import ROOMS, SOURCES, room, sources

ROOT = Path(sys.argv[1])
NOT_CODE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.S)
FUNCTION = re.compile(r"\bFSDP_API\b[^;]*?\b(fsdp_\w+)\s*\(")
OPTIONS = re.compile(r"\btypedef struct (fsdp_\w*opts)\s*\{(.*?)\}\s*\1\s*;", re.S)
SET = re.compile(r"(?:\.|->)(\w+)(?=(?:\[[^\]]*\])?(?:\.\w+)?\s*=(?!=))"
                 r"|\bTYPED\(\s*,\s*\w+,\s*(?:\w+\.)?(\w+)")

PYTHON_SET = re.compile(r"[(\s](\w+)=(?!=)")


def code(path):
    return NOT_CODE.sub(" ", (ROOT / path).read_text())


def headers():
    """The installed headers, by the house's list."""
    house = (ROOT / "CMakeLists.txt").read_text()
    lists = re.findall(r"^set\(FSDP_(?:PUBLIC|MPI)_HEADERS\s([^)]*)\)", house, re.M)
    return " ".join(lists).split()


def members(body):
    """Names of the members of a struct's body."""
    for statement in body.split(";"):
        callback = re.search(r"\(\*(\w+)\)", statement)
        if callback:
            yield callback[1]
        else:
            yield from re.findall(r"(\w+)\s*(?:\[[^\]]*\]\s*)?(?=,|$)", statement.strip())


def homes(files):
    """The file that defines each function."""
    command = ["ctags", "--kinds-C=f", "-f", "-", "-L", "-"]
    listed = subprocess.run(command, cwd=ROOT, input="\n".join(files), stdout=subprocess.PIPE, text=True,
                            check=True)
    fields = (line.split("\t") for line in listed.stdout.splitlines())
    return {name: path for name, path, *_ in fields if path.endswith(SOURCES)}


def rows():
    """The names in the rows of PyTorch's tables, without the first column, which has PyTorch's own."""
    names, is_table = set(), False
    for line in (ROOT / "docs/runtime.md").read_text().splitlines():
        is_table = line.startswith("| PyTorch") or (is_table and line.startswith("|"))
        if is_table:
            for quoted in re.findall(r"`([^`]*)`", "".join(line.split("|")[2:])):
                names.update(re.findall(r"\w+", quoted))
    return names


def users():
    """Every file of the product and of the examples, without comments and texts."""
    product = [path for folder in ROOMS for path in sources(ROOT / folder)]
    product += (ROOT / "tools/python/fsdp").glob("*.py")
    files = [str(path.relative_to(ROOT)) for path in sorted([*product, *sources(ROOT / "docs/examples")])]
    return {path: code(path) for path in files}


def unused_functions(text):
    """Functions that nothing outside their own room calls, with the header of each."""
    defined = homes(list(text))
    declared = {name: path for path in headers() for name in FUNCTION.findall(text[path])}
    named = {}
    for path, words in text.items():
        for name in set(re.findall(r"\bfsdp_\w+", words)):
            named.setdefault(name, set()).add(path)
    for name, header in declared.items():
        home = defined[name]
        of = home.split("/")[0], room(home)
        callers = named[name] - {header}
        if all((path.split("/")[0], room(path)) == of for path in callers):
            yield name, header
    print(f"{len(declared)} public functions", end=", ")


def unset_members(text):
    """Members of structs of options that nothing sets."""
    is_set = {name for path in text for found in SET.findall(text[path]) for name in found}
    is_set |= {name for path in text if path.endswith(".py") for name in PYTHON_SET.findall(text[path])}
    total = 0
    for header in headers():
        for struct, body in OPTIONS.findall(text[header]):
            for name in members(body):
                total += 1
                of_list = {name.removesuffix("_count"), name.removesuffix("_count") + "s"}
                if name not in is_set and not (name.endswith("_count") and of_list & is_set):
                    yield name, f"{header}: {struct}"
    print(f"{total} options", end=", ")


def main():
    text, told = users(), rows()
    alone = [*unused_functions(text), *unset_members(text)]
    problems = [f"{where}: {name} has no user" for name, where in alone if name not in told]
    known = set(re.findall(r"\w+", " ".join((ROOT / path).read_text() for path in headers())))
    problems += [f"docs/runtime.md: no installed header has {name}" for name in sorted(told - known)
                 if name.startswith(("fsdp_", "FSDP_"))]
    if "--list" in sys.argv:
        print("\n".join(f"{where}: {name}" for name, where in alone if name in told))
    print("\n".join(problems) or f"{len(alone)} of both are PyTorch's alone")
    return 1 if problems else 0


sys.exit(main())
