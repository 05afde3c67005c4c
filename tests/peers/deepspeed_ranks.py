"""Real DeepSpeed on processor ranks, for deepspeed_*.py: starts the ranks, makes engines, trains with them.

The ranks are forks of a process that has imported DeepSpeed, and talk over gloo. DeepSpeed prints
what nobody reads, so its standard output is dropped.
"""

import importlib
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
warnings.filterwarnings("ignore")

import deepspeed  # noqa: E402  it reads the environment
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402

LOSS_TOLERANCE = 1e-5
# It would be compiled by the first rank; without it ranks use gloo.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.utils.logger.setLevel(logging.ERROR)
logging.getLogger("torch").setLevel(logging.ERROR)
# The first engine imports them, which takes seconds: here it is once, and not in every rank.
importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
importlib.import_module("torch._dynamo")


def begin_rank(rank, ranks, meeting, work, arguments):
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=ranks)
    work(*arguments)
    dist.destroy_process_group()


def on_ranks(ranks, work, *arguments):
    """Calls work(*arguments) in every rank; raises if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            begin_rank, (ranks, f"{folder}/meeting", work, arguments), nprocs=ranks, start_method="fork")


def engine_of(model, optimizer, stage, rows, forget=False, **more):
    """rows: of a rank, in a step. forget: with hyper-parameters that a checkpoint must replace."""
    if forget:
        for group in optimizer.param_groups:
            group |= {"lr": 0.5, "weight_decay": 0.3, "betas": (0.1, 0.2)}
        more.pop("gradient_clipping", None)
    settings = {"train_micro_batch_size_per_gpu": rows, "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage}, **more}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def mean_of_ranks(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def tell(name, losses):
    """From the ranks to the test."""
    if dist.get_rank() == 0:
        Path(f"{name}.json").write_text(json.dumps(losses))


def told(name):
    return json.loads(Path(f"{name}.json").read_text())


def compare_losses(what, losses, wanted):
    near = all(math.isclose(a, b, rel_tol=LOSS_TOLERANCE) for a, b in zip(losses, wanted, strict=True))
    assert near, f"{what}: {losses}, not {wanted}"
    print(f"{what}: {losses} beside {wanted}")


def run(*command):
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def finish(problems):
    for problem in problems:
        print(problem)
    sys.exit(1 if problems else 0)
