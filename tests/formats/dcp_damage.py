"""Items of DCP that are not what the metadata and their checksums say: nothing is converted.

usage: dcp_damage.py BIN GOLDEN
"""

import io
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

BIN, GOLDEN = Path(sys.argv[1]), Path(sys.argv[2])
DAMAGED = 4
problems = []


def items(data):
    """Every item is a zip; the next one begins behind its end record."""
    at = 0
    while (end := data.find(b"PK\5\6", at)) >= 0:
        yield at, end + 22
        at = end + 22


def find(data, wanted):
    """The place of the first item whose pickle names a storage of this kind, and its records."""
    for begin, end in items(data):
        with zipfile.ZipFile(io.BytesIO(data[begin:end])) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if "data/0" in records and wanted in archive.read(records["data.pkl"].filename):
                return begin, end, records
    sys.exit(f"no item has {wanted}")


def flip_element(data):
    begin, end, records = find(data, b"FloatStorage")
    record = records["data/0"]
    with zipfile.ZipFile(io.BytesIO(data[begin:end])) as archive:
        at = begin + data[begin:end].rindex(archive.read(record.filename))
    data[at + 1] ^= 1


def change_dtype(data):
    """u8 becomes i8, and the checksum of the pickle is that of the changed one."""
    begin, end, records = find(data, b"ByteStorage")
    with zipfile.ZipFile(io.BytesIO(data[begin:end])) as archive:
        pickled = archive.read(records["data.pkl"].filename)
    changed = pickled.replace(b"ByteStorage", b"CharStorage")
    checksums = [struct.pack("<I", zlib.crc32(text)) for text in (pickled, changed)]
    data[begin:end] = data[begin:end].replace(pickled, changed).replace(*checksums)


def flip_replica(data):
    """The last item is a tensor that both ranks hold."""
    begin, end = list(items(data))[-1]
    with zipfile.ZipFile(io.BytesIO(data[begin:end])) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data/0"))
        at = begin + data[begin:end].rindex(archive.read(name))
    data[at + 1] ^= 1


def change_kind(data):
    """The last item becomes a text."""
    begin, end = list(items(data))[-1]
    with zipfile.ZipFile(io.BytesIO(data[begin:end])) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    size = len(pickled) - 8
    changed = b"\x80\x02X" + struct.pack("<I", size) + b"x" * size + b"."
    checksums = [struct.pack("<I", zlib.crc32(text)) for text in (pickled, changed)]
    data[begin:end] = data[begin:end].replace(pickled, changed).replace(*checksums)


def change_step(data):
    """The first item is the step, an int of one byte."""
    begin, end = next(items(data))
    with zipfile.ZipFile(io.BytesIO(data[begin:end])) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    at = pickled.index(b"K") + 1
    changed = pickled[:at] + bytes([pickled[at] + 1]) + pickled[at + 1 :]
    checksums = [struct.pack("<I", zlib.crc32(text)) for text in (pickled, changed)]
    data[begin:end] = data[begin:end].replace(pickled, changed).replace(*checksums)


def convert(what, change, words, case="dtypes-w1", name="__0_0.distcp"):
    with tempfile.TemporaryDirectory() as folder:
        source, target = f"{folder}/source", f"{folder}/target"
        shutil.copytree(GOLDEN / "dcp" / case / "data", source)
        path = Path(source) / name
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)
        ran = subprocess.run([BIN / "fsdp-convert", "-q", "--to", "fsdp", source, target],
                             capture_output=True, text=True)
        wanted = DAMAGED if words else 0
        if ran.returncode != wanted or words not in ran.stderr or Path(target).exists() == bool(words):
            problems.append(f"{what}: status {ran.returncode}, not {wanted} with '{words}': {ran.stderr}")


convert("nothing", lambda data: None, "")
convert("a flipped bit", flip_element, "do not have the checksum of their item")
convert("another dtype", change_dtype, "is not the tensor that the metadata speaks of")
ranks = {"case": "rank-metadata-w2", "name": "__1_0.distcp"}
convert("ranks", lambda data: None, "", **ranks)
convert("another replica", flip_replica, "/__1_0.distcp' have different values of 'plain2'", **ranks)
convert("another kind", change_kind, "/__1_0.distcp' have different values of 'plain2'", **ranks)
convert("another step", change_step, "says that meta.step is ", **ranks)
print("\n".join(problems) or "nothing damaged is converted")
sys.exit(1 if problems else 0)
