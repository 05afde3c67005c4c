"""A training by FSDP2 on two ranks of gloo that saves each step is killed over and over, at any moment: no
checkpoint whose save returned is lost, and one, two or three ranks resume with the losses of an undisturbed
run.

usage: torch_kills.py BUILD KILLS [SEED]
"""

import os
import random
import signal
import sys
import tempfile
import time
import warnings

BUILD, KILLS = sys.argv[1], int(sys.argv[2])
sys.path.insert(0, os.path.join(BUILD, "python"))

import fsdp
import fsdp.torch
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ROWS, WIDTH, STEPS = 6, 24, 4000
WAIT_S = 60


class Training:
    """A training whose losses do not depend on the number of ranks, but for rounding in 64 bits."""

    def __init__(self, rank, size):
        self.rank, self.size, self.step = rank, size, 0
        torch.manual_seed(5)
        layers = torch.nn.Linear(WIDTH, 41), torch.nn.Tanh(), torch.nn.Linear(41, 3)
        self.model = torch.nn.Sequential(*layers).double()
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
        for part in (self.model[0], self.model[2], self.model):
            fully_shard(part, mesh=mesh)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.003)

    def train_step(self):
        made = torch.Generator().manual_seed(self.step)
        rows = torch.randn(ROWS, WIDTH, generator=made, dtype=torch.float64)
        mine = rows.chunk(self.size)[self.rank]
        loss = (self.model(mine) - mine[:, :3].sin()).pow(2).mean()
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        self.step += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item() / self.size

    def state(self):
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim, "step": self.step}

    def resume(self, run):
        if not os.path.exists(run) or not fsdp.Run(run).steps():
            return  # and leaves the optimizer alone, which get_state_dict makes one of step 1
        state = self.state()
        fsdp.torch.load(state, run)
        set_state_dict(self.model, self.optim, model_state_dict=state["model"],
                       optim_state_dict=state["optim"])
        self.step = state["step"]


def join(place, rank, size):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=size)
    return Training(rank, size)


def write(name, text):
    """Appends a line, which is there after a kill."""
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, (text + "\n").encode())
    os.close(file)


def train(place, rank, size, background):
    """Trains from the newest checkpoint until it is killed, and reports losses and saves."""
    training, run, pending = join(place, rank, size), place + "/run", None
    training.resume(run)
    if rank == 0:
        write(place + "/log", f"began {training.step}")
    while training.step < STEPS:
        loss = training.train_step()
        if rank == 0:
            write(place + "/log", f"loss {training.step} {loss!r}")
        save = fsdp.torch.async_save if background else fsdp.torch.save
        future = save(training.state(), run, step=training.step, keep_last=2)
        if rank == 0 and background and pending:  # the next save waited for it
            pending[0].result()
            write(place + "/log", f"saved {pending[1]}")
        elif rank == 0 and not background:
            write(place + "/log", f"saved {training.step}")
        pending = future, training.step


def resume(place, rank, size):
    """Resumes on other ranks, and writes three losses."""
    training = join(place, rank, size)
    training.resume(place + "/run")
    losses = [f"loss {training.step + 1} {training.train_step()!r}" for _ in range(3)]
    if rank == 0:
        write(place + "/resumed", "\n".join(losses))
    dist.destroy_process_group()


def refer(place, rank, size, steps):
    training = join(place, rank, size)
    for _ in range(steps):
        write(place + "/reference", repr(training.train_step()))


def fork(place, size, body, *more):
    if os.path.exists(place + "/store"):
        os.remove(place + "/store")
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                file = os.open(place + "/errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(file, 2)
                body(place, rank, size, *more)
                code = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return children


def lines(name):
    return open(name).read().splitlines() if os.path.exists(name) else []


def finish(children, what):
    end = time.monotonic() + WAIT_S
    for child in children:
        while True:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                break
            if time.monotonic() > end:
                for other in children:
                    os.kill(other, signal.SIGKILL)
                raise SystemExit(f"{what} hangs")
            time.sleep(0.01)
        if status:
            raise SystemExit(f"{what} failed: {status}")


def kill(place, children, dice):
    """Kills the ranks at a random moment, after a random number of saves, one shortly after the other."""
    log, before = place + "/log", len(lines(place + "/log"))
    end = time.monotonic() + WAIT_S
    wanted = dice.randrange(1, 14)
    while len(lines(log)) < before + wanted and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(dice.random() * 0.03)
    dice.shuffle(children)
    for child in children:
        os.kill(child, signal.SIGKILL)
        time.sleep(dice.choice([0, 0, dice.random() * 0.05]))
    for child in children:
        os.waitpid(child, 0)


def check_losses(place, told, label):
    reference = list(map(float, lines(place + "/reference")))
    for line in told:
        _, step, loss = line.split()
        wanted = reference[int(step) - 1]
        if not abs(float(loss) - wanted) <= 1e-9 * abs(wanted):
            raise SystemExit(f"{label}: step {step} has the loss {loss}, undisturbed {wanted}")


def main():
    dice = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    counts = {"saved": 0, "resumed": 0}
    with tempfile.TemporaryDirectory() as place:
        finish(fork(place, 1, refer, STEPS // 2 if KILLS > 50 else 400), "the undisturbed run")
        for turn in range(KILLS):
            kill(place, fork(place, 2, train, turn % 2 == 1), dice)
            told = lines(place + "/log")
            check_losses(place, [line for line in told if line.startswith("loss")], f"kill {turn}")
            saved = max([int(line.split()[1]) for line in told if line.startswith("saved")], default=0)
            steps = fsdp.Run(place + "/run").steps() if os.path.exists(place + "/run") else []
            if saved and (not steps or steps[-1] < saved):
                raise SystemExit(f"kill {turn}: step {saved} was saved, and the run has {steps}")
            if steps and not fsdp.verify(fsdp.Run(place + "/run").latest(level="data"), level="deep"):
                raise SystemExit(f"kill {turn}: step {steps[-1]} is damaged")
            size = 1 + turn % 3
            finish(fork(place, size, resume), f"resuming on {size} ranks after kill {turn}")
            resumed = lines(place + "/resumed")
            check_losses(place, resumed, f"{size} ranks after kill {turn}")
            if steps and int(resumed[0].split()[1]) != steps[-1] + 1:
                raise SystemExit(f"kill {turn}: resumed at {resumed[0]}, and the run has {steps}")
            os.remove(place + "/resumed")
            counts["saved"], counts["resumed"] = saved, counts["resumed"] + 1
        left = [name for name in os.listdir(place + "/run") if not name.startswith("step-")]
        print(f"{KILLS} kills, {counts['saved']} steps saved, 0 lost, {counts['resumed']} resumes on 1, 2 "
              f"and 3 ranks; besides steps the run holds {left}")


main()
