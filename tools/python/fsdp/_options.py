"""Keyword options as the library's structs.

An option has the name of a member, and its type decides what it takes: bool, int, float, text or path, an
enumerator by its word, a list of texts. Options of conversions come from the library's own table
(fsdp_convert_option_at), as those of the command line do: `shard_dim` is --shard-dim."""

import ctypes
import os
from difflib import get_close_matches
from keyword import iskeyword

from . import _bindings as c
from ._library import UsageError, call, lib


def usage(text):
    return UsageError(text, c.FSDP_ERR_USAGE)


def _unknown(name, names, what):
    close = get_close_matches(name, names, 1)
    return usage(f"'{name}' is not an option of {what}" + (f"; did you mean '{close[0]}'?" if close else ""))


def text(name, value):
    if isinstance(value, (str, bytes, os.PathLike)):
        return os.fsencode(value)
    raise usage(f"option '{name}' takes a text or a path, not {value!r}")


def flag(name, value):
    if value is True or value is False or value is None:
        return bool(value)
    raise usage(f"option '{name}' takes True or False, not {value!r}")


def number(name, value, least=None, most=None):
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise usage(f"option '{name}' takes an integer, not {value!r}")
    value = value.__index__()
    if least is not None and not least <= value <= most:
        raise usage(f"option '{name}' is {value}, which is not in {least} to {most}")
    return value


def texts(name, value):
    """An array of texts, and what keeps them."""
    items = [value] if isinstance(value, (str, bytes, os.PathLike)) else list(value)
    return (ctypes.c_char_p * len(items))(*[text(name, item) for item in items]), len(items)


def word(name, value, words):
    if value in words:
        return words.index(value)
    raise usage(f"option '{name}' is {value!r}, which is not one of: {', '.join(words)}")


# --- structs --------------------------------------------------------------------------------------

def fill(struct, options, names, what):
    """Sets members of a struct from options; pops those that it takes."""
    types = dict(struct._fields_)
    for name in [name for name in options if name in names]:
        value, kind = options.pop(name), types[name]
        if value is None:
            continue
        if kind is ctypes.c_bool:
            setattr(struct, name, flag(name, value))
        elif kind is ctypes.c_char_p:
            setattr(struct, name, text(name, value))
        elif kind is ctypes.c_double:
            setattr(struct, name, float(value))
        elif issubclass(kind, c.Enum):
            words = [key for key, _ in sorted(kind.words.items(), key=lambda item: item[1])]
            setattr(struct, name, word(name, value, words))
        else:
            setattr(struct, name, number(name, value))
    if options:
        raise _unknown(next(iter(options)), [*names, *ACCESS], what)


ACCESS = ("follow_links", "limits_only")
OPEN = ("format", "allow_missing", "variant", "void_as", "like", "as_stored", "whole", "memory")


def access_options(struct, options):
    """Takes the options of an fsdp_access that a struct has."""
    found = {name: options.pop(name) for name in ACCESS if name in options}
    fill(struct.access, found, ACCESS, "access")


def open_options(options):
    opts = c.fsdp_open_opts()
    access_options(opts, options)
    fill(opts, options, OPEN, "open")
    return opts


def from_struct(struct, options, names, what):
    """A struct with an fsdp_access, filled from options."""
    access_options(struct, options)
    fill(struct, options, names, what)
    return struct


# --- the table of conversions ---------------------------------------------------------------------

def convert_table():
    """The rows of the table of options by their names in Python: those of the command line, else of plans."""
    rows, i = {}, 0
    while row := lib.fsdp_convert_option_at(i):
        name = (row[0].name or row[0].member).decode().replace("-", "_")
        rows[row[0].member.decode() if iskeyword(name) else name] = row[0]
        i += 1
    return rows


def _words(row):
    words, i = [], 0
    if row.word_at:
        while (found := row.word_at(i)) is not None:
            words.append(found.decode())
            i += 1
    elif row.words:
        while row.words[i]:
            words.append(row.words[i].decode())
            i += 1
    return words


def _set(opts, row, name, value, kept):
    kind, at = row.kind.value, ctypes.addressof(opts) + row.offset
    if kind in (c.FSDP_OPTION_TEXT, c.FSDP_OPTION_PATH):
        raw = text(name, value)
        kept.append(raw)
        ctypes.c_char_p.from_address(at).value = raw
    elif kind == c.FSDP_OPTION_WORD:
        ctypes.c_int.from_address(at).value = row.first_word + word(name, value, _words(row)[row.first_word:])
    elif kind == c.FSDP_OPTION_INT:
        ctypes.c_int.from_address(at).value = number(name, value, row.least, row.most)
    elif kind == c.FSDP_OPTION_BYTES:
        ctypes.c_int64.from_address(at).value = number(name, value, row.least, row.most)
    elif kind == c.FSDP_OPTION_FLAG:
        ctypes.c_bool.from_address(at).value = flag(name, value)
    elif kind == c.FSDP_OPTION_LIST:
        items, count = texts(name, value)
        kept.append(items)
        ctypes.c_void_p.from_address(at).value = ctypes.addressof(items)
        ctypes.c_size_t.from_address(ctypes.addressof(opts) + row.count_offset).value = count
    else:
        mesh = Mesh(value)
        kept.append(mesh)
        ctypes.c_void_p.from_address(at).value = mesh.handle


class Mesh:
    """A mesh of named dims, from {"dp": 4, "tp": 2}, a number or another text of "dp=4,tp=2". `ranks` has the
    ranks in row-major order, by default 0, 1, 2, ..."""

    def __init__(self, dims, ranks=None):
        self.handle = None
        if isinstance(dims, int):
            dims = {"ranks": dims}
        if isinstance(dims, str):
            dims = {name: int(size) for name, _, size in (item.partition("=") for item in dims.split(","))}
        shape = (ctypes.c_int64 * len(dims))(*dims.values())
        names = (ctypes.c_char_p * len(dims))(*[name.encode() for name in dims])
        handle = ctypes.c_void_p()
        numbers = (ctypes.c_int * len(ranks))(*ranks) if ranks else None
        call(lib.fsdp_mesh_create, len(dims), shape, names, numbers, ctypes.byref(handle))
        self.handle = handle.value

    def __del__(self):
        if self.handle:
            lib.fsdp_mesh_free(self.handle)


def convert_options(options, opts):
    """Fills an fsdp_convert_opts from options. Returns what must live as long as it."""
    rows, kept = convert_table(), []
    for name in list(options):
        if name in rows and options[name] is not None:
            _set(opts, rows[name], name, options.pop(name), kept)
    for struct, names in ((opts.open.access, ACCESS), (opts.open, ("as_stored", "whole")),
                          (opts, ("threads", "memory", "direct"))):
        fill(struct, {name: options.pop(name) for name in names if name in options}, names, "convert")
    for name in options:
        if name not in rows:
            raise _unknown(name, [*rows, *ACCESS, "as_stored", "whole", "threads", "memory", "direct"],
                           "convert")
    return kept
