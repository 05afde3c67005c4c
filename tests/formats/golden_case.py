"""One case of tests/golden: a real file is listed as its expected.json says, a hostile one is refused.

usage: golden_case.py BIN CASE [sanitized]
Sanitizers need more address space than a hostile file may take: then it is not limited.
"""

import json
import resource
import sys
import tarfile
import tempfile
from pathlib import Path

from check_listing import differences
from tools import list_path

CASE = Path(sys.argv[2])
REFUSALS = {3: "not recognised", 4: "damaged", 5: "refused", 9: "over a limit"}
ADDRESS_SPACE = 4 << 30


def limit_memory():
    if "sanitized" in sys.argv[3:]:
        return
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))


def refusal_problem(path, may_be_read):
    ran = list_path(path, preexec_fn=limit_memory)
    if ran.returncode == 0 and may_be_read:
        return None
    if ran.returncode not in REFUSALS:
        return f"{path.name}: status {ran.returncode}, not a refusal: {ran.stderr}"
    if not ran.stderr.startswith("error: "):
        return f"{path.name}: no message: {ran.stderr!r}"
    print(f"{path.name}: {REFUSALS[ran.returncode]}: {ran.stderr.strip()}")
    return None


def listing_problems(expected, path):
    ran = list_path(path)
    if ran.returncode in REFUSALS and expected.get("refuse_or_read"):
        print(f"refused: {ran.stderr.strip()}")
        return []
    if ran.returncode != 0:
        return [f"status {ran.returncode}: {ran.stderr}"]
    return list(differences(expected, json.loads(ran.stdout)))


def set_problems(expected, data):
    """One of several sets of rank files, by the pattern of its names."""
    return [f"{expected['files']}: {line}" for line in listing_problems(expected, data / expected["files"])]


def unpacked(expected, folder):
    """The case's data, which may be one archive: thousands of files would be slow to check out."""
    if "packed" in expected:
        with tarfile.open(CASE / expected["packed"]) as archive:
            archive.extractall(folder)  # Debian 12: no filter="data" yet
        return Path(folder) / "data"
    return CASE / "data"


def main(folder):
    expected = json.loads((CASE / "expected.json").read_text())
    data = unpacked(expected, folder)
    entries = sorted(data.iterdir())
    if not entries:
        return ["the case has no data"]
    if expected.get("refuse"):
        free = expected.get("either_entries", [])
        said = [refusal_problem(path, path.name in free) for path in entries]
        left = [name for name in expected.get("must_not_exist", []) if Path(name).exists()]
        return [line for line in said if line] + [f"{name} was created" for name in left]
    if "sets" in expected:
        return [line for one in (expected, *expected["sets"].values()) for line in set_problems(one, data)]
    alone = len(entries) == 1 and entries[0].is_file()
    return listing_problems(expected, entries[0] if alone else data)


with tempfile.TemporaryDirectory() as scratch:
    problems = main(scratch)
print("\n".join(problems) or "as expected")
sys.exit(1 if problems else 0)
