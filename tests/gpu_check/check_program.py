"""Runs gpu-check over the fake CUDA runtime: its lines, its JSON, its exit codes, and bugs that it must find.

usage: check_program.py GPU_CHECK FAKE_NCCL [FAKE_CUBLASLT]
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = sys.argv[1]
ROW = re.compile(r"(\S+) +(\S+) +(-|[\d.e+-]+ ms) +(\S+) +(\S+) +(-|[\d.]+) +(yes|NO|skipped)(?:  (.+))?")
WORDS = {"yes": "passed", "NO": "failed", "skipped": "skipped"}
HAS_CUBLASLT = len(sys.argv) > 3
LIBRARIES = dict(zip(("FSDP_NCCL_LIB", "FSDP_CUBLASLT_LIB"), sys.argv[2:]))
LATE = 20  # milliseconds
problems = []


def expect(condition, text):
    if not condition:
        problems.append(text)


class Run:
    """The output of a run; rows by their names."""

    def __init__(self, *arguments, **environment):
        command = [PROGRAM, *arguments]
        self.text = " ".join([*(f"{name}={value}" for name, value in environment.items()), *command])
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_")}
        done = subprocess.run(command, env={**clean, **LIBRARIES, **environment}, text=True, timeout=1200,
                              capture_output=True, check=False)
        self.exit, self.output, self.errors = done.returncode, done.stdout, done.stderr
        self.rows = {}
        lines = self.output.splitlines()
        self.sum = lines[-1] if lines else ""
        begin = next((i for i, line in enumerate(lines) if line.startswith("name ")), len(lines))
        for line in lines[begin + 1:-1]:
            match = ROW.fullmatch(line)
            expect(match, f"{self.text}: this is no row: {line}")
            if match:
                self.rows[match[1]] = match

    def results(self, result):
        return [name for name, row in self.rows.items() if WORDS[row[7]] == result]

    def expect_end(self, code):
        counted = ", ".join(f"{len(self.results(word))} {word}" for word in WORDS.values())
        expect(self.exit == code,
               f"{self.text}: exit code {self.exit}, not {code}: {self.output}{self.errors}")
        expect(self.sum == counted, f"{self.text}: the last line is '{self.sum}', not '{counted}'")


def check_everything(folder):
    path = Path(folder) / "rows.json"
    run = Run("--quick", "--slow", "10", "--bytes", "1m", "--json", str(path))
    run.expect_end(0)
    listed = subprocess.run([PROGRAM, "--list"], text=True, capture_output=True, check=True).stdout
    for name in listed.split():
        wanted = "ceiling/" if name.startswith("ceiling/") else name
        expect(any(row.startswith(wanted) for row in run.rows), f"{run.text}: no row of {name}")
    for name, row in run.rows.items():
        skips = name == "ceiling/product-bf16" and not HAS_CUBLASLT or name.startswith("scaling/")
        expect(WORDS[row[7]] == ("skipped" if skips else "passed"), f"{run.text}: {row[0]}")
        if name.startswith(("kernel/", "small/", "staging/", "load/", "collective/", "nccl/", "async-save/")):
            expect(row[3] != "-" and row[6] != "-", f"{run.text}: no time or ratio: {row[0]}")
    check_json(run, json.loads(path.read_text()))
    expect(not any(name.startswith("gpu-check-") for name in os.listdir(folder)), "its folder stays")


def check_json(run, written):
    expect([row["name"] for row in written["rows"]] == list(run.rows), f"{run.text}: other rows in JSON")
    for row in written["rows"]:
        line = run.rows.get(row["name"])
        expect(line and WORDS[line[7]] == row["result"], f"{run.text}: other result in JSON: {row}")
        expect(row["goal"] == 0, f"{run.text}: small data is judged: {row}")
    for word in WORDS.values():
        expect(written[word] == len(run.results(word)), f"{run.text}: JSON counts {written[word]} {word}")


def check_goals(folder):
    """Rates are judged once the data is large."""
    path = Path(folder) / "goals.json"
    run = Run("--quick", "--slow", "10", "--bytes", "256m", "--only", "kernel/hash", "--json", str(path))
    row = json.loads(path.read_text())["rows"][-1]
    meets = row["achieved"] >= 0.4 * row["bound"] > 0
    expect((row["name"], row["goal"]) == ("kernel/hash", 0.4), f"{run.text}: {row}")
    expect(row["result"] == ("passed" if meets else "failed"), f"{run.text}: {row}")
    run.expect_end(0 if meets else 1)


def check_gpus():
    """With two GPUs the rows for eight are skipped, with one all, and each says why."""
    run = Run("--bytes", "64k", "--only", "scaling/", FAKE_GPU="two")
    run.expect_end(0)
    names = ("all-gather", "reduce-scatter", "step")
    skipped = {f"scaling/8-gpus/{name}": "it takes 8 GPUs, and CUDA shows 2" for name in names}
    for name in (f"scaling/2-gpus/{name}" for name in names):
        row = run.rows.get(name)
        expect(row and row[7] == "yes" and "-" not in (row[3], row[4]), f"{run.text}: {row}: {run.output}")
    found = {name: run.rows[name][8] for name in run.results("skipped")}
    expect(found == skipped, f"{run.text}: {run.output}")
    expect(run.rows["scaling/2-gpus/step"][6] != "-", f"{run.text}: it is not compared with one GPU")
    without = {"FAKE_GPU": "two", "FSDP_NCCL_LIB": "/no/such/library"}
    for environment, reason in [({}, "it takes 2 GPUs, and CUDA shows 1"), (without, "do not start here")]:
        run = Run("--bytes", "64k", "--only", "scaling/2-gpus/step", **environment)
        run.expect_end(0)
        expect(reason in run.rows["scaling/2-gpus/step"][8], f"{run.text}: {run.output}")


def milliseconds(run, name):
    return float(run.rows[name][3].split()[0])


def check_steps():
    """Time of steps is the device's: an optimizer that is late there is seen, though the host is not."""
    run = Run("--bytes", "64k", "--only", "async-save/", FAKE_BUG="late")
    run.expect_end(0)
    times = [milliseconds(run, f"async-save/{name}") for name in ("step", "worst-step")]
    expect(LATE <= times[0] <= times[1], f"{run.text}: {run.output}")


