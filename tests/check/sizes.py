"""Checks lengths: functions at most 80 lines (19 of 20 at most 50), .c files at most 700.

usage: sizes.py REPOSITORY
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(sys.argv[1])
FOLDERS = ["base", "kernels", "formats", "statedict", "runtime", "tools"]
HARD, USUAL, FILE = 80, 50, 700


def functions(sources):
    command = ["ctags", "--output-format=json", "--fields=+ne", "--kinds-C=f", "-o", "-", *sources]
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        tag = json.loads(line)
        if "end" in tag:
            yield tag["path"], tag["line"], tag["name"], tag["end"] - tag["line"] + 1


def main():
    sources = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.c"))
    problems = []
    for source in sources:
        lines = len(source.read_text().splitlines())
        if lines > FILE:
            problems.append(f"{source}: {lines} lines, {FILE} are allowed")
    lengths = []
    for path, line, name, length in functions(map(str, sources)):
        lengths.append(length)
        if length > HARD:
            problems.append(f"{path}:{line}: {name} has {length} lines, {HARD} are allowed")
    long = sum(length > USUAL for length in lengths)
    if long * 20 > len(lengths):
        problems.append(f"{long} of {len(lengths)} functions have more than {USUAL} lines")
    print("\n".join(problems) or f"{len(lengths)} functions, {long} over {USUAL} lines")
    return 1 if problems or not lengths else 0


sys.exit(main())
