"""Checks that what the documents link to is there: files, and headings of Markdown files.

usage: links.py REPOSITORY

Looks at README.md and docs/**/*.md. Links to other sites are not followed.
"""

import re
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(sys.argv[1]).resolve()
# [text](target), [name]: target, and the HTML attributes.
INLINE, NAMED, HTML = (r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)", r"^\[[^\]]+\]:\s*(\S+)",
                       r"(?:src|href)=\"([^\"]+)\"")
LINK = re.compile(f"{INLINE}|{NAMED}|{HTML}", re.M)


def without_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def prose(text):
    """The text without its code, where brackets mean other things."""
    return re.sub(r"`[^`\n]*`", "code", without_blocks(text))


def anchor(heading):
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")


def anchors(path):
    return {anchor(heading) for heading in re.findall(r"^#+ +(.*)$", without_blocks(path.read_text()), re.M)}


def problem_of(document, link):
    target, _, heading = unquote(link).partition("#")
    path = (document.parent / target).resolve() if target else document
    if ROOT not in path.parents and path != ROOT:
        return "leaves the repository"
    if not path.exists():
        return "is not there"
    if heading and path.suffix == ".md" and heading not in anchors(path):
        return "has no such heading"
    return None


def main():
    problems, count = [], 0
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for match in LINK.finditer(prose(document.read_text())):
            link = next(filter(None, match.groups()))
            if re.match(r"[a-z]+:", link):
                continue
            count += 1
            problem = problem_of(document, link)
            if problem:
                problems.append(f"{document.relative_to(ROOT)}: '{link}' {problem}")
    print("\n".join(problems) or f"{count} links lead somewhere")
    return 1 if problems or count == 0 else 0


sys.exit(main())
