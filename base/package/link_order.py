"""Links as a Unix linker does, in the order of the command line: CMake's launcher of zig's linker.

usage: link_order.py COMMAND..., in the build folder

zig hands archives to its linker before shared libraries. A tool that names libfsdp.so and then libfsdp.a, for
the few functions that the shared library does not export, would get the whole library from the archive, and
HDF5 with it. In place of the archive this script names the objects that the tool needs of it.
"""
import collections
import json
import pathlib
import re
import subprocess
import sys

ARCHIVE = "lib/libfsdp.a"


def symbols(*command):
    """Of each file: the symbols that it defines, and those that it asks for."""
    listed = subprocess.run(["nm", "-P", "-A", *command], check=True, capture_output=True, text=True).stdout
    defined, asked = collections.defaultdict(set), collections.defaultdict(set)
    for line in listed.splitlines():
        file, rest = line.split(": ", 1)
        name, kind = rest.split()[:2]
        if kind == "U":
            asked[file].add(name)
        elif kind.isupper():
            defined[file].add(name)
    return defined, asked


def needed(tool, shared, library):
    """The objects of the library that the tool's objects need besides the shared library."""
    exported = set().union(*symbols("-D", shared)[0].values())
    defined, asked = symbols(*library)
    home = {name: file for file, names in defined.items() for name in names}
    taken, wanted = set(), list(set().union(*symbols(*tool)[1].values()))
    while wanted:
        name = wanted.pop()
        file = home.get(name)
        if name not in exported and file and file not in taken:
            taken.add(file)
            wanted.extend(asked[file])
    return sorted(taken)


def main(command):
    shared = [word for word in command if word.startswith("lib/libfsdp.so")]
    if shared and ARCHIVE in command[command.index(shared[0]):]:
        tool = [word for word in command if word.endswith(".o")]
        # not what lies in the folder: it may have objects of sources that are gone
        compiled = json.loads(pathlib.Path("compile_commands.json").read_text())
        outputs = (re.search(r" -o (\S+)", entry["command"])[1] for entry in compiled)
        library = sorted(path for path in outputs if path.startswith("CMakeFiles/fsdp_objects.dir/"))
        at = command.index(ARCHIVE)
        command[at:at + 1] = needed(tool, shared[0], library)
    return subprocess.run(command).returncode


sys.exit(main(sys.argv[1:]))
