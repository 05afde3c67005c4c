"""PyTorch's collectives over gloo for ./dev bench collectives, which says what to do through pipes
(tests/bench/rows.h, bench_peer). All-gather and all-reduce are in place.

usage: gloo_collectives.py DIR RANKS
"""

import sys

import peer_ranks
import torch
import torch.distributed as dist

DIRECTORY, RANKS = sys.argv[1], int(sys.argv[2])
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16,
          "i8": torch.int8, "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64}


def measure(rank, op, dtype, count, calls):
    whole = torch.zeros(count, dtype=DTYPES[dtype])
    part = torch.zeros(count // RANKS, dtype=DTYPES[dtype])
    mine = whole[rank * (count // RANKS):(rank + 1) * (count // RANKS)]
    run = {"ag": lambda: dist.all_gather_into_tensor(whole, mine),
           "rs": lambda: dist.reduce_scatter_tensor(part, whole),
           "ar": lambda: dist.all_reduce(whole)}[op]
    run()
    return peer_ranks.measure(calls, run)


def begin(rank):
    peer_ranks.join(DIRECTORY, RANKS, rank, 1)
    peer_ranks.barrier()

    def answer(line):
        op, dtype, count, calls = line.split()
        if dtype not in DTYPES:
            return "cannot"
        return "%.9f %.9f" % measure(rank, op, dtype, int(count), int(calls))

    return answer


peer_ranks.serve(DIRECTORY, RANKS, begin)
