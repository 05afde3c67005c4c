"""Checks that files only use (uses.py) layers and rooms below them. Includes alone do not show it: a room may
include the face of its folder, which rooms above it define. A function or table that no other file uses is
static, unless it is public, a test needs it too, or it is listed here.

usage: calls.py REPOSITORY BUILD
"""

import re
import sys
from pathlib import Path

from rooms import ROOMS, SOURCES, room, sources
from uses import symbols, uses

ROOT, BUILD = Path(sys.argv[1]), Path(sys.argv[2])
FOLDERS = list(ROOMS)
# Files that may use what is above them, each with its reason.
REGISTRIES = {
    "kernels/dispatch.c": "the table of kernels names every variant",
}
# Functions that only tests call, or only their own file, each with its reason.
LISTED = {
    "fsdp_architecture_at": "every description of a model is whole",
    "fsdp_architecture_role": "the trainer declares parameters by role",
    "fsdp_config_number": "likewise, with numbers of config.json",
    "fsdp_mem_fail_after": "any allocation can fail",
    "fsdp_gguf_config_text": "config.json of a GGUF file that becomes a model of Hugging Face",
    "fsdp_gguf_values": "the key-value pairs of a model of Hugging Face, for --to gguf",
    "fsdp_named_values_release": "releases those",
    "fsdp_flow_watch": "the flow pages are compared with traces",
    "fsdp_blocks_from_f32": "quantizes what is written for llama.cpp, compared with gguf-py",
    "fsdp_blocks_can_encode": "says which types that one takes",
    "fsdp_trace_set_listener": "sees events as --trace writes them",
    "fsdp_kernels_all": "all variants of a kernel give equal bytes",
    "fsdp_token_data_tokens": "the place where data is cut into training and validation",
    "bench_model_add": "tests/bench measures with the states of fsdp-bench, and with models of its own",
    "bench_model_init_llama": "a model of tests/bench",
    "bench_model_init_plain": "a model of tests/bench",
    "bench_state_compare": "the state that a bench of tests/bench has loaded",
    "train_job_make": "tests/bench measures steps of fsdp-train",
}
# Symbols that libraries and linkers look up by name.
LOOKED_UP = {"main", "H5PLget_plugin_info", "H5PLget_plugin_type", "fsdp_mpi_table"}


def height(source):
    folder = source.split("/")[0]
    return FOLDERS.index(folder), ROOMS[folder].index(room(source))


def words(paths):
    return {word for path in paths for word in re.findall(r"\w+", path.read_text(errors="replace"))}


def unshared():
    """Problems of functions that no other file of the product uses."""
    defined, needed = symbols(ROOT, BUILD)
    used = set().union(*needed.values()) | words((BUILD / "include/fsdp").glob("*.h")) | LOOKED_UP
    used |= words(path for folder in FOLDERS for path in sources(ROOT / folder, SOURCES)
                  if path.relative_to(ROOT).as_posix() not in defined)  # without MPI, on other processors
    tested = words((ROOT / "tests").rglob("*.[ch]"))
    for source in sorted(defined):
        text = (ROOT / source).read_text()
        for name in sorted(defined[source] - used - LISTED.keys()):
            if name not in tested:
                yield f"{source}: {name} is used nowhere else: make it static, or delete it"
            elif len(re.findall(rf"\b{name}\b", text)) == 1:
                yield f"{source}: only tests use {name}"


def main():
    graph = uses(ROOT, BUILD)
    problems = [f"{source} is a registry that is not there" for source in REGISTRIES if source not in graph]
    for source in graph.keys() - REGISTRIES.keys():
        for to, names in graph[source].items():
            if height(to) > height(source):
                problems.append(f"{source} uses {', '.join(sorted(names))} of {to}, which is above it")
    problems.extend(unshared())
    names = set().union(*symbols(ROOT, BUILD)[0].values())
    problems.extend(f"{name} is listed in calls.py, and not there" for name in sorted(LISTED.keys() - names))
    print("\n".join(problems) or f"{sum(map(len, graph.values()))} uses of files, each goes down")
    return 1 if problems or not graph else 0


sys.exit(main())
