"""Checks that docs/scenarios.md has a row for each of C1 to C23 and S1 to S10, and that every test it names
is there.

usage: scenarios.py REPOSITORY BUILD CTEST

`NAME: test` in the page is a test that CTest knows, and of its program one that is written as
Test(suite, test).
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT, BUILD, CTEST = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
PAGE = (ROOT / "docs" / "scenarios.md").read_text()
WANTED = [f"C{i}" for i in range(1, 24)] + [f"S{i}" for i in range(1, 11)]
NAMED = re.compile(r"`(\w+)(?:: (\w+))?`")


def known_tests():
    listed = subprocess.run([CTEST, "--test-dir", BUILD, "--show-only=json-v1"], check=True,
                            capture_output=True, text=True).stdout
    return {test["name"] for test in json.loads(listed)["tests"]}


def is_written(name, test):
    sources = (ROOT / "tests" / "unit").rglob(f"test_{name.removeprefix('unit_')}.c")
    return any(re.search(rf"^Test\(\w+, {test}\b", source.read_text(), re.M) for source in sources)


def problems_of(cell, known):
    for name, test in NAMED.findall(cell):
        if name not in known:
            yield f"CTest has no '{name}'"
        elif test and not is_written(name, test):
            yield f"'{name}' has no test '{test}'"


def main():
    known, problems = known_tests(), []
    rows = dict(re.findall(r"^\| ([CS]\d+) \| .* \| (.+) \|$", PAGE, re.M))
    for scenario in WANTED:
        if not NAMED.search(rows.get(scenario, "")):
            problems.append(f"{scenario} names no test")
        problems += [f"{scenario}: {problem}" for problem in problems_of(rows.get(scenario, ""), known)]
    introduction = PAGE.partition("\n| ")[0]
    named = [name for name, _ in NAMED.findall(introduction) if re.match("unit_|step_|peers_", name)]
    problems += [f"CTest has no '{name}'" for name in named if name not in known]
    print("\n".join(problems) or f"{len(rows)} scenarios, {len(NAMED.findall(PAGE))} names of tests")
    return 1 if problems or sorted(rows) != sorted(WANTED) else 0


sys.exit(main())
