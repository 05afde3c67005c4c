"""Checks that no sentence of a comment, a docstring or a page begins with a word that hides its subject:
docs/style.md has the words, and better sentences. Questions may; so may the cookbook's "What can go wrong".

usage: sentences.py REPOSITORY
"""

import re
import sys
from pathlib import Path

ROOT = Path(sys.argv[1]).resolve()
OPENING = re.compile(
    r"(?:^[-*\d. ]*|(?<=[.!?:] ))"
    r"(?:What(?:ever)?|Who(?:ever|se|m)?|Of|Where|How|The same|Those)\b[^.?!]*[.?!]?")
ALLOWED = re.compile(r"What (?:else )?can (?:still )?go wrong: ")
FOLDERS = ["base", "kernels", "formats", "statedict", "runtime", "tools", "docs", "tests"]
ENDINGS = (".c", ".h", ".cu", ".cuh", ".py", ".sh", ".md", ".scd", "CMakeLists.txt")
OTHERS = ("tests/golden/", "tests/fuzz/corpus/", "tests/cli/cases/")
BLOCK = re.compile(r"/\*(.*?)\*/", re.S)
HASH = re.compile(r"(?:^[ \t]*#(?!!)[^\n]*\n)+", re.M)
DOCSTRING = re.compile(r'"""(.*?)"""', re.S)
PARAGRAPH = re.compile(r"(?:^[ \t]*[-*] |^)[^\n|].*\n(?:^(?![ \t]*[-*] )[^\n|].*\n)*", re.M)
DEFINED = re.compile(r"^[*_].*(?=\n\t)", re.M)  # an option of a man page; its description is a paragraph
FENCED = re.compile(r"^```.*?^```", re.M | re.S)


def files():
    yield from (ROOT / "README.md", ROOT / "CMakeLists.txt", ROOT / "dev")
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.name.endswith(ENDINGS) and not path.relative_to(ROOT).as_posix().startswith(OTHERS):
                yield path


def texts(path):
    """Pairs of a position and a text: the comments of a source, the paragraphs of a page."""
    text = path.read_text()
    if path.suffix in (".md", ".scd"):
        text = DEFINED.sub("", FENCED.sub(lambda code: "\n" * code[0].count("\n"), text))
        found, mark = PARAGRAPH.finditer(text), r"\n"
    elif path.suffix in (".c", ".h", ".cu", ".cuh"):
        found, mark = BLOCK.finditer(text), r"\n\s*\*"
    else:
        python = DOCSTRING.finditer(text) if path.suffix == ".py" else ()
        found, mark = [*HASH.finditer(text), *python], r"(?:^|\n)\s*#"
    for match in found:
        inside = match[1] if match.re.groups else match[0]
        yield text.count("\n", 0, match.start()) + 1, " ".join(re.sub(mark, " ", inside).split())


def problems_of(path):
    for line, text in texts(path):
        for match in OPENING.finditer(text):
            if not match[0].endswith("?") and not ALLOWED.match(text, match.start()):
                yield f"{path.relative_to(ROOT)}:{line}: {match[0][:90].strip()}"


def main():
    paths = list(files())
    problems = [problem for path in paths for problem in problems_of(path)]
    if problems:
        print("the subject of these sentences is hidden (docs/style.md, Words):")
    print("\n".join(problems) or f"{len(paths)} files")
    return 1 if problems or not paths else 0


sys.exit(main())
