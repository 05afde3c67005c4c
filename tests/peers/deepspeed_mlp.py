"""The MLP of docs/examples/continue.c for an engine of DeepSpeed, with its groups, rows and steps."""

import importlib.util
from pathlib import Path

import deepspeed_ranks as ranks
import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


continued, from_deepspeed = example("continue"), example("from_deepspeed")
ROWS, WIDTH = 2 * continued.ROWS, continued.D  # rows of all ranks: those of two in continue.c


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(continued.LAYERS)]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def make_engine(stage, seed=1, last_first=True, **settings):
    """The groups of continue.py: the last layer has its own learning rate and no decay."""
    torch.manual_seed(seed)
    model = Model()
    *first, last = model.parameters()
    groups = [{"params": [last], "lr": 0.002, "weight_decay": 0.0},
              {"params": first, "lr": 0.01, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups if last_first else reversed(groups))
    return ranks.engine_of(model, optimizer, stage, ROWS // dist.get_world_size(), **settings)


def train(engine, steps):
    """The losses of steps; the ranks share the rows, which are the same in every step."""
    rows = ROWS // dist.get_world_size()
    inputs = ((torch.arange(ROWS * WIDTH) * 5 % 7 - 3) / 4).view(ROWS, WIDTH)
    mine, losses = inputs[dist.get_rank() * rows:][:rows], []
    for _ in range(steps):
        loss = (engine(mine) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(ranks.mean_of_ranks(loss))
    return losses
