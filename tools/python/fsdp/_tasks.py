"""The library's operations on whole checkpoints: save, load, convert, verify, diff, ls."""

import ctypes
import os
from typing import NamedTuple

from . import _arrays as arrays
from . import _bindings as c
from . import _options as options_of
from ._checkpoint import Checkpoint
from ._control import Control
from ._library import UsageError, answer, call, lib
from ._running import Watch, shown
from ._values import fill, keys_of, name_of, nest, path_of, raw_of, text_of, to_python

SAVE = ("kind", "owners", "compress", "level", "skip_fsync", "skip_view", "rank0_writes", "overwrite",
        "threads", "memory")
LOAD = ("check", "partial", "cast", "include", "exclude", "threads", "memory")
VERIFY = ("level", "digests", "repair", "variant", "threads", "memory")
DIFF = ("atol", "rtol", "ulp", "keys_only", "include", "exclude", "threads", "memory")
RETAIN = ("keep_last", "keep_every")


# --- state dicts ----------------------------------------------------------------------------------

def flatten(state, keys=()):
    """Yields (keys, item) for each array and value of nested dicts, lists and tuples that hold arrays; a list
    or dict without arrays is one value."""
    if not keys and not isinstance(state, dict):
        raise UsageError(f"a state is a dict of arrays and values, not a {type(state).__name__}",
                         c.FSDP_ERR_USAGE)
    if isinstance(state, dict):
        items = [((key, dict), item) for key, item in state.items()]
    else:
        kind = tuple if isinstance(state, tuple) else list
        items = [((number, kind), item) for number, item in enumerate(state)]
    for (key, kind), item in items:
        if kind is dict and not isinstance(key, (str, int)) or isinstance(key, bool):
            raise UsageError(f"the key {key!r} is neither a string nor an integer", c.FSDP_ERR_USAGE)
        if isinstance(item, (dict, list, tuple)) and _has_array(item):
            yield from flatten(item, keys + ((key, kind),))
        else:
            yield keys + ((key, kind),), item


def _has_array(item):
    if isinstance(item, dict):
        return any(map(_has_array, item.values()))
    if isinstance(item, (list, tuple)):
        return any(map(_has_array, item))
    return is_array(item)


def is_array(item):
    return isinstance(item, arrays.Array) or hasattr(item, "data_ptr") and hasattr(item, "is_contiguous") or (
        hasattr(item, "__array_interface__") and hasattr(item, "ndim") and hasattr(item, "dtype")
        and type(item).__name__ == "ndarray")


class State:
    """A state dict of the library over arrays of Python, which it keeps."""

    def __init__(self, items, mesh=None, layout_of=None):
        self.handle, self._kept, self._names = ctypes.c_void_p(), [], {}
        self.mesh = mesh or options_of.Mesh({"ranks": 1})
        call(lib.fsdp_sd_create, ctypes.byref(self.handle))
        memory = {}
        for keys, item in items:
            name, path = path_of(keys)
            raw = raw_of(name)
            if is_array(item):
                self._add_array(raw, item, memory, layout_of)
            else:
                self._add_value(name, raw, item)
            index = lib.fsdp_sd_count(self.handle) - 1
            call(lib.fsdp_sd_set_path, self.handle, index, (ctypes.c_int32 * len(path))(*path), len(path))

    def __del__(self):
        if self.handle:
            lib.fsdp_sd_free(self.handle)

    def _add_array(self, raw, item, memory, layout_of):
        dtype, shape, kept = arrays.describe(item)
        self._kept.append(kept)
        address = arrays.address(kept)
        where = (address, dtype, shape)
        if arrays.count(shape) and kept is not None and memory.get(where) is not None and kept_is_own(
                item, kept):
            first = memory[where]
            call(lib.fsdp_sd_add_alias, self.handle, raw, len(raw), first, len(first))
            return
        memory[where] = raw
        tensor = c.fsdp_tensor(dtype=dtype.number, ndim=len(shape), data=address)
        lengths = (ctypes.c_int64 * len(shape))(*shape)
        tensor.shape = lengths
        tensor.layout.mesh = self.mesh.handle
        call(lib.fsdp_sd_add_tensor, self.handle, raw, len(raw), ctypes.byref(tensor))

    def _add_value(self, name, raw, item):
        value = c.fsdp_value()
        try:
            fill(value, item)
            call(lib.fsdp_sd_add_value, self.handle, raw, len(raw), ctypes.byref(value))
        except UsageError as error:
            raise UsageError(f"'{name}': {error}", error.status) from None
        finally:
            lib.fsdp_value_release(ctypes.byref(value))


