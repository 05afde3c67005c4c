"""Small checkpoints of DeepSpeed, written without it: see deepspeed.py.

The pickles are made of stand-ins for the classes of torch and DeepSpeed, which are written by name.
"""

import math
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict

RANKS = 2


def put(module, name, thing):
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    thing.__module__, thing.__qualname__ = module, name
    setattr(sys.modules[module], name, thing)
    return thing


def stand_in(module, name):
    return put(module, name, type(name, (object,), {}))


def function(module, name):
    return put(module, name, types.FunctionType((lambda: None).__code__, {}, name))


rebuild_tensor = function("torch._utils", "_rebuild_tensor_v2")
zero_stage = function("deepspeed.runtime.zero.config", "ZeroStageEnum")
KINDS = {"f": stand_in("torch", "FloatStorage"), "e": stand_in("torch", "HalfStorage"),
         "d": stand_in("torch", "DoubleStorage"), "q": stand_in("torch", "LongStorage")}
LossScaler = stand_in("deepspeed.runtime.fp16.loss_scaler", "LossScaler")


class Call:
    def __init__(self, called, *args):
        self.called, self.args = called, args

    def __reduce__(self):
        return self.called, self.args


class Storage:
    def __init__(self, kind, numbers):
        self.kind, self.count = KINDS[kind], len(numbers)
        self.data = struct.pack(f"<{len(numbers)}{kind}", *numbers)


def tensor(numbers, shape=None, kind="f"):
    shape = (len(numbers),) if shape is None else tuple(shape)
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Call(rebuild_tensor, Storage(kind, numbers), 0, shape, strides, False, OrderedDict())


def view_of(other, shape=None):
    """A second tensor in the storage of another one."""
    storage, shape = other.args[0], other.args[2] if shape is None else shape
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Call(rebuild_tensor, storage, 0, shape, strides, False, OrderedDict())


class Pickler(pickle._Pickler):  # the one in Python calls persistent_id for stand-ins, too
    def __init__(self, file):
        super().__init__(file, protocol=2)
        self.storages = []

    def persistent_id(self, thing):
        if not isinstance(thing, Storage):
            return None
        if thing not in self.storages:
            self.storages.append(thing)
        return "storage", thing.kind, str(self.storages.index(thing)), "cpu", thing.count


def save(path, thing):
    """A file of torch.save."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("archive/data.pkl", "w") as file:
            pickler = Pickler(file)
            pickler.dump(thing)
        for number, storage in enumerate(pickler.storages):
            archive.writestr(f"archive/data/{number}", storage.data)


# --- a checkpoint -----------------------------------------------------------------------------------

SHAPES = OrderedDict([("w", (3, 5)), ("b", (4,)), ("none", (0,)), ("s", ())])
FROZEN = OrderedDict([("frozen", (2, 3))])
NO_GAPS = [0] * len(SHAPES)


def numbers_of(name, kind=0):
    """Every element of every kind has a number of its own."""
    shape = SHAPES.get(name, FROZEN.get(name))
    begin = 100.0 * kind + 16 * [*SHAPES, *FROZEN].index(name) + 1
    return [begin + i for i in range(math.prod(shape))]


def cut(numbers, rank, ranks=RANKS):
    """A rank's part of a parameter in stage 3."""
    part = math.ceil(len(numbers) / ranks)
    return (numbers[rank * part : (rank + 1) * part] + [0.0] * part)[:part]


def flat(rank, kind, stage, ranks=RANKS, gaps=NO_GAPS):
    names = list(SHAPES)
    if stage == 3:
        return [number for name in names for number in cut(numbers_of(name, kind), rank, ranks)]
    whole = [number for name, gap in zip(names, gaps) for number in numbers_of(name, kind) + [-1.0] * gap]
    whole += [0.0] * (-len(whole) % (2 * ranks))
    part = len(whole) // ranks
    return whole[rank * part : (rank + 1) * part]


def settings(stage, ranks=RANKS):
    return {
        "zero_stage": Call(zero_stage, stage), "loss_scaler": LossScaler(), "clip_grad": 1.0,
        "partition_count": ranks if stage == 3 else [ranks], "ds_version": "0.19.8",
    }


def state(rank, stage, *cuts):
    moments = {"step": tensor([7.0], ()), "exp_avg": tensor(flat(rank, 1, stage, *cuts)),
               "exp_avg_sq": tensor(flat(rank, 2, stage, *cuts))}
    return {"state": {0: moments}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]}


