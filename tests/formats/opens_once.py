"""
opens_once.py BIN GOLDEN: a tool opens each file of its source once to find and describe it, once to read its
tensors, and once more to check it; fsdp-ls and a plan open it once. Each command runs under strace.
"""

import collections
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import tools

GOLDEN = Path(sys.argv[2])
OPENED = re.compile(r'openat\([^,]*, "([^"]*)", [^)]*\) = \d')
SOURCES = ["deepspeed/zero3-w2-bf16/data", "deepspeed/zero2-w4-bf16/data", "dcp/dtensor-mesh3d-w8/data",
           "hf/qwen2_sharded_bf16/data", "megatron/torch_dist-tp2/data", "rankfiles/fsdp2-uneven-w4/data",
           "gguf/llama_q8_q4_align64/data/model.gguf", "layouts/hf_trainer/data/run"]
# The most that a file is opened.
COMMANDS = [(["fsdp-ls", "-q"], 1), (["fsdp-convert", "-n"], 1), (["fsdp-convert"], 3), (["fsdp-verify"], 3)]


def opened(source, program, *options):
    """Counts how often each file of the source was opened, and each of its folders."""
    with tempfile.TemporaryDirectory() as empty:
        log = Path(empty) / "log"
        target = ["out"] if program == "fsdp-convert" else []
        command = [tools.BIN.resolve() / program, source, *target, *options]
        strace = ["strace", "-f", "-qq", "-s", "4096", "-e", "trace=openat", "-o", log]
        done = subprocess.run([*strace, *command], capture_output=True, timeout=120, check=False, cwd=empty)
        tools.check(done.returncode == 0, f"{command}: {done.stderr}")
        paths = OPENED.findall(log.read_text(encoding="utf-8", errors="replace"))
    return collections.Counter(os.path.normpath(path) for path in paths if path.startswith(str(source)))


def main():
    for name in SOURCES:
        source = GOLDEN.resolve() / name
        for (program, *options), most in COMMANDS:
            counts = opened(source, program, *options)
            files = [path for path in counts if os.path.isfile(path)]
            tools.check(files, f"{program} of {name}: strace saw no file")
            for path in files:
                times = counts[path]
                tools.check(times <= most, f"{program} {options}: '{path}' was opened {times} times")
    folder = str(GOLDEN.resolve() / SOURCES[0] / "global_step3")
    listed = opened(GOLDEN.resolve() / SOURCES[0], "fsdp-convert")[folder]
    tools.check(listed <= 2, f"'{folder}' was listed {listed} times")
    print("\n".join(tools.problems) or "each file was opened once for each of its uses")
    return bool(tools.problems)


sys.exit(main())
