"""bench step: its lines, its values, and that neither ranks nor modes change them.

usage: step.py BUILD
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile

BUILD = sys.argv[1]
MASK = (1 << 64) - 1
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_")}
CLASSES = ["shard", "unsharded", "all_gather", "reduce", "grad"]


def run(*arguments, tool="tests/bench_rows"):
    done = subprocess.run([f"{BUILD}/{tool}", *map(str, arguments)], capture_output=True,
                          text=True, env=ENVIRONMENT, timeout=100)
    return done.returncode, done.stdout, done.stderr


def step(options):
    code, out, said = run("step", *options.split())
    assert code == 0, f"{options}: {code}, {said}"
    lines = [json.loads(line) for line in out.splitlines()]
    end = lines[-1]
    assert end["peak"] == end["formula"], f"{options}: {end}"
    return lines[:-1], end


def losses(options):
    return [line["loss"] for line in step(options)[0]]


# --- what is printed ---


def check_lines():
    number = r"-?[0-9.]+(e-?[0-9]+)?"
    bytes_of = "{" + ",".join(f'"{name}":[0-9]+' for name in CLASSES) + "}"
    code, out, _ = run("step", "--threads", 2, "--steps", 2)
    first, second, end = out.splitlines()
    assert code == 0
    for i, line in enumerate((first, second)):
        assert re.fullmatch(rf'{{"step":{i},"loss":{number},"grad_norm":{number},'
                            rf'"rank_loss":\[{number},{number}\]}}', line), line
    assert re.fullmatch(rf'{{"bytes":{bytes_of},"peak":{bytes_of},"formula":{bytes_of}}}', end), end
    assert json.loads(end)["bytes"] == dict(shard=432, unsharded=0, all_gather=0, reduce=0, grad=0)


# --- values, in another language ---


def mix(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def values(name, first, count, seed=1):
    hashed = 0xCBF29CE484222325
    for byte in name.encode():
        hashed = (hashed ^ byte) * 0x100000001B3 & MASK
    begin = mix(seed ^ hashed)
    return [(mix(begin + (i + 1) * 0x9E3779B97F4A7C15 & MASK) >> 40) * 2**-23 - 1
            for i in range(first, first + count)]


def model_loss(layers, width, out, rows, row):
    """The first step's, in f64."""
    x = values("x", row * width, rows * width)
    for layer in range(layers):
        outputs = out if layer == layers - 1 else width
        scale = math.sqrt(width)
        w = [u / scale for u in values(f"layers.{layer}.weight", 0, outputs * width)]
        b = [u / math.sqrt(outputs) for u in values(f"layers.{layer}.bias", 0, outputs)]
        y = [b[o] + sum(x[r * width + k] * w[o * width + k] for k in range(width))
             for r in range(rows) for o in range(outputs)]
        x = y if layer == layers - 1 else [max(value, 0) for value in y]
    t = values("t", row * out, rows * out)
    return sum((a - b) ** 2 for a, b in zip(x, t)) / (rows * out)


def check_values():
    found = [round(u, 9) for u in values("layers.0.weight", 0, 4)]
    assert found == [-0.743272781, -0.992512822, -0.568123102, -0.541130066], found
    lines, _ = step("--threads 3 --layers 2 --width 5 --out 3 --rows 4 --steps 1")
    for rank, loss in enumerate(lines[0]["rank_loss"]):
        wanted = model_loss(2, 5, 3, 4, rank * 4)
        assert math.isclose(loss, wanted, rel_tol=1e-6), (rank, loss, wanted)
    assert math.isclose(lines[0]["loss"], sum(lines[0]["rank_loss"]) / 3, rel_tol=1e-8)


# --- ranks and modes ---

SHAPE = "--layers 4 --width 17 --out 5 --rows 3 --steps 4"


