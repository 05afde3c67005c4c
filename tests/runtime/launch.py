"""One program, every way to launch it: exit codes, signals, lost ranks and supervisors, what is left.

usage: launch.py PROGRAM local|deadlines|loss|supervisor|bootstrap|slurm
       launch.py PROGRAM mpirun MPIEXEC
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ports import free_port

PROGRAM, WHAT, *REST = sys.argv[1:]
TIMEOUT = 120
MARK = f"FSDP_LAUNCH_TEST={uuid.uuid4()}"
FOREIGN = ("FSDP_", "SLURM_", "OMPI_", "PMIX_", "PMI_", "MPI_", "MV2_", "PALS_", "FLUX_", "JSM_")
CLEAN = {name: value for name, value in os.environ.items()
         if not name.startswith(FOREIGN) and name not in ("RANK", "WORLD_SIZE")}
problems = []


def environment(**more):
    name, value = MARK.split("=")
    return CLEAN | {name: value} | {key: str(text) for key, text in more.items()}


def start(*arguments, stdin=None, command=(PROGRAM,), **variables):
    return subprocess.Popen([*command, *map(str, arguments)], env=environment(**variables), text=True,
                            start_new_session=True, stdin=stdin, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def finish(process, given=None):
    try:
        out, err = process.communicate(given, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        problems.append(f"{process.args} does not end: {err}")
    return process.returncode, out, err


def run(*arguments, given=None, **more):
    stdin = subprocess.DEVNULL if given is None else subprocess.PIPE
    return finish(start(*arguments, stdin=stdin, **more), given)


def expect(holds, *what):
    if not holds:
        problems.append(" ".join(map(str, what)))


def expect_run(code, pattern, *arguments, **more):
    result = run(*arguments, **more)
    said = result[1] + result[2]
    expect(result[0] == code and re.search(pattern, said),
           arguments, more, f"want {code}, '{pattern}'; got", result)
    return said


def at_once(*cases, workers=4):
    """They wait for deadlines, mostly."""
    with ThreadPoolExecutor(workers) as threads:
        for done in [threads.submit(*case) for case in cases]:
            done.result()


def marked():
    """The processes of this test that are still there."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if MARK.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            pass
    return found


def wait_for(condition):
    end = time.monotonic() + TIMEOUT
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return value


def expect_nobody(what):
    expect(wait_for(lambda: not marked()), what, "leaves processes", marked())
    for pid in marked():
        os.kill(pid, signal.SIGKILL)


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def read_notes(folder, what, n):
    """The numbers that all ranks have written, or nothing yet."""
    notes = [folder / f"{what}-{rank}" for rank in range(n)]
    return all(note.exists() for note in notes) and [int(note.read_text()) for note in notes]


def started(n, *arguments):
    """n ranks at work under --np, their supervisor and their pids."""
    folder = Path(tempfile.mkdtemp(dir=home.name))
    process = start("--np", n, *arguments, "wait", folder)
    return process, wait_for(lambda: read_notes(folder, "rank", n)), folder


# --- ways to start ---------------------------------------------------------------------------------


def check_ranks(n, said, what):
    mean = f"{(n - 1) / 2:g}"
    want = {f"rank {rank} of {n}: local {rank} of {n}, group of {n}, mean {mean}" for rank in range(n)}
    expect(set(said.splitlines()) >= want, what, "says", said)


def say_who_won():
    """Once, and where nobody else has said it."""
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "x",
             "MASTER_PORT": 1}
    for want, options, variables in [
        ("fsdp: 3 ranks as processes, by --np\n", ["--np", 3], {"FSDP_VERBOSE": 1}),
        ("fsdp: rank 0 of 1, started by no launcher\n", [], {"FSDP_VERBOSE": 1}),
        ("fsdp: 3 ranks as processes, by FSDP_NP\n", [], {"FSDP_NP": 3}),
        ("fsdp: 2 ranks as threads, by FSDP_THREADS\n", [], {"FSDP_THREADS": 2}),
        ("fsdp: rank 0 of 1, started by torchrun (RANK)\n", [], alone),
        ("", ["--np", 3], {}),
        ("", ["--threads", 2], alone),
        ("", [], {}),
        ("", [], alone | {"FSDP_VERBOSE": 0}),
    ]:
        code, _, err = run(*options, **variables)
        expect(code == 0 and err == want, "who won:", options, variables, err)


