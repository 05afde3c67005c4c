"""Rank files as no fixture has them: of older PyTorch, and hostile ones.

usage: rank_files.py BIN
The pickles are made of stand-ins for the classes of torch, which are written by name.
"""

import hashlib
import json
import math
import pickle
import struct
import sys
import tempfile
import time
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

from tools import list_path, problems
from tools import run as run_tool

DAMAGED, REFUSED, LIMIT, USAGE = 4, 5, 9, 2
SECONDS = 30


def stand_in(module, name, base=object):
    if module not in sys.modules:
        sys.modules[module] = types.ModuleType(module)
    made = type(name, (base,), {"__module__": module, "__qualname__": name})
    setattr(sys.modules[module], name, made)
    return made


class NamedTuple(tuple):
    """Its items are the arguments that make it again."""

    def __getnewargs__(self):
        return tuple(self)


def function(module, name):
    if module not in sys.modules:
        sys.modules[module] = types.ModuleType(module)
    called = types.FunctionType((lambda: None).__code__, {}, name)
    called.__module__, called.__qualname__ = module, name
    setattr(sys.modules[module], name, called)
    return called


rebuild_tensor = function("torch._utils", "_rebuild_tensor_v2")
rebuild_wrapper = function("torch._utils", "_rebuild_wrapper_subclass")
from_type = function("torch._tensor", "_rebuild_from_type_v2")
FloatStorage, IntStorage = stand_in("torch", "FloatStorage"), stand_in("torch", "IntStorage")
float32, Size = stand_in("torch", "float32"), stand_in("torch", "Size", tuple)
DTensor = stand_in("torch.distributed._tensor.api", "DTensor")
Spec = stand_in("torch.distributed._tensor.placement_types", "DTensorSpec")
Shard = stand_in("torch.distributed._tensor.placement_types", "Shard")
Strided = stand_in("torch.distributed._tensor.placement_types", "_StridedShard")
Replicate = stand_in("torch.distributed._tensor.placement_types", "Replicate")
Partial = stand_in("torch.distributed._tensor.placement_types", "_Partial")
Order = stand_in("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry", NamedTuple)
Mesh = stand_in("torch.distributed.device_mesh", "DeviceMesh")
MeshLayout = stand_in("torch.distributed._mesh_layout", "_MeshLayout")
ShardedTensor = stand_in("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
LocalShard = stand_in("torch.distributed._shard.sharded_tensor.shard", "Shard")
ShardMetadata = stand_in("torch.distributed._shard.metadata", "ShardMetadata")
TensorMetadata = stand_in("torch.distributed._shard.sharded_tensor.metadata", "ShardedTensorMetadata")
FlatMetadata = stand_in("torch.distributed.fsdp._flat_param", "FlatParamShardMetadata", NamedTuple)


def new(cls, *args, **state):
    made = cls.__new__(cls, *args)
    made.__dict__.update(state)
    return made


class Storage:
    def __init__(self, kind, data):
        self.kind, self.data = kind, data


class Call:
    """A function of torch, called when it is read."""

    def __init__(self, called, *args):
        self.called, self.args = called, args

    def __reduce__(self):
        return self.called, self.args


def row_major(shape):
    strides, stride = [], 1
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= max(size, 1)
    return tuple(strides)


def tensor(values, shape=None, kind="f", strides=None):
    shape = (len(values),) if shape is None else shape
    data = struct.pack(f"<{len(values)}{kind}", *values)
    storage = Storage(FloatStorage if kind == "f" else IntStorage, data)
    return Call(rebuild_tensor, storage, 0, shape, strides or row_major(shape), False, OrderedDict())


def old_mesh(ranks, shape, **more):
    return new(Mesh, device_type="cpu", mesh=tensor(ranks, shape, "i"), mesh_dim_names=None, **more)


def layout_mesh(ranks, sizes, strides, **more):
    layout = new(MeshLayout, shape=sizes, stride=strides)
    return new(Mesh, _layout=layout, _rank_map=tensor(ranks, kind="i"), **more)


def dtensor(shape, mesh, placements, local, **spec):
    state = {"_local_tensor": local, "_spec": new(Spec, mesh=mesh, placements=placements, **spec)}
    args = (DTensor, float32, shape, row_major(shape), 0, None, "cpu", False)
    return Call(from_type, rebuild_wrapper, DTensor, args, state)


def shard_metadata(lo, size):
    return new(ShardMetadata, shard_offsets=lo, shard_sizes=size)


def sharded(shape, boxes, local):
    shards = [new(LocalShard, tensor=t, metadata=shard_metadata(*box)) for box, t in local]
    listed = [shard_metadata(*box) for box in boxes]
    metadata = new(TensorMetadata, shards_metadata=listed, size=Call(Size, shape))
    args = (ShardedTensor, float32, shape, row_major(shape), 0, None, "cpu", False)
    return Call(from_type, rebuild_wrapper, ShardedTensor, args, (shards, metadata, None, None, False))


class Pickler(pickle._Pickler):
    """Writes names of stand-ins as if they were torch's."""

    def __init__(self, file):
        super().__init__(file, 2)
        self.storages = []

    def persistent_id(self, value):
        if not isinstance(value, Storage):
            return None
        if value not in self.storages:
            self.storages.append(value)
        return "storage", value.kind, str(self.storages.index(value)), "cpu", len(value.data) // 4


def write(path, state, byteorder="little"):
    with tempfile.TemporaryFile() as file:
        pickler = Pickler(file)
        pickler.dump(state)
        file.seek(0)
        data = file.read()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", byteorder)
        for number, storage in enumerate(pickler.storages):
            archive.writestr(f"archive/data/{number}", storage.data)
        archive.writestr("archive/version", "3\n")


def run(states, name="rank_{r}.pt", pattern=None, byteorders={}):
    with tempfile.TemporaryDirectory() as folder:
        ranks = states.items() if isinstance(states, dict) else enumerate(states)
        for rank, state in ranks:
            write(Path(folder) / name.replace("{r}", str(rank)), state, byteorders.get(rank, "little"))
        began = time.monotonic()
        source = f"{folder}/{pattern}" if pattern else folder
        ran = list_path(source)
        return ran, time.monotonic() - began


def digest(values):
    return hashlib.sha256(struct.pack(f"<{len(values)}f", *values)).hexdigest()


def holds(what, states, tensors, values=None, **more):
    ran, _ = run(states, **more)
    if ran.returncode != 0:
        problems.append(f"{what}: status {ran.returncode}: {ran.stderr.strip()}")
        return
    told = json.loads(ran.stdout)
    found = {name: (tuple(one["shape"]), one["sha256"]) for name, one in told["tensors"].items()}
    wanted = {name: (shape, digest(elements)) for name, (shape, elements) in tensors.items()}
    if found != wanted or told["values"] != (values or {}):
        problems.append(f"{what}: {ran.stdout}")


def fails(what, status, words, states, **more):
    ran, seconds = run(states, **more)
    if ran.returncode != status or words not in ran.stderr or seconds > SECONDS:
        problems.append(f"{what}: status {ran.returncode}, not {status} with '{words}': {ran.stderr.strip()}")


def rows(first, count):
    return [float(n) for n in range(first, first + count)]


def half(rank, mesh, **spec):
    """Five elements on two ranks."""
    return dtensor((5,), mesh, (new(Shard, dim=0),), tensor(rows(3 * rank, 3 - rank)), **spec)


def meshes():
    whole = {"x": ((5,), rows(0, 5))}
    holds("a mesh of ranks", [{"x": half(r, old_mesh([0, 1], (2,)))} for r in range(2)], whole)
    holds("a mesh that counts down", [{"x": half(1 - r, old_mesh([1, 0], (2,)))} for r in range(2)], whole)
    holds("a layout of 2.10", [{"x": half(r, layout_mesh([0, 1], (2,), (1,)))} for r in range(2)], whole)
    holds("a number as layout", [{"x": half(r, layout_mesh([0, 1], 2, 1))} for r in range(2)], whole)
    column = [{"x": half(r // 2, layout_mesh([0, 1, 2, 3], (2,), (2,)))} for r in range(4)]
    holds("columns of a mesh", column, whole)
    nested = [{"x": half(r // 2, layout_mesh([0, 1, 2, 3], ((2, 1),), ((2, 1),)))} for r in range(4)]
    holds("nested sizes", nested, whole)
    fails("another coordinate", DAMAGED, "is not at the coordinate",
          [{"x": half(r, old_mesh([0, 1], (2,), _coordinate_on_dim=[0]))} for r in range(2)])
    fails("another rank", DAMAGED, "the contents of rank",
          [{"x": half(r, old_mesh([0, 1], (2,), _rank=0))} for r in range(2)])
    fails("not in the mesh", DAMAGED, "without this rank",
          [{"x": half(r, old_mesh([0, 2], (2,)))} for r in range(2)])
    fails("overlapping strides", DAMAGED, "overlap",
          [{"x": half(r, layout_mesh([0, 1, 2], (2, 2), (1, 1)))} for r in range(2)])
    fails("beyond the list", DAMAGED, "list of ranks",
          [{"x": half(r, layout_mesh([0, 1], (4,), (1,)))} for r in range(2)])
    fails("a large mesh", DAMAGED, "impossible sizes",
          [{"x": half(r, layout_mesh([0, 1], (1 << 60,), (1,)))} for r in range(2)])
    fails("negative ranks", DAMAGED, "an impossible rank",
          [{"x": half(r, old_mesh([r, -7], (2,)))} for r in range(2)])
    fails("no mesh", DAMAGED, "no list of ranks", [{"x": half(r, None)} for r in range(2)])
    fails("17 dims", LIMIT, "dims", [{"x": half(0, old_mesh([0], (1,) * 17))}])


def placements():
    mesh = old_mesh([0, 1], (2,))
    local = tensor(rows(0, 4))

    def one(placement, **spec):
        return [{"x": dtensor((4,), old_mesh([0, 1], (2,)), placement, local, **spec)} for _ in range(2)]

    holds("replicas", one((new(Replicate),)), {"x": ((4,), rows(0, 4))})
    fails("partial", REFUSED, "Partial", one((new(Partial, reduce_op="sum"),)))
    fails("another dim", DAMAGED, "cuts dim 7", one((new(Shard, dim=7),)))
    fails("a negative dim", DAMAGED, "cuts dim -1", one((new(Shard, dim=-1),)))
    fails("no dim", DAMAGED, "cuts dim", one((new(Shard),)))
    fails("too many placements", DAMAGED, "one placement per", one((new(Replicate),) * 2))
    fails("an unknown placement", REFUSED, "is unknown", one((new(Mesh),)))
    fails("another shape", DAMAGED, "whose shape does not fit", one((new(Shard, dim=0),)))
    fails("no split factor", DAMAGED, "split factor", one((new(Strided, dim=0),)))
    fails("a split factor of 0", DAMAGED, "split factor", one((new(Strided, dim=0, split_factor=0),)))
    fails("a huge split factor", DAMAGED, "whose shape does not fit",
          one((new(Strided, dim=0, split_factor=1 << 62),)))
    nothing = (new(Order, (0, (0,))),)
    fails("an order of nothing", DAMAGED, "shard order", one((new(Replicate),), shard_order=nothing))
    fails("an order without all", DAMAGED, "leaves out", one((new(Shard, dim=0),), shard_order=()))
    split = (new(Strided, dim=0, split_factor=1 << 39),)
    many = dtensor((1 << 40,), mesh, split, tensor([0.0], (1 << 39,), strides=(0,)))
    fails("many runs", DAMAGED, "whose shape does not fit", [{"x": many}, {"x": many}])

    square = [[0, 1], [2, 3]]
    for first in (0, 1):  # the mesh dim that cuts first
        states = []
        for rank in range(4):
            at = [rank // 2, rank % 2]
            lo = 4 * at[first] + 2 * at[1 - first]
            order = (new(Order, (0, (first, 1 - first))),)
            states.append({"x": dtensor((8,), old_mesh(sum(square, []), (2, 2)), (new(Shard, dim=0),) * 2,
                                        tensor(rows(lo, 2)), shard_order=order)})
        holds(f"mesh dim {first} first", states, {"x": ((8,), rows(0, 8))})


def strided(rows_of, size, mesh_shape=(2, 2)):
    """States whose ranks hold what rows_of says."""
    placement = (new(Strided, dim=0, split_factor=mesh_shape[1]), new(Shard, dim=0))
    count = mesh_shape[0] * mesh_shape[1]
    states = []
    for rank in range(count):
        held = rows_of(rank // mesh_shape[1], rank % mesh_shape[1])
        states.append({"x": dtensor((size,), old_mesh(list(range(count)), mesh_shape), placement,
                                    tensor([float(n) for n in held], (len(held),)))})
    return states


def chunk(items, parts, index):
    size = -(-len(items) // parts)
    return items[size * index : size * (index + 1)]


def readings():
    for size in (1, 6, 7, 9, 10):
        for mesh in ((2, 2), (4, 2), (2, 3)):
            all_rows = list(range(size))

            def ordered(dp, tp):
                return chunk(chunk(all_rows, mesh[1], tp), mesh[0], dp)

            def left_to_right(dp, tp):
                pieces = [chunk(all_rows, mesh[1], piece) for piece in range(mesh[1])]
                return chunk([n for piece in pieces for n in chunk(piece, mesh[0], dp)], mesh[1], tp)

            whole = {"x": ((size,), rows(0, size))}
            for name, reading in (("in order", ordered), ("from left to right", left_to_right)):
                states = strided(reading, size, mesh)
                ran, _ = run(states)
                if ran.returncode == REFUSED and "two ways" in ran.stderr:
                    continue  # both readings fit these sizes and differ: nobody can tell
                holds(f"{size} rows on {mesh}, {name}", states, whole)


def shards():
    boxes = [([0], [3]), ([3], [2])]

    def one(rank, local=None, listed=boxes):
        own = [(boxes[rank], tensor(rows(3 * rank, 3 - rank)))]
        return {"x": sharded((5,), listed, own if local is None else local)}

    holds("shards", [one(0), one(1)], {"x": ((5,), rows(0, 5))})
    holds("a shard on both", [one(0), one(1), one(1)], {"x": ((5,), rows(0, 5))})
    fails("a shard missing", DAMAGED, "", [one(0), one(1, [])])
    fails("an unlisted shard", DAMAGED, "list of shards", [one(0), one(1, listed=boxes[:1])])
    fails("overlapping shards", DAMAGED, "", [one(0, listed=[([0], [3]), ([2], [3])]),
                                              one(1, [(([2], [3]), tensor(rows(2, 3)))], [([2], [3])])])
    longer = [(boxes[1], tensor(rows(0, 9)))]
    fails("a shard of another size", DAMAGED, "list of shards", [one(0), one(1, longer)])
    fails("other dims", DAMAGED, "dims", [one(0, listed=[([0, 0], [3, 1])]), one(1)])
    fails("a shard outside", DAMAGED, "", [one(0, [(([4], [3]), tensor(rows(0, 3)))], [([4], [3])])])
    shared = [shard_metadata([n], [0]) for n in range(20000)]
    many = sharded((5,), [], [])
    empty = tensor([])
    last = shard_metadata([19999], [0])
    many.args[3][0].extend(new(LocalShard, tensor=empty, metadata=last) for _ in range(20000))
    many.args[3][1].shards_metadata = shared
    fails("shards times shards", LIMIT, "too long", [{"x": many}])


def plain():
    holds("alike", [{"t": tensor([1.0]), "v": 1} for _ in range(3)], {"t": ((1,), [1.0])}, {"v": 1})
    holds("of one rank", [{}, {"v": [1, 2]}], {}, {"v": [1, 2]})
    holds("differing", [{"v": 1}, {}, {"v": "x"}], {}, {"v": {"per_rank": [1, None, "x"]}})
    inner = [{"tensor": {"dtype": "f32", "shape": [1], "sha256": digest([n])}} for n in (1.0, 2.0)]
    holds("differing tensors", [{"t": tensor([1.0])}, {"t": tensor([2.0])}, {"t": tensor([1.0])}], {},
          {"t": {"per_rank": inner + inner[:1]}})
    holds("tensor and value", [{"t": tensor([1.0])}, {"t": None}, {"t": 3}], {},
          {"t": {"per_rank": inner[:1] + [None, 3]}})
    swapped = struct.unpack(">f", struct.pack("<f", 1.0))
    other = {"tensor": {"dtype": "f32", "shape": [1], "sha256": digest(swapped)}}
    holds("equal bytes of other byte orders", [{"t": tensor([1.0])}, {"t": tensor([1.0])}], {},
          {"t": {"per_rank": inner[:1] + [other]}}, byteorders={1: "big"})
    for what, strides in ("rows", (3, 1)), ("columns", (1, 70000)):  # of three blocks and a part
        for place in 0, 100000, 209999:
            many = [[0.0] * 210000 for _ in range(2)]
            many[1][place] = 1.0
            long = [tensor(numbers, (70000, 3), strides=strides) for numbers in many]
            ran, _ = run([{"t": one} for one in long])
            told = json.loads(ran.stdout)
            if "t" in told["tensors"] or "per_rank" not in told["values"].get("t", {}):
                problems.append(f"{what} that differ in element {place}: {ran.stdout} {ran.stderr}")
    for place in 0, 150, 299:  # one is stored by columns: pieces of one element
        columns = [0.0] * 300
        columns[place] = 1.0
        states = [{"t": tensor([0.0] * 300, (100, 3))}, {"t": tensor(columns, (100, 3), strides=(1, 100))}]
        told = json.loads(run(states)[0].stdout)
        if "t" in told["tensors"] or "per_rank" not in told["values"].get("t", {}):
            problems.append(f"rows and columns that differ in element {place}: {told}")
    turned = tensor([0.0, 2.0, 1.0, 3.0], (2, 2), strides=(1, 2))
    holds("other strides", [{"t": tensor(rows(0, 4), (2, 2))}, {"t": turned}], {"t": ((2, 2), rows(0, 4))})
    mesh = old_mesh([0], (1,))
    whole = dtensor((2,), mesh, (new(Replicate),), tensor(rows(0, 2)))
    fails("spread and plain", DAMAGED, "distributed tensor on", [{"x": whole}, {"x": 1}])
    fails("plain and spread", DAMAGED, "distributed tensor on", [{"x": 1}, {"x": whole}])
    sets = {"opaque": "builtins.set"}
    holds("sets alike", [{"v": {1, 2}} for _ in range(2)], {}, {"v": sets})
    differing = [{"v": {1, 2 + rank}} for rank in range(2)]
    holds("differing sets", differing, {}, {"v": {"per_rank": [sets, sets]}})
    twice = {1: 1.0, "1": 2.0}
    holds("a name twice", [twice, twice], {}, {"1": 1.0, "1#2": 2.0})


def contradictions():
    """Files of two saves: what all ranks say, and parts that several of them hold, must be the same."""
    saves = "says 7; they are from different saves"
    for name in ("step", "iteration", "epoch", "global_step", "world_size"):
        fails(f"another {name}", DAMAGED, f"says that {name} is 5, and", [{name: 5}, {name: 7}])
    fails("another step below", DAMAGED, saves, [{"state": {"step": n}} for n in (5, 5, 7)])
    fails("another step of a parameter", DAMAGED, saves,
          [{"state": {"x": {"step": tensor([n], ())}}} for n in (5.0, 7.0)])
    long = "layer." * 40  # longer than a message shows
    holds("steps whose names begin and end alike", [{f"{long}a.{long}step": 5, f"{long}b.{long}step": 7}], {},
          {f"{long}a.{long}step": 5, f"{long}b.{long}step": 7})
    holds("one step in two types", [{"step": 5}, {"step": 5.0}], {}, {"step": {"per_rank": [5, 5.0]}})
    holds("an epoch of its own", [{"data": {"epoch": n}} for n in (5, 7)], {},
          {"data.epoch": {"per_rank": [5, 7]}})
    fails("another dtype", DAMAGED, "tensor 'x' is of f32 on rank 0 and of i32 on rank 1",
          [{"x": tensor([1.0])}, {"x": tensor([1], kind="i")}])

    def replicas(size, changed, **more):
        """Two ranks with all of a tensor, of which one element differs; None: none does."""
        states = []
        for rank in range(2):
            numbers = [0.0] * size
            if changed is not None:
                numbers[changed] = float(rank)
            local = tensor(numbers, (size // 2, 2), **more)
            states.append({"x": dtensor((size // 2, 2), old_mesh([0, 1], (2,)), (new(Replicate),), local)})
        return states

    differ = "rank_1.pt' have different values of a part of 'x' that both hold"
    fails("another replica", DAMAGED, differ, replicas(6, 5))
    fails("another large replica", DAMAGED, differ, replicas(40000, 16000))
    holds("replicas with one begin", replicas(40000, 39999), {"x": ((20000, 2), [0.0] * 40000)})
    fails("another turned replica", DAMAGED, differ, replicas(6, 5, strides=(1, 3)))
    # To count more than the bytes of so many would exceed the limit of comparisons.
    names = [str(n) for n in range(12000)]
    states = [dict.fromkeys(names, dtensor((1,), old_mesh([0, 1, 2], (3,)), (new(Replicate),), tensor([1.0])))
              for _ in range(3)]
    holds("many small replicas", states, {name: ((1,), [1.0]) for name in names})
    mixed = [replicas(6, None)[0], replicas(6, None, strides=(1, 3))[1]]
    holds("replicas of other strides", mixed, {"x": ((3, 2), [0.0] * 6)})


def names():
    states = [{"x": half(r, old_mesh([0, 1], (2,)))} for r in range(2)]
    whole = {"x": ((5,), rows(0, 5))}
    spoken = ("ep0-ba1000-rank{r}.pt", "model_world_size_2_rank_{r}.bin", "Rank={r}")
    for name in (*spoken, "checkpoint_{r}.pt", "000{r}.pth"):
        holds(name, states, whole, name=name)
    holds("a pattern", states, whole, name="step5-{r}-of-2.pt", pattern="step5-{r}-of-{W}.pt")
    fails("more than the world", DAMAGED, "say 1 ranks", states, name="x_world_size_1_rank_{r}.pt")
    fails("less than the world", DAMAGED, "rank 2 of 3", states, name="x_world_size_3_rank_{r}.pt")
    fails("far less", DAMAGED, "rank 2 of 999999999", states, name="x_world_size_999999999_rank_{r}.pt")
    fails("a high rank", DAMAGED, "rank 2 of", {0: states[0], 999999999: {}})
    fails("no rank files", USAGE, "name one of them", [{"x": 1}, {"x": 2}], name="part{r}.pt")
    fails("rank twice", USAGE, "once", states, pattern="{r}_{r}.pt")


def flat(parts, size, boxes, name="_flat_param"):
    """parts: per rank the metadata's rows (name, shape, strides, contiguous, count, range)."""
    states = []
    for rank, rows_of_rank in enumerate(parts):
        metadata = new(FlatMetadata, tuple(zip(*rows_of_rank)) or ((),) * 6)
        lo, length = boxes[rank]
        local = [(([lo], [length]), tensor(rows(lo, length)))]
        state = {name: sharded((size,), [([b], [n]) for b, n in boxes], local)}
        states.append({"net": state, "shard_metadata": {name[: -len("._flat_param")]: metadata}})
    return states


def flats():
    a, b = ("a", (2, 2), (2, 1), True, 4), ("b", (3,), (1,), True, 3)
    good = [[(*a, (0, 3))], [(*b, (0, 2))]]
    holds("flat", flat(good, 7, [(0, 4), (4, 3)]), {"a": ((2, 2), rows(0, 4)), "b": ((3,), rows(4, 3))})
    cut = [[(*a, (0, 3)), (*b, (0, 0))], [(*b, (1, 2))]]
    holds("flat, cut", flat(cut, 7, [(0, 5), (5, 2)]), {"a": ((2, 2), rows(0, 4)), "b": ((3,), rows(4, 3))})
    padded = [[(*b, (0, 2))], [(*a, (0, 3))]]
    holds("flat, aligned", flat(padded, 8, [(0, 4), (4, 4)], "u._flat_param"),
          {"u.a": ((2, 2), rows(4, 4)), "u.b": ((3,), rows(0, 3))})
    turned = ("a", (2, 2), (1, 2), False, 4)
    holds("flat, turned", flat([[(*turned, (0, 2))], [(*turned, (3, 3))]], 4, [(0, 3), (3, 1)]),
          {"a": ((2, 2), [0.0, 2.0, 1.0, 3.0])})
    halves = [(0, 4), (4, 3)]
    fails("flat, too much", DAMAGED, "do not fill", flat([good[0], good[0]], 7, halves))
    fails("flat, other ranges", DAMAGED, "do not fill", flat([[(*a, (0, 2))], good[1]], 7, halves))
    fails("flat, a range outside", DAMAGED, "contradicts itself", flat([[(*a, (0, 4))], good[1]], 7, halves))
    other = ("a", (2, 2), (2, 1), True, 5, (0, 3))
    fails("flat, another count", DAMAGED, "contradicts itself", flat([[other], good[1]], 7, halves))
    huge = ("a", (1 << 31, 1 << 31), (1, 1), True, 1 << 62, (0, (1 << 62) - 1))
    fails("flat, huge", DAMAGED, "", flat([[huge], [(*b, (0, 2))]], 7, [(0, 4), (4, 3)]))


# --- pieces of parameters under their names, without shapes ---

UNIT = {"up.weight": (3, 4), "up.bias": (3,), "norm": (2, 2), "none": (0, 3), "down": (5, 1)}
ROOT = {"head": (3, 3), "scale": ()}
SAME = {"first": (1,), "ones": (2, 3), "last": (1,)}  # two ranks have equal pieces
ALONE = {"ones": (2, 3)}


def offsets(unit):
    """Begins of parameters at addresses aligned to 16 bytes, and the end of the last one."""
    begins, end = {}, 0
    for name, shape in unit.items():
        begins[name] = (end + 3) // 4 * 4
        end = begins[name] + math.prod(shape)
    return begins, end


def unit_of(unit, prefix, world, rank, numbers):
    """A rank's part of a unit, as LOCAL_STATE_DICT with use_orig_params has it; the last part is shorter."""
    begins, end = offsets(unit)
    size = end + (len(unit) > 1)  # padding
    each = -(-size // world)
    values = [-9.0] * size
    for name, begin in begins.items():
        values[begin : begin + math.prod(unit[name])] = numbers[prefix + name]
    boxes = [(at, min(each, size - at)) for at in range(0, size, each)]
    lo, length = boxes[rank] if rank < len(boxes) else (size, 0)
    state = {}
    for name, begin in begins.items():
        first, end = max(begin, lo), min(begin + math.prod(unit[name]), lo + length)
        state[prefix + name] = tensor(values[first : max(end, first)])
    local = [(([lo], [length]), tensor(values[lo : lo + length]))] if length > 0 else []
    state[prefix + "_flat_param"] = sharded((size,), [([b], [n]) for b, n in boxes], local)
    return state


def pieces(numbers, world=3):
    return [{**unit_of(UNIT, "layer.", world, rank, numbers), "steps": tensor(rows(70, 3)),
             **unit_of(ROOT, "", world, rank, numbers), **unit_of(SAME, "same.", world, rank, numbers),
             **unit_of(ALONE, "alone.", world, rank, numbers)} for rank in range(world)]


def shapes_of_pieces():
    units = {"layer.": UNIT, "": ROOT, "same.": SAME, "alone.": ALONE}
    named = {key + name: shape for key, unit in units.items() for name, shape in unit.items()}
    return named | {"steps": (3,)}


def numbers_of_pieces():
    shapes, numbers, at = shapes_of_pieces(), {}, 0
    for name, shape in shapes.items():
        numbers[name] = rows(at, math.prod(shape))
        at += math.prod(shape)
    numbers["steps"] = rows(70, 3)
    numbers["same.ones"] = numbers["alone.ones"] = [1.0] * 6
    return numbers


def write_model(path, shapes, ties=None):
    header, data = {}, b""
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += bytes(size)
    if ties:
        header["__metadata__"] = ties
    text = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def join(states, shapes, *arguments, ties=None):
    """Status, standard error and tensors of a conversion with --like. ties: second names in the model."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "ranks", Path(folder) / "out.safetensors"
        source.mkdir()
        for rank, state in enumerate(states):
            write(source / f"rank_{rank}.pt", state)
        like = []
        if shapes is not None:
            write_model(f"{folder}/model.safetensors", shapes, ties)
            like = ["--like", f"{folder}/model.safetensors"]
        ran = run_tool("fsdp-convert", "-q", source, out, *like, *arguments)
        if "--plan-out" in arguments:
            ran = run_tool("fsdp-convert", "-q", "--apply", arguments[-1])
        told = json.loads(list_path(out).stdout)["tensors"] if out.exists() else {}
        found = {name: (tuple(one["shape"]), one["sha256"]) for name, one in told.items()}
        return ran.returncode, ran.stderr, found


def joins(what, states, shapes, numbers, *arguments, key=""):
    status, said, found = join(states, shapes, *arguments)
    wanted = {key + name: (shape, digest(numbers[name])) for name, shape in shapes_of_pieces().items()}
    if status != 0 or found != wanted:
        wrong = sorted(name for name in found | wanted if found.get(name) != wanted.get(name))
        problems.append(f"{what}: status {status}, {wrong}: {said.strip()}")


def joins_not(what, status, words, states, shapes, *arguments, without=()):
    found, said, _ = join(states, shapes, *arguments)
    if found != status or words not in said or any(word in said for word in without):
        problems.append(f"{what}: status {found}, not {status} with '{words}': {said.strip()}")


def likes():
    shapes, numbers = shapes_of_pieces(), numbers_of_pieces()
    for world in (2, 3, 5):
        joins(f"pieces of {world}", pieces(numbers, world), shapes, numbers)
    joins("ranks that count down", pieces(numbers)[::-1], shapes, numbers)
    below = [{"model": state} for state in pieces(numbers)]
    joins("pieces below a key", below, shapes, numbers, key="model.")
    with tempfile.TemporaryDirectory() as folder:
        joins("by a plan", pieces(numbers), shapes, numbers, "-n", "--plan-out", f"{folder}/plan.json")
    tied = pieces(numbers)
    for state in tied:
        state["layer.tied"] = Call(rebuild_tensor, *state["layer.up.weight"].args)
    for what, known in (("lacks", shapes), ("has", shapes | {"layer.tied": (3, 4)})):
        both = join(tied, known, "--tied", "keep")[2]
        weight = ((3, 4), digest(numbers["layer.up.weight"]))
        if (both.get("layer.tied"), both.get("layer.up.weight")) != (weight, weight):
            problems.append(f"a tied name that the model {what}: {both}")
    begun = [{"layer.index": tensor(rows(0, 4), (2, 2)), **state} for state in pieces(numbers)]
    found = join(begun, shapes)[2]
    if found.pop("layer.index", None) != ((2, 2), digest(rows(0, 4))) or len(found) != len(shapes):
        problems.append(f"a buffer that the model lacks, in front of its parameters: {found}")
    stored = {name: shape for name, shape in shapes.items() if name != "layer.down"} | {"tied": (5, 1)}
    found = join(pieces(numbers), stored, "--allow-missing", "tied", ties={"layer.down": "tied"})[2]
    if found.get("layer.down") != ((5, 1), digest(numbers["layer.down"])):
        problems.append(f"a second name of the model: {found}")
    late = pieces(numbers)
    for state in late:  # the first rank has nothing of it
        state["layer.tied"] = Call(rebuild_tensor, *state["layer.down"].args)
    if join(late, shapes, "--tied", "keep")[2].get("layer.tied") != ((5, 1), digest(numbers["layer.down"])):
        problems.append("a tied name of which the first rank has no element")
    alone = pieces(numbers, 5)
    alone[4]["alone.ones"] = tensor([1.0])
    joins_not("a piece of a rank without a part", DAMAGED, "a rank has a piece of 'alone.ones' but no part",
              alone, shapes)
    joins_not("no shapes", USAGE, "--like MODEL", pieces(numbers), None,
              without=("given together", "leave out with"))
    joins_not("a longer shape", DAMAGED, "'layer.up.bias'", pieces(numbers), shapes | {"layer.up.bias": (4,)})
    joins_not("another shape", DAMAGED, "'layer.up.weight'", pieces(numbers),
              shapes | {"layer.up.weight": (4, 4)})
    joins_not("a name that the model lacks", USAGE, "no tensor 'layer.down'", pieces(numbers),
              {name: shape for name, shape in shapes.items() if name != "layer.down"})
    for name, status, words in (("same.ones", DAMAGED, "without the shape of 'same.ones'"),
                                ("alone.ones", USAGE, "no tensor 'alone.ones'")):
        known = {other: shape for other, shape in shapes.items() if other != name}
        joins_not("equal pieces that the model lacks", status, words, pieces(numbers, 2), known)
    joins_not("a name that the ranks lack", DAMAGED, "'more'", pieces(numbers), shapes | {"more": (1,)})
    joins("a name that may be lacking", pieces(numbers), shapes | {"more": (1,)}, numbers, "--allow-missing",
          "more")
    joins_not("another model", USAGE, "no tensor with a name", pieces(numbers), {"other": (1,)})
    lacking = pieces(numbers)
    for state in lacking:
        del state["layer.up.weight"]
    joins_not("a parameter that all ranks lack", DAMAGED, "'layer.up.weight'", lacking, shapes)
    joins_not("a gap", DAMAGED, "do not fill", lacking, shapes, "--allow-missing", "layer.up.weight")
    other = pieces(numbers)
    other[1]["layer.up.weight"] = pieces(numbers | {"layer.up.weight": rows(500, 12)})[1]["layer.up.weight"]
    joins_not("another save's piece", DAMAGED, "'layer.up.weight' on rank 1", other, shapes)
    joins_not("a rank less", DAMAGED, "", pieces(numbers)[:2], shapes)
    halves = [{"x": half(r, old_mesh([0, 1], (2,)))} for r in range(2)]
    joins_not("no pieces", USAGE, "no flat parameter", halves, {"x": (5,)})


for part in (meshes, placements, readings, shards, plain, contradictions, names, flats, likes):
    part()
print("\n".join(problems) or "all as they should be")
sys.exit(1 if problems else 0)
