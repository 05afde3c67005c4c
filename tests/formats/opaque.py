"""Values that only Python understands: out of torch.save files and sets of rank files, into what holds blobs,
and listed there as they were.

usage: opaque.py BIN
"""

import datetime
import json
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from torch_files import Storage, Tensor, function, save, stand_in, tensor

BIN = Path(sys.argv[1])
USAGE, REFUSED = 2, 5
Config, Table, Rows = (stand_in("mine", name, base) for name, base in
                       (("Config", object), ("Table", dict), ("Rows", list)))
problems = []


def run(program, *arguments):
    command = [str(BIN / program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def check(truth, told):
    if not truth:
        problems.append(told)


def listing(path):
    ran = run("fsdp-ls", "--json", "--digest", "sha256", path)
    check(ran.returncode == 0, f"{path}: {ran.stderr}")
    listed = json.loads(ran.stdout) if ran.returncode == 0 else {}
    return {key: listed.get(key) for key in ("tensors", "values")}


def check_same(source, expected, folder, targets):
    for name, *options in targets:
        path = folder / name
        ran = run("fsdp-convert", source, path, *options, "--overwrite", "--opaque", "copy")
        check(ran.returncode == 0, f"{source} -> {name}: {ran.returncode} {ran.stderr}")
        check(ran.returncode != 0 or listing(path) == expected, f"{source} -> {name}: {listing(path)}")


def objects():
    shared, cycle = Storage([0.5, 1.5, 2.5, 3.5]), []
    cycle.append(cycle)
    config, table, rows = Config(), Table(a=tensor(7.0)), Rows([1, tensor(8.0)])
    config.weight, config.view = Tensor(shared, 0, 4), Tensor(shared, 1, 2)
    config.big, config.raw, config.text = 1 << 70, b"\xff\0", "grün"
    config.pair = (config.weight, {2, 3})
    return {"config": config, "again": {"config": config}, "table": table, "rows": rows, "set": {1, 2},
            "frozen": frozenset([3]), "mixed": [1, {2, 3}], "when": datetime.datetime(2020, 1, 2),
            "path": pathlib.PurePosixPath("/a"), "class": Config, "weight": config.weight, "inside": cycle,
            "empty": tensor()}


EVERYWHERE = [("a.dcp", "--world-size", "2"), ("a.h5",), ("native", "--to", "fsdp", "--world-size", "2")]


def of_torch_save(folder):
    for protocol in (2, 3, 4, 5):
        source = folder / f"objects-{protocol}.pt"
        save(source, objects(), protocol)
        expected = listing(source)
        check(expected["values"]["config"] == {"opaque": "mine.Config"}, f"{expected}")
        check_same(source, expected, folder, EVERYWHERE)
        check_same(folder / "native", expected, folder, [("from-native.dcp",)])
        check_same(folder / "from-native.dcp", expected, folder, [("from-dcp", "--to", "fsdp")])
        ran = run("fsdp-convert", source, folder / "no.pt")
        check(ran.returncode == USAGE and "--drop opaque" in ran.stderr, f"torch took it: {ran.stderr}")


def too_large(folder):
    """More than fits into memory is not carried, and that is said before work starts."""
    large = Config()
    large.weight = Tensor(Storage([0.0] * (17 << 20)), 0, 17 << 20)
    save(folder / "large.pt", {"large": large})
    ran = run("fsdp-convert", folder / "large.pt", folder / "large.dcp", "-n")
    check(ran.returncode == USAGE and "'large'" in ran.stderr, f"{ran.returncode} {ran.stderr}")


def of_ranks(folder):
    """Tensors that differ from rank to rank, objects next to them."""
    (folder / "ranks").mkdir()
    for rank in range(3):
        values = {"rng": tensor(rank, 1.0), "same": tensor(4.0), "nest": {"of": [Config(), rank]}}
        save(folder / f"ranks/state_rank_{rank}.pt", values)
    expected = listing(folder / "ranks")
    inner = expected["values"]["rng"]["per_rank"]
    check(len(inner) == 3 and all("tensor" in one for one in inner), f"{expected}")
    check_same(folder / "ranks", expected, folder, EVERYWHERE[1:])
    ran = run("fsdp-convert", folder / "ranks", folder / "ranks.dcp")
    check(ran.returncode == USAGE and "'rng'" in ran.stderr, f"dcp took it: {ran.stderr}")


CODE = {"config": "mine.Config", "again.config": "mine.Config", "table": "mine.Table", "rows": "mine.Rows",
        "class": "mine.Config"}


def code_of(told):
    """The members "code" of a plan, by name."""
    found = json.loads(told).get("code", [])
    check(all(one["bytes"] > 0 for one in found), f"{found}")
    return {one["name"]: one["class"] for one in found}


def code_on_request(folder):
    """Objects of unknown classes run code when they are loaded: nothing copies them unasked."""
    source, plan = folder / "code.pt", folder / "plan.json"
    save(source, objects())
    for name, *options in EVERYWHERE:
        ran = run("fsdp-convert", source, folder / f"no-{name}", *options)
        check(ran.returncode == USAGE, f"{name} took it: {ran.stderr}")
        check("'config (mine.Config)'" in ran.stderr and "'set" not in ran.stderr, ran.stderr)
        check("--opaque copy" in ran.stderr, ran.stderr)
        check(not (folder / f"no-{name}").exists(), f"{name} is there")
        ran = run("fsdp-convert", source, folder / f"no-{name}", *options, "--opaque", "copy", "-n", "--json")
        check(code_of(ran.stdout) == CODE, f"{name}: {ran.stdout}")
        drops = ["-X", "^(config|again|table|rows|class)", "--overwrite"]
        ran = run("fsdp-convert", source, folder / f"some-{name}", *options, *drops)
        check(ran.returncode == 0 and "code" not in ran.stderr, f"{name}: {ran.stderr}")
        check("set" in listing(folder / f"some-{name}")["values"], "sets are no code")
        written = [folder / f"some-{name}", *(folder / f"some-{name}").glob("*")]
        check(not any(b"mine" in path.read_bytes() for path in written if path.is_file()), f"code in {name}")
    ran = run("fsdp-convert", source, folder / "p.dcp", "-n", "--opaque", "copy", "--plan-out", plan)
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("  object config ")]
    check("(mine.Config, " in line and line.endswith(") runs code when loaded"), ran.stdout)
    check(code_of(plan.read_text()) == CODE, plan.read_text())
    ran = run("fsdp-convert", "--apply", plan)
    check(ran.returncode == 0 and "5 objects run code when they are loaded: " in ran.stderr, ran.stderr)
    check((folder / "p.dcp").exists(), "the plan was not applied")


def verify_names_code(folder):
    """fsdp-verify names the files that hold such objects, in every format that has pickles."""
    source, plain = folder / "code.pt", folder / "plain.pt"
    save(source, {"config": Config(), "set": {1}, "weight": tensor(1.0)})
    save(plain, {"set": {1}, "weight": tensor(1.0)})
    paths = {source: "code.pt"}
    for name, file, *options in (("v.dcp", "__0_0.distcp"), ("v.h5", ""),
                                 ("v.native", "manifest.json", "--to", "fsdp")):
        ran = run("fsdp-convert", source, folder / name, *options, "--opaque", "copy")
        check(ran.returncode == 0, ran.stderr)
        paths[folder / name] = file
    for path, file in paths.items():
        ran = run("fsdp-verify", path)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("code  ")]
        check(ran.returncode == 0 and len(lines) == 1 and lines[0].endswith("mine.Config"), ran.stdout)
        check(ran.stdout.rstrip().endswith("1 file with code"), ran.stdout)
        told = json.loads(run("fsdp-verify", "--quick", "--json", path).stdout)["paths"][0]
        (finding,) = told["findings"]
        check(finding["kind"] == "code" and finding["file"].endswith(file), f"{finding}")
        check(told["code_files"] == 1 and told["good"], f"{told}")
    (folder / "files").mkdir()
    for rank in range(3):
        save(folder / f"files/state_rank_{rank}.pt", {"nest": {"of": [Config(), rank]}, "same": tensor(4.0)})
    array = folder / "objects.npz"
    with zipfile.ZipFile(array, "w") as archive:
        header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
        head = b"\x93NUMPY\1\0" + struct.pack("<H", len(header))
        archive.writestr("a.npy", head + header + pickle.dumps([1]))
    for path, count in ((folder / "files", 3), (array, 1)):
        told = json.loads(run("fsdp-verify", "--json", path).stdout)["paths"][0]
        check(told["code_files"] == len(told["findings"]) == count, f"{told}")
    ran = run("fsdp-verify", "--json", plain)
    told = json.loads(ran.stdout)["paths"][0]
    check(told["code_files"] == 0 and told["findings"] == [], f"{told}")


