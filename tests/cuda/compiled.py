"""Checks what nvcc made of the kernels: no kernel spills registers or has a stack frame, those that memory
bounds load and store 16 bytes at a time, and registers, shared memory and the bytes that a thread has under
way (sass.py) are those of registers.txt. Compiles nothing: kernels/cuda/compile.sh keeps what ptxas says, the
PTX and the machine code. Another version of nvcc may give other
registers: it must have the same kernels, and the rest is checked. Without nvcc's objects: 77, skipped.

usage: compiled.py BUILD [--update]
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

from sass import bytes_under_way

HERE = Path(__file__).resolve().parent
KEPT = Path(sys.argv[1]) / "CMakeFiles/fsdp_cuda.dir/kernels/cuda"
KERNELS = HERE.parent.parent / "kernels/cuda"
TABLE = HERE / "registers.txt"
TARGETS = ("sm_80", "sm_90a")
COMPILED = re.compile(
    r"Compiling entry function '(\w+)' for '(\w+)'(.*?)(?=Compiling entry function|\Z)", re.S)
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
VECTORS = {"ld": re.compile(r"ld\.global(\.nc)?(\.\w+)*\.(v4\.[a-z]32|v2\.[a-z]64)"),
           "st": re.compile(r"st\.global(\.\w+)*\.(v4\.[a-z]32|v2\.[a-z]64)")}
ENTRY = re.compile(r"\.entry (\w+)\((.*?)^\}", re.S | re.M)
# Kernels that do not load, or do not store, tensors; all others do both by vectors.
ONLY_LOAD = {"sum_groups", "find_infinite", "hash_spans"}
SMALL = {"sum_spans", "begin_finite", "find_norm"}
# Those that take one element at a time: of f64 and integers, and with pow.
BY_ELEMENT = re.compile(r"\w+<double,|fold_integers|sum_groups<2,")
TYPES = {"f": "float", "d": "double", "j": "uint32_t", "m": "uint64_t"}


def readable(symbol):
    """The name of a kernel, with its template arguments: _Z8step_sgdIfLj8EEv... is step_sgd<float,8>."""
    size = re.match(r"_Z(\d+)", symbol)
    begin, length = size.end(), int(size[1])
    name, rest = symbol[begin:begin + length], symbol[begin + length:]
    arguments = re.match(r"I((?:[fdjm]|L(?:j|\d+[a-z_]+)\d+E)+)E", rest)
    if not arguments:
        return name
    found = re.findall(r"L(?:j|\d+[a-z_]+)(\d+)E|([fdjm])", arguments[1])
    return f"{name}<{','.join(number or TYPES[letter] for number, letter in found)}>"


def compiled(path):
    """For each symbol and target of a file: the problem, if any, registers and shared memory."""
    for symbol, target, text in COMPILED.findall(path.read_text()):
        frame = FRAME.search(text)
        registers, shared = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes smem", text)
        fits = frame and frame.groups() == ("0", "0", "0")
        problem = None if fits else f"{readable(symbol)} for {target}: {frame[0] if frame else 'no report'}"
        yield symbol, target, problem, int(registers[1]), int(shared[1]) if shared else 0


def problems_of_ptx(path, kernels):
    bodies = {readable(symbol): body for symbol, body in ENTRY.findall(path.read_text())}
    if bodies.keys() != kernels:
        yield f"{path.name} has the kernels {sorted(bodies)}, and ptxas saw {sorted(kernels)}"
    for kernel, body in bodies.items():
        name = kernel.partition("<")[0]
        wanted = ("ld",) if name in ONLY_LOAD else ("ld", "st")
        if name in SMALL or BY_ELEMENT.match(kernel):
            wanted = ()
        for kind in wanted:
            if not VECTORS[kind].search(body):
                yield f"{path.name}: {kernel} has no {kind}.global of 16 bytes"


def main():
    reports = [path for path in sorted(KEPT.glob("*.cu.o.ptxas"))
               if (KERNELS / path.name.removesuffix(".o.ptxas")).is_file()]
    if not reports:
        print(f"{KEPT} has no kernels: nvcc is not there, or FSDP_WITH_CUDA is off")
        return 77
    problems, rows, targets = [], [], defaultdict(set)
    for report in reports:
        name = report.name.partition(".")[0]
        kernels, kept = set(), KEPT / f"{name}_kept"
        under_way = {target: bytes_under_way(next(kept.glob(f"*{target.removeprefix('sm_')}*.cubin")))
                     for target in TARGETS}
        for symbol, target, problem, registers, shared in compiled(report):
            kernel, loads = readable(symbol), under_way[target][symbol]
            kernels.add(kernel)
            problems += [problem] if problem else []
            targets[kernel].add(target)
            rows.append(f"{name + '.cu':<10} {kernel:<30} {target:<7} {registers:>9} {shared:>6}"
                        f" {loads:>9}")
        ptx = sorted(kept.glob("*.ptx"))
        problems += [] if len(ptx) == len(TARGETS) else [f"{name}: {len(ptx)} files of PTX"]
        problems += [problem for path in ptx for problem in problems_of_ptx(path, kernels)]
    problems += [f"{kernel} is compiled for {sorted(found)}, not {list(TARGETS)}"
                 for kernel, found in targets.items() if found != set(TARGETS)]
    version = re.search(r"Cuda compilation tools, release (\S+),", ptx[0].read_text())[1]
    table = "\n".join([f"# nvcc {version}: python3 tests/cuda/compiled.py build --update",
                       f"{'# file':<10} {'kernel':<30} {'target':<7} {'registers':>9} {'shared':>6}"
                       " under way",
                       *sorted(rows)])
    if "--update" in sys.argv:
        TABLE.write_text(table + "\n")
    golden = TABLE.read_text()
    listed = {line.split()[1] for line in golden.splitlines() if not line.startswith("#")}
    problems += [f"{kernel} is only in registers.txt, or only in the objects"
                 for kernel in sorted(listed ^ targets.keys())]
    if golden.startswith(f"# nvcc {version}:") and golden != table + "\n":
        lines = golden.splitlines()
        problems += [f"not in registers.txt: {row}" for row in table.splitlines() if row not in lines]
        problems += [f"only in registers.txt: {row}" for row in lines if row not in table.splitlines()]
    print("\n".join(problems)
          or f"{len(targets)} kernels for {len(TARGETS)} targets, none spills; nvcc {version}")
    return 1 if problems else 0


sys.exit(main())
