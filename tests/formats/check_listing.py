"""Compares a listing with what a case expects.

usage: check_listing.py EXPECTED LISTING      exit 1: they differ, the differences on standard output
"""

import json
import sys
from collections import Counter
from pathlib import Path


def same_value(expected, got):
    """Equal with types: 1, 1.0 and true are three values. The text of an opaque value is free."""
    if type(expected) is not type(got):
        return False
    if isinstance(expected, dict):
        if "opaque" in expected and set(got) == {"opaque"}:  # what else is told of it is for people
            return (expected["opaque"] == "cycle") == (got["opaque"] == "cycle")
        if set(expected) != set(got):
            return False
        if set(expected) >= {"dtype", "shape", "sha256"}:
            return digest(expected) == digest(got)
        return all(same_value(expected[key], got[key]) for key in expected)
    if isinstance(expected, list):
        return len(expected) == len(got) and all(map(same_value, expected, got))
    return expected == got


def without_heads(value):
    """Expected tensors inside values have members for people, which no listing has."""
    if isinstance(value, dict):
        return {key: without_heads(item) for key, item in value.items() if key != "head"}
    return [without_heads(item) for item in value] if isinstance(value, list) else value


def digest(tensor):
    return tensor["dtype"], tuple(tensor["shape"]), tensor["sha256"]


def named_differences(kind, expected, got, optional, same):
    for name in expected:
        if name not in got:
            if name not in optional:
                yield f"{kind} {name!r} is missing"
        elif not same(expected[name], got[name]):
            yield f"{kind} {name!r} is {got[name]}, expected {expected[name]}"
    for name in got:
        if name not in expected:
            yield f"{kind} {name!r} is not expected: {got[name]}"


def differences(expected, got):
    """The problems of a listing, as lines."""
    optional = set(expected.get("may_refuse", []))
    tensors = dict(got["tensors"])
    if list(expected["tensors"]) == [""] and len(tensors) == 1:
        tensors = {"": next(iter(tensors.values()))}  # a file of one array without a name
    metadata = expected.get("metadata", {})
    tied = expected.get("aliases", {})
    noted = {name: tied[name] for name in metadata if name in tied} if metadata else {}
    if got.get("format") == "safetensors" and noted != got["aliases"]:
        yield f"aliases are {got.get('aliases')}, expected {noted}"
    # Tensors inside objects of unknown classes may have any name, but must be there.
    inside = Counter(digest(tensor) for tensor in expected.get("inside_unknown", []))
    for name in [name for name in tensors if name not in expected["tensors"]]:
        if inside[digest(tensors[name])] > 0:
            inside[digest(tensors.pop(name))] -= 1
    for tensor in +inside:
        yield f"a tensor {tensor} inside an unknown object is missing"
    values = without_heads(expected["values"])
    # the state of unknown objects is listed below their names
    if "inside_unknown" in expected or "state_dict_names" in expected:
        got_values = {name: item for name, item in got["values"].items() if name in values}
    else:
        got_values = got["values"]
    yield from named_differences(
        "tensor", expected["tensors"], tensors, optional, lambda a, b: digest(a) == digest(b)
    )
    yield from named_differences("value", values, got_values, optional, same_value)
    for member in ("metadata", "attributes"):
        if member in expected and not same_value(expected[member], got.get(member, {})):
            yield f"{member} are {got.get(member)}, expected {expected[member]}"


def main():
    expected, got = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    found = list(differences(expected, got))
    print("\n".join(found) or f"{len(expected['tensors'])} tensors, {len(expected['values'])} values")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