def kept_is_own(item, kept):
    """True when the memory is the item's, and not a copy that may lie where another copy was."""
    if hasattr(item, "data_ptr"):
        return item.data_ptr() == kept.data_ptr()
    return item is kept or getattr(item, "ctypes", None) is not None and item.ctypes.data == kept.ctypes.data


# --- save and load --------------------------------------------------------------------------------

def save(state, path, *, to=None, step=None, progress=None, **options):
    """Saves a dict of arrays and values, nested as you like: a checkpoint that appears whole or not at all.

    Without `to` the suffix of the path decides about the format (".safetensors", ".pt", ".npz", ...), and any
    other path is a native checkpoint. Options of other formats are those of convert. An entry that the
    format cannot hold is an error, unless `drop` or `only` leaves it out.

    step      a number that is stored with the checkpoint
    progress  True shows a bar; or a function of (bytes done, bytes in all, name)
    options   members of fsdp_save_opts (checkpoint.h): kind ("sharded", "full", "local"), compress, level,
              overwrite, skip_fsync, skip_view, threads, memory

    >>> import numpy
    >>> save({"w": numpy.zeros(4), "epoch": 3}, "saved", compress=True)
    >>> load("saved")["epoch"]
    3
    """
    if (to or _format_of(path)) != "fsdp":
        with shown(progress, "save") as callback:
            watch = Watch(callback)
            options = {"to": to, "only": "all", **options}
            with _Conversion(State(flatten(state)), path, options, watch) as conversion:
                return watch.run(conversion.run)
    opts = options_of.from_struct(c.fsdp_save_opts(), options, SAVE, "save")
    _save(lib.fsdp_sd_save, state, (os.fsencode(path),), step, progress, opts)


def _save(function, state, place, step, progress, opts):
    held, control = State(flatten(state)), Control()
    number = ctypes.c_int64(-1 if step is None else step)
    if step is not None:
        opts.step = ctypes.pointer(number)
    with shown(progress, "save") as callback:
        watch = Watch(callback)
        watch.fill(opts.watch)
        watch.run(lambda: call(function, held.handle, control.handle, *place, ctypes.byref(opts)))


class Run:
    """A directory of checkpoints step-N, to which one job at a time saves."""

    def __init__(self, path):
        self.path = str(path)

    def save(self, state, step, *, progress=None, keep_last=0, keep_every=0, **options):
        """Saves a step and, with keep_last or keep_every, removes older ones."""
        opts = options_of.from_struct(c.fsdp_save_opts(), options, SAVE, "Run.save")
        retention = c.fsdp_retention(keep_last=keep_last, keep_every=keep_every)
        if keep_last or keep_every:
            opts.retain = ctypes.pointer(retention)
        _save(lib.fsdp_run_save, state, (os.fsencode(self.path), step), None, progress, opts)

    def steps(self):
        """The steps that verify, ascending."""
        listed = c.fsdp_run_steps()
        call(lib.fsdp_run_list, os.fsencode(self.path), None, ctypes.byref(listed))
        try:
            return sorted(listed.items[i].step for i in range(listed.count)
                          if listed.items[i].state.value == c.FSDP_STEP_GOOD)
        finally:
            lib.fsdp_run_steps_release(ctypes.byref(listed))

    def latest(self, level="quick"):
        """The path of the newest checkpoint that verifies."""
        out, watch, callbacks = ctypes.c_void_p(), c.fsdp_watch(), Watch()
        callbacks.fill(watch)
        number = options_of.word("level", level, list(c.fsdp_verify_level.words))
        call(lib.fsdp_run_latest, os.fsencode(self.path), number, ctypes.byref(watch), None,
             ctypes.cast(ctypes.byref(out), ctypes.POINTER(ctypes.c_char_p)))
        try:
            return os.fsdecode(ctypes.string_at(out.value))
        finally:
            lib.fsdp_string_free(ctypes.cast(out, ctypes.c_char_p))

    def load(self, **options):
        """Loads the newest checkpoint that verifies; options are those of fsdp.load."""
        return load(self.path, **options)

    def __repr__(self):
        return f"<run '{self.path}'>"


class _Loaded:
    """A state dict that the library allocated; arrays over its memory keep it."""

    def __init__(self, handle):
        self.handle = handle

    def __del__(self):
        lib.fsdp_sd_free(self.handle)


