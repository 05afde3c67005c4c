"""Runs the console blocks of the documents and compares what they print.

usage: docs_console.py REPOSITORY BUILD [--update] [WORD]...

A block is fenced with ```console. Its lines that begin with "$ " are commands; what follows up to
the next command is what they print, both streams together. "..." stands for any text, also over
several lines; figures of the machine (times, rates, free space) may be any. A command that fails ends with
a line "[exit 4]", which "..." does not stand for. The status of a line with pipes is that of the last command
that failed; a command whose reader ended first (SIGPIPE) did not. A block fenced with ```console (not run)
is for reading only.

All blocks of one document run one after the other in one directory, with the tools on PATH: an
empty one, or for a page of docs/cookbook one of its own with what docs_setup.sh makes, by the command that
the README there has.

WORD: only documents whose path holds one of these words. --update: write what commands print into
the documents, where it is not what they say.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARGUMENTS = [argument for argument in sys.argv[1:] if argument != "--update"]
ROOT, BUILD, WORDS = Path(ARGUMENTS[0]), Path(ARGUMENTS[1]).resolve(), ARGUMENTS[2:]
UPDATE = "--update" in sys.argv
COOKBOOK = ROOT / "docs" / "cookbook"
SETUP = re.compile(r"^\$ (.*docs_setup\.sh examples)$", re.M)
TIMEOUT = 120
EXIT = re.compile(r"^\[exit (\d+)\]\n?\Z", re.M)
SIGPIPE = 141
# Output that differs between machines and runs: pattern, and what it becomes on both sides.
FIGURES = [(re.compile(pattern), word) for pattern, word in [
    (r"\d+(\.\d+)? [kMGT]?B/s", "RATE"),
    (r"just now|\d+ (s|min|h|d) ago", "AGO"),
    (r"\d+(\.\d+)? m?s\b", "TIME"),
    (r"free \d+(\.\d+)? ([KMGT]i)?B", "free SPACE"),
    (r"peak memory \d+(\.\d+)? ([KMGT]i)?B", "peak memory"),  # grows with the number of cores
    (r'"(seconds|free_bytes|peak_memory)": [0-9.]+', "FIGURE"),
    (r"\.tmp-[0-9a-f]{32}", ".tmp-UUID"),
]]


def blocks(lines):
    """Yields (first, end) of each console block: indexes of its lines."""
    start = None
    for index, line in enumerate(lines):
        if start is None and line.strip() == "```console":
            start = index + 1
        elif start is not None and line.strip() == "```":
            yield start, index
            start = None


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


def tidy(text):
    text = "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
    for pattern, word in FIGURES:
        text = pattern.sub(word, text)
    return text


def matches(expected, printed, status):
    shown = EXIT.search(expected)
    if int(shown[1] if shown else 0) != status:
        return False
    expected = EXIT.sub("", expected)
    pattern = ".*".join(re.escape(part) for part in tidy(expected).split("..."))
    return re.fullmatch(pattern, tidy(printed), re.DOTALL) is not None


def run(command, directory):
    """Returns what the command prints, and its exit status."""
    environment = dict(os.environ, LC_ALL="C.UTF-8", FSDP_BUILD=str(BUILD))
    environment["PATH"] = f"{BUILD}/bin:{environment['PATH']}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=directory, env=environment,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=TIMEOUT, check=False)
    return done.stdout, 0 if done.returncode == SIGPIPE else done.returncode


def updated(groups):
    """The lines of a block, from its commands and what they print."""
    return [line.rstrip() for command, printed in groups
            for line in [*f"$ {command}".splitlines(), *printed.strip("\n").splitlines()]]


def run_document(document, directory):
    """Runs a document's blocks in a directory. Returns its problems and how many commands it has."""
    lines = document.read_text().splitlines()
    problems, count, fresh = [], 0, []
    for first, end in blocks(lines):
        groups = commands(lines[first:end])
        for group in groups:
            command, expected = group
            count += 1
            printed, status = run(command, directory)
            if not matches(expected, printed, status):
                if status != 0:
                    printed += f"[exit {status}]\n"
                problems.append(f"{document.relative_to(ROOT)}:{first}: $ {command}\n"
                                f"--- expected\n{expected}--- printed\n{printed}")
                group[1] = printed
        fresh.append((first, end, updated(groups)))
    if UPDATE and problems:
        for first, end, block in reversed(fresh):
            lines[first:end] = block
        document.write_text("\n".join(lines) + "\n")
    return problems, count


def check_page(page, count):
    """A page of the cookbook shows what it says, and is listed."""
    where = page.relative_to(ROOT)
    if count == 0 and page.name != "made_by.md":  # cli_layouts runs the commands of its table
        yield f"{where}: has no console block"
    if f"({page.name})" not in (COOKBOOK / "README.md").read_text():
        yield f"{where}: is not in docs/cookbook/README.md"


def run_in_scratch(document, scratch):
    """Runs a document in a directory of its own below scratch, where 'kitchen' is what pages begin with."""
    directory = scratch / str(document.relative_to(ROOT)).replace("/", "-")
    page = document.parent == COOKBOOK and document.name != "README.md"
    if page:
        shutil.copytree(scratch / "kitchen", directory, symlinks=True)
    else:
        directory.mkdir()
    problems, count = run_document(document, directory)
    if page:
        problems += check_page(document, count)
    return problems, count


def fails_unnoticed():
    """Whether a page may hide that a command failed, or what it printed."""
    return (matches("...\n", "error\n", 4) or matches("...\n[exit 4]\n", "error\n", 0)
            or matches("[exit 4]\n", "error\n", 4) or not matches("...\n[exit 4]\n", "error\n", 4))


def main():
    if fails_unnoticed():
        print("docs_console.py does not notice that a command fails")
        return 1
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    documents = [path for path in documents if not WORDS or any(word in str(path) for word in WORDS)]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        setup = SETUP.search((COOKBOOK / "README.md").read_text())[1]
        printed, status = run(setup.replace("examples", str(scratch / "kitchen")), ROOT)
        if status != 0:
            print(f"{setup}: exit status {status}\n{printed}")
            return 1
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda document: run_in_scratch(document, scratch), documents))
    problems = [problem for found, _ in results for problem in found]
    count = sum(ran for _, ran in results)
    print("\n".join(problems) or f"{count} commands print what the documents say")
    return 1 if problems or count == 0 else 0


sys.exit(main())
