"""Arrays of every dtype: numpy's, PyTorch's where it is installed, and those that need neither."""

import ctypes
import os
import struct
import subprocess
import sys
import tempfile
import unittest

import fsdp
import numpy
from fsdp import _arrays

VALUES = {
    "f64": "f8", "f32": "f4", "f16": "f2", "i64": "i8", "i32": "i4", "i16": "i2", "i8": "i1", "u64": "u8",
    "u32": "u4", "u16": "u2", "u8": "u1", "bool": "?", "c64": "c8", "c128": "c16"
}

# A program without numpy and PyTorch: -S leaves out the packages of the distribution.
BARE = """
import sys
sys.path.insert(0, sys.argv[1])
import fsdp
for package in ("numpy", "torch"):
    try:
        __import__(package)
    except ImportError:
        continue
    sys.exit(f"{package} is there")
with fsdp.open(sys.argv[2]) as checkpoint:
    for name in checkpoint.keys():
        array = checkpoint.get_tensor(name)
        assert type(array) is fsdp._arrays.Array and array.dtype == name, array
    f32 = checkpoint.get_tensor("f32")
    assert f32.memory.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]], f32.memory
    assert checkpoint["f32"][1, 1:].memory.tolist() == [0.0, 1.0]
state = fsdp.load(sys.argv[2])
fsdp.save(state, sys.argv[3])
assert not fsdp.diff(sys.argv[2], sys.argv[3])
print("ok")
"""


class Arrays(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = os.path.join(directory.name, "ckpt")
        self.state = {name: (numpy.arange(6).reshape(2, 3) % 2).astype(kind) for name, kind in VALUES.items()}
        fsdp.save(self.state, self.path)

    def test_numpy(self):
        with fsdp.open(self.path) as checkpoint:
            for name, kind in VALUES.items():
                found = checkpoint.get_tensor(name)
                self.assertEqual((found.dtype, checkpoint.dtype(name)), (numpy.dtype(kind), name))
                self.assertTrue(numpy.array_equal(found, self.state[name]))

    def test_without_packages(self):
        package = os.path.dirname(os.path.dirname(os.path.abspath(fsdp.__file__)))
        out = subprocess.run([sys.executable, "-S", "-c", BARE, package, self.path, self.path + "-2"],
                             stdout=subprocess.PIPE, text=True, check=True).stdout
        self.assertEqual(out, "ok\n")

    def test_dlpack_shares_memory_and_gives_it_back(self):
        with fsdp.open(self.path, framework="array") as checkpoint:
            array = checkpoint.get_tensor("f32")
        taken = numpy.from_dlpack(array)
        self.assertTrue(numpy.array_equal(taken, self.state["f32"]))
        self.assertEqual(taken.__array_interface__["data"][0], array._address)
        lent = len(_arrays._lent)
        capsule = array.__dlpack__()
        self.assertEqual(len(_arrays._lent), lent + 1)
        del capsule
        self.assertEqual(len(_arrays._lent), lent)
        del taken
        self.assertEqual(len(_arrays._lent), lent - 1)

    def test_types_that_numpy_lacks_are_named(self):
        fsdp.convert(self.path, self.path + "-bf16", to="fsdp", drop=["^[^f]", "f64|f16"], dtype="bf16")
        with fsdp.open(self.path + "-bf16", framework="array") as checkpoint:
            array = checkpoint.get_tensor("f32")
            self.assertEqual(array.dtype, "bf16")
            self.assertEqual(struct.unpack("<6H", array.tobytes()), (0, 0x3F80, 0, 0x3F80, 0, 0x3F80))
        try:
            import ml_dtypes  # noqa: F401
        except ImportError:
            with fsdp.open(self.path + "-bf16") as checkpoint:
                with self.assertRaisesRegex(TypeError, "ml_dtypes"):
                    checkpoint.get_tensor("f32")

    def test_arrays_of_python_are_saved(self):
        array = _arrays.Array(_arrays.dtype_named("i32"), (3,))
        array.memory[1] = 7
        fsdp.save({"a": array}, self.path + "-a")
        self.assertEqual(fsdp.load(self.path + "-a")["a"].tolist(), [0, 7, 0])

    def test_a_copy_does_not_share(self):
        with fsdp.open(self.path) as checkpoint:
            one, two = checkpoint.get_tensor("f32"), checkpoint.get_tensor("f32")
            one[0] = 9
            self.assertEqual(two[0, 0], 0)

    def test_plain_bytes_are_mapped(self):
        for name in ("a.safetensors", "a.pt", "a.npz"):
            path = self.path + name
            fsdp.convert(self.path, path, drop="dtype:c128")
            with fsdp.open(path) as checkpoint, fsdp.open(path, mmap=False) as copied:
                for key in checkpoint.keys():
                    with self.subTest(name=name, key=key):
                        one, two, read = (side.get_tensor(key) for side in (checkpoint, checkpoint, copied))
                        self.assertTrue(numpy.array_equal(one, self.state[key]))
                        self.assertTrue(numpy.array_equal(read, self.state[key]))
                        if len(checkpoint._maps) and name == "a.safetensors":
                            self.assertIsInstance(one.base.base, memoryview)
            with open(path, "rb") as file:
                before = file.read()
            one[...] = 0  # private memory, after the close
            self.assertEqual(float(numpy.abs(one).sum()), 0.0)
            with open(path, "rb") as file:
                self.assertEqual(file.read(), before)

    def test_a_map_reads_only_what_is_touched(self):
        """Opening a tensor of 64 MiB and reading one element takes no 64 MiB of memory."""
        path = self.path + "-large.safetensors"
        fsdp.save({"w": numpy.zeros(16 << 20, "f4")}, path)
        code = ("import fsdp, numpy, sys\nfrom resource import RUSAGE_SELF, getrusage\n"
                "before = getrusage(RUSAGE_SELF).ru_maxrss\n"
                "w = fsdp.open(sys.argv[1]).get_tensor('w')\nassert w[5] == 0\n"
                "print(getrusage(RUSAGE_SELF).ru_maxrss - before)")
        command = [sys.executable, "-c", code, path]
        grown = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        self.assertLess(grown, 16 << 10)

    def test_address(self):
        self.assertEqual(_arrays.address(self.state["f32"]), self.state["f32"].ctypes.data)
        self.assertEqual(ctypes.string_at(_arrays.address(self.state["u8"]), 6), b"\0\1\0\1\0\1")


if __name__ == "__main__":
    unittest.main()
