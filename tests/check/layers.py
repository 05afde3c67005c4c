"""Checks that includes only go down the layers and that third-party headers stay with their owners.

usage: layers.py REPOSITORY
"""

import re
import sys
from pathlib import Path

ROOT = Path(sys.argv[1])
MAY_INCLUDE = {
    "base": {"base"},
    "kernels": {"kernels", "base"},
    "formats": {"formats", "kernels", "base"},
    "statedict": {"statedict", "formats", "kernels", "base"},
    "runtime": {"runtime", "statedict", "kernels", "base"},
    "tools": {"tools"},
}
# All that a folder may see of another one, where that is less than everything.
ONLY = {("statedict", "formats"): {"formats/format.h", "formats/source.h",
                                   "formats/target.h"}}

# The rooms of runtime, from the ground up: each may include those before it, and itself.
ROOMS = ["bootstrap", "device", "comm", "comm_shared", "comm_message", "launch", "param", "context",
         "group", "step", "optim", "state", "wrap"]

THIRD_PARTY = {
    "hdf5.h": r"formats/hdf5_internal\.h|formats/hdf5_\w+\.c|tests/.*",
    "H5FDdevelop.h": r"formats/hdf5_(child_)?vfd\.c",
    "H5PLextern.h": r"formats/hdf5_plugin\.c",
    "mpi.h": r"runtime/(bootstrap/(ctl_mpi|mpi_process)|comm_message/p2p_mpi)\.[ch]|tests/mpi/.*",
    "zlib.h": r"formats/(source_stream|zip_read)\.c|tests/unit/test_(source|kernels_crc32)\.c",
    "zstd.h": r"kernels/codec\.c|formats/(hdf5_zstd|source_stream)\.c|tests/unit/test_source\.c",
    "zstd_errors.h": r"kernels/codec\.c",
    "xxhash.h": r"kernels/hash\.c|kernels/x86/hash_avx2\.c",
    "netdb.h": r"runtime/bootstrap/socket\.c",
    "netinet/in.h": r"runtime/bootstrap/socket\.c",
    "netinet/tcp.h": r"runtime/bootstrap/socket\.c",
    "immintrin.h": r"kernels/x86/.*",
    "cpuid.h": r"kernels/dispatch\.c",
    "pthread.h": r"base/(pool|json)\.c|base/io_sim_disk\.h|kernels/crc32\.c|"
    r"formats/hdf5_(library|session)\.c|"
    r"formats/((source|packed)_internal\.h|dcp_read\.c)|statedict/(ctl_threads|lease|verified)\.c|"
    r"runtime/(launch/launch_threads|device/device_async|comm_shared/shm_pool|bootstrap/mpi_process)\.c|"
    r"runtime/comm_message/(comm_message|p2p_tcp_internal)\.h|tests/.*",
    "criterion/criterion.h": r"tests/unit/.*",
    "criterion/parameterized.h": r"tests/unit/.*",
}
SYSTEM = re.compile(
    r"(sys|linux)/\w+\.h|(argp|assert|ctype|dirent|dlfcn|errno|fcntl|float|getopt|inttypes|limits|locale|"
    r"math|poll|regex|sched|setjmp|signal|stdalign|stdarg|stdatomic|stdbool|stddef|stdint|stdio|stdlib|"
    r"string|strings|time|unistd)\.h"
)
INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)')

rules = (ROOT / "CMakeLists.txt").read_text()
lists = re.findall(r"set\(FSDP_(?:PUBLIC|MPI)_HEADERS([^)]*)\)", rules)
PUBLIC = {Path(header).name: header for header in " ".join(lists).split()}


def third_party_problem(path, header):
    owners = THIRD_PARTY.get(header)
    if owners is None:
        return None if SYSTEM.fullmatch(header) else f"<{header}> has no owner listed in layers.py"
    return None if re.fullmatch(owners, path) else f"<{header}> belongs to {owners} only"


def layer_problem(path, target):
    here, there = path.split("/")[0], target.split("/")[0]
    if here == "tests":
        return None
    if there not in MAY_INCLUDE[here]:
        return f"{here} must not know {there} ({target})"
    if target not in ONLY.get((here, there), {target}):
        return f"{here} may see only {sorted(ONLY[here, there])} of {there}, not {target}"
    return room_problem(path, target) if here == there == "runtime" else None


def room_problem(path, target):
    here, there = path.split("/")[1], target.split("/")[1]
    if here not in ROOMS:
        return f"runtime/{here} is not a room listed in layers.py"
    if ROOMS.index(here) < ROOMS.index(there):
        return f"runtime/{here} is below runtime/{there} ({target})"
    return None


def problem(path, quoted, bracketed):
    if quoted:
        if quoted in PUBLIC.values():
            return f'"{quoted}" is public: include <fsdp/{Path(quoted).name}>'
        if not (ROOT / quoted).is_file():
            return f'"{quoted}" is not a path from the root of the tree'
        return layer_problem(path, quoted)
    if not bracketed.startswith("fsdp/"):
        return third_party_problem(path, bracketed)
    name = bracketed.removeprefix("fsdp/")
    if path.startswith(("tools/", "tests/")):
        return None if name == "fsdp.h" or name in PUBLIC else f"<{bracketed}> is not public"
    if name not in PUBLIC:
        return f"<{bracketed}> is not a public header of one file"
    return layer_problem(path, PUBLIC[name])


def main():
    problems, files = [], 0
    for folder in [*MAY_INCLUDE, "tests"]:
        for source in sorted((ROOT / folder).rglob("*.[ch]")):
            path = source.relative_to(ROOT).as_posix()
            files += 1
            for number, line in enumerate(source.read_text().splitlines(), 1):
                found = INCLUDE.match(line)
                said = found and problem(path, *found.groups())
                if said:
                    problems.append(f"{path}:{number}: {said}")
    print("\n".join(problems) or f"{files} files, every include goes down")
    return 1 if problems or files == 0 else 0


sys.exit(main())
