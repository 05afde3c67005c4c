"""Runs that somebody else works in: a save under way is not a leftover, a step that retention takes away is
not damaged, and fsdp-gc does not end the job whose run it tidies, and deletes nothing once it is told to
stop.

usage: run_in_use.py BUILD
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import stalled

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


def step_goes_away(options):
    """It is listed, and removed while a newer one is verified: progress goes into a pipe that is full."""
    shutil.rmtree("going", ignore_errors=True)
    shutil.copytree("run", "going")
    process, reader = stalled.start([BUILD / "bin/fsdp-verify", "going", "--progress=json", *options])
    shutil.rmtree("going/step-00000100")
    talk = stalled.drain(reader)
    printed = process.communicate()[0]
    told = "step-00000100 was removed meanwhile and is not verified" in talk
    whole = printed.count(b"step-00000100") == 0 and printed.count(b"step-00000200") == 1
    ok = process.returncode == 0 and told and whole
    return expect("step goes away", ok, (process.returncode, talk, printed))


def gc_is_stopped(options):
    """While it reads those for whose sake another one would go."""
    shutil.rmtree("stopped", ignore_errors=True)
    shutil.copytree("run", "stopped")
    before = sorted(os.listdir("stopped"))
    process, reader = stalled.start([BUILD / "bin/fsdp-gc", "stopped", "--keep-last", "2", *options],
                                    on_terminal=True)
    process.send_signal(signal.SIGINT)
    talk = stalled.drain(reader)
    printed = process.communicate()[0].decode()
    untouched = sorted(os.listdir("stopped")) == before and "step-00000100" in before
    ok = process.returncode == 130 and untouched and "remove" not in printed and "by signal 2" in talk
    told = "--json" not in options or json.loads(printed).get("exit") == 130
    return expect(f"fsdp-gc {options} is stopped", ok and told, (process.returncode, talk, printed))


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
        problems = save_in_progress() + step_goes_away([]) + step_goes_away(["--json"])
        problems += gc_is_stopped([]) + gc_is_stopped(["--yes"]) + gc_is_stopped(["--yes", "--json"])
        problems += gc_beside_a_job()
        os.chdir("/")
    print("\n".join(problems) or "as it should be")
    return 1 if problems else 0


sys.exit(main())
