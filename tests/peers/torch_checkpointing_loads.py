"""torch_checkpointing loads what fsdp-convert wrote, on as many ranks as were written and on others.

usage: torch_checkpointing_loads.py FSDP_CONVERT GOLDEN
"""

import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from states import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

try:
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
except ImportError:
    print("the peers have no torch_checkpointing: ./dev peers installs it")
    sys.exit(77)

CONVERT, GOLDEN = sys.argv[1], Path(sys.argv[2])


def blank(state, mesh):
    """The state of a job on this mesh, with zeros."""
    if isinstance(state, dict):
        return {key: blank(value, mesh) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value, mesh) for value in state]
    if not isinstance(state, torch.Tensor):
        return None
    zeros = torch.zeros_like(state)
    return distribute_tensor(zeros, mesh, [Shard(0)]) if state.ndim else zeros


def check(expected, got, where, is_resharded):
    """A resharded item has its tensors; values that have no layout stay as the job had them."""
    if isinstance(expected, dict | list):
        for key, value in expected.items() if isinstance(expected, dict) else enumerate(expected):
            check(value, got[key], f"{where}.{key}", is_resharded)
    elif isinstance(expected, torch.Tensor):
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        assert torch.equal(whole, expected), where
    elif not is_resharded:
        assert got == expected, where


def load(rank, world, written, path, reference, store):
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    expected = torch.load(reference)
    config = CheckpointManager.Config(
        items={key: ItemSpec(resharder=DefaultResharder()) for key in ("model", "optimizer")},
        save=CheckpointManager.Config.with_sync_save().save,
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False))
    manager = CheckpointManager(config)
    mesh = init_device_mesh("cpu", (world,))
    items = ["model", "optimizer"] + (["step", "name"] if world <= written else [])
    got = manager.load(path, into={key: blank(expected[key], mesh) for key in items})
    for key in items:
        check(expected[key], got[key], key, world != written)
    manager.close()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of the loader may still run, with which a usual exit aborts


def main():
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    source = GOLDEN / "torch_checkpointing" / "hsdp-w4" / "data"
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.pt"
        run(CONVERT, source, reference, "--names", "keep")
        for number, (options, written, worlds) in enumerate([
            (["--world-size", "2"], 2, (1, 2, 3)),
            (["--mesh", "rep=2,dp=2", "--shard-dim", "1"], 4, (1, 3)),
        ]):
            path = Path(folder) / f"written-{number}"
            run(CONVERT, source, path, "--to", "torch_checkpointing", *options)
            for world in worlds:
                store = Path(folder) / f"store-{number}-{world}"
                mp.spawn(load, (world, written, str(path), str(reference), str(store)), nprocs=world)
    print("torch_checkpointing loads what was written")


if __name__ == "__main__":
    main()
