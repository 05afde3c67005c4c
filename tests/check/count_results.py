"""Prints "PASSED FAILED SKIPPED NAMES" of a JUnit file that ctest wrote, with the names of those skipped."""

import sys
import xml.etree.ElementTree as xml

counts = {"passed": 0, "failed": 0, "skipped": 0}
left_out = []
for case in xml.parse(sys.argv[1]).iter("testcase"):
    status = case.get("status")
    note = case.find("skipped")
    # A test that says that it cannot run here is skipped; one whose program is missing has failed.
    chose_to_skip = note is not None and "SKIP" in note.get("message", "")
    if status == "run":
        counts["passed"] += 1
    elif status == "disabled" or (status == "notrun" and chose_to_skip):
        counts["skipped"] += 1
        left_out.append(case.get("name"))
    else:
        counts["failed"] += 1
print(*counts.values(), *left_out)
