"""Uses of files among each other, by the symbols of their objects, for calls.py and circles.py: a file
uses another one when its object has an undefined symbol that the other one's object defines.
"""

import subprocess
from collections import defaultdict

from rooms import ROOMS


def objects(root, build):
    """Pairs of an object and its source; objects of sources that are gone do not count."""
    for top in [build / "CMakeFiles", *(build / folder for folder in ROOMS)]:
        for path in (path for path in top.rglob("*.o") if path.name.endswith((".c.o", ".cu.o"))):
            before, _, after = path.relative_to(build).as_posix().partition("CMakeFiles/")
            source = before + after.partition("/")[2].removesuffix(".o")
            if source.partition("/")[0] in ROOMS and (root / source).is_file():
                yield str(path), source


def symbols(root, build):
    """The names that each source defines, and those that it needs from others."""
    defined, needed, sources = defaultdict(set), defaultdict(set), dict(objects(root, build))
    listed = subprocess.run(["nm", "-A", "--format=posix", "--extern-only", *sources], stdout=subprocess.PIPE,
                            text=True, check=True)
    for line in listed.stdout.splitlines():
        path, name, kind = line.split()[:3]
        (needed if kind in "Uvw" else defined)[sources[path.removesuffix(":")]].add(name)
    return defined, needed


def uses(root, build):
    """For each source the sources that it uses, with the names."""
    defined, needed = symbols(root, build)
    homes = {name: source for source, names in defined.items() for name in names if name != "main"}
    graph = {source: defaultdict(set) for source in sorted(defined)}
    for source, names in needed.items():
        for name in names:
            if homes.get(name, source) != source:
                graph[source][homes[name]].add(name)
    return graph
