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
NAMES = "open|creat|mkdir|rename|unlink|link|symlink|execve|truncate|chmod"
CALL = re.compile(rf'(?:{NAMES})(?:at2?)?\((?:AT_FDCWD, )?"((?:[^"\\]|\\.)*)"')


def is_allowed(path, given):
    own = tools.BIN.parent
    return (
        path.startswith(SYSTEM)
        or any(path == str(root) or path.startswith(f"{root}/") for root in given)
        or (path.startswith(f"{own}/") and not path.startswith(f"{own}/tests"))
        or not path.startswith(("/", ".."))  # below a directory that was opened
    )


def trace(log, given, program, *arguments):
    strace = ["strace", "-f", "-qq", "-s", "4096", "-e", "trace=%file", "-o", log]
    command = [*strace, str(tools.BIN / program), *map(str, arguments)]
    subprocess.run(command, capture_output=True, timeout=120, check=False)
    calls = CALL.findall(Path(log).read_text(encoding="utf-8", errors="replace"))
    tools.check(len(calls) > 2, f"{program} {arguments}: strace saw nothing")
    for path in calls:
        lies_at = os.path.normpath(path)
        tools.check(is_allowed(lies_at, given), f"{program} {arguments}: '{lies_at}' was touched")


def main():
    hostile = sorted((GOLDEN / "hostile").glob("*/data/*"))
    tools.check(len(hostile) > 50, f"only {len(hostile)} hostile entries")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "strace"
        for entry in hostile[:: 1 if len(hostile) < 120 else 4]:
            trace(log, [entry.resolve()], "fsdp-ls", "--json", "--digest", "sha256", entry)
        for group in ("safetensors", "hf", "npz", "torchsave", "dcp", "hdf5"):
            case = sorted((GOLDEN / group).iterdir())[0] / "data"
            source = case if group in ("hf", "dcp") else min(case.iterdir())
            target = Path(folder) / "out" / group
            target.parent.mkdir(exist_ok=True)
            given = [source.resolve(), target.parent]
            trace(log, given, "fsdp-convert", source, target, "--to", "fsdp")
    print("\n".join(tools.problems) or "nothing outside was touched")
    return bool(tools.problems)


sys.exit(main())