def local_worlds():
    for n, options in [(1, []), (1, ["--np", 1]), (2, ["--np=2"]), (4, ["--np", 4]), (4, ["--threads", 4]),
                       (1, ["--threads=1"])]:
        check_ranks(n, expect_run(0, "rank 0", *options), options)
    check_ranks(3, expect_run(0, "rank 0", FSDP_NP=3), "FSDP_NP")
    check_ranks(2, expect_run(0, "rank 0", "--threads", 2, FSDP_NP=3), "the command line wins")
    expect_run(0, "shm over 3", "--np", 3, "collect")
    expect_run(0, "threads over 3", "--threads", 3, "collect")
    expect_run(0, "self over 1", "collect")
    expect_run(0, "^arguments a b -- --np 3\n", "arguments", "a", "--np", 2, "b", "--", "--np", 3)
    say_who_won()
    traces = Path(home.name) / "trace-%r"
    expect_run(0, "shm", "--np", 2, "--trace", traces, "collect")
    expect(sorted(path.name for path in traces.parent.glob("trace-*")) == ["trace-0", "trace-1"], "traces")


def local_exits():
    for options in (["--np", 3], ["--threads", 3]):
        for rank in range(3):
            expect_run(7, rf"rank {rank} has left with exit code 7 \(no space\)", *options, "exit", rank, 7)
    for options in (["--np", 3], ["--threads", 3], ["--np", 3, "--comm", "tcp"]):
        why = r"rank 1 has left the group with exit code 7 \(no space\): it takes no part in all_reduce"
        expect_run(7, why, *options, "leave", 1, 7)
        expect_run(1, r"has left the group with exit code 1: it takes no part", *options, "leave", 1, 1)
    expect_run(1, "rank 1 has left with exit code 1\n", "--np", 3, "exit", 1, 1)
    for options in ([], ["--np", 2], ["--threads", 2]):
        expect_run(70, "rank 0 returned 256, which as an exit code would be 0", *options, "exit", 0, 256)
    ignoring = ("/bin/sh", "-c", "trap '' CHLD; exec \"$0\" \"$@\"", PROGRAM)
    check_ranks(2, expect_run(0, "rank 0", "--np", 2, command=ignoring), "SIGCHLD is ignored")
    expect_run(7, "rank 1 ended with exit code 7", "--np", 2, "exit", 1, 7, command=ignoring)


HINT = "; a rank that is busy calls fsdp_world_begin_busy, or set a longer deadline\n"


def times(*options, how=("busy", "longer", "late", "overdue", "stuck"), **more):
    """Cases of three ranks, which mostly sleep."""
    late = rf"rank 1 is stuck.* within 0.5 s.* to all_reduce .*{HINT}"
    cases = {"busy": (0, "over 3", *options, "busy", 1, 1500),
             "longer": (0, "over 3", *options, "longer", 1, 1500),
             "late": (10, late, *options, "late", 1, 1500),
             "overdue": (10, late, *options, "overdue", 1, 1500),
             "stuck": (10, "rank 0 is stuck", *options, "stuck", 0, 1500)}
    return [(lambda case: expect_run(*case, **more), cases[name]) for name in how]


def deadlines():
    at_once(*times("--np", 3), *times("--threads", 3, how=["busy", "stuck"]),
            *times("--np", 3, "--comm", "tcp", how=["busy", "late", "stuck"]), workers=10)


def local_reasons():
    for options in (["--np", 3], ["--threads", 3], ["--np", 3, "--comm", "tcp"]):
        said = expect_run(3, r"rank 1 has left with exit code 3 \(not found\): cannot read 'corpus'( during"
                          r" fsdp_world_mean.*)?\n", *options, "fail", 1, 3)
        expect(said.count("(not found): cannot read 'corpus'") == 2, "all other ranks hear the reason:", said)
        expect_run(3, r"rank 1 has left the group with exit code 3 \(not found\): it takes no part in"
                   " all_reduce.*; its error: cannot read 'corpus'\n", *options, "fail", 1, 103)


