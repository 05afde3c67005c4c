"""The FSDP1 face against PyTorch's FullyShardedDataParallel over gloo, same values: losses and norms of 8
steps to 1e-5 relative, flat parameters, the collectives of each step in order, state dicts of model and
optimizer. The last steps continue from optimizer state that was scattered and loaded.

PyTorch's compression hooks need a GPU (record_stream), so they are not here.

usage: fsdp1_steps.py FSDP1_STEPS
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass

import torch
import torch_fsdp1
import torch_mlp

PROGRAM = sys.argv[1]
TOLERANCE = 1e-5
LOADED = ("optim shard", "optim flatten", "optim scatter")
FORWARD_EVENTS = 7      # a layer is gathered and given back, the root is kept


@dataclass
class Case(torch_fsdp1.Setup):
    ranks: int = 2


# --- ours ---


def options_of(case):
    strategy = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    numbers = {"strategy": strategy.index(case.strategy),
               "backward_prefetch": ["BACKWARD_PRE", "BACKWARD_POST", None].index(case.prefetch),
               "forward_prefetch": case.forward, "orig": case.orig, "no_limit": not case.limit,
               "replicas": case.replicas, "microbatches": case.microbatches,
               "reduce_each": case.reduce_each, "clip": case.clip, "is_sgd": case.is_sgd,
               "groups": case.groups}
    return [f"{name}={float(number)}" for name, number in numbers.items()]


def tensor_of(shape, numbers):
    return [float(x) for x in numbers.split()], [int(n) for n in shape.split()]


def read_rank(path):
    """Kind of value -> name -> (numbers, shape); param_groups as they are."""
    found = {}
    for line in open(path):
        what, name, shape, numbers = line.rstrip("\n").split("\t")
        is_value = name == "param_groups"
        found.setdefault(what, {})[name] = json.loads(numbers) if is_value else tensor_of(shape, numbers)
    return found


def read_events(case, path):
    """The events of each step before state dicts. Whole units give nothing back."""
    wanted = [event for event in torch_fsdp1.EVENTS if case.strategy != "NO_SHARD" or event != "reshard"]
    events = [[] for _ in range(torch_fsdp1.STEPS_BEFORE)]
    for line in open(path):
        event = json.loads(line)
        if event["event"] in wanted and event["step"] < len(events):
            events[event["step"]].append((event["event"], event["unit"]))
    return events


def train_ours(case):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_")}
    with tempfile.TemporaryDirectory() as folder:
        command = [PROGRAM, "--np", str(case.ranks), "--trace", f"{folder}/trace%r", folder]
        done = subprocess.run(command + options_of(case), capture_output=True, text=True,
                              env=environment, timeout=100)
        assert done.returncode == 0, (case, done.stderr)
        return [read_rank(f"{folder}/{rank}") | {"events": read_events(case, f"{folder}/trace{rank}")}
                for rank in range(case.ranks)]


# --- both ---


def is_near(ours, theirs):
    """To the tolerance, of the largest: elements near zero keep the rounding of what they were."""
    (numbers, shape), (wanted, wanted_shape) = ours, theirs
    if shape != wanted_shape or len(numbers) != len(wanted):
        return False
    most = max(map(abs, wanted), default=0)
    return all(abs(a - b) <= TOLERANCE * most for a, b in zip(numbers, wanted))


def groups_differ(ours, theirs):
    """Compares the members that ours have: PyTorch's have more (foreach, fused, ...)."""
    if len(ours) != len(theirs):
        return True
    return any(list(value) != list(group[name]) if isinstance(value, list) else value != group[name]
               for own, group in zip(ours, theirs) for name, value in own.items())


def compare_dicts(where, ours, theirs):
    assert set(ours) == set(theirs), (where, "only ours", set(ours) - set(theirs),
                                      "only theirs", set(theirs) - set(ours))
    for name, wanted in theirs.items():
        if name == "param_groups":
            assert not groups_differ(ours[name], wanted), (where, "ours", ours[name], "theirs", wanted)
        else:
            assert is_near(ours[name], wanted), (where, name, "ours", ours[name], "theirs", wanted)


def merge(dicts):
    """Parts of all ranks, one after the other; what all have whole is there once."""
    merged = {}
    for name, first in dicts[0].items():
        if name == "param_groups":
            merged[name] = first
            continue
        parts, size = [found[name][0] for found in dicts], torch.Size(first[1]).numel()
        is_whole = all(part == parts[0] for part in parts) and len(parts[0]) == size
        merged[name] = parts[0] if is_whole else sum(parts, []), first[1]
    return merged


