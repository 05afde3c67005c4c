"""Plug-ins for torch.distributed.checkpoint: Writer is its StorageWriter, Reader its StorageReader.

Its planners stay in charge: a rank declares what the plan lets it write, and the ranks merge their
declarations (_torch_state.py) over a control plane of their own, whose address the coordinator sends along
with the plans. So a save needs no collective of PyTorch and may run in a thread or in a process of its
own."""

import ctypes
import dataclasses
import io
import os
import socket
import sys
import threading
import uuid

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (BytesStorageMetadata, ChunkStorageMetadata, Metadata,
                                                   StorageMeta, TensorProperties, TensorStorageMetadata)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from . import _arrays as arrays
from . import _bindings as c
from ._checkpoint import Checkpoint
from ._control import Control, listen
from ._library import NotFoundError, PeerError, UsageError, call, lib
from ._torch_group import Group, Place, address, group_of, save_declared
from ._torch_state import encode, refuse
from ._values import Class, Opaque, fill, keys_of, name_of, path_of, to_python


def done(result):
    future = Future()
    future.set_result(result)
    return future


# --- values ---------------------------------------------------------------------------------------

def read_bytes(raw):
    """The value in bytes of torch.save if the library reads all of it, so that torch.save makes the same
    bytes of it again; else the bytes, opaque."""
    value, handle = c.fsdp_value(), ctypes.c_void_p()
    try:
        fill(value, Opaque(raw))
        call(lib.fsdp_checkpoint_open_value, ctypes.byref(value), ctypes.byref(handle))
        sd = lib.fsdp_checkpoint_sd(handle)
        if lib.fsdp_sd_count(sd) != 1 or lib.fsdp_sd_at(sd, 0)[0].kind.value != c.FSDP_ENTRY_VALUE:
            return Opaque(raw)
        found = to_python(lib.fsdp_sd_at(sd, 0)[0].value)
        encode(found)
    except (NotFoundError, UsageError):
        return Opaque(raw)
    finally:
        lib.fsdp_checkpoint_close(handle)
        lib.fsdp_value_release(ctypes.byref(value))
    return found if _is_plain(found) and write_bytes(found) == raw else Opaque(raw)


def _is_plain(item):
    if isinstance(item, dict):
        return all(map(_is_plain, item)) and all(map(_is_plain, item.values()))
    if isinstance(item, (list, tuple)):
        return all(map(_is_plain, item))
    return not isinstance(item, (Class, Opaque))


def write_bytes(item):
    """The bytes of torch.save for a value."""
    if isinstance(item, Opaque):
        return bytes(item)
    out = io.BytesIO()
    torch.save(item, out)
    return out.getvalue()


# --- saving ---------------------------------------------------------------------------------------

class _Ranks(Group):
    """The ranks of a plan, which the coordinator has named."""

    def __init__(self, where, members):
        position = {member[2]: rank for rank, member in enumerate(members) if member}
        super().__init__(where["rank"], len(members), position)
        self.members, self.where = members, {name: where[name] for name in ("host", "port", "job")}

    def connect(self, listener=None):
        if self.control is None:
            self.control = Control(self.rank, self.size, self.where["job"], listener, self.where["host"],
                                   self.where["port"])


_ranks, _ranks_lock = {}, threading.Lock()  # by job: a planner that caches plans sends the same job again


