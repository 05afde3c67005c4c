"""Trains random configurations, each in several ways, and compares: the same bits everywhere.

usage: random_training.py PROGRAM [--mpiexec MPIEXEC] [--seconds S] [SEED | FIRST-LAST ...]
       without seeds: a few that are always the same, or with FSDP_TEST_SAMPLE=n every n-th of the matrix

Ways: ranks as threads, processes, processes over TCP and of mpirun; device cpu and cpu-async; buffers of
collectives from the communicator, private and mixed; with detours that must change nothing; one rank alone
that runs the microbatches of all, where it must have the same bits; and another number of ranks that loads
what was saved. random_training.c describes what a run prints.
"""

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MATRIX = range(10_000, 11_000)
ROW = "training in random configurations"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
MPIRUN_EVERY = 16  # it takes longer to start than all else takes
FEW = (3, 12, 22, 36, MPIRUN_EVERY)
TIMEOUT = 120
LAUNCHERS = ("FSDP_", "SLURM_", "OMPI_COMM", "PMIX_")
CLEAN = {name: value for name, value in os.environ.items()
         if not name.startswith(LAUNCHERS) and name not in ("RANK", "WORLD_SIZE")}


def ranks_of(seed):
    return 2 + seed % 5


def other_ranks_of(seed):
    return 1 + seed * 7 % 6


# --- one run ---------------------------------------------------------------------------------------


class Run:
    """The output of one run: `same` by what it is, `parts` by what it is and rank."""

    def __init__(self, command, limit):
        self.command = command
        self.problems = []
        self.same, self.near, self.parts = {}, {}, defaultdict(dict)
        self.is_promised = False
        try:
            result = subprocess.run(command, env=CLEAN, text=True, capture_output=True, timeout=limit,
                                    stdin=subprocess.DEVNULL, check=False)
        except subprocess.TimeoutExpired:
            self.problems.append(f"does not end within {limit} s")
            return
        for line in result.stdout.splitlines():
            self.read(line)
        if result.returncode:
            self.problems.append(f"exit code {result.returncode}: {result.stderr.strip()[:600]}")

    def read(self, line):
        if line == "promised":
            self.is_promised = True
        elif line.startswith("wrong:"):
            self.problems.append(line)
        elif match := re.match(r"(same|near) (.*): (.*)", line):
            known = getattr(self, match[1])
            if known.setdefault(match[2], match[3]) != match[3]:
                self.problems.append(f"ranks differ in {match[2]}: {known[match[2]]}, {match[3]}")
        elif match := re.match(r"part of rank (\d+), (.*): (\w+)", line):
            self.parts[match[2]][int(match[1])] = int(match[3], 16)

    def sums(self):
        return {what: sum(ranks.values()) % 2**64 for what, ranks in self.parts.items()}

    def results(self):
        return {**self.same, **self.near, **self.parts}


def differences(a, b):
    return [f"{what}: {a.get(what)}, {b.get(what)}" for what in [*a, *(b.keys() - a.keys())]
            if a.get(what) != b.get(what)]


def compare(run, reference):
    """With a run of as many ranks: everything."""
    differing = differences(reference.results(), run.results())
    return run.problems or [f"other bits in {what}" for what in differing]


def compare_alone(run, reference):
    """With one rank: what does not depend on how tensors are cut, and norms nearly."""
    if run.problems:
        return run.problems
    differing = differences(reference.same, run.same) + differences(reference.sums(), run.sums())
    problems = [f"one rank alone has other bits in {what}" for what in differing]
    for what, norm in reference.near.items():
        if not math.isclose(float(norm), float(run.near.get(what, "nan")), rel_tol=1e-6):
            problems.append(f"one rank alone: {what}: {norm}, {run.near.get(what)}")
    return problems


def compare_loaded(run, reference):
    what = "state"
    if any("they lie in one flat parameter" in problem for problem in run.problems):
        return []  # other units on so many ranks: refused, because parameters were not stepped alike
    if run.problems or run.same.get(what) == reference.same.get(what):
        return run.problems
    return [f"loaded on other ranks: {run.same.get(what)}, saved: {reference.same.get(what)}"]


# --- one seed --------------------------------------------------------------------------------------


