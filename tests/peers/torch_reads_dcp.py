"""torch.distributed.checkpoint loads what we wrote as DCP directories.

usage: torch_reads_dcp.py FSDP_CONVERT GOLDEN
"""

import collections
import datetime
import pickle
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import check, flat, golden, in_order, nested_state, run, tensors, tree_same, values
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

CONVERT, GOLDEN = sys.argv[1], Path(sys.argv[2])


def converted(source, folder, world, *options):
    path = folder / f"written-{world}.dcp"
    shutil.rmtree(path, ignore_errors=True)
    run(CONVERT, source, path, "--world-size", world, *options)
    return path


def metadata_of(path):
    return pickle.loads((path / ".metadata").read_bytes())


def volume(sizes):
    return torch.Size(sizes).numel()


def check_metadata(path, world):
    """Items lie in a row in the files, boxes are there once, nothing is stored for empty ones."""
    metadata = metadata_of(path)
    assert metadata.version == "1.0.0" and metadata.storage_meta is None
    assert {p.name for p in path.iterdir()} == {".metadata"} | {f"__{r}_0.distcp" for r in range(world)}
    assert metadata.planner_data == {name: (name,) for name in metadata.state_dict_metadata}
    places = set(metadata.storage_data)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            places.remove(dcp.metadata.MetadataIndex(name))
            continue
        assert isinstance(entry, TensorStorageMetadata) and entry.properties.strides is None
        assert sum(volume(chunk.sizes) for chunk in entry.chunks) == volume(entry.size), name
        assert volume(entry.size) == 0 or all(volume(chunk.sizes) for chunk in entry.chunks), name
        for chunk in entry.chunks:
            places.remove(dcp.metadata.MetadataIndex(name, chunk.offsets))
    assert not places, places
    for rank in range(world):
        end, file = 0, f"__{rank}_0.distcp"
        items = [i for i in metadata.storage_data.values() if i.relative_path == file]
        for item in sorted(items, key=lambda item: item.offset):
            assert item.offset == end, file
            end += item.length
        assert (path / file).stat().st_size == end, file


def blank_tensor(like):
    """torch.zeros does not know every dtype."""
    size = like.numel() * like.element_size()
    if size == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.zeros(size, dtype=torch.uint8).view(like.dtype).reshape(like.shape)


def blank(state):
    return {
        name: blank_tensor(value) if isinstance(value, torch.Tensor) else None
        for name, value in state.items()
    }


def check_loads(state, path, folder, what):
    loaded = blank(state)
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    check(state, loaded, what)
    dcp_to_torch_save(path, folder / "whole.pt")
    whole = flat(torch.load(folder / "whole.pt", weights_only=False))
    check(state, whole, f"{what}, dcp_to_torch_save")


def everything(folder):
    state = {**tensors(), **values()}
    torch.save(state, folder / "source.pt")
    for world in (1, 3, 130):
        path = converted(folder / "source.pt", folder, world)
        check_metadata(path, world)
        check_loads(state, path, folder, f"everything by {world} ranks")


def fixtures(folder):
    for group in ("safetensors", "torchsave"):
        for name, source in golden(GOLDEN, group):
            path = folder / "whole.pt"
            try:
                run(CONVERT, source, path, "--overwrite", "--drop", "opaque")
            except AssertionError as error:  # what torch files cannot hold is for other tests
                print(f"{name}: {error}")
                continue
            state = flat(torch.load(path, weights_only=True))
            if not state:  # an empty dict is a value without a name
                continue
            check_loads(state, converted(path, folder, 2, "--names", "keep"), folder, name)


def load_as_rank(rank, world, path, rendezvous, source):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    state = torch.load(source)
    wanted = {}
    for number, (name, tensor) in enumerate(state.items()):
        placement = Shard(number % tensor.dim()) if tensor.dim() and number % 4 else Replicate()
        local = distribute_tensor(torch.zeros_like(tensor), mesh, [placement])
        wanted[name] = local
    dcp.load(wanted, checkpoint_id=path)
    got = {name: value.full_tensor() for name, value in wanted.items()}
    check(state, got, f"rank {rank} of {world}")
    dist.barrier()  # gloo may end a process that leaves while another one still talks to it
    dist.destroy_process_group()


