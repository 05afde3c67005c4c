"""Collectives over a network: values, bits as over shared memory, ranks that get lost, several hosts.

usage: comm_network.py PROGRAM EXAMPLE mpi|mpi_loss MPIEXEC
       comm_network.py PROGRAM EXAMPLE tcp|tcp_loss|tcp_apart    exit 77: ranks cannot be apart here
       comm_network.py PROGRAM EXAMPLE large [MPIEXEC]

EXAMPLE trains something and prints losses.
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

from ports import free_port

PROGRAM, EXAMPLE, WHAT, *REST = sys.argv[1:]
MPIEXEC = REST[0] if REST else None
TIMEOUT = 100
EVERY = int(os.environ.get("FSDP_TEST_SAMPLE") or 0)
WORLDS = (3,) if "FSDP_TEST_FEWER" in os.environ else (2, 3, 4)     # a slow build
CLEAN = {name: value for name, value in os.environ.items()
         if not name.startswith(("FSDP_", "OMPI_COMM", "PMIX_"))}
CLEAN |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
          "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
problems = []


def expect(holds, *what):
    if not holds:
        problems.append(" ".join(map(str, what)))


def run(*command, **more):
    try:
        done = subprocess.run([str(word) for word in command], env=CLEAN, text=True, capture_output=True,
                              timeout=TIMEOUT, stdin=subprocess.DEVNULL, **more)
    except subprocess.TimeoutExpired as late:
        problems.append(f"{command} does not end: {late.stdout} {late.stderr}")
        return -1, ""
    return done.returncode, done.stdout + done.stderr


def mpirun(n, *arguments, program=PROGRAM, **more):
    return run(MPIEXEC, "--oversubscribe", "-n", n, program, *arguments, **more)


def mpirun_on(hosts, *arguments):
    """One rank on each of the hosts, which have names. Several programs in one command line, with ':' between
    them, would do without the shell, but crash the mpirun of Open MPI 5.0.7."""
    named = f"export FSDP_HOST_ID=$(echo {' '.join(hosts)} | cut -d' ' -f$((OMPI_COMM_WORLD_RANK + 1)))"
    return run(MPIEXEC, "--oversubscribe", "-n", len(hosts), "sh", "-c", f'{named}; exec "$@"', "sh", PROGRAM,
               *arguments)


def start_members(hosts, *arguments, command=(), **variables):
    """Starts the ranks without MPI."""
    master = f"127.0.0.1:{free_port()}"
    common = CLEAN | {"FSDP_WORLD_SIZE": str(len(hosts)), "FSDP_MASTER": master} | variables
    return [subprocess.Popen([*command, PROGRAM, *map(str, arguments)], text=True, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             env=common | {"FSDP_RANK": str(rank), "FSDP_HOST_ID": host})
            for rank, host in enumerate(hosts)]


def run_members(hosts, *arguments):
    results = [(process.communicate(timeout=TIMEOUT)[0], process.returncode)
               for process in start_members(hosts, *arguments)]
    return max(code for _, code in results), "".join(said for said, _ in results)


def expect_lines(result, lines, n, what):
    code, said = result
    found = re.findall(lines, said, re.M)
    expect(code == 0 and len(found) == n, what, f"want {n} of '{lines}'; got", code, said)


# --- values ------------------------------------------------------------------------------------------

TWO_HOSTS = ("one", "one", "two", "two")


def expect_bits(n, result):
    """The bits are those of shared memory."""
    said = [sorted(re.findall(r"rank \d+: bits \w+", text)) for code, text in
            (result, run(PROGRAM, "--np", n, "hash"))]
    expect(len(said[0]) == n and said[0] == said[1], "other bits", said, result)


def expect_losses(way, *command):
    """The losses are those of shared memory."""
    said = []
    for words in ([EXAMPLE, "--np", 3], command):
        with tempfile.TemporaryDirectory(prefix="fsdp-comm-") as folder:
            said.append(re.findall("^step .* loss .*$", run(*words, cwd=folder)[1], re.M))
    expect(len(said[0]) > 10 and said[0] == said[1], "other losses", way, said)


def mpi():
    for n in WORLDS:
        result = mpirun(n, "--comm", "mpi", "values", n)
        expect_lines(result, rf"^values over mpi, local \d of {n}$", n, "values")
        expect_bits(n, mpirun(n, "--comm", "mpi", "hash"))
    if len(WORLDS) > 1:
        expect_lines(mpirun(2, "--comm", "mpi", "large", BROADCAST), "^large over mpi$", 2, "large")
    expect_lines(mpirun_on(TWO_HOSTS, "values", 9), "^values over mpi, local [01] of 2$", 4, "two hosts")
    code, said = mpirun_on(("one", "two"), "--comm", "shm", "hash")
    expect(code == 2 and "--comm shm: only 1 of 2 ranks are on the host of rank" in said, "shm", code, said)
    expect_losses("streams with threads", MPIEXEC, "--oversubscribe", "-n", 3, EXAMPLE, "--comm", "mpi",
                  "--device", "cpu-async")


def tcp():
    for n in WORLDS:
        result = run(PROGRAM, "--np", n, "--comm", "tcp", "values", n)
        expect_lines(result, rf"^values over tcp, local \d of {n}$", n, "values")
        expect_bits(n, run(PROGRAM, "--np", n, "--comm", "tcp", "hash"))
    expect_lines(run_members(TWO_HOSTS, "values", 9), "^values over tcp, local [01] of 2$", 4, "two hosts")
    code, said = run(PROGRAM, "--threads", 2, "--comm", "tcp", "hash")
    expect(code == 2 and "--comm tcp contradicts --threads" in said, "threads", code, said)
    expect_losses("streams with threads", EXAMPLE, "--np", 3, "--comm", "tcp", "--device", "cpu-async")


BROADCAST, ALL_KINDS = 4, 0


def large():
    """Gigabytes, page by page: one call, or all over all back ends."""
    global TIMEOUT
    TIMEOUT = 1000
    kinds = ALL_KINDS if EVERY else BROADCAST
    ways = [("shm", lambda: run(PROGRAM, "--np", 2, "large", kinds)),
            ("tcp", lambda: run(PROGRAM, "--np", 2, "--comm", "tcp", "large", kinds)),
            ("mpi", lambda: mpirun(2, "--comm", "mpi", "large", kinds))][:3 if MPIEXEC else 2]
    for comm, way in ways[::EVERY] if EVERY else ways[:1]:
        expect_lines(way(), f"^large over {comm}$", 2, "large")


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
    """The processes that this test started, and that still are what they were."""
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
    expect(int(status) == code and is_kept == "1", what, "; want", code)
    expect(all(word in text for word in words), what, "; want", words)
    expect(int(waited_ms) < 20000, what, "; that is long")


def start(folder, how, special, deadline, members):
    arguments = ["--deadline", deadline, how, special, folder]
    if not MPIEXEC:
        return start_members(["one", "two", "three"], *arguments, command=members)
    command = [MPIEXEC, "--enable-recovery", "--oversubscribe", "-n", RANKS, "sh", "-c", WRAPPER, "sh"]
    command += [folder, special, PROGRAM, "--comm", "mpi", *arguments]
    return [subprocess.Popen([str(word) for word in command], env=CLEAN, start_new_session=True, text=True,
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)]


def exit_code(folder, jobs, rank):
    """None: it is still at work."""
    if not MPIEXEC:
        return jobs[rank].poll()
    note = folder / f"exit-{rank}"
    text = note.read_text() if note.exists() else ""
    return int(text) if text else None


def check_others(folder, jobs, how, special, code, words):
    others = [rank for rank in range(RANKS) if rank != special]
    is_over = wait_for(lambda: all(exit_code(folder, jobs, rank) is not None for rank in others))
    expect(is_over, how, special, "the others do not end")
    for rank in others if is_over else []:
        expect(exit_code(folder, jobs, rank) == code, how, special, f"rank {rank} ends with",
               exit_code(folder, jobs, rank))
        check_rank(folder, how, special, rank, code, words)


def finish(job):
    try:
        return job.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL) if MPIEXEC else job.kill()
        return job.communicate()[0]


def lose(how, special, code, *words, deadline=60, members=()):
    with tempfile.TemporaryDirectory(prefix="fsdp-comm-") as name:
        folder = Path(name)
        jobs = start(folder, how, special, deadline, members)
        try:
            check_others(folder, jobs, how, special, code, words)
            if how == "stop":
                os.kill(int((folder / f"pid-{special}").read_text()), signal.SIGCONT)
            if how not in ("kill", "work", "leave"):
                expect(wait_for((folder / f"rank-{special}").exists), how, special, "does not end")
                check_rank(folder, how, special, special, code, words)
        finally:
            end_all(folder)
            said = [finish(job) for job in jobs]
            if problems:
                print(*said)


# Each rank among processes of its own, as on a host of its own: none can watch another.
APART = ("unshare", "--pid", "--fork", "--kill-child", "sh", "-c", '"$@"; exit $?', "sh")


def apart():
    tried = subprocess.run([*APART, "true"], stderr=subprocess.PIPE, text=True)
    if tried.returncode != 0:
        print("left out: ranks that cannot watch each other:", tried.stderr.strip())
        sys.exit(77)
    lose("kill", 1, 10, "rank 1, whose connection (127.0.0.1:", "ended, died", members=APART)


def loss():
    call = "all_reduce of 400000 f32 for layers.0 (call 3)"
    other = f"rank 2 makes all_reduce of 7 f32 for layers.0 (call 3), rank 0 {call}"
    stuck = "is stuck, or stopped"
    cases = [lambda: lose("kill", 1, 10, "rank 1 (process ", "died", call),
             lambda: lose("work", 2, 10, "rank 2 (process ", "died"),
             lambda: lose("stop", 0, 10, f"rank 0 {stuck}", "within 1 s", deadline=1),
             lambda: lose("late", 2, 10, f"rank 2 {stuck}: it did not come within 1 s to {call}", deadline=1),
             lambda: lose("leave", 0, 10, f"rank 0 has left the group: it takes no part in {call}"),
             lambda: lose("abort", 1, 7, "the disk is full"),
             lambda: lose("differ", 2, 2, other),
             lambda: lose("counts", 1, 2, "rank 1 sends 8 elements to rank 0, which expects 3 from it, in")]
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(case) for case in cases]:
            done.result()


{"mpi": mpi, "tcp": tcp, "mpi_loss": loss, "tcp_loss": loss, "tcp_apart": apart, "large": large}[WHAT]()
print("\n".join(problems) or f"{WHAT}: as it should be")
sys.exit(1 if problems else 0)
