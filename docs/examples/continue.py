"""Trains the MLP of continue.c in PyTorch with FSDP2 and saves it, from the beginning or from a checkpoint.

usage: torchrun --nproc-per-node 2 continue.py OUT STEPS [FROM [flat]]
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

LAYERS, ROWS, D = 3, 4, 8


def make(kind=torch.optim.AdamW, **options):
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(D, D, bias=False) for _ in range(LAYERS)])
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    # The groups of continue.c: the last layer has its own learning rate and no decay.
    *first, last = model.parameters()
    groups = [{"params": [last], "lr": 0.002, "weight_decay": 0.0},
              {"params": first, "lr": 0.01, "weight_decay": 0.1}]
    return model, kind(groups, **options)


def state_of(model, optim, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optim_state = get_state_dict(model, optim, options=options)
    return {"model": model_state, "optim": optim_state}


def load(model, optim, path, flat=False):
    state = state_of(model, optim, flat)
    dcp.load(state, checkpoint_id=path)     # strict: every name that PyTorch asks for must be there
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])


def save(model, optim, path, flat=False):
    dcp.save(state_of(model, optim, flat), checkpoint_id=path)


def train(model, optim, steps):
    first = dist.get_rank() * ROWS * D
    x = ((torch.arange(first, first + ROWS * D) * 5 % 7 - 3) / 4).view(ROWS, D)
    losses = []
    for _ in range(steps):
        y = x
        for layer in model.layers:
            y = layer(y)
        loss = (y - 1).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses


def main():
    out, steps, *source = sys.argv[1:]
    flat = "flat" in source[1:]
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model, optim = make()
    if source:
        load(model, optim, source[0], flat)
    for loss in train(model, optim, int(steps)):
        if dist.get_rank() == 0:
            print(f"loss {loss:.9g}")
    save(model, optim, out, flat)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
