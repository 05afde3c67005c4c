"""bench_rows step, launched in every way: what it prints and the trace of every rank are those of ranks that
are threads, so that counts, orders and numbers of a step do not depend on how it was started.

usage: step_launched.py BUILD [MPIEXEC]: as processes of --np; or as ranks of mpirun
"""

import json
import os
import subprocess
import sys
import tempfile

BUILD, MPIEXEC = sys.argv[1], sys.argv[2:3]
RANKS, LAYERS, STEPS = 4, 3, 2
SHAPE = f"--layers {LAYERS} --width 9 --out 5 --rows 3 --steps {STEPS}"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_")}

# A mode, and of a step: gathers in forward, gathers in backward, reduce-scatters, all-reduces.
MODES = [
    ("--reshard true", (LAYERS, LAYERS, LAYERS, 0)),
    ("--reshard false --prefetch-forward 1 --accumulate 2", (2 * LAYERS, 0, LAYERS, 0)),
    ("--reshard 2 --prefetch-forward 2 --prefetch-backward 2", (LAYERS, LAYERS, LAYERS, 0)),
    ("--mesh rep=2,dp=2 --param-dtype bf16 --reduce-dtype f32", (LAYERS, LAYERS, LAYERS, LAYERS)),
]
MPIRUN = [*MPIEXEC, "-n", str(RANKS), "--oversubscribe", "--allow-run-as-root"]
WAYS = [(MPIRUN, "--comm shm"), (MPIRUN, "--comm mpi")] if MPIEXEC else \
    [([], f"--np {RANKS}"), ([], f"--np {RANKS} --comm tcp")]


def step(words, launcher=()):
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*launcher, f"{BUILD}/tests/bench_rows", "step", *words.split(), "--trace", f"{folder}/%r"],
            capture_output=True, text=True, env=ENVIRONMENT, timeout=100)
        assert done.returncode == 0, (launcher, words, done.returncode, done.stderr)
        traces = [[json.loads(line) for line in open(f"{folder}/{rank}")] for rank in range(RANKS)]
    return done.stdout, traces


def counts_of(events):
    """Unshards have a known state, and an all-gather follows each."""
    pre = sum(event["event"] == "unshard" and event["state"] == "pre_backward" for event in events)
    kinds = [event["event"] for event in events]
    return (kinds.count("all_gather") - pre, pre, kinds.count("reduce_scatter"),
            kinds.count("all_reduce"))


def check(mode, wanted):
    words = f"{SHAPE} {mode}"
    printed, traces = step(f"{words} --threads {RANKS}")
    for trace in traces:
        for number in range(STEPS):
            found = counts_of([event for event in trace if event["step"] == number])
            assert found == wanted, (mode, number, found, wanted)
    for launcher, option in WAYS:
        printed_there, traces_there = step(f"{words} {option}", launcher)
        assert printed_there == printed, (mode, option, printed_there, printed)
        for rank, (there, here) in enumerate(zip(traces_there, traces, strict=True)):
            assert there == here, (mode, option, rank, first_difference(there, here))


def first_difference(there, here):
    return next(((a, b) for a, b in zip(there, here) if a != b), (len(there), len(here)))


for mode, wanted in MODES:
    check(mode, wanted)
print(f"{len(MODES)} modes: the same steps, launched in {1 + len(WAYS)} ways")
