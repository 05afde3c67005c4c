"""An opened checkpoint of any format: names, tensors, slices of tensors, values, metadata, layouts.

Checkpoint.get_tensor and Slice read boxes of tensors by fsdp_checkpoint_read, which finds their bytes in
whatever files hold them. A slice reads the bytes that it needs, and no others."""

import ctypes
import json
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from mmap import ACCESS_COPY, mmap as map_file
from typing import NamedTuple

from . import _arrays as arrays
from . import _bindings as c
from ._library import UsageError, call, lib
from ._options import flag as options_flag, open_options
from ._values import keys_of, name_of, raw_of, text_of, to_python

GAP_BYTES = 4096  # elements that a step skips are read and dropped if they are fewer bytes than this ...
PIECE_BYTES = 64 << 20  # ... in pieces of at most this size
PREFETCH_BYTES = 1 << 30
PREFETCH_THREADS = 2


class Box(NamedTuple):
    """A stored part of a tensor: the rank or the file that holds it, and where it lies in the tensor."""
    holder: "int | str"
    offset: tuple
    shape: tuple


class Layout(NamedTuple):
    """How a tensor is stored. `mesh` has the sizes of the mesh dims by name and `placements` one text per
    mesh dim, both empty where there is no mesh."""
    mesh: dict
    placements: tuple
    boxes: tuple


class Slice:
    """A tensor that is read when it is indexed: by integers, slices with steps, an ellipsis."""

    def __init__(self, checkpoint, index, entry):
        self._checkpoint, self._index = checkpoint, index
        self._dtype = arrays.dtype_of(entry.dtype.value)
        self.shape = tuple(entry.shape[:entry.ndim])
        self.dtype, self.nbytes = self._dtype.name, arrays.count(self.shape) * self._dtype.size

    def get_shape(self):
        return list(self.shape)

    def get_dtype(self):
        return self._dtype.safetensors or self._dtype.name

    def __len__(self):
        with self._opened():
            if not self.shape:
                raise TypeError("a scalar has no length")
            return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index):
        return self._checkpoint._read(self, _resolve(index, self.shape))

    def __array__(self, dtype=None, copy=None):
        array = self[...]
        array = array.numpy() if hasattr(array, "numpy") else array
        return array.astype(dtype) if dtype is not None else array

    def __repr__(self):
        return f"Slice(shape={self.shape}, dtype={self.dtype})"


# --- indexes --------------------------------------------------------------------------------------

class _Range(NamedTuple):
    """Elements of one dim: the first, their number, their step. An integer index drops the dim."""
    first: int
    length: int
    step: int
    drops: bool


def _range(index, length, dim):
    if isinstance(index, slice):
        first, end, step = index.indices(length)
        return _Range(first, len(range(first, end, step)), step, False)
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise TypeError(
            f"index {index!r} of dim {dim}: use integers, slices and ...; read the tensor for others")
    number = index.__index__()
    if not -length <= number < length:
        raise IndexError(f"index {number} is out of bounds for dim {dim} with {length} elements")
    return _Range(number % length, 1, 1, True)


def _resolve(index, shape):
    """One range per dim."""
    index = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, item in enumerate(index) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can have one ellipsis ('...')")
    if not dots:
        dots, index = [len(index)], index + [Ellipsis]
    if len(index) - 1 > len(shape):
        raise IndexError(f"too many indices: the tensor has {len(shape)} dims, {len(index) - 1} were indexed")
    index[dots[0]:dots[0] + 1] = [slice(None)] * (len(shape) - len(index) + 1)
    return [_range(item, length, dim) for dim, (item, length) in enumerate(zip(index, shape))]


def _box(ranges):
    box = c.fsdp_box()
    box.ndim = len(ranges)
    for dim, item in enumerate(ranges):
        span = (item.length - 1) * abs(item.step) + 1 if item.length else 0
        box.lo[dim] = min(item.first, item.first + (item.length - 1) * item.step) if item.length else 0
        box.len[dim] = span
    return box


