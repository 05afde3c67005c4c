"""Writes tests/golden/layouts: one directory per framework, by the framework itself where it installs,
and next to each what must come out of it. README.md there lists the packages; tests/cli/layouts.py compares.

usage: write_layouts.py GOLDEN [CASE...]    with the Python of an environment that holds the frameworks
"""

import multiprocessing
import os
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    KERAS_BACKEND="torch",
    DS_ACCELERATOR="cpu",
    CUDA_VISIBLE_DEVICES="",
    TOKENIZERS_PARALLELISM="false",
    WANDB_DISABLED="true",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import layouts_files  # noqa: E402, F401
import layouts_named  # noqa: E402, F401
import layouts_ranks  # noqa: E402, F401
import layouts_trainers  # noqa: E402, F401
from layouts_common import CASES, write_case  # noqa: E402


def main():
    failed = []
    golden = Path(sys.argv[1]).resolve()
    for name in sys.argv[2:] or sorted(CASES):
        # a process each: frameworks start threads, and cases with ranks fork
        writer = multiprocessing.get_context("fork").Process(target=write_case, args=(golden, name))
        writer.start()
        writer.join()
        print(f"{'wrote' if writer.exitcode == 0 else 'failed'} {name}", flush=True)
        failed += [name] if writer.exitcode else []
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
