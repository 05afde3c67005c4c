"""Checks that every `file.c:function` in the documents names a file and a function that it defines.

usage: references.py REPOSITORY

Looks at README.md and docs/**/*.md. A file is a path from the root of the tree, or a name that one file has.
In a header or a script, the name is any word that stands in it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(sys.argv[1]).resolve()
REFERENCE = re.compile(r"(?<![\w/.-])([\w/.-]+\.(?:c|h|py|sh|cmake)):([A-Za-z_]\w*)")


def files_named(name):
    """A path from the root is itself only; a name without folders is that of any file."""
    if "/" in name:
        return [ROOT / name] if (ROOT / name).is_file() else []
    return FILES.get(name, [])


def has(path, name):
    text = path.read_text()
    if path.suffix != ".c":
        return re.search(rf"\b{name}\b", text)
    # its head begins a line and ends without a semicolon
    return re.search(rf"^[A-Za-z_][^;={{}}()\n]*\b{name}\([^;{{}}]*\)\s*\{{", text, re.M)


def problem_of(name, function):
    found = files_named(name)
    if len(found) != 1:
        return "there is no such file" if not found else f"{len(found)} files have this name"
    return None if has(found[0], function) else "the file has no such function"


def by_name():
    files = {}
    for top in ROOT.iterdir():
        if top.is_dir() and not top.name.startswith(("build", ".")):
            for path in top.rglob("*.*"):
                files.setdefault(path.name, []).append(path)
    return files


FILES = by_name()


def main():
    problems, count = [], 0
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, line in enumerate(document.read_text().splitlines(), 1):
            for name, function in REFERENCE.findall(line):
                count += 1
                problem = problem_of(name, function)
                if problem:
                    problems.append(f"{document.relative_to(ROOT)}:{number}: '{name}:{function}': {problem}")
    print("\n".join(problems) or f"{count} references name functions")
    return 1 if problems or count == 0 else 0


sys.exit(main())