def expect_difference(*options, **more):
    """Every rank is told that the calls differ, whichever of them finds it."""
    call = r"rank [012] is in fsdp_world_(sum|max) \(allgather of 8 bytes, call \d+\)"
    differ = f"{call} while {call}: all ranks must make the same calls"
    for special in (0, 1):
        said = expect_run(2, differ, *options, "differ", special, **more)
        expect({found.groups() for found in re.finditer(differ, said)} & {("sum", "max"), ("max", "sum")},
               "both calls are named:", said)
        expect(len(re.findall(differ, said)) == 3, "by all ranks:", said)


def local_differences():
    for options in (["--np", 3], ["--threads", 3], ["--np", 3, "--comm", "tcp"]):
        expect_difference(*options)


def local_paths():
    for options in (["--np", 3], ["--threads", 3]):
        folder = Path(tempfile.mkdtemp(dir=home.name))
        differ = f"ranks give different paths: rank 1 '{folder}/elsewhere', rank 0 '{folder}/checkpoint'"
        said = expect_run(2, differ, *options, "paths", 1, folder)
        expect(said.count(differ) == 4, "once of the save, and of each rank's load:", said)
        expect([path.name for path in folder.iterdir()] == ["checkpoint"], "saved", *folder.iterdir())


def local_work():
    for how in ("work", "defy"):
        said = expect_run(6, "rank 1 ended with exit code 6", "--np", 3, "--deadline", 1, how, 1, 6)
        expect("signal" not in said, "ranks that are ended have not failed:", said)
    late = ("--threads", 3, "--deadline", 0.1)
    at_once((expect_run, 6, "rank 1 gives up\n(.*\n)*.*still at work", *late, "work", 1, 6),
            (expect_run, 6, "still at work", *late, "hold", 1, 6))
    expect_run(0, "^a\nb\n$", "--np", 2, "read", given="a\nb\n")


def files_needed(said):
    found = re.search(r"needs at least (\d+) open files in a process, which may have", said)
    return int(found[1]) if found else 0


def local_files():
    """As many files as it asks for are enough, also where some are open already."""
    for n, options in ((12, []), (24, []), (12, ["--comm", "tcp"])):
        def start_limited(code, pattern, limit, opened=""):
            limited = ("/bin/sh", "-c", f"{opened} ulimit {limit}; exec \"$0\" \"$@\"", PROGRAM)
            return expect_run(code, pattern, "--np", n, *options, "collect", command=limited)
        over = f"over {n}"
        start_limited(0, over, "-S -n 20")
        needed = files_needed(start_limited(9, f"--np {n} needs", "-n 20"))
        start_limited(0, over, f"-n {needed}")
        opened = "exec 3</dev/null 4</dev/null 5</dev/null;"
        more = files_needed(start_limited(9, f"--np {n} needs", f"-n {needed}", opened))
        expect(more == needed + 3, f"3 files more are open: {more} after {needed}")
        start_limited(0, over, f"-n {needed + 3}", opened)
    if "FSDP_TEST_FEWER" not in os.environ:
        expect_run(0, "tcp over 66", "--np", 66, "--comm", "tcp", "collect")  # who connects, 64 at a time