def optim(rank, stage, ranks=RANKS, gaps=NO_GAPS):
    told, master = settings(stage, ranks), tensor(flat(rank, 0, stage, ranks, gaps))
    if stage == 3:
        told |= {"fp32_flat_groups": [master], "optimizer_state_dict": state(rank, 3, ranks)}
    else:
        told |= {"single_partition_of_fp32_groups": [master], "group_paddings": [0],
                 "param_alignment_paddings": [gaps], "base_optimizer_state": state(rank, stage, ranks, gaps)}
    return {"optimizer_state_dict": told, "ds_config": {}, "ds_version": "0.19.8"}


def model(rank, stage, ranks=RANKS):
    module = OrderedDict((name, tensor(numbers_of(name), shape, "e")) for name, shape in SHAPES.items())
    fragments = {name: tensor(cut(numbers_of(name), rank, ranks) if stage == 3 else numbers_of(name),
                              None if stage == 3 else shape, "e") for name, shape in FROZEN.items()}
    module |= {"half": tensor([0.5, 1.5], (2,), "e"), "count": tensor([5], (), "q"),
               "double": tensor([0.25], (1,), "d")}
    return {
        "module": module, "buffer_names": ["half", "count", "double"], "optimizer": None,
        "param_shapes": [OrderedDict(SHAPES)], "frozen_param_shapes": OrderedDict(FROZEN),
        "shared_params": {"tied": "w"} if rank == 0 else {}, "frozen_param_fragments": fragments,
        "lr_scheduler": {"last": 2}, "global_steps": 7, "dp_world_size": ranks,
    }


def model_name(rank, stage):
    return f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt"


def optim_name(rank):
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def files(stage, ranks=RANKS, gaps=NO_GAPS):
    """{name: what is saved} of a tag."""
    made = {model_name(rank, stage): model(rank, stage, ranks) for rank in range(ranks if stage == 3 else 1)}
    return made | {optim_name(rank): optim(rank, stage, ranks, gaps) for rank in range(ranks)}


def plain_files(form):
    """Stage 0: the optimizer is in the model file. form: torch, each, flat."""
    names = list(SHAPES)
    kind = "f" if form == "torch" else "e"
    states = {i: {"step": 7, "exp_avg": tensor(numbers_of(name, 1), SHAPES[name])}
              for i, name in enumerate(names)}
    groups = [{"lr": 0.1, "params": list(range(len(names)))}]
    told = {"state": states, "param_groups": groups}
    masters = [tensor(numbers_of(name), SHAPES[name]) for name in names]
    if form == "each":
        told = {"fp32_groups": [masters], "optimizer_state_dict": told, "cur_scale": 1.0}
    if form == "flat":
        whole = [[n for name in names for n in numbers_of(name, kind)] for kind in (0, 1)]
        told = {"fp32_groups_flat": [tensor(whole[0])], "cur_scale": 1.0, "optimizer_state_dict": {
            "state": {0: {"step": 7, "exp_avg": tensor(whole[1])}},
            "param_groups": [{"lr": 0.1, "params": [0]}]}}
    module = OrderedDict((name, tensor(numbers_of(name), SHAPES[name], kind)) for name in names)
    module["tied"] = module["w"]
    return {model_name(0, 0): {"module": module, "buffer_names": [], "optimizer": told, "param_shapes": None}}


def pytorch_file():
    """A state as FSDP2 has it, with second names of a weight and of a buffer."""
    weight, buffer = tensor([1.0] * 6, (2, 3)), tensor([5, 6], None, "q")
    state = {"w": {"exp_avg": tensor([2.0] * 6, (2, 3)), "step": tensor([7.0], ())}}
    return {"model": {"w": weight, "again": view_of(weight), "count": buffer, "same": view_of(buffer),
                      "other": tensor([7], None, "q")},
            "optim": {"state": state, "param_groups": [{"lr": 0.1, "params": ["w"]}]}}


def universal_files(stage):
    """zero/NAME/*.pt: dicts of whole tensors, or from stage 3 tensors without a shape."""
    made = {model_name(rank, stage): model(rank, stage) for rank in range(RANKS if stage == 3 else 1)}
    for name, shape in SHAPES.items():
        for kind, file in enumerate(("fp32", "exp_avg")):
            whole = tensor(numbers_of(name, kind), None if stage == 3 else shape)
            made[f"zero/{name}/{file}.pt"] = whole if stage == 3 else {"param": whole, "cat_dim": 0}
        made[f"zero/{name}/step.pt"] = tensor([7.0], ())
    made["zero/other/fp32.pt"] = {"param": tensor([1.0])}
    for name, thing in made.items():
        if "model" in name:
            thing["module"]["other"] = tensor([1.0], None, "e")
    groups = [{"lr": 0.1, "params": [0]}]
    return made | {"zero/optimizer_state.pt": settings(stage) | {"param_groups": groups}}


def write(folder, made):
    for name, thing in made.items():
        save(folder / name, thing)
    return folder