def _halves(ranges, dim):
    """The ranges in two, cut in one dim; a single element has no step."""
    item = ranges[dim]
    cut = item.length // 2
    for first, length in ((0, cut), (cut, item.length - cut)):
        part = _Range(item.first + first * item.step, length, item.step if length > 1 else 1, False)
        yield ranges[:dim] + [part] + ranges[dim + 1:]


# --- the checkpoint -------------------------------------------------------------------------------

class Checkpoint:
    """An opened checkpoint, as fsdp.open returns it. Several threads may read from it at once."""

    def __init__(self, path, *, framework=None, device="cpu", dequantize=False, map=None, verify=None,
                 mmap=True, **options):
        self._framework, self._device, self._verify = framework and arrays.framework_named(
            framework), device, verify
        if device != "cpu" and self._framework is None:
            self._framework = "torch"
        if device != "cpu" and self._framework != "torch":
            raise UsageError(f"device '{device}' needs framework='torch'", c.FSDP_ERR_USAGE)
        self._handle, self._prefetched, self._pool = ctypes.c_void_p(), {}, None
        self._readers, self._idle = 0, threading.Condition()
        self._mmap, self._maps = options_flag("mmap", mmap), {}
        self.path = str(path)
        opts = open_options(options)
        call(lib.fsdp_checkpoint_open, os.fsencode(path), ctypes.byref(opts), ctypes.byref(self._handle))
        if dequantize or map:
            chosen = c.fsdp_map_opts(map=map and str(map).encode())
            call(lib.fsdp_checkpoint_map, ctypes.byref(self._handle), ctypes.byref(chosen))
        self._sd = lib.fsdp_checkpoint_sd(self._handle)
        self._info = lib.fsdp_checkpoint_describe(self._handle)[0]
        self.format, self.kind = self._info.format.decode(), self._info.kind.word
        self.step = None if self._info.step == c.FSDP_NO_STEP else self._info.step
        self.world, self.tensor_bytes = self._info.world, self._info.tensor_bytes

    def close(self):
        """Closes the files, after reads that are under way in other threads. Arrays that were read stay."""
        pool, self._pool = self._pool, None
        if pool:
            pool.stop()
        with self._idle:
            handle, self._handle, self._maps = self._handle, None, {}
            self._idle.wait_for(lambda: self._readers == 0)
        if handle:
            lib.fsdp_checkpoint_close(handle)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __del__(self):
        if getattr(self, "_handle", None):
            self.close()

    # --- names ---

    def _entries(self):
        """The entries of the state dict, for the time that the checkpoint is used."""
        at = lib.fsdp_sd_at
        for index in range(lib.fsdp_sd_count(self._sd)):
            yield at(self._sd, index)[0]

    @contextmanager
    def _opened(self):
        """The handle, which no other thread closes meanwhile."""
        with self._idle:
            if self._handle is None:
                raise ValueError(f"the checkpoint '{self.path}' is closed")
            self._readers += 1
        try:
            yield self._handle
        finally:
            with self._idle:
                self._readers -= 1
                self._idle.notify_all()

    def _find(self, name):
        """The entry of a tensor, after aliases."""
        raw = raw_of(name)
        index = lib.fsdp_sd_find(self._sd, raw, len(raw))
        entry = lib.fsdp_sd_at(self._sd, index)[0] if index >= 0 else None
        if entry is not None and entry.kind.value == c.FSDP_ENTRY_ALIAS:
            index = entry.target
            entry = lib.fsdp_sd_at(self._sd, index)[0]
        if entry is None or entry.kind.value != c.FSDP_ENTRY_TENSOR:
            what = "no tensor" if entry is None else "a value and no tensor"
            raise KeyError(f"'{self.path}' has {what} '{name}'")
        return index, entry

    def keys(self):
        """The names of tensors, in the order of the checkpoint."""
        with self._opened():
            return [name_of(entry) for entry in self._entries() if entry.kind.value != c.FSDP_ENTRY_VALUE]

    def offset_keys(self):
        """As safetensors spells keys."""
        return self.keys()

    def __iter__(self):
        return iter(self.keys())

    def __len__(self):
        with self._opened():
            return sum(entry.kind.value != c.FSDP_ENTRY_VALUE for entry in self._entries())

    def __contains__(self, name):
        try:
            return self.get_slice(name) is not None
        except KeyError:
            return False

    def aliases(self):
        """Further names of tensors that are stored once: {name: name of the tensor}."""
        with self._opened():
            return {name_of(entry): name_of(lib.fsdp_sd_at(self._sd, entry.target)[0])
                    for entry in self._entries() if entry.kind.value == c.FSDP_ENTRY_ALIAS}

    # --- descriptions ---

    def shape(self, name):
        with self._opened():
            _, entry = self._find(name)
            return tuple(entry.shape[:entry.ndim])

    def dtype(self, name):
        """The dtype of a tensor as the library spells it: "bf16", "f32", "q4_k"."""
        with self._opened():
            return arrays.dtype_of(self._find(name)[1].dtype.value).name

    def nbytes(self, name):
        with self._opened():
            _, entry = self._find(name)
            return lib.fsdp_entry_bytes(ctypes.byref(entry))

    def values(self):
        """Everything that is not a tensor, by name: numbers, strings, lists, dicts."""
        with self._opened():
            return {name_of(entry): to_python(entry.value) for entry in self._entries()
                    if entry.kind.value == c.FSDP_ENTRY_VALUE}

    def metadata(self):
        """The texts next to the tensors, as safetensors keeps them: {key: text}."""
        with self._opened() as handle:
            text = lib.fsdp_checkpoint_extra(handle, b"metadata") or lib.fsdp_checkpoint_extra(
                handle, b"carried")
            return json.loads(text) if text else {}

    def missing(self):
        """Names of entries that are incomplete (allow_missing)."""
        with self._opened() as handle:
            size, names = ctypes.c_size_t(), []
            for i in range(lib.fsdp_checkpoint_missing_count(handle)):
                raw = lib.fsdp_checkpoint_missing_at(handle, i, ctypes.byref(size))
                names.append(text_of(raw))
            return names

    def files(self):
        """The files of the checkpoint and their sizes: {name: bytes}."""
        with self._opened() as handle:
            found, out = {}, c.fsdp_checkpoint_file()
            for i in range(self._info.file_count):
                lib.fsdp_checkpoint_file_at(handle, i, ctypes.byref(out))
                found[text_of(out.name)] = out.size
            return found

    def layout(self, name):
        """How a tensor is stored: its mesh and placements, and the boxes of ranks or files."""
        with self._opened():
            index, entry = self._find(name)
            stored, layout, mesh, placements = list(self._stored_boxes(index)), entry.layout, {}, []
            if layout.kind.value != c.FSDP_LAYOUT_BOXES and layout.mesh and not stored:
                for dim in range(lib.fsdp_mesh_ndim(layout.mesh)):
                    name = lib.fsdp_mesh_dim_name(layout.mesh, dim).decode()
                    mesh[name] = lib.fsdp_mesh_dim_size(layout.mesh, dim)
                    placements.append(_placement(layout, dim))
            return Layout(mesh, tuple(placements), tuple(stored or self._rank_boxes(entry)))

    def _rank_boxes(self, entry):
        box = c.fsdp_box()
        for rank in range(max(self.world, 1)):
            boxes = lib.fsdp_layout_box_count(ctypes.byref(entry.layout), entry.ndim, entry.shape, rank)
            for i in range(boxes):
                lib.fsdp_layout_box_at(ctypes.byref(entry.layout), entry.ndim, entry.shape, rank, i,
                                       ctypes.byref(box))
                yield Box(rank, tuple(box.lo[:box.ndim]), tuple(box.len[:box.ndim]))

    def _stored_boxes(self, index):
        box, file, number, names = c.fsdp_box(), ctypes.c_int(), 0, list(self.files())
        while lib.fsdp_checkpoint_stored_box_at(self._handle, index, number, ctypes.byref(box),
                                                ctypes.byref(file)):
            holder = names[file.value] if 0 <= file.value < len(names) else ""
            yield Box(holder, tuple(box.lo[:box.ndim]), tuple(box.len[:box.ndim]))
            number += 1

    # --- tensors ---

    def get_slice(self, name):
        """A tensor that is read when it is indexed: get_slice("w")[10:20, :, 3]."""
        with self._opened():
            index, entry = self._find(name)
            return Slice(self, index, entry)

    def __getitem__(self, name):
        return self.get_slice(name)

    def get_tensor(self, name):
        """Reads a tensor, as an array of the framework."""
        future = self._prefetched.pop(name, None)
        if future is not None:
            return future.result()
        return self.get_slice(name)[...]

    def get_tensors(self, names=None):
        """Reads several tensors, by default all: {name: array}."""
        return {name: self.get_tensor(name) for name in (self.keys() if names is None else names)}

    def prefetch(self, plan, memory=PREFETCH_BYTES):
        """Reads the named tensors in the background, in this order, within `memory` bytes that get_tensor has
        not taken yet. get_tensor of a tensor that is under way waits for it."""
        if self._pool is None:
            self._pool = _Prefetch(self, memory)
        self._pool.add(plan)

    def _read(self, tensor, ranges):
        """Reads elements of a tensor, one range per dim."""
        framework = self._framework = self._framework or arrays.default_framework()
        dtype = tensor._dtype
        if arrays.is_blocks(dtype) and ranges and ranges[-1].step != 1:
            raise UsageError("a quantized tensor has no steps in its last dim; open with dequantize=True",
                             c.FSDP_ERR_USAGE)
        whole = all(r.length == n and r.step == 1 and not r.drops for r, n in zip(ranges, tensor.shape))
        array = self._map(framework, tensor) if whole else None
        if array is None:
            verify = whole if self._verify is None else self._verify
            array = self._read_box(framework, tensor, ranges, verify)
        shape = [r.length for r in ranges if not r.drops]
        if arrays.is_blocks(dtype) and shape and not ranges[-1].drops:
            shape[-1] *= dtype.size
        elif arrays.is_blocks(dtype):
            shape.append(dtype.size)
        array = arrays.reshape(array, shape)
        return array.to(self._device) if self._device != "cpu" else array

    def _map(self, framework, tensor):
        """The tensor as private memory over its file; None if its bytes are not plain and aligned there."""
        found = c.fsdp_file_range()
        with self._opened() as handle:
            if not self._mmap or not lib.fsdp_checkpoint_plain_bytes(handle, tensor._index,
                                                                     ctypes.byref(found)):
                return None
            path = found.path
        if found.offset % min(tensor._dtype.size, 16):
            return None
        with self._idle:
            if path not in self._maps:
                with open(path, "rb") as file:
                    self._maps[path] = map_file(file.fileno(), 0, access=ACCESS_COPY)
            whole = self._maps[path]
        if found.offset + found.size > len(whole):
            return None  # the file has shrunk: reading it says so
        data = memoryview(whole)[found.offset:found.offset + found.size]
        return arrays.over(framework, tensor._dtype, tensor.shape, data)

    def _read_box(self, framework, tensor, ranges, verify):
        """Reads a box with steps: dim by dim, without the elements that a step skips where they are many."""
        stepped = next((dim for dim, r in enumerate(ranges) if abs(r.step) != 1 and r.length > 1), None)
        if stepped is None and all(r.step > 0 or r.length <= 1 for r in ranges):
            return self._read_plain(framework, tensor, _box(ranges), verify)
        if framework == "array":
            raise UsageError("framework='array' reads slices without steps; use numpy or torch",
                             c.FSDP_ERR_USAGE)
        box = _box(ranges)
        if stepped is not None:
            item, size = ranges[stepped], tensor._dtype.size
            gap = (abs(item.step) - 1) * arrays.count(box.len[stepped + 1:box.ndim]) * size
            if gap >= GAP_BYTES or arrays.count(box.len[:box.ndim]) * size > PIECE_BYTES:
                return _concatenate(framework, [self._read_box(framework, tensor, part, verify)
                                                for part in _halves(ranges, stepped)], stepped)
        array = self._read_plain(framework, tensor, box, verify)
        flips = [dim for dim, r in enumerate(ranges) if r.step < 0 and r.length > 1]
        if framework == "torch":
            array = array.flip(flips) if flips else array
            return array[tuple(slice(None, None, abs(r.step)) for r in ranges)]
        return array[tuple(slice(None, None, r.step if r.length > 1 else 1) for r in ranges)]

    def _read_plain(self, framework, tensor, box, verify):
        array = arrays.new(framework, tensor._dtype, tuple(box.len[:box.ndim]))
        check = c.FSDP_CHECK_BLOCKS if verify else c.FSDP_CHECK_OFF
        with self._opened() as handle:
            if lib.fsdp_box_count(ctypes.byref(box)):
                call(lib.fsdp_checkpoint_read, handle, tensor._index, ctypes.byref(box),
                     arrays.address(array), check)
        return array

    # --- for people ---

    def __repr__(self):
        if self._handle is None:
            return f"<closed checkpoint '{self.path}'>"
        return (f"<{self.format} checkpoint '{self.path}': {len(self)} tensors, {_bytes(self.tensor_bytes)}"
                + (f", step {self.step}>" if self.step is not None else ">"))

    def _repr_html_(self, most=200):
        with self._opened():
            from html import escape
            rows, left = [], 0
            for entry in self._entries():
                if entry.kind.value == c.FSDP_ENTRY_VALUE:
                    continue
                if len(rows) == most:
                    left += 1
                    continue
                tensor = entry if entry.kind.value == c.FSDP_ENTRY_TENSOR else lib.fsdp_sd_at(
                    self._sd, entry.target)[0]
                shape = " × ".join(map(str, tensor.shape[:tensor.ndim])) or "scalar"
                size = _bytes(lib.fsdp_entry_bytes(ctypes.byref(tensor)))
                rows.append(
                    f"<tr><td>{escape(name_of(entry))}</td>"
                    f"<td>{arrays.dtype_of(tensor.dtype.value).name}</td>"
                    f"<td>{shape}</td><td>{size}</td></tr>")
            more = f"<caption style='caption-side: bottom'>and {left} more</caption>" if left else ""
            return (
                f"<p>{escape(repr(self)[1:-1])}</p>"
                f"<table><thead><tr><th>tensor</th><th>dtype</th><th>shape</th>"
                f"<th>bytes</th></tr></thead><tbody>{''.join(rows)}</tbody>{more}</table>")


