"""Checkpoints in PyTorch's trainers: sharded, checked, and complete or absent.

    import fsdp.torch
    fsdp.torch.save({"model": model_state, "optim": optim_state, "step": 7}, "checkpoint-7")
    fsdp.torch.load(state, "checkpoint-7")

save, load and async_save are called by all ranks of a process group. They take state dicts with DTensors
(FSDP2, HSDP, TP), ShardedTensors and plain tensors, nested in dicts and lists, as
torch.distributed.checkpoint does; ranks may hold different names. Writer and Reader are plug-ins for
torch.distributed.checkpoint itself."""

import ctypes
import os

import torch
from torch.distributed.checkpoint.stateful import Stateful

from . import _bindings as c
from . import _options as options_of
from ._library import call, lib
from ._running import Watch, shown
from ._tasks import LOAD
from ._torch_group import Place, copied, declared, group_of, in_background, save_declared
from ._torch_plugin import Reader, Writer, install
from ._torch_state import VALUE, Memory, StateDict
from ._values import to_python

__all__ = ["Reader", "Writer", "async_save", "install", "load", "save", "wait"]


def save(state_dict, path, *, step=None, process_group=None, no_dist=False, keep_last=0, keep_every=0,
         progress=None, **options):
    """Saves a state as the checkpoint `path`, which appears whole or not at all. With `step`, `path` is a
    run: a directory of checkpoints step-N, in which keep_last and keep_every remove older ones. Other
    options are those of fsdp.save. Collective; with no_dist this rank saves alone."""
    group = group_of(process_group, no_dist)
    with group.lock:
        place, declaration = group.agree(lambda: (
            Place(path, "fsdp.torch.save", step, keep_last, keep_every, **options),
            declared(group, _state(state_dict))))
        save_declared(group, declaration, place, progress)


def async_save(state_dict, path, *, step=None, process_group=None, no_dist=False, keep_last=0, keep_every=0,
               **options):
    """Copies this rank's part of a state into host memory that is kept between saves, and saves the copy in
    the background. Returns a future of the checkpoint's path when the copy is made on all ranks, so that the
    program may change the state. One save at a time is under way: the next save, load or async_save of the
    group waits for it. Options are those of save. Collective."""
    group = group_of(process_group, no_dist)
    with group.lock:
        options = {"threads": 1, **options}
        place, declaration = group.agree(lambda: (
            Place(path, "fsdp.torch.async_save", step, keep_last, keep_every, **options),
            copied(group, _state(state_dict))))
        group.pending = in_background(group, declaration, place)
        return group.pending


def wait(process_group=None, no_dist=False):
    """Waits for the save in the background, whose future has its failure. Collective."""
    group_of(process_group, no_dist)


def _state(state_dict):
    """The state with the states of its Stateful objects."""
    return {key: item.state_dict() if isinstance(item, Stateful) else item
            for key, item in state_dict.items()}


def load(state_dict, path, *, process_group=None, no_dist=False, progress=None, **options):
    """Loads a checkpoint, or the newest good one of a run, into a state: fills its tensors in place, at any
    number of ranks and any sharding, and replaces its values. Returns the path of the checkpoint. Options are
    those of fsdp.load: partial, cast, include, exclude, check, threads, memory. Collective."""
    group = group_of(process_group, no_dist)
    with group.lock:
        report, memory = c.fsdp_load_report(), Memory(is_read=False)
        declaration, inner = group.declaration(memory), _state(state_dict)
        leaves, opts = group.agree(lambda: (
            declaration.add_state(inner),
            options_of.from_struct(c.fsdp_load_opts(), options, LOAD, "fsdp.torch.load")))
        opts.report = ctypes.pointer(report)
        try:
            merged = declaration.agree(group.control)
            state = group.agree(lambda: StateDict(merged))
            with shown(progress if group.rank == 0 else None, "load") as callback:
                watch = Watch(callback)
                watch.fill(opts.watch)
                watch.run(lambda: call(lib.fsdp_sd_load, state.handle, group.control.handle,
                                       os.fsencode(path), ctypes.byref(opts)))
            found = os.fsdecode(ctypes.string_at(report.path)) if report.path else str(path)
        except BaseException as failure:
            group.lost(failure)
            raise
        finally:
            lib.fsdp_load_report_release(ctypes.byref(report))
    memory.write_back()
    _replace_values(state, leaves)
    for key, item in state_dict.items():
        if isinstance(item, Stateful):
            item.load_state_dict(inner[key])
        elif not isinstance(item, torch.Tensor):
            state_dict[key] = inner[key]
    return found


def _replace_values(state, leaves):
    names = {entry[0]: at for at, entry in enumerate(state.declaration.entries) if entry[2] == VALUE}
    for name, _, container, key, _ in leaves:
        if name in names and not isinstance(container, tuple):
            container[key] = to_python(lib.fsdp_sd_at(state.handle, names[name])[0].value)
