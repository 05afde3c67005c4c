"""Memory of tensors: dtypes of the library as those of numpy and torch, and arrays of each.

`new(framework, info, shape)` makes an empty array that the library fills through `address`. The framework
"array" needs no package: its Array has a memoryview, and hands its memory to numpy, torch and every other
consumer of DLPack."""

import ctypes
import importlib
from functools import lru_cache
from typing import NamedTuple

from . import _bindings as c
from ._library import UsageError, lib

FORMATS = {
    "f64": "d", "f32": "f", "f16": "e", "i64": "q", "i32": "i", "i16": "h", "i8": "b", "u64": "Q", "u32": "I",
    "u16": "H", "u8": "B", "bool": "?"
}
ML_DTYPES = {
    "bf16": "bfloat16", "f8_e4m3fn": "float8_e4m3fn", "f8_e5m2": "float8_e5m2",
    "f8_e4m3fnuz": "float8_e4m3fnuz", "f8_e5m2fnuz": "float8_e5m2fnuz", "f8_e8m0fnu": "float8_e8m0fnu"
}
# DLPack's codes of types: signed, unsigned, floating, bfloat, complex, bool, and those of eight bits.
DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "bf16": 4, "c": 5, "bool": 6, "f8_e4m3fn": 10, "f8_e4m3fnuz": 11,
                "f8_e5m2": 12, "f8_e5m2fnuz": 13, "f8_e8m0fnu": 14}


class Dtype(NamedTuple):
    """A dtype of the library: its number, its names, and the bytes of an element."""
    number: int
    name: str
    torch: str
    safetensors: str
    numpy: str
    size: int
    values: int


@lru_cache(maxsize=None)
def dtype_of(number):
    info = lib.fsdp_dtype_describe(number)
    if not info:
        raise UsageError(f"{number} is not a dtype", c.FSDP_ERR_USAGE)
    names = (None if text is None else text.decode()
             for text in (info[0].name, info[0].torch, info[0].safetensors, info[0].numpy))
    return Dtype(number, *names, info[0].size, info[0].values)


@lru_cache(maxsize=None)
def dtype_named(text):
    """The dtype of a name of the library, of torch or of numpy ("f32", "float32")."""
    raw = str(text).encode()
    number = lib.fsdp_dtype_from_name(raw, len(raw)) or lib.fsdp_dtype_from_typed(raw, len(raw))
    if not number:
        raise UsageError(f"'{text}' is not a dtype of tensors", c.FSDP_ERR_USAGE)
    return dtype_of(number)


def is_blocks(dtype):
    """True for quantized blocks of GGUF, whose bytes are all that arrays can hold."""
    return dtype.values > 1


def count(shape):
    product = 1
    for length in shape:
        product *= length
    return product


# --- arrays without a framework -------------------------------------------------------------------

class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("number", ctypes.c_int)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int), ("dtype", _Type),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]
_lent = {}  # address of a managed tensor: what keeps its memory, until the consumer deletes it


@_Deleter
def _delete(managed):
    _lent.pop(ctypes.addressof(managed.contents), None)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _drop_capsule(capsule):
    """Called for a capsule that nobody consumed: one that was consumed has another name."""
    if ctypes.pythonapi.PyCapsule_IsValid(ctypes.c_void_p(capsule), b"dltensor"):
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype = ctypes.c_void_p
        _lent.pop(get(ctypes.c_void_p(capsule), b"dltensor"), None)


class Array:
    """A tensor in memory, row-major. `memory` is its memoryview, of bytes where Python has no such type."""

    def __init__(self, dtype, shape, buffer=None):
        self._dtype = dtype
        self.shape, self.dtype = tuple(shape), dtype.name
        self.nbytes = count(shape) * dtype.size
        self._buffer = (ctypes.c_char * self.nbytes)() if buffer is None else buffer
        self._address = ctypes.addressof((ctypes.c_char * 0).from_buffer(self._buffer)) if self.nbytes else 0

    @property
    def memory(self):
        plain = memoryview(self._buffer).cast("B")
        form = FORMATS.get(self.dtype)
        return plain.cast(form, self.shape) if form and self.nbytes and self.shape else plain

    def numpy(self):
        """The same memory as numpy's array."""
        import numpy
        return numpy.frombuffer(self._buffer, numpy_dtype(self._dtype)).reshape(self.shape)

    def torch(self):
        """The same memory as torch's tensor."""
        import torch
        if not self.nbytes:
            return torch.empty(self.shape, dtype=torch_dtype(self._dtype))
        return torch.frombuffer(self._buffer, dtype=torch_dtype(self._dtype)).reshape(self.shape)

    def tobytes(self):
        return bytes(self._buffer)

    def __array__(self, dtype=None, copy=None):
        array = self.numpy()
        return array.astype(dtype) if dtype is not None else array.copy() if copy else array

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        name = self.dtype
        code = DLPACK_CODES.get(name,
                                DLPACK_CODES.get(name[0] if name[0] in "iufc" and name[1:].isdigit() else ""))
        if code is None:
            raise BufferError(f"DLPack has no type for {name}")
        lengths = (ctypes.c_int64 * len(self.shape))(*self.shape)
        managed = _Managed()
        managed.tensor = _Tensor(self._address, _Device(1, 0), len(self.shape),
                                 _Type(code, self._dtype.size * 8, 1), lengths, None, 0)
        managed.deleter = _delete
        _lent[ctypes.addressof(managed)] = managed, lengths, self._buffer
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(managed), b"dltensor", ctypes.cast(_drop_capsule, ctypes.c_void_p))

    def __len__(self):
        if not self.shape:
            raise TypeError("a scalar has no length")
        return self.shape[0]

    def __repr__(self):
        return f"Array(shape={self.shape}, dtype={self.dtype})"


