"""Writes runtime/tokens/unicode_tables.h: the classes and the normal form C of Unicode, as the `tokenizers`
library has them. It asks the library about every code point, because its parts have different versions of
Unicode: one in patterns, one in added tokens, one in normal forms.

usage: unicode_tables.py HEADER [--check]    --check: exit 1 where HEADER holds something else
"""

import sys
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

LETTER, NUMBER, SPACE, WORD, CHANGES = 1, 2, 4, 8, 16
POINTS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
NFC, NFD = normalizers.NFC().normalize_str, normalizers.NFD().normalize_str
HANGUL = range(0xAC00, 0xAC00 + 11172)


def blocks(size=4096):
    for at in range(0, len(POINTS), size):
        yield POINTS[at : at + size]


def of_pattern(pattern):
    """Code points that a pattern of one character matches."""
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    return {ord(c) for block in blocks() for part, _ in split.pre_tokenize_str("".join(map(chr, block)))
            for c in part}


def beside_token(**option):
    """(code point, where the token that follows it begins: at it, after it, or None) for all of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_tokens([AddedToken("\x01", normalized=False, **option)])
    for block in blocks():
        text = "".join(chr(c) + "\x01\x02" for c in block if c != 1)
        starts = {start for start, _ in tokenizer.encode(text).offsets}
        for i, c in enumerate(c for c in block if c != 1):
            yield c, 0 if 3 * i in starts else 1 if 3 * i + 1 in starts else None


def combining_classes():
    """{code point: class} of all whose class is not 0, by the marks with which they change places."""
    marks = {}
    for c in POINTS:
        marks.setdefault(unicodedata.combining(chr(c)), chr(c))
    classes = sorted(marks)[1:]

    def goes_before(mark, points):
        lines = NFD("\n".join(mark + chr(c) for c in points)).split("\n")
        return {c for c, line in zip(points, lines) if line[-1] == mark and line != mark + chr(c)}

    assert classes[-1] == 240
    plain = [c for c in POINTS if chr(c) != "\n" and NFD(chr(c)) == chr(c)]
    found = sorted(goes_before(marks[240], plain) | {ord(marks[240])})
    later = {c: 0 for c in found}
    for number in classes:
        for c in goes_before(marks[number], found):
            later[c] += 1
    return {c: classes[len(classes) - 1 - count] for c, count in later.items()}


def decompositions():
    """(code point, first, second or 0, whether the two make it again) of one step, without Hangul."""
    for c in POINTS:
        whole = NFD(chr(c))
        if whole == chr(c) or c in HANGUL:
            continue
        parts = [int(part, 16) for part in unicodedata.decomposition(chr(c)).split()]
        assert unicodedata.normalize("NFD", chr(c)) == whole and len(parts) <= 2, hex(c)
        yield c, parts[0], parts[1] if len(parts) == 2 else 0, NFC(whole) == chr(c)


def changing(classes, parts):
    """Text without these is in normal form C: code points that it never holds, or that join others."""
    return ({c for c in POINTS if NFC(chr(c)) != chr(c)} | set(classes)
            | {second for _, _, second, makes in parts if makes} | set(range(0x1161, 0x1176))
            | set(range(0x11A8, 0x11C3)))


def runs(value):
    """Code points where a property changes, with its new value."""
    last = 0
    for c in range(0x110000):
        now = value(c)
        if now != last:
            yield c, now
        last = now


def array(kind, name, items):
    lines, line = [], "   "
    for item in items:
        if len(line) + 1 + len(item) + 1 > 100:
            lines.append(line)
            line = "   "
        line += f" {item},"
    return f"static const {kind} {name}[] = {{\n" + "\n".join([*lines, line]) + "\n};\n"


def header():
    letters, numbers, spaces = map(of_pattern, (r"\p{L}", r"\p{N}", r"\s"))
    words = {c for c, start in beside_token(single_word=True) if start is None}
    assert spaces == {c for c, start in beside_token(lstrip=True) if start == 0}
    classes, parts = combining_classes(), list(decompositions())
    changes = changing(classes, parts)

    def bits(c):
        return (LETTER * (c in letters) + NUMBER * (c in numbers) + SPACE * (c in spaces)
                + WORD * (c in words) + CHANGES * (c in changes))

    return ("/*\n * Made by tests/peers/unicode_tables.py: properties of code points, as the tokenizers"
            " library has them.\n */\n#ifndef FSDP_UNICODE_TABLES_H\n#define FSDP_UNICODE_TABLES_H\n\n"
            "#include <stdint.h>\n\n"
            "/* Where the FSDP_UNICODE_ bits change: the code point << 5 | the bits from there on. */\n"
            + array("uint32_t", "UNICODE_BITS", (hex(c << 5 | now) for c, now in runs(bits)))
            + "\n/* Where the combining class changes: the code point << 8 | the class from there on. */\n"
            + array("uint32_t", "UNICODE_COMBINING",
                    (hex(c << 8 | now) for c, now in runs(lambda c: classes.get(c, 0))))
            + "\n/* Canonical pairs in threes: a code point << 1 | whether its parts make it, its parts. */\n"
            + array("uint32_t", "UNICODE_PAIRS",
                    (f"{c << 1 | makes},{first},{second}" for c, first, second, makes in parts if second))
            + "\n/* A code point and the other one that it stands for, in twos. */\n"
            + array("uint32_t", "UNICODE_SINGLES",
                    (f"{c},{first}" for c, first, second, _ in parts if not second))
            + "\n#endif\n")


def main():
    path, text = sys.argv[1], header()
    if "--check" in sys.argv:
        sys.exit(open(path).read() != text and f"{path} is not what the tokenizers library says")
    open(path, "w").write(text)


main()
