"""Collectives over a network: values, bits as over shared memory, ranks that get lost, several hosts.

usage: comm_network.py PROGRAM mpi|loss MPIEXEC
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROGRAM, WHAT, MPIEXEC = sys.argv[1:]
TIMEOUT = 100
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP_", "OMPI_COMM", "PMIX_"))}
CLEAN |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
          "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
problems = []


def expect(holds, *what):
    if not holds:
        problems.append(" ".join(map(str, what)))


def run(*command, **variables):
    try:
        done = subprocess.run([str(word) for word in command], env=CLEAN | variables, text=True,
                              capture_output=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as late:
        problems.append(f"{command} does not end: {late.stdout} {late.stderr}")
        return -1, ""
    return done.returncode, done.stdout + done.stderr


def mpirun(n, *arguments, hosts=()):
    """hosts: for each rank the name of its host."""
    command = [MPIEXEC, "--oversubscribe"]
    for rank in range(n) if hosts else []:
        command += [":"] if rank else []
        command += ["-n", 1, "env", f"FSDP_HOST_ID={hosts[rank]}", PROGRAM, *arguments]
    return run(*command, *([] if hosts else ["-n", n, PROGRAM, *arguments]))


def expect_lines(result, lines, n, what):
    code, said = result
    expect(code == 0 and len(re.findall(lines, said, re.M)) == n, what, f"want {n} of '{lines}'; got", code, said)


# --- values ------------------------------------------------------------------------------------------


def bits(result):
    code, said = result
    expect(code == 0, "bits", code, said)
    return sorted(re.findall(r"rank \d+: bits \w+", said))


def mpi():
    for n in (2, 3, 4):
        expect_lines(mpirun(n, "--comm", "mpi", "values", n), rf"^values over mpi, local \d of {n}$", n, "values")
        shared = bits(run(PROGRAM, "--np", n, "hash"))
        expect(len(shared) == n and shared == bits(mpirun(n, "--comm", "mpi", "hash")), "the bits over MPI are others")
    expect_lines(mpirun(2, "--comm", "mpi", "large"), "^large over mpi$", 2, "large")
    two = ("one", "one", "two", "two")
    expect_lines(mpirun(4, "values", 9, hosts=two), "^values over mpi, local [01] of 2$", 4, "two hosts")
    code, said = mpirun(2, "--comm", "shm", "hash", hosts=("one", "two"))
    expect(code == 2 and "--comm shm: only 1 of 2 ranks are on the host of rank" in said, "shm over hosts", code, said)
    code, said = run(MPIEXEC, "--oversubscribe", "-n", 2, PROGRAM, "--device", "cpu-async", "--comm", "mpi", "hash")
    expect(code == 0, "cpu-async", code, said)


# --- trouble -----------------------------------------------------------------------------------------

RANKS = 3
# The special rank is mpirun's own child; the others run under a shell that notes their exit status.
WRAPPER = """
folder="$1"; special="$2"; shift 2
if [ "$OMPI_COMM_WORLD_RANK" = "$special" ]; then exec "$@"; fi
"$@"
echo $? > "$folder/exit-$OMPI_COMM_WORLD_RANK"
"""


def wait_for(condition):
    end = time.monotonic() + TIMEOUT
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def end_all(folder):
    """Those that this test started, and that still are what they were."""
    for note in folder.glob("pid-*"):
        pid = int(note.read_text())
        try:
            if os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
        except OSError:
            pass


def check_rank(folder, how, special, rank, code, words):
    status, is_kept, waited_ms, text = (folder / f"rank-{rank}").read_text().split(" ", 3)
    what = f"{how} of rank {special}: rank {rank} waited {waited_ms} ms: {text.strip()}"
    print(what)
    expect(int(status) == code and is_kept == "1" and all(word in text for word in words), what, "; want", code, words)
    if rank != special:
        expect(int((folder / f"exit-{rank}").read_text()) == code, what, "; its exit code is another")
    return int(waited_ms)


def start(folder, how, special, deadline):
    command = [MPIEXEC, "--enable-recovery", "--oversubscribe", "-n", RANKS, "sh", "-c", WRAPPER, "sh", folder, special,
               PROGRAM, "--comm", "mpi", "--deadline", deadline, how, special, folder]
    return subprocess.Popen([str(word) for word in command], env=CLEAN, start_new_session=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lose(how, special, code, *words, deadline=60):
    others = [rank for rank in range(RANKS) if rank != special]
    with tempfile.TemporaryDirectory(prefix="fsdp-comm-") as name:
        folder = Path(name)
        job = start(folder, how, special, deadline)
        try:
            is_over = wait_for(lambda: all((folder / f"exit-{rank}").exists() for rank in others))
            expect(is_over, how, special, "the others do not end")
            if how == "stop":
                os.kill(int((folder / f"pid-{special}").read_text()), signal.SIGCONT)
            if how not in ("kill", "work", "leave"):
                expect(wait_for((folder / f"rank-{special}").exists), how, special, "does not end")
                others.append(special)
            for rank in others if is_over else []:
                waited_ms = check_rank(folder, how, special, rank, code, words)
                expect(waited_ms < 20000, how, special, "long waits")
        finally:
            end_all(folder)
            try:
                said, _ = job.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                said, _ = job.communicate()
            if problems:
                print(said)


def loss():
    cases = [lambda: lose("kill", 1, 10, "rank 1 (process ", "died", "all_reduce of 400000 f32 for layers.0 (call 3)"),
             lambda: lose("work", 2, 10, "rank 2 (process ", "died"),
             lambda: lose("stop", 0, 10, "rank 0 is stuck, or stopped", "within 1 s", deadline=1),
             lambda: lose("late", 2, 10, "rank 2 is stuck, or stopped: it did not come within 1 s to all_reduce",
                          deadline=1),
             lambda: lose("leave", 0, 10, "rank 0 has left the group: it does not come to all_reduce"),
             lambda: lose("abort", 1, 7, "the disk is full"),
             lambda: lose("differ", 2, 2, "rank 2 makes all_reduce of 7 f32 for layers.0 (call 3), rank 0 all_reduce "
                          "of 400000 f32 for layers.0 (call 3)"),
             lambda: lose("counts", 1, 2, "rank 1 sends 8 elements to rank 0, which expects 3 from it, in all_to_all")]
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(case) for case in cases]:
            done.result()


globals()[WHAT]()
print("\n".join(problems) or f"{WHAT}: as it should be")
sys.exit(1 if problems else 0)