# --- frameworks -----------------------------------------------------------------------------------

def numpy_dtype(dtype):
    import numpy
    if dtype.numpy:
        return numpy.dtype(dtype.numpy)
    if dtype.name in ML_DTYPES:
        try:
            ml_dtypes = importlib.import_module("ml_dtypes")
        except ImportError:
            raise TypeError(f"numpy has no {dtype.name}; install ml_dtypes, or use framework='torch' or "
                            "framework='array'") from None
        return numpy.dtype(getattr(ml_dtypes, ML_DTYPES[dtype.name]))
    raise TypeError(f"numpy has no {dtype.name}; use framework='torch' or framework='array'")


def torch_dtype(dtype):
    import torch
    found = getattr(torch, dtype.torch, None) if dtype.torch else None
    if found is None:
        raise TypeError(f"this PyTorch has no {dtype.name}; use framework='array'")
    return found


def as_bytes(dtype, shape):
    """The dtype and shape of an array of blocks: bytes, those of a row in its last dim."""
    if not is_blocks(dtype):
        return dtype, tuple(shape)
    rows = tuple(shape) or (1,)
    return dtype_named("u8"), rows[:-1] + (rows[-1] * dtype.size,)


def default_framework():
    """numpy, or else torch, or else "array"."""
    for name in ("numpy", "torch"):
        try:
            importlib.import_module(name)
            return name
        except ImportError:
            pass
    return "array"


FRAMEWORKS = {
    "pt": "torch", "pytorch": "torch", "torch": "torch", "np": "numpy", "numpy": "numpy", "array": "array"
}


def framework_named(name):
    if name is None:
        return default_framework()
    if name not in FRAMEWORKS:
        raise UsageError(f"'{name}' is not a framework: use 'numpy', 'torch' or 'array'", c.FSDP_ERR_USAGE)
    return FRAMEWORKS[name]


def new(framework, dtype, shape):
    """An array without values."""
    dtype, shape = as_bytes(dtype, shape)
    if framework == "torch":
        import torch
        return torch.empty(shape, dtype=torch_dtype(dtype))
    if framework == "numpy":
        import numpy
        return numpy.empty(shape, numpy_dtype(dtype))
    return Array(dtype, shape)


def over(framework, dtype, shape, buffer):
    """An array over memory that a buffer holds."""
    array = Array(*as_bytes(dtype, shape), buffer)
    return array.torch() if framework == "torch" else array.numpy() if framework == "numpy" else array


def reshape(array, shape):
    """The same memory in another shape."""
    if isinstance(array, Array):
        return Array(array._dtype, shape, array._buffer)
    return array.reshape(shape)


def address(array):
    if isinstance(array, Array):
        return array._address
    return array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data


def describe(array):
    """The dtype, shape and row-major memory of an array of any kind, which the last one keeps; None: not an
    array."""
    if isinstance(array, Array):
        return array._dtype, array.shape, array
    if hasattr(array, "data_ptr") and hasattr(array, "is_contiguous"):
        kept = array.detach()
        kept = (kept.cpu() if kept.device.type != "cpu" else kept).contiguous()
        kept = kept.resolve_conj().resolve_neg()
        return dtype_named(str(array.dtype).replace("torch.", "")), tuple(kept.shape), kept
    if hasattr(array, "__array_interface__"):
        import numpy
        kept = numpy.asarray(array)
        kept = numpy.ascontiguousarray(kept.astype(kept.dtype.newbyteorder("="),
                                                   copy=False)).reshape(kept.shape)
        return dtype_named(kept.dtype.name), kept.shape, kept
    return None
