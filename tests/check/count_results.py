"""Prints "PASSED FAILED SKIPPED" of a JUnit file that ctest wrote."""

import sys
import xml.etree.ElementTree as xml

counts = {"passed": 0, "failed": 0, "skipped": 0}
for case in xml.parse(sys.argv[1]).iter("testcase"):
    status = case.get("status")
    note = case.find("skipped")
    # A test that says that it cannot run here is skipped; one whose program is missing has failed.
    chose_to_skip = note is not None and "SKIP" in note.get("message", "")
    if status == "run":
        counts["passed"] += 1
    elif status == "disabled" or (status == "notrun" and chose_to_skip):
        counts["skipped"] += 1
    else:
        counts["failed"] += 1
print(*counts.values())
