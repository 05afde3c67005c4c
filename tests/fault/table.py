"""Prints the counts of the matrices as the table that docs/reliability.md holds.

usage: table.py JUNIT_FILE

The rows are the lines that the tests print between bars.
"""

import sys
import xml.etree.ElementTree as xml

rows = []
for case in xml.parse(sys.argv[1]).iter("testcase"):
    output = case.findtext("system-out") or ""
    rows += [line for line in output.splitlines() if line.startswith("| ")]
print("| what | tried | went wrong |\n|---|---|---|", *rows, sep="\n")