class _Prefetch:
    """Reads tensors ahead in threads. `memory` bounds what is read or under way and was not taken."""

    def __init__(self, checkpoint, memory):
        self._checkpoint, self._memory, self._used = checkpoint, memory, 0
        self._plan, self._lock = deque(), threading.Lock()
        self._threads = ThreadPoolExecutor(PREFETCH_THREADS, thread_name_prefix="fsdp-prefetch")

    def add(self, plan):
        with self._lock:
            self._plan.extend(plan)
        self._advance()

    def _advance(self):
        with self._lock:
            while self._plan and self._used < self._memory:
                name = self._plan.popleft()
                size = self._checkpoint.nbytes(name)
                self._used += size
                future = self._threads.submit(lambda name=name: self._checkpoint.get_slice(name)[...])
                self._checkpoint._prefetched[name] = _Prefetched(self, future, size)

    def taken(self, size):
        with self._lock:
            self._used -= size
        self._advance()

    def stop(self):
        with self._lock:
            self._plan.clear()
        self._checkpoint._prefetched.clear()
        self._threads.shutdown(wait=True)


class _Prefetched(NamedTuple):
    reader: _Prefetch
    future: object
    size: int

    def result(self):
        try:
            return self.future.result()
        finally:
            self.reader.taken(self.size)


def _concatenate(framework, parts, dim):
    if framework == "torch":
        import torch
        return torch.cat(parts, dim)
    import numpy
    return numpy.concatenate(parts, dim)


def _placement(layout, dim):
    if layout.kind.value == c.FSDP_LAYOUT_FLAT:
        return "flat"
    placement = layout.placement[dim]
    kind = placement.kind.value
    if kind == c.FSDP_SHARD:
        return f"shard({placement.dim})"
    if kind == c.FSDP_STRIDED_SHARD:
        return f"strided_shard({placement.dim}, {placement.split})"
    return "replicate"


def _bytes(size):
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
