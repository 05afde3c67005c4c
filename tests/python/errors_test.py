"""Hostile and damaged inputs through Python: an exception with the library's text, and never a crash."""

import os
import random
import shutil
import tempfile
import unittest

import fsdp
import numpy

GOLDEN = os.path.join(os.environ["FSDP_SOURCE"], "tests", "golden")


def paths(folder):
    """Files and directories of golden checkpoints."""
    for base, _, files in os.walk(os.path.join(GOLDEN, folder)):
        yield base
        yield from (os.path.join(base, name) for name in files)


def use(path):
    """Everything that a reader does with a checkpoint."""
    with fsdp.open(path, framework="array") as checkpoint:
        repr(checkpoint), checkpoint._repr_html_(), checkpoint.values(), checkpoint.metadata(
        ), checkpoint.files()
        for name in checkpoint.keys():
            checkpoint.layout(name), checkpoint.shape(name), checkpoint.nbytes(name)
            checkpoint.get_tensor(name)
    fsdp.load(path, framework="array")
    fsdp.ls(path)
    fsdp.verify(path)


class Errors(unittest.TestCase):
    def test_hostile_inputs(self):
        tried = refused = 0
        for path in paths("hostile"):
            tried += 1
            try:
                use(path)
            except fsdp.Error as error:
                refused += 1
                self.assertNotIsInstance(error, fsdp.InternalError)
                self.assertTrue(str(error))
        self.assertGreater(tried, 30)
        self.assertGreater(refused, tried // 2)

    def test_changed_bytes(self):
        """Random bytes of a file change: the outcome is a result or an error."""
        rng = random.Random(11)
        with tempfile.TemporaryDirectory() as directory:
            base = os.path.join(directory, "base")
            fsdp.save({"w": numpy.arange(100.0), "t": {"a": [1, {"b": "text"}]}}, base)
            for name, options in {
                    "a.safetensors": {"drop": "values"}, "b.pt": {}, "c": {"to": "dcp"},
                    "d.npz": {"drop": "values"}, "e.h5": {}, "f": {"to": "fsdp"}
            }.items():
                source = os.path.join(directory, name)
                fsdp.convert(base, source, **options)
                for number in range(25):
                    target = f"{source}-{number}"
                    (shutil.copytree if os.path.isdir(source) else shutil.copy)(source, target)
                    files = [os.path.join(at, file) for at, _, found in os.walk(target)
                             for file in found] or [target]
                    with open(rng.choice(files), "r+b") as file:
                        size = os.path.getsize(file.name)
                        for _ in range(3):
                            file.seek(rng.randrange(size))
                            file.write(bytes([rng.randrange(256)]))
                    try:
                        use(target)
                    except fsdp.Error as error:
                        self.assertNotIsInstance(error, fsdp.InternalError)

    def test_classes_and_status(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "a")
            fsdp.save({"w": numpy.ones(1)}, path)
            cases = [
                (fsdp.ExistsError, FileExistsError, 6, lambda: fsdp.save({"w": numpy.ones(1)}, path)),
                (fsdp.NotFoundError, FileNotFoundError, 3, lambda: fsdp.open(path + "-none")),
                (fsdp.UsageError, ValueError, 2, lambda: fsdp.convert(path, path + "-b", kind="sideways")),
                (fsdp.UsageError, ValueError, 2, lambda: fsdp.open(path, framework="jax")),
                (fsdp.UsageError, ValueError, 2, lambda: fsdp.convert(path, path + "-b", world_size=0)),
                (fsdp.UsageError, ValueError, 2, lambda: fsdp.convert(path, path + "-b", overwrite="yes")),
                (fsdp.UsageError, ValueError, 2, lambda: fsdp.load(path, include="("))
            ]
            for kind, builtin, status, work in cases:
                with self.assertRaises(kind) as caught:
                    work()
                self.assertIsInstance(caught.exception, builtin)
                self.assertEqual(caught.exception.status, status)

    def test_the_nearest_option_is_named(self):
        for work in (lambda: fsdp.open("x", alow_missing="y"), lambda: fsdp.convert("a", "b", word_size=3),
                     lambda: fsdp.save({}, "x", kynd="full")):
            with self.assertRaisesRegex(fsdp.UsageError, "did you mean"):
                work()

    def test_a_closed_checkpoint(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "a")
            fsdp.save({"w": numpy.ones(1)}, path)
            checkpoint = fsdp.open(path)
            tensor = checkpoint["w"]
            checkpoint.close()
            checkpoint.close()
            for work in (checkpoint.keys, checkpoint.values, lambda: tensor[0], lambda: checkpoint["w"],
                         lambda: len(checkpoint)):
                with self.assertRaisesRegex(ValueError, "closed"):
                    work()
            self.assertIn("closed", repr(checkpoint))

    def test_a_name_that_is_a_value(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "a")
            fsdp.save({"w": numpy.ones(1), "step": 3}, path)
            with fsdp.open(path) as checkpoint:
                self.assertNotIn("step", checkpoint)
                with self.assertRaisesRegex(KeyError, "a value and no tensor"):
                    checkpoint.get_tensor("step")


if __name__ == "__main__":
    unittest.main()