def check_bugs():
    run = Run("--bytes", "64k", "--only", "kernel/c", FAKE_BUG="rects")
    run.expect_end(1)
    expect(run.results("failed") == ["kernel/copy-out", "kernel/chunk-cat"], f"{run.text}: {run.output}")
    expect("kernel/copy-boxes" in run.results("passed"), f"{run.text}: it does not go on: {run.output}")
    run = Run("--bytes", "64k", "--only", "training/2-ranks/adamw", FAKE_BUG="rects")
    run.expect_end(1)
    run = Run("--bytes", "64k", "--only", "kernel/", FAKE_BUG="crash")
    run.expect_end(1)
    expect(run.results("failed") == ["kernel/multiply"], f"{run.text}: {run.output}")
    expect("signal 9" in run.output, f"{run.text}: {run.output}")
    run = Run("--bytes", "64k", "--only", "kernel/fold", FAKE_BUG="fold")
    run.expect_end(1)
    expect(run.results("failed") == ["kernel/fold"], f"{run.text}: {run.output}")
    run = Run("--bytes", "64k", "--only", "nccl/", FSDP_NCCL_LIB="/no/such/library")
    run.expect_end(0)
    expect(len(run.results("skipped")) == 2 and "/no/such/library" in run.errors, f"{run.text}: {run.output}")
    run = Run("--bytes", "64k", "--only", "ceiling/product", FSDP_CUBLASLT_LIB="/no/such/library")
    run.expect_end(1)
    expect("/no/such/library" in run.output, f"{run.text}: {run.output}")


def check_refusals():
    for environment, code, text in [({"FAKE_GPU": "none"}, 2, "finds no GPU"),
                                    ({"FAKE_GPU": "no-driver"}, 2, "there is no NVIDIA driver"),
                                    ({"FAKE_GPU": "old-driver"}, 2, "install NVIDIA driver 5"),
                                    ({"TMPDIR": "/missing"}, 3, "'/missing' (TMPDIR): No such file")]:
        run = Run(**environment)
        expect(run.exit == code and text in run.errors and not run.output,
               f"{run.text}: exit code {run.exit}: {run.output}{run.errors}")
    for arguments in [["--quack"], ["--bytes", "much"], ["--seed", "-1"], ["more"], ["--build"]]:
        run = Run(*arguments)
        expect(run.exit in (2, 3) and run.errors and not run.output, f"{run.text}: exit code {run.exit}")
    run = Run("--version")
    needed = re.search(r"\nCUDA \d+\.\d, which needs NVIDIA driver \d+\.\d\d\.\d\d or later\n", run.output)
    expect(run.exit == 0 and needed, f"{run.text}: {run.output}")
    run = Run("--json", "/missing/rows.json")
    expect(run.exit == 3 and "'/missing/rows.json' (--json)" in run.errors and not run.output,
           f"{run.text}: exit code {run.exit}: {run.output}{run.errors}")
    run = Run("--bytes", "64k", "--only", "ceiling/device-copy", "--json", "/dev/full")
    expect(run.exit == 7 and "'/dev/full' (--json): No space left" in run.errors and "3 passed" in run.output,
           f"{run.text}: exit code {run.exit}: {run.output}{run.errors}")
    for name in ["ceiling/nosuch", "training/2-ranks/nosuch", "reload/2-to-3", "collective/1-ranks/sum",
                 "kernel/foldx", "scenarios/2-ranks/C99", "async-save/nosuch"]:
        run = Run("--bytes", "64k", "--only", name)
        expect(run.exit == 2 and f"no row's name begins with '{name}'" in run.errors,
               f"{run.text}: exit code {run.exit}: {run.output}{run.errors}")
    run = Run("--bytes", "64k", "--only", "training/2-ranks/adamw-b")
    run.expect_end(0)
    expect([name for name in run.rows if not name.startswith("ceiling/")] == ["training/2-ranks/adamw-bf16"],
           f"{run.text}: {run.output}")
    for name in ["nosuch", "kernel/nosuch"]:
        run = Run("--only", name)
        expect(run.exit == 2 and not run.output, f"{run.text}: exit code {run.exit}: {run.output}")
        expect(f"'{name}'" in run.errors and "\nkernel/fold\n" in run.errors and "\nnccl/\n" in run.errors,
               f"{run.text}: {run.errors}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        check_everything(folder)
        check_goals(folder)
        check_gpus()
        check_steps()
        check_bugs()
        check_refusals()
    expect(HAS_CUBLASLT or not os.environ.get("CI"), "no cublasLt.h: CI has all that its tests need")
    print("\n".join(problems) or "all as expected")
    return len(problems) > 0


sys.exit(main())
