"""The net of tests/support/nets/training.h in PyTorch, wrapped by FSDP1 over gloo: what a rank has of
everything that fsdp1_steps.c prints. For fsdp1_steps.py."""

import contextlib
import math
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch_mlp
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import _runtime_utils as runtime
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

STEPS_BEFORE, STEPS_AFTER, ROWS, WIDTHS = 5, 3, 4, (5, 7, 7, 3)
EVENTS = ("all_gather", "reduce_scatter", "all_reduce", "reshard")
SEED_PARAMS, SEED_BATCH = 1, 2


@dataclass
class Setup:
    strategy: str = "FULL_SHARD"
    prefetch: str | None = "BACKWARD_PRE"
    forward: bool = False       # prefetch
    orig: bool = False
    limit: bool = True          # of gathers in flight
    replicas: int = 0           # 0: a mesh of one dim
    microbatches: int = 1
    reduce_each: bool = False   # else the last microbatch alone
    clip: float = 0
    is_sgd: bool = False
    groups: bool = False


# --- the net ---


def draw(seed, name, first, shape, divisor=1.0):
    drawn = torch_mlp.uniform(seed, name, first, math.prod(shape)) / divisor
    return torch.from_numpy(drawn.astype("float32")).reshape(shape)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(map(torch.nn.Linear, WIDTHS[:-1], WIDTHS[1:]))
        self.bias = torch.nn.Parameter(torch.empty(WIDTHS[-1]))
        self.register_buffer("count", torch.zeros(()))
        with torch.no_grad():
            for name, param in self.named_parameters():
                param.copy_(draw(SEED_PARAMS, name, 0, param.shape, math.sqrt(param.shape[-1])))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x + self.bias


def batch(step, number):
    row = (step * 64 + number) * ROWS
    return [draw(SEED_BATCH, name, row * n, (ROWS, n)) for name, n in (("x", WIDTHS[0]), ("t", WIDTHS[-1]))]


def wrap(setup, world):
    mesh = None
    if setup.replicas:
        mesh = torch_mlp.mesh_of((setup.replicas, world // setup.replicas), ("rep", "dp"))
    return FSDP(Net(), sharding_strategy=ShardingStrategy[setup.strategy],
                auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}), device_mesh=mesh,
                backward_prefetch=setup.prefetch and BackwardPrefetch[setup.prefetch],
                forward_prefetch=setup.forward, limit_all_gathers=setup.limit,
                use_orig_params=setup.orig, device_id=torch.device("cpu"))


def params_of(model):
    """In the order in which ours are declared: the root's last."""
    named = list(model.named_parameters())
    return [p for n, p in named if "layers." in n] + [p for n, p in named if "layers." not in n]


def optimizer_of(setup, params):
    if setup.groups:
        weights = params[0:6:2]
        biases = [p for p in params if all(p is not w for w in weights)]
        params = [{"params": weights, "lr": 0.002, "weight_decay": 0.1},
                  {"params": biases, "lr": 0.01, "weight_decay": 0}]
    if setup.is_sgd:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01)


# --- events ---


class Recorder:
    """Collectives as they are issued, and when whole parameters are given back."""

    def __init__(self, model):
        self.names = {id(handle): name or "root" for name, handle in units_of(model)}
        self.events, self.current = [], []

    def add(self, event, handle):
        self.events.append((event, self.names[id(handle)]))

    def reduction(self, original):
        def wrapped(state, handle):
            self.current.append(handle)
            original(state, handle)
            self.current.pop()
        return wrapped

    def collective(self, event, original):
        def wrapped(*args, **kwargs):
            if self.current:
                self.add(event, self.current[-1])
            return original(*args, **kwargs)
        return wrapped

    def gather(self, original):
        def wrapped(handle, *args):
            self.add("all_gather", handle)
            return original(handle, *args)
        return wrapped

    def free(self, original):
        def wrapped(handle):
            self.add("reshard", handle)
            return original(handle)
        return wrapped

    @contextlib.contextmanager
    def recording(self):
        wrappers = [(runtime, "_reduce_grad", self.reduction),
                    (runtime, "_reduce_grad_no_shard", self.reduction),
                    (dist, "reduce_scatter_single", lambda f: self.collective("reduce_scatter", f)),
                    (dist, "all_reduce", lambda f: self.collective("all_reduce", f)),
                    (FlatParamHandle, "_all_gather_flat_param", self.gather),
                    (FlatParamHandle, "_free_unsharded_flat_param", self.free)]
        kept = [(owner, name, getattr(owner, name)) for owner, name, _ in wrappers]
        for (owner, name, wrapper), (_, _, original) in zip(wrappers, kept):
            setattr(owner, name, wrapper(original))
        yield
        for owner, name, original in kept:
            setattr(owner, name, original)


def units_of(model):
    """The module's name and handle of each unit."""
    for name, module in model.named_modules():
        if isinstance(module, FSDP) and module._handle:
            yield name.replace("_fsdp_wrapped_module.", ""), module._handle


