"""torch.save files of tensors and of objects whose classes are only named: made without PyTorch.

The pickles are made of stand-ins for the classes of torch, which are written by name.
"""

import io
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict


def function(module, name):
    def made():
        pass
    made.__module__, made.__qualname__ = module, name
    sys.modules.setdefault(module, types.ModuleType(module))
    setattr(sys.modules[module], name, made)
    return made


def stand_in(module, name, base=object):
    for one in (module.partition(".")[0], module):
        sys.modules.setdefault(one, types.ModuleType(one))
    made = type(name, (base,), {"__module__": module, "__qualname__": name})
    setattr(sys.modules[module], name, made)
    return made


def rebuild_tensor():
    pass


rebuild_tensor.__module__, rebuild_tensor.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
sys.modules["torch._utils"] = types.ModuleType("torch._utils")
sys.modules["torch._utils"]._rebuild_tensor_v2 = rebuild_tensor
FloatStorage = stand_in("torch", "FloatStorage")
IntStorage = stand_in("torch", "CharStorage")


class Storage:
    """Numbers of 4 bytes; kept as int8: of one."""
    def __init__(self, values, kind=FloatStorage):
        self.kind, self.count = kind, len(values)
        self.data = struct.pack(f"<{len(values)}{'f' if kind is FloatStorage else 'b'}", *values)


class Tensor:
    def __init__(self, storage, offset, count):
        self.arguments = storage, offset, (count,), (1,), False, OrderedDict()

    def __reduce__(self):
        return rebuild_tensor, self.arguments


def tensor(*values, kind=FloatStorage):
    return Tensor(Storage(values, kind), 0, len(values))


class Pickler(pickle.Pickler):
    def __init__(self, file, protocol):
        super().__init__(file, protocol)
        self.storages = []

    def persistent_id(self, one):
        if not isinstance(one, Storage):
            return None
        if one not in self.storages:
            self.storages.append(one)
        return "storage", one.kind, str(self.storages.index(one)), "cpu", one.count


def save(path, state, protocol=2):
    data = io.BytesIO()
    pickler = Pickler(data, protocol)
    pickler.dump(state)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data.getvalue())
        for number, storage in enumerate(pickler.storages):
            archive.writestr(f"archive/data/{number}", storage.data)
        archive.writestr("archive/version", "3\n")
