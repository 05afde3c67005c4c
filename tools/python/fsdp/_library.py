"""The loaded library: finds libfsdp, gives its functions their types, and turns its errors into
exceptions."""

import ctypes
import os

from . import _bindings as c


class Error(Exception):
    """An error of the library: its text, its status (the exit code of a tool), the rank that failed."""

    def __init__(self, text, status=0, rank=0):
        super().__init__(text)
        self.status, self.rank = status, rank


class UsageError(Error, ValueError):
    """A wrong argument, or arguments that contradict each other (2)."""


class NotFoundError(Error, FileNotFoundError):
    """The input does not exist, or its format is not recognised (3)."""


class DamagedError(Error):
    """The input is damaged or incomplete (4)."""


class RefusedError(Error):
    """The input is refused for safety (5)."""


class ExistsError(Error, FileExistsError):
    """The output exists, or another job uses the directory (6)."""


class NoSpaceError(Error, OSError):
    """No space, quota or file-size limit (7)."""


class InputOutputError(Error, OSError):
    """Any other error of reading or writing (8)."""


class LimitError(Error, MemoryError):
    """Memory or another resource is exhausted (9)."""


class PeerError(Error):
    """Another rank failed or did not answer in time (10)."""


class InternalError(Error):
    """A bug of the library: please report it (70)."""


class CancelledError(Error):
    """The caller asked to stop (75)."""


EXCEPTIONS = {
    c.FSDP_ERR_USAGE: UsageError, c.FSDP_ERR_NOT_FOUND: NotFoundError, c.FSDP_ERR_DAMAGED: DamagedError,
    c.FSDP_ERR_REFUSED: RefusedError, c.FSDP_ERR_EXISTS: ExistsError, c.FSDP_ERR_NO_SPACE: NoSpaceError,
    c.FSDP_ERR_IO: InputOutputError, c.FSDP_ERR_LIMIT: LimitError, c.FSDP_ERR_PEER: PeerError,
    c.FSDP_ERR_INTERNAL: InternalError, c.FSDP_ERR_CANCELLED: CancelledError,
}


def exception(err):
    """The exception of a filled-in fsdp_error."""
    text = err.text.decode("utf-8", "replace")
    return EXCEPTIONS.get(err.status.value, Error)(text, err.status.value, err.rank)


def package_path(*names):
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), *names)


def find_library():
    """The path of libfsdp: $FSDP_LIBRARY, or the one in this package."""
    return os.environ.get("FSDP_LIBRARY") or package_path("lib", "libfsdp.so.0")


class Library:
    """Functions of libfsdp as attributes: typed at their first use. Calls release the GIL."""

    def __init__(self, path):
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise ImportError(
                f"cannot load libfsdp: {error}; reinstall the package, or set FSDP_LIBRARY") from None
        found = self.fsdp_version().decode()
        if found != c.VERSION:
            raise ImportError(f"'{path}' is version {found} of libfsdp, and this module needs {c.VERSION}")

    def __getattr__(self, name):
        if name not in c.FUNCTIONS:
            raise AttributeError(name)
        function = getattr(self._library, name)
        function.restype, function.argtypes = c.FUNCTIONS[name]()
        setattr(self, name, function)
        return function


lib = Library(find_library())


def answer(function, *arguments):
    """Calls a function that returns a status; true for FSDP_OK, false for FSDP_DIFFERS, else raises."""
    err = c.fsdp_error()
    status = function(*arguments, ctypes.byref(err))
    if status in (c.FSDP_OK, c.FSDP_DIFFERS):
        return status == c.FSDP_OK
    raise exception(err)


def call(function, *arguments):
    """Calls a function that returns a status, and raises unless it is FSDP_OK."""
    err = c.fsdp_error()
    if function(*arguments, ctypes.byref(err)) != c.FSDP_OK:
        raise exception(err)
