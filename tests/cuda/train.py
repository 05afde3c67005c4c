"""A trainer whose models compute on the host refuses a GPU, and says what to use instead.

usage: train.py TRAINER, over the fake CUDA runtime
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TRAINER = sys.argv[1]
SIZES = ["--model.layers", "1", "--model.width", "32", "--model.context", "16", "--train.batch", "2",
         "--steps", "1"]
EXPECTED = "error: cannot compute on device 'cuda': models compute on the host, which cannot reach a GPU's " \
           "memory; use --device cpu or cpu-async\n"


def run(folder, *options):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_")}
    places = ["--run", folder / "run", "--data.path", folder / "text"]
    return subprocess.run([TRAINER, *places, *SIZES, *options], env=clean, text=True, capture_output=True,
                          timeout=50, check=False)


def main():
    problems = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
        for options in [["--device", "cuda"], ["--device", "cuda:0", "--threads", "2"]]:
            done = run(folder, *options)
            if done.returncode != 2 or EXPECTED not in done.stderr:
                problems.append(f"{options}: exit code {done.returncode}: {done.stdout}{done.stderr}")
            if list(folder.glob("run/step-*")):
                problems.append(f"{options}: something was saved")
        done = run(folder, "--device", "cpu-async")
        if done.returncode != 0 or not list(folder.glob("run/step-*/manifest.json")):
            problems.append(f"cpu-async: exit code {done.returncode}: {done.stdout}{done.stderr}")
    print("\n".join(problems) or "all as expected")
    return len(problems) > 0


sys.exit(main())
