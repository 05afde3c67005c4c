"""One of three ranks of mpirun fails at a collective of a training step: the others say which, and where.
Over shared memory and over MPI; FSDP_TEST_SAMPLE=n: every n-th of all faults.

usage: step_faults_mpirun.py MPIEXEC PROGRAM
"""

import itertools
import os
import re
import subprocess
import sys

MPIEXEC, PROGRAM = sys.argv[1:]
RANKS, TIMEOUT = 3, 60
# The fault, the collective (or allocation, or pass) and the rank.
USUAL = [("shm", "gives up", 2, 1), ("shm", "swapped", 1, 0), ("shm", "memory", 90, 1),
         ("shm", "stopped", 2, 1), ("mpi", "gives up", 1, 2), ("mpi", "order", 1, 2),
         ("mpi", "shape", 2, 0), ("mpi", "killed", 2, 1)]
ALL = [(comm, kind, at, rank) for comm, kind, at, rank in itertools.product(
    ("shm", "mpi"), ("gives up", "order", "shape", "stopped", "killed", "swapped", "gradient", "memory"),
    (0, 1, 2, 3, 90), (0, 2)) if (at == 90) == (kind == "memory") and
    (at < 1 or kind != "gradient") and (at < 2 or kind != "swapped") and
    # a rank that left before the others failed is well, and would wait for them in MPI_Finalize
    (comm, kind) != ("mpi", "memory")]
VERSION = int(re.search(r"(\d+)\.", subprocess.run([MPIEXEC, "--version"], capture_output=True,
                                                     text=True, check=True).stdout)[1])
problems = []


def run(comm, *fault, recovery=True):
    # with --enable-recovery mpirun lets the others end by themselves
    command = [MPIEXEC, *["--enable-recovery"][:recovery], "-n", str(RANKS), "--oversubscribe",
               "--allow-run-as-root", PROGRAM, *map(str, fault), "--comm", comm]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        problems.append(f"{comm}, {fault}: does not end")
        return None


def judge(comm, kind, at, rank):
    done = run(comm, kind, at, rank)
    if not done:
        return
    codes = (0, 10) if comm == "mpi" else (0,)
    said = RANKS - (kind == "killed")
    # mpirun of Open MPI 5 may end one of the others as soon as it sees that a rank was killed
    least = said - (kind == "killed" and VERSION >= 5)
    is_well = done.returncode in codes and least <= done.stdout.count("as it should be") <= said
    if not is_well:
        problems.append(f"{comm}, {kind}, {at}, {rank}: code {done.returncode}, {done.stdout}{done.stderr}")


every = int(os.environ.get("FSDP_TEST_SAMPLE") or 0)
for case in ALL[::every] if every else USUAL:
    judge(*case)

# Without recovery mpirun ends the others; what matters is that it comes to an end, and says whose it was.
done = run("shm", "killed", 3, 2, recovery=False)
if done and (done.returncode == 0 or "signal 9" not in done.stderr):
    problems.append(f"killed: code {done.returncode}, {done.stdout}{done.stderr}")

print("\n".join(problems) or "as it should be")
sys.exit(1 if problems else 0)
