"""Steps of GPT-2 in PyTorch for ./dev bench train, which writes their number into a pipe (bench_peer in
tests/bench/rows.h): transformers' GPT2LMHeadModel and AdamW, on random ids. One rank trains it as it is;
several shard each block and the rest by FSDP2 over gloo.

usage: torch_train_peer.py LAYERS WIDTH HEADS VOCAB BATCH LENGTH THREADS DIR RANKS    BATCH: of all ranks
"""

import sys

import peer_ranks
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

LAYERS, WIDTH, HEADS, VOCAB, BATCH, LENGTH, THREADS = map(int, sys.argv[1:8])
DIRECTORY, RANKS = sys.argv[8], int(sys.argv[9])
CONFIG = GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCAB, resid_pdrop=0, embd_pdrop=0,
                    attn_pdrop=0, bos_token_id=VOCAB - 1, eos_token_id=VOCAB - 1)


def make_model():
    model = GPT2LMHeadModel(CONFIG).train()
    if RANKS > 1:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def begin(rank):
    peer_ranks.join(DIRECTORY, RANKS, rank, THREADS)
    torch.manual_seed(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                  foreach=True)
    first, last = BATCH * rank // RANKS, BATCH * (rank + 1) // RANKS

    def step():
        ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1))[first:last]
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    peer_ranks.barrier()
    return peer_ranks.answer_steps(step)


peer_ranks.serve(DIRECTORY, RANKS, begin)
