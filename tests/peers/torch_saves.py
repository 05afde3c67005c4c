"""fsdp.torch in ranks of gloo: what save, async_save and Writer wrote is read back by load, Reader,
fsdp.open and torch.distributed.checkpoint, with other layouts and fewer ranks; a failure of one rank is
raised on all.

usage: torch_saves.py BUILD [CASE...]
"""

import faulthandler
import os
import subprocess
import sys
import tempfile
import traceback
import warnings

BUILD = sys.argv[1] if __name__ == "__main__" else os.environ["FSDP_BUILD"]
sys.path.insert(0, os.path.join(BUILD, "python"))
os.environ["FSDP_BUILD"] = BUILD

import fsdp
import fsdp.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

WORLD, HANGS_S = 4, 120
MESHES = {"one": ((4,), ("dp",)), "two": ((2, 2), ("dp", "tp"))}
LAYOUTS = {
    "rows": ("one", [Shard(0)]), "columns": ("one", [Shard(1)]), "whole": ("one", [Replicate()]),
    "tiles": ("two", [Shard(0), Shard(1)]), "twice": ("two", [Shard(0), Shard(0)]),
    "hsdp": ("two", [Replicate(), Shard(0)]),
    "strided": ("two", [_StridedShard(0, split_factor=2), Shard(0)]),
}
SHAPES = {"even": (8, 12), "uneven": (5, 3), "few": (2, 1), "none": (0, 4)}


def full(name, shape, dtype=torch.float32):
    seed = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=seed).to(dtype)


def cut(whole, mesh, placements):
    """The DTensor of a tensor that every rank has."""
    if any(isinstance(placement, _StridedShard) for placement in placements):  # as FSDP2 makes them of TP's
        inner = distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None)
        part = inner.to_local().chunk(2)[mesh["dp"].get_local_rank()]
        return DTensor.from_local(part.clone(), mesh, placements, run_check=False, shape=whole.shape,
                                  stride=whole.stride())
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def rows_of(whole, mesh):
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def meshes():
    return {name: init_device_mesh("cpu", shape, mesh_dim_names=dims)
            for name, (shape, dims) in MESHES.items()}


def wholes():
    """Every tensor of sharded_state, whole."""
    return {f"{layout}.{shape}": full(f"{layout}.{shape}", SHAPES[shape]) for layout in LAYOUTS
            for shape in SHAPES if layout != "strided" or shape == "even"}


def sharded_state(zero=False):
    made, found = meshes(), {}
    for name, whole in wholes().items():
        mesh, placements = LAYOUTS[name.split(".")[0]]
        found[name] = cut(torch.zeros_like(whole) if zero else whole, made[mesh], placements)
    plain = full("plain", (3, 4), torch.bfloat16)
    return {
        "model": found, "plain": torch.zeros_like(plain) if zero else plain,
        "view": (torch.zeros(6, 4) if zero else full("view", (6, 4))).t(),
        "optim": {"state": {0: {"step": torch.tensor(0.0 if zero else 3.0)}},
                  "param_groups": [{"lr": 0 if zero else 0.1, "betas": (0, 0) if zero else (0.9, 0.95)}]},
        "epoch": 0 if zero else 4,
    }


