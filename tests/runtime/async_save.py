"""Saves in the background by ranks that are processes: the moment that they save, and a lost rank.

usage: async_save.py PROGRAM [MPIEXEC]
"""

import os
import re
import subprocess
import sys

PROGRAM, MPIEXEC = sys.argv[1], sys.argv[2:3]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_")}
MPIRUN = [*MPIEXEC, "-n", "2", "--oversubscribe", "--allow-run-as-root"]


def expect(code, pattern, *arguments, launcher=()):
    # a deadline that a busy machine keeps: nothing here waits for it
    done = subprocess.run([*launcher, PROGRAM, *arguments, "--deadline", "120"], capture_output=True,
                          text=True, env=CLEAN, timeout=250)
    said = done.stdout + done.stderr
    assert done.returncode == code and re.search(pattern, said), (arguments, launcher, done)


if MPIEXEC:
    expect(0, "2 ranks: the bytes of the call", "moment", "--comm", "mpi", launcher=MPIRUN)
    expect(0, "2 ranks: the bytes of the call", "moment", "--comm", "shm", "--device", "cpu-async",
           launcher=MPIRUN)
else:
    expect(0, "1 ranks: the bytes of the call", "moment")
    expect(0, "3 ranks: the bytes of the call", "moment", "--np", "3")
    expect(0, "2 ranks: the bytes of the call", "moment", "--np", "2", "--comm", "tcp")
    expect(137, "nothing published: .*rank 2", "lost", "--np", "3")
