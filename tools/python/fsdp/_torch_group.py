"""Process groups of PyTorch: the control plane of each, and calls of the library on all of its ranks.

A group's control plane is connected at its first use, by one broadcast of the group. Saves and loads use no
other collective of PyTorch, so that they can run in a thread."""

import ctypes
import gc
import os
import socket
import threading
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch.distributed as dist

from . import _bindings as c
from . import _options as options_of
from ._control import Control, listen
from ._library import PeerError, UsageError, call, lib
from ._running import Watch, log, shown
from ._tasks import SAVE
from ._torch_state import Declaration, Layouts, Pool, PoolMemory, StateDict

NICER = 19


def address():
    """An address of this computer that other computers reach."""
    for other in (os.environ.get("MASTER_ADDR"), "10.255.255.255"):
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((other or "", 9))  # chooses a route, and sends nothing
                return probe.getsockname()[0]
        except OSError:
            pass
    return "127.0.0.1"


class Group:
    """The ranks of a process group. One call at a time uses it."""

    def __init__(self, rank=0, size=1, position=None):
        self.rank, self.size, self._position = rank, size, position
        self.control, self.lock = None, threading.Lock()
        self.pending, self.pool, self.thread = None, None, None  # the save in the background

    def declaration(self, memory=None):
        return Declaration(Layouts(self.rank, self.size, self._position), memory)

    def agree(self, work):
        """Does work() on this rank, and raises on all ranks if it fails on any. Collective."""
        try:
            result = work()
        except BaseException as failure:
            self.control.agree(failure)
        else:
            self.control.agree()
            return result

    def lost(self, failure):
        """Called for a failure: after a lost rank the control plane is of no use."""
        if isinstance(failure, PeerError):
            self.control = None


class ProcessGroup(Group):
    def __init__(self, group):
        ranks = dist.get_process_group_ranks(group)
        whole = ranks == list(range(dist.get_world_size()))
        super().__init__(dist.get_rank(group), len(ranks),
                         None if whole else {rank: at for at, rank in enumerate(ranks)})
        self._first, self._group = ranks[0], weakref.ref(group)

    def connect(self):
        """Collective, of the process group too."""
        if self.control is not None:
            return
        place, listener = [None], None
        if self.rank == 0 and self.size > 1:
            listener, port = listen()
            place = [(address(), port, uuid.uuid4().hex)]
        if self.size > 1:
            dist.broadcast_object_list(place, src=self._first, group=self._group())
        host, port, job = place[0] or (None, 0, "alone")
        self.control = Control(self.rank, self.size, job, listener, host, port)


class Alone(Group):
    def connect(self):
        self.control = self.control or Control()


_groups, _alone = weakref.WeakKeyDictionary(), Alone()


def group_of(process_group=None, no_dist=False):
    """The group of a process group, connected; this process alone without torch.distributed. Collective."""
    if no_dist or not (dist.is_available() and dist.is_initialized()):
        found = _alone
    else:
        process_group = process_group or dist.group.WORLD
        if dist.get_rank(process_group) < 0:
            raise UsageError("this rank is not in the process group", c.FSDP_ERR_USAGE)
        found = _groups.get(process_group)
        if found is None:
            found = _groups[process_group] = ProcessGroup(process_group)
    wait_for(found)
    found.connect()
    return found


def wait_for(group):
    """Waits for the save in the background, whose future has its failure."""
    pending, group.pending = group.pending, None
    if pending is not None:
        wait([pending])


# --- saving ---------------------------------------------------------------------------------------

@contextmanager
def no_collection():
    """Python's collector would traverse the state several times while its many entries are listed."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def declared(group, state, memory=None):
    with no_collection():
        declaration = group.declaration(memory)
        declaration.add_state(state)
        return declaration


class Place:
    """Where and how a save is done: a checkpoint, or a step of a run."""

    def __init__(self, path, what, step=None, keep_last=0, keep_every=0, **options):
        self.path, self._step = os.fspath(path), step
        self.opts = options_of.from_struct(c.fsdp_save_opts(), options, SAVE, what)
        self._retention = c.fsdp_retention(keep_last=keep_last, keep_every=keep_every)
        if (keep_last or keep_every) and step is None:
            raise UsageError("keep_last and keep_every are of runs; pass step=", c.FSDP_ERR_USAGE)
        if keep_last or keep_every:
            self.opts.retain = ctypes.pointer(self._retention)

    def save(self, state, control):
        if self._step is None:
            function, place = lib.fsdp_sd_save, (os.fsencode(self.path),)
        else:
            function, place = lib.fsdp_run_save, (os.fsencode(self.path), self._step)
        call(function, state.handle, control.handle, *place, ctypes.byref(self.opts))


def save_declared(group, declaration, place, progress):
    """Collective."""
    try:
        declaration = declaration.agree(group.control)
        state = group.agree(lambda: StateDict(declaration))
        with shown(progress if group.rank == 0 else None, "save") as callback:
            watch = Watch(callback)
            watch.fill(place.opts.watch)
            watch.run(lambda: place.save(state, group.control))
    except BaseException as failure:
        group.lost(failure)
        raise
    return place.path


# --- in the background ----------------------------------------------------------------------------

def copied(group, state):
    """The declaration of a state, over a copy in the group's memory."""
    group.pool = group.pool or Pool()
    copy = PoolMemory(group.pool)
    declaration = declared(group, state, copy)
    base = copy.fill()
    declaration.addresses = {name: base + at for name, at in declaration.addresses.items()}
    return declaration


def in_background(group, declaration, place):
    """Saves a declaration in the group's thread, and returns the future."""
    if group.thread is None:
        group.thread = ThreadPoolExecutor(1, "fsdp-save", initializer=_begin_thread)
    return group.thread.submit(_save_in_background, group, declaration, place)


def _begin_thread():
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICER)  # of this thread and those it starts


def _save_in_background(group, declaration, place):
    try:
        with group.lock:
            return save_declared(group, declaration, place, None)
    except BaseException as failure:
        log.error("the save of '%s' failed: %s", place.path, failure)
        raise
