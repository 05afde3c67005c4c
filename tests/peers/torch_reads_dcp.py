"""torch.distributed.checkpoint loads what we wrote as DCP directories.

usage: torch_reads_dcp.py FSDP_CONVERT GOLDEN
"""

import pickle
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import check, golden, run, tensors, values
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

CONVERT, GOLDEN = sys.argv[1], Path(sys.argv[2])


def converted(source, folder, world):
    path = folder / f"written-{world}.dcp"
    shutil.rmtree(path, ignore_errors=True)
    run(CONVERT, source, path, "--world-size", world)
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
    check(state, torch.load(folder / "whole.pt", weights_only=False), f"{what}, dcp_to_torch_save")


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
            state = torch.load(path, weights_only=True)
            if not state:  # an empty dict is a value without a name
                continue
            check_loads(state, converted(path, folder, 2), folder, name)


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
    torch.multiprocessing.spawn(load_as_rank, arguments, nprocs=2)


def nested_state():
    """Dicts and lists as training states have them; keys with dots, numbers as keys and as positions."""
    weight, moment = torch.arange(12.0).reshape(4, 3), torch.arange(12.0).bfloat16().reshape(4, 3)
    groups = [{"lr": 0.1, "params": [0, 1], "foreach": None}, {"lr": 0.2, "params": [2], "t": moment}]
    return {
        "model": {"layers.0.w": weight, "layers": {"1": {"w": weight + 1}}, "b": torch.zeros(0, 2)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": moment}}, "param_groups": groups},
        "blocks": [weight + 2, {"x": weight + 3, "deep": [[moment]]}, 7, "text"],
        "lr_scheduler": {"last_lr": [0.1, 0.2], "step": 5},
        "a.b": {"c.d": torch.tensor([1])},
        "epoch": 2,
    }


def tree_same(expected, got):
    if isinstance(expected, dict):
        return list(map(str, expected)) == list(got) and all(
            tree_same(expected[key], got[str(key)]) for key in expected
        )
    if isinstance(expected, list):
        return (
            type(got) is list and len(expected) == len(got) and all(map(tree_same, expected, got))
        )
    return check({"": expected}, {"": got}, "a leaf") is None


def in_order(tree):
    if isinstance(tree, dict):
        return {key: in_order(tree[key]) for key in sorted(tree, key=str)}
    return list(map(in_order, tree)) if isinstance(tree, list) else tree


def check_nesting(path, state, planned, what):
    assert metadata_of(path).planner_data == planned, f"{what}: {metadata_of(path).planner_data}"
    dcp_to_torch_save(path, path.parent / "nested.pt")
    got = torch.load(path.parent / "nested.pt", weights_only=False)
    assert tree_same(in_order(state), in_order(got)), f"{what}: {got}"


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
    assert tree_same(in_order({"net": nested_state()["model"]}), in_order(got)), got


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for test in (everything, fixtures, ranks, nesting, renamed_nesting):
            test(Path(place))
            print(f"{test.__name__}: as it should be")
