"""fsdp-convert gives the bits that DeepSpeed's zero_to_fp32 gives, and the state that the engine had.

Real DeepSpeed trains and saves in ZeRO 1, 2 and 3 on one to three ranks. Each checkpoint is converted to
hf and to torch: the model is compared with zero_to_fp32; masters, moments, steps and hyper-parameters
with the live engine. zero_to_fp32 refuses the optimizer with f32 gradients in bf16, so there the engine
is the only witness.

usage: deepspeed_to_fp32.py FSDP_CONVERT
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import deepspeed_model
import deepspeed_ranks as ranks
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors import safe_open
from states import same

CONVERT, STEPS = sys.argv[1], 3
BF16 = {"bf16": {"enabled": True}}
FORMS = {  # of runs: the stage, more settings, and the numbers of ranks
    "zero1": (1, {}, (1, 2, 3)),
    "zero2": (2, {}, (1, 2, 3)),
    "zero3": (3, {}, (1, 2, 3)),
    "zero2-bf16": (2, BF16, (2,)),
    "zero3-bf16": (3, BF16, (3,)),
    "zero2-round-robin": (2, {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, (3,)),
    "zero1-f32-gradients": (1, BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}, (2, 3)),
}
REFUSED = {"zero1-f32-gradients"}  # by zero_to_fp32
MISREAD = {"zero2-round-robin"}  # by DeepSpeed's accessors of masters and moments; the weights are masters


# --- a rank of DeepSpeed ---


def train_and_save(folder):
    for form, (stage, settings, wanted) in FORMS.items():
        if dist.get_world_size() in wanted:
            place = Path(folder) / f"{form}-w{dist.get_world_size()}"
            engine = deepspeed_model.make_engine(stage, **settings)
            deepspeed_model.train(engine, 0, STEPS)
            engine.save_checkpoint(place)
            read = deepspeed_model.weights_of if form in MISREAD else deepspeed_model.state_of
            state = read(engine)
            if dist.get_rank() == 0:
                torch.save(state, place / "live.pt")


# --- the test ---


def different(what, found, wanted):
    """wanted: all names that found must have, and no others."""
    problems = [f"{what}: {name!r} is in one of them" for name in set(found) ^ set(wanted)]
    return problems + [f"{what}: {name!r} differs" for name in set(found) & set(wanted)
                       if not same(wanted[name].detach(), found[name])]


def read_hf(path):
    with safe_open(path / "model.safetensors", "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}
        notes = file.metadata()
    tied = {name: found[of] for name, of in notes.items() if name not in found and of in found}
    return found | tied


def witness_of(place):
    """The state dict that zero_to_fp32 makes of it; None if it refuses."""
    with contextlib.redirect_stdout(None):
        try:
            return dict(get_fp32_state_dict_from_zero_checkpoint(str(place)))
        except ValueError:
            return None


def compare_model(form, place, whole):
    model = {name: tensor for name, tensor in whole.items() if isinstance(tensor, torch.Tensor)}
    ranks.run(CONVERT, place, place / "hf", "--no-sync", "--to", "hf")
    problems = different(f"{place.name}: hf and torch", read_hf(place / "hf"), model)
    witness = witness_of(place)
    if (witness is None) != (form in REFUSED):
        problems.append(f"{place.name}: zero_to_fp32 {'refuses' if witness is None else 'accepts'} it")
    return problems + (different(f"{place.name}: zero_to_fp32", model, witness) if witness else [])


def compare_engine(place, whole):
    live = torch.load(place / "live.pt")
    states = whole["optim"]["state"]
    found = {name: whole.get(name) for name in states}
    if any(name.startswith("optim.") for name in live):
        found |= {f"optim.state.{name}.{key}": state[key] for name, state in states.items()
                  for key in deepspeed_model.MOMENTS}
    problems = different(f"{place.name}: the engine", found, live)
    problems += [f"{place.name}: {name!r} has step {state['step']}" for name, state in states.items()
                 if state["step"] != STEPS]
    rates = [(group["lr"], group["weight_decay"], group["betas"]) for group in whole["optim"]["param_groups"]]
    if rates != [(0.01, 0.1, (0.8, 0.99)), (0.02, 0.0, (0.8, 0.99))]:
        problems.append(f"{place.name}: hyper-parameters {rates}")
    return problems


def compare(form, place):
    ranks.run(CONVERT, place, place / "whole.pt", "--no-sync")
    whole = torch.load(place / "whole.pt", weights_only=True)
    return compare_model(form, place, whole) + compare_engine(place, whole)


def main():
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, 2, 3):
            ranks.on_ranks(count, train_and_save, folder)
        for form, (_, _, wanted) in FORMS.items():
            for count in wanted:
                problems += compare(form, Path(folder) / f"{form}-w{count}")
    print(f"{sum(len(wanted) for _, _, wanted in FORMS.values())} checkpoints")
    ranks.finish(problems)


main()
