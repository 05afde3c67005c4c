"""The model of ./dev bench step in PyTorch: the same values, sharded by FSDP2 over gloo. For scripts here."""

import math
import multiprocessing
import os
import tempfile
from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass
class Shape:
    layers: int = 3
    width: int = 8
    out: int = 8
    rows: int = 4
    accumulate: int = 1
    seed: int = 1


# --- values ---


def mix(x):
    x = (x ^ x >> numpy.uint64(30)) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> numpy.uint64(27)) * numpy.uint64(0x94D049BB133111EB)
    return x ^ x >> numpy.uint64(31)


def uniform(seed, name, first, count):
    hashed = 0xCBF29CE484222325
    for byte in name.encode():
        hashed = (hashed ^ byte) * 0x100000001B3 % 2**64
    at = numpy.arange(first + 1, first + count + 1, dtype=numpy.uint64)
    with numpy.errstate(over="ignore"):
        begin = mix(numpy.array([seed ^ hashed], dtype=numpy.uint64))
        bits = mix(begin + at * numpy.uint64(0x9E3779B97F4A7C15)) >> numpy.uint64(40)
    return bits.astype(numpy.float64) * 2**-23 - 1


def batch(shape, step, microbatch, ranks, rank):
    row = ((step * shape.accumulate + microbatch) * ranks + rank) * shape.rows
    columns = {"x": shape.width, "t": shape.out}
    return [torch.from_numpy(uniform(shape.seed, name, row * n, shape.rows * n).astype(numpy.float32))
            .reshape(shape.rows, n) for name, n in columns.items()]


# --- the model ---


class Mlp(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        last = shape.layers - 1
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(shape.width, shape.out if i == last else shape.width)
            for i in range(shape.layers))
        with torch.no_grad():
            for name, param in self.named_parameters():
                drawn = uniform(shape.seed, name, 0, param.numel()) / math.sqrt(param.shape[-1])
                param.copy_(torch.from_numpy(drawn.astype(numpy.float32)).reshape(param.shape))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x) if i == 0 else layer(torch.relu(x))
        return x


def sharded(shape, mesh, reshard=None, forward_depth=0, backward_depth=0):
    model = Mlp(shape)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    layers = list(model.layers)
    for i, layer in enumerate(layers):
        if forward_depth:
            layer.set_modules_to_forward_prefetch(layers[i + 1:i + 1 + forward_depth])
        if backward_depth:
            layer.set_modules_to_backward_prefetch(layers[max(0, i - backward_depth):i][::-1])
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8,
                             weight_decay=0.01)


# --- ranks ---


def be_rank(world, rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def mesh_of(shape, names):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def rank_main(body, world, rank, store, results):
    be_rank(world, rank, store)
    results.put((rank, body(rank)))
    dist.destroy_process_group()


def run_ranks(world, body):
    """The results of body(rank) on each of the ranks, which are processes."""
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=rank_main, args=(body, world, rank, f"{folder}/store", results))
                 for rank in range(world)]
        for rank in ranks:
            rank.start()
        found = dict(results.get(timeout=100) for _ in ranks)
        for rank in ranks:
            rank.join()
    assert all(rank.exitcode == 0 for rank in ranks), [rank.exitcode for rank in ranks]
    return [found[rank] for rank in range(world)]


assert os.environ.get("OMP_NUM_THREADS") == "1", "one thread per rank"
