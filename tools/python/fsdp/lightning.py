"""Lightning: checkpoints that are complete or absent.

    trainer = Trainer(..., plugins=[fsdp.lightning.CheckpointIO()])

saves the checkpoints of every strategy that has one file (a single device, DDP) as checkpoints of this
project. Strategies that shard (FSDPStrategy, ModelParallelStrategy) save through
torch.distributed.checkpoint: call fsdp.torch.install() for them."""

import os
import shutil

import torch

try:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as _CheckpointIO
except ImportError:
    from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO as _CheckpointIO

from . import torch as fsdp_torch
from ._tasks import load


class CheckpointIO(_CheckpointIO):
    """Saves on the one rank that Lightning asks to save. Options are those of fsdp.save."""

    def __init__(self, **options):
        self._options = {"overwrite": True, **options}

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        fsdp_torch.save(checkpoint, path, no_dist=True, **self._options, **(storage_options or {}))

    def load_checkpoint(self, path, map_location=None, **kwargs):
        if os.path.isfile(path):  # an older one, of Lightning's own
            return torch.load(path, map_location=map_location, weights_only=kwargs.get("weights_only", True))
        return load(path, framework="torch")

    def remove_checkpoint(self, path):
        shutil.rmtree(path, ignore_errors=True)
