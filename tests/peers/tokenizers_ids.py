"""Random text through our tokenizers and through the `tokenizers` library: equal ids, and equal text back.

usage: tokenizers_ids.py TOKENIZE_LINES_PROGRAM [SEED] [--time]
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
import unicodedata
from pathlib import Path

from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PROGRAM = sys.argv[1]
SEED = int(sys.argv[2]) if len(sys.argv) > 2 and sys.argv[2].isdigit() else 1

NEWER = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": NEWER.replace("NUMBERS", r"\p{N}{1,3}"),
    "qwen2": NEWER.replace("NUMBERS", r"\p{N}"),
}
PLANES = [(0, 0x7F), (0x80, 0x24F), (0x250, 0x52F), (0x530, 0xFFF), (0x1000, 0x1FFF), (0x2000, 0x2FFF),
          (0x3000, 0xABFF), (0xAC00, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x1FFFF), (0x20000, 0x3FFFF),
          (0xE0000, 0x10FFFF)]
PARTS = ["'s", "'S", "'\u017f", "'t", "'RE", "'ve", "'lL", "'d", "'m", "'", "''", "\u2019s", " ",
         "  ", "\t", "\n", "\r\n", "\r", " \n ", "\x0b", "\x0c", "\x85", "\xa0", "\u3000",
         "\u1680", "\u2003", "\u2028", "\u2029", "\u200b", "\u200d", "\ufeff", "\x00", "\x1f",
         "the", " the", "Word", "word", "naïve", "e\u0301", "\u0301", "a\u0327\u0301", "\u0345",
         "\u1100\u1161\u11a8", "가", "각", "日本", "ﬁ", "\uf900", "\u0958", "\u2126", "\u212b", "0",
         "12345", "٣٤", "Ⅷ", "²", "½", "१२३", "😀", "👩\u200d👧", "🏳️\u200d🌈", "🇺🇸", "!", "...", "=>",
         "--", "<x>", "<x", "<|endoftext|>", "<|a|>", "<|a|>b", "zz", "\U000e0001", "\U0010ffff",
         "\uffff", "K", "\u212a", "ı", "İ", "_", "\u203f", "\u0660"]


def random_text(rng):
    kind = rng.randrange(4)
    if kind == 0:
        return "".join(rng.choice(PARTS) for _ in range(rng.randrange(40)))
    if kind == 1:
        low, high = rng.choice(PLANES)
        points = (rng.randint(low, high) for _ in range(rng.randrange(1, 60)))
        return "".join(chr(c) for c in points if not 0xD800 <= c <= 0xDFFF)
    if kind == 2:
        low, high = rng.choice(PLANES[:9])
        return "".join(rng.choice(PARTS) + chr(rng.randint(low, high)) for _ in range(rng.randrange(20)))
    return rng.choice(PARTS) * rng.randrange(300) + rng.choice(PARTS)


def letters():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def model(rng, merges):
    """A vocabulary of all bytes and random merges of what random texts hold, in random order of ids."""
    alphabet = letters()
    tokens, rules = list(alphabet.values()), []
    known = set(tokens)
    texts = [[alphabet[b] for b in random_text(rng).encode()] for _ in range(400)]
    while len(rules) < merges:
        text = rng.choice(texts)
        if len(text) < 2:
            continue
        at = rng.randrange(len(text) - 1)
        pair = text[at], text[at + 1]
        if "".join(pair) not in known:
            known.add("".join(pair))
            tokens.append("".join(pair))
            rules.append(pair)
        text[at : at + 2] = ["".join(pair)]
    rng.shuffle(tokens)
    return {token: i for i, token in enumerate(tokens)}, rules


def added_tokens(rng, vocab):
    chosen = ["<|endoftext|>", "<|a|>", "<x>", "word", "e\u0301", "zz", "<|a|>b", "\u212b", " "]
    chosen = chosen[: rng.randrange(1, 10)]
    chosen += rng.sample(sorted(token for token in vocab if token.isalnum()), 2)
    known = vocab | {c: len(vocab) + i for i, c in enumerate(c for c in chosen if c not in vocab)}
    return [dict(id=known[content], content=content, special=rng.random() < 0.5,
                 **{flag: rng.random() < 0.3 for flag in ("single_word", "lstrip", "rstrip", "normalized")})
            for content in chosen]


def split(pattern):
    behavior, invert = ("Isolated", False) if pattern != PATTERNS["qwen2"] else ("Removed", True)
    return dict(type="Split", pattern=dict(Regex=pattern), behavior=behavior, invert=invert)


def random_tokenizer(rng, kind):
    vocab, merges = model(rng, 500)
    level = dict(type="ByteLevel", add_prefix_space=rng.random() < 0.3, trim_offsets=True,
                 use_regex=kind == "level" or rng.random() < 0.1)
    steps = [split(PATTERNS[kind])] if kind in PATTERNS else []
    before = dict(type="ByteLevel", add_prefix_space=True, trim_offsets=False, use_regex=True)
    piece = dict(SpecialToken=dict(id="<|a|>", type_id=0))
    template = dict(type="TemplateProcessing",
                    single=[piece, dict(Sequence=dict(id="A", type_id=0)), piece, piece],
                    pair=[dict(Sequence=dict(id=id, type_id=0)) for id in "AB"],
                    special_tokens={"<|a|>": dict(id="<|a|>", ids=[5, 6], tokens=["x", "y"])})
    nfc = dict(type="NFC")
    return dict(version="1.0", truncation=None, padding=None, added_tokens=added_tokens(rng, vocab),
                normalizer=rng.choice([None, nfc, dict(type="Sequence", normalizers=[nfc])]),
                pre_tokenizer=dict(type="Sequence", pretokenizers=[*steps, level]) if steps else level,
                post_processor=rng.choice([before, template,
                                           dict(type="Sequence", processors=[before, template])]),
                decoder=before,
                model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="",
                           end_of_word_suffix=None, fuse_unk=False, byte_fallback=False,
                           ignore_merges=rng.random() < 0.5, vocab=vocab,
                           merges=merges if rng.random() < 0.5 else [" ".join(merge) for merge in merges]))


def lines_of(path, values, *mode):
    text = "".join(json.dumps(value) + "\n" for value in values)
    run = subprocess.run([PROGRAM, path, *mode], input=text, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{path} {mode}: {run.stderr}")
    return [json.loads(line) for line in run.stdout.splitlines()]


def takes(tokenizer, text):
    """False where the library panics: two added tokens that both take the white space between them."""
    try:
        tokenizer.encode(text)
        return True
    except BaseException as panic:
        if "bad split" not in str(panic):
            raise
        return False


def compare(path, texts, name):
    theirs = Tokenizer.from_file(str(path))
    lines_of(path, texts)
    texts = [text for text in texts if takes(theirs, text)]
    for special, mode in ((False, []), (True, ["special"])):
        wanted = [theirs.encode(text, add_special_tokens=special).ids for text in texts]
        for text, ids, want in zip(texts, lines_of(path, texts, *mode), wanted, strict=True):
            if ids != want:
                sys.exit(f"{name}, special {special}: {text!r}\nours   {ids}\ntheirs {want}")
    rng = random.Random(name)
    # the library decodes an added token to its normal form, whose letters it then takes for bytes
    changed = {token["id"] for token in json.loads(path.read_text())["added_tokens"]
               if token["normalized"] and unicodedata.normalize("NFC", token["content"]) != token["content"]}
    some = [[rng.choice(ids) for _ in range(len(ids))] for ids in wanted if ids]  # broken UTF-8, too
    some = [[id for id in ids if id not in changed] for ids in some]
    backs = lines_of(path, some, "decode")
    for ids, back in zip(some, backs, strict=True):
        want = theirs.decode(ids, skip_special_tokens=False)
        if back != want:
            sys.exit(f"{name}: {ids} decode to\nours   {back!r}\ntheirs {want!r}")


def every_point(kind, rng, folder):
    """Some of all code points, which the seed chooses, between letters, digits and marks."""
    path = folder / f"every_{kind}.json"
    tokenizer = random_tokenizer(rng, kind)
    tokenizer["normalizer"] = dict(type="NFC")
    path.write_text(json.dumps(tokenizer))
    points = [chr(c) for c in range(rng.randrange(64), 0x110000, 64) if not 0xD800 <= c <= 0xDFFF]
    texts = ["".join(f"a{c}1{c} {c}'{c}!{c}{c}e{c}\u0345<x>\n" for c in points[i : i + 100])
             for i in range(0, len(points), 100)]
    compare(path, texts, f"every code point, {kind}")


def bytes_json(folder):
    path = folder / "bytes.json"
    path.write_bytes(subprocess.run([PROGRAM, "bytes", "json"], check=True, capture_output=True).stdout)
    theirs = Tokenizer.from_file(str(path))
    rng = random.Random(SEED)
    texts = [random_text(rng) for _ in range(300)]
    for text, ours, parsed in zip(texts, lines_of("bytes", texts), lines_of(path, texts), strict=True):
        if not theirs.encode(text).ids == ours == parsed == list(text.encode()):
            sys.exit(f"bytes: {text!r}")
        if theirs.decode(ours) != text:
            sys.exit(f"bytes do not decode: {text!r}")


def speed(folder):
    """MB/s of processor time on English text in documents of 20 kB, one thread."""
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    documents = [text[i : i + 20000] for i in range(0, len(text), 20000)]
    size = 5 * len(text.encode())
    for kind in ("level", *PATTERNS):
        tokenizer = random_tokenizer(random.Random(SEED), kind)
        tokenizer.update(normalizer=None, added_tokens=[], post_processor=None)
        path = folder / "speed.json"
        path.write_text(json.dumps(tokenizer))
        theirs = Tokenizer.from_file(str(path))
        begin = time.process_time()
        for document in documents * 5:
            theirs.encode(document)
        their_time = time.process_time() - begin
        lines = "".join(json.dumps(document) + "\n" for document in documents * 5)
        begin = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run([PROGRAM, path], input=lines.encode(), check=True, stdout=subprocess.DEVNULL)
        our_time = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin
        ours, library = size / our_time / 1e6, size / their_time / 1e6
        print(f"{kind}: {ours:.1f} MB/s with JSON, tokenizers {library:.1f} MB/s")


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "--time" in sys.argv:
            return speed(folder)
        for number in range(8):
            rng = random.Random(SEED * 1000 + number)
            kind = ["level", *PATTERNS][number % 4]
            path = folder / f"{number}.json"
            path.write_text(json.dumps(random_tokenizer(rng, kind)))
            compare(path, [random_text(rng) for _ in range(80)], f"seed {SEED}, tokenizer {number}, {kind}")
        every_point(list(PATTERNS)[SEED % 3], random.Random(SEED), folder)
        bytes_json(folder)
    print("equal ids, equal text")


main()
