import os
from concurrent.futures import Future
from typing import Any, Callable, MutableMapping, Optional, Union

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

_Path = Union[str, "os.PathLike[str]"]
_Progress = Union[None, bool, Callable[[int, int, str], None]]

def save(state_dict: MutableMapping[str, Any], path: _Path, *, step: Optional[int] = None,
         process_group: Optional[ProcessGroup] = None, no_dist: bool = False, keep_last: int = 0,
         keep_every: int = 0, progress: _Progress = None, kind: str = ..., owners: str = ...,
         compress: bool = ..., level: int = ..., skip_fsync: bool = ..., skip_view: bool = ...,
         rank0_writes: bool = ...,
         overwrite: bool = ..., threads: int = ..., memory: Union[int, str] = ...) -> None: ...
def async_save(state_dict: MutableMapping[str, Any], path: _Path, *, step: Optional[int] = None,
               process_group: Optional[ProcessGroup] = None, no_dist: bool = False, keep_last: int = 0,
               keep_every: int = 0, **options: Any) -> "Future[str]": ...
def load(state_dict: MutableMapping[str, Any], path: _Path, *, process_group: Optional[ProcessGroup] = None,
         no_dist: bool = False, progress: _Progress = None, check: str = ..., partial: bool = ...,
         cast: bool = ..., include: str = ..., exclude: str = ..., threads: int = ...,
         memory: Union[int, str] = ...) -> str: ...
def wait(process_group: Optional[ProcessGroup] = None, no_dist: bool = False) -> None: ...
def install(uninstall: bool = False) -> None: ...

class Writer(StorageWriter):
    checkpoint_id: Optional[_Path]
    def __init__(self, path: Optional[_Path] = None, *, step: Optional[int] = None,
                 process_group: Optional[ProcessGroup] = None, keep_last: int = 0, keep_every: int = 0,
                 **options: Any) -> None: ...

class Reader(StorageReader):
    checkpoint_id: Optional[_Path]
    def __init__(self, path: Optional[_Path] = None, **options: Any) -> None: ...
