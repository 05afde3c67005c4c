"""Checks that files only use (uses.py) layers and rooms below them. Includes alone do not show it: a room may
include the face of its folder, which rooms above it define.

usage: calls.py REPOSITORY BUILD
"""

import sys
from pathlib import Path

from rooms import ROOMS, room
from uses import uses

FOLDERS = list(ROOMS)
# Files that may use what is above them, each with its reason.
REGISTRIES = {
    "kernels/dispatch.c": "the table of kernels names every variant",
}


def height(source):
    folder = source.split("/")[0]
    return FOLDERS.index(folder), ROOMS[folder].index(room(source))


def main():
    graph = uses(Path(sys.argv[1]), Path(sys.argv[2]))
    problems = [f"{source} is a registry that is not there" for source in REGISTRIES if source not in graph]
    for source in graph.keys() - REGISTRIES.keys():
        for to, names in graph[source].items():
            if height(to) > height(source):
                problems.append(f"{source} uses {', '.join(sorted(names))} of {to}, which is above it")
    print("\n".join(problems) or f"{sum(map(len, graph.values()))} uses of files, each goes down")
    return 1 if problems or not graph else 0


sys.exit(main())