def check_modes():
    """W ranks give the bits of one that runs their microbatches."""
    for ranks in (2, 3, 4):
        alone = losses(f"{SHAPE} --threads 1 --accumulate {ranks} --divide {ranks}")
        modes = ["", "--reshard false", "--prefetch-forward 2 --prefetch-backward 2",
                 "--device cpu-async --prefetch-forward 1"]
        if ranks == 4:
            modes += ["--reshard 2", "--reshard 2 --prefetch-backward 2 --check"]
        for mode in modes:
            assert losses(f"{SHAPE} --threads {ranks} {mode}") == alone, (ranks, mode)
    assert losses(f"{SHAPE} --np 2") == losses(f"{SHAPE} --threads 2")


def check_meshes():
    """Other orders of sums: nearly the same; so is tensor parallelism over odd widths."""
    for layers in (3, 4):
        shape = SHAPE.replace("--layers 4", f"--layers {layers}")
        for optim in ("adamw", "sgd"):
            wanted = losses(f"{shape} --threads 2 --optim {optim}")
            found = losses(f"{shape} --threads 4 --mesh dp=2,tp=2 --optim {optim}")
            near(found, wanted, 1e-5, f"tp {optim} {layers}")
    near(losses(f"{SHAPE} --threads 4 --mesh rep=2,dp=2"), losses(f"{SHAPE} --threads 4"), 1e-5, "rep")
    near(losses(f"{SHAPE} --threads 8 --mesh rep=2,dp=2,tp=2"), losses(f"{SHAPE} --threads 4"), 1e-5,
         "3-d")


def near(found, wanted, tolerance, what):
    for a, b in zip(found, wanted, strict=True):
        assert math.isclose(a, b, rel_tol=tolerance), (what, found, wanted)


def check_options():
    plain = losses(f"{SHAPE} --threads 2")
    bf16 = losses(f"{SHAPE} --threads 2 --param-dtype bf16 --reduce-dtype f32")
    assert bf16 != plain
    near(bf16, plain, 2e-2, "bf16")
    assert bf16 == losses(f"{SHAPE} --np 2 --param-dtype bf16 --reduce-dtype f32")
    assert losses(f"{SHAPE} --threads 2 --divide 2 --force-sum") == plain
    near(losses(f"{SHAPE} --threads 4 --mesh rep=2,dp=2 --reduce-dtype bf16"),
         losses(f"{SHAPE} --threads 4"), 2e-2, "bf16 over replicas")
    lines, _ = step(f"{SHAPE} --threads 2 --clip 0.01 --optim sgd --lr 1")
    assert lines[0]["grad_norm"] > 0.01
    assert losses(f"{SHAPE} --threads 2 --clip 1000") == plain
    for dtype in ("", "--param-dtype bf16 --reduce-dtype f32", "--reduce-dtype bf16"):
        for count in (2, 3):
            step(f"{SHAPE} --threads 2 --accumulate {count} {dtype}")  # its memory


def check_checkpoints():
    with tempfile.TemporaryDirectory() as folder:
        saved, again = f"{folder}/saved", f"{folder}/again"
        step(f"{SHAPE} --threads 3 --save {saved}")
        step(f"{SHAPE} --threads 2 --load {saved} --save {again} --steps 0")
        code, out, said = run(saved, again, tool="bin/fsdp-diff")
        assert code == 0, (out, said)
        assert losses(f"{SHAPE} --threads 2 --load {saved}")[0] < losses(f"{SHAPE} --threads 2")[0]


def check_refusals():
    for arguments, told in [
            ("step --threads 2 --mesh dp=3", "--mesh has 3 ranks, there are 2"),
            ("step --mesh tp=2", "dp is missing"),
            ("step --mesh dp=2,rep=2", "there are dp=N"),
            ("step --mesh dp=0", "a number of ranks"),
            ("step --reshard maybe", "is not a whole number"),
            ("step --param-dtype i8", "is not one of f32, bf16, f16"),
            ("step --divide 0", "must be more than 0"),
            ("step --against gloo", "step has torch"),
            ("save --layers 3", "--layers has no meaning for save"),
            ("step --scale 3", "there is no option '--scale'")]:
        code, out, said = run(*arguments.split())
        assert code == 2 and told in said and out == "", (arguments, code, out, said)


check_lines()
check_values()
check_modes()
check_meshes()
check_options()
check_checkpoints()
check_refusals()
print("bench step: as it should be")
