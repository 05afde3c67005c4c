"""The C compiler agrees with fsdp._bindings: sizes of structs, offsets of members, numbers of enumerators,
and the library has every function."""

import ctypes
import os
import subprocess
import tempfile
import unittest

from fsdp import _bindings as c
from fsdp._library import lib

STRUCTS = [item for name, item in sorted(vars(c).items())
           if isinstance(item, type) and issubclass(item, ctypes.Structure) and item.__module__ == c.__name__
           and not name[-1].isdigit() and name.startswith("fsdp_")]
NUMBERS = sorted(name for name, item in vars(c).items() if name.startswith("FSDP_") and isinstance(item, int))


def program():
    """C that prints what the bindings say, as the compiler sees it."""
    yield '#include <fsdp/fsdp.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void)\n{\n'
    for struct in STRUCTS:
        yield f'    printf("{struct.__name__} %zu\\n", sizeof({struct.__name__}));\n'
        for name, _ in struct._fields_:
            yield f'    printf("{struct.__name__}.{name} %zu\\n", offsetof({struct.__name__}, {name}));\n'
    for name in NUMBERS:
        yield f'    printf("{name} %lld\\n", (long long){name});\n'
    yield "    return 0;\n}\n"


def bound():
    for struct in STRUCTS:
        yield f"{struct.__name__} {ctypes.sizeof(struct)}"
        for name, _ in struct._fields_:
            yield f"{struct.__name__}.{name} {getattr(struct, name).offset}"
    for name in NUMBERS:
        yield f"{name} {getattr(c, name)}"


class Bindings(unittest.TestCase):
    def test_compiler_agrees(self):
        with tempfile.TemporaryDirectory() as directory:
            source, binary = os.path.join(directory, "a.c"), os.path.join(directory, "a")
            with open(source, "w") as file:
                file.writelines(program())
            subprocess.run([os.environ["CC"], "-I", os.environ["FSDP_INCLUDE"], source, "-o", binary],
                           check=True)
            printed = subprocess.run([binary], check=True, stdout=subprocess.PIPE,
                                     text=True).stdout.splitlines()
        self.assertGreater(len(STRUCTS), 50)
        self.assertGreater(len(NUMBERS), 200)
        self.assertEqual(list(bound()), printed)

    def test_library_has_functions(self):
        for name in c.FUNCTIONS:
            if name.startswith(("fsdp_ctl_mpi", "fsdp_mpi", "fsdp_wrap")):
                continue  # of libraries of their own
            self.assertTrue(getattr(lib, name), name)


if __name__ == "__main__":
    unittest.main()
