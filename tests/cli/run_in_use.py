"""Runs that somebody else works in: a save under way is no leftover, a step that retention takes away is not
damaged, and fsdp-gc does not end the job whose run it tidies.

usage: run_in_use.py BUILD
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BUILD = Path(sys.argv[1]).resolve()
STAGING = "step-00000400.tmp-0123456789abcdef0123456789abcdef"


def run(*command):
    done = subprocess.run([BUILD / "bin" / command[0], *command[1:]], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def expect(what, ok, found):
    return [] if ok else [f"{what}: {found}"]


def save_in_progress():
    """The marker of a save is locked as long as its maker lives."""
    os.mkdir(f"only/{STAGING}")
    with open(f"only/{STAGING}/.saving", "w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        held = run("fsdp-verify", "only")
    free = run("fsdp-verify", "only")
    same = held[0] == free[0] == 3 and "holds no checkpoint" in held[2] and held[1] == ""
    return expect("save in progress", same and "a save in progress" in held[2] and "fsdp-gc" not in held[2]
                  and "interrupted save; fsdp-gc removes it" in free[2], (held, free))


def blocked_pipe():
    reader, writer = os.pipe()
    flags = fcntl.fcntl(writer, fcntl.F_GETFL)
    fcntl.fcntl(writer, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        pass
    fcntl.fcntl(writer, fcntl.F_SETFL, flags)
    return reader, writer


def is_asleep(process):
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def step_goes_away(options):
    """It is listed, and removed while a newer one is verified: progress goes into a pipe that is full."""
    shutil.rmtree("going", ignore_errors=True)
    shutil.copytree("run", "going")
    reader, writer = blocked_pipe()
    process = subprocess.Popen([BUILD / "bin/fsdp-verify", "going", "--progress=json", *options],
                               stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    while process.poll() is None and not is_asleep(process):
        time.sleep(0.01)
    time.sleep(0.2)
    shutil.rmtree("going/step-00000100")
    talk = b""
    while piece := os.read(reader, 65536):
        talk += piece
    os.close(reader)
    printed = process.communicate()[0]
    told = b"step-00000100: removed meanwhile, not verified" in talk
    whole = printed.count(b"step-00000100") == 0 and printed.count(b"step-00000200") == 1
    ok = process.returncode == 0 and told and whole
    return expect("step goes away", ok, (process.returncode, talk, printed))


def gc_beside_a_job():
    job = subprocess.Popen([BUILD / "bin/fsdp-bench", "make", "-q", "--model", "gpt2", "--scale", "0.0005",
                            "--no-sync", "--saves", "12", "job"], stderr=subprocess.PIPE, text=True)
    problems = []
    while job.poll() is None:
        code, _, talk = run("fsdp-gc", "job", "--yes", "-q")
        problems += expect("fsdp-gc beside a job", code in (0, 3, 6), (code, talk))
    talk = job.communicate()[1]
    return problems + expect("a job beside fsdp-gc", job.returncode == 0, (job.returncode, talk))


def main():
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        subprocess.run([BUILD / "tests/make_sample", "run", "1", "run"], check=True)
        os.mkdir("only")
        problems = save_in_progress() + step_goes_away([]) + step_goes_away(["--json"]) + gc_beside_a_job()
        os.chdir("/")
    print("\n".join(problems) or "as it should be")
    return 1 if problems else 0


sys.exit(main())
