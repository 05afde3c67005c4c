"""Sharded training state: opens, converts, saves and verifies checkpoints of any format.

    import fsdp
    with fsdp.open("checkpoint-500") as checkpoint:
        checkpoint["model.embed_tokens.weight"][10:20]

The work is done by the C library in this package; fsdp.torch has the parts for PyTorch's trainers.
"""

from ._bindings import VERSION as __version__
from ._checkpoint import Box, Checkpoint, Layout, Slice
from ._library import (CancelledError, DamagedError, Error, ExistsError, InputOutputError, InternalError,
                       LimitError, NoSpaceError, NotFoundError, PeerError, RefusedError, UsageError)
from ._tasks import (Difference, Differences, Entry, Finding, Plan, Report, Run, convert, diff, load, ls,
                     plan, save, verify)

def open(path, *, framework=None, device="cpu", dequantize=False, map=None, verify=None, mmap=True,
         **options):
    """Opens a checkpoint of any format; a run stands for its newest good step.

    framework   "numpy" (the default where it is installed), "torch" or "array"
    device      where tensors are put, with PyTorch
    dequantize  quantized tensors of GGUF become floating numbers
    map         names of another framework: a built-in map or the path of a map file (docs/maps.md)
    verify      compare blocks with their checksums: by default for whole tensors, not for slices
    mmap        tensors of formats without checksums are private memory over their file, which is read when it
                is touched
    options     members of fsdp_open_opts (checkpoint.h): format, allow_missing, variant, whole, like, ...

    >>> import numpy
    >>> save({"w": numpy.eye(3)}, "opened")
    >>> with open("opened") as checkpoint:
    ...     checkpoint.keys(), checkpoint["w"][1].tolist()
    (['w'], [0.0, 1.0, 0.0])
    """
    return Checkpoint(path, framework=framework, device=device, dequantize=dequantize, map=map, verify=verify,
                      mmap=mmap, **options)


def safe_open(path, framework=None, device="cpu", **options):
    """Opens a checkpoint as `open` does, with the arguments of safetensors.safe_open."""
    return Checkpoint(path, framework=framework, device=device, **options)


for _public in (Box, CancelledError, Checkpoint, DamagedError, Difference, Differences, Entry, Error,
                ExistsError, Finding, InputOutputError, InternalError, Layout, LimitError, NoSpaceError,
                NotFoundError, PeerError, Plan, RefusedError, Report, Run, Slice, UsageError):
    _public.__module__ = __name__  # tracebacks and pickles name what users import