def load(path, into=None, *, framework=None, device="cpu", flat=False, progress=None, **options):
    """Loads a checkpoint of any format into memory, nested as it was saved.

    into     a state whose arrays are filled in place and whose values are replaced; it is returned
    flat     names in one dict, without nesting
    options  members of fsdp_load_opts (checkpoint.h): include, exclude (regular expressions over names),
             partial, cast, check ("blocks", "off"), threads, memory

    >>> import numpy
    >>> save({"a": {"x": numpy.ones(2), "y": numpy.zeros(2)}}, "loaded")
    >>> load("loaded", include="x$")["a"]["x"].tolist(), sorted(load("loaded", flat=True))
    ([1.0, 1.0], ['a.x', 'a.y'])
    """
    opts = options_of.from_struct(c.fsdp_load_opts(), options, LOAD, "load")
    with shown(progress, "load") as callback:
        watch = Watch(callback)
        watch.fill(opts.watch)
        if into is not None:
            return _load_into(into, path, opts, watch)
        handle = ctypes.c_void_p()
        watch.run(
            lambda: call(lib.fsdp_load_full, os.fsencode(path), ctypes.byref(opts), ctypes.byref(handle)))
    owner = _Loaded(handle)
    framework = arrays.framework_named("torch" if device != "cpu" and framework is None else framework)
    entries = []
    for index in range(lib.fsdp_sd_count(handle)):
        entry = lib.fsdp_sd_at(handle, index)[0]
        item = to_python(entry.value) if entry.kind.value == c.FSDP_ENTRY_VALUE else _array(
            owner, framework, entry)
        item = item.to(device) if device != "cpu" and is_array(item) else item
        entries.append((keys_of(entry) if not flat else [(name_of(entry), dict)], item))
    return nest(entries)


def _array(owner, framework, entry):
    if entry.kind.value == c.FSDP_ENTRY_ALIAS:
        entry = lib.fsdp_sd_at(owner.handle, entry.target)[0]
    dtype, shape = arrays.dtype_of(entry.dtype.value), tuple(entry.shape[:entry.ndim])
    size = arrays.count(shape) * dtype.size
    if not size or not entry.data:
        return arrays.new(framework, dtype, shape)
    buffer = (ctypes.c_char * size).from_address(entry.data)
    buffer.owner = owner
    return arrays.over(framework, dtype, shape, buffer)


def _load_into(state, path, opts, watch):
    """Fills the arrays of a state and replaces its values, at any depth."""
    items = list(flatten(state))
    held, control = State(items), Control()
    for (_, item), kept in zip([pair for pair in items if is_array(pair[1])], held._kept):
        if not kept_is_own(item, kept) or getattr(getattr(item, "flags", None), "writeable", True) is False:
            raise UsageError(
                "load(into=) needs arrays that are row-major, writable and in this computer's memory",
                c.FSDP_ERR_USAGE)
    watch.run(
        lambda: call(lib.fsdp_sd_load, held.handle, control.handle, os.fsencode(path), ctypes.byref(opts)))
    for index, (keys, item) in enumerate(items):
        entry = lib.fsdp_sd_at(held.handle, index)[0]
        if entry.kind.value == c.FSDP_ENTRY_VALUE:
            at = state
            for key, _ in keys[:-1]:
                at = at[key]
            if not isinstance(at, tuple):
                at[keys[-1][0]] = to_python(entry.value)
    return state


# --- conversions ----------------------------------------------------------------------------------

def _format_of(path):
    """The format of a path's suffix; the native one for a path without."""
    name = lib.fsdp_convert_format_of(os.fsencode(path))
    return name.decode() if lib.fsdp_format_to(name)[0].suffixes[0] else "fsdp"


class Plan(NamedTuple):
    """What a conversion does: its numbers, and sentences about what a user may not expect."""
    numbers: dict
    notes: list

    def __str__(self):
        return "\n".join(self.notes)


