"""Trainers of PyTorch with fsdp.torch, three lines each: Transformers' Trainer resumes through SaveCallback
with the losses of an undisturbed run; accelerate with FSDP2 and a loop as torchtitan has it save checkpoints
of this project through torch.distributed.checkpoint after install(); Lightning (if it is there) through its
plug-in.

usage: torch_trainers.py BUILD [CASE...]
"""

import os
import sys
import tempfile
import warnings

BUILD = sys.argv[1] if __name__ == "__main__" else os.environ["FSDP_BUILD"]
sys.path.insert(0, os.path.join(BUILD, "python"))
os.environ["FSDP_BUILD"] = BUILD

import fsdp
import fsdp.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x, labels=None):
        found = self.outer(self.drop(torch.tanh(self.inner(x))))
        return {"loss": (found - labels).pow(2).mean(), "logits": found}


def rows():
    made = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(4, generator=made), "labels": torch.randn(1, generator=made)}
            for _ in range(64)]


def transformers_trainer(place):
    import fsdp.hf
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Stop(TrainerCallback):
        def __init__(self, at):
            self.at = at

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= state.global_step == self.at

    def train(run, stop, background=False):
        torch.manual_seed(0)
        args = TrainingArguments(place + "/out", max_steps=12, per_device_train_batch_size=4, save_steps=5,
                                 seed=1, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
        saver = fsdp.hf.SaveCallback(place + run, background=background)
        trainer = Trainer(Tiny(), args, train_dataset=rows(), callbacks=[saver, Stop(stop)])
        trainer.train(resume_from_checkpoint=saver.resume())
        return {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}, trainer.model

    wanted, model = train("/undisturbed", 12)
    for background in (False, True):
        run = f"/run{background}"
        train(run, 7, background)
        steps = fsdp.Run(place + run).steps()
        assert steps[0] == 5, steps
        with fsdp.open(fsdp.Run(place + run).path) as checkpoint:
            assert "model.inner.weight" in checkpoint.keys(), checkpoint.keys()
        losses, resumed = train(run, 12)
        assert losses == wanted, f"{losses} is not {wanted}"
        for one, other in zip(model.parameters(), resumed.parameters()):
            assert torch.equal(one, other)
    written = os.listdir(place + "/out") if os.path.exists(place + "/out") else []
    assert not any(name.startswith("checkpoint-") for name in written), written


def lightning_trainer(place):
    try:
        import lightning
    except ImportError:
        return "lightning is not there"
    import fsdp.lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.tiny, self.losses = Tiny(), []

        def training_step(self, batch, _):
            loss = self.tiny(**batch)["loss"]
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train(steps, plugins, path=None):
        torch.manual_seed(0)
        module = Module()
        module.tiny.drop.p = 0
        trainer = lightning.Trainer(max_steps=steps, plugins=plugins, logger=False,
                                    accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False,
                                    enable_model_summary=False)
        trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=4), ckpt_path=path)
        return trainer, module.losses

    losses = {}
    for name, plugins in (("theirs", []), ("ours", [fsdp.lightning.CheckpointIO()])):
        trainer, _ = train(6, plugins)
        trainer.save_checkpoint(f"{place}/{name}.ckpt")
        losses[name] = train(12, plugins, f"{place}/{name}.ckpt")[1]
    assert fsdp.verify(place + "/ours.ckpt", level="deep")
    assert len(losses["ours"]) == 6 and losses["ours"] == losses["theirs"], losses


