"""Checks that docs/launch.md has the variables that programs look at when they start, and no others.

usage: launch_variables.py REPOSITORY

In the code a variable is a quoted word of capitals; in the page it stands between backticks.
The table of launchers has the rows of the code in their order.
"""

import re
import sys
from pathlib import Path

ROOT = Path(sys.argv[1])
NAME = r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|RANK"
PAGE = (ROOT / "docs" / "launch.md").read_text()
LAUNCH = (ROOT / "runtime" / "launch" / "launch.c").read_text()
SOURCES = [LAUNCH, *((ROOT / name).read_text() for name in
                     ("tools/cli/cli_mpi.c",))]


def main():
    known = {name for source in SOURCES for name in re.findall(f'"({NAME})"', source)}
    told = set(re.findall(f"`({NAME})`", PAGE))
    problems = [f"docs/launch.md does not have {name}" for name in sorted(known - told)]
    problems += [f"docs/launch.md has {name}, which no program looks at" for name in sorted(told - known)]
    begins = re.findall(r'^     \{("[A-Z].*)\},$', LAUNCH, re.M)
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \|[^|]*\| (?:over|by) ", PAGE, re.M)
    begins = [re.findall(r"\w+", row) for row in begins]
    rows = [re.findall(r"\w+", row) for row in rows]
    if begins != rows:
        problems.append(f"the table of launchers is not that of launch.c:\n{rows}\n{begins}")
    print("\n".join(problems) or f"{len(known)} variables, {len(rows)} launchers")
    return 1 if problems or not rows else 0


sys.exit(main())
