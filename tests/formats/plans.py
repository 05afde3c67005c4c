"""Plans of conversions of other programs' checkpoints: every file that is read is among the sources, and a
change of any of them is noticed; parts name the files that hold them; a plan is never put in the way.

usage: plans.py BIN GOLDEN
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BIN, GOLDEN = Path(sys.argv[1]), Path(sys.argv[2])
USAGE, DAMAGED = 2, 4
CASES = {
    "dcp/plain-w2": [".metadata"],
    "dcp/rank-metadata-w2": ["__0.metadata", "__1.metadata"],
    "torchsave/hf_bin_sharded": ["pytorch_model.bin.index.json"],
    "hf/qwen2_sharded_bf16": ["model.safetensors.index.json"],
    "safetensors/hf_sharded": ["model.safetensors.index.json"],
    "rankfiles/fsdp2-uneven-w4": [],
}
problems = []


def run(program, *arguments):
    command = [str(BIN / program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def check(truth, told):
    if not truth:
        problems.append(told)


def plan_of(source, target, plan, *options):
    ran = run("fsdp-convert", source, target, "-n", "-q", "--drop", "opaque", "--plan-out", plan, *options)
    check(ran.returncode == 0, f"{source}: {ran.returncode} {ran.stderr}")
    return json.loads(plan.read_text())


def is_read(path):
    return path.suffix in (".distcp", ".bin", ".safetensors", ".pt") and path.is_file()


def changed_later(path):
    times = path.stat()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))


def sources(folder, case, descriptions):
    source = folder / case.replace("/", "-")
    shutil.copytree(GOLDEN / case / "data", source)
    plan = source.with_suffix(".plan")
    target = source.with_suffix(".result")
    planned = plan_of(source, target, plan, "--to", "fsdp")
    listed = {Path(one["path"]) for one in planned["sources"]}
    expected = {source / name for name in descriptions} | set(filter(is_read, source.iterdir()))
    check(listed == expected, f"{case}: {listed ^ expected}")
    for path in sorted(expected):
        changed_later(path)
        ran = run("fsdp-convert", "--apply", plan)
        check(ran.returncode == DAMAGED and path.name in ran.stderr, f"{path}: {ran.returncode} {ran.stderr}")
        check(not target.exists(), f"{path}: it was converted")
        plan_of(source, target, plan, "--to", "fsdp")


def swapped(folder):
    """Two entries of .metadata change places: a resumed conversion starts again, an old plan is refused."""
    source, plan = folder / "swapped", folder / "swapped.plan"
    shutil.copytree(GOLDEN / "dcp/plain-w2" / "data", source)
    before = plan_of(source, folder / "x", plan, "--to", "fsdp")["hash"]
    changed_later(source / ".metadata")
    after = plan_of(source, folder / "x", plan, "--to", "fsdp")["hash"]
    check(after != before, "the hash knows no .metadata")


def parts(folder):
    for to, *options in (("x.safetensors", "--drop", "values"), ("x.dcp",)):
        planned = plan_of(GOLDEN / "dcp/plain-w2" / "data", folder / to, folder / "parts.plan", *options)
        used = {number for one in planned["outputs"] for part in one["parts"] for number in part["files"]}
        names = {Path(planned["sources"][number]["path"]).name for number in used}
        check(names == {"__0_0.distcp", "__1_0.distcp"}, f"{to}: parts come from {names}")


def in_the_way(folder):
    source = folder / "way"
    shutil.copytree(GOLDEN / "dcp/plain-w2" / "data", source)
    before = sorted(source.iterdir())
    (folder / "old").mkdir()
    for target, plan in (("new.pt", "new.pt"), ("new", "new"), ("old", "old/plan"), ("new", "./new/"),
                         ("new", "way/.metadata"), ("new", "way/__0_0.distcp")):
        ran = run("fsdp-convert", source, folder / target, "--to", "torch" if "." in target else "fsdp",
                  "--overwrite", "--drop", "opaque", "--plan-out", folder / plan)
        refused = ran.returncode == USAGE and "use another name" in ran.stderr
        check(refused or target == "old", f"{plan}: {ran.returncode} {ran.stderr}")
        check(not (folder / "new").exists() and not (folder / "new.pt").exists(), f"{plan}: it was written")
    check(sorted(source.iterdir()) == before and not any((folder / "old").iterdir()), "something was written")


def stillborn(folder):
    """Conversions that were killed before they had a marker: empty and old directories go. An empty marker
    may be somebody's where files cannot be locked."""
    source = GOLDEN / "dcp/plain-w2" / "data"
    names = {"bare": "a", "marked": "b", "young": "c", "used": "d"}
    paths = {what: folder / f"s.dcp.tmp-{digit * 32}" for what, digit in names.items()}
    for path in paths.values():
        path.mkdir()
    (paths["marked"] / ".saving").touch()
    (paths["used"] / ".saving").touch()
    (paths["used"] / "result").touch()
    for what in ("bare", "marked", "used"):
        os.utime(paths[what], (1, 1))
    ran = run("fsdp-convert", source, folder / "s.dcp", "--drop", "opaque")
    check(ran.returncode == 0, ran.stderr)
    left = {what for what, path in paths.items() if path.exists()}
    check(left == {"marked", "young", "used"}, f"left: {left}")


with tempfile.TemporaryDirectory() as place:
    for name, description in CASES.items():
        sources(Path(place), name, description)
    for test in (swapped, parts, in_the_way, stillborn):
        test(Path(place))
print("\n".join(problems) or "plans tell all that they read")
sys.exit(1 if problems else 0)
