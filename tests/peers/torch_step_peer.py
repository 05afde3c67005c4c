"""Steps of PyTorch's FSDP2 over gloo for ./dev bench step, which writes their number into a pipe
(bench_peer in tests/bench/rows.h): forward, backward, AdamW on one batch, one thread per rank.

usage: torch_step_peer.py LAYERS WIDTH OUT ROWS DIR RANKS
"""

import sys

import peer_ranks
import torch
import torch_mlp

SHAPE = torch_mlp.Shape(*map(int, sys.argv[1:5]))
DIRECTORY, RANKS = sys.argv[5], int(sys.argv[6])


def begin(rank):
    torch_mlp.be_rank(RANKS, rank, f"{DIRECTORY}/store")
    model = torch_mlp.sharded(SHAPE, torch_mlp.mesh_of((RANKS,), ("dp",)))
    optimizer = torch_mlp.adamw(model)
    x, t = torch_mlp.batch(SHAPE, 0, 0, RANKS, rank)

    def step():
        torch.nn.functional.mse_loss(model(x), t).backward()
        optimizer.step()
        optimizer.zero_grad()

    peer_ranks.measure(1, step)
    return peer_ranks.answer_steps(step)


peer_ranks.serve(DIRECTORY, RANKS, begin)
