"""State dicts of PyTorch for the tests with peers, and how they are compared."""

import math
import struct
import subprocess
import warnings

import torch

warnings.filterwarnings("ignore", category=UserWarning)
SHAPES = [(), (1,), (7,), (0,), (0, 3), (5, 0, 2), (4, 3), (3, 5, 2), (1, 1, 1, 9), (129, 65)]
DTYPES = """float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz
float8_e8m0fnu float4_e2m1fn_x2 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64
complex128 complex32 bcomplex32"""


def raw(tensor):
    """The bytes of a tensor, row-major."""
    if tensor.numel() == 0:
        return b""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def random_tensor(dtype, shape, seed):
    """Any bits, NaNs too: what is compared are bytes."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size() * math.prod(shape)
    most = 2 if dtype == torch.bool else 256
    data = torch.randint(0, most, (size,), dtype=torch.uint8, generator=generator)
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    return data.view(dtype).reshape(shape)


def tensors():
    """Every dtype in every shape; names with dots, slashes and more."""
    found = {}
    for number, name in enumerate(DTYPES.split()):
        dtype = getattr(torch, name)
        for shape in SHAPES:
            key = f"layers.{number}.{name}/{'x'.join(map(str, shape))}"
            found[key] = random_tensor(dtype, shape, len(found))
    found[""] = torch.arange(3)
    found["élan\n#2"] = torch.arange(4)
    return found


def values():
    """Everything but tensors that a flat dict may hold without being descended."""
    numbers = [0, 1, 255, 256, 65535, 65536, -1, -128, -129, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1]
    numbers += [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**600, -(10**600), -(256**20)]
    found = {f"int.{i}": number for i, number in enumerate(numbers)}
    found |= {
        "none": None, "true": True, "false": False, "pi": math.pi, "inf": -math.inf, "zero": -0.0,
        "text": "grün\0", "empty text": "", "bytes": bytes(range(256)), "no bytes": b"",
        "complex": complex(1.5, -2), "list": [1, "a", None, [2.5, [], [True]]], "no list": [],
        "no dict": {},
    }
    return found


def same(expected, got):
    """Equal with types; tensors by dtype, shape and bytes."""
    if type(expected) is not type(got):
        return False
    if isinstance(expected, torch.Tensor):
        return expected.dtype == got.dtype and expected.shape == got.shape and raw(expected) == raw(got)
    if isinstance(expected, list):
        return len(expected) == len(got) and all(map(same, expected, got))
    if isinstance(expected, dict):
        return list(expected) == list(got) and all(same(expected[key], got[key]) for key in expected)
    if isinstance(expected, float):
        return struct.pack("<d", expected) == struct.pack("<d", got)
    return expected == got


def check(expected, got, what):
    assert set(expected) == set(got), f"{what}: names differ: {set(expected) ^ set(got)}"
    for name in expected:
        assert same(expected[name], got[name]), f"{what}: {name!r}: {got[name]}, not {expected[name]}"


def flat(state, prefix=""):
    """Names and what they stand for, as a listing has them; lists of values only are values."""
    if isinstance(state, torch.Tensor):
        return {"": state}
    found = {}
    pairs = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in pairs:
        name = f"{prefix}{key}"
        goes_on = isinstance(value, dict) or (isinstance(value, list | tuple) and is_gone_into(value))
        found |= flat(value, name + ".") if goes_on and value else {name: value}
    return found


def is_gone_into(items):
    return any(
        isinstance(one, (dict, torch.Tensor)) or (isinstance(one, list | tuple) and is_gone_into(one))
        for one in items
    )


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


def tree_same(expected, got, spell=lambda key: key):
    """spell: what became of a key."""
    if isinstance(expected, dict):
        return list(map(spell, expected)) == list(got) and all(
            tree_same(expected[key], got[spell(key)], spell) for key in expected
        )
    if isinstance(expected, list):
        return (
            type(got) is list
            and len(expected) == len(got)
            and all(tree_same(a, b, spell) for a, b in zip(expected, got))
        )
    return check({"": expected}, {"": got}, "a leaf") is None


def in_order(tree):
    if isinstance(tree, dict):
        return {key: in_order(tree[key]) for key in sorted(tree, key=str)}
    return list(map(in_order, tree)) if isinstance(tree, list) else tree


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.returncode}: {done.stderr}"


def golden(folder, group):
    """The cases of a group of tests/golden: (name, path to convert)."""
    for case in sorted((folder / group).iterdir()):
        data = sorted((case / "data").iterdir()) if (case / "data").is_dir() else []
        if data:
            alone = len(data) == 1 and data[0].is_file()
            yield case.name, data[0] if alone else case / "data"
