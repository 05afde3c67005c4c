"""PyTorch's collectives over gloo for fsdp-bench collectives, which says what to do through pipes
(tools/bench/bench.h, bench_peer). All-gather and all-reduce are in place.

usage: gloo_collectives.py DIR RANKS
"""

import os
import sys
import time

import torch
import torch.distributed as dist

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16,
          "i8": torch.int8, "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64}


def measure(op, dtype, count, calls, ranks, rank):
    whole = torch.zeros(count, dtype=DTYPES[dtype])
    part = torch.zeros(count // ranks, dtype=DTYPES[dtype])
    mine = whole[rank * (count // ranks):(rank + 1) * (count // ranks)]
    run = {"ag": lambda: dist.all_gather_into_tensor(whole, mine),
           "rs": lambda: dist.reduce_scatter_tensor(part, whole),
           "ar": lambda: dist.all_reduce(whole)}[op]
    run()
    dist.barrier()
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(calls):
        run()
    dist.barrier()
    return (time.perf_counter() - began) / calls, (time.process_time() - cpu) / calls


def serve(directory, ranks, rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank,
                            world_size=ranks)
    with open(f"{directory}/go-{rank}") as orders, open(f"{directory}/done", "w") as done:
        dist.barrier()
        if rank == 0:
            print("ready", file=done, flush=True)
        for line in orders:
            words = line.split()
            if words == ["end"]:
                break
            if words[1] not in DTYPES:
                answer = "cannot"
            else:
                answer = "%.9f %.9f" % measure(words[0], words[1], int(words[2]), int(words[3]),
                                               ranks, rank)
            if rank == 0:
                print(answer, file=done, flush=True)
    dist.destroy_process_group()


def main():
    directory, ranks = sys.argv[1], int(sys.argv[2])
    children = []
    for rank in range(1, ranks):
        child = os.fork()
        if child == 0:
            serve(directory, ranks, rank)
            os._exit(0)
        children.append(child)
    serve(directory, ranks, 0)
    for child in children:
        os.waitpid(child, 0)


main()
