"""Runs three ranks of which one is killed, stopped or in another call, and checks the others.

usage: ctl_mpi_loss.py MPIEXEC PROGRAM kill|stop|differ RANK ...

The others must end within the deadline (1 s) and the grace, exit with 10 (another rank failed) and
name the lost rank. Nothing that was started stays after.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS, TIMEOUT, LONGEST_WAIT, PEER_FAILED, DIFFERENT_CALLS = 3, 20, 15.0, "10", "2"

# The lost rank is mpirun's own child; the others run under a shell that notes their exit status.
WRAPPER = """
if [ "$OMPI_COMM_WORLD_RANK" = "$3" ] && [ "$2" != differ ]; then exec "$@"; fi
"$@"
echo $? > "$4/exit-$OMPI_COMM_WORLD_RANK"
"""


def kill_leftovers(folder, program):
    """Kills ranks that noted their pid and still are what they were."""
    for note in folder.glob("pid-*"):
        pid = int(note.read_text() or 0)
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(program) in command and os.fsencode(folder) in command:
            os.kill(pid, signal.SIGKILL)


def wait_for(condition):
    end = time.monotonic() + TIMEOUT
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def start(mpiexec, program, how, special, folder):
    environment = dict(
        os.environ,
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMPI_MCA_btl_vader_single_copy_mechanism="none",
    )
    command = [mpiexec, "--enable-recovery", "--oversubscribe", "-n", str(RANKS)]
    command += ["sh", "-c", WRAPPER, "sh", program, how, str(special), str(folder)]
    return subprocess.Popen(command, env=environment, start_new_session=True)


def check_rank(folder, how, special, rank):
    status = (folder / f"exit-{rank}").read_text().strip()
    lost, may_return, waited, text = (folder / f"rank-{rank}").read_text().split(" ", 3)
    text = text.strip()
    print(f"{how} rank {special}: rank {rank} waited {waited} s: {text}")
    if how == "differ":
        named = f"rank {special} is in fsdp_ctl_broadcast of 4 bytes" in text
        named = named and "in fsdp_ctl_allgather of 4 bytes" in text
    else:
        words = f"rank {special} did not answer within 1 s in fsdp_ctl_"
        named = lost == str(special) and words in text
    if not named:
        return f"rank {rank} does not name rank {special}"
    if status != (DIFFERENT_CALLS if how == "differ" else PEER_FAILED) or may_return != "0":
        return f"rank {rank} ended with {status}, may return {may_return}"
    if float(waited) > LONGEST_WAIT:
        return f"rank {rank} waited {waited} s"
    return None


def run(mpiexec, program, how, special):
    others = [rank for rank in range(RANKS) if rank != special]
    with tempfile.TemporaryDirectory(prefix="fsdp-ctl-") as name:
        folder = Path(name)
        process = start(mpiexec, program, how, special, folder)
        try:
            wait_for(lambda: all((folder / f"exit-{rank}").exists() for rank in others))
            kill_leftovers(folder, program)
            process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            return ["mpirun does not end"]
        finally:
            kill_leftovers(folder, program)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        missing = [rank for rank in others if not (folder / f"exit-{rank}").exists()]
        if missing:
            return [f"ranks {missing} did not end"]
        return [problem for rank in others if (problem := check_rank(folder, how, special, rank))]


def main():
    mpiexec, program, how, *specials = sys.argv[1:]
    problems = [problem for rank in specials for problem in run(mpiexec, program, how, int(rank))]
    print("\n".join(problems) or "all others named the lost rank")
    return 1 if problems or not specials else 0


if __name__ == "__main__":
    sys.exit(main())
