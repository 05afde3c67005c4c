"""A checksum of 0 in a zip is one: bytes that have another are damage, bytes that have it are not. Only
torch.save leaves checksums out, and then of every record.

usage: checksums.py BIN
"""

import struct
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from tools import check, problems, run

DAMAGED = 4
OTHER = struct.pack("<f", 1)
PICKLE = (b"\x80\2}X\1\0\0\0wctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\n"
          b"X\1\0\0\0" b"0X\3\0\0\0cpuK\1tQK\0K\1\x85K\1\x85\x89ccollections\nOrderedDict\n)RtRs.")
HEADER = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
ARRAY = b"\x93NUMPY\1\0" + struct.pack("<H", len(HEADER)) + HEADER


def has_zero(head):
    """Four bytes that give head the checksum 0: each of their bits flips the same bits of the checksum."""
    wanted, rows = zlib.crc32(head + bytes(4)), []
    for bit in range(32):
        flips, bits = zlib.crc32(head + (1 << bit).to_bytes(4, "little")) ^ wanted, 1 << bit
        for other, other_bits in rows:
            if flips ^ other < flips:
                flips, bits = flips ^ other, bits ^ other_bits
        rows = sorted([*rows, (flips, bits)], reverse=True)
    found = 0
    for flips, bits in rows:
        if wanted ^ flips < wanted:
            wanted, found = wanted ^ flips, found ^ bits
    tail = found.to_bytes(4, "little")
    assert zlib.crc32(head + tail) == 0
    return tail


def write(path, records, zeroed=(), packing=zipfile.ZIP_STORED):
    """Both headers of the zeroed records have the checksum 0."""
    with zipfile.ZipFile(path, "w", packing) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
        places = {name: archive.getinfo(name).header_offset for name in records}
    data = bytearray(path.read_bytes())
    for name in zeroed:
        central = data.rindex(name.encode()) - 46
        data[places[name] + 14:places[name] + 18] = data[central + 16:central + 20] = bytes(4)
    path.write_bytes(data)
    return path


def torch(element):
    return {"archive/data.pkl": PICKLE, "archive/byteorder": b"little", "archive/data/0": element,
            "archive/version": b"3\n"}


def verify(path, is_good, words, target):
    ran = run("fsdp-verify", path)
    told = f"{path.name}: {ran.returncode} {ran.stdout}"
    check(ran.returncode == (not is_good) and words in ran.stdout, told)
    ran = run("fsdp-convert", path, target, "--overwrite")
    wanted = 0 if is_good else DAMAGED
    check(ran.returncode == wanted, f"{path.name} is converted: {ran.returncode} {ran.stderr}")


def main(folder):
    target = folder / "out.safetensors"
    for is_good in (True, False):
        words = "ok " if is_good else "CRC-32"
        element = has_zero(b"") if is_good else OTHER
        verify(write(folder / "w.pt", torch(element), ["archive/data/0"]), is_good, words, target)
        array = ARRAY + (has_zero(ARRAY) if is_good else OTHER)
        for packing in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            alone = write(folder / "w.npz", {"w.npy": array}, ["w.npy"], packing)
            verify(alone, is_good, words, target)
    records = torch(OTHER)
    verify(write(folder / "none.pt", records, list(records)), True, "structure only", target)
    if problems:
        sys.exit("\n".join(problems))


with tempfile.TemporaryDirectory() as scratch:
    main(Path(scratch))