class Writer(StorageWriter):
    """Writes checkpoints of this project from torch.distributed.checkpoint:

        dcp.save(state, storage_writer=fsdp.torch.Writer("checkpoint-7"))

    Options are those of fsdp.torch.save. A save whose planner makes its plan without the other ranks
    (use_collectives=False) connects them by one broadcast of process_group."""

    def __init__(self, path=None, *, step=None, process_group=None, keep_last=0, keep_every=0, **options):
        super().__init__()
        self._how = {"step": step, "keep_last": keep_last, "keep_every": keep_every, **options}
        Place(path or "", what="fsdp.torch.Writer", **self._how)  # refuses wrong options now
        self._process_group, self._is_alone = process_group, False
        self.reset(path)

    def __getstate__(self):
        return {**self.__dict__, "_process_group": None, "_listener": None}

    def reset(self, checkpoint_id=None):
        self.checkpoint_id, self._listener = checkpoint_id or getattr(self, "checkpoint_id", None), None
        self._save_id = uuid.uuid4().hex

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return "://" not in os.fspath(checkpoint_id)

    def storage_meta(self):
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        if self.checkpoint_id is None:
            raise UsageError("fsdp.torch.Writer has no path: pass it, or checkpoint_id", c.FSDP_ERR_USAGE)
        self._is_alone = not kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return dataclasses.replace(plan, storage_data={"member": [socket.gethostname(), os.getpid(), rank]})

    def prepare_global_plan(self, plans):
        """Adds to each plan where rank 0 listens."""
        if self._is_alone:
            return plans
        members = [plan.storage_data and plan.storage_data.get("member") for plan in plans]
        ranks = self._known(members)
        if ranks is None:
            where = {"host": None, "port": 0, "job": uuid.uuid4().hex, "rank": 0}
            if len(plans) > 1:
                self._listener, where["port"] = listen()
                where["host"] = address()
            ranks = _Ranks(where, members)
            with _ranks_lock:
                _ranks[ranks.where["job"]] = ranks
        return [dataclasses.replace(plan, storage_data={**ranks.where, "rank": rank, "members": members})
                for rank, plan in enumerate(plans)]

    @staticmethod
    def _known(members):
        """The ranks of an earlier save, if they are the same: plans that were not sent again name no
        member."""
        with _ranks_lock:
            for ranks in reversed(list(_ranks.values())):
                if len(ranks.members) == len(members) and ranks.rank == 0 and ranks.control and all(
                        a is None or a == b for a, b in zip(members, ranks.members)):
                    return ranks
        return None

    def _group(self, plan):
        if self._is_alone:
            return group_of(self._process_group)
        where, listener = plan.storage_data, self._listener
        with _ranks_lock:
            ranks = _ranks.get(where["job"])
            if ranks is None:
                ranks = _ranks[where["job"]] = _Ranks(where, where["members"])
        self._listener = None
        ranks.connect(listener)
        return ranks

    def write_data(self, plan, planner):
        group = self._group(plan)
        with group.lock:
            try:
                place = Place(self.checkpoint_id, what="fsdp.torch.Writer", **self._how)
                declaration = group.agree(lambda: self._declare(group.declaration(), plan, planner))
                if group.rank == 0:
                    remove_empty(self.checkpoint_id)
                save_declared(group, declaration, place, None)
            except PeerError:
                with _ranks_lock:
                    _ranks.pop(plan.storage_data and plan.storage_data.get("job"), None)
                raise
        return done([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])

    @staticmethod
    def _declare(declaration, plan, planner):
        paths, found = planner_paths(planner), {}
        for item in plan.items:
            found.setdefault(item.index.fqn, []).append((item, planner.resolve_data(item)))
        for fqn, parts in found.items():
            name, path = path_of(paths.get(fqn) or [(fqn, dict)])
            if name != fqn:  # a planner with names of its own
                name, path = path_of([(fqn, dict)])
            item, data = parts[0]
            if item.type == WriteItemType.BYTE_IO:
                declaration.add(name, tuple(path), read_bytes(data.getvalue()))
                continue
            whole = getattr(planner, "state_dict", {}).get(fqn)
            if type(whole) is DTensor and declaration.add_local(name, tuple(path), whole, data):
                continue
            shards = [(list(part.tensor_data.chunk.offsets), tensor) for part, tensor in parts]
            declaration.add_shards(name, tuple(path), tuple(item.tensor_data.size), data.dtype, shards)
        return declaration

    def finish(self, metadata, results):
        """The checkpoint is complete since write_data returned on all ranks."""
        metadata.storage_meta = self.storage_meta()


def remove_empty(path):
    """Removes a directory that a program made for the checkpoint."""
    try:
        os.rmdir(path)
    except OSError:
        pass  # absent, or not empty: the save tells


def planner_paths(planner):
    """The nesting of names that a planner flattened: {fqn: [(key, dict or list), ...]}."""
    mappings = getattr(planner, "mappings", None) or {}
    return {fqn: [(part, list if isinstance(part, int) else dict) for part in path]
            for fqn, path in mappings.items()}


# --- loading --------------------------------------------------------------------------------------

