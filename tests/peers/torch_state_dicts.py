"""Roots of 1 to 3 ranks load, bit for bit, what two ranks of PyTorch's FSDP2 save: from get_state_dict
in both forms of the optimizer, and from the optimizer's own state_dict, whose keys are numbers.

usage: torch_state_dicts.py STATE_LOADS
"""

import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

PROGRAM, RANKS = sys.argv[1], 2
FORMS = ("flat", "nested", "numbered")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 3)])
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(1 << 40))
        self.layers[1].bias.requires_grad = False

    def forward(self, tokens):
        return self.layers[1](self.layers[0](self.embed(tokens)))


def train(weights_first):
    torch.manual_seed(3)
    net = Net()
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    weights = [net.embed.weight, net.layers[0].weight, net.layers[1].weight]
    groups = [{"params": weights, "weight_decay": 0.25}, {"params": [net.layers[0].bias], "lr": 0.5}]
    optim = torch.optim.AdamW(groups if weights_first else groups[::-1], lr=0.125, betas=(0.5, 0.75))
    for _ in range(3):
        net(torch.arange(9)).square().sum().backward()
        optim.step()
        optim.zero_grad()
    return net, optim


def save(rank, directory):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=RANKS)
    for form in FORMS:
        # Numbers count in the order of groups, weights first in the C program. Names find their group.
        net, optim = train(weights_first=form == "numbered")
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        model_state, optim_state = get_state_dict(net, optim, options=options)
        if form == "numbered":
            optim_state = optim.state_dict()
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=f"{directory}/{form}")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)
    model_state, optim_state = get_state_dict(net, optim, options=options)
    if rank == 0:
        torch.save({"model": model_state, "optim": optim_state}, f"{directory}/full.pt")
    dist.destroy_process_group()


def numbers_of(value):
    if torch.is_tensor(value):
        return [float(x) for x in value.flatten()]
    return [float(value)] if isinstance(value, float) else []


def compare(lines, wanted):
    found = {line.split()[0]: [float(x) for x in line.split()[1:]] for line in lines}
    # `step` counts the same; hyper-parameters of other kinds than numbers are not printed.
    for name, numbers in found.items():
        if not numbers:
            continue
        assert numbers == wanted[name], f"{name}: {numbers}, {wanted[name]} were saved"
    missing = {name for name in wanted if ".state." in name or name.startswith("model.")} - set(found)
    assert not missing, f"not printed: {missing}"


def main():
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.start_processes(save, (directory,), nprocs=RANKS, start_method="fork")
        full = torch.load(f"{directory}/full.pt")
        wanted = {f"{part}.{name}": numbers_of(v) for part in full for name, v in full[part].items()}
        command = [PROGRAM, *(f"{directory}/{form}" for form in FORMS)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    runs = output.split("checkpoint ")[1:]
    assert len(runs) == 3 * len(FORMS), output
    for run in runs:
        compare(run.splitlines()[1:], wanted)
    print(f"{len(runs)} loads, {len(wanted)} names each")


if __name__ == "__main__":
    main()
