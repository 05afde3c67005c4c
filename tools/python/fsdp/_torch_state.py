"""States of PyTorch's trainers as state dicts of the library.

A rank declares the entries of its state: names and nesting, dtypes, shapes, layouts, values, and the memory
of its shards. The library wants the same declaration of every rank. Ranks that hold different names (stages
of a pipeline), or shards that no mesh describes, exchange their declarations first, and each merges them."""

import base64
import ctypes
import hashlib
import json
from array import array
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _arrays as arrays
from . import _bindings as c
from ._library import UsageError, call, lib
from ._options import Mesh
from ._tasks import is_array
from ._values import Class, Opaque, fill, raw_of

TENSOR, VALUE, ALIAS = range(3)
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
ALIGNMENT, LARGE_BYTES = 64, 1 << 20
SIMPLE = {str, int, float, bool, type(None)}


def refuse(name, why):
    return UsageError(f"'{name}' {why}", c.FSDP_ERR_USAGE)


# --- nesting --------------------------------------------------------------------------------------

def flatten(state):
    """The tensors and values of nested dicts, lists and tuples: [(name, path, container, key, item), ...],
    with the names that torch.distributed.checkpoint gives them. A list without tensors and dicts is a value,
    and so are a tuple without tensors and an empty dict."""
    if not isinstance(state, Mapping):
        raise UsageError(f"a state is a dict of tensors and values, not a {type(state).__name__}",
                         c.FSDP_ERR_USAGE)
    found = []
    _flatten(state, "", (), found)
    return found


def _flatten(container, prefix, path, found):
    if isinstance(container, Mapping):
        pairs, sign, number = container.items(), 1, c.FSDP_PATH_NUMBER
    else:
        pairs, sign = enumerate(container), -1
        number = c.FSDP_PATH_TUPLE if isinstance(container, tuple) else 0
    for key, item in pairs:
        flags = 0
        if type(key) is not str:
            if isinstance(key, bool) or not isinstance(key, (int, str)):
                raise refuse(prefix, f"has the key {key!r}, which is neither a string nor an integer")
            flags = 0 if isinstance(key, str) else number
        part = str(key)
        size = len(part) if part.isascii() else len(raw_of(part))
        name, here = prefix + part, path + (sign * (size | flags),)
        if isinstance(item, torch.Tensor) or not _is_nested(item):
            found.append((name, here, container, key, item))
        else:
            _flatten(item, name + ".", here, found)


def _is_nested(item):
    if isinstance(item, Mapping):
        return bool(item)
    if isinstance(item, (list, tuple)):
        inside = (torch.Tensor, Mapping) if isinstance(item, list) else torch.Tensor
        return any(type(inner) not in SIMPLE and (isinstance(inner, inside) or is_array(inner)
                   or isinstance(inner, (list, tuple)) and _is_nested(inner)) for inner in item)
    return False


# --- values, as ranks exchange them ---------------------------------------------------------------

def encode(item):
    """A value as JSON's types; raises UsageError for what a checkpoint cannot hold."""
    if hasattr(item, "item") and not isinstance(item, Mapping):
        item = item.item()
    kind = type(item)
    if item is None or kind in (bool, int, float, str):
        return item
    if isinstance(item, Mapping):
        return ["dict", [[encode(key), encode(inner)] for key, inner in item.items()]]
    if isinstance(item, (list, tuple)):
        return ["tuple" if isinstance(item, tuple) else "list", list(map(encode, item))]
    if isinstance(item, (bytes, bytearray)):
        return ["opaque" if kind is Opaque else "bytes", base64.b64encode(item).decode()]
    if kind is complex:
        return ["complex", [item.real, item.imag]]
    if kind is Class:
        return ["class", str(item)]
    raise UsageError(
        f"is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; convert it to numbers, "
        "strings, lists or dicts, or leave it out", c.FSDP_ERR_USAGE)


def decode(item):
    if not isinstance(item, list):
        return item
    kind, of = item
    if kind == "dict":
        return {decode(key): decode(inner) for key, inner in of}
    if kind in ("list", "tuple"):
        return (tuple if kind == "tuple" else list)(map(decode, of))
    if kind in ("bytes", "opaque"):
        raw = base64.b64decode(of)
        return Opaque(raw) if kind == "opaque" else raw
    return complex(*of) if kind == "complex" else Class(of)


