"""Checks that no files of the product use each other in a circle, but for those listed here.

A file uses another one when its object has an undefined symbol that the other one's object defines. Circles
are the strongly connected components of that graph.

usage: circles.py REPOSITORY BUILD
"""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT, BUILD = Path(sys.argv[1]), Path(sys.argv[2])
FOLDERS = ["base", "kernels", "formats", "statedict", "runtime", "tools"]

# Files of a circle by name, and why it is there. A circle that is gone must leave the list.
ALLOWED = {
    # a registry with its members, which use what all of them share
    "dcp_metadata.c dcp_read.c detect.c rankset_read.c safetensors_read.c torch_read.c":
        "detect.c lists the formats, whose probes use fsdp_probe_has of it",
    "dcp_metadata_write.c dcp_write.c targets.c":
        "targets.c lists the targets; dcp_write.c uses fsdp_target_box_at of it",
    # a pair, or more, that is one object
    "hdf5_child.c hdf5_child_list.c hdf5_child_object.c hdf5_child_vfd.c":
        "one process that reads HDF5: its loop, its answers, its file driver",
    "hdf5_library.c hdf5_types.c": "libhdf5's lock, and the types that are made under it",
    "native_encode.c native_seal.c native_write.c": "one shard writer",
    "pickle.c pickle_arguments.c pickle_nodes.c pickle_policy.c pickle_text.c": "one pickle machine",
    "source.c source_read.c source_seal.c source_stream.c": "one source",
    "torch_numpy.c torch_tensor.c": "rebuilders of one table",
    "comm.c comm_async.c comm_check.c": "one communicator: its calls, its queue, its checks",
    "fsdp1_scatter.c fsdp1_to_load.c": "one dict that is made for loading",
    "state_broadcast.c state_set.c": "setting from one rank: the text of names, and matching it",
    "state_full.c state_get.c": "one dict that is got",
    "checkpoint.c foreign.c get.c incomplete.c verify_values.c": "one open checkpoint",
    "commit.c leftovers.c": "one staging directory",
    "cli.c cli_complete.c cli_log.c cli_rules.c progress.c": "one command line",
    "cli_paths.c cli_text.c": "paths that a user names",
    "fsdp_ls.c ls_entries.c ls_json.c ls_stats.c ls_summary.c": "one listing",
    "bench_compress.c bench_convert.c bench_load.c bench_many.c bench_reshard.c bench_rows.c bench_save.c":
        "bench_rows.c lists the measurements, which use its helpers",
    "convert.c export.c export_cast.c export_plan.c export_slabs.c plan_write.c": "one conversion",
}


def objects():
    """Pairs of an object and its source; objects of sources that are gone do not count."""
    for top in [BUILD / "CMakeFiles", *(BUILD / folder for folder in FOLDERS)]:
        for path in top.rglob("*.c.o"):
            before, _, after = path.relative_to(BUILD).as_posix().partition("CMakeFiles/")
            source = before + after.partition("/")[2].removesuffix(".o")
            if source.partition("/")[0] in FOLDERS and (ROOT / source).is_file():
                yield str(path), source


def symbols():
    """The names that each source defines, and those that it needs from others."""
    defined, needed, sources = defaultdict(set), defaultdict(set), dict(objects())
    listed = subprocess.run(["nm", "-A", "--format=posix", "--extern-only", *sources], stdout=subprocess.PIPE,
                            text=True, check=True)
    for line in listed.stdout.splitlines():
        path, name, kind = line.split()[:3]
        (needed if kind in "Uvw" else defined)[sources[path.removesuffix(":")]].add(name)
    return defined, needed


def uses():
    """For each source the sources that it uses, with the names."""
    defined, needed = symbols()
    homes = {name: source for source, names in defined.items() for name in names if name != "main"}
    graph = {source: defaultdict(set) for source in sorted(defined)}
    for source, names in needed.items():
        for name in names:
            if homes.get(name, source) != source:
                graph[source][homes[name]].add(name)
    return graph


def reachable(graph, start):
    seen, left = set(), [start]
    while left:
        for to in graph[left.pop()]:
            if to not in seen:
                seen.add(to)
                left.append(to)
    return seen


def circles(graph):
    reach = {source: reachable(graph, source) for source in graph}
    found = {frozenset(to for to in reach[source] if source in reach[to]) for source in graph}
    return sorted((circle for circle in found if circle), key=sorted)


def main():
    graph = uses()
    found = circles(graph)
    names = {circle: " ".join(sorted(Path(source).name for source in circle)) for circle in found}
    problems = []
    for circle in found:
        if names[circle] in ALLOWED:
            continue
        problems.append(f"a circle of {len(circle)} files:")
        for source in sorted(circle):
            for to in sorted(circle & graph[source].keys()):
                problems.append(f"  {source} -> {to}: {', '.join(sorted(graph[source][to]))}")
    for circle in ALLOWED.keys() - set(names.values()):
        problems.append(f"listed in circles.py, but no circle any more: {circle}")
    print("\n".join(problems) or f"{len(graph)} files, {len(found)} circles, each with a reason")
    return 1 if problems or not graph else 0


sys.exit(main())