def local_refusals():
    for pattern, options, variables in [
        ("--np and --threads: ranks are either", ["--np", 2, "--threads", 2], {}),
        ("FSDP_NP and FSDP_THREADS", [], {"FSDP_NP": 2, "FSDP_THREADS": 2}),
        ("--comm threads contradicts --np", ["--np", 2, "--comm", "threads"], {}),
        ("--np needs a value", ["--np"], {}),
        ("each rank needs a separate file", ["--np", 2, "--trace", "x"], {}),
        ("unknown device 'x'", ["--np", 2, "--device", "x"], {}),
        ("RANK is not set", [], {"WORLD_SIZE": 2}),
        ("--np contradicts mpirun", ["--np", 2], {"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 2}),
    ]:
        expect_run(2, pattern, *options, **variables)


def local():
    at_once([local_worlds], [local_exits], [local_work], [local_files], [local_refusals], [local_reasons],
            [local_differences], [local_paths])


# --- lost ranks, lost supervisors --------------------------------------------------------------------


def lose_at_work(rank):
    process, pids, _ = started(3)
    os.kill(pids[rank], signal.SIGKILL)
    code, _, err = finish(process)
    expect(code == 137 and f"rank {rank} was killed by signal 9" in err, "killed", rank, code, err)
    process, pids, _ = started(3, "--deadline", 1)
    os.kill(pids[rank], signal.SIGSTOP)
    code, _, err = finish(process)
    named = re.search(rf"rank {rank} .*did not answer within 1 s in fsdp_world_mean", err)
    expect(code == 10 and named, "stopped", rank, code, err)


def lose_by_signals():
    for number, name in ((9, "Killed"), (11, "Segmentation fault")):
        for rank in range(3):
            how = rf"rank {rank} was killed by signal {number} \({name}\)"
            said = expect_run(128 + number, how, "--np", 3, "signal", rank, number)
            expect(f"rank {rank} has left" in said, "others name the lost rank", said)


def lose_by_exit():
    said = expect_run(4, "rank 1 ended with exit code 4", "--np", 3, "quit", 1, 4)
    expect("ended with exit code 0" not in said, "a rank that failed is not one that ended well", said)
    expect_run(10, "rank 1 has ended with exit code 0", "--np", 3, "quit", 1, 0)
    for how in ("quit", "linger"):
        for code in (0, 7):
            expect_run(10, "rank 1 called exit in a job of 3 --threads", "--threads", 3, how, 1, code)
    expect_run(0, "^$", "--threads", 1, "quit", 0, 0)


def loss():
    at_once([lose_by_signals], [lose_by_exit], *((lose_at_work, rank) for rank in range(3)))
    expect_nobody("a lost rank")


def supervisor():
    process, pids, folder = started(2)
    for n, send in ((1, os.kill), (2, os.killpg)):  # a terminal sends to the whole group
        send(process.pid, signal.SIGUSR1)
        expect(wait_for(lambda: read_notes(folder, "usr1", 2) == [n, n]), "SIGUSR1 arrives once")
    process.send_signal(signal.SIGTSTP)
    expect(wait_for(lambda: all(state(pid) == "T" for pid in [*pids, process.pid])), "SIGTSTP stops all")
    process.send_signal(signal.SIGCONT)
    expect(wait_for(lambda: all(state(pid) != "T" for pid in [*pids, process.pid])), "SIGCONT continues all")
    other, other_pids, _ = started(2)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    expect(code == 75, "SIGTERM arrives", code, err)
    expect(all(state(pid) != "Z" for pid in other_pids), "another job goes on")
    other.send_signal(signal.SIGINT)
    code, _, err = finish(other)
    expect(code == 130, "SIGINT arrives", code, err)

    process, pids, _ = started(3)
    process.kill()
    process.wait()
    expect_nobody("a killed supervisor")
    process, pids, _ = started(3)
    for pid in (process.pid, *pids):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    expect_nobody("a job that is killed as a whole")
    for delay_ms in (0, 1, 2, 4, 8, 16):
        process = start("--np", 4, "wait", home.name)
        time.sleep(delay_ms / 1000)
        process.kill()
        process.wait()
        expect_nobody(f"a supervisor that is killed after {delay_ms} ms")


# --- bootstrap ---------------------------------------------------------------------------------------


def member(rank, size, port, *arguments, host="127.0.0.1", deadline=20, **more):
    more = {"FSDP_RANK": rank, "FSDP_WORLD_SIZE": size, "FSDP_MASTER": f"{host}:{port}",
            "FSDP_DEADLINE": deadline, "FSDP_JOB_ID": "mine"} | more
    return start(*arguments, **more)


def is_connected(port, n=1):
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(at[1].split(":")[1], 16) == port and at[3] == "01" for at in lines) >= n


def is_listening(port):
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(int(at[1].split(":")[1], 16) == port and at[3] == "0A" for at in lines)


def bootstrap_all(what, processes):
    results = [finish(process) for process in processes]
    expect(all(code == 0 for code, _, _ in results), what, results)
    check_ranks(len(processes), "".join(out for _, out, _ in results), what)


def expect_error(process, code, pattern):
    result = finish(process)
    expect(result[0] == code and re.search(pattern, result[2]), f"want {code}, '{pattern}'; got", result)


def lost_in_bootstrap():
    port = free_port()
    zero, one = (member(rank, 3, port) for rank in (0, 1))
    wait_for(lambda: is_connected(port))
    one.kill()
    expect_error(zero, 10, "rank 1 left during the rendezvous")
    finish(one)
    port = free_port()
    zero, one = (member(rank, 3, port) for rank in (0, 1))
    wait_for(lambda: is_connected(port))
    zero.kill()
    expect_error(one, 10, "rank 0 at 127.0.0.1 port .* has left")
    finish(zero)


# The deadline of ranks that are stopped before it ends, also on a busy machine.
STOPPED_S = 6


def member_stopped_in_bootstrap():
    port = free_port()
    zero, one = (member(rank, 3, port, deadline=STOPPED_S) for rank in (0, 1))
    wait_for(lambda: is_connected(port))
    one.send_signal(signal.SIGSTOP)
    two = member(2, 3, port, deadline=STOPPED_S)
    expect_error(zero, 10, f"rank 1 .*did not answer within {STOPPED_S} s")
    expect_error(two, 10, f"rank 1 .*did not answer within {STOPPED_S} s")
    one.kill()
    finish(one)


def zero_stopped_in_bootstrap():
    port = free_port()
    zero, one = (member(rank, 3, port, deadline=STOPPED_S) for rank in (0, 1))
    wait_for(lambda: is_connected(port))
    zero.send_signal(signal.SIGSTOP)
    expect_error(one, 10, f"rank 0 at 127.0.0.1 port .* did not answer within {STOPPED_S} s")
    zero.kill()
    finish(zero)


def bootstrap_by_any_name():
    for host in ("127.0.0.1", "localhost", "[::1]", socket.gethostname()):
        port = free_port()
        bootstrap_all(f"FSDP_MASTER at {host}", [member(rank, 3, port, host=host) for rank in (2, 0, 1)])


def bootstrap_beside_other_clients():
    port = free_port()
    processes = [member(rank, 3, port) for rank in (0, 1)]
    wait_for(lambda: is_connected(port))
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
    clients[70].sendall(b"GET / HTTP/1.0\r\n\r\n")
    foreign = member(2, 3, port, FSDP_JOB_ID="theirs")
    expect_error(foreign, 2, "another job's rendezvous listens")
    bootstrap_all("a bootstrap beside other clients", [*processes, member(2, 3, port)])
    for client in clients:
        client.close()


def contradict_each_other():
    port = free_port()
    processes = [member(rank, 3, port) for rank in (0, 1)]
    wait_for(lambda: is_connected(port))
    processes.append(member(1, 3, port))
    for process in processes:
        expect_error(process, 2, "two processes claim to be rank 1")
    port = free_port()
    for process in [member(rank, 3 + rank, port) for rank in (0, 1)]:
        expect_error(process, 2, "rank 1 .* was started with a world of 4 ranks, rank 0 with 3")


def wait_in_vain():
    port = free_port()
    absent = [member(rank, 4, port, deadline=1) for rank in (0, 2)]
    nobody = member(1, 2, free_port(), deadline=0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        busy = server.getsockname()[1]
        silent = member(1, 2, busy, deadline=0.5)
        expect_error(member(0, 2, busy), 8, "cannot listen at 127.0.0.1 port")
        for process in absent:
            expect_error(process, 10, "ranks 1, 3 did not connect within 1 s")
        expect_error(nobody, 10, "rank 0 did not answer within 0.5 s: .*refused")
        expect_error(silent, 10, "did not answer within 0.5 s: it is stuck, or another program listens "
                     "at that address")


def bootstrap_with_few_files():
    port = free_port()
    limited = ("/bin/sh", "-c", "ulimit -S -n 20; exec \"$0\" \"$@\"", PROGRAM)
    bootstrap_all("few files", [member(rank, 12, port, command=limited) for rank in range(12)])


def bootstrap():
    bootstrap_with_few_files()
    at_once([member_stopped_in_bootstrap], [zero_stopped_in_bootstrap], [wait_in_vain], [lost_in_bootstrap],
            [contradict_each_other], [bootstrap_beside_other_clients], [bootstrap_by_any_name])
    expect_nobody("a bootstrap")


def slurm():
    """Two jobs at once; only the step's id differs."""
    jobs = [[start(SLURM_PROCID=rank, SLURM_NTASKS=3, SLURM_LOCALID=rank, SLURM_JOB_ID=os.getpid(),
                   SLURM_STEP_ID=step, SLURM_STEP_NODELIST="localhost,far[01-07]") for rank in range(3)]
            for step in (0, 1)]
    for job in jobs:
        bootstrap_all("srun", job)
    expect_run(0, "rank 0 of 1", SLURM_PROCID=0, SLURM_NTASKS=3, SLURM_LOCALID=0, SLURM_JOB_ID=7)
    expect_nobody("srun")


def mpirun():
    command = (REST[0], "--oversubscribe", "--allow-run-as-root", "-n")
    check_ranks(4, expect_run(0, "rank 0", 4, PROGRAM, command=command), "mpirun")
    # the code of the rank that ends first: another one hears of the 7 before that is over
    code, out, err = run(3, PROGRAM, "exit", 1, 7, command=command)
    expect(code in (7, 10) and re.search(r"rank 1 has left with exit code 7|[Ee]xit code: *7", out + err),
           "a rank that failed under mpirun:", code, out, err)
    said = expect_run(0, "rank 0", 2, PROGRAM, command=command)
    expect(said.count("fsdp: rank 0 of 2, started by mpirun (OMPI_COMM_WORLD_RANK)\n") == 1, "who won:", said)
    expect_run(2, "OMPI_COMM_WORLD_SIZE is 2, but in MPI itself this is rank 0 of 1", OMPI_COMM_WORLD_RANK=1,
               OMPI_COMM_WORLD_SIZE=2)
    expect_run(2, "PMI_SIZE is 2, but in MPI itself this is rank 0 of 1", PMI_RANK=0, PMI_SIZE=2,
               MPI_LOCALRANKID=0, MPI_LOCALNRANKS=2)
    expect_run(2, "--threads contradicts mpirun", 2, PROGRAM, "--threads", 2, command=command)
    more = (*command, "3", PROGRAM, "--comm", "mpi")
    at_once(*times(command=more, how=["busy", "late"]))
    expect_difference(command=more)
    code, out, err = run("fail", 1, 3, command=more)
    expect(code in (3, 10) and "cannot read 'corpus'" in err, "a reason under mpirun:", code, out, err)
    expect_nobody("mpirun")


with tempfile.TemporaryDirectory(prefix="fsdp-launch-") as folder:
    home = type("Home", (), {"name": folder})
    scratch = Path(folder) / "scratch"
    scratch.mkdir()
    CLEAN |= {"TMPDIR": str(scratch), "XDG_RUNTIME_DIR": str(scratch)} if WHAT != "mpirun" else {}
    shared = set(os.listdir("/dev/shm"))
    globals()[WHAT]()
    expect(not any(scratch.iterdir()), "left behind:", *scratch.iterdir())
    # folders are those of other tests
    new = [name for name in set(os.listdir("/dev/shm")) - shared
           if "fsdp" in name and Path("/dev/shm", name).is_file()]
    expect(not new, "left in /dev/shm:", new)
print("\n".join(problems) or f"{WHAT}: as it should be")
sys.exit(1 if problems else 0)