# --- layouts --------------------------------------------------------------------------------------

class Layouts:
    """The mesh layouts of a group's tensors. A row is a layout as JSON's types: [[[name of the dim, size],
    ...], ranks or None, [[kind, dim, split] per mesh dim]]; its number is its place. Row 0 is replicated
    over all ranks of the group."""

    def __init__(self, rank, size, position=None):
        self.rank, self._position = rank, position
        self.rows, self.structs, self._numbers, self._meshes, self._boxes = [], [], {}, {}, {}
        self._seen = {}
        self.number([[["ranks", size]], None, [[c.FSDP_REPLICATE, 0, 0]]])

    def number(self, row):
        key = json.dumps(row)
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.structs.append(self._struct(*row))
            self.rows.append(row)
        return self._numbers[key]

    def _struct(self, dims, ranks, placements):
        key = json.dumps([dims, ranks])
        mesh = self._meshes.get(key) or self._meshes.setdefault(key, Mesh(dict(map(tuple, dims)), ranks))
        layout = c.fsdp_layout(mesh=mesh.handle)
        for at, (kind, dim, split) in zip(layout.placement, placements):
            at.kind.value, at.dim, at.split = kind, dim, split
        return layout

    def of_dtensor(self, name, spec):
        """The number of a DTensor's layout; None if only boxes describe it."""
        key = id(spec.mesh), spec.placements
        if key not in self._seen:
            self._seen[key] = self._find(name, spec.mesh, spec.placements), spec.mesh  # keeps the mesh's id
        return self._seen[key][0]

    def _find(self, name, mesh, placements):
        row = self._row(name, mesh, placements)
        return None if row is None else self.number(row)

    def _row(self, name, mesh, placements):
        ranks = mesh.mesh.flatten().tolist()
        if self._position is not None:
            ranks = [self._position.get(rank) for rank in ranks]
        cuts = []
        for placement in placements:
            if placement.is_partial():
                raise refuse(name, "is a DTensor that is not reduced yet (Partial); redistribute it first")
            split = getattr(placement, "split_factor", 0)
            cuts.append([c.FSDP_REPLICATE, 0, 0] if placement.is_replicate() else
                        [c.FSDP_STRIDED_SHARD if split else c.FSDP_SHARD, placement.dim, split])
        if None in ranks or mesh.ndim > c.FSDP_MAX_MESH_DIMS:
            return None
        names = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
        return [[[dim, size] for dim, size in zip(names, mesh.mesh.shape)],
                None if ranks == list(range(len(ranks))) else ranks, cuts]

    def box(self, number, shape, rank):
        """The box of a rank under a mesh layout, ([lo, ...], [length, ...]); None if it is not in the
        mesh."""
        key = number, shape, rank
        if key not in self._boxes:
            box, lengths = c.fsdp_box(), (ctypes.c_int64 * len(shape))(*shape)
            held = lib.fsdp_layout_mesh_box(ctypes.byref(self.structs[number]), len(shape), lengths, rank,
                                            ctypes.byref(box))
            self._boxes[key] = (box.lo[:box.ndim], box.len[:box.ndim]) if held else None
        return self._boxes[key]

    def is_strided(self, number):
        return any(kind == c.FSDP_STRIDED_SHARD for kind, _, _ in self.rows[number][2])

    def has_all_of(self, number, holders):
        """True if the holders of a tensor are all ranks of its mesh."""
        dims, ranks, _ = self.rows[number]
        return set(ranks or range(arrays.count(length for _, length in dims))) <= holders


def box_layout(boxes):
    """The C layout of [(rank, lo, lengths), ...], sorted by rank."""
    held = (c.fsdp_rank_box * len(boxes))()
    for at, (rank, lo, lengths) in zip(held, boxes):
        at.rank, at.box.ndim = rank, len(lo)
        for dim, (first, length) in enumerate(zip(lo, lengths)):
            at.box.lo[dim], at.box.len[dim] = first, length
    layout = c.fsdp_layout(boxes=held, box_count=len(boxes))
    layout.kind.value = c.FSDP_LAYOUT_BOXES
    return layout


