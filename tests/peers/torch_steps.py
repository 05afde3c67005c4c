"""./dev bench step against PyTorch's FSDP2 over gloo, same values: losses of 20 AdamW steps to 1e-5 relative,
the shards of each rank, and the events of each step in order.

usage: torch_steps.py BUILD
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch_mlp
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

BUILD = sys.argv[1]
COLLECTIVES = {"all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter",
               "all_reduce": "all_reduce"}


@dataclass
class Case:
    ranks: int
    shape: torch_mlp.Shape
    replicas: int = 1
    reshard: object = None      # as fully_shard has it
    forward: int = 0            # units that are gathered ahead
    backward: int = 0
    steps: int = 6


# --- PyTorch ---


class Recorder:
    """Events as they are issued; unshards that do nothing and reshards that change nothing are none."""

    def __init__(self):
        self.events, self.groups = [], []

    def add(self, event, group):
        self.events.append((event, group._module_fqn))

    def unshard(self, original):
        def wrapped(group, *args):
            if group._all_gather_result is None and not group.is_unsharded:
                self.add("unshard", group)
            return self.inside(group, original, *args)
        return wrapped

    def reshard(self, original):
        def wrapped(group):
            before = group._sharded_state
            original(group)
            if group._sharded_state != before:
                self.add("reshard", group)
        return wrapped

    def post_backward(self, original):
        def wrapped(group, *args):
            self.inside(group, original, *args)
            self.add("post_backward", group)
        return wrapped

    def inside(self, group, original, *args):
        self.groups.append(group)
        try:
            return original(group, *args)
        finally:
            self.groups.pop()

    def collective(self, name, original):
        def wrapped(*args, **kwargs):
            if self.groups:
                self.add(COLLECTIVES[name], self.groups[-1])
            return original(*args, **kwargs)
        return wrapped

    @contextlib.contextmanager
    def recording(self):
        kept = {name: getattr(FSDPParamGroup, name) for name in ("unshard", "reshard", "post_backward")}
        calls = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, original in kept.items():
            setattr(FSDPParamGroup, name, getattr(self, name)(original))
        for name, original in calls.items():
            setattr(dist, name, self.collective(name, original))
        yield
        for name, original in kept.items():
            setattr(FSDPParamGroup, name, original)
        for name, original in calls.items():
            setattr(dist, name, original)


def boxes_of(model):
    found = {}
    for name, param in model.named_parameters():
        shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh,
                                                              param.placements)
        if math.prod(shape):
            found[name] = [list(offset), list(shape)]
    return found


def train_theirs(case, rank):
    if case.replicas > 1:
        mesh = torch_mlp.mesh_of((case.replicas, case.ranks // case.replicas), ("rep", "dp"))
    else:
        mesh = torch_mlp.mesh_of((case.ranks,), ("dp",))
    model = torch_mlp.sharded(case.shape, mesh, case.reshard, case.forward, case.backward)
    optimizer, recorder = torch_mlp.adamw(model), Recorder()
    boxes, losses, events = boxes_of(model), [], []
    with recorder.recording():
        for step in range(case.steps):
            losses.append(step_theirs(case, model, step, rank))
            optimizer.step()
            optimizer.zero_grad()
            events.append(recorder.events)
            recorder.events = []
    return losses, boxes, events


def step_theirs(case, model, step, rank):
    total, count = 0, case.shape.accumulate
    for microbatch in range(count):
        model.set_requires_gradient_sync(microbatch == count - 1)
        x, t = torch_mlp.batch(case.shape, step, microbatch, case.ranks, rank)
        loss = torch.nn.functional.mse_loss(model(x), t)
        loss.backward()
        total += loss.item()
    return total / count


# --- ours ---


def options_of(case):
    shape = case.shape
    reshard = {None: "auto", True: "true", False: "false"}.get(case.reshard, case.reshard)
    mesh = f"rep={case.replicas},dp={case.ranks // case.replicas}" if case.replicas > 1 else \
        f"dp={case.ranks}"
    words = f"--np {case.ranks} --mesh {mesh} --layers {shape.layers} --width {shape.width} " \
        f"--out {shape.out} --rows {shape.rows} --accumulate {shape.accumulate} --steps {case.steps} " \
        f"--reshard {reshard} --prefetch-forward {case.forward} --prefetch-backward {case.backward}"
    return words.split()


def events_ours(path, steps):
    events = [[] for _ in range(steps)]
    for line in open(path):
        event = json.loads(line)
        if event["event"] in ("unshard", "reshard", "post_backward", *COLLECTIVES.values()):
            events[event["step"]].append((event["event"], event["unit"]))
    return events


def run_ours(program, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_")}
    done = subprocess.run([f"{BUILD}/{program}", *map(str, arguments)], capture_output=True,
                          text=True, env=environment, timeout=100)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout


def boxes_ours(path, ranks):
    """The tensors of the first replica, which saves."""
    found = [{} for _ in range(ranks)]
    tensors = json.loads(run_ours("bin/fsdp-ls", "--json", "--shards", path))["tensors"]
    for name, tensor in tensors.items():
        kind, _, own = name.partition(".")
        if kind == "model":
            for box in tensor["boxes"]:
                found[box["rank"]][own] = [box["offset"], box["shape"]]
    return found


def train_ours(case):
    with tempfile.TemporaryDirectory() as folder:
        out = run_ours("tests/bench_rows", "step", *options_of(case), "--trace", f"{folder}/%r",
                       "--save", f"{folder}/saved")
        lines = [json.loads(line) for line in out.splitlines()][:-1]
        events = [events_ours(f"{folder}/{rank}", case.steps) for rank in range(case.ranks)]
        return lines, boxes_ours(f"{folder}/saved", case.ranks), events


# --- both ---


def compare_losses(case, lines, theirs):
    assert len(lines) == case.steps, case
    for step, line in enumerate(lines):
        wanted = [losses[step] for losses, _, _ in theirs]
        for ours, loss in zip(line["rank_loss"], wanted, strict=True):
            assert math.isclose(ours, loss, rel_tol=1e-5), (case, step, line, wanted)
        assert math.isclose(line["loss"], sum(wanted) / len(wanted), rel_tol=1e-5), (case, step)


def compare_boxes(case, ours, theirs):
    for rank in range(case.ranks // case.replicas):
        assert ours[rank] == theirs[rank][1], (case, rank, ours[rank], theirs[rank][1])


def compare_events(case, ours, theirs):
    for rank in range(case.ranks):
        for step in range(case.steps):
            wanted = theirs[rank][2][step]
            assert wanted and ours[rank][step] == wanted, \
                (case, rank, step, "ours", ours[rank][step], "theirs", wanted)


def compare(case, theirs):
    lines, boxes, events = train_ours(case)
    compare_losses(case, lines, theirs)
    compare_boxes(case, boxes, theirs)
    compare_events(case, events, theirs)
    print(case, "equal:", lines[-1]["loss"], len(events[0][0]), "events a step", flush=True)


def main():
    plain, odd = torch_mlp.Shape(), torch_mlp.Shape(layers=4, width=7, out=5, rows=3)
    cases = {
        1: [Case(1, plain, steps=20), Case(1, odd, reshard=False)],
        2: [Case(2, plain, steps=20), Case(2, odd, forward=2, backward=2),
            Case(2, torch_mlp.Shape(accumulate=3))],
        4: [Case(4, odd, steps=20), Case(4, odd, reshard=False), Case(4, odd, reshard=2),
            Case(4, odd, replicas=2, forward=1)],
    }
    for ranks, some in cases.items():
        theirs = torch_mlp.run_ranks(ranks, lambda rank: [train_theirs(case, rank) for case in some])
        for i, case in enumerate(some):
            compare(case, [found[i] for found in theirs])


main()
