"""Checks that lists in the pages hold what the tree has: docs/runtime.md a row per room of runtime,
docs/models.md the model_types of statedict/models/builtin, docs/maps.md the maps of statedict/map/builtin.

usage: drift.py REPOSITORY
"""

import re
import sys
from pathlib import Path

from rooms import ROOMS

ROOT = Path(sys.argv[1])


def rows():
    """What docs/runtime.md has a row for, and the rooms."""
    listed = re.findall(r"^\| `(\w+)/` \|", (ROOT / "docs/runtime.md").read_text(), re.M)
    return set(listed), set(ROOMS["runtime"]) - {"."}


def families():
    page = (ROOT / "docs/models.md").read_text()
    listed = re.search(r"^## Families\n(.*?)^## ", page, re.M | re.S)
    described = set()
    for path in (ROOT / "statedict/models/builtin").glob("*.model"):
        for types in re.findall(r"^type (.+)$", path.read_text(), re.M):
            described |= set(types.split("#")[0].split())
    return set(re.findall(r"`(\w+)`", listed[1] if listed else "")) - {"model_type"}, described


def maps():
    page = (ROOT / "docs/maps.md").read_text().split("## Built-in maps")[-1]
    cells = " ".join(re.findall(r"^\| (`.*?) \|", page, re.M))
    there = (ROOT / "statedict/map/builtin").glob("*.map")
    return set(re.findall(r"`([\w-]+)`", cells)), {path.stem for path in there}


def main():
    problems, count = [], 0
    for page, find in {"runtime": rows, "models": families, "maps": maps}.items():
        listed, there = find()
        count += len(there)
        problems += [f"docs/{page}.md does not list {name}" for name in sorted(there - listed)]
        problems += [f"docs/{page}.md lists {name}, which is not there" for name in sorted(listed - there)]
        if not there:
            problems.append(f"nothing was found that docs/{page}.md lists")
    print("\n".join(problems) or f"{count} rooms, families and maps are listed")
    return 1 if problems else 0


sys.exit(main())
