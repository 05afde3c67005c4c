"""The examples of docs/python.md, of the README and of docstrings run as they are printed."""

import doctest
import os
import runpy
import tempfile
import unittest

import fsdp

PAGE = os.path.join(os.environ["FSDP_SOURCE"], "docs", "python.md")
FLAGS = doctest.IGNORE_EXCEPTION_DETAIL


class Docs(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(directory.name)

    def test_page(self):
        failed, tried = doctest.testfile(PAGE, module_relative=False, optionflags=FLAGS)
        self.assertEqual(failed, 0)
        self.assertGreater(tried, 20)

    def test_example_of_the_readme(self):
        result = runpy.run_path(os.path.join(os.environ["FSDP_SOURCE"], "docs", "examples", "tour.py"))
        self.assertEqual(result["rows"].shape, (10, 8))

    def test_docstrings(self):
        tried = 0
        for module in (fsdp, fsdp._tasks):
            result = doctest.testmod(module, optionflags=FLAGS)
            self.assertEqual(result.failed, 0)
            tried += result.attempted
        self.assertGreater(tried, 20)

    def test_every_public_function_has_a_docstring(self):
        for name, item in vars(fsdp).items():
            if callable(item) and not name.startswith("_"):
                self.assertTrue(item.__doc__, name)


if __name__ == "__main__":
    unittest.main()