# --- memory ---------------------------------------------------------------------------------------

@lru_cache(maxsize=None)
def dtype_number(dtype):
    return arrays.dtype_named(str(dtype).replace("torch.", "")).number


class Memory:
    """Addresses of tensors: their own where they are row-major and in this computer's memory, else those of
    copies."""

    def __init__(self, is_read=True):
        self._is_read, self.copies = is_read, []

    def of(self, tensor):
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
            return tensor.data_ptr()
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.copies.append(([tensor], [copy]))
        if self._is_read:
            copy.copy_(tensor)
        return copy.data_ptr()

    def of_shards(self, tensors):
        """The address of several shards, one after the other."""
        if len(tensors) == 1:
            return self.of(tensors[0])
        whole = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)
        parts = [part.view(tensor.shape) for part, tensor in
                 zip(whole.split([tensor.numel() for tensor in tensors]), tensors)]
        self.copies.append((tensors, parts))
        if self._is_read:
            for part, tensor in zip(parts, tensors):
                part.copy_(tensor)
        return whole.data_ptr()

    def write_back(self):
        with torch.no_grad():
            for tensors, copies in self.copies:
                for tensor, copy in zip(tensors, copies):
                    tensor.copy_(copy)


class Pool:
    """Host memory that is kept between saves; pinned for copies of a GPU's tensors."""

    def __init__(self):
        self._memory, self._is_pinned = torch.empty(0, dtype=torch.uint8), False

    def of(self, size, pinned):
        if size > self._memory.numel() or pinned and not self._is_pinned:
            self._memory, self._is_pinned = torch.empty(0, dtype=torch.uint8), pinned
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).zero_()
        return self._memory


