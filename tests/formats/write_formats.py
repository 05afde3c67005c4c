"""Real files of other programs, converted by fsdp-convert: the listing stays the same.

usage: write_formats.py BIN GOLDEN FORMAT GROUP...
"""

import os
import sys
import tempfile
from pathlib import Path

from cases import sources
from check_listing import differences
from tools import TENSOR_KINDS, every_name, listing, run

GOLDEN, FORMAT, GROUPS = Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
RANKS = ["--world-size", "3"]
SUFFIX, OPTIONS = {
    "torch": (".pt", []),
    "dcp": (".dcp", [*RANKS, "--names", "keep"]),
    "fsdp": (".fsdp", RANKS),
    "hdf5": (".h5", ["--opaque", "copy"]),
}[FORMAT]
# In a slow build, every second file is written as one of three formats; round_trip.py takes the others.
PART = {"torch": 1, "dcp": 3, "hdf5": 5}.get(FORMAT) if "FSDP_TEST_FEWER" in os.environ else None
HOLDS_ALL = FORMAT in ("hdf5", "fsdp")
DROPPED = ["opaque", "dtype:f6_e2m3", "dtype:f6_e3m2", *TENSOR_KINDS]
DROPS = [word for what in DROPPED for word in ("--drop", what)]


def is_opaque(value):
    if isinstance(value, dict):
        return not {"opaque", "tensor", "per_rank"}.isdisjoint(value) or any(map(is_opaque, value.values()))
    return isinstance(value, list) and any(map(is_opaque, value))


def has_dict(value):
    if isinstance(value, dict):
        return "dict" in value
    return isinstance(value, list) and any(map(has_dict, value))


def one_by_one(values):
    """In a torch.save file a dict inside a value would be listed item by item."""
    return [name for name, value in values.items() if FORMAT == "torch" and has_dict(value)]


def without_dropped(listed):
    if HOLDS_ALL:
        return {"tensors": every_name(listed), "values": listed["values"]}
    tensors = {k: v for k, v in every_name(listed).items() if not v["dtype"].startswith("f6_")}
    values = {k: v for k, v in listed["values"].items() if not is_opaque(v)}
    return {"tensors": tensors, "values": values}


def problems(source, target):
    before = listing(source)
    if before is None:
        return None  # a file that is refused
    expected = without_dropped(before)
    if not expected["tensors"] and not expected["values"]:
        return None
    drops = [] if HOLDS_ALL else DROPS[:]
    for name in one_by_one(expected["values"]):
        drops += ["--drop", f"^{name}$"]
        del expected["values"][name]
    ran = run("fsdp-convert", source, target, *OPTIONS, *drops)
    if ran.returncode != 0:
        return [f"status {ran.returncode}: {ran.stderr}"]
    after = listing(target)
    return ["it cannot be listed"] if after is None else list(differences(expected, after))


def main():
    count, found = 0, []
    with tempfile.TemporaryDirectory() as place:
        cases = [data.parent for group in GROUPS for data in sorted((GOLDEN / group).glob("*/data"))]
        for number, source in enumerate(path for case in cases for path in sources(case)):
            if PART is not None and number % 6 != PART:
                continue
            wrong = problems(source, Path(place) / f"{number}{SUFFIX}")
            count += wrong is not None
            found += [f"{source.parent.name}/{source.name}: {line}" for line in wrong or []]
    print("\n".join(found) or f"{count} real files are the same as {FORMAT}")
    return 1 if found or count == 0 else 0


sys.exit(main())