class _Conversion:
    """A conversion of a path, or of a State. It borrows paths, texts and the state."""

    def __init__(self, source, target, options, watch):
        opts = self._opts = c.fsdp_convert_opts()
        self._state = source if isinstance(source, State) else None
        self._paths = None if self._state else os.fsencode(source), os.fsencode(target)
        opts.state = self._state and self._state.handle
        self._kept = options_of.convert_options(options, opts)
        if not opts.format:
            opts.format = lib.fsdp_convert_format_of(self._paths[1])
        watch.fill(opts.watch)
        self.handle = ctypes.c_void_p()
        watch.run(lambda: call(lib.fsdp_conversion_open, *self._paths, ctypes.byref(opts),
                               ctypes.byref(self.handle)))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        lib.fsdp_conversion_close(self.handle)

    def plan(self):
        plan = ctypes.cast(lib.fsdp_conversion_plan(self.handle), ctypes.POINTER(c.fsdp_convert_plan))[0]
        numbers = {name: getattr(plan, name) for name, kind in plan._fields_
                   if kind in (ctypes.c_int64, ctypes.c_int, ctypes.c_bool)}
        notes = (plan.notes[i].text.decode("utf-8", "replace") for i in range(plan.note_count))
        return Plan(numbers, list(dict.fromkeys(note for note in notes if note)))

    def run(self):
        call(lib.fsdp_conversion_run, self.handle)


def convert(source, target, *, progress=None, **options):
    """Converts a checkpoint to another format or layout, and returns the plan.

    The options are those of fsdp-convert, with underscores for dashes; lists take several texts, and a mesh
    is a dict. Without `to` the suffix of the target decides; other targets are Hugging Face directories.

    >>> import numpy
    >>> save({"w": numpy.arange(6.0).reshape(3, 2)}, "source")
    >>> plan = convert("source", "target.safetensors", dtype="bf16")
    >>> plan.numbers["tensors"]
    1
    >>> from fsdp import open
    >>> with open("target.safetensors", framework="array") as checkpoint:
    ...     checkpoint.dtype("w")
    'bf16'
    """
    with shown(progress, "convert") as callback:
        watch = Watch(callback)
        with _Conversion(source, target, options, watch) as conversion:
            plan = conversion.plan()
            watch.run(conversion.run)
            return plan


def plan(source, target, **options):
    """Plans a conversion, with the options of convert, and writes nothing.

    >>> import numpy
    >>> save({"w": numpy.ones(2)}, "planned")
    >>> plan("planned", "other", to="dcp", world_size=4).numbers["world"]
    4
    """
    with _Conversion(source, target, options, Watch()) as conversion:
        return conversion.plan()


# --- verify and diff ------------------------------------------------------------------------------

class Finding(NamedTuple):
    """A fault of a checkpoint, or a warning: its kind is "damage", "value", "code", ..."""
    kind: str
    file: str
    tensor: str
    block: "int | None"
    text: str
    unreadable: bool


class Report(NamedTuple):
    """The result of a verification: true when the checkpoint is good. Warnings are findings of a good one."""
    good: bool
    findings: list
    summary: dict

    def __bool__(self):
        return self.good


def _numbers(struct):
    return {
        name: getattr(struct, name)
        for name, kind in struct._fields_ if kind in (ctypes.c_int64, ctypes.c_bool)
    }


def verify(path, *, level="data", like=None, progress=None, **options):
    """Verifies a checkpoint; the report is false if it is damaged.

    level    "quick": structure and sizes; "data": every checksum; "deep": also the view, HDF5's own
             structures and doubtful values
    like     a checkpoint or a config.json: compares the tensors with those of that model
    options  members of fsdp_verify_opts (checkpoint.h): digests ("ignore", "use", "write"), repair, variant,
             threads, memory

    >>> import numpy
    >>> save({"w": numpy.array([1.0, numpy.nan])}, "verified")
    >>> report = verify("verified", level="deep")
    >>> report.good, report.findings[0].kind, report.findings[0].tensor
    (True, 'value', 'w')
    """
    opts = options_of.from_struct(c.fsdp_verify_opts(), {"level": level, **options}, VERIFY, "verify")
    findings = []

    def add(_context, found):
        found = found[0]
        texts = [(raw or b"").decode("utf-8", "replace") for raw in (found.file, found.tensor, found.text)]
        findings.append(
            Finding(found.kind.word, texts[0], texts[1], None if found.block < 0 else found.block, texts[2],
                    found.unreadable))

    opts.finding = dict(opts._fields_)["finding"](add)
    with shown(progress, "verify") as callback:
        watch = Watch(callback)
        watch.fill(opts.watch)
        if like is None:
            summary = c.fsdp_verify_summary()
            good = watch.run(lambda: answer(lib.fsdp_checkpoint_verify, os.fsencode(path), ctypes.byref(opts),
                                            ctypes.byref(summary)))
        else:
            summary = c.fsdp_like_summary()
            good = watch.run(lambda: answer(lib.fsdp_checkpoint_verify_like, os.fsencode(path),
                                            os.fsencode(like), ctypes.byref(opts), ctypes.byref(summary)))
    return Report(good, findings, _numbers(summary))


