"""Steps of PyTorch's FSDP2 over gloo for fsdp-bench step, which writes their number into a pipe
(bench_peer in tools/bench/bench.h): forward, backward, AdamW on one batch, one thread per rank.

usage: torch_step_peer.py LAYERS WIDTH OUT ROWS DIR RANKS
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch_mlp

SHAPE = torch_mlp.Shape(*map(int, sys.argv[1:5]))
DIRECTORY, RANKS = sys.argv[5], int(sys.argv[6])


def run(model, optimizer, x, t):
    torch.nn.functional.mse_loss(model(x), t).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(steps, *what):
    dist.barrier()
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(steps):
        run(*what)
    dist.barrier()
    return (time.perf_counter() - began) / steps, (time.process_time() - cpu) / steps


def serve(rank):
    torch_mlp.be_rank(RANKS, rank, f"{DIRECTORY}/store")
    model = torch_mlp.sharded(SHAPE, torch_mlp.mesh_of((RANKS,), ("dp",)))
    what = (model, torch_mlp.adamw(model), *torch_mlp.batch(SHAPE, 0, 0, RANKS, rank))
    with open(f"{DIRECTORY}/go-{rank}") as orders, open(f"{DIRECTORY}/done", "w") as done:
        measure(1, *what)
        if rank == 0:
            print("ready", file=done, flush=True)
        for line in orders:
            if line == "end\n":
                break
            answer = "%.9f %.9f" % measure(int(line), *what)
            if rank == 0:
                print(answer, file=done, flush=True)
    dist.destroy_process_group()


def main():
    children = []
    for rank in range(1, RANKS):
        child = os.fork()
        if child == 0:
            serve(rank)
            os._exit(0)
        children.append(child)
    serve(0)
    for child in children:
        os.waitpid(child, 0)


main()
