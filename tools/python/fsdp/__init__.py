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

def open(path, **options):
    return Checkpoint(path, **options)


def safe_open(path, framework=None, device="cpu", **options):
    return Checkpoint(path, framework=framework, device=device, **options)


for _public in (Box, CancelledError, Checkpoint, DamagedError, Difference, Differences, Entry, Error,
                ExistsError, Finding, InputOutputError, InternalError, Layout, LimitError, NoSpaceError,
                NotFoundError, PeerError, Plan, RefusedError, Report, Run, Slice, UsageError):
    _public.__module__ = __name__  # tracebacks and pickles name what users import
