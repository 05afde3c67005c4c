"""
opens.py BIN GOLDEN: no tool opens, makes or runs anything outside the paths it was given. Every hostile entry and one file
of every format is listed under strace; what the loader and libc need before is a short list of places of the system.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import tools

GOLDEN = Path(sys.argv[2])
SYSTEM = ("/etc/ld.so", "/lib/", "/lib64/", "/usr/lib/", "/usr/share/locale", "/usr/share/zoneinfo", "/etc/localtime", "/proc/", "/sys/",
          "/dev/null")  # fmt: skip
CALL = re.compile(r'(?:open|openat|openat2|creat|mkdir|mkdirat|rename|renameat2|unlink|unlinkat|link|linkat|symlink'
                  r'|symlinkat|execve|truncate|chmod|fchmodat)\((?:AT_FDCWD, )?"((?:[^"\\]|\\.)*)"')  # fmt: skip


def is_allowed(path, given):
    own = tools.BIN.parent
    return (
        path.startswith(SYSTEM)
        or any(path == str(root) or path.startswith(f"{root}/") for root in given)
        or (path.startswith(f"{own}/") and not path.startswith(f"{own}/tests"))
        or not path.startswith(("/", ".."))  # below a directory that was opened
    )


def trace(log, given, program, *arguments):
    command = ["strace", "-f", "-qq", "-s", "4096", "-e", "trace=%file", "-o", log, str(tools.BIN / program)]
    tools.subprocess.run([*command, *map(str, arguments)], capture_output=True, timeout=120, check=False)
    calls = CALL.findall(Path(log).read_text(encoding="utf-8", errors="replace"))
    tools.check(len(calls) > 2, f"{program} {arguments}: strace saw nothing")
    for path in calls:
        lies_at = os.path.normpath(path)
        tools.check(is_allowed(lies_at, given), f"{program} {arguments}: '{lies_at}' was touched")


def main():
    hostile = sorted(entry for case in (GOLDEN / "hostile").iterdir() for entry in (case / "data").iterdir())
    tools.check(len(hostile) > 50, f"only {len(hostile)} hostile entries")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "strace"
        for entry in hostile[:: 1 if len(hostile) < 120 else 4]:
            trace(log, [entry.resolve()], "fsdp-ls", "--json", "--digest", "sha256", entry)
        for group in ("safetensors", "hf", "npz", "torchsave", "dcp", "hdf5"):
            case = sorted((GOLDEN / group).iterdir())[0] / "data"
            source = next(iter(sorted(case.iterdir()))) if group not in ("hf", "dcp") else case
            target = Path(folder) / "out" / group
            target.parent.mkdir(exist_ok=True)
            trace(log, [source.resolve(), target.parent], "fsdp-convert", source, target, "--to", "fsdp")
    print("\n".join(tools.problems) or "nothing outside was touched")
    return bool(tools.problems)


sys.exit(main())
