"""Ctrl-C, SIGTERM and a closed terminal stop every tool that works long: exit code 130, 143 or 129, nothing
left half-written. Under nohup a closed terminal stops nothing. With --json there is one object in any case.

usage: signals.py BUILD
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import stalled

BUILD = Path(sys.argv[1]).resolve()
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOHUP = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh")


def stop(command, number, directory, prefix=()):
    process, reader = stalled.start([*prefix, BUILD / "bin" / command[0], *command[1:],
                                     "--progress=json"], directory)
    process.send_signal(number)
    time.sleep(0.1)
    talk = stalled.drain(reader)
    printed, _ = process.communicate()
    return process.returncode, talk, printed


def stop_between_saves(directory):
    """A signal also ends the output that fsdp-bench make prints as it goes."""
    process = subprocess.Popen([BUILD / "bin/fsdp-bench", "make", "--model", "gpt2", "--scale", "0.001",
                                "--saves", "100000", "--json", "--progress=off", "run"],
                               cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    begun = process.stdout.readline() + process.stdout.readline()
    process.send_signal(signal.SIGINT)
    printed = json.loads(begun + process.communicate()[0])
    ok = process.returncode == printed["exit"] == 130 and printed["schema"] == 1 and len(printed["saves"]) > 0
    return "" if ok else f"fsdp-bench make: {process.returncode}, {printed}"


def stop_by_all(command, directory):
    problems = []
    for number in SIGNALS:
        code, talk, _ = stop(command, number, directory)
        if code != 128 + number or "stop" not in talk:
            problems.append(f"{' '.join(command)}: signal {number} gives {code}: {talk}")
    if "--stats" in command:                     # not part of the object, so nothing is read
        return problems
    code, _, printed = stop([*command, "--json"], signal.SIGTERM, directory)
    found = json.loads(printed)
    if found["schema"] != 1 or found["exit"] != 143 or code != 143 or not found["error"]:
        problems.append(f"{' '.join(command)} --json: {code}, {printed}")
    return problems


def main():
    commands = [["fsdp-convert", "a", "new", "--world-size", "3"], ["fsdp-verify", "a"],
                ["fsdp-diff", "a", "b"],
                ["fsdp-ls", "--digest", "sha256", "a"], ["fsdp-ls", "--stats", "a"]]
    with tempfile.TemporaryDirectory() as directory:
        for name in "ab":
            subprocess.run([BUILD / "tests/make_sample", "sharded", "2", name], cwd=directory, check=True)
        before = sorted(os.listdir(directory))
        with ThreadPoolExecutor(len(commands)) as threads:      # stalled tools take no processor
            found = list(threads.map(lambda command: stop_by_all(command, directory), commands))
        problems = sum(found, [])
        code, talk, _ = stop(["fsdp-verify", "a"], signal.SIGHUP, directory, NOHUP)
        if code != 0:
            problems.append(f"fsdp-verify under nohup: SIGHUP gives {code}: {talk}")
        if sorted(os.listdir(directory)) != before:
            problems.append(f"left behind: {sorted(os.listdir(directory))}")
        problems += filter(None, [stop_between_saves(directory)])
    print("\n".join(problems) or f"{len(SIGNALS) * len(commands)} stops")
    return 1 if problems else 0


sys.exit(main())
