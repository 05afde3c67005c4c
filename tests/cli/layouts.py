"""Every directory of tests/golden/layouts, as frameworks write them, converts by the command typed on it.

usage: layouts.py BUILD [CASE...] [--update]    --update writes the table of docs/cookbook/made_by.md

The commands of expected.json run next to a copy of the case's data. The test compares the tensors of the
result (name, dtype, shape, bytes), the files next to them, and the words of the messages.
docs/cookbook/made_by.md has a row for each case: the outermost path that works.
"""

import concurrent.futures
import hashlib
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

BUILD = Path(sys.argv[1]).resolve()
FEWER = "FSDP_TEST_FEWER" in os.environ  # a slow build: the outermost paths
UPDATE = "--update" in sys.argv[2:]
ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = ROOT / "tests/golden/layouts"
PAGE = ROOT / "docs/cookbook/made_by.md"
SECONDS = 60
FEW = 8

# Beginnings of rows of made_by.md: each layout that the tools know has one.
FRAMEWORKS = [
    "Accelerate with FSDP1", "Accelerate with FSDP2", "Accelerate: save_state(use_dcp=False)",
    "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3", "Flax", "git clone without git-lfs", "Lightning: FSDPStrategy",
    "llama.cpp", "llm.c", "Megatron-LM", "Meta's Llama", "MLX", "mlx_lm", "model.save('x.keras')",
    "nanochat", "nanoGPT", "Nanotron", "NeMo", "Orbax", "PEFT", "save_for_hf() of timm",
    "save_pretrained() of a diffusers pipeline",
    "save_pretrained(distributed_checkpoint=True) of transformers 5", "SentenceTransformer", "SkyRL",
    "torch.distributed.checkpoint of {'app'", "torch.export.save", "torch.jit.save",
    "torch.save of a training loop", "torchtitan", "torchtune", "train.py of timm", "Trainer of Lightning",
    "Trainer of transformers", "verl",
]


def header_of(path):
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return 8 + length, json.loads(file.read(length))


def tensors_of(path):
    """{name: what expected.json says of it} of a safetensors file."""
    start, header = header_of(path)
    header.pop("__metadata__", None)
    data = path.read_bytes()
    found = {}
    for name, one in header.items():
        first, last = (start + at for at in one["data_offsets"])
        found[name] = {"dtype": one["dtype"], "shape": one["shape"],
                       "sha256": hashlib.sha256(data[first:last]).hexdigest()}
    return found


def weights_of(folder, weights):
    """The tensors that a loader finds: those of the index, or of the one file."""
    index = folder / f"{weights}.index.json"
    files = [weights]
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found = {}
    for name in files:
        if not (folder / name).is_file():
            lying = ", ".join(sorted(one.name for one in folder.glob("*"))) or "nothing"
            return None, [f"no {folder.name}/{name}: {lying}"]
        found |= tensors_of(folder / name)
    return found, []


def tensor_problems(where, found, expected):
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            yield f"{where}: no tensor {name!r}"
        elif name not in expected:
            yield f"{where}: {name!r} does not belong to it"
        elif found[name] != expected[name]:
            yield f"{where}: {name!r} is {found[name]}, not {expected[name]}"


def same_file(left, right, edited):
    """edited: members of the source's file that are others in the result."""
    if left.suffix == ".json":
        source = json.loads(right.read_text())
        return json.loads(left.read_text()) == (source | edited if edited else source)
    return left.read_bytes() == right.read_bytes()


def result_problems(work, expected):
    out = work / "out"
    found, problems = weights_of(out, expected["weights"])
    if found is not None:
        problems += tensor_problems("out", found, expected["tensors"])
    for part, tensors in expected.get("parts", {}).items():
        held, lacking = weights_of(out / part, "model.safetensors")
        problems += lacking if held is None else tensor_problems(part, held, tensors)
    for name, source in expected["files"].items():
        if not (out / name).is_file():
            problems.append(f"no {name}")
        elif not same_file(out / name, work / source, expected.get("edited", {}).get(name)):
            problems.append(f"{name} is not the source's")
    return problems


def run(work, command):
    words = shlex.split(command)
    program = BUILD / "bin" / words[0]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_")}
    return subprocess.run([str(program), *words[1:]], cwd=work, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, errors="backslashreplace", timeout=SECONDS,
                          check=False)


def problems_of(work, expected):
    """Problems after one command; expected is the case's, with what its path says otherwise."""
    ran = run(work, expected["command"])
    told = ran.stdout + ran.stderr
    words = expected.get("says", [])
    left_out = expected.get("left_out", [])
    if expected.get("exit") == "refused":
        problems = [] if ran.returncode not in (0, 1) else [f"status {ran.returncode}, not a refusal"]
        problems += ["out was written"] if (work / "out").exists() else []
    else:
        problems = [f"status {ran.returncode}"] if ran.returncode else result_problems(work, expected)
        problems += [f"{part!r} is not named" for part in left_out if part.lower() not in told.lower()]
    problems += [f"the message has no {word!r}" for word in words if word not in told]
    return problems[:FEW] + [f"printed: {told.strip()[:FEW * 100]}"] if problems else []


def key_of(name, one):
    return f"{name}: {one['command'].partition(' ')[2]}"


def case_problems(name):
    """{command of the case: what is wrong}"""
    case = json.loads((LAYOUTS / name / "expected.json").read_text())
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        shutil.copytree(LAYOUTS / name / "data", work)
        for one in case["paths"][:1 if FEWER else None]:
            shutil.rmtree(work / "out", ignore_errors=True)
            found[key_of(name, one)] = problems_of(work, {**case, **one})
    return found


def outermost(case):
    return next((one for one in case["paths"] if "tensors" not in one), None)


def row_of(case, typed):
    then = f"an error that names {typed['says'][0]}" if "exit" in typed else f"`out/{case['weights']}`"
    return f"| {case['made_by']} | `{case['looks_like']}` | `{typed['command']}` | {then} |"


def page_of(cases):
    """The page with a row for each case: the outermost command."""
    read = [json.loads((LAYOUTS / name / "expected.json").read_text()) for name in cases]
    rows = [row_of(case, outermost(case)) for case in read]
    head, mark, _ = PAGE.read_text().partition("|---|---|---|---|\n")
    return head + mark + "\n".join(sorted(rows, key=str.lower)) + "\n"


def main():
    every = sorted(one.parent.name for one in LAYOUTS.glob("*/expected.json"))
    chosen = [name for name in sys.argv[2:] if name != "--update"] or every
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = {command: lines for one in pool.map(case_problems, chosen) for command, lines in one.items()}
    failed = {command: lines for command, lines in found.items() if lines}
    for command, lines in failed.items():
        print(f"--- {command}")
        print("\n".join(lines))
    page = page_of(every)
    if UPDATE:
        PAGE.write_text(page)
    stale = PAGE.read_text() != page
    made_by = page.rpartition("|---|---|---|---|\n")[2]
    rowless = [name for name in FRAMEWORKS if f"| {name}" not in made_by]
    print("".join(f"{PAGE.name} has no row for {name}\n" for name in rowless), end="")
    print(f"{PAGE.name} is stale: --update writes it\n" * stale, end="")
    print(f"{len(found)} commands of {len(chosen)} cases, {len(failed)} wrong")
    return 1 if failed or stale or rowless or not found else 0


if __name__ == "__main__":
    sys.exit(main())