class Seed:
    def __init__(self, program, mpiexec, seed, folder):
        self.program, self.mpiexec, self.seed = program, mpiexec, seed
        self.checkpoint = Path(folder) / f"seed-{seed}"
        self.runs, self.problems = 0, []

    def run(self, *arguments, launcher=()):
        self.runs += 1
        return Run([*launcher, self.program, str(self.seed), *map(str, arguments)], TIMEOUT)

    def tell(self, run, problems):
        if problems:
            self.problems.append("\n    ".join([f"seed {self.seed}: {' '.join(run.command)}", *problems[:6]]))

    def ways(self):
        n = ranks_of(self.seed)
        yield "pools=mixed", f"save={self.checkpoint}", "--np", n
        yield "pools=mixed", "detours", "--np", n, "--comm", "tcp"
        yield "pools=on", "--np", n, "--device", "cpu-async", "--check"
        yield "pools=mixed", "detours", "--threads", n, "--device", "cpu-async", "--check"
        yield "pools=on", "--threads", n

    def try_mpirun(self, reference):
        launcher = (self.mpiexec, "-n", str(ranks_of(self.seed)), "--oversubscribe", "--allow-run-as-root")
        for comm in ("shm", "mpi"):
            run = self.run("pools=mixed", "--comm", comm, launcher=launcher)
            self.tell(run, compare(run, reference))

    def try_all(self, with_mpirun):
        reference = self.run("pools=off", "--threads", ranks_of(self.seed))
        if reference.problems:
            self.tell(reference, reference.problems)
            return self
        for way in self.ways():
            run = self.run(*way)
            self.tell(run, compare(run, reference))
        if reference.is_promised:
            run = self.run(f"alone={ranks_of(self.seed)}")
            self.tell(run, compare_alone(run, reference))
        how = "--np" if self.seed % 2 else "--threads"
        run = self.run(f"load={self.checkpoint}", how, other_ranks_of(self.seed))
        self.tell(run, compare_loaded(run, reference))
        self.is_under_mpirun = with_mpirun and self.mpiexec is not None
        if self.is_under_mpirun:
            self.try_mpirun(reference)
        self.is_promised = reference.is_promised
        return self

    is_promised = is_under_mpirun = False


# --- all -------------------------------------------------------------------------------------------


def seed_range(text):
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def seeds_of(options):
    if options.seeds:
        return options.seeds
    every = int(os.environ.get("FSDP_TEST_SAMPLE") or 0)
    return MATRIX[::every] if every else FEW


def try_seeds(options, folder):
    end = time.monotonic() + (options.seconds or math.inf)

    def try_seed(seed):
        tried = Seed(options.program, options.mpiexec, seed, folder)
        if time.monotonic() < end:
            tried.try_all(seed % MPIRUN_EVERY == 0 or len(options.seeds) == 1)
            subprocess.run(["rm", "-rf", tried.checkpoint], check=True)
        for problem in tried.problems:
            print(problem, flush=True)
        return tried

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return [seed for seed in threads.map(try_seed, seeds_of(options)) if seed.runs]


def is_documented():
    """Whether the page's row has the number of cases that exist, give or take a twentieth (matrix_row.h)."""
    cell = next((line.split(" | ")[1] for line in PAGE.read_text().splitlines()
                 if line.startswith(f"| {ROW} | ")), "0")
    number = int(re.match(r"(?:[\d,]+ of )?([\d,]+)", cell)[1].replace(",", ""))
    if abs(number - len(MATRIX)) <= len(MATRIX) / 20:
        return True
    print(f"{PAGE.name} says {number} configurations, and there are {len(MATRIX)}")
    return False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--mpiexec")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("seeds", nargs="*", type=seed_range)
    options = parser.parse_intermixed_args()
    options.seeds = [seed for seeds in options.seeds for seed in seeds]
    with tempfile.TemporaryDirectory() as folder:
        tried = try_seeds(options, folder)
    failed = sum(bool(seed.problems) for seed in tried)
    alone = sum(seed.is_promised for seed in tried)
    runs = sum(seed.runs for seed in tried)
    if options.mpiexec and not options.seeds and not any(seed.is_under_mpirun for seed in tried):
        sys.exit(f"no seed ran under mpirun: every {MPIRUN_EVERY}th does")
    is_sample = len(tried) < len(MATRIX)
    of_all = f" of {len(MATRIX)}" if is_sample else ""
    print(f"| {ROW} | {len(tried)}{of_all} configurations, {alone} also by one rank alone, {runs} runs | "
          f"other bits or failed {failed} |")
    return failed > 0 or not tried or (is_sample and not is_documented())


sys.exit(main())
