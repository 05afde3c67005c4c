"""The real files of a case in tests/golden: what a tool is given to read."""

import json
from pathlib import Path


def sources(case):
    """A file, a directory, or the patterns of the sets of rank files that lie in one."""
    case = Path(case)
    told = case / "expected.json"
    expected = json.loads(told.read_text()) if told.exists() else {}
    if "sets" in expected:
        return [case / "data" / one["files"] for one in (expected, *expected["sets"].values())]
    entries = list((case / "data").iterdir())
    return [entries[0] if len(entries) == 1 and entries[0].is_file() else case / "data"]
