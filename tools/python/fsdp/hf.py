"""Transformers' Trainer: checkpoints that are complete or absent.

    run = fsdp.hf.SaveCallback("run")
    trainer = Trainer(..., callbacks=[run])
    trainer.train(resume_from_checkpoint=run.resume())

When the Trainer would save, the callback saves in its place: model, optimizer, scheduler, random generators
and the Trainer's state become RUN/step-N. A model that FSDP shards is saved by the Trainer itself, through
torch.distributed.checkpoint: call fsdp.torch.install() for it."""

import dataclasses
import json
import os
import random
import shutil

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from . import torch as fsdp_torch
from ._tasks import Run, load

OTHERS = "optimizer", "scheduler"


def _rank():
    return dist.get_rank() if dist.is_initialized() else 0


class SaveCallback(TrainerCallback):
    """Saves to a run. `background` saves while the training continues; other options are those of
    fsdp.torch.save."""

    def __init__(self, path, *, background=False, keep_last=2, **options):
        self.path, self._background = os.fspath(path), background
        self._options, self._is_due = {"keep_last": keep_last, **options}, False

    def on_step_end(self, args, state, control, **kwargs):
        """Takes the save over. It follows the log and the evaluation of the step, which it contains."""
        if control.should_save:
            control.should_save, self._is_due = False, True
            if not control.should_log and not control.should_evaluate:
                self._save(state, **kwargs)

    on_epoch_end = on_step_end

    def on_log(self, args, state, control, **kwargs):
        if not control.should_evaluate:
            self._save(state, **kwargs)

    def on_evaluate(self, args, state, control, **kwargs):
        self._save(state, **kwargs)

    def on_step_begin(self, args, state, control, **kwargs):
        self._save(state, **kwargs)

    def on_train_end(self, args, state, control, **kwargs):
        self._save(state, **kwargs)
        fsdp_torch.wait()

    def _save(self, state, model, optimizer, lr_scheduler, **kwargs):
        if not self._is_due:
            return
        self._is_due = False
        parts = {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler}
        held = {name: part.state_dict() for name, part in parts.items() if part is not None}
        held["trainer"] = json.dumps(dataclasses.asdict(state))
        held[f"random.{_rank()}"] = _random_state()
        save = fsdp_torch.async_save if self._background else fsdp_torch.save
        save(held, self.path, step=state.global_step, **self._options)

    def resume(self):
        """For trainer.train(resume_from_checkpoint=): the newest good checkpoint as a directory that the
        Trainer reads, RUN.resume; None if there is none yet."""
        told = [None]
        if _rank() == 0 and os.path.exists(self.path) and Run(self.path).steps():
            told[0] = _make_readable(self.path, self.path + ".resume")
        if dist.is_initialized():
            dist.broadcast_object_list(told)
        return told[0]


def _random_state():
    import numpy
    name, keys, at, has_gauss, gauss = numpy.random.get_state()
    found = {"python": random.getstate(), "cpu": torch.random.get_rng_state(),
             "numpy": [name, keys.astype("int64"), at, has_gauss, gauss]}
    return {**found, "cuda": torch.cuda.random.get_rng_state()} if torch.cuda.is_available() else found


def _make_readable(run, path):
    from safetensors.torch import save_file
    import numpy
    state = load(run, framework="torch")
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path)
    prefix = "module."  # of DDP
    model = {name.removeprefix(prefix): tensor.clone() for name, tensor in state["model"].items()}
    save_file(model, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})
    for name in OTHERS:
        if name in state:
            torch.save(state[name], os.path.join(path, name + ".pt"))
    with open(os.path.join(path, "trainer_state.json"), "w", encoding="utf-8") as file:
        file.write(state["trainer"])
    ranks = [name for name in state if name.startswith("random.")]
    for name in ranks:
        found, rank = state[name], name.removeprefix("random.")
        kind, keys, *rest = found["numpy"]
        found["numpy"] = (kind, keys.numpy().astype(numpy.uint32), *rest)
        torch.save(found, os.path.join(path, f"rng_state_{rank}.pth" if len(ranks) > 1 else "rng_state.pth"))
    return path
