"""A cast gives the bits of torch's own .to(dtype); which NaN it is may differ.

usage: torch_casts.py FSDP_CONVERT
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CONVERT = sys.argv[1]
TARGETS = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
           "f8_e4m3fn": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2,
           "f8_e4m3fnuz": torch.float8_e4m3fnuz, "f8_e5m2fnuz": torch.float8_e5m2fnuz}


def sources():
    """All codes of the 16-bit types; of f32 random ones and those around halves. f64 holds values of f32:
    others torch rounds twice, by way of f32."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.arange(-32768, 32768, dtype=torch.int32)
    upper = (codes << 16).unsqueeze(1) + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    random = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator, dtype=torch.int64)
    wide = torch.randn(1 << 16, generator=generator, dtype=torch.float64)
    return {
        "f16": codes.to(torch.int16).view(torch.float16),
        "bf16": codes.to(torch.int16).view(torch.bfloat16),
        "f32.edges": upper.to(torch.int32).view(torch.float32),
        "f32.halves": codes.to(torch.int16).view(torch.float16).float() * (1 + 2.0**-11),
        "f32.random": random.to(torch.int32).view(torch.float32),
        "f64": (wide * 10.0 ** torch.randint(-12, 12, wide.shape, generator=generator)).float().double(),
        "f8": torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn),
    }


def same(ours, theirs):
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[theirs.itemsize]
    nans = torch.isnan(ours.float()) & torch.isnan(theirs.float())
    return ours.dtype == theirs.dtype and bool(((ours.view(integer) == theirs.view(integer)) | nans).all())


def check_report(name, report, tensors, dtype):
    """The largest relative error and the counts, by torch's arithmetic in f64."""
    rounding, nans, overflows, underflows = 0.0, 0, 0, 0
    for tensor in tensors:
        if tensor.dtype == dtype:
            continue
        old, new = tensor.double(), tensor.to(dtype).double()
        finite = torch.isfinite(old)
        nans += int(torch.isnan(new).sum())
        overflows += int((finite & ~torch.isfinite(new)).sum())
        underflows += int(((new == 0) & (old != 0)).sum())
        moved = ((new - old).abs() / old.abs())[finite & torch.isfinite(new) & (old != 0) & (new != 0)]
        rounding = max(rounding, float(moved.max()))
    assert (report["overflow"], report["nan"], report["underflow"]) == (overflows, nans, underflows), \
        (name, report, overflows, nans, underflows)
    assert abs(report["max_rel_rounding"] - rounding) <= 1e-6 * rounding, (name, report, rounding)


with tempfile.TemporaryDirectory() as place:
    state = sources()
    save_file(state, f"{place}/source.safetensors")
    for name, dtype in TARGETS.items():
        saturates = bool(torch.isfinite(torch.tensor(1e30).to(dtype).float())) and dtype.itemsize < 2
        policy = "clamp" if saturates else "inf"  # which one torch takes is its own choice, type by type
        target = Path(place) / f"{name}.safetensors"
        command = [CONVERT, f"{place}/source.safetensors", target, "--dtype", name]
        done = subprocess.run([*command, "--on-overflow", policy, "--json"], check=True,
                              capture_output=True)
        made = load_file(target)
        for key, tensor in state.items():
            assert same(made[key], tensor.to(dtype)), f"{key} to {name}"
        if not saturates:
            check_report(name, json.loads(done.stdout)["cast"], state.values(), dtype)
        print(f"to {name}: as torch does it, overflow: {policy}")
