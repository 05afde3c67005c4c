"""GGUF files that this writer makes: versions, byte orders, types, parts; refusals, and what is written.

usage: gguf_files.py BIN
"""

import hashlib
import json
import struct
import sys
import tempfile
from pathlib import Path

from tools import check, list_path, listing, problems, run

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q",
         F64: "d"}
# ggml's number, bytes and values of an element
TYPES = {"f32": (0, 4, 1), "f16": (1, 2, 1), "bf16": (30, 2, 1), "f64": (28, 8, 1), "i8": (24, 1, 1),
         "i16": (25, 2, 1), "i32": (26, 4, 1), "i64": (27, 8, 1), "q4_0": (2, 18, 32), "q4_1": (3, 20, 32),
         "q5_0": (6, 22, 32), "q5_1": (7, 24, 32), "q8_0": (8, 34, 32), "q2_k": (10, 84, 256),
         "q3_k": (11, 110, 256), "q4_k": (12, 144, 256), "q5_k": (13, 176, 256), "q6_k": (14, 210, 256)}
MODEL = Path(__file__).parents[1] / "golden" / "gguf" / "llama_q8_q4_align64" / "data" / "model.gguf"
ARCHITECTURE = ("general.architecture", STRING, "llama")


def text(order, value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack(order + "Q", len(data)) + data


def item(order, kind, value):
    return text(order, value) if kind == STRING else struct.pack(order + CODES[kind], value)


def pair(order, key, kind, value):
    head = text(order, key) + struct.pack(order + "I", kind)
    if kind != ARRAY:
        return head + item(order, kind, value)
    inner, values = value
    head += struct.pack(order + "IQ", inner, len(values))
    return head + b"".join(item(order, inner, one) for one in values)


def payload(name, kind, shape):
    """Bytes that differ from tensor to tensor."""
    _, size, values = TYPES[kind]
    count = size
    for dim in shape:
        count *= dim
    count //= values
    seed = hashlib.sha256(name.encode()).digest()
    return (seed * (count // len(seed) + 1))[:count]


def gguf(pairs, tensors, *, version=3, order="<", alignment=32, data=payload):
    """The bytes of a file of tensors (name, dtype, shape in torch's order)."""
    out = b"GGUF" + struct.pack(order + "IQQ", version, len(tensors), len(pairs))
    out += b"".join(pair(order, *one) for one in pairs)
    body = b""
    for name, kind, shape in tensors:
        number, size, _ = TYPES[kind]
        out += text(order, name) + struct.pack(order + "I", len(shape))
        out += b"".join(struct.pack(order + "Q", dim) for dim in reversed(shape))
        out += struct.pack(order + "IQ", number, len(body))
        raw = data(name, kind, shape)
        if order == ">":
            raw = b"".join(raw[at : at + size][::-1] for at in range(0, len(raw), size))
        body += raw + bytes(-len(raw) % alignment)
    return out + bytes(-len(out) % alignment) + body


def expected(tensors):
    return {name: (kind, list(shape), hashlib.sha256(payload(name, kind, shape)).hexdigest())
            for name, kind, shape in tensors}


def got(listed):
    return {name: (one["dtype"], one["shape"], one["sha256"]) for name, one in listed["tensors"].items()}


def check_listed(path, tensors, values, what):
    listed = listing(path)
    check(listed is not None, f"{what}: {list_path(path).stderr}")
    if listed:
        check(got(listed) == expected(tensors), f"{what}: tensors are {got(listed)}")
        check(listed["values"] == values, f"{what}: values are {listed['values']}")


ALL = [(f"t.{kind}", kind, (3, 2, values * 2)) for kind, (_, _, values) in TYPES.items()]
PLAIN = [one for one in ALL if TYPES[one[1]][2] == 1]
PAIRS = [ARCHITECTURE, ("a.u8", U8, 200), ("a.i8", I8, -5), ("a.u16", U16, 60000), ("a.i16", I16, -30000),
         ("a.u32", U32, 4000000000), ("a.i32", I32, -7), ("a.u64", U64, 2**64 - 1), ("a.i64", I64, -(2**63)),
         ("a.f32", F32, 0.5), ("a.f64", F64, 0.1), ("a.yes", BOOL, 1), ("a.empty", STRING, ""),
         ("a.ints", ARRAY, (I16, [1, -2])), ("a.texts", ARRAY, (STRING, ["x", "", "\u00fc"])),
         ("a.none", ARRAY, (F32, []))]
VALUES = {key: value[1] if kind == ARRAY else value for key, kind, value in PAIRS}
VALUES["a.yes"] = True
VALUES["a.u64"] = {"int": str(2**64 - 1)}  # JSON's readers take 53 bits


def versions(folder):
    path = folder / "a.gguf"
    for version in (2, 3):
        path.write_bytes(gguf(PAIRS, ALL, version=version))
        check_listed(path, ALL, VALUES, f"version {version}")
        path.write_bytes(gguf(PAIRS, PLAIN, version=version, order=">"))
        check_listed(path, PLAIN, VALUES, f"version {version}, big-endian")
    for alignment in (1, 8, 4096):
        pairs = [*PAIRS, ("general.alignment", U32, alignment)]
        path.write_bytes(gguf(pairs, ALL, alignment=alignment))
        check_listed(path, ALL, VALUES | {"general.alignment": alignment}, f"alignment {alignment}")
    odd = [("dims.0", "f32", ()), ("dims.1", "f32", (5,)), ("dims.4", "f32", (2, 1, 2, 3)),
           ("empty", "f32", (0, 4))]
    path.write_bytes(gguf(PAIRS, odd))
    check_listed(path, odd, VALUES, "dims")
    path.write_bytes(gguf([ARCHITECTURE], []))
    check_listed(path, [], {"general.architecture": "llama"}, "no tensors")


def refused(folder):
    path = folder / "bad.gguf"
    good = [("w", "f32", (4,))]
    cases = {
        "version 1": (gguf(PAIRS, good, version=1), "version 1"),
        "blocks in the other order": (gguf(PAIRS, [("w", "q8_0", (32,))], order=">"), "big-endian"),
        "a type without a dtype": (gguf([ARCHITECTURE], good).replace(
            struct.pack("<IQIQ", 1, 4, 0, 0), struct.pack("<IQIQ", 1, 4, 39, 0)), "MXFP4"),
        "a block without dims": (gguf([ARCHITECTURE], [("w", "f32", ())]).replace(
            struct.pack("<IIQ", 0, 0, 0), struct.pack("<IIQ", 0, 8, 0)), "multiple"),
        "a key twice": (gguf([ARCHITECTURE, ARCHITECTURE], good), "twice"),
        "a row of one block and a number": (gguf([ARCHITECTURE], [("w", "q8_0", (32,))]).replace(
            struct.pack("<IQI", 1, 32, 8), struct.pack("<IQI", 1, 33, 8)), "not a multiple of 32 values"),
        "an offset between two places": (gguf([ARCHITECTURE], good).replace(
            struct.pack("<IQIQ", 1, 4, 0, 0), struct.pack("<IQIQ", 1, 4, 0, 2)), "not a multiple of 32"),
        "version 4": (gguf(PAIRS, good, version=4), "version 4; this fsdp reads versions 2 and 3"),
        "version 1": (gguf(PAIRS, good, version=1), "version 1; this fsdp reads versions 2 and 3"),
        "a key that is a tensor": (gguf([ARCHITECTURE, ("w", U8, 1)], good), "twice"),
        "arrays in an array": (gguf([("a", ARRAY, (U32, []))], []).replace(
            struct.pack("<IIQ", ARRAY, U32, 0), struct.pack("<IIQ", ARRAY, ARRAY, 0)), "array of arrays"),
        "a part of a model": (gguf([("split.count", U16, 2), ("split.no", U16, 0)], good), "parts"),
        "alignment of three parts": (gguf([("general.alignment", U32, 96)], good), "power of two (96)"),
        "alignment as text": (gguf([("general.alignment", STRING, "32")], good), "power of two"),
    }
    for what, (data, said) in cases.items():
        path.write_bytes(data)
        ran = list_path(path)
        check(ran.returncode in (4, 5) and said in ran.stderr, f"{what}: {ran.returncode} {ran.stderr}")
    whole = gguf(PAIRS, ALL)
    for at in range(0, len(whole), max(1, len(whole) // 97)):
        path.write_bytes(whole[:at])
        check(list_path(path).returncode in (3, 4), f"a file that ends at {at}")


def split(folder):
    parts = [ALL[:7], ALL[7:11], ALL[11:]]
    own = [PAIRS, [], [ARCHITECTURE]]
    names = [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]

    def write(count=3, total=len(ALL), numbers=(0, 1, 2)):
        for number, name in enumerate(names):
            told = [("split.no", U16, numbers[number]), ("split.count", U16, count),
                    ("split.tensors.count", I32, total)]
            (folder / name).write_bytes(gguf(own[number] + told, parts[number]))

    write()
    for path in (folder / names[0], folder / names[2], folder):
        check_listed(path, ALL, VALUES, f"parts by {path.name}")
    for what, change in (("another count", {"count": 4}), ("another total", {"total": 5}),
                         ("another order", {"numbers": (0, 2, 1)})):
        write(**change)
        check(list_path(folder).returncode == 4, f"parts that say {what}")
    write()
    (folder / names[1]).unlink()
    ran = list_path(folder)
    check(ran.returncode == 4 and names[1] in ran.stderr, f"a part that is missing: {ran.stderr}")
    (folder / names[1]).symlink_to("/etc/passwd")
    check(list_path(folder).returncode == 5, "a part that is a link out of the directory")
    (folder / names[1]).unlink()
    (folder / "other.gguf").write_bytes(gguf([ARCHITECTURE], []))
    ran = list_path(folder)
    check(ran.returncode == 2 and "several models" in ran.stderr, f"two models: {ran.stderr}")


def written(folder):
    """Every type and value comes back, from GGUF and from a native checkpoint."""
    names = ("in.gguf", "native.fsdp", "out.gguf", "third.gguf")
    path, native, again, third = (folder / name for name in names)
    pairs = [*PAIRS, ("general.alignment", U32, 64)]
    tensors = [*ALL, ("vector.f32", "f32", (3,)), ("vector.f64", "f64", (3,))]
    path.write_bytes(gguf(pairs, tensors, alignment=64))
    for source, target in ((path, native), (native, again), (again, third)):
        ran = run("fsdp-convert", source, target, "--only", "all", "-q", "--no-sync")
        check(ran.returncode == 0, f"{source.name} -> {target.name}: {ran.stderr}")
        check_listed(target, tensors, VALUES | {"general.alignment": 64}, target.name)
    check(again.read_bytes() == third.read_bytes(), "a file that we wrote is copied byte for byte")
    check(run("fsdp-verify", again).returncode == 0, "verify of a GGUF file")
    ran = run("fsdp-diff", path, again)
    check(ran.returncode == 0, f"diff: {ran.stdout}")


def not_written(folder):
    cases = {
        "no architecture": ([("a", U8, 1)], [("w", "f32", (4,))], "general.architecture"),
        "a long name": ([ARCHITECTURE], [("w" * 64, "f32", (4,))], "64 bytes"),
    }
    for what, (pairs, tensors, said) in cases.items():
        path = folder / "no.gguf"
        path.write_bytes(gguf(pairs, tensors))
        ran = run("fsdp-convert", path, folder / "no-out.gguf", "-q")
        check(ran.returncode == 2 and said in ran.stderr, f"{what}: {ran.returncode} {ran.stderr}")
        check(not (folder / "no-out.gguf").exists(), f"{what}: nothing stays")


def decoded(folder):
    """Targets without blocks get the numbers, the same ones in each."""
    path, blocks = folder / "blocks.gguf", [one for one in ALL if TYPES[one[1]][2] > 1]
    path.write_bytes(gguf([ARCHITECTURE], blocks))
    found = []
    for name, target in (("q.safetensors", "safetensors"), ("q.dcp", "dcp"), ("q.pt", "torch")):
        ran = run("fsdp-convert", path, folder / name, "--to", target, "--drop", "values", "--no-sync")
        listed = listing(folder / name) if ran.returncode == 0 else None
        check(listed is not None, f"blocks in {target}: {ran.stderr}")
        found.append(got(listed) if listed else None)
        ran = run("fsdp-diff", path, folder / name, "-I", "^t")
        check(ran.returncode == 0, f"blocks beside their numbers in {target}: {ran.stdout}{ran.stderr}")
    check(found[0] and {one[0] for one in found[0].values()} == {"f32"}, f"numbers of blocks: {found[0]}")
    check(found[1:] == [found[0]] * 2, "the numbers of blocks differ between targets")
    ran = run("fsdp-diff", path, folder / "q.dcp", "--keys-only", "-I", "^t")
    check(ran.returncode == 1 and "q4_k" in ran.stdout, f"dtypes of blocks: {ran.stdout}")


def encoded(folder):
    """Matrices become blocks, but for those that a rule of their own names."""
    path, out = folder / "plain.gguf", folder / "encoded.gguf"
    path.write_bytes(gguf([ARCHITECTURE], [(name, "f32", (2, 32)) for name in ("made", "kept", "half")],
                          data=lambda _name, _kind, _shape: struct.pack("<64f", *range(64))))
    ran = run("fsdp-convert", path, out, "--dtype", "q8_0", "--dtype-for", "kept=keep", "--dtype-for",
              "half=f16", "-q", "--no-sync")
    listed = listing(out) if ran.returncode == 0 else None
    check(listed and {name: one["dtype"] for name, one in listed["tensors"].items()} ==
          {"made": "q8_0", "kept": "f32", "half": "f16"}, f"rules beside blocks: {ran.stderr}{listed}")


def by_way_of_others(folder):
    """A copy of a GGUF file in another format becomes the same directory of Hugging Face."""
    direct = folder / "direct"
    ran = run("fsdp-convert", MODEL, direct, "--to", "hf", "-q", "--no-sync")
    check(ran.returncode == 0, f"hf: {ran.stderr}")
    for target in ("fsdp", "dcp", "torch"):
        for source, path, form in ((MODEL, folder / f"by.{target}", target),
                                   (folder / f"by.{target}", folder / f"hf-{target}", "hf")):
            ran = run("fsdp-convert", source, path, "--to", form, "-q", "--no-sync")
            check(ran.returncode == 0, f"{source.name} to {form}: {ran.stderr}")
        config = folder / f"hf-{target}" / "config.json"
        check(config.exists() and config.read_bytes() == (direct / "config.json").read_bytes(),
              f"config.json by way of {target}")
        ran = run("fsdp-diff", direct, folder / f"hf-{target}")
        check(ran.returncode == 0, f"hf by way of {target}: {ran.stdout}{ran.stderr}")


def memory(folder):
    """A vocabulary of hundreds of thousands of tokens is listed, and a conversion stays within --mem."""
    path = folder / "large.gguf"
    tokens = [f"token {number}" for number in range(300000)]
    pairs = [ARCHITECTURE, ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
             ("tokenizer.ggml.token_type", ARRAY, (I32, [1] * len(tokens)))]
    path.write_bytes(gguf(pairs, [("w", "q4_k", (512, 4096)), ("v", "f16", (2048, 2048))]))
    ran = run("fsdp-convert", path, folder / "large-out.gguf", "--mem", "64M", "--json", "--no-sync")
    check(ran.returncode == 0, f"large: {ran.stderr}")
    one, other = listing(path), listing(folder / "large-out.gguf")
    check(one and other and one["values"] == other["values"] and one["tensors"] == other["tensors"], "large")


def memory_of_parts(folder):
    """Arrays of all parts count together; those that later parts repeat are not kept."""
    folder.mkdir()
    sizes = (900000, 900000, 500000)
    for of_parts, status in ((("a", "b", "c"), 9), (("a", "a", "a"), 0)):
        for number, (key, size) in enumerate(zip(of_parts, sizes)):
            pairs = [("split.no", U16, number), ("split.count", U16, 3), ("split.tensors.count", I32, 3),
                     (key, ARRAY, (U8, [1] * size))]
            (folder / f"m-{number + 1:05}-of-00003.gguf").write_bytes(
                gguf(pairs + [ARCHITECTURE], [(f"w{number}", "f32", (4,))]))
        target = folder.parent / "arrays.npz"
        ran = run("fsdp-convert", folder, target, "--mem", "64M", "-n", "--drop", "values")
        check(ran.returncode == status and ("allow more with --mem" in ran.stderr) == (status == 9),
              f"arrays {of_parts} of parts: {ran.returncode} {ran.stderr}")


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        versions(folder)
        refused(folder)
        (folder / "parts").mkdir()
        split(folder / "parts")
        written(folder)
        not_written(folder)
        decoded(folder)
        encoded(folder)
        by_way_of_others(folder)
        memory(folder)
        memory_of_parts(folder / "arrays")
    print(json.dumps(problems, indent=1) if problems else "GGUF files are read and written")
    sys.exit(1 if problems else 0)


main()