class PoolMemory(Memory):
    """Copies of all tensors in a pool. Addresses count from its begin until it is filled."""

    def __init__(self, pool):
        super().__init__()
        self._pool, self._moves, self._size, self._pinned = pool, [], 0, False

    def of(self, tensor):
        at, size = self._size, tensor.numel() * tensor.element_size()
        self._moves.append((tensor, at, size))
        self._size += -(-size // ALIGNMENT) * ALIGNMENT
        self._pinned |= tensor.is_cuda
        return at

    def of_shards(self, tensors):
        at = end = self._size
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            self._moves.append((tensor, end, size))
            end += size
        self._pinned |= tensors[0].is_cuda
        self._size = -(-end // ALIGNMENT) * ALIGNMENT
        return at

    def fill(self):
        """Copies the tensors, and returns the address of the first."""
        memory = self._pool.of(self._size, self._pinned)
        base = memory.data_ptr()
        with torch.no_grad():
            for tensor, at, size in self._moves:
                if size < LARGE_BYTES and tensor.is_cpu and tensor.is_contiguous() and not (
                        tensor.is_neg() or tensor.is_conj()):
                    ctypes.memmove(base + at, tensor.data_ptr(), size)
                else:
                    memory[at:at + size].view(tensor.dtype).view(tensor.shape).copy_(
                        tensor, non_blocking=tensor.is_cuda)
        if self._pinned:
            torch.cuda.synchronize()
        self._moves = []
        return base


def plain(name, tensor):
    """The tensor as a strided one without a subclass's rules."""
    if hasattr(tensor, "trigger_wait"):  # of a collective that may not have ended
        tensor = tensor.trigger_wait()
    if is_traceable_wrapper_subclass(tensor) or tensor.is_quantized:
        raise refuse(name, f"is a {type(tensor).__name__}, which is not plain elements; dequantize it")
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise refuse(name, f"has no memory of plain elements: it is {tensor.layout} on '{tensor.device}'")
    return tensor.detach()


# --- declarations ---------------------------------------------------------------------------------

class Declaration:
    """The entries of a state as one rank declares them, in order: (name, path, TENSOR, dtype, shape, number
    of the layout or None, boxes or None), (name, path, VALUE, encoded) or (name, path, ALIAS, target)."""

    def __init__(self, layouts, memory=None):
        self.layouts, self.entries, self.addresses = layouts, [], {}
        self.memory = memory or Memory()
        self._first = {}

    def add(self, name, path, item):
        if isinstance(item, torch.Tensor):
            self._add_tensor(name, path, item)
        elif is_array(item):
            import numpy
            if item.dtype.hasobject:
                raise refuse(name, "is an array of Python's objects")
            if not (item.flags.writeable and item.flags.c_contiguous and item.dtype.isnative):
                item = numpy.ascontiguousarray(item.astype(item.dtype.newbyteorder("="))).reshape(item.shape)
            self._add_tensor(name, path, torch.from_numpy(item))
        else:
            try:
                self.entries.append((name, path, VALUE, encode(item)))
            except UsageError as error:
                raise refuse(name, error) from None

    def add_state(self, state):
        """Declares all of a state. Returns its leaves (flatten)."""
        leaves = flatten(state)
        for name, path, _, _, item in leaves:
            self.add(name, path, item)
        return leaves

    def _add_tensor(self, name, path, item):
        kind = type(item)
        if kind is DTensor:
            local, shape = item._local_tensor, item._spec.shape
            number = self.layouts.of_dtensor(name, item._spec)
            boxes = None if number is not None and self._fits(number, item) else self._boxes_of(item)
        elif isinstance(item, ShardedTensor):
            return self.add_shards(name, path, tuple(item.size()), item.metadata().tensor_properties.dtype,
                                    list(_shards(item)))
        elif hasattr(item, "global_shape"):  # DCP's CheckpointableTensor
            whole, item = item, plain(name, item)
            shards = [(lo, item[tuple(map(slice, at, map(sum, zip(at, size))))]) for lo, at, size in
                      zip(whole.global_offsets, whole.local_offsets, whole.local_sizes)]
            return self.add_shards(name, path, tuple(whole.global_shape), item.dtype, shards)
        else:
            local, number, shape, boxes = item, 0, item.shape, None
        if type(local) not in PLAIN or local.layout is not torch.strided or local.is_meta:
            local = plain(name, local)
        number = None if boxes is not None else number
        key = local.data_ptr() or local.untyped_storage()._cdata
        first = self._first.get(key)
        if first and first[1:] == (local.dtype, local.stride(), shape, number) and boxes is None:
            self.entries.append((name, path, ALIAS, first[0]))
            return
        self._first.setdefault(key, (name, local.dtype, local.stride(), shape, number))
        self._append(name, path, local.dtype, shape, number, boxes)
        self.addresses[name] = self.memory.of(local)

    def _append(self, name, path, dtype, shape, number, boxes):
        try:
            self.entries.append((name, path, TENSOR, dtype_number(dtype), shape, number, boxes))
        except UsageError:
            raise refuse(name, f"has the dtype {dtype}, which a checkpoint cannot hold") from None

    def add_local(self, name, path, whole, local):
        """Declares a DTensor whose shard is `local`, if a mesh layout describes it. Returns false if none
        does."""
        number = self.layouts.of_dtensor(name, whole._spec)
        if number is None or local.shape != whole._local_tensor.shape or not self._fits(number, whole):
            return False
        self._append(name, path, local.dtype, whole._spec.shape, number, None)
        self.addresses[name] = self.memory.of(plain(name, local))
        return True

    def add_shards(self, name, path, shape, dtype, shards):
        """Declares a tensor of which this rank has the shards [(offset, tensor), ...], maybe none."""
        shards = [(lo, tensor) for lo, tensor in shards if tensor.numel()]
        tensors = [plain(name, tensor) for _, tensor in shards]
        self._append(name, path, dtype, shape, None,
                     [(list(lo), list(tensor.shape)) for (lo, _), tensor in zip(shards, tensors)])
        if tensors:
            self.addresses[name] = self.memory.of_shards(tensors)

    def _fits(self, number, item):
        """True if a rank's shard is the one that its layout gives it. The library knows the strided shards
        that FSDP makes of TP's, and no others."""
        box = self.layouts.box(number, item._spec.shape, self.layouts.rank)
        if box is None or list(item._local_tensor.shape) != box[1]:
            return box is None and item.device_mesh.get_coordinate() is None
        return not self.layouts.is_strided(number) or 0 in box[1] or self._boxes_of(item)[0][0] == box[0]

    @staticmethod
    def _boxes_of(item):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
        if item.device_mesh.get_coordinate() is None:
            return []
        lengths, lo = compute_local_shape_and_global_offset(item.shape, item.device_mesh, item.placements)
        return [(list(lo), list(lengths))]

    # --- one declaration of all ranks ---

    def digest(self):
        """Sixteen bytes that are equal on ranks whose declarations are, and whether they need to exchange
        them anyway."""
        found = hashlib.blake2b(json.dumps(self.layouts.rows).encode(), digest_size=16)
        boxes = False
        for kind, entries in self.runs():
            if kind != TENSOR:
                found.update(json.dumps(entries).encode())
                continue
            for part in Packed(entries).described():
                found.update(part)
            shards = [entry[6] for entry in entries if entry[6] is not None]
            if shards:
                boxes = True
                found.update(json.dumps(shards).encode())
        return found.digest() + bytes([boxes])

    def runs(self):
        """(kind, entries) of neighbours of one kind."""
        at, entries = 0, self.entries
        while at < len(entries):
            end, kind = at + 1, entries[at][2]
            while end < len(entries) and entries[end][2] == kind:
                end += 1
            yield kind, entries[at:end]
            at = end

    def agree(self, control):
        """The declaration of all ranks. Collective."""
        digests = control.allgather(self.digest())
        if len(set(digests)) == 1 and not digests[0][-1]:
            return self
        parts = []
        for digest in dict.fromkeys(digests):
            ranks = [rank for rank, other in enumerate(digests) if other == digest]
            mine = b"" if ranks[0] != control.rank else json.dumps([self.layouts.rows, self.entries]).encode()
            parts.append((ranks, *json.loads(control.broadcast(mine, ranks[0]))))
        merged = Declaration(self.layouts, self.memory)
        merged.entries, merged.addresses = _merge(parts, self.layouts), dict(self.addresses)
        for name, _, kind, *of in self.entries:
            if kind == ALIAS:
                merged.addresses[name] = self.addresses[of[0]]
        return merged


def _shards(tensor, base=None):
    """(offset, local tensor) of the local shards of a ShardedTensor, which may be one of ShardedTensors."""
    for shard in tensor.local_shards():
        lo = shard.metadata.shard_offsets
        lo = [a + b for a, b in zip(lo, base)] if base else list(lo)
        if isinstance(shard.tensor, ShardedTensor):
            yield from _shards(shard.tensor, lo)
        elif shard.tensor.numel():
            yield lo, shard.tensor


KINDS = {TENSOR: "a tensor", VALUE: "a value", ALIAS: "another name of a tensor"}


def _merge(parts, layouts):
    """One list of entries of those of all ranks, [(ranks, rows of layouts, entries), ...]. Where ranks
    differ in a value, that of the lowest rank is taken."""
    found = {}
    for ranks, rows, entries in parts:
        numbers, tensors = [layouts.number(row) for row in rows], {}
        for entry in entries:
            if entry[2] == TENSOR:
                tensors[entry[0]] = entry
                entry[5] = None if entry[5] is None else numbers[entry[5]]
            found.setdefault(entry[0], []).append((ranks, entry, tensors))
    return [_merge_entry(name, holders, layouts) for name, holders in found.items()]


def _merge_entry(name, holders, layouts):
    if not all(entry[2:4] == holders[0][1][2:4] for _, entry, _ in holders):  # some ranks may see no tie
        holders = [(ranks, tensors[entry[3]] if entry[2] == ALIAS else entry, tensors)
                   for ranks, entry, tensors in holders]
    ranks, first, _ = holders[0]
    for others, entry, _ in holders:
        if entry[2] != first[2] or entry[2] == TENSOR and entry[3:5] != first[3:5]:
            raise refuse(name, f"differs between ranks: {_describe(first)} on rank {ranks[0]}, "
                         f"{_describe(entry)} on rank {others[0]}")
    path = tuple(first[1])
    if first[2] != TENSOR:
        return name, path, first[2], first[3]
    shape, number, held = tuple(first[4]), first[5], {rank for ranks, _, _ in holders for rank in ranks}
    if number is not None and all(entry[5] == number for _, entry, _ in holders) and layouts.has_all_of(
            number, held):
        return name, path, TENSOR, first[3], shape, number, None
    boxes = []
    for ranks, entry, _ in holders:
        for rank in ranks:
            own = entry[6] if entry[5] is None else [layouts.box(entry[5], shape, rank)]
            boxes += [(rank, tuple(box[0]), tuple(box[1])) for box in own if box and 0 not in box[1]]
    return name, path, TENSOR, first[3], shape, None, sorted(boxes, key=lambda box: box[0])


def _describe(entry):
    if entry[2] != TENSOR:
        return KINDS[entry[2]]
    return f"{arrays.dtype_of(entry[3]).name} of {' x '.join(map(str, entry[4])) or 'one element'}"


# --- the library's state dict ---------------------------------------------------------------------

class Packed:
    """Tensors as the arrays of an fsdp_tensors."""

    def __init__(self, entries):
        names, paths, _, dtypes, shapes, numbers, _ = zip(*entries)
        raws = list(map(raw_of, names))
        self.names, self.sizes = b"".join(raws), array("i", map(len, raws))
        self.paths, self.counts = array("i", chain.from_iterable(paths)), array("i", map(len, paths))
        self.dtypes, self.ndims = array("i", dtypes), array("i", map(len, shapes))
        self.shapes = array("q", chain.from_iterable(shapes))
        self.numbers = array("i", [-1 if number is None else number for number in numbers])

    def described(self):
        return (self.names, self.sizes, self.paths, self.counts, self.dtypes, self.ndims, self.shapes,
                self.numbers)

    def add(self, handle, layouts, data):
        """Adds the tensors to a state dict."""
        tensors = c.fsdp_tensors(count=len(self.sizes), names=self.names, layouts=layouts,
                                 layout_count=len(layouts))
        for member, kept in (("name_sizes", self.sizes), ("paths", self.paths), ("path_counts", self.counts),
                             ("dtypes", self.dtypes), ("ndims", self.ndims), ("shapes", self.shapes),
                             ("layout_numbers", self.numbers), ("data", data)):
            at = ctypes.c_void_p.from_buffer(tensors, getattr(c.fsdp_tensors, member).offset)
            at.value = kept.buffer_info()[0]
        call(lib.fsdp_sd_add_tensors, handle, ctypes.byref(tensors))


class StateDict:
    """The library's state dict of a declaration. Its tensors' memory belongs to the state."""

    def __init__(self, declaration):
        self.handle, self.declaration = ctypes.c_void_p(), declaration
        call(lib.fsdp_sd_create, ctypes.byref(self.handle))
        for kind, entries in declaration.runs():
            if kind == TENSOR:
                self._add_tensors(entries)
                continue
            for entry in entries:
                self._add(*entry)

    def __del__(self):
        if self.handle:
            lib.fsdp_sd_free(self.handle)

    def _add_tensors(self, entries):
        declared, packed = self.declaration, Packed(entries)
        structs = list(declared.layouts.structs)
        for i, number in enumerate(packed.numbers):
            if number < 0:
                packed.numbers[i] = len(structs)
                structs.append(box_layout(entries[i][6]))
        data = array("Q", [declared.addresses.get(entry[0]) or 0 for entry in entries])
        packed.add(self.handle, (c.fsdp_layout * len(structs))(*structs), data)

    def _add(self, name, path, kind, of):
        raw = raw_of(name)
        if kind == ALIAS:
            target = raw_of(of)
            call(lib.fsdp_sd_add_alias, self.handle, raw, len(raw), target, len(target))
        else:
            value = c.fsdp_value()
            try:
                fill(value, decode(of))
                call(lib.fsdp_sd_add_value, self.handle, raw, len(raw), ctypes.byref(value))
            finally:
                lib.fsdp_value_release(ctypes.byref(value))
        index = lib.fsdp_sd_count(self.handle) - 1
        call(lib.fsdp_sd_set_path, self.handle, index, (ctypes.c_int32 * len(path))(*path), len(path))
