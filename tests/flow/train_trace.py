"""A training, traced: rank 0 of 2 trains a transformer of one layer for 2 steps, saves, and continues for
one. It does what docs/flow_train.md says, in that order, under the numbers of its steps.

usage: train_trace.py REPOSITORY BUILD [--update]     (--update writes the block again)
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from trace_page import compare

PAGE, BUILD = Path(sys.argv[1]) / "docs" / "flow_train.md", sys.argv[2]
SHAPE = ("--np 2 --quiet --model.layers 1 --model.heads 2 --model.width 16 --model.context 16 "
         "--train.batch 4 --save.every 2")
# An event, or a mark of the trainer, and its state: the number of the step on the page.
NUMBERS = {("model", ""): 5, ("batch", ""): 7, ("unshard", "forward"): 8, ("unshard", "pre_backward"): 10,
           ("reduce_scatter", ""): 10, ("update", ""): 11, ("optim_step", "idle"): 11, ("log", ""): 12,
           ("counters", ""): 13, ("async_save", ""): 14, ("async_save_wait", "idle"): 16,
           ("compare", ""): 17, ("load", "idle"): 18}


def events(folder, steps):
    trace = folder / f"trace{steps}-%r"
    subprocess.run([f"{BUILD}/bin/fsdp-train", "--run", folder / "run", "--data.path", folder / "data.txt",
                    *SHAPE.split(), "--steps", str(steps), "--trace", trace], check=True, timeout=100,
                   stderr=subprocess.DEVNULL)
    return [json.loads(line) for line in open(folder / f"trace{steps}-0")]


def line_of(event):
    """None for what docs/flow_step.md shows."""
    is_mark = event["event"] == "mark"
    name, unit = (event["unit"], "") if is_mark else (event["event"], event["unit"])
    state = event.get("state", "")
    number = NUMBERS.get((name, state))
    return number and f"{number:2}  {name:<16} {unit:<16} {state}".rstrip()


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data.txt").write_text("".join(f"Sentence {i} says {i * i % 97}.\n" for i in range(500)))
        lines = []
        for steps in 2, 3:
            lines += [line for line in map(line_of, events(folder, steps)) if line]
    compare(PAGE, lines, NUMBERS.values())


main()
