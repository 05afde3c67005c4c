"""Runs the console blocks of the documents and compares what they print.

usage: docs_console.py REPOSITORY BUILD

A block is fenced with ```console. Its lines that begin with "$ " are commands; what follows up to
the next command is what they print, both streams together. "..." stands for any text, also over
several lines. A block fenced with ```console (not run) is for reading only. All blocks of one
document run one after the other in one empty directory, with the tools on PATH.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT, BUILD = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
TIMEOUT = 120


def blocks(text):
    """Yields (line number, lines) of each console block."""
    lines, start = [], None
    for number, line in enumerate(text.splitlines(), 1):
        if start is None and line.strip() == "```console":
            lines, start = [], number
        elif start is not None and line.strip() == "```":
            yield start, lines
            start = None
        elif start is not None:
            lines.append(line)


def commands(lines):
    """Groups a block's lines into [command, expected output]."""
    groups = []
    for line in lines:
        if line.startswith("$ "):
            groups.append([line[2:], ""])
        elif groups and groups[-1][0].endswith("\\") and not groups[-1][1]:
            groups[-1][0] += "\n" + line
        elif groups:
            groups[-1][1] += line + "\n"
    return groups


def matches(expected, printed):
    tidy = "\n".join(line.rstrip() for line in expected.strip("\n").splitlines())
    found = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
    pattern = ".*".join(re.escape(part) for part in tidy.split("..."))
    return re.fullmatch(pattern, found, re.DOTALL) is not None


def run_document(document):
    environment = dict(os.environ, LC_ALL="C.UTF-8", FSDP_BUILD=str(BUILD))
    environment["PATH"] = f"{BUILD}/bin:{environment['PATH']}"
    problems, count = [], 0
    with tempfile.TemporaryDirectory() as directory:
        for number, lines in blocks(document.read_text()):
            for command, expected in commands(lines):
                count += 1
                done = subprocess.run(["bash", "-c", command], cwd=directory, env=environment, text=True,
                                      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, timeout=TIMEOUT, check=False)
                if not matches(expected, done.stdout):
                    problems.append(f"{document.relative_to(ROOT)}:{number}: $ {command}\n"
                                    f"--- expected\n{expected}--- printed\n{done.stdout}")
    return problems, count


def main():
    problems, count = [], 0
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        found, ran = run_document(document)
        problems += found
        count += ran
    print("\n".join(problems) or f"{count} commands print what the documents say")
    return 1 if problems or count == 0 else 0


sys.exit(main())
