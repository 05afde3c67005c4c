"""fsdp-convert --like joins LOCAL_STATE_DICT of the real FSDP1 with use_orig_params.

usage: fsdp1_local.py FSDP-CONVERT
Three ranks; the parameters that each unit has are cut unevenly, one is tied, and buffers are whole.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

RANKS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(11, 7), nn.BatchNorm1d(7)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(13, 5), nn.ModuleList(Block() for _ in range(2))
        self.head, self.conv = nn.Linear(5, 13, bias=False), nn.Conv2d(2, 3, 3)
        self.head.weight = self.embedding.weight


def save(rank, folder, dtype):
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    net = Net().to(dtype)
    model = {name: value.clone() for name, value in net.state_dict().items()}
    policy = ModuleWrapPolicy({Block})
    net = FSDP(net, use_orig_params=True, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    with FSDP.state_dict_type(net, StateDictType.LOCAL_STATE_DICT):
        torch.save(net.state_dict(), f"{folder}/ranks/rank_{rank}.pt")
    if rank == 0:
        save_file(model, f"{folder}/model.safetensors")
        del model["head.weight"]
        save_file(model, f"{folder}/untied.safetensors")
    dist.destroy_process_group()


def problems_of(folder, model):
    command = [sys.argv[1], "-q", f"{folder}/ranks", f"{folder}/{model}-out.safetensors", "--tied", "keep",
               "--like", f"{folder}/{model}.safetensors"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        return [f"{model}: {ran.stderr}"]
    found, wanted = load_file(command[3]), load_file(f"{folder}/model.safetensors")
    return [f"{model}: {name}" for name in found.keys() | wanted.keys()
            if name not in found or name not in wanted or found[name].dtype != wanted[name].dtype
            or not torch.equal(found[name], wanted[name])]


def main():
    os.environ["OMP_NUM_THREADS"] = "1"
    problems = []
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "ranks").mkdir()
            mp.start_processes(save, (folder, dtype), nprocs=RANKS, start_method="fork")
            problems += problems_of(folder, "model") + problems_of(folder, "untied")
    print("\n".join(problems) or "the model is as it was")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
