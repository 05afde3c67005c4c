"""Slices of tensors equal numpy's, in every format, and read no more than their bytes."""

import itertools
import os
import random
import subprocess
import sys
import tempfile
import unittest

import fsdp
import numpy

SHAPE = (7, 9, 11)
TARGETS = {"sharded": {"to": "fsdp", "world_size": 3}, "dcp": {"to": "dcp", "world_size": 2}, "one.h5": {},
           "t.safetensors": {}, "t.pt": {}, "t.npz": {}, "packed": {"to": "fsdp", "compress": True}}


def random_index(rng, shape):
    index = []
    for n in shape:
        kind = rng.random()
        if kind < 0.2:
            index.append(rng.randrange(-n, n))
        elif kind < 0.9:
            ends = [rng.choice([None] + list(range(-n - 2, n + 3))) for _ in range(2)]
            index.append(slice(*ends, rng.choice([None, 1, 2, 3, -1, -2, -5])))
        else:
            return tuple(index + [Ellipsis])
    return tuple(index)


class Slices(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.base = os.path.join(cls.directory.name, "base")
        cls.array = numpy.random.default_rng(1).standard_normal(SHAPE).astype("f4")
        fsdp.save({"w": cls.array}, cls.base)
        for name, options in TARGETS.items():
            fsdp.convert(cls.base, cls.path(name), **options)

    @classmethod
    def tearDownClass(cls):
        cls.directory.cleanup()

    @classmethod
    def path(cls, name):
        return os.path.join(cls.directory.name, name)

    def test_equal_numpy_in_every_format(self):
        rng = random.Random(7)
        for name in TARGETS:
            with self.subTest(name), fsdp.open(self.path(name)) as checkpoint:
                tensor = checkpoint["w"]
                for _ in range(300):
                    index = random_index(rng, SHAPE)
                    expected = self.array[index]
                    found = tensor[index]
                    self.assertEqual(found.shape, expected.shape, index)
                    self.assertTrue(numpy.array_equal(found, expected), index)

    def test_large_steps_read_in_pieces(self):
        array = numpy.arange(64 * 4096, dtype="f4").reshape(64, 4096)
        path = self.path("steps")
        fsdp.save({"w": array}, path)
        with fsdp.open(path) as checkpoint:
            for index in (numpy.s_[::7], numpy.s_[::-7], numpy.s_[5::9, ::-3], numpy.s_[:0],
                          numpy.s_[3:60:8, 100:4000:500]):
                self.assertTrue(numpy.array_equal(checkpoint["w"][index], array[index]), index)

    def test_wrong_indexes_are_refused(self):
        with fsdp.open(self.base) as checkpoint:
            tensor = checkpoint["w"]
            for index in (7, (0, 0, 0, 0), (0, -10), (Ellipsis, Ellipsis)):
                self.assertRaises(IndexError, lambda index=index: tensor[index])
            for index in (None, [1, 2], "a", 1.5, True, numpy.array([1])):
                self.assertRaises((TypeError, IndexError), lambda index=index: tensor[index])

    def test_bytes_read(self):
        """A slice reads at most 1.1 times its bytes and 64 KiB: counted by strace between two marks."""
        large = self.path("large")
        fsdp.save({"w": numpy.zeros((4096, 1024), "f4")}, large)
        paths = [large]
        for name, options in TARGETS.items():
            if name != "packed":
                paths.append(self.path("large-" + name))
                fsdp.convert(large, paths[-1], **options)
        for path, rows in itertools.product(paths, ("100:130", ":, 5:9", "::512", "7, 3")):
            with self.subTest(path=path, rows=rows):
                size, read = self.trace(path, rows)
                self.assertLessEqual(read, 1.1 * size + 65536)

    def trace(self, path, rows):
        log = self.path("strace")
        code = (f"import os, fsdp, numpy\ntensor = fsdp.open({path!r})['w']\nos.access('/mark', 0)\n"
                f"print(tensor[{rows}].nbytes)\nos.access('/mark', 0)")
        size = subprocess.run([
            "strace", "-f", "-o", log, "-e", "trace=pread64,preadv,preadv2,read,access", sys.executable, "-c",
            code
        ],
                              check=True,
                              stdout=subprocess.PIPE,
                              text=True).stdout
        with open(log) as file:
            between = file.read().split('"/mark"')[1].splitlines()
        return int(size), sum(
            int(line.rsplit("= ", 1)[1].split()[0]) for line in between if " = " in line and "read" in line)


if __name__ == "__main__":
    unittest.main()
