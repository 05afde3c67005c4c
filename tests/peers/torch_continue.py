"""Training continues in the other program, with its optimizer: docs/examples/continue.c and continue.py.

C to PyTorch: three steps here, fsdp-convert --to dcp in both forms of the optimizer, loaded strictly by
FSDP2 on two ranks; three more steps there have the losses of three more steps here. PyTorch to C: the same,
from both forms. Checkpoints of PyTorch's AdamW with amsgrad and of its Adam are refused by name.

usage: torch_continue.py EXAMPLE_CONTINUE FSDP_CONVERT REPOSITORY
With RANK in the environment it is a rank of PyTorch.
"""

import importlib.util
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM, CONVERT, EXAMPLES = sys.argv[1], sys.argv[2], Path(sys.argv[3]) / "docs" / "examples"
RANKS, STEPS, TOLERANCE = 2, 3, 1e-6


# --- a rank of PyTorch, in the folder of the test ---


def train_torch():
    """Prints the losses of each way as JSON."""
    import torch
    import torch.distributed as dist

    spec = importlib.util.spec_from_file_location("example", EXAMPLES / "continue.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    dist.init_process_group("gloo")
    losses = {}
    for flat in (False, True):
        model, optim = example.make()
        example.load(model, optim, "ours-flat" if flat else "ours-nested", flat)
        losses[f"ours flat={flat}"] = example.train(model, optim, STEPS)
    torch.manual_seed(1)
    model, optim = example.make()
    example.train(model, optim, STEPS)
    example.save(model, optim, "theirs-nested")
    example.save(model, optim, "theirs-flat", flat=True)
    losses["theirs"] = example.train(model, optim, STEPS)
    others = {"amsgrad": (torch.optim.AdamW, {"amsgrad": True}), "adam": (torch.optim.Adam, {})}
    for name, (kind, options) in others.items():
        model, optim = example.make(kind, **options)
        example.train(model, optim, 1)
        example.save(model, optim, name)
    if dist.get_rank() == 0:
        print(json.dumps(losses), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may end a process that takes its group apart while another one leaves


# --- the test ---


def run(*command):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_")}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment,
                          timeout=100, check=False)


def train_ours(out, steps, *source):
    done = run(PROGRAM, "--np", RANKS, out, steps, *source)
    assert done.returncode == 0, done.stderr
    return [float(line.split()[1]) for line in done.stdout.splitlines()]


def convert(source, out, *options):
    done = run(CONVERT, source, out, "--to", "dcp", "--no-sync", *options)
    assert done.returncode == 0, done.stderr


def start_torch():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=shared | {"RANK": str(rank)}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(RANKS)]
    outputs = [rank.communicate(timeout=250) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), [error for _, error in outputs]
    return json.loads(outputs[0][0].splitlines()[-1])


def compare(what, losses, wanted):
    near = all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(losses, wanted, strict=True))
    assert near, f"{what}: {losses}, not {wanted}"
    print(f"{what}: {losses} beside {wanted}")


def refuse(path, *words):
    """The refusal names what to leave out, and then training continues."""
    done = run(PROGRAM, "--np", RANKS, "never", 1, path)
    assert done.returncode == 2 and all(word in done.stderr for word in words), (done.returncode, done.stderr)
    print(done.stderr.splitlines()[0])
    drop = re.search(r"fsdp-convert --drop '(.*?)'", done.stderr).group(1)
    done = run(CONVERT, path, f"{path}-left", "--to", "fsdp", "--no-sync", "--drop", drop)
    assert done.returncode == 0, done.stderr
    train_ours(f"{path}-on", 1, f"{path}-left")


def main():
    train_ours("ours", STEPS)
    wanted = train_ours("whole", 2 * STEPS)[STEPS:]
    convert("ours", "ours-nested")
    convert("ours", "ours-flat", "--optim", "flat")
    torch = start_torch()
    for flat in (False, True):
        compare(f"PyTorch goes on, flat={flat}", torch[f"ours flat={flat}"], wanted)
    for form in ("nested", "flat"):
        compare(f"C goes on, {form}", train_ours(f"on-{form}", STEPS, f"theirs-{form}"), torch["theirs"])
    refuse("amsgrad", "'amsgrad' is 1 in 'optim.param_groups.0.amsgrad'", "max_exp_avg_sq")
    refuse("adam", "'decoupled_weight_decay' is false in 'optim.param_groups.1.decoupled_weight_decay'")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train_torch()
    else:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            main()
