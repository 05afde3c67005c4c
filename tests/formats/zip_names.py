"""Names of an npz are those that Python's zipfile, and so NumPy, gives: in code page 437 without bit 11 of
the flags. An archive whose names two versions of Python read differently is refused.

usage: zip_names.py BIN
"""

import struct
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from tools import check, listing, problems, run

REFUSED = 5
UTF8 = 0x800
UNICODE_PATH = 0x7075


def array():
    head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }"
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + struct.pack("<f", 1)


class Stored(zipfile.ZipInfo):
    """A member with the bytes and flags that it is given."""

    def __init__(self, name, flags):
        super().__init__(name.decode("latin-1") + ".npy")
        self.stored, self.flags = name + b".npy", flags

    def _encodeFilenameFlags(self):
        return self.stored, self.flags


def write(path, members, extra=b""):
    with zipfile.ZipFile(path, "w") as archive:
        for name, flags in members:
            member = Stored(name, flags)
            member.extra = extra
            archive.writestr(member, array())
    return path


def names(path):
    with zipfile.ZipFile(path) as archive:
        found = [name.removesuffix(".npy") for name in archive.namelist()]
        assert archive.testzip() is None
    return found


def unicode_path(name, path):
    return struct.pack("<HHBL", UNICODE_PATH, 5 + len(path), 1, zlib.crc32(name)) + path


def code_page(folder):
    upper = [bytes([byte, 0x61 + byte % 26]) for byte in range(0x80, 0x100)]
    path = write(folder / "437.npz", [(name, 0) for name in upper] + [("gr\u00fc\u00df".encode(), UTF8)])
    listed = listing(path)
    check(listed and sorted(listed["tensors"]) == sorted(names(path)), f"names differ: {listed}")
    again = folder / "again.npz"
    check(run("fsdp-convert", path, again).returncode == 0, "is not converted")
    check(sorted(names(again)) == sorted(names(path)), "names of the copy differ")


def long_names(folder):
    for size in (4000, 5000, 60000):
        path = write(folder / f"{size}.npz", [(b"n" * size, 0)])
        listed = listing(path)
        check(listed and list(listed["tensors"]) == names(path), f"a name of {size} bytes is not read")


def refused(folder):
    name = "gr\u00fc\u00df".encode()
    for what, path in {
        "bytes that are no UTF-8": write(folder / "bad.npz", [(b"\xff\xfe", UTF8)]),
        "one name in two codes": write(folder / "twice.npz", [(b"\x82", 0), ("\u00e9".encode(), UTF8)]),
        "a second name": write(folder / "path.npz", [(b"a", 0)], unicode_path(b"a.npy", b"b.npy")),
        "a name in UTF-8 beside its code page":
            write(folder / "both.npz", [(name, 0)], unicode_path(name + b".npy", name + b".npy")),
    }.items():
        ran = run("fsdp-ls", path)
        check(ran.returncode in (REFUSED, 4), f"{what}: status {ran.returncode}: {ran.stderr}")
        print(ran.stderr.strip())
    path = write(folder / "equal.npz", [(name, UTF8)], unicode_path(name + b".npy", name + b".npy"))
    check(listing(path) is not None, "a second name that is equal is refused")


def main():
    with tempfile.TemporaryDirectory() as scratch:
        code_page(Path(scratch))
        long_names(Path(scratch))
        refused(Path(scratch))
    if problems:
        sys.exit("\n".join(problems))


main()
