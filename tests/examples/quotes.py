"""Checks that the code in the documents is code that is compiled and run.

usage: quotes.py REPOSITORY

Every block fenced with ```c or ```python in README.md, docs/*.md and docs/cookbook must stand in a
file of docs/examples, line by line; "..." on a line of its own stands for lines left out.
"""

import re
import sys
from pathlib import Path

ROOT = Path(sys.argv[1])


def stands_in(block, source):
    """Each part between "..." lines is found in the source, in order."""
    at = 0
    for part in re.split(r"^\.\.\.\n", block, flags=re.MULTILINE):
        at = source.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def main():
    problems, count = [], 0
    pages = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/cookbook").glob("*.md"))]
    for language, suffix in (("c", "c"), ("python", "py")):
        sources = [path.read_text() for path in sorted((ROOT / "docs/examples").glob(f"*.{suffix}"))]
        fence = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
        for document in [ROOT / "README.md", *pages]:
            for block in fence.findall(document.read_text()):
                count += 1
                if not any(stands_in(block, source) for source in sources):
                    problems.append(f"{document.relative_to(ROOT)}: not in docs/examples:\n{block}")
    print("\n".join(problems) or f"{count} blocks of code are compiled and run")
    return 1 if problems or count == 0 else 0


sys.exit(main())