def accelerate_with_fsdp2(place):
    """accelerate's own functions for FSDP2, which it calls on GPUs only: its states are made by hand."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp_utils
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    fsdp.torch.install()  # the line that is added
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    torch.manual_seed(0)
    model = Tiny()
    model.drop.p = 0
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(first):
        losses = []
        for step in range(first, first + 3):
            batch = rows()[4 * step:4 * step + 4]
            loss = model(torch.stack([row["x"] for row in batch]),
                         torch.stack([row["labels"] for row in batch]))["loss"]
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        return losses

    train(0)
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, place)
    fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optim, model, place)
    wanted = train(3)
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert fsdp.open(f"{place}/{part}").format == "fsdp" and fsdp.verify(f"{place}/{part}"), part
    fsdp_utils.load_fsdp_model(plugin, accelerator, model, place)
    fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optim, model, place)
    assert train(3) == wanted


def a_loop_as_torchtitan_has_it(place):
    """An object per part with state_dict and load_state_dict, saved by dcp.async_save and loaded by
    dcp.load."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    fsdp.torch.install()

    class Optimizer:
        def __init__(self, model, optim):
            self.model, self.optim = model, optim

        def state_dict(self):
            return get_optimizer_state_dict(self.model, self.optim)

        def load_state_dict(self, state):
            set_optimizer_state_dict(self.model, self.optim, optim_state_dict=state)

    class Progress:
        def __init__(self):
            self.step, self.losses = 0, []

        def state_dict(self):
            return {"step": torch.tensor(self.step), "losses": self.losses}

        def load_state_dict(self, state):
            self.step, self.losses = state["step"].item(), list(state["losses"])

    def make():
        torch.manual_seed(0)
        model = Tiny()
        model.drop.p = 0
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        return {"model": model, "optimizer": Optimizer(model, optim), "train_state": Progress()}

    def train(states, count):
        progress = states["train_state"]
        for _ in range(count):
            batch = rows()[(8 * progress.step + 4 * dist.get_rank()) % 60:][:4]
            loss = states["model"](torch.stack([row["x"] for row in batch]),
                                   torch.stack([row["labels"] for row in batch]))["loss"]
            loss.backward()
            states["optimizer"].optim.step()
            states["optimizer"].optim.zero_grad()
            progress.losses.append(round(loss.item(), 6))
            progress.step += 1
        return progress.losses

    states = make()
    train(states, 4)
    dcp.async_save(states, storage_writer=dcp.FileSystemWriter(place + "/step-4")).result()
    dcp.save(states, checkpoint_id=place + "/again")
    wanted = train(states, 3)
    for path in ("/step-4", "/again"):
        assert fsdp.open(place + path).format == "fsdp"
        states = make()
        dcp.load(states, checkpoint_id=place + path)
        assert len(states["train_state"].losses) == 4 or dist.get_rank() > 0
        losses = train(states, 3)
        assert losses[-3:] == wanted[-3:], f"{losses} is not {wanted}"


ALONE = [transformers_trainer, lightning_trainer]
TOGETHER = [accelerate_with_fsdp2, a_loop_as_torchtitan_has_it]


def run_rank(rank, place, names, size):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if size > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=os.environ["FSDP_TEST_PORT"], ACCELERATE_USE_FSDP="true",
                          FSDP_VERSION="2", ACCELERATE_USE_CPU="true")
        dist.init_process_group("gloo")
    for case in TOGETHER if size > 1 else ALONE:
        if names and case.__name__ not in names:
            continue
        own = os.path.join(place, case.__name__)
        os.makedirs(own, exist_ok=True)
        told = case(own)
        if size > 1:
            dist.barrier()
        if rank == 0:
            print(case.__name__, told or "", flush=True)
    if size > 1:
        dist.destroy_process_group()


def main():
    import socket
    with tempfile.TemporaryDirectory() as place, socket.create_server(("127.0.0.1", 0)) as probe:
        os.environ["FSDP_TEST_PORT"] = str(probe.getsockname()[1])
        probe.close()
        names = sys.argv[2:]
        for size, cases in ((1, ALONE), (2, TOGETHER)):
            if not names or {case.__name__ for case in cases} & set(names):
                mp.spawn(run_rank, (place, names, size), nprocs=size)


if __name__ == "__main__":
    main()
