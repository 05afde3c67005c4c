"""GPT-2 models of llm.c that this writer makes are read; what is written equals them byte for byte.

usage: llmc_files.py BIN
"""

import json
import struct
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from tools import check, list_path, listing, problems, run

MAGIC = 20240326
NUMBERS = {"max_seq_len": 16, "vocab_size": 50, "num_layers": 3, "num_heads": 2, "channels": 8,
           "padded_vocab_size": 128}
VERSIONS = {3: ("f32", 4), 5: ("bf16", 2)}


def shapes(*, length, padded, layers, width):
    """As train_gpt2.py of llm.c writes them (write_tensors)."""
    return {
        "wte": (padded, width), "wpe": (length, width), "ln1w": (layers, width), "ln1b": (layers, width),
        "qkvw": (layers, 3 * width, width), "qkvb": (layers, 3 * width), "attprojw": (layers, width, width),
        "attprojb": (layers, width), "ln2w": (layers, width), "ln2b": (layers, width),
        "fcw": (layers, 4 * width, width), "fcb": (layers, 4 * width), "fcprojw": (layers, width, 4 * width),
        "fcprojb": (layers, width), "lnfw": (width,), "lnfb": (width,),
    }


SHAPES = shapes(length=16, padded=128, layers=3, width=8)


def payload(name, size):
    for dim in SHAPES[name]:
        size *= dim
    seed = sha256(name.encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]


def model(version, **changed):
    numbers = [MAGIC, version, *(NUMBERS | changed).values()]
    head = struct.pack("<256i", *numbers, *[0] * (256 - len(numbers)))
    return head + b"".join(payload(name, VERSIONS.get(version, ("", 4))[1]) for name in SHAPES)


def read_and_written(folder, version):
    dtype, size = VERSIONS[version]
    path, native, back = (folder / f"v{version}.{end}" for end in ("bin", "fsdp", "back"))
    path.write_bytes(model(version))
    listed = listing(path)
    check(listed is not None, f"version {version}: {list_path(path).stderr}")
    if not listed:
        return
    want = {name: {"dtype": dtype, "shape": list(shape), "sha256": sha256(payload(name, size)).hexdigest()}
            for name, shape in SHAPES.items()}
    check(listed["tensors"] == want, f"version {version}: {listed['tensors']}")
    check(list(listed["tensors"]) == list(want), f"version {version}: the order of tensors")
    check(listed["values"] == NUMBERS, f"version {version}: {listed['values']}")
    for source, target, *more in ((path, native), (native, back, "--to", "llmc", "--only", "all")):
        ran = run("fsdp-convert", source, target, "-q", "--no-sync", *more)
        check(ran.returncode == 0, f"{source.name} -> {target.name}: {ran.stderr}")
    check(back.exists() and back.read_bytes() == path.read_bytes(), f"version {version} is written as it was")
    if version == 3:
        ran = run("fsdp-convert", path, folder / "cast.bin", "--to", "llmc", "--dtype", "bf16", "-q")
        check(ran.returncode == 0 and (folder / "cast.bin").read_bytes()[:8] == struct.pack("<2i", MAGIC, 5),
              f"a cast to version 5: {ran.stderr}")


def refused(folder):
    path = folder / "bad.bin"
    cases = {
        "version 4": model(4),
        "no layers": model(3, num_layers=0),
        "a negative width": model(3, channels=-8),
        "three heads": model(3, num_heads=3),
        "a vocabulary beyond its padding": model(3, vocab_size=129),
        "more layers than bytes": model(3, num_layers=4),
        "fewer layers than bytes": model(3, num_layers=2),
        "sizes beyond 64 bits": model(3, num_layers=2**31 - 1, channels=2**31 - 2),
        "a short header": model(3)[:1000],
        "a missing byte": model(3)[:-1],
        "a byte more": model(3) + b"x",
    }
    for what, data in cases.items():
        path.write_bytes(data)
        ran = list_path(path)
        said = {"no layers": "num_layers of an llm.c model cannot be 0"}.get(what, "")
        check(ran.returncode == 4 and said in ran.stderr, f"{what}: {ran.returncode} {ran.stderr}")


def not_written(folder):
    path, out = folder / "v3.bin", folder / "out.bin"
    cases = {
        "a missing tensor": (["--exclude", "^lnfb$"], "lnfb"),
        "another name": (["--rename", "s/^lnfb$/final/"], "cannot hold the tensor 'final'"),
        "a missing number": (["--exclude", "^channels$"], "need the value 'channels'"),
        "biases of another size": ([word for rule in ("s/^qkvb$/x/", "s/^fcb$/qkvb/", "s/^x$/fcb/")
                                    for word in ("--rename", rule)], "'qkvb' does not have the shape"),
        "two dtypes": (["--dtype-for", "^wpe$=bf16"], "wpe"),
    }
    for what, (options, said) in cases.items():
        ran = run("fsdp-convert", path, out, "--to", "llmc", "-q", *options)
        check(ran.returncode == 2 and said in ran.stderr, f"{what}: {ran.returncode} {ran.stderr}")
        check(not out.exists(), f"{what}: nothing stays")


def main():
    with tempfile.TemporaryDirectory() as name:
        for version in VERSIONS:
            read_and_written(Path(name), version)
        refused(Path(name))
        not_written(Path(name))
    print(json.dumps(problems, indent=1) if problems else "llm.c's models are read and written")
    sys.exit(1 if problems else 0)


main()
