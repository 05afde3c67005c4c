"""A training step, traced: rank 0 of 2 x 2 ranks with two units does what docs/flow_step.md says, in that
order, under the numbers of its steps. The page is the golden file: its block fenced with ```trace.

usage: step_trace.py REPOSITORY BUILD [--update]     (--update writes the block again)
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from trace_page import compare

PAGE, BUILD = Path(sys.argv[1]) / "docs" / "flow_step.md", sys.argv[2]
STEP = "step --threads 4 --mesh rep=2,dp=2 --layers 2 --reshard true --steps 1"
# An event and its state or stream: the number of the step on the page.
NUMBERS = {("unshard", "forward"): 2, ("copy_in", "copy_in"): 2, ("all_gather", "all_gather"): 2,
           ("wait", "compute"): 3, ("copy_out", "compute"): 3, ("reshard", "forward"): 4,
           ("unshard", "pre_backward"): 6,
           ("reshard", "post_backward"): 8, ("copy_in", "compute"): 9, ("reduce_scatter", "reduce"): 10,
           ("all_reduce", "all_reduce"): 11, ("post_backward", "post_backward"): 12,
           ("optim_step", "idle"): 14}


def trace():
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([f"{BUILD}/tests/bench_rows", *STEP.split(), "--trace", f"{folder}/%r"], check=True,
                       stdout=subprocess.DEVNULL, timeout=100)
        return [json.loads(line) for line in open(f"{folder}/0")]


def line_of(event):
    where = event.get("stream") or event["state"]
    number = NUMBERS[event["event"], where]
    return f"{number:2}  {event['event']:<14} {event['unit']:<9} {where}".rstrip()


compare(PAGE, [line_of(event) for event in trace()], NUMBERS.values())
