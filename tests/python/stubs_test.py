"""The stubs of the package list what it has: names, methods, parameters, options and their words."""

import ast
import inspect
import os
import unittest

import fsdp
from fsdp import _bindings as c
from fsdp import _options, _tasks

STUB = os.path.join(os.environ["FSDP_SOURCE"], "tools", "python", "fsdp", "__init__.pyi")


def parameters(function):
    """Names of parameters, and the literal words of each."""
    arguments = function.args
    found = {}
    for argument in arguments.args + arguments.kwonlyargs:
        words = [
            node for node in ast.walk(argument.annotation or ast.Pass())
            if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal"
        ]
        found[argument.arg] = [item.value for item in getattr(words[0].slice, "elts", [])] if words else None
    return found


class Stubs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with open(STUB) as file:
            body = ast.parse(file.read()).body
        cls.classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        cls.functions = {node.name: parameters(node) for node in body if isinstance(node, ast.FunctionDef)}

    def test_public_names(self):
        public = {name for name, item in vars(fsdp).items()
                  if not name.startswith("_") and not inspect.ismodule(item)}
        self.assertEqual(public, set(self.classes) | set(self.functions))

    def test_methods(self):
        for name, node in self.classes.items():
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    self.assertTrue(hasattr(getattr(fsdp, name), method.name), f"{name}.{method.name}")
            if not issubclass(getattr(fsdp, name), (Exception, tuple, list)):
                public = {method for method in vars(getattr(fsdp, name)) if not method.startswith("_")}
                listed = {method.name for method in node.body if isinstance(method, ast.FunctionDef)}
                self.assertLessEqual(public, listed, name)

    def test_parameters_exist(self):
        for name, stub in self.functions.items():
            real = inspect.signature(getattr(fsdp, name)).parameters
            named = {key for key, item in real.items() if item.kind != item.VAR_KEYWORD}
            self.assertLessEqual(named, set(stub), name)

    def test_options_of_structs(self):
        access = set(_options.ACCESS)
        for name, options, struct in (("open", _options.OPEN, c.fsdp_open_opts),
                                      ("save", _tasks.SAVE, c.fsdp_save_opts), ("load", _tasks.LOAD,
                                                                                c.fsdp_load_opts),
                                      ("verify", _tasks.VERIFY, c.fsdp_verify_opts), ("diff", _tasks.DIFF,
                                                                                      c.fsdp_diff_opts)):
            own = set(inspect.signature(getattr(fsdp, name)).parameters) - {"options"}
            listed = set(self.functions[name]) - own - access
            self.assertEqual(listed | (own & set(options)), set(options), name)
            types = dict(struct._fields_)
            for option in options:
                words = getattr(types[option], "words", None)
                if words:
                    self.assertEqual(self.functions[name][option], list(words), f"{name}: {option}")

    def test_options_of_conversions(self):
        rows = _options.convert_table()
        more = {*_options.ACCESS, "as_stored", "whole", "threads", "memory", "direct"}
        self.assertEqual(set(self.functions["convert"]) - {"source", "target", "progress"}, set(rows) | more)
        for name, row in rows.items():
            words = _options._words(row)[row.first_word:]
            if row.kind.value == c.FSDP_OPTION_WORD or (words and row.words and not row.takes_others):
                self.assertEqual(self.functions["convert"][name], words, name)


if __name__ == "__main__":
    unittest.main()
