"""Writes the counts of the matrices into the table of docs/reliability.md.

usage: table.py JUNIT_FILE [PAGE]    prints the rows; with PAGE writes those that ran into its table

The rows are the lines that the tests print between bars.
"""

import re
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

HEAD = "| what | cases | must be zero |\n|---|---|---|\n"


def with_commas(row):
    what, rest = row.split(" | ", 1)
    return what + " | " + re.sub(r"\d{4,}", lambda number: f"{int(number[0]):,}", rest)


def rows_of(path):
    lines = [line for case in xml.parse(path).iter("testcase")
             for line in (case.findtext("system-out") or "").splitlines()]
    return {line.split(" | ")[0]: with_commas(line) for line in lines if line.startswith("| ")}


def write(page, rows):
    """A row that did not run stays, as its test may have been left out."""
    before, after = page.read_text().split(HEAD)
    table, behind = after.split("\n\n", 1)
    rows = {row.split(" | ")[0]: row for row in table.splitlines()} | rows
    page.write_text(before + HEAD + "\n".join(sorted(rows.values())) + "\n\n" + behind)


def main():
    rows = rows_of(sys.argv[1])
    print(HEAD, *(f"{row}\n" for row in sorted(rows.values())), sep="", end="")
    if len(sys.argv) > 2:
        write(Path(sys.argv[2]), rows)


main()
