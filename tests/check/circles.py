"""Checks that no files of the product use each other (uses.py) in a circle, but for those listed here.
Circles are the strongly connected components.

usage: circles.py REPOSITORY BUILD
"""

import sys
from pathlib import Path

from uses import uses

# Files of a circle by name, and why it is there. A circle that is gone must leave the list.
ALLOWED = {
    # a pair, or more, that is one object
    "dcp_metadata.c dcp_read.c": "a DCP directory: what there is, and bytes",
    "torch_numpy.c torch_tensor.c": "rebuilders of one table",
}


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
    graph = uses(Path(sys.argv[1]), Path(sys.argv[2]))
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
