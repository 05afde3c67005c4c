"""One of three ranks of mpirun fails at a collective of a training step: the others say which, and where.

usage: step_faults_mpirun.py MPIEXEC PROGRAM
"""

import subprocess
import sys

MPIEXEC, PROGRAM = sys.argv[1:]
RANKS, TIMEOUT = 3, 60
CASES = [("gives up", 2, 1), ("order", 1, 2), ("swapped", 1, 0), ("memory", 90, 1)]
problems = []


def run(*arguments):
    command = [MPIEXEC, "-n", str(RANKS), "--oversubscribe", "--allow-run-as-root", PROGRAM,
               *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        problems.append(f"{arguments}: does not end")
        return None
    return done


for case in CASES:
    done = run(*case)
    if done and (done.returncode != 0 or done.stdout.count("as it should be") != RANKS):
        problems.append(f"{case}: code {done.returncode}, {done.stdout}{done.stderr}")

# mpirun ends the others; what matters is that it comes to an end, and says whose it was
done = run("killed", 3, 2)
if done and (done.returncode == 0 or "signal 9" not in done.stderr):
    problems.append(f"killed: code {done.returncode}, {done.stdout}{done.stderr}")

print("\n".join(problems) or "as it should be")
sys.exit(1 if problems else 0)