def check(state, label):
    """Fails unless a state has the values of sharded_state."""
    for name, tensor in state["model"].items():
        whole, mine = wholes()[name], tensor
        if isinstance(tensor, DTensor):
            whole = cut(whole, tensor.device_mesh, tensor.placements).to_local()
            mine = tensor.to_local()
        assert torch.equal(mine, whole), f"{label}: {name}: {mine} is not {whole}"
    assert torch.equal(state["plain"], full("plain", (3, 4), torch.bfloat16)), label
    assert torch.equal(state["view"], full("view", (6, 4)).t()), label
    optim = state["optim"]
    step = optim["state"].get(0, optim["state"].get("0"))["step"]
    assert step == 3 and optim["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.95)}], f"{label}: {optim}"
    assert state["epoch"] == 4, label


def check_file(path, label):
    """Fails unless a checkpoint verifies and has the values of sharded_state. Collective."""
    failure = None
    if dist.get_rank() == 0:
        try:
            assert fsdp.verify(path, level="deep"), label
            check(fsdp.load(path, framework="torch"), label)
        except Exception as error:
            failure = error
    told = [failure and repr(failure)]
    dist.broadcast_object_list(told)
    assert told[0] is None, f"{label}: {told[0]}"


def raised(kind, text, call):
    """Fails unless call() raises such an error, on every rank."""
    try:
        call()
    except kind as error:
        assert text in str(error), f"'{text}' is not in: {error}"
    else:
        raise AssertionError(f"no {kind.__name__} with '{text}'")


# --- cases ----------------------------------------------------------------------------------------

def saves_and_loads_every_layout(place):
    fsdp.torch.save(sharded_state(), place + "/a")
    check_file(place + "/a", "save")
    state = sharded_state(zero=True)
    assert fsdp.torch.load(state, place + "/a") == place + "/a"
    check(state, "load")
    if dist.get_rank() == 0:
        with fsdp.open(place + "/a") as checkpoint:
            layout = checkpoint.layout("model.strided.even")
            assert layout.mesh == {"dp": 2, "tp": 2}, layout
            assert layout.placements == ("strided_shard(0, 2)", "shard(0)"), layout
            assert checkpoint.layout("model.hsdp.even").placements == ("replicate", "shard(0)")


def loads_on_fewer_ranks(place):
    fsdp.torch.save(sharded_state(), place + "/a")
    for size in (3, 2, 1):
        ranks = list(range(size))
        group, mesh = dist.new_group(ranks), DeviceMesh("cpu", ranks)
        if dist.get_rank() not in ranks:
            continue
        state = sharded_state_on(mesh, 1)
        fsdp.torch.load(state, place + "/a", process_group=group)
        check(state, f"{size} ranks")
        fsdp.torch.save(state, f"{place}/b{size}", process_group=group)
        again = sharded_state_on(mesh, 0)
        fsdp.torch.load(again, f"{place}/b{size}", process_group=group)
        check(again, f"saved by {size} ranks")
    dist.barrier()
    mesh = DeviceMesh("cpu", list(range(4)))
    state = sharded_state_on(mesh, 0)
    fsdp.torch.load(state, place + "/b3")
    check(state, "3 to 4 ranks")


def sharded_state_on(mesh, dim):
    """Zeros, all of them cut in one dim over a mesh."""
    return {"model": {name: distribute_tensor(torch.zeros_like(whole), mesh, [Shard(dim)], src_data_rank=None)
                      for name, whole in wholes().items()},
            "plain": torch.zeros(3, 4, dtype=torch.bfloat16), "view": torch.zeros(4, 6),
            "optim": {"state": {0: {"step": torch.tensor(0.0)}}, "param_groups": [{"lr": 0, "betas": ()}]},
            "epoch": 0}


def stages_of_a_pipeline_have_names_of_their_own(place):
    rank = dist.get_rank()
    stage, members = rank // 2, [2 * (rank // 2), 2 * (rank // 2) + 1]
    pairs = [DeviceMesh("cpu", ranks, mesh_dim_names=("dp",)) for ranks in ([0, 1], [2, 3])]

    def state(zero):
        tied = rows_of(torch.zeros(5, 3) if zero else full("tied", (5, 3)), pairs[stage])
        weight = rows_of(torch.zeros(7, 2) if zero else full(f"w{stage}", (7, 2)), pairs[stage])
        found = {f"layers.{stage}.weight": weight,
                 f"layers.{stage}.bias": torch.zeros(3) if zero else full(f"b{stage}", (3,)),
                 "embed": tied, f"stage{stage}": 0 if zero else stage, "rank": 0 if zero else 10 + rank}
        if stage == 1:
            found["head"] = tied  # another name on this stage alone
        return found

    fsdp.torch.save(state(False), place + "/a")
    loaded = state(True)
    fsdp.torch.load(loaded, place + "/a")
    for name, item in state(False).items():
        if name == "rank":
            assert loaded[name] == 10, loaded
        elif isinstance(item, DTensor):
            assert torch.equal(loaded[name].to_local(), item.to_local()), name
        else:
            assert torch.equal(torch.as_tensor(loaded[name]), torch.as_tensor(item)), name
    if rank == 0:
        with fsdp.open(place + "/a", framework="torch") as checkpoint:
            assert torch.equal(checkpoint.get_tensor("layers.1.weight"), full("w1", (7, 2)))
            assert torch.equal(checkpoint.get_tensor("head"), full("tied", (5, 3)))
            assert checkpoint.values()["stage1"] == 1
            assert checkpoint.layout("layers.1.weight").mesh == {"dp": 2}


def tied_tensors_are_stored_once(place):
    mesh = meshes()["one"]
    for shape in ((8, 2), (2, 2)):  # with (2, 2) ranks 2 and 3 hold nothing that could be tied
        tied = distribute_tensor(full("tied", shape), mesh, [Shard(0)], src_data_rank=None)
        path = f"{place}/{shape[0]}"
        fsdp.torch.save({"embed": tied, "head": tied.detach(), "none": torch.empty(0)}, path)
        if dist.get_rank() == 0:
            with fsdp.open(path) as checkpoint:
                assert checkpoint.aliases() == {"head": "embed"}, checkpoint.aliases()
        other = {"embed": distribute_tensor(torch.zeros(shape), mesh, [Shard(0)], src_data_rank=None),
                 "head": distribute_tensor(torch.zeros(shape), mesh, [Shard(0)], src_data_rank=None),
                 "none": torch.empty(0)}
        fsdp.torch.load(other, path)
        for name in ("embed", "head"):
            assert torch.equal(other[name].to_local(), tied.to_local()), name


def shards_that_no_mesh_describes(place):
    from torch.distributed._shard.sharded_tensor import (Shard as Piece, ShardedTensor, ShardMetadata)
    rank, whole = dist.get_rank(), full("irregular", (10, 4))
    cuts = [(0, 0, 1), (1, 2, 4), (4, 4, 4), (4, 7, 10)][rank]  # two pieces a rank, and none of rank 2

    def state(zero):
        pieces = [Piece(torch.zeros_like(whole[a:b]) if zero else whole[a:b].clone(),
                        ShardMetadata([a, 0], [b - a, 4], f"rank:{rank}/cpu"))
                  for a, b in zip(cuts, cuts[1:]) if b > a]
        sharded = ShardedTensor._init_from_local_shards(pieces, [10, 4])
        local = torch.zeros(3, 4)
        if not zero:
            local[1:] = whole[2 * rank:2 * rank + 2]
        local.global_shape, local.global_offsets = (8, 4), ((2 * rank, 0),)
        local.local_offsets, local.local_sizes = ((1, 0),), ((2, 4),)
        return {"sharded": sharded, "protocol": local}

    fsdp.torch.save(state(False), place + "/a")
    loaded = state(True)
    fsdp.torch.load(loaded, place + "/a")
    for piece in loaded["sharded"].local_shards():
        at = piece.metadata.shard_offsets[0]
        assert torch.equal(piece.tensor, whole[at:at + piece.tensor.shape[0]])
    assert torch.equal(loaded["protocol"][1:], whole[2 * rank:2 * rank + 2])
    dcp.save(state(False), storage_writer=fsdp.torch.Writer(place + "/b"))
    for path in ("/a", "/b"):
        with fsdp.open(place + path, framework="torch") as checkpoint:
            assert torch.equal(checkpoint.get_tensor("sharded"), whole), path
            assert torch.equal(checkpoint.get_tensor("protocol"), whole[:8]), path


def a_failure_of_one_rank_is_raised_on_all(place):
    rank = dist.get_rank()

    class Thing:
        pass

    other = {"w": torch.ones(2), "thing": Thing() if rank == 2 else 1}
    raised(fsdp.UsageError, "'thing' is a ", lambda: fsdp.torch.save(other, place + "/a"))
    raised(fsdp.UsageError, "'s' has no memory", lambda: fsdp.torch.save(
        {"s": torch.eye(2).to_sparse() if rank == 1 else torch.eye(2)}, place + "/a"))
    raised(fsdp.UsageError, "'w' differs between ranks: f32 of 2 on rank 0, f32 of 3 on rank 3",
           lambda: fsdp.torch.save({"w": torch.ones(3 if rank == 3 else 2)}, place + "/a"))
    raised(fsdp.UsageError, "'w' differs between ranks: a value on rank 0, f32 of 2 on rank 1",
           lambda: fsdp.torch.save({"w": torch.ones(2) if rank else 1}, place + "/a"))
    raised(fsdp.UsageError, "nope",
           lambda: fsdp.torch.save({"w": torch.ones(2)}, place + "/a", nope=1))
    raised(fsdp.UsageError, "thing", lambda: fsdp.torch.async_save(other, place + "/a").result())
    raised(fsdp.NotFoundError, "nowhere", lambda: fsdp.torch.load({"w": torch.ones(2)}, place + "/nowhere"))

    class Planner(DefaultSavePlanner):
        def resolve_data(self, item):
            if rank == 1:
                raise OSError("rank 1 cannot read its memory")
            return super().resolve_data(item)

    raised(CheckpointException, "rank 1 cannot read its memory", lambda: dcp.save(
        sharded_state(), storage_writer=fsdp.torch.Writer(place + "/a"), planner=Planner()))
    assert os.listdir(place) == [], os.listdir(place)
    fsdp.torch.save({"w": torch.ones(2)}, place + "/a")  # all of it works afterwards
    raised(fsdp.ExistsError, "exists", lambda: fsdp.torch.save({"w": torch.ones(2)}, place + "/a"))
    dcp.save(sharded_state(), storage_writer=fsdp.torch.Writer(place + "/b"))
    raised(fsdp.UsageError, "missing", lambda: fsdp.torch.load({"v": torch.ones(2)}, place + "/a"))
    fsdp.torch.load({"v": torch.ones(2)}, place + "/a", partial=True)


def saves_in_the_background(place):
    state = sharded_state()
    future = fsdp.torch.async_save(state, place + "/a")
    for tensor in state["model"].values():
        tensor.to_local().zero_()  # the copy is what is saved
    state["optim"]["param_groups"][0]["lr"] = 7
    assert future.result() == place + "/a"
    check_file(place + "/a", "async_save")
    futures = [fsdp.torch.async_save(sharded_state(), place + "/run", step=step, keep_last=2)
               for step in (1, 2, 3)]
    loaded = sharded_state(zero=True)
    assert fsdp.torch.load(loaded, place + "/run").endswith("step-00000003")
    check(loaded, "run")
    assert all(future.done() for future in futures) and fsdp.Run(place + "/run").steps() == [2, 3]
    future = fsdp.torch.async_save(sharded_state(), place + "/a")
    raised(fsdp.ExistsError, "exists", future.result)


def dcp_saves_and_loads(place):
    dcp.save(sharded_state(), storage_writer=fsdp.torch.Writer(place + "/a"))
    check_file(place + "/a", "Writer")
    if dist.get_rank() == 0:
        with fsdp.open(place + "/a") as checkpoint:  # meshes are kept where all ranks of one write
            assert checkpoint.layout("model.tiles.even").mesh == {"dp": 2, "tp": 2}
            assert len(checkpoint.layout("model.hsdp.even").boxes) == 2
    dcp.save(sharded_state(), checkpoint_id=place + "/b", storage_writer=fsdp.torch.Writer(compress=True))
    check_file(place + "/b", "Writer with checkpoint_id")
    raised(CheckpointException, "exists", lambda: dcp.save(
        sharded_state(), storage_writer=fsdp.torch.Writer(place + "/b")))
    fsdp.torch.save(sharded_state(), place + "/ours")
    dcp.save(sharded_state(), storage_writer=FileSystemWriter(place + "/dcp"))
    for path in ("/a", "/b", "/ours", "/dcp"):
        for state in (sharded_state(zero=True), sharded_state_on(meshes()["one"], 1)):
            dcp.load(state, storage_reader=fsdp.torch.Reader(place + path))
            check(state, f"Reader of {path}")
    if dist.get_rank() == 0:
        fsdp.convert(place + "/a", place + "/again", to="dcp")
        fsdp.convert(place + "/a", place + "/tensors", to="safetensors", drop=["values"])
    dist.barrier()
    state = sharded_state(zero=True)
    dcp.load(state, checkpoint_id=place + "/again")  # by PyTorch's own reader
    check(state, "converted to DCP")
    state = {"model": sharded_state(zero=True)["model"]}
    dcp.load(state, checkpoint_id=place + "/tensors", storage_reader=fsdp.torch.Reader())
    check({**sharded_state(), **state}, "Reader of safetensors")


def objects_that_only_python_knows(place):
    from collections import OrderedDict
    state = {"w": torch.ones(2), "dtype": torch.float16, "set": {1, 2}, "order": (OrderedDict(a=1), 2),
             "n": 5, "size": torch.Size([1]), "text": "ä"}
    dcp.save(state, storage_writer=fsdp.torch.Writer(place + "/a"))
    loaded = {key: torch.zeros(2) if key == "w" else None for key in state}
    dcp.load(loaded, storage_reader=fsdp.torch.Reader(place + "/a"))
    assert {**loaded, "w": 0} == {**state, "w": 0} and type(loaded["order"][0]) is OrderedDict, loaded
    assert type(loaded["size"]) is torch.Size
    values = fsdp.open(place + "/a").values()
    assert values["n"] == 5 and values["text"] == "ä", values


def dcp_saves_asynchronously(place):
    for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
        for turn in range(2):
            path = f"{place}/{kind.value}{turn}"
            state = sharded_state()
            dcp.async_save(state, storage_writer=fsdp.torch.Writer(path),
                           async_checkpointer_type=kind).result()
            check_file(path, path)


def dcp_saves_in_other_ways(place):
    dcp.save(sharded_state(), storage_writer=fsdp.torch.Writer(place + "/plain"), use_collectives=False)
    check_file(place + "/plain", "use_collectives=False")
    for turn in range(3):  # plans that are equal are not sent again
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(sharded_state(), storage_writer=fsdp.torch.Writer(f"{place}/cached{turn}"), planner=planner)
        check_file(f"{place}/cached{turn}", "cached plans")
    rank = dist.get_rank()
    dcp.save({"w": full("w", (3,))}, storage_writer=fsdp.torch.Writer(f"{place}/alone{rank}"), no_dist=True)
    loaded = {"w": torch.zeros(3)}
    dcp.load(loaded, storage_reader=fsdp.torch.Reader(f"{place}/alone{rank}"), no_dist=True)
    assert torch.equal(loaded["w"], full("w", (3,)))
    group, mesh = dist.new_group([1, 3]), DeviceMesh("cpu", [1, 3])
    if rank in (1, 3):
        state = {"w": distribute_tensor(full("w", (5, 2)), mesh, [Shard(0)], src_data_rank=None)}
        dcp.save(state, storage_writer=fsdp.torch.Writer(place + "/pair"), process_group=group)
        fsdp.torch.save(state, place + "/pair2", process_group=group)
        for path in ("/pair", "/pair2"):
            with fsdp.open(place + path, framework="torch") as checkpoint:
                assert torch.equal(checkpoint.get_tensor("w"), full("w", (5, 2)))
    raised(CheckpointException, "no path", lambda: dcp.save(
        {"w": torch.ones(1)}, storage_writer=fsdp.torch.Writer()))


def fsdp2_trains_on_after_a_load(place):
    """A model of FSDP2 with AdamW continues with the same losses, from save and from Writer."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard
    mesh = meshes()["two"]

    def make():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)  # HSDP
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model, optim, steps):
        losses = []
        for step in steps:
            torch.manual_seed(100 * step + dist.get_rank())
            loss = model(torch.randn(4, 6)).pow(2).mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        return losses

    model, optim = make()
    train(model, optim, range(3))
    state = dict(zip(("model", "optim"), get_state_dict(model, optim)))
    fsdp.torch.save(state, place + "/a")
    dcp.save(state, storage_writer=fsdp.torch.Writer(place + "/b"))
    wanted = train(model, optim, range(3, 6))
    for path in ("/a", "/b"):
        for load in (fsdp.torch.load,
                     lambda state, path: dcp.load(state, storage_reader=fsdp.torch.Reader(path))):
            model, optim = make()
            state = dict(zip(("model", "optim"), get_state_dict(model, optim)))
            load(state, place + path)
            set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
            assert train(model, optim, range(3, 6)) == wanted, path


def tools_take_what_was_written(place):
    dcp.save(sharded_state(), storage_writer=fsdp.torch.Writer(place + "/a"))
    fsdp.torch.save(sharded_state(), place + "/b")
    if dist.get_rank() == 0:
        import h5py
        with h5py.File(place + "/b/index.h5") as file:
            names = []
            file.visit(names.append)
            assert any("tiles" in name for name in names), names
        for path in ("/a", "/b"):
            command = [os.path.join(BUILD, "bin", "fsdp-convert"), place + path, place + path + ".pt"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            check(torch.load(place + path + ".pt"), path)


CASES = [saves_and_loads_every_layout, loads_on_fewer_ranks, stages_of_a_pipeline_have_names_of_their_own,
         tied_tensors_are_stored_once, shards_that_no_mesh_describes, a_failure_of_one_rank_is_raised_on_all,
         saves_in_the_background, dcp_saves_and_loads, objects_that_only_python_knows,
         dcp_saves_in_other_ways,
         fsdp2_trains_on_after_a_load, tools_take_what_was_written, dcp_saves_asynchronously]


def run_rank(rank, place, names):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=WORLD)
    for case in CASES:
        if names and case.__name__ not in names:
            continue
        own = os.path.join(place, case.__name__)
        if rank == 0:
            os.mkdir(own)
        dist.barrier()
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        try:
            case(own)
        except BaseException:
            print(f"{case.__name__}, rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)
        dist.barrier()
        if rank == 0:
            print(case.__name__, flush=True)
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(run_rank, (place, sys.argv[2:]), nprocs=WORLD)


if __name__ == "__main__":
    main()