# --- training ---


def step(setup, model, optimizer, number, rank):
    losses = []
    for m in range(setup.microbatches):
        keeps = m + 1 < setup.microbatches and not setup.reduce_each
        x, t = batch(number, rank * setup.microbatches + m)
        with model.no_sync() if keeps else contextlib.nullcontext():
            loss = torch.nn.functional.mse_loss(model(x), t)
            loss.backward()
        losses.append(loss.item())
    norm = model.clip_grad_norm_(setup.clip).item() if setup.clip else None
    optimizer.step()
    optimizer.zero_grad()
    return losses, norm


def train(setup, rank):
    warnings.simplefilter("ignore")
    model = wrap(setup, dist.get_world_size())
    optimizer = optimizer_of(setup, params_of(model))
    found = flat_of(model) | {"loss": {}, "norm": {}, "events": []}
    recorder = Recorder(model)
    for number in range(STEPS_BEFORE + STEPS_AFTER):
        if number == STEPS_BEFORE:
            found |= dicts_of(model, optimizer, rank)
        with recorder.recording():
            losses, norm = step(setup, model, optimizer, number, rank)
        found["loss"][str(number)] = losses, []
        if norm is not None:
            found["norm"][str(number)] = [norm], []
        if number < STEPS_BEFORE:
            found["events"].append(recorder.events)
        recorder.events = []
    return found


# --- where parameters lie ---


def flat_of(model):
    """The chunk of each flat parameter; of each parameter: place and size, and what this rank has of it."""
    chunks, places = {}, {}
    for unit, handle in units_of(model):
        flat, prefix = handle.flat_param, f"{unit}." if unit else ""
        chunks[f"{prefix}_flat_param"] = [flat.numel()], []
        infos = zip(flat._fqns, begins(flat), flat._numels, flat._shard_param_infos)
        for fqn, offset, count, info in infos:
            run = [0, 0, 0]
            if info.in_shard:
                run = [info.intra_param_start_idx, info.numel_in_shard, info.offset_in_shard]
            places[prefix + fqn] = [offset, count, *run], []
    return {"flat": chunks, "place": places}


def begins(flat):
    at = 0
    for count, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask):
        if not is_padding:
            yield at
        at += count


# --- state dicts ---


def whole(value):
    return value.detach().reshape(-1).tolist(), list(value.shape)


def own_part(value):
    """The elements that this rank holds of a ShardedTensor, a DTensor or a plain tensor."""
    if hasattr(value, "local_shards"):
        shards = [shard.tensor for shard in value.local_shards()]
    else:
        shards = [value.to_local()] if hasattr(value, "to_local") else [value]
    parts = [shard.detach().reshape(-1) for shard in shards]
    return [x for part in parts for x in part.tolist()], list(value.size())


def flat_state(state, part=whole):
    found = {"param_groups": state["param_groups"]}
    for key, tensors in state["state"].items():
        for name, value in tensors.items():
            found[f"state.{key}.{name}"] = part(value)
    return found


def model_dicts(model):
    kinds = {"full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig()),
             "rank0": (StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)),
             "sharded": (StateDictType.SHARDED_STATE_DICT, None)}
    found = {}
    for what, (kind, config) in kinds.items():
        with FSDP.state_dict_type(model, kind, config):
            found[f"model {what}"] = {name: own_part(value) for name, value in model.state_dict().items()}
    return found


def local_dict(model):
    """The chunks of flat parameters; original parameters hide them."""
    strategies = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
    if model._use_orig_params or model.sharding_strategy not in strategies:
        return {}
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        parts = {name: own_part(value)[0] for name, value in model.state_dict().items()}
    return {"model local": {name: (part, [len(part)]) for name, part in parts.items()
                            if name.endswith("_flat_param")}}


def full_optim(model, optimizer):
    """As full_optim_state_dict, whose moments share one buffer on the CPU: cpu() is not a copy there."""
    config = FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        return FSDP.optim_state_dict(model, optimizer)


def rekeyed(full):
    plain = Net()
    backwards = params_of(plain)[::-1]
    ids = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain, backwards)
    names = FSDP.rekey_optim_state_dict(ids, OptimStateKeyType.PARAM_NAME, plain, backwards)
    return {"optim ids": flat_state(ids), "optim names": flat_state(names)}


def dicts_of(model, optimizer, rank):
    full, sharded = full_optim(model, optimizer), FSDP.sharded_optim_state_dict(model, optimizer)
    found = model_dicts(model) | rekeyed(full)
    found["optim full"] = flat_state(full)
    found["optim sharded"] = flat_state(sharded, own_part)
    found["optim shard"] = flat_state(FSDP.shard_full_optim_state_dict(full, model, optim=optimizer))
    found["optim flatten"] = flat_state(FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer))
    scattered = FSDP.scatter_full_optim_state_dict(full if rank == 0 else None, model, optim=optimizer)
    found["optim scatter"] = flat_state(scattered)
    optimizer.load_state_dict(scattered)
    return found | local_dict(model)
