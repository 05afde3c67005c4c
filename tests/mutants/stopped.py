"""A run of the mutants that is stopped by a signal leaves no bug in its copy of the tree."""

import os
import pathlib
import signal
import sys
import tempfile
import time

import run


def compile_stopped(number):
    def compile_targets(*_):
        os.kill(os.getpid(), number)
        time.sleep(60)

    return compile_targets


def main():
    mutant = {"name": "a bug", "file": "base/a.c", "before": "good", "after": "bad", "tests": "^a$"}
    with tempfile.TemporaryDirectory() as folder:
        run.TREE = pathlib.Path(folder)
        path = run.TREE / mutant["file"]
        path.parent.mkdir()
        path.write_text("good\n")
        run.end_on_signals()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            run.compile_targets = compile_stopped(number)
            try:
                run.plant(mutant, {"a": ["a"]})
                sys.exit(f"{number.name} does not stop the run")
            except (SystemExit, KeyboardInterrupt):
                pass
            if path.read_text() != "good\n":
                sys.exit(f"after {number.name} the bug is still there")


main()