class Difference(NamedTuple):
    """A name that differs. `why` is "kind", "dtype", "shape", "value", "nesting" or "data", or "only_a",
    "only_b"."""
    name: str
    why: str
    differing: int
    at: "tuple | None"
    a: str
    b: str
    max_abs: float
    max_rel: float


class Differences(list):
    """The names that differ, of two checkpoints; `summary` counts all names. Empty: they are equal."""

    summary = {}


def diff(a, b, *, progress=None, rename=(), **options):
    """Compares two checkpoints of any formats, whose layouts may differ: paths, or opened ones.

    rename   rules "s/REGEX/NEW/" from names of a to those of b
    options  members of fsdp_diff_opts (diff.h): atol, rtol, ulp, keys_only, include, exclude, threads, memory

    >>> import numpy
    >>> save({"w": numpy.zeros(3)}, "one"), save({"w": numpy.array([0, 2.5, 0])}, "two")
    (None, None)
    >>> [(found.name, found.differing, found.max_abs) for found in diff("one", "two")]
    [('w', 1, 2.5)]
    """
    opts = c.fsdp_diff_opts()
    options_of.fill(opts, options, DIFF, "diff")
    opts.renames, opts.rename_count = options_of.texts("rename", rename)
    found = Differences()

    def add(_context, item):
        item = item[0]
        if item.state.value != c.FSDP_DIFF_EQUAL:
            found.append(_difference(item))

    opts.visit = dict(opts._fields_)["visit"](add)
    sides = [side if isinstance(side, Checkpoint) else Checkpoint(side) for side in (a, b)]
    try:
        summary = c.fsdp_diff_summary()
        with shown(progress, "diff") as callback:
            watch = Watch(callback)
            watch.fill(opts.watch)
            watch.run(lambda: answer(lib.fsdp_checkpoint_diff, sides[0]._handle, sides[1]._handle,
                                     ctypes.byref(opts), ctypes.byref(summary)))
        found.summary = _numbers(summary)
        return found
    finally:
        for side, given in zip(sides, (a, b)):
            if side is not given:
                side.close()


def _difference(item):
    entry = item.a[0] if item.a else item.b[0]
    if not item.a or not item.b:
        return Difference(name_of(entry), item.state.word, 0, None, "", "", 0.0, 0.0)
    why = (item.why or b"data").decode()
    at = tuple(item.at[:entry.ndim]) if why == "data" and entry.kind.value == c.FSDP_ENTRY_TENSOR else None
    return Difference(name_of(entry), why, item.differing, at, text_of(getattr(item, "from")),
                      text_of(item.to), item.max_abs, item.max_rel)


# --- listing --------------------------------------------------------------------------------------

class Entry(NamedTuple):
    """A name of a checkpoint. kind is "tensor", "value" or "alias"; value is a value, or the name that an
    alias means."""
    name: str
    kind: str
    dtype: "str | None"
    shape: "tuple | None"
    nbytes: int
    value: object


def ls(path, **options):
    """Lists a checkpoint; the options are those of open.

    >>> import numpy
    >>> save({"w": numpy.ones((2, 3)), "lr": 0.1}, "listed")
    >>> for entry in ls("listed"):
    ...     entry.name, entry.kind, entry.shape, entry.value
    ('w', 'tensor', (2, 3), None)
    ('lr', 'value', None, 0.1)
    """
    with Checkpoint(path, **options) as checkpoint:
        return [_entry(checkpoint, entry) for entry in checkpoint._entries()]


def _entry(checkpoint, entry):
    kind, name = entry.kind.word, name_of(entry)
    if kind == "tensor":
        shape = tuple(entry.shape[:entry.ndim])
        return Entry(name, kind, arrays.dtype_of(entry.dtype.value).name, shape,
                     lib.fsdp_entry_bytes(ctypes.byref(entry)), None)
    if kind == "alias":
        return Entry(name, kind, None, None, 0, name_of(lib.fsdp_sd_at(checkpoint._sd, entry.target)[0]))
    return Entry(name, kind, None, None, 0, to_python(entry.value))
