"""The ranks of a peer of a bench, which gives orders through pipes (bench_peer in tests/bench/rows.h)."""

import os
import resource
import time

import torch
import torch.distributed as dist


def serve_rank(directory, rank, begin):
    with open(f"{directory}/go-{rank}") as orders, open(f"{directory}/done", "w") as done:
        answer = begin(rank)
        if rank == 0:
            print("ready", file=done, flush=True)
        for line in orders:
            if line == "end\n":
                break
            told = answer(line)
            if rank == 0:
                print(told, file=done, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def serve(directory, ranks, begin):
    """begin(rank) prepares a rank and returns a function from an order to its answer."""
    children = []
    for rank in range(1, ranks):
        child = os.fork()
        if child == 0:
            serve_rank(directory, rank, begin)
            os._exit(0)
        children.append(child)
    serve_rank(directory, 0, begin)
    for child in children:
        os.waitpid(child, 0)


def join(directory, ranks, rank, threads):
    torch.set_num_threads(threads)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank,
                                world_size=ranks)


def barrier():
    if dist.is_initialized():
        dist.barrier()


def measure(count, run):
    """Seconds and processor seconds of one of `count` runs."""
    barrier()
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(count):
        run()
    barrier()
    return (time.perf_counter() - began) / count, (time.process_time() - cpu) / count


def peak_kib():
    """The largest resident size of a rank."""
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    if dist.is_initialized():
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    return peak.item()


def answer_steps(step):
    """The answer to an order for some steps."""
    return lambda line: "%.9f %.9f %d" % (*measure(int(line), step), peak_kib())
