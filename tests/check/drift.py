"""Checks that lists in the pages hold what rooms.py lists: docs/runtime.md has a row per room of runtime.

usage: drift.py REPOSITORY
"""

import re
import sys
from pathlib import Path

from rooms import ROOMS

PAGE = Path(sys.argv[1]) / "docs" / "runtime.md"


def main():
    rows = set(re.findall(r"^\| `(\w+)/` \|", PAGE.read_text(), re.M))
    rooms = set(ROOMS["runtime"]) - {"."}
    problems = [f"docs/runtime.md has no row for the room {room}" for room in sorted(rooms - rows)]
    problems += [f"docs/runtime.md has a row for {row}, which is not a room" for row in sorted(rows - rooms)]
    print("\n".join(problems) or f"{len(rooms)} rooms have a row")
    return 1 if problems or not rooms else 0


sys.exit(main())
