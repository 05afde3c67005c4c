"""
opens.py BIN GOLDEN: no tool opens, makes or runs anything outside the paths it was given. Every hostile
entry and one file of every format is listed under strace; what the loader and libc need before that is a
short list of places of the system.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import tools

GOLDEN = Path(sys.argv[2])
SYSTEM = (
    "/etc/ld.so",
    "/etc/localtime",
    "/lib/",
    "/lib64/",
    "/usr/lib/",
    "/usr/share/locale",
    "/usr/share/zoneinfo",
    "/proc/",
    "/sys/",
    "/dev/null",
)
NAMES = "open|creat|mkdir|mknod|rename|unlink|rmdir|link|symlink|execve|truncate|chmod|chown|chdir"
CALL = re.compile(rf"(?:^|\s)(?:{NAMES})(?:at)?2?\((.*)")
# A path and the directory that it is relative to, which strace -y names where a descriptor says it.
PATH = re.compile(r'(?:(?:\d+|AT_FDCWD)(?:<([^>]*)>)?, )?"((?:[^"\\]|\\.)*)"(\.\.\.)?')
# The path of libraries ends with ":" in what CMake builds, and so the loader looks where it was started.
LOADER = re.compile(r'"[^/"][^"]*\.so[.0-9]*", O_RDONLY\|O_CLOEXEC\) = -1 ENOENT')


def paths_of(line, started_in):
    """The paths of a call, as they are without links; those of other lines are not asked for."""
    call = None if LOADER.search(line) else CALL.search(line)
    found = PATH.findall(call.group(1)) if call else []
    if "execve" in line:
        found = found[:1]  # the arguments of a program are not paths
    for folder, path, is_cut in found:
        tools.check(not is_cut, f"a path is cut off: {line}")
        yield path, os.path.normpath(os.path.join(folder or started_in, path))


def is_allowed(path, lies_at, given):
    own = tools.BIN.resolve().parent
    if path.startswith(f"{own}/bin/../lib/"):  # the loader: $ORIGIN/../lib
        return True
    return ".." not in path.split("/") and (
        lies_at.startswith(SYSTEM)
        or any(lies_at in (str(root), f"{root}.xxh3") or lies_at.startswith(f"{root}/") for root in given)
        or (lies_at.startswith(f"{own}/") and not lies_at.startswith(f"{own}/tests"))
    )


def outside(lines, given, started_in):
    """The paths outside that are touched, and the number of all paths."""
    paths = [path for line in lines for path in paths_of(line, started_in)]
    return [path for path, lies_at in paths if not is_allowed(path, lies_at, given)], len(paths)


def trace(log, given, statuses, program, *arguments):
    strace = ["strace", "-f", "-y", "-qq", "-s", "4096", "-e", "trace=%file", "-o", log,
              "-E", "LD_LIBRARY_PATH"]  # without it: the loader looks where a user's does
    command = [*strace, str(tools.BIN.resolve() / program), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(command, capture_output=True, timeout=120, check=False, cwd=empty)
    lines = Path(log).read_text(encoding="utf-8", errors="replace").splitlines()
    touched, count = outside(lines, given, empty)
    what = f"{program} {arguments}"
    tools.check(done.returncode in statuses, f"{what}: exit status {done.returncode}: {done.stderr}")
    tools.check(count > 2, f"{what}: strace saw nothing")
    for path in touched:
        tools.check(False, f"{what}: '{path}' was touched")


def check_judge():
    """Lines of strace that must be found, and ones that are fine."""
    given, here = [Path("/given")], "/here"
    bad = (
        'openat(5</given>, "/etc/passwd", O_RDONLY) = 6',
        'openat(5</given/a>, "../../etc/passwd", O_RDONLY) = 6',
        'openat(5</etc>, "passwd", O_RDONLY) = 6',
        '77 openat(AT_FDCWD</here>, "x", O_RDONLY) = 6',
        'mkdir("x", 0777) = 0',
        'renameat2(AT_FDCWD</here>, "/given/a", AT_FDCWD</here>, "/tmp/b", 0) = 0',
        'execve("/bin/sh", ["sh"], 0x7f /* 9 vars */) = 0',
        'open("/given/../etc/passwd", O_RDONLY) = 6',
    )
    good = (
        'openat(5</given>, "a", O_RDONLY) = 6',
        '77 rename("/given/a", "/given/b") = 0',
        'openat(AT_FDCWD</here>, "/etc/ld.so.cache", O_RDONLY|O_CLOEXEC) = 3',
        'newfstatat(AT_FDCWD</here>, "/etc/passwd", {st_mode=S_IFREG}, 0) = 0',
    )
    for line in bad:
        tools.check(len(outside([line], given, here)[0]) == 1, f"not found: {line}")
    for line in good:
        tools.check(not outside([line], given, here)[0], f"found: {line}")


def main():
    check_judge()
    hostile = sorted((GOLDEN / "hostile").glob("*/data/*"))
    tools.check(len(hostile) > 50, f"only {len(hostile)} hostile entries")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "strace"
        for entry in hostile[:: 1 if len(hostile) < 120 else 4]:
            arguments = ("--json", "--digest", "sha256", entry.resolve())
            trace(log, [entry.resolve()], (0, 3, 4, 5, 9), "fsdp-ls", *arguments)
        for group in ("safetensors", "hf", "npz", "torchsave", "dcp", "hdf5"):
            case = sorted((GOLDEN / group).iterdir())[0] / "data"
            source = case if group in ("hf", "dcp") else min(case.iterdir())
            target = Path(folder) / "out" / group
            target.parent.mkdir(exist_ok=True)
            given = [source.resolve(), target.parent]
            trace(log, given, (0,), "fsdp-convert", source.resolve(), target, "--to", "fsdp")
    print("\n".join(tools.problems) or "nothing outside was touched")
    return bool(tools.problems)


sys.exit(main())
