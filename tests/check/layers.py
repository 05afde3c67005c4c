"""Checks that includes only go down the layers and rooms; third-party headers stay with their owners.

usage: layers.py REPOSITORY
"""

import re
import sys
from pathlib import Path

from rooms import ROOMS, room, sources

ROOT = Path(sys.argv[1])
MAY_INCLUDE = {
    "base": {"base"},
    "kernels": {"kernels", "base"},
    "formats": {"formats", "kernels", "base"},
    "statedict": {"statedict", "formats", "kernels", "base"},
    "runtime": {"runtime", "statedict", "formats", "kernels", "base"},
    "tools": {"tools", "runtime", "kernels", "base"},
}
# All that a folder may see of another one, where that is less than everything.
ONLY = {("statedict", "formats"): {"formats/format.h", "formats/frameworks.h", "formats/sentencepiece.h",
                                    "formats/shard.h", "formats/source.h", "formats/target.h",
                                    "formats/tokenizer_json.h"},
        ("runtime", "formats"): {"formats/tokenizer_json.h"},
        ("tools", "base"): {"base/text.h", "base/values_shape.h", "base/data/json.h"},
        ("tools", "kernels"): {"kernels/digest.h"},
        ("tools", "runtime"): {"runtime/comm_nccl/nccl_library.h", "runtime/tokens/token_data.h",
                               "runtime/tokens/tokenize_lines.h", "runtime/tokens/tokenizer.h",
                               "runtime/transformer/transformer.h"}}

THIRD_PARTY = {
    "hdf5.h": r"formats/hdf5(_child)?/hdf5_\w+\.[ch]|tests/.*",
    "H5FDdevelop.h": r"formats/(hdf5/hdf5_file|hdf5_child/hdf5_child)\.c",
    "H5PLextern.h": r"formats/hdf5/hdf5_plugin\.c",
    "mpi.h": r"runtime/(bootstrap/(ctl_mpi|mpi_process)|comm_message/p2p_mpi)\.[ch]|tests/mpi/.*",
    "zlib.h": r"formats/(source/source_stream|zip/zip|hdf5_child/hdf5_child_chunk)\.c"
              r"|tests/unit/.*/test_(source|kernels_crc32)\.c",
    "zstd.h": r"kernels/bytes/codec\.c|formats/(hdf5/hdf5_zstd|source/source_stream)\.c|"
    r"tests/unit/.*/test_source\.c",
    "zstd_errors.h": r"kernels/bytes/codec\.c",
    "xxhash.h": r"kernels/bytes/xxh3\.h",
    "seccomp.h": r"formats/hdf5_child/hdf5_sandbox\.c",
    "netdb.h": r"runtime/bootstrap/socket\.c",
    "netinet/in.h": r"runtime/bootstrap/socket\.c",
    "netinet/tcp.h": r"runtime/bootstrap/socket\.c",
    "sanitizer/asan_interface.h": r"tests/cuda/fiber\.c",
    "sanitizer/common_interface_defs.h": r"tests/cuda/fiber\.c",
    "cublasLt.h": r"tests/gpu_check/(cublaslt|fake_cublaslt)\.c",
    "cuda_fp16.h": r"kernels/cuda/numbers\.cuh",
    "cuda_fp8.h": r"kernels/cuda/numbers\.cuh",
    "cuda_runtime.h": r"runtime/device/device_cuda\.c|tests/.*",
    "immintrin.h": r"kernels/x86/.*",
    "cpuid.h": r"kernels/processor\.c",
    "pthread.h": r"base/(core/pool|data/json|io/io_cache)\.c|kernels/(bytes/crc32|nn/nn_(openblas|team))\.c|"
    r"formats/(hdf5/hdf5_file|hdf5_child/hdf5_session)\.c|"
    r"formats/(source/source_internal\.h|target/packed_internal\.h|dcp/dcp_read\.c)|"
    r"formats/deepspeed/universal_write\.c|"
    r"statedict/(ctl/ctl_threads|commit/lease|run/run)\.c|"
    r"runtime/(launch/launch_threads|background/async_save|comm_shared/transport_shm)\.c|"
    r"runtime/staging/(snapshot|load_copies)\.h|"
    r"runtime/device/device_(async|cuda)\.c|"
    r"runtime/bootstrap/ctl_mpi\.c|"
    r"runtime/comm_nccl/(comm_nccl\.h|nccl_library\.c)|"
    r"runtime/comm_message/(comm_message|p2p_tcp_internal)\.h|tests/.*",
    "malloc.h": r"tests/.*",
    "nccl.h": r"tests/nccl/nccl_header\.c",
    "criterion/criterion.h": r"tests/unit/.*",
    "criterion/parameterized.h": r"tests/unit/.*",
}
SYSTEM = re.compile(
    r"(sys|linux)/\w+\.h|(argp|assert|ctype|dirent|dlfcn|errno|fcntl|float|getopt|glob|inttypes|limits|"
    r"locale|math|poll|regex|sched|setjmp|signal|stdalign|stdarg|stdatomic|stdbool|stddef|stdint|stdio|"
    r"stdlib|string|strings|time|ucontext|unistd)\.h"
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
    if target == "runtime/wrap.h" and not path.startswith("runtime/wrap/"):
        return f"the engine and the tools do without the library fsdp_wrap ({target})"
    if target not in ONLY.get((here, there), {target}):
        return f"{here} may see only {sorted(ONLY[here, there])} of {there}, not {target}"
    return room_problem(here, room(path), room(target)) if here == there else None


def room_problem(folder, here, there):
    rooms = ROOMS[folder]
    for name in (here, there):
        if name not in rooms:
            return f"{folder}/{name} is not a room listed in layers.py"
    if rooms.index(here) < rooms.index(there):
        return f"{folder}/{here} is below {folder}/{there}"
    return None


# Headers that the build makes: the texts of the built-in maps, and tables that are texts.
GENERATED = {"statedict/map/map_texts.h", "statedict/map/hub_names.h", "statedict/models/model_texts.h",
             "statedict/select/parameter_orders.h", "statedict/derive/tied_classes.h"}


def problem(path, quoted, bracketed):
    if quoted:
        if quoted in PUBLIC.values():
            return f'"{quoted}" is public: include <fsdp/{Path(quoted).name}>'
        if not (ROOT / quoted).is_file() and quoted not in GENERATED:
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


def rooms_without_place_on_map():
    """docs/architecture.md begins with a picture of all rooms."""
    picture = (ROOT / "docs/architecture.md").read_text().split("```")[1].split()
    names = {name for rooms in ROOMS.values() for name in rooms} - {"."}
    return [f"docs/architecture.md does not show the room {name}" for name in sorted(names - set(picture))]


def main():
    problems, files = rooms_without_place_on_map(), 0
    for folder in [*MAY_INCLUDE, "tests"]:
        for source in sorted(sources(ROOT / folder)):
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
