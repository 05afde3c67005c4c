"""Saving and loading on real ranks, started by mpirun.

usage: save_load.py MPIEXEC PROGRAM rounds|loss

rounds: 1, 2, 3, 4 and 8 ranks each load what the others saved, in every kind, raw and compressed.
loss: one of three ranks is killed or stopped at a storage call of a save, for every FSDP_TEST_SAMPLE-th
of its calls. With `mpirun --enable-recovery` the others end within the deadline and name it; a stopped
one may wake up when they are gone. Without that option mpirun ends the job. Each time two ranks load
the old state or the new one, and save the next step.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WORLDS = [2, 3] if "FSDP_TEST_FEWER" in os.environ else [1, 2, 3, 4, 8]
RANKS, USUAL_SAMPLE = 3, 48
AT_ONCE = 3                              # points: their ranks wait for a deadline, mostly
DEADLINE, LONGEST_WAIT, TIMEOUT, PEER_FAILED = 2.0, 20.0, 90, 10

ENVIRONMENT = dict(
    os.environ,
    OMPI_ALLOW_RUN_AS_ROOT="1",
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    OMPI_MCA_btl_vader_single_copy_mechanism="none",
)

# The lost rank is mpirun's own child; the others run under a shell, so that their exit status does
# not end the job.
WRAPPER = """
if [ "$OMPI_COMM_WORLD_RANK" = "$5" ]; then exec "$@"; fi
"$@"
echo $? > "$3/exit-$OMPI_COMM_WORLD_RANK"
"""


def place():
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def start(mpiexec, ranks, options, command):
    command = [mpiexec, *options, "--oversubscribe", "-n", str(ranks), *command]
    return subprocess.Popen(
        command, env=ENVIRONMENT, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )


def finish(process):
    """The output of a process, or None when it did not end."""
    try:
        return process.communicate(timeout=TIMEOUT)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None


def run(mpiexec, ranks, *command):
    process = start(mpiexec, ranks, [], command)
    text = finish(process)
    return process.returncode, "it does not end" if text is None else text


# --- rounds ------------------------------------------------------------------------------------------


def rounds(mpiexec, program):
    loads = saves = failed = 0
    with tempfile.TemporaryDirectory(prefix="fsdp-mpi-", dir=place()) as folder:
        for world in WORLDS + WORLDS[:-1]:
            status, text = run(mpiexec, world, program, "round", folder)
            counts = re.search(r"(\d+) loads, (\d+) saves, (\d+) failed", text)
            if status != 0 or not counts:
                print(f"{world} ranks ended with {status}: {text}")
                failed += 1
                continue
            loads += int(counts[1])
            saves += int(counts[2])
    worlds = ", ".join(map(str, WORLDS))
    print(f"| real ranks (MPI), {worlds} | {saves} saves, {loads} loads | fail {failed} |")
    return failed


# --- a rank is lost ----------------------------------------------------------------------------------


def noted(folder, what, rank):
    path = folder / f"{what}-{rank}"
    return path.read_text() if path.exists() and path.stat().st_size else None


def signal_rank(folder, program, rank, number):
    """Signals a rank that noted its pid and still is what it was."""
    pid = int(noted(folder, "pid", rank) or 0)
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return
    if os.fsencode(program) in command and os.fsencode(folder) in command:
        os.kill(pid, number)


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def others_of(special):
    return [rank for rank in range(RANKS) if rank != special]


def judge_others(folder, special):
    """They all saved, or they all name the lost rank, in time."""
    problems = []
    for rank in others_of(special):
        text = noted(folder, "rank", rank)
        if not text:
            problems.append(f"rank {rank} did not end")
            continue
        status, waited, _, message = text.split(" ", 3)
        if float(waited) > LONGEST_WAIT:
            problems.append(f"rank {rank} waited {waited} s")
        if int(status) not in (0, PEER_FAILED):
            problems.append(f"rank {rank} ended with {status}: {message}")
        if int(status) == PEER_FAILED and f"rank {special} did not answer" not in message:
            problems.append(f"rank {rank} does not name rank {special}: {message}")
    return problems


def lose(mpiexec, program, folder, how, special, call):
    """Runs the save in which a rank is lost; returns problems, and the seconds that others waited."""
    options = [] if how == "plain" else ["--enable-recovery"]
    signal_name = "kill" if how in ("kill", "plain") else "stop"
    command = [program, "lose", str(folder), signal_name, str(special), str(call)]
    if how != "plain":
        command = ["sh", "-c", WRAPPER, "sh", *command]
    process = start(mpiexec, RANKS, options, command)
    problems = []
    if how != "plain":
        ended = wait_for(lambda: all(noted(folder, "rank", rank) for rank in others_of(special)), TIMEOUT)
        if how == "wake" and ended:
            signal_rank(folder, program, special, signal.SIGCONT)
            wait_for(lambda: noted(folder, "rank", special), LONGEST_WAIT)
        problems = judge_others(folder, special)
        for rank in range(RANKS):
            signal_rank(folder, program, rank, signal.SIGKILL)
    if finish(process) is None:
        problems.append("mpirun does not end")
    if how == "plain" and process.returncode == 0:
        problems.append("mpirun did not see that a rank was killed")
    waits = [float(text.split()[1]) for rank in others_of(special) if (text := noted(folder, "rank", rank))]
    return problems, max(waits, default=0.0)


# Messages of a rank about the checkpoint when another one was lost, and the steps that may be found then.
PROMISES = {
    "nothing was saved, and existing checkpoints are unchanged": ["20"],
    "the checkpoint is saved nevertheless": ["30"],
    "the checkpoint is saved whole or not at all": ["20", "30"],
}


def judge_promises(others, step):
    problems = []
    for text in others:
        if not text or not text.startswith(f"{PEER_FAILED} "):
            continue
        said = [steps for words, steps in PROMISES.items() if words in text]
        if len(said) != 1 or step not in said[0]:
            problems.append(f"step {step} is found, and a rank said: {text}")
    return problems


def judge_run(mpiexec, program, folder, reported):
    status, text = run(mpiexec, 2, program, "check", folder)
    step = re.search(r"found step (\d+)", text)
    if status != 0 or not step:
        return None, [f"what is left cannot be loaded and saved to: {text}"]
    if reported and step[1] != "30":
        return None, [f"was reported as saved, and step {step[1]} is found"]
    return step[1], []


def count_calls(mpiexec, program, golden):
    with tempfile.TemporaryDirectory(prefix="fsdp-mpi-", dir=place()) as name:
        folder = Path(name)
        shutil.copytree(golden / "run", folder / "run")
        run(mpiexec, RANKS, program, "lose", folder, "kill", "0", "0")
        return [int(noted(folder, "rank", rank).split()[2]) for rank in range(RANKS)]


def one_point(mpiexec, program, golden, how, special, call):
    with tempfile.TemporaryDirectory(prefix="fsdp-mpi-", dir=place()) as name:
        folder = Path(name)
        shutil.copytree(golden / "run", folder / "run")
        problems, waited = lose(mpiexec, program, folder, how, special, call)
        others = [noted(folder, "rank", rank) for rank in others_of(special)]
        reported = any(text and text.startswith("0 ") for text in others)
        step, more = judge_run(mpiexec, program, folder, reported)
        problems += judge_promises(others, step)
        for problem in problems + more:
            print(f"{how} rank {special} at call {call}: {problem}")
        return len(problems), len(more), step, waited


def points(calls, every):
    every_point = [
        (how, rank, call)
        for call in range(1, max(calls) + 1)
        for rank in range(RANKS)
        for how in ("kill", "stop", "wake", "plain")
        if call <= calls[rank]
    ]
    # shuffled, so that every n-th has all ranks and ways
    random.Random(1).shuffle(every_point)
    return every_point[::every]


def loss(mpiexec, program):
    given = int(os.environ.get("FSDP_TEST_SAMPLE") or 0)
    usual = USUAL_SAMPLE * int(os.environ.get("FSDP_TEST_FEWER") or 1)
    every = given or usual
    count = hung = lost = 0
    found = {"20": 0, "30": 0, None: 0}
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="fsdp-mpi-", dir=place()) as name:
        golden = Path(name)
        status, text = run(mpiexec, 2, program, "prepare", golden)
        if status != 0:
            print(f"cannot prepare: {text}")
            return 1
        some = points(count_calls(mpiexec, program, golden), every)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            results = list(threads.map(lambda point: one_point(mpiexec, program, golden, *point), some))
        for bad, gone, step, waited in results:
            count += 1
            hung += bad
            lost += gone
            found[step] += 1
            worst = max(worst, waited)
    print(
        f"| real ranks: one of 3 killed, stopped or stopped for a while at a storage call | {count} points"
        f" (1 of {every}): old {found['20']}, new {found['30']}; others ended after at most {worst:.1f} s,"
        f" deadline {DEADLINE:.0f} s | lost {lost}, not in time or not named {hung} |"
    )
    return hung + lost + (count == 0)


def main():
    mpiexec, program, what = sys.argv[1:]
    return 1 if (rounds if what == "rounds" else loss)(mpiexec, program) else 0


if __name__ == "__main__":
    sys.exit(main())