class Command:
    def __reduce__(self):
        return os.system, ("true",)


def nested_pickles(folder):
    """A pickle that a class loads itself holds no call either, however it is stored."""
    Wrapper = stand_in("torch.utils.data.datapipes.datapipe", "_IterDataPipeSerializationWrapper")
    for protocol in range(6):
        wrapper = Wrapper()
        wrapper.state = [pickle.dumps({"fn": Command()}, protocol)]
        for outer in (2, 4):
            save(folder / "nested.pt", {"pipe": wrapper, "weight": tensor(1.0)}, outer)
            ran = run("fsdp-ls", folder / "nested.pt")
            check(ran.returncode == REFUSED, f"{protocol}: {ran.stderr}")
            check("bytes in an object" in ran.stderr, ran.stderr)
        wrapper.state = [pickle.dumps({"fn": 1, "size": [2.5]}, protocol)]
        save(folder / "nested.pt", {"pipe": wrapper, "weight": tensor(1.0)})
        ran = run("fsdp-ls", folder / "nested.pt")
        check(ran.returncode == 0, f"{protocol}: {ran.stderr}")


class Jagged:
    """As PyTorch 2.15 writes a nested tensor of the layout torch.jagged."""
    def __reduce__(self):
        module = "torch.nested._internal.nested_tensor"
        members = {"values": tensor(1.0, 2.0, 3.0), "offsets": tensor(0.0, 1.0, 3.0), "lengths": None,
                   "_ragged_idx": 1, "_metadata_cache": {}}
        arguments = (members,)
        return (function("torch._tensor", "_rebuild_from_type_v2"),
                (function(module, "_rebuild_njt"), stand_in(module, "NestedTensor"), arguments, {}))


def jagged(folder):
    source = folder / "jagged.pt"
    save(source, {"w": Jagged(), "d": tensor(1.0), "step": 3})
    check(listing(source)["values"]["w"]["opaque"].endswith("NestedTensor"), f"{listing(source)}")
    ran = run("fsdp-convert", source, folder / "jagged.safetensors", "--drop", "values")
    check(ran.returncode == USAGE and "1 jagged tensor: 'w'" in ran.stderr, ran.stderr)
    ran = run("fsdp-convert", source, folder / "jagged.dcp")
    check(ran.returncode == 0, ran.stderr)
    ran = run("fsdp-convert", folder / "jagged.dcp", folder / "jagged.safetensors", "--drop", "values")
    check(ran.returncode == USAGE and "--drop tensors:jagged" in ran.stderr, f"out of a blob: {ran.stderr}")


with tempfile.TemporaryDirectory() as place:
    for test in (jagged, of_torch_save, too_large, of_ranks, code_on_request, verify_names_code,
                 nested_pickles):
        test(Path(place))
print("\n".join(problems) or "what only Python understands goes along")
sys.exit(1 if problems else 0)
