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

# Files of a circle, and why it stays. A circle that is gone must leave the list.
ALLOWED = {
}


def objects():
    """Pairs of a source and its object; objects of sources that are gone do not count."""
    for path in BUILD.rglob("*.c.o"):
        before, _, after = path.relative_to(BUILD).as_posix().partition("CMakeFiles/")
        source = before + after.partition("/")[2].removesuffix(".o")
        if source.partition("/")[0] in FOLDERS and (ROOT / source).is_file():
            yield source, path


def symbols():
    """The names that each source defines, and those that it needs from others."""
    defined, needed = defaultdict(set), defaultdict(set)
    for source, path in objects():
        listed = subprocess.run(["nm", "--format=posix", "--extern-only", path], stdout=subprocess.PIPE,
                                text=True, check=True)
        for line in listed.stdout.splitlines():
            name, kind = line.split()[:2]
            (needed if kind in "Uvw" else defined)[source].add(name)
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
    problems = []
    for circle in found:
        if circle in ALLOWED:
            continue
        problems.append(f"a circle of {len(circle)} files:")
        for source in sorted(circle):
            for to in sorted(circle & graph[source].keys()):
                problems.append(f"  {source} -> {to}: {', '.join(sorted(graph[source][to]))}")
    for circle in ALLOWED:
        if circle not in found:
            problems.append(f"listed in circles.py, but no circle any more: {', '.join(sorted(circle))}")
    print("\n".join(problems) or f"{len(graph)} files, {len(found)} circles, each with a reason")
    return 1 if problems or not graph else 0


sys.exit(main())
