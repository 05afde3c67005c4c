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
    """Every item is a zip; the next one begins after its end record."""
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


def change_steps(data, chosen):
    """Steps are the f32 that are whole numbers: the chosen ones become 9, with the checksums of that."""
    places = []
    for begin, end in items(data):
        with zipfile.ZipFile(io.BytesIO(data[begin:end])) as archive:
            records = [info for info in archive.infolist() if info.filename.endswith("data/0")]
            number = archive.read(records[0]) if records else b""
        if len(number) == 4 and struct.unpack("<f", number)[0].is_integer():
            places.append((begin, end, number))
    for begin, end, old in places[chosen]:
        new = struct.pack("<f", 9.0)
        checksums = [struct.pack("<I", zlib.crc32(text)) for text in (old, new)]
        at = begin + data[begin:end].index(old, data[begin:end].index(b"data/0"))
        data[at : at + 4] = new
        data[begin:end] = data[begin:end].replace(*checksums)


def convert(what, change, words, case="dtypes-w1", name="__0_0.distcp", options=(), beside=None):
    with tempfile.TemporaryDirectory() as folder:
        source, target = f"{folder}/source", f"{folder}/target"
        if case == "resharded":
            subprocess.run([BIN / "fsdp-convert", "-q", "--to", "dcp", "--world-size", "2",
                            GOLDEN / "dcp" / "fsdp2-adamw-w2" / "data", source], check=True)
        else:
            shutil.copytree(GOLDEN / "dcp" / case / "data", source)
        path = Path(source) / name
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)
        if beside:
            (Path(source) / beside).write_bytes(b"")
        ran = subprocess.run([BIN / "fsdp-convert", "-q", *options, "--to", "fsdp", source, target],
                             capture_output=True, text=True)
        wanted = DAMAGED if words else 0
        if ran.returncode != wanted or words not in ran.stderr or Path(target).exists() == bool(words):
            problems.append(f"{what}: status {ran.returncode}, not {wanted} with '{words}': {ran.stderr}")


convert("nothing", lambda data: None, "")
convert("a flipped bit", flip_element, "do not have the checksum of their item")
convert("another dtype", change_dtype, "is not the tensor that the metadata describes")
ranks = {"case": "rank-metadata-w2", "name": "__1_0.distcp"}
convert("ranks", lambda data: None, "", **ranks)
convert("another replica", flip_replica, "/__1_0.distcp' have different values of 'plain2'", **ranks)
convert("another kind", change_kind, "/__1_0.distcp' have different values of 'plain2'", **ranks)
convert("another step", change_step, "says that meta.step is ", **ranks)

# Two saves in one directory, of which the second was cut short.
saves = "; they are from different saves"
for case, file in (("hsdp-2x2", "__3_0.distcp"), ("resharded", "__1_0.distcp")):
    all_steps = {"case": case, "name": file, "change": lambda data: change_steps(data, slice(None))}
    convert(f"steps of two saves, {case}", words=f"/{file}' at least 9{saves}", **all_steps)
    convert(f"steps that are meant, {case}", words="", options=["--from", "dcp"], **all_steps)
    convert(f"a frozen parameter, {case}", lambda data: change_steps(data, slice(1)), "", case, file)
ends = {"case": "resharded", "name": "__1_0.distcp"}
convert("parameters of which one was frozen", lambda data: change_steps(data, slice(0, 3, 2)), "", **ends)
convert("a longer file", lambda data: data.extend(data[-100:]), saves)
convert("a longer file that is meant", lambda data: data.extend(data[-100:]), "", options=["--from", "dcp"])
for what, beside, words, case in (
    ("metadata that was not finished", ".metadata.tmp", "a save over it was interrupted", {}),
    ("a rank's", "__1.metadata.tmp", "holds '__1.metadata.tmp' next to '__1.metadata'", ranks),
    ("a file of another program", "notes.metadata.tmp", "", {}),
):
    convert(what, lambda data: None, words, beside=beside, **case)
print("\n".join(problems) or "nothing damaged is converted")
sys.exit(1 if problems else 0)
