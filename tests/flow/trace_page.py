"""The trace on a flow page (its block fenced with ```trace) against that of a run: the page is golden."""

import re
import sys
from pathlib import Path

BLOCK = re.compile(r"(?<=^```trace\n).*?(?=^```$)", re.M | re.S)


def compare(path, lines, numbers):
    """lines of the run, numbers of the steps that the page must have. --update writes the block again."""
    page, wanted = Path(path).read_text(), "\n".join(lines) + "\n"
    if sys.argv[3:] == ["--update"]:
        Path(path).write_text(BLOCK.sub(lambda _: wanted, page))
        return
    found = BLOCK.findall(page)
    assert found == [wanted], f"{path} has\n{found}\nand a run is\n{wanted}"
    missing = [number for number in sorted(set(numbers)) if f"\n| {number} | **" not in page]
    assert not missing, f"{path} has no steps {missing}"
    print(f"{len(lines)} events, as {path} has them")