class Reader(StorageReader):
    """Reads checkpoints of every format that fsdp.open knows into torch.distributed.checkpoint:

        dcp.load(state, storage_reader=fsdp.torch.Reader("checkpoint-7"))

    Options are those of fsdp.open. A tensor is announced as one chunk, because any box of it can be read."""

    def __init__(self, path=None, **options):
        super().__init__()
        self._options, self._checkpoint = {"framework": "torch", **options}, None
        self.reset(path)

    def __getstate__(self):
        return {**self.__dict__, "_checkpoint": None, "_entries": {}}

    def reset(self, checkpoint_id=None):
        self.checkpoint_id = checkpoint_id or getattr(self, "checkpoint_id", None)
        self._close()
        self._load_id = uuid.uuid4().hex

    def _close(self):
        if self._checkpoint:
            self._checkpoint.close()
        self._checkpoint, self._entries = None, {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return os.path.exists(checkpoint_id)

    def _open(self):
        if self.checkpoint_id is None:
            raise UsageError("fsdp.torch.Reader has no path: pass it, or checkpoint_id", c.FSDP_ERR_USAGE)
        self._close()
        self._checkpoint = Checkpoint(self.checkpoint_id, **self._options)
        with self._checkpoint._opened():
            self._entries = {name_of(entry): (index, entry)
                             for index, entry in enumerate(self._checkpoint._entries())}

    def read_metadata(self, *args, **kwargs):
        self._open()
        found, paths = {}, {}
        for name, (index, entry) in self._entries.items():
            if entry.kind.value == c.FSDP_ENTRY_VALUE:
                found[name] = BytesStorageMetadata()
            else:
                tensor = self._checkpoint.get_slice(name)
                size = torch.Size(tensor.shape)
                found[name] = TensorStorageMetadata(
                    TensorProperties(dtype=self._dtype(name, tensor)), size,
                    [ChunkStorageMetadata(torch.Size([0] * len(size)), size)])
            # Dicts have texts as keys in torch.distributed.checkpoint.
            paths[name] = tuple(str(key) if kind is dict else key for key, kind in keys_of(entry)) or (name,)
        return Metadata(found, planner_data=paths, storage_meta=StorageMeta(load_id=self._load_id))

    @staticmethod
    def _dtype(name, tensor):
        try:
            if arrays.is_blocks(tensor._dtype):
                raise TypeError(f"it is quantized ({tensor.dtype}); pass dequantize=True to the Reader")
            return arrays.torch_dtype(tensor._dtype)
        except TypeError as error:
            raise refuse(name, f"cannot be read: {error}") from None

    def set_up_storage_reader(self, metadata, is_coordinator, *args, **kwargs):
        if self._checkpoint is None:  # the metadata was read by another reader
            self._open()

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        return plans

    def read_data(self, plan, planner):
        with torch.no_grad():
            for item in plan.items:
                index, entry = self._entries[item.storage_index.fqn]
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(write_bytes(to_python(entry.value))))
                else:
                    self._read_tensor(item, planner)
        self._close()
        return done(None)

    def _read_tensor(self, item, planner):
        target = planner.resolve_tensor(item).detach()
        tensor = self._checkpoint.get_slice(item.storage_index.fqn)
        if target.shape != item.lengths:
            raise refuse(item.storage_index.fqn,
                         f"has {list(item.lengths)} elements to read into {list(target.shape)}")
        dtype = arrays.torch_dtype(tensor._dtype)
        is_direct = target.is_cpu and target.is_contiguous() and target.dtype == dtype and not (
            target.is_neg() or target.is_conj())
        memory = target if is_direct else torch.empty(target.shape, dtype=dtype)
        box = c.fsdp_box(ndim=len(item.lengths))
        for dim, (at, length) in enumerate(zip(item.storage_offsets, item.lengths)):
            box.lo[dim], box.len[dim] = at, length
        if memory.numel():
            with self._checkpoint._opened() as handle:
                call(lib.fsdp_checkpoint_read, handle, tensor._index, ctypes.byref(box), memory.data_ptr(),
                     c.FSDP_CHECK_BLOCKS)
        if not is_direct:
            target.copy_(memory)
        planner.commit_tensor(item, target)


# --- in place of PyTorch's own ---------------------------------------------------------------------

class FileSystemWriter(Writer):
    """Writer under the name and with the arguments of DCP's FileSystemWriter."""

    def __init__(self, path, single_file_per_rank=True, sync_files=True, thread_count=1,
                 per_thread_copy_ahead=0, cache_staged_state_dict=False, overwrite=True, _extensions=None,
                 **options):
        if _extensions or getattr(options.pop("serialization_format", None), "name", "") == "SAFETENSORS":
            raise UsageError("checkpoints of fsdp take no stream extensions, and are not safetensors; use "
                             "PyTorch's own FileSystemWriter for these", c.FSDP_ERR_USAGE)
        super().__init__(path, skip_fsync=not sync_files, overwrite=overwrite, **options)


class FileSystemReader(Reader):
    """Reader under the name of DCP's FileSystemReader."""


_THEIRS = {"FileSystemWriter": filesystem.FileSystemWriter, "FileSystemReader": filesystem.FileSystemReader}
_OURS = {"FileSystemWriter": FileSystemWriter, "FileSystemReader": FileSystemReader}


def install(uninstall=False):
    """Makes torch.distributed.checkpoint, and with it accelerate, Transformers, Lightning, torchtitan and
    other trainers that use its FileSystemWriter and FileSystemReader, save checkpoints of this project and
    load those of every format. Modules that are imported later get the new classes, too."""
    old, new = (_OURS, _THEIRS) if uninstall else (_THEIRS, _OURS)
    for module in list(sys.modules.values()):
        for name, item in old.items():
            if getattr(module, "__dict__", {}).get(name) is item and module is not sys.modules[__name__]:
                setattr(module, name, new[name])
