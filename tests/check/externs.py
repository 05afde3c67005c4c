"""Checks that rooms are not cut into files without need: at most LIMIT private functions are extern for one
file of their own room alone.

usage: externs.py REPOSITORY [--list [ROOM]]

Counts each function that is not static, is declared in a header of the product without FSDP_API, and is
used by exactly one file besides those that define and declare it, if that file is in the room of the
definition. A file uses a function that it names outside comments and texts (a header: apart from its
declaration), and one that an inline function of a header calls for it; files are those of the product, not
tests. Functions that a macro defines and variants of a kernel, which several files define, are not counted.

--list prints them by room, with the file that defines and the one that uses each; externs that no other file
of the product uses (tests alone) follow.
"""

import collections
import re
import subprocess
import sys
from pathlib import Path

from rooms import SOURCES, room, sources

ROOT = Path(sys.argv[1])
FOLDERS = ["base", "kernels", "formats", "statedict", "runtime", "tools"]
LIMIT = 189

NOT_CODE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.S)
INLINE = re.compile(r"^(?:__attribute__\(\(always_inline\)\) )?static inline\b[^;{}]*?"
                    r"\b(\w+)\([^;{}]*\)\s\{(?:\n(.*?)^\}|(.*?)\}$)", re.M | re.S)


def code(path):
    return NOT_CODE.sub(" ", (ROOT / path).read_text())


def tags(files):
    """Functions that are not static: name, file, and whether it defines or declares the function."""
    command = ["ctags", "--kinds-C=fp", "--kinds-CUDA=fp", "--fields=k", "--extras=-F", "-f", "-", "-L", "-"]
    listed = subprocess.run(command, cwd=ROOT, input="\n".join(files), stdout=subprocess.PIPE, text=True,
                            check=True)
    for line in listed.stdout.splitlines():
        fields = line.split("\t")
        yield fields[0], fields[1], fields[-1] == "f"


def private_externs(files, text):
    """The file that defines each private extern, and the headers that declare it."""
    defined, declared = collections.defaultdict(set), collections.defaultdict(set)
    for name, path, is_definition in tags(files):
        if not is_definition:
            declared[name].add(path)
        elif path.endswith(SOURCES):
            defined[name].add(path)
    for name, homes in sorted(defined.items()):
        headers = {path for path in declared[name] if not path.endswith(SOURCES)}
        public = any(re.search(rf"\bFSDP_API\b[^;]*\b{name}\s*\(", text[path]) for path in headers)
        if len(homes) == 1 and headers and not public:
            yield name, next(iter(homes)), headers


def uses(files, text):
    """The files that name each word. What an inline function of a header names, its users name."""
    named, inside = collections.defaultdict(set), {}
    for path in files:
        bodies = [] if path.endswith(SOURCES) else INLINE.findall(text[path])
        for name, lines, line in bodies:
            inside[path, name] = set(re.findall(r"\w+", lines + line))
        for word in re.findall(r"\w+", INLINE.sub(r"\1", text[path]) if bodies else text[path]):
            named[word].add(path)
    changed = True
    while changed: # an inline function may call another one
        changed = False
        for (path, name), called in inside.items():
            for word in called:
                changed |= not named[name] - {path} <= named[word]
                named[word] |= named[name] - {path}
    return named


def found():
    """Private externs with at most one user, by room: name, file, and the user or None."""
    files = [str(path.relative_to(ROOT)) for folder in FOLDERS for path in sorted(sources(ROOT / folder))]
    text = {path: code(path) for path in files}
    named = uses(files, text)
    rooms, total = collections.defaultdict(list), 0
    for name, home, headers in private_externs(files, text):
        total += 1
        calls = {path for path in headers if len(re.findall(rf"\b{name}\b", INLINE.sub("", text[path]))) > 1}
        users = named[name] - {home} - headers | calls
        of = home.split("/")[0], room(home)
        if len(users) == 1:
            user = next(iter(users))
            if (user.split("/")[0], room(user)) == of:
                rooms[of].append((name, home, user))
        elif not users:
            rooms[of].append((name, home, None))
    return rooms, total


def show(rooms, wanted):
    for of, externs in sorted(rooms.items(), key=lambda item: -len(item[1])):
        name = "/".join(of)
        if wanted and name != wanted:
            continue
        print(f"{name}: {sum(1 for extern in externs if extern[2])}")
        def order(extern):
            return extern[2] is None, extern[1:], extern[0]
        for extern, home, user in sorted(externs, key=order):
            print(f"  {Path(home).name:28} {Path(user).name if user else '-':28} {extern}")


def main():
    rooms, total = found()
    if "--list" in sys.argv:
        show(rooms, sys.argv[3] if len(sys.argv) > 3 else None)
    count = sum(1 for externs in rooms.values() for extern in externs if extern[2])
    alone = sum(map(len, rooms.values())) - count
    print(f"{count} of {total} private externs have one user, a file of their room, {LIMIT} are allowed; "
          f"{alone} have none")
    return 1 if count > LIMIT or not total else 0


sys.exit(main())
