"""The control plane by which ranks agree: of one process, or of processes that another program started."""

import ctypes
import socket

from . import _bindings as c
from ._library import call, exception, lib


class Control:
    """The control plane of one rank; without an address, of one process alone.

    Rank 0 passes a listening socket (listen), the others its host and port. `job` is an id that is equal on
    all ranks and that no other job has."""

    def __init__(self, rank=0, size=1, job="alone", listener=None, host=None, port=0, deadline=None):
        self.handle, self.rank, self.size = ctypes.c_void_p(), rank, size
        opts = c.fsdp_connect_opts(rank=rank, size=size, job=job.encode(), port=port,
                                   listener=-1 if listener is None else listener.detach(),
                                   host=host.encode() if host else None,
                                   deadline_ms=int(1000 * (deadline or 0)))
        call(lib.fsdp_ctl_connect, ctypes.byref(opts), ctypes.byref(self.handle))

    def close(self):
        handle, self.handle = self.handle, None
        if handle:
            lib.fsdp_ctl_free(handle)

    __del__ = close

    def broadcast(self, data, root=0):
        """The bytes of rank `root` on all ranks. Collective."""
        data = data if self.rank == root else b""
        size = ctypes.c_int64(len(data))
        call(lib.fsdp_ctl_broadcast, self.handle, root, ctypes.byref(size), ctypes.sizeof(size))
        buffer = ctypes.create_string_buffer(data, max(size.value, 1))
        call(lib.fsdp_ctl_broadcast, self.handle, root, buffer, size.value)
        return buffer.raw[:size.value]

    def allgather(self, data):
        """The bytes of every rank, in a list; they are equally many on all ranks. Collective."""
        size = len(data)
        buffer = ctypes.create_string_buffer(size * self.size)
        call(lib.fsdp_ctl_allgather, self.handle, data, size, buffer)
        return [buffer.raw[at:at + size] for at in range(0, size * self.size, size)]

    def agree(self, failure=None):
        """Raises on all ranks if any of them passes an exception: that of the lowest rank. Collective."""
        err = c.fsdp_error()
        if failure is not None:
            err.status.value = getattr(failure, "status", 0) or c.FSDP_ERR_USAGE
            err.text = str(failure).encode()[:c.FSDP_ERROR_TEXT - 1]
        status = lib.fsdp_ctl_agree(self.handle, err.status.value, ctypes.byref(err))
        if failure is not None:
            raise failure
        if status != c.FSDP_OK:
            raise exception(err)


def listen(host=""):
    """A listening socket, for rank 0, and its port."""
    listener = socket.create_server((host, 0), backlog=512)
    return listener, listener.getsockname()[1]
