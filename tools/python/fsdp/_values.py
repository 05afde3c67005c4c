"""Values of a state dict (everything that is not a tensor) as Python objects, and back; names and their
nesting."""

import ctypes

from . import _bindings as c
from ._library import UsageError, call, lib

class Opaque(bytes):
    """Bytes that only their writer understands, such as a pickled object; nothing here reads them."""

    def __repr__(self):
        return f"Opaque({len(self)} bytes)"


class Class(str):
    """The name of a class that stands for an object of it: "module.Class". Nothing here imports it."""


def text_of(raw):
    return raw.decode("utf-8", "surrogateescape")


def raw_of(text):
    return text.encode("utf-8", "surrogateescape")


def bytes_of(struct, member, size):
    """Bytes that a char pointer of a struct points at, which may hold NUL."""
    at = ctypes.c_void_p.from_buffer(struct, getattr(type(struct), member).offset).value
    return ctypes.string_at(at, size) if size else b""


def name_of(entry):
    """The name of an entry."""
    return text_of(bytes_of(entry, "name", entry.name_size))


def to_python(value):
    """An fsdp_value as a Python object."""
    kind, of = value.kind.value, getattr(value, "as")
    if kind == c.FSDP_VALUE_NULL:
        return None
    if kind == c.FSDP_VALUE_BOOL:
        return of.boolean
    if kind == c.FSDP_VALUE_I64:
        return of.i64
    if kind == c.FSDP_VALUE_U64:
        return of.u64
    if kind == c.FSDP_VALUE_F64:
        return of.f64
    if kind == c.FSDP_VALUE_COMPLEX:
        return complex(*of.complex_parts)
    if kind == c.FSDP_VALUE_TENSOR:
        return of.tensor
    if kind in (c.FSDP_VALUE_LIST, c.FSDP_VALUE_DICT):
        items = [to_python(of.list.items[i]) for i in range(of.list.count)]
        if kind == c.FSDP_VALUE_DICT:
            return {_key(key): item for key, item in zip(items[::2], items[1::2])}
        return tuple(items) if value.is_tuple else items
    raw = bytes_of(of.bytes, "data", of.bytes.size)
    if kind == c.FSDP_VALUE_STRING:
        return text_of(raw)
    if kind == c.FSDP_VALUE_INTEGER:
        return int(raw)
    if kind == c.FSDP_VALUE_CLASS:
        return Class(text_of(raw))
    return raw if kind == c.FSDP_VALUE_BYTES else Opaque(raw)


def _key(key):
    return key if not isinstance(key, (list, dict)) else repr(key)


def fill(value, item):
    """Fills a null fsdp_value from a Python object. The caller releases it, also after a failure."""
    at = ctypes.byref(value)
    if item is None:
        return
    if isinstance(item, (bool, int, float, complex)) or hasattr(item, "item") and not hasattr(item, "keys"):
        _fill_number(value, item.item() if hasattr(item, "item") else item)
    elif isinstance(item, (str, bytes, bytearray)):
        kind = (c.FSDP_VALUE_CLASS if isinstance(item, Class) else c.FSDP_VALUE_STRING if isinstance(
            item, str) else c.FSDP_VALUE_OPAQUE if isinstance(item, Opaque) else c.FSDP_VALUE_BYTES)
        raw = raw_of(item) if isinstance(item, str) else bytes(item)
        call(lib.fsdp_value_set_bytes, at, kind, raw, len(raw))
    elif isinstance(item, dict):
        call(lib.fsdp_value_set_items, at, c.FSDP_VALUE_DICT, 2 * len(item))
        for i, (key, inner) in enumerate(item.items()):
            fill(getattr(value, "as").list.items[2 * i], key)
            fill(getattr(value, "as").list.items[2 * i + 1], inner)
    elif isinstance(item, (list, tuple)):
        call(lib.fsdp_value_set_items, at, c.FSDP_VALUE_LIST, len(item))
        value.is_tuple = isinstance(item, tuple)
        for i, inner in enumerate(item):
            fill(getattr(value, "as").list.items[i], inner)
    else:
        raise UsageError(
            f"a checkpoint cannot hold a {type(item).__module__}.{type(item).__qualname__}; convert it to "
            "numbers, strings, lists or dicts, or leave it out", c.FSDP_ERR_USAGE)


def _fill_number(value, item):
    of = getattr(value, "as")
    if isinstance(item, bool):
        value.kind, of.boolean = c.FSDP_VALUE_BOOL, item
    elif isinstance(item, int) and -(1 << 63) <= item < 1 << 63:
        value.kind, of.i64 = c.FSDP_VALUE_I64, item
    elif isinstance(item, int) and 0 <= item < 1 << 64:
        value.kind, of.u64 = c.FSDP_VALUE_U64, item
    elif isinstance(item, int):
        raw = str(item).encode()
        call(lib.fsdp_value_set_bytes, ctypes.byref(value), c.FSDP_VALUE_INTEGER, raw, len(raw))
    elif isinstance(item, float):
        value.kind, of.f64 = c.FSDP_VALUE_F64, item
    elif isinstance(item, complex):
        value.kind = c.FSDP_VALUE_COMPLEX
        of.complex_parts[0], of.complex_parts[1] = item.real, item.imag
    else:
        fill(value, item)


# --- nesting --------------------------------------------------------------------------------------

def keys_of(entry):
    """The keys of nested dicts and lists that lead to an entry: [(key, kind of container), ...]; the kind is
    dict, list or tuple."""
    raw, at, keys = raw_of(name_of(entry)), 0, []
    path = entry.path[:entry.path_count] if entry.path_count else _default_path(raw)
    if path == [c.FSDP_PATH_WHOLE]:
        return []
    for element in path:
        size = abs(element) & ~(c.FSDP_PATH_NUMBER | c.FSDP_PATH_TUPLE)
        part = text_of(raw[at:at + size])
        at += size + 1
        if element < 0:
            keys.append((int(part), tuple if abs(element) & c.FSDP_PATH_TUPLE else list))
        else:
            keys.append((int(part) if element & c.FSDP_PATH_NUMBER else part, dict))
    return keys


def _default_path(raw):
    path = (ctypes.c_int32 * c.FSDP_PATH_DEFAULT_MOST)()
    return path[:lib.fsdp_path_default(raw, len(raw), path)]


def path_of(keys):
    """The name and the path of such keys."""
    parts, path = [], []
    for key, kind in keys:
        part = str(key)
        size = len(raw_of(part))
        if kind is dict:
            path.append(size | (c.FSDP_PATH_NUMBER if isinstance(key, int) else 0))
        else:
            path.append(-(size | (c.FSDP_PATH_TUPLE if kind is tuple else 0)))
        parts.append(part)
    return ".".join(parts), path


def nest(entries):
    """Nested dicts and lists of [(keys, value), ...]."""
    root = {}
    for keys, value in entries:
        if not keys:
            return value
        at = root
        for (key, kind), (_, inner) in zip(keys, keys[1:]):
            at = at.setdefault(key, _Level(inner))
            at.kind = inner
        at[keys[-1][0]] = value
    return _finish(root)


class _Level(dict):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind


def _finish(level):
    done = {key: _finish(item) if isinstance(item, _Level) else item for key, item in level.items()}
    if isinstance(level, _Level) and level.kind is not dict:
        return level.kind(done[key] for key in sorted(done))
    return done