def ranks(folder):
    """Two real ranks load what three are said to have written, cut in other ways."""
    shapes = [(7, 3), (5,), (2, 9, 4), (1, 11), (), (13, 2), (3, 3)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    state = {
        f"{i}.{dtype}": torch.arange(volume(shape)).reshape(shape).to(dtype)
        for i, shape in enumerate(shapes)
        for dtype in dtypes
    }
    torch.save(state, folder / "source.pt")
    path = converted(folder / "source.pt", folder, 3)
    arguments = (2, path, folder / "rendezvous", folder / "source.pt")
    torch.multiprocessing.start_processes(load_as_rank, arguments, nprocs=2, start_method="fork")


def check_nesting(path, state, planned, what):
    assert metadata_of(path).planner_data == planned, f"{what}: {metadata_of(path).planner_data}"
    dcp_to_torch_save(path, path.parent / "nested.pt")
    got = torch.load(path.parent / "nested.pt", weights_only=False)
    assert tree_same(in_order(state), in_order(got), str), f"{what}: {got}"


def nesting(folder):
    """planner_data is what PyTorch itself would write, whichever way the state came."""
    state = nested_state()
    torch.save(state, folder / "nested-source.pt")
    dcp.save(state, checkpoint_id=folder / "theirs", no_dist=True)
    planned = metadata_of(folder / "theirs").planner_data
    assert any(type(part) is int for path in planned.values() for part in path)
    for source in ("nested-source.pt", "theirs"):
        check_nesting(converted(folder / source, folder, 2), state, planned, source)
        for step, to in (("native", "fsdp"), ("one.h5", "hdf5")):
            run(CONVERT, folder / source, folder / step, "--to", to, "--overwrite")
            path = converted(folder / step, folder, 2)
            check_nesting(path, state, planned, f"{source} by way of {step}")
    for kind in ("local", "full"):
        run(CONVERT, folder / "theirs", folder / kind, "--to", "fsdp", "--kind", kind)
        check_nesting(converted(folder / kind, folder, 3), state, planned, f"by way of {kind}")


def renamed_nesting(folder):
    """Elements whose names stay remain elements."""
    path = folder / "renamed.dcp"
    run(CONVERT, folder / "theirs", path, "--to", "dcp", "--rename", "s/^model\\./net./", "-I", "^model")
    dcp_to_torch_save(path, folder / "renamed.pt")
    got = torch.load(folder / "renamed.pt", weights_only=False)
    assert tree_same(in_order({"net": nested_state()["model"]}), in_order(got), str), got


def lists(folder):
    """Lists of which a rebuilt one would not be gone into, and lists with gaps."""
    state = {"one": [{}], "two": [{}, []], "deep": [[[{}], 1], {}], "x.y": [torch.ones(2), [{}, 3], {}]}
    state["in"] = {"a": [{}, {"b": [{}]}], "objects": [Thing(), 5], "late": [{1}, torch.ones(1)]}
    torch.save(state, folder / "lists.pt")
    path = converted(folder / "lists.pt", folder, 2, "--opaque", "copy")
    dcp_to_torch_save(path, folder / "lists-back.pt")
    got = torch.load(folder / "lists-back.pt", weights_only=False)
    for name in ("one", "two", "deep", "x.y"):
        assert tree_same(state[name], got[name]), f"{name}: {got[name]}"
    assert tree_same(state["in"]["a"], got["in"]["a"]) and got["in.objects.1"] == 5, got
    assert got["in"]["late"][0] == {1} and got["in.objects.0"].weight.tolist() == [0, 1, 2, 3], got
    run(CONVERT, folder / "lists.pt", folder / "gaps.dcp", "-X", "late.0$|x.y.0$", "--drop", "opaque")
    dcp_to_torch_save(folder / "gaps.dcp", folder / "lists-back.pt")
    got = torch.load(folder / "lists-back.pt", weights_only=False)
    assert got["in.late.1"].tolist() == [1] and got["x.y.1.1"] == 3 and got["x.y.2"] == {}, got


class Thing:
    def __init__(self):
        self.weight = torch.arange(4.0)
        self.view, self.more = self.weight[1:3], [1 << 70, b"\xff", {2, 3}]


class Table(dict):
    pass


Named = collections.namedtuple("Named", "first second")


def objects(folder):
    """Objects inside torch.save files come out of a DCP directory as they went in; a module as its state."""
    state = {
        "thing": Thing(), "table": Table(a=torch.ones(2)), "named": Named(1, torch.ones(1)), "set": {1, 2},
        "when": datetime.datetime(2020, 1, 2), "dtype": torch.float16, "w": torch.arange(3),
        "sparse": torch.eye(3).to_sparse(), "linear": torch.nn.Linear(2, 3), "mixed": [1, frozenset([2])],
    }
    for form in (True, False):
        torch.save(state, folder / "objects.pt", _use_new_zipfile_serialization=form)
        path = converted(folder / "objects.pt", folder, 2, "--opaque", "copy")
        dcp_to_torch_save(path, folder / "objects-back.pt")
        got = torch.load(folder / "objects-back.pt", weights_only=False)
        thing = got["thing"]
        assert type(thing) is Thing and thing.weight.tolist() == [0, 1, 2, 3]
        assert thing.view.data_ptr() == thing.weight.data_ptr() + 4 and thing.more == state["thing"].more
        assert type(got["table"]) is Table and got["table"]["a"].tolist() == [1, 1]
        assert type(got["named"]) is Named and got["named"].second.tolist() == [1]
        for name in ("set", "when", "dtype", "mixed"):
            assert got[name] == state[name], name
        assert got["sparse"].to_dense().tolist() == torch.eye(3).tolist()
        wanted = state["linear"].state_dict()
        assert got["linear"].keys() == wanted.keys()
        assert all(torch.equal(got["linear"][name], wanted[name]) for name in wanted)
        loaded = {"set": None, "w": torch.zeros(3, dtype=torch.int64), "thing": None}
        dcp.load(loaded, checkpoint_id=path, no_dist=True)
        assert loaded["set"] == {1, 2} and loaded["thing"].more == thing.more, loaded


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for test in (everything, fixtures, ranks, nesting, renamed_nesting, lists, objects):
            test(Path(place))
            print(f"{test.__name__}: as it should be")
