"""Checks numbers of the pages against the tree.

usage: numbers.py REPOSITORY BUILD

README.md          the tools without --mem are those that its promise excepts
reliability.md     the outcomes of a row add up to its cases; each fuzz target has a row
contributing.md    how many sources there are, give or take a twentieth
scenarios.md       the tests that run again with processes; how many seeds make orders of streams
flow_convert.md    the stages of derivations, in their order
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT, BUILD = Path(sys.argv[1]), Path(sys.argv[2])
PRODUCT = ["base", "kernels", "formats", "statedict", "runtime", "tools"]
# The words of outcomes in cells such as "24 points: worked 20, failed cleanly 4".
OUTCOMES = re.compile(r"(worked|refused|failed cleanly|saved|old|new|of the next save) ([\d,]+)")
problems = []


def number(text):
    return int(text.replace(",", ""))


def read(name):
    return (ROOT / name).read_text()


def check_memory():
    promise = re.search(r"^The promise:.*?\n\n", read("README.md"), re.M | re.S)[0]
    for tool in sorted(path.name for path in (BUILD / "bin").glob("fsdp-*")):
        command = [BUILD / "bin" / tool, "--help"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if ("--mem" in told) == (f"`{tool}`" in promise):
            problems.append(f"README.md: the promise of bounded memory is wrong about {tool}")


def check_outcomes(page):
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .* 0 \|$", page.split("\n## ")[1], re.M)
    for what, cell in rows:
        outcomes = OUTCOMES.findall(cell)
        cases = re.search(r"([\d,]+) disks", cell) or re.match(r"([\d,]+)", cell)
        wanted = number(cases[1]) * (2 if " races: " in cell else 1)
        if outcomes and sum(number(count) for _, count in outcomes) != wanted:
            problems.append(f"docs/reliability.md, '{what}': no sum of {wanted}: {cell}")
    if len(rows) < 20:
        problems.append(f"docs/reliability.md: {len(rows)} rows of counts were found")


def check_fuzz(page):
    rows = set(re.findall(r"^\| `(\w+)` \| [^|]+ \| \d+ % \|", page, re.M))
    targets = {path.name for path in (ROOT / "tests" / "fuzz" / "corpus").iterdir()}
    told = int(re.search(r"One fuzz target per parser, (\d+) in all", page)[1])
    if rows != targets or told != len(targets):
        problems.append(f"docs/reliability.md: {told} fuzz targets, {len(rows)} rows, and there are "
                        f"{len(targets)}: {sorted(rows ^ targets)}")


def check_sources():
    sources = {"product": [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.c")],
               "unit tests": [*(ROOT / "tests" / "unit").rglob("*.c")],
               "other tests": [path for path in (ROOT / "tests").rglob("*.c")
                               if "unit" not in path.relative_to(ROOT).parts]}
    for what, files in sources.items():
        told = re.search(rf"([\d,]+) sources of (?:the )?{what}", read("docs/contributing.md"))
        if not told or abs(number(told[1]) - len(files)) > len(files) / 20:
            problems.append(f"docs/contributing.md: there are {len(files)} sources of {what}")


def check_scenarios():
    introduction = " ".join(read("docs/scenarios.md").partition("\n| ")[0].split())
    again = set(re.findall(r"`(unit_\w+_processes)`", introduction))
    listed = re.search(r"foreach\(module IN ITEMS ([\w\s]+)\)\s+fsdp_unit_test_again\(unit_\$\{module\}_proc",
                       read("tests/unit/runtime/CMakeLists.txt"))[1].split()
    if again != {f"unit_{module}_processes" for module in listed}:
        problems.append(f"docs/scenarios.md lists other tests of processes than there are: {sorted(again)}")
    torture, usual = re.search(r"SEEDS = (\d+) if .* else (\d+)", read("tests/cuda/seeds.py")).groups()
    if f"{int(usual):,} seed in a run, {int(torture):,} in `./dev torture`" not in introduction:
        problems.append(f"docs/scenarios.md does not say {usual} and {torture} seeds")


def check_stages():
    """The table of stages, the comment of plan_notes.h and the page have the same names in the same order."""
    table = re.search(r"\} table\[\] = \{\n(.*?)\n\};", read("statedict/convert/convert_select.c"), re.S)[1]
    stages = re.findall(r'\{"(\w+)",', table)
    comment = re.search(r"typedef struct fsdp_convert_stage \{\n(.*?)char text",
                        read("statedict/convert/plan_notes.h"), re.S)[1]
    told = re.findall(r"^\| \| `(\w+)`: ", read("docs/flow_convert.md"), re.M)
    if not stages or told != stages:
        problems.append(f"docs/flow_convert.md: the stages are {stages}, not {told}")
    if re.findall(r'"(\w+)"', comment) != stages:
        problems.append(f"statedict/convert/plan_notes.h: the stages are {stages}")


def main():
    page = read("docs/reliability.md")
    check_memory()
    check_outcomes(page)
    check_fuzz(page)
    check_sources()
    check_scenarios()
    check_stages()
    print("\n".join(problems) or "the numbers of the pages are those of the tree")
    return 1 if problems else 0


sys.exit(main())
