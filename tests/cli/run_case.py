"""Runs one case of the tools: a folder with the files cmd, stdout, stderr and exit.

cmd is run by bash in an empty directory with the tools in PATH. A missing stdout or stderr means that
nothing is printed there, a missing exit means 0. In what is expected, "..." stands for any text within a
line, and a line of its own for any lines.

usage: run_case.py CASE BUILD [--update]     --update writes what was printed as what is expected
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CASE, BUILD = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
UPDATE = "--update" in sys.argv[3:]

# Parts of outputs that differ from run to run, for --update.
VOLATILE = [
    (r"in \d+\.\d\d s \([\d.]+ [MG]B/s\)", "in ... s (...)"),
    (r"just now|\d+ (s|min) ago", "..."),
    (r"free [\d.]+ [KMGT]iB", "free ..."),
    (r"(\d+ files?), [\d.]+ [KMGT]?i?B\b", r"\1, ..."),
    (r"(shard-\d+-of-\d+\.h5) +[\d.]+ [KMGT]?i?B\b", r"\1 ..."),
    (r'"(size|run)": ("[0-9a-f]+"|\d+)', r'"\1": ...'),
    (r"\d+ bytes(, the manifest says \d+)?", "... bytes..."),
    (r"tmp-[0-9a-f]{32}/", "tmp-.../"),
    (r"peak memory [\d.]+ [KMGT]iB", "peak memory ..."),
]


def run(directory):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_")}
    tools = [f"{BUILD}/bin", f"{BUILD}/tests", os.path.dirname(sys.executable), environment["PATH"]]
    environment["PATH"] = ":".join(tools)
    environment["PLUGIN"] = str(BUILD / "plugin")
    environment["GOLDEN"] = str(CASE.parents[2] / "golden")
    environment["LC_ALL"] = "C.UTF-8"
    command = ["bash", str(CASE / "cmd")]
    done = subprocess.run(command, cwd=directory, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, timeout=120)
    return {"stdout": done.stdout.decode(errors="backslashreplace"),
            "stderr": done.stderr.decode(errors="backslashreplace"), "exit": f"{done.returncode}\n"}


def read_expected(name, default):
    path = CASE / name
    return path.read_text() if path.exists() else default


def pattern_of(expected):
    lines = []
    for line in expected.splitlines(keepends=True):
        if line.strip() == "...":
            lines.append(r"(?:[^\n]*\n)*?")
        else:
            lines.append(r"[^\n]*".join(re.escape(part) for part in line.split("...")))
    return "".join(lines)


def update(printed):
    for name, text in printed.items():
        for volatile, dots in VOLATILE:
            text = re.sub(volatile, dots, text)
        path = CASE / name
        if text == ("0\n" if name == "exit" else ""):
            path.unlink(missing_ok=True)
        else:
            path.write_text(text)


def main():
    with tempfile.TemporaryDirectory() as directory:
        printed = run(directory)
    if UPDATE:
        update(printed)
        return 0
    failed = False
    for name, text in printed.items():
        expected = read_expected(name, "0\n" if name == "exit" else "")
        if re.fullmatch(pattern_of(expected), text):
            continue
        failed = True
        print(f"--- {name}: expected\n{expected}--- {name}: printed\n{text}---")
    return 1 if failed else 0


sys.exit(main())
