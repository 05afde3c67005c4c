"""Commands that messages type, for files that hold no plain model: torchao's tensors, arguments of a trainer,
an optimizer alone. Each command is run: it succeeds, and its result has weights. A tensor of a subclass is
one unit: no result has its scale without its numbers.

usage: typed_commands.py BIN
With FSDP_TEST_FEWER (a slow build) every source goes into a third of the targets, all of them in turn.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from torch_files import IntStorage, Storage, Tensor, function, save, stand_in, tensor

BIN = Path(sys.argv[1]).resolve()
USAGE, REFUSED = 2, 5
TARGETS = ("o-hf", "o.safetensors", "o.npz", "o.pt", "o.dcp", "o.h5", "o-native", "o.gguf")
FEWER = 3 if "FSDP_TEST_FEWER" in os.environ else 1
problems, typed = [], set()

rebuild = function("torch._utils", "_rebuild_wrapper_subclass")
from_type = function("torch._tensor", "_rebuild_from_type_v2")
strided, device = function("torch.serialization", "_get_layout"), stand_in("torch", "device")
bf16 = function("torch", "bfloat16")
Float8 = stand_in("torchao.quantization.quantize_.workflows.float8.float8_tensor", "Float8Tensor")
Affine = stand_in("torchao.dtypes.affine_quantized_tensor", "AffineQuantizedTensor")
Plain = stand_in("torchao.dtypes.uintx.plain_layout", "PlainAQTTensorImpl")
Layout = stand_in("torchao.dtypes.utils", "PlainLayout")
Optim8 = stand_in("torchao.optim.subclass_8bit", "OptimState8bit")
Mine = stand_in("mine", "PackedTensor")
Arguments = stand_in("transformers.training_args", "TrainingArguments")


class Call:
    def __init__(self, made, *arguments):
        self.reduced = made, arguments

    def __reduce__(self):
        return self.reduced


class Subclass:
    """As PyTorch writes a subclass without a storage of its own: its members are its state."""
    def __init__(self, kind, **members):
        arguments = (kind, bf16, (4,), (1,), 0, Call(strided, "torch.strided"), Call(device, "cpu"), False)
        self.reduced = from_type, (rebuild, kind, arguments, members)

    def __reduce__(self):
        return self.reduced


def whole(*values):
    return tensor(*values, kind=IntStorage)


def float8(scale=2.0, kind=Float8):
    return Subclass(kind, qdata=whole(1, 2, 3, 4), scale=tensor(scale), block_size=[1, 4], mm_config=None)


def affine():
    inner = Subclass(Plain, int_data=whole(1, 2, 3, 4), scale=tensor(0.5), zero_point=tensor(0.0),
                     _layout=Layout())
    return Subclass(Affine, tensor_impl=inner, block_size=(1, 4), quant_min=-128, quant_max=127)


def optimizer(moment):
    states = {i: {"step": tensor(3.0), "exp_avg": moment(), "exp_avg_sq": moment()} for i in range(2)}
    return {"state": states,
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]}


def arguments():
    made = Arguments()
    made.output_dir, made.learning_rate, made.seed = "out", 0.1, 42
    return made


def model(made):
    return {"embed.weight": tensor(1.0, 2.0), "layer.weight": made(), "head.weight": made()}


SOURCES = {
    "float8": model(float8), "affine": model(affine), "mine": model(lambda: float8(kind=Mine)),
    "units": {"layer.weight": float8()}, "below": {"model": model(float8), "step": 3, "args": arguments()},
    "beside": {**model(affine), "step": 3, "config": {"width": 4}},
    "training_args": arguments(), "arguments": {"args": arguments()},
    "optimizer": optimizer(lambda: tensor(1.0, 2.0)), "optimizer8": optimizer(lambda: float8(kind=Optim8)),
    "optimizer_below": {"optimizer": optimizer(lambda: tensor(1.0, 2.0)), "step": 3},
    "numbers": {"step": 3, "loss": 0.5}, "average": {"ema": {"w": tensor(1.0, 2.0)}, "optimizer":
                                                     optimizer(lambda: tensor(1.0)), "step": 3},
    "plain": {"model": {"w": tensor(1.0, 2.0)}, "step": 3, "args": arguments()},
}


def run(program, *arguments, folder=None):
    command = [str(BIN / program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder)


def check(truth, told):
    if not truth:
        problems.append(told)


def remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def tensors_of(path):
    ran = run("fsdp-ls", "--json", path)
    check(ran.returncode == 0, f"{path}: {ran.stderr}")
    return list(json.loads(ran.stdout)["tensors"]) if ran.returncode == 0 else []


def check_result(path, told, is_copy):
    """The result has weights, and of each subclass all tensors or none. A copy of everything may be an
    optimizer."""
    names = tensors_of(path)
    weights = [name for name in names if is_copy or not re.search(r"(^|\.)(state\.|exp_avg|optim)", name)]
    check(weights, f"{told}: no weights in {names}")
    check_whole(names, told)


def check_whole(names, told):
    for scale in (name for name in names if name.endswith("scale")):
        inner = [scale[:-len("scale")] + word for word in ("qdata", "int_data")]
        check(any(name in names for name in inner), f"{told}: '{scale}' is alone in {names}")


def check_next(message, folder):
    for line in re.findall(r"^next  (fsdp-diff .*)", message, re.MULTILINE):
        ran = run(*shlex.split(line), folder=folder)
        check(ran.returncode == 0, f"{line}: {ran.returncode} {ran.stdout} {ran.stderr}")


def commands_of(message):
    """The arguments that a message types: of a whole command, or to be added to the one that failed."""
    found = re.search(r": (fsdp-convert .*)", message)
    if found:
        yield shlex.split(found[1])[1:], True
    for option in re.findall(r"(?:--to \w+ )?--(?:only|part|opaque) '?\w+'?", message):
        yield shlex.split(option), False
    check(found or "--drop" not in message, f"no command is typed: {message}")


def follow(folder, source, target, options, depth=0):
    """Runs a conversion, and what its message types."""
    remove(folder / target)
    line = (source, target, *options)
    ran = run("fsdp-convert", *line, folder=folder)
    told = f"fsdp-convert {' '.join(line)}: {ran.returncode} {ran.stderr.strip()}"
    if ran.returncode == 0:
        if depth == 0:
            check_whole(tensors_of(folder / target), told)
        else:
            check_result(folder / target, told, "--opaque" in options)
            check_next(ran.stdout, folder)
        return
    check(ran.returncode in (USAGE, REFUSED), told)
    check(depth == 0, f"typed, and refused: {told}")
    if depth > 0:
        return
    for arguments, is_line in commands_of(ran.stderr):
        typed.add((source, target))
        follow(folder, source, target, arguments[2:] if is_line else (*options, *arguments), depth + 1)


def typed_commands(folder):
    for number, (name, state) in enumerate(SOURCES.items()):
        save(folder / f"{name}.pt", state, 2 + number % 2 * 2)
        for target in TARGETS[number % FEWER::FEWER]:
            follow(folder, f"{name}.pt", target, ("--to", "fsdp") if target == "o-native" else ())
    expected = {("plain.pt", "o.npz"), ("plain.pt", "o.dcp"), ("average.pt", "o-hf"), ("float8.pt", "o-hf")}
    check(expected <= typed or FEWER > 1, f"no command is typed for {expected - typed}")


def one_unit(folder):
    """The entries of a subclass are kept, dropped, or refused together: from a pickle, and from blobs."""
    sources = [folder / "affine.pt"]
    for name, *options in (("u.dcp",), ("u.h5",), ("u", "--to", "fsdp")):
        ran = run("fsdp-convert", sources[0], folder / name, *options, "--opaque", "copy")
        check(ran.returncode == 0 and tensors_of(folder / name) == tensors_of(sources[0]), ran.stderr)
        sources.append(folder / name)
    for source in sources:
        for number, options in enumerate((["-X", "scale"], ["-I", "scale"], ["--drop", r"weight$"],
                                          ["--drop", "dtype:i8"])):
            ran = run("fsdp-convert", source, folder / f"no-{number}.dcp", *options, "--opaque", "copy")
            check(ran.returncode == USAGE and "is one tensor of a subclass" in ran.stderr,
                  f"{source} {options}: {ran.returncode} {ran.stderr}")
        target = folder / f"{source.name}.safetensors"
        for options in ((), ("--drop", "values"), ("--drop", "opaque")):
            ran = run("fsdp-convert", source, target, *options)
            refused = ran.returncode == USAGE and "2 quantized tensors: " in ran.stderr
            check(refused, f"{source}: {ran.stderr}")
        ran = run("fsdp-convert", source, target, "--drop", "tensors:quantized")
        check(ran.returncode == 0 and tensors_of(target) == ["embed.weight"], f"{source}: {ran.stderr}")
    # neither a key with a dot below the key before it, nor a name below that of a plain tensor, is a part
    save(folder / "dots.pt", {"w": float8(), "w.extra": {"y": tensor(1.0)}, "a.weight": tensor(1.0),
                              "a.weight.absmax": tensor(2.0)})
    ran = run("fsdp-convert", folder / "dots.pt", folder / "dots.dcp", "-X", "extra|absmax",
              "--opaque", "copy")
    check(ran.returncode == 0 and "a.weight" in tensors_of(folder / "dots.dcp"), f"no parts: {ran.stderr}")
    ran = run("fsdp-convert", sources[0], folder / "c.dcp", "--opaque", "copy", "--dtype", "bf16")
    check(ran.returncode == 0 and "2 weights stay quantized" in ran.stderr, ran.stderr)
    told = json.loads(run("fsdp-ls", "--json", folder / "c.dcp").stdout)["tensors"]
    check(told["head.weight.tensor_impl.scale"]["dtype"] == "f32", f"{told}")


def nothing_left(folder):
    ran = run("fsdp-convert", folder / "units.pt", folder / "l.safetensors", "--drop", "tensors:quantized")
    check(ran.returncode == USAGE and "nothing is left to convert" in ran.stderr, ran.stderr)
    for name in ("training_args", "arguments", "numbers"):
        for target in ("l.safetensors", "l.npz"):
            ran = run("fsdp-convert", folder / f"{name}.pt", folder / target)
            check(ran.returncode == USAGE and "the source holds with fsdp-ls" in ran.stderr, ran.stderr)
            check("--drop" not in ran.stderr and "--opaque" not in ran.stderr, ran.stderr)


with tempfile.TemporaryDirectory() as place:
    for test in (typed_commands, one_unit, nothing_left):
        test(Path(place))
print("\n".join(problems) or "typed commands succeed, and their results have weights")
sys.exit(1 if problems else 0)