def without_empty(ours, theirs):
    """Ours has the step of parameters of which this rank has nothing, PyTorch's has nothing of them."""
    keys = {name.rpartition(".")[0] for name in theirs}
    return {name: own for name, own in ours.items()
            if name.rpartition(".")[0] in keys or not name.endswith(".step")}


def without_padding(padded, plain):
    """A chunk of a flat parameter without the zeros after it."""
    found = dict(padded)
    for name in set(plain) & set(padded) - {"param_groups"}:
        count, (numbers, shape) = len(plain[name][0]), padded[name]
        if shape and not any(numbers[count:]):
            found[name] = numbers[:count], [count]
    return found


def compare_rank(case, rank, what, ours, theirs):
    if what in LOADED:
        ours, theirs = without_empty(ours, theirs), without_padding(theirs, ours)
    if what == "model local":
        ours = without_padding(ours, theirs)
    if case.is_sgd:     # ours counts its steps, too
        ours = {name: own for name, own in ours.items() if not name.endswith(".step")}
    compare_dicts((case, rank, what), ours, theirs)


def is_gather(event):
    return event[0] == "all_gather"


def is_reduction(event):
    return event[0].startswith(("reduce", "all_reduce"))


def compare_events(case, rank, ours, theirs):
    """After a forward that gathers ahead, autograd decides the order in backward: it goes by when views of
    parameters were made, and reduces a unit after it has gathered the next. So each kind for itself."""
    for step, (own, wanted) in enumerate(zip(ours, theirs, strict=True)):
        where = case, rank, step, "ours", own, "theirs", wanted
        assert wanted, where
        if case.forward:
            assert own[:FORWARD_EVENTS] == wanted[:FORWARD_EVENTS], where
            for kind in (is_gather, is_reduction):
                assert list(filter(kind, own)) == list(filter(kind, wanted)), where
        else:
            assert own == wanted, where


def is_compared(case, what, rank):
    """rank0_only means the first rank of each replica in PyTorch, and nothing for NO_SHARD."""
    if "sharded" in what or what == "events":
        return False
    has_one_owner = case.strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
    return rank == 0 or (what != "norm" and (what != "model rank0" or has_one_owner))


def compare(case, theirs):
    ours = train_ours(case)
    for rank, wanted in enumerate(theirs):
        for what in wanted:
            if is_compared(case, what, rank):
                compare_rank(case, rank, what, ours[rank].get(what, {}), wanted[what])
        if case.ranks > 1:      # a rank alone reduces nothing here
            compare_events(case, rank, ours[rank]["events"], wanted["events"])
    first = slice(case.ranks // max(case.replicas, 1))
    for what in ("model sharded", "optim sharded"):
        own, wanted = (merge([found[what] for found in both[first]]) for both in (ours, theirs))
        compare_rank(case, "all", what, own, wanted)
    print(case, "equal:", sum(map(len, ours[0]["events"])), "events", flush=True)


def cases():
    return [
        Case(ranks=1, clip=0.1),
        Case(ranks=2),
        Case(ranks=2, strategy="SHARD_GRAD_OP", orig=True, clip=0.1, microbatches=3),
        Case(ranks=2, strategy="SHARD_GRAD_OP", prefetch="BACKWARD_POST", is_sgd=True),
        Case(ranks=2, strategy="NO_SHARD", orig=True, clip=0.1),
        Case(ranks=2, strategy="NO_SHARD", microbatches=3),
        Case(ranks=2, prefetch="BACKWARD_POST", microbatches=3),
        Case(ranks=2, prefetch=None, forward=True),
        Case(ranks=2, orig=True, microbatches=2, reduce_each=True),
        Case(ranks=2, orig=True, groups=True),
        Case(ranks=4, clip=0.1),
        Case(ranks=4, orig=True, prefetch="BACKWARD_POST", microbatches=3),
        Case(ranks=4, orig=True, prefetch="BACKWARD_POST", forward=True, limit=False, groups=True,
             is_sgd=True),
        Case(ranks=4, strategy="HYBRID_SHARD", replicas=2, clip=0.1),
        Case(ranks=4, strategy="_HYBRID_SHARD_ZERO2", replicas=2, orig=True, prefetch="BACKWARD_POST",
             microbatches=2),
    ]


def main():
    for ranks in (1, 2, 4):
        some = [case for case in cases() if case.ranks == ranks]
        theirs = torch_mlp.run_ranks(ranks, lambda rank: [torch_fsdp1.train(case, rank) for case in some])
        for i, case in enumerate(some):
            compare(case, [found[i] for found in theirs])


main()
