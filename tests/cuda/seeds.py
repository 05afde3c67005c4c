#!/usr/bin/env python3
"""Runs tests of the runtime over the fake CUDA runtime, in several orders of its streams.

usage: seeds.py PROGRAM...

Each program runs with one seed, or with 1,000 when FSDP_TEST_SAMPLE is 1. Tests on
device cpu run with the first one only (expect_toy.h).
"""

import concurrent.futures
import os
import subprocess
import sys
from pathlib import Path

SEEDS = 1000 if os.environ.get("FSDP_TEST_SAMPLE") == "1" else 1
DEADLINE_S = 240
AT_ONCE = 2


def run(program, seed):
    """The last lines of a run that failed, else None."""
    environment = dict(os.environ, FSDP_TEST_SEED=str(seed))
    done = subprocess.run([program, "--jobs", "1"], env=environment, capture_output=True,
                          text=True, timeout=DEADLINE_S, check=False)
    return None if done.returncode == 0 else "\n".join((done.stdout + done.stderr).splitlines()[-12:])


def main():
    programs, failed = sys.argv[1:], 0
    runs = [(program, seed) for seed in range(1, SEEDS + 1) for program in programs]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        problems = pool.map(lambda one: run(*one), runs)
        for (program, seed), problem in zip(runs, problems):
            if problem:
                failed += 1
                print(f"--- {Path(program).name}, FSDP_TEST_SEED={seed}\n{problem}", flush=True)
    print(f"{len(programs)} programs, {SEEDS} seeds each, {failed} failed")
    return 1 if failed or not programs else 0


if __name__ == "__main__":
    sys.exit(main())
