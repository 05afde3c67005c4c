from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from types import TracebackType
from typing import Any, Literal, NamedTuple, Union

__version__: str

_Path = Union[str, bytes, PathLike[str]]
_Texts = Union[str, Iterable[str]]
_Progress = Union[bool, Callable[[int, int, str], object], None]
_Framework = Literal["numpy", "np", "torch", "pt", "pytorch", "array"]

class Error(Exception):
    status: int
    rank: int

class UsageError(Error, ValueError): ...
class NotFoundError(Error, FileNotFoundError): ...
class DamagedError(Error): ...
class RefusedError(Error): ...
class ExistsError(Error, FileExistsError): ...
class NoSpaceError(Error, OSError): ...
class InputOutputError(Error, OSError): ...
class LimitError(Error, MemoryError): ...
class PeerError(Error): ...
class InternalError(Error): ...
class CancelledError(Error): ...

class Box(NamedTuple):
    holder: int | str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

class Layout(NamedTuple):
    mesh: dict[str, int]
    placements: tuple[str, ...]
    boxes: tuple[Box, ...]

class Slice:
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __getitem__(self, index: Any) -> Any: ...
    def __array__(self, dtype: Any = ..., copy: bool | None = ...) -> Any: ...

class Checkpoint:
    path: str
    format: str
    kind: str
    step: int | None
    world: int
    tensor_bytes: int
    def close(self) -> None: ...
    def __enter__(self) -> Checkpoint: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def keys(self) -> list[str]: ...
    def offset_keys(self) -> list[str]: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: object) -> bool: ...
    def aliases(self) -> dict[str, str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def nbytes(self, name: str) -> int: ...
    def values(self) -> dict[str, Any]: ...
    def metadata(self) -> dict[str, str]: ...
    def missing(self) -> list[str]: ...
    def files(self) -> dict[str, int]: ...
    def layout(self, name: str) -> Layout: ...
    def get_slice(self, name: str) -> Slice: ...
    def __getitem__(self, name: str) -> Slice: ...
    def get_tensor(self, name: str) -> Any: ...
    def get_tensors(self, names: Iterable[str] | None = ...) -> dict[str, Any]: ...
    def prefetch(self, plan: Iterable[str], memory: int = ...) -> None: ...

class Plan(NamedTuple):
    numbers: dict[str, int]
    notes: list[str]

class Finding(NamedTuple):
    kind: str
    file: str
    tensor: str
    block: int | None
    text: str
    unreadable: bool

class Report(NamedTuple):
    good: bool
    findings: list[Finding]
    summary: dict[str, int]
    def __bool__(self) -> bool: ...

class Difference(NamedTuple):
    name: str
    why: str
    differing: int
    at: tuple[int, ...] | None
    a: str
    b: str
    max_abs: float
    max_rel: float

class Differences(list[Difference]):
    summary: dict[str, int]

class Entry(NamedTuple):
    name: str
    kind: Literal["tensor", "value", "alias"]
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    value: Any

class Run:
    path: str
    def __init__(self, path: _Path) -> None: ...
    def save(
        self, state: Mapping[Any, Any], step: int, *, progress: _Progress = ..., keep_last: int = ...,
        keep_every: int = ..., kind: Literal["sharded", "full", "local"] = ..., compress: bool = ...,
        level: int = ..., skip_fsync: bool = ..., skip_view: bool = ..., threads: int = ...,
        memory: int = ...,
    ) -> None: ...
    def steps(self) -> list[int]: ...
    def latest(self, level: Literal["quick", "data", "deep"] = ...) -> str: ...
    def load(
        self, into: dict[Any, Any] | None = ..., *, framework: _Framework | None = ..., device: Any = ...,
        flat: bool = ..., progress: _Progress = ..., check: Literal["blocks", "off"] = ...,
        partial: bool = ..., cast: bool = ..., include: str = ..., exclude: str = ..., threads: int = ...,
        memory: int = ..., follow_links: bool = ..., limits_only: bool = ...,
    ) -> Any: ...

def open(
    path: _Path, *, framework: _Framework | None = ..., device: Any = ..., dequantize: bool = ...,
    map: _Path | None = ..., verify: bool | None = ..., mmap: bool = ..., format: str = ...,
    allow_missing: str = ...,
    variant: str = ..., void_as: str = ..., like: _Path = ..., as_stored: bool = ..., whole: bool = ...,
    memory: int = ..., follow_links: bool = ..., limits_only: bool = ...,
) -> Checkpoint: ...
def safe_open(
    path: _Path, framework: _Framework | None = ..., device: Any = ..., **options: Any,
) -> Checkpoint: ...
def save(
    state: Mapping[Any, Any], path: _Path, *, to: str | None = ..., step: int | None = ...,
    progress: _Progress = ..., kind: Literal["sharded", "full", "local"] = ...,
    owners: Literal["balanced", "lowest"] = ...,
    compress: bool = ..., level: int = ..., skip_fsync: bool = ..., skip_view: bool = ...,
    rank0_writes: bool = ..., overwrite: bool = ..., threads: int = ..., memory: int = ...,
    follow_links: bool = ..., limits_only: bool = ..., **options: Any,
) -> None: ...
def load(
    path: _Path, into: dict[Any, Any] | None = ..., *, framework: _Framework | None = ..., device: Any = ...,
    flat: bool = ..., progress: _Progress = ..., check: Literal["blocks", "off"] = ..., partial: bool = ...,
    cast: bool = ..., include: str = ..., exclude: str = ..., threads: int = ..., memory: int = ...,
    follow_links: bool = ..., limits_only: bool = ...,
) -> Any: ...
def convert(
    source: _Path, target: _Path, *, progress: _Progress = ...,
    # what fsdp-convert has, in the order of the library's table
    to: str = ..., kind: Literal["sharded", "full", "local"] = ..., world_size: int = ...,
    mesh: dict[str, int] | str | int = ..., shard_dim: int = ..., max_shard_size: int = ...,
    compress: bool = ..., level: int = ..., chunk: int = ..., no_view: bool = ..., overwrite: bool = ...,
    only: Literal["all", "model", "optim"] = ..., part: str = ..., keep_names: bool = ...,
    include: str = ..., exclude: str = ..., drop: _Texts = ..., rename: _Texts = ..., under: str = ...,
    dtype: str = ..., dtype_for: _Texts = ..., on_overflow: Literal["fail", "clamp", "inf"] = ...,
    adapter: _Path = ..., dequant: Literal["bf16", "f32", "f16"] = ..., map: _Path = ..., size: _Texts = ...,
    from_format: str = ..., allow_missing: str = ..., variant: str = ..., void_as: str = ...,
    like: _Path = ..., tied: Literal["auto", "keep", "drop"] = ..., copy_from: _Path = ...,
    copy_code: bool = ..., no_copy: bool = ..., opaque: Literal["refuse", "copy"] = ...,
    optim: Literal["nested", "flat"] = ..., resume: bool = ..., no_verify: bool = ..., no_sync: bool = ...,
    bwlimit: int = ..., follow_links: bool = ..., limits_only: bool = ..., as_stored: bool = ...,
    whole: bool = ..., threads: int = ..., memory: int = ..., direct: bool = ...,
) -> Plan: ...
def plan(source: _Path, target: _Path, **options: Any) -> Plan: ...
def verify(
    path: _Path, *, level: Literal["quick", "data", "deep"] = ..., like: _Path | None = ...,
    progress: _Progress = ..., digests: Literal["ignore", "use", "write"] = ..., repair: bool = ...,
    variant: str = ..., threads: int = ..., memory: int = ..., follow_links: bool = ...,
    limits_only: bool = ...,
) -> Report: ...
def diff(
    a: _Path | Checkpoint, b: _Path | Checkpoint, *, progress: _Progress = ..., rename: _Texts = ...,
    atol: float = ..., rtol: float = ..., ulp: int = ..., keys_only: bool = ..., include: str = ...,
    exclude: str = ..., threads: int = ..., memory: int = ...,
) -> Differences: ...
def ls(path: _Path, **options: Any) -> list[Entry]: ...
