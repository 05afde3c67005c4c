"""Keys of a dict that are not strings are listed as Python's str() gives them.

usage: keys.py BIN      with a numpy before 2, keys whose str() is that of numpy 2 are left out
"""

import datetime
import decimal
import fractions
import json
import pathlib
import pickle
import sys
import tempfile
import types
import uuid
import zipfile
from pathlib import Path

import numpy

from tools import list_path

ZONES = [datetime.timezone.utc, datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))]

# A stand-in for torch in a pickle: only the names matter.
torch = types.ModuleType("torch")
sys.modules["torch"] = torch


class Size(tuple):
    __slots__ = ()

    def __reduce__(self):
        return (Size, (tuple(self),))

    def __repr__(self):
        return f"torch.Size({list(self)})"


Size.__module__ = "torch"
torch.Size = Size

NUMBERS = [
    1.0, -0.0, 0.1 + 0.2, 1e15, 1e16, 1e22, 1e-4, 1e-5, 1.5e-7, 123456789.123, 5e-324, 1.7976931348623157e308,
    123456789012345680.0, float("inf"), float("nan"), 2**70, -(2**70), 2**63, True, None, -3,
    complex(1, 2), complex(0, -0.5), complex(0, 2), complex(-0.0, 1), complex(1.5, -1e20),
    complex(0, float("nan")),
    complex(3, 0),
]  # fmt: skip
TEXTS = [
    b"k", b"", b"a'\x00\xff\n\\", b"a'\"", (b"\x80'",), ("a", "b'c"), ("x\"'y\n\t\r",),
    ("é\u200b",), ("\x7f\x80\xad",),
    ("\U0001f600\u3000\u2028\ue000",), ("\udc80",), ("\\",), ("",),
]  # fmt: skip
CONTAINERS = [
    (1,), (), (1.0, None, True), (("a", 1), 2), frozenset([1]), frozenset(), (frozenset(["a"]),),
    Size((1, 2)), Size(()),
    (Size((3,)),), range(3), range(1, 3), range(0, 9, 2), (range(-2),), ..., NotImplemented,
    (...,), (complex(1, 2), 2**70),
]  # fmt: skip
OTHERS = [
    datetime.date(2020, 1, 2), datetime.time(3, 4), datetime.time(3, 4, 5, 6),
    datetime.datetime(2020, 1, 2, 3, 4, 5),
    datetime.datetime(2020, 12, 31, 23, 59, 59, 999999), datetime.datetime(1, 1, 1, tzinfo=ZONES[0]),
    datetime.datetime(1, 1, 1, tzinfo=ZONES[1]), datetime.timedelta(2), datetime.timedelta(1, 3723, 45),
    datetime.timedelta(-1), datetime.timedelta(0), decimal.Decimal("1.50"), decimal.Decimal("-1E+3"),
    fractions.Fraction(1, 3), fractions.Fraction(-4), uuid.UUID(int=1), uuid.UUID(int=2**128 - 2**64 + 5),
    pathlib.PurePosixPath("a/b"), pathlib.PurePosixPath("/a/b.c"), pathlib.PurePosixPath("."),
    pathlib.PureWindowsPath("C:/x/y"),
]  # fmt: skip
SCALARS = [
    numpy.float32(0.1), numpy.float32(1e16), numpy.float32(3e-5), numpy.float16(0.1), numpy.float32(2**-20),
    numpy.float16(1e-7), numpy.float16(512), numpy.float16(0), numpy.float64(0.1),
    numpy.float64(1e22), numpy.int64(3),
    numpy.int8(-3), numpy.uint64(2**64 - 1), numpy.bool_(True), numpy.complex64(1 + 2j),
    numpy.complex64(0.1j),
    numpy.complex128(0.1 - 2j), numpy.float32("inf"), numpy.float32("nan"),
]  # fmt: skip
INSIDE = [numpy.float32(0.1), numpy.int64(3), numpy.bool_(True), numpy.complex64(1 + 2j), numpy.complex64(2j)]
LARGE = [numpy.float32(16777216), numpy.float16(65504), numpy.float32(999999), numpy.complex64(1e6)]


def keys():
    yield from NUMBERS + TEXTS + CONTAINERS + OTHERS + SCALARS
    yield from ((key,) for key in OTHERS if getattr(key, "tzinfo", None) is None)
    if int(numpy.__version__.split(".")[0]) >= 2:  # before, a repr does not name the type
        yield from ((key,) for key in INSIDE)
    if str(numpy.float32(1e6)) == "1e+06":  # before, they were plain as far as Python's own floats are
        yield from LARGE


def listed(state, protocol, path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(state, protocol))
        archive.writestr("archive/version", "3\n")
    ran = list_path(path)
    return list(json.loads(ran.stdout)["values"]) if ran.returncode == 0 else ran.stderr


class Claim:
    """Pickled as a call of another class with these arguments."""

    def __init__(self, called, *arguments):
        self.reduced = called, arguments

    def __reduce__(self):
        return self.reduced


def far_zones(path):
    """Zones that Python would refuse, and whose seconds are not int64: they are not text."""
    problems = []
    packed = bytes([7, 228, 1, 2, 3, 4, 5, 0, 0, 0])
    for days, seconds in ((2**57, 0), (2**62, 0), (-(2**63), -1), (0, 2**63 - 1), (1, 2**63 - 1), (2, 0)):
        zone = Claim(datetime.timezone, Claim(datetime.timedelta, days, seconds, 0))
        names = listed({Claim(datetime.datetime, packed, zone): 1}, 2, path)
        if len(names) != 1 or "2020" in names[0]:
            problems.append(f"a zone {days} days and {seconds} seconds away: {names}")
    return problems


def raw_paths(path):
    """Paths as Python 3.13 pickles them: in the words of the program. It takes '///a' of Windows for a share,
    and earlier ones do not."""
    problems = []
    paths = ["x//y/./z", "./a", "a/", "a/.", "/", ".", "./.", "C:/x//y/", "C:/", "a/../b"]
    for of, more in ((pathlib.PurePosixPath, ["//a/b", "///a"]), (pathlib.PureWindowsPath, ["x\\y/z"])):
        for words in paths + more:
            wanted = str(of(words))
            names = listed({Claim(of, words): 1}, 2, path)
            if names != [wanted]:
                problems.append(f"{of.__name__}({words!r}) is {wanted!r}, not {names}")
    return problems


def main():
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        for protocol in (2, 4):
            # Each key has a dict of its own, because some are equal.
            state = {f"in{i}": {key: 1} for i, key in enumerate(keys())}
            names = listed(state, protocol, Path(folder) / "keys.pt")
            expected = [f"in{i}." + str(key) for i, key in enumerate(keys())]
            if len(names) != len(expected):
                problems.append(f"protocol {protocol}: {len(names)} names for {len(expected)} keys: {names}")
            for found, wanted in zip(sorted(names), sorted(expected)):
                if found != wanted:
                    problems.append(f"protocol {protocol}: a key is {found!r}, not {wanted!r}")
        problems += far_zones(Path(folder) / "zones.pt")
        problems += raw_paths(Path(folder) / "paths.pt")
    print("\n".join(problems) or f"{len(expected)} keys, as Python and numpy {numpy.__version__} call them")
    return 1 if problems else 0


sys.exit(main())
