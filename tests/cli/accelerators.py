"""Tools name the GPU and NCCL of a machine in --version, or what is missing; --device cuda ends with that.

usage: accelerators.py BUILD FAKE_NCCL OLD_FAKE_NCCL BARE_NCCL
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

BUILD, FAKE, OLD_FAKE, BARE = sys.argv[1:]
TOOLS = sorted(path for path in (Path(BUILD) / "bin").glob("fsdp-*") if os.access(path, os.X_OK))
BENCH = Path(BUILD) / "tests/bench_rows"
NOT_NCCL = "libm.so.6"
problems = []


def expect(condition, text):
    if not condition:
        problems.append(text)


def run(*command, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_")}
    return subprocess.run(command, env={**clean, **environment}, text=True, capture_output=True, timeout=60,
                          check=False)


def lines_of(tool, **environment):
    """The features, the line of the GPU and that of NCCL."""
    done = run(tool, "--version", **environment)
    expect(done.returncode == 0 and not done.stderr, f"{tool} --version: {done.returncode}: {done.stderr}")
    lines = done.stdout.splitlines()
    expect(len(lines) == 4, f"{tool} --version: {done.stdout}")
    return lines[1:4] if len(lines) == 4 else ["", "", ""]


def check_tools():
    """All say the same of the GPU, and a run on it ends with this text."""
    expect(len(TOOLS) > 5, f"there are only {TOOLS}")
    expected = lines_of(BENCH)
    for tool in TOOLS:
        expect(lines_of(tool) == expected, f"{tool} --version differs from that of {BENCH}: {expected}")
    features, gpu, _ = expected
    reason = ": this program was built without CUDA; " if "no CUDA" in features else ": "
    expect(gpu.startswith(f"device 'cuda'{reason}"), f"{features}: {gpu}")
    for options in [["--device", "cuda"], ["--device", "cuda", "--np", "2"],
                    ["--device", "cuda", "--threads", "2"]]:
        done = run(BENCH, "step", *options)
        if done.returncode != 0:
            expect(done.returncode == 2, f"{options}: exit code {done.returncode}")
            expect(f"error: {gpu}\n" in done.stderr, f"{options}: {done.stderr} is not {gpu}")
        expect(done.returncode != 0 or "found" in gpu, f"{options} run, but {gpu}")
    done = run(BENCH, "step", FSDP_DEVICE="cuda:x")
    why = "built without CUDA" if "no CUDA" in features else "a number must follow cuda:"
    expect(done.returncode == 2 and why in done.stderr, f"cuda:x: {done.stderr}")


def check_nccl(folder):
    text = Path(folder) / "libnccl.so.2"
    text.write_text("no library")
    for path, word in [(FAKE, f"NCCL 2.28.9 ({FAKE})"), (OLD_FAKE, f"NCCL 2.28.9 ({OLD_FAKE})"),
                       (folder, f"FSDP_NCCL_LIB is '{folder}': "), (text, f"FSDP_NCCL_LIB is '{text}': "),
                       (BARE, f"no NCCL: {BARE} (NCCL 2.28.9) has no nccl"),
                       ("/no/such/file", "FSDP_NCCL_LIB is '/no/such/file': "),
                       (NOT_NCCL, f"no NCCL: {NOT_NCCL} is not NCCL: "
                        "it does not report its version; install")]:
        line = lines_of(BENCH, FSDP_NCCL_LIB=str(path))[2]
        expect(word in line, f"FSDP_NCCL_LIB={path}: {line}")
    # one that is broken is named where no other place has one
    line = lines_of(BENCH, LD_LIBRARY_PATH=folder)[2]
    expect(line.startswith("NCCL 2.") or "cannot load " in line and f": {text}" in line, f"{text}: {line}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        check_tools()
        check_nccl(folder)
    print("\n".join(problems) or "all as expected")
    return len(problems) > 0


sys.exit(main())
