"""Writes the Python module of the C interface: the structs, enums and functions of the public headers as
ctypes.

usage: bind.py VERSION HEADER... >fsdp/_bindings.py

The headers are the only place where the interface is written down. They are regular C without macros in
declarations, so that a parser of declarations is enough; anything that it does not know is an error of the
build. Enums become subclasses of Enum with their words, structs ctypes.Structure, typedefs of functions
CFUNCTYPE, and functions entries of FUNCTIONS, whose types are made at the first call. Functions with variable
arguments and static inline ones are left out. tests/python/bindings_test.py compares sizes, offsets and
numbers with the C compiler's."""

import re
import sys
from os.path import commonprefix

SCALARS = {
    "bool": "c_bool",
    "char": "c_char",
    "int": "c_int",
    "unsigned": "c_uint",
    "float": "c_float",
    "double": "c_double",
    "size_t": "c_size_t",
    "int8_t": "c_int8",
    "uint8_t": "c_uint8",
    "int16_t": "c_int16",
    "uint16_t": "c_uint16",
    "int32_t": "c_int32",
    "uint32_t": "c_uint32",
    "int64_t": "c_int64",
    "uint64_t": "c_uint64",
}
TOKEN = re.compile(r"[A-Za-z_]\w*|0[xX][0-9a-fA-F]+|\d+|<<|\.\.\.|[^\s]")

HEAD = '''"""The C interface of fsdp {version}, made of its public headers by bind.py."""

from ctypes import (CFUNCTYPE, POINTER, Structure, Union, c_bool, c_char, c_char_p, c_double, c_float, c_int,
                    c_int8, c_int16, c_int32, c_int64, c_size_t, c_uint, c_uint8, c_uint16, c_uint32,
                    c_uint64, c_void_p)

VERSION = "{version}"


class Enum(c_int):
    """A number of a C enum; words has the numbers by their names in lower case, without the common prefix."""

    words = {{}}

    @property
    def word(self):
        return next((word for word, number in self.words.items() if number == self.value), str(self.value))

    def __repr__(self):
        return self.word
'''


def clean(text):
    """The declarations of a header: no comments, no preprocessor, no extern "C"."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"#ifdef __cplusplus\n.*?#endif\n", "", text, flags=re.S)
    text = re.sub(r"^#(?:[^\n]*\\\n)*[^\n]*\n", "", text, flags=re.M)
    return text


class Parser:
    def __init__(self, text, module):
        self.tokens, self.at, self.module = TOKEN.findall(text), 0, module

    def peek(self, ahead=0):
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def take(self, expected=None):
        token = self.peek()
        if expected and token != expected:
            raise SystemExit(
                f"bind.py: expected '{expected}' before: {' '.join(self.tokens[self.at:self.at + 12])}")
        self.at += 1
        return token

    def accept(self, token):
        if self.peek() == token:
            self.at += 1
            return True
        return False

    def skip_to(self, end):
        while self.take() != end:
            pass

    # --- expressions: numbers, names of enumerators, sums, products, shifts ---

    def number(self, *ends):
        words = []
        while self.peek() not in ends:
            words.append(self.take())
        return eval(" ".join(words), {"__builtins__": {}},
                    self.module.numbers)  # numbers and enumerators only

    # --- types ---

    def base(self):
        """The name of a type, and whether it is const."""
        const = self.accept("const")
        if self.accept("struct"):
            pass
        name = self.take()
        return name, const | self.accept("const")

    def pointers(self):
        stars = 0
        while self.peek() in ("*", "const"):
            stars += self.take() == "*"
        return stars

    def declarator(self, base):
        """A name and its ctypes expression, after the base type; the name is "" where it is left out."""
        stars = self.pointers()
        if self.peek() == "(" and self.peek(1) == "*":
            self.take("("), self.take("*")
            name = self.take()
            self.take(")")
            return name, self.callback(self.module.type(base, stars))
        name = self.take() if re.match(r"[A-Za-z_]", self.peek()) else ""
        sizes = []
        while self.accept("["):
            sizes.append(self.number("]"))
            self.take("]")
        text = self.module.type(base, stars)
        for size in reversed(sizes):
            text = f"{text} * {size}"
        return name, text

    def parameters(self):
        """The types of parameters; None if their number varies."""
        self.take("(")
        types = []
        if self.peek() == "void" and self.peek(1) == ")":
            self.take()
        while not self.accept(")"):
            if self.accept("..."):
                types = None
            else:
                _, text = self.declarator(self.base()[0])
                if " * " in text:  # an array is passed as a pointer
                    text = f"POINTER({text.split(' * ')[0]})"
                types.append(self.module.plain(text))
            self.accept(",")
        return types

    def callback(self, result):
        return f"CFUNCTYPE({', '.join([self.module.plain(result)] + self.parameters())})"

    # --- declarations ---

    def enum(self):
        """The enumerators of { A, B = 1, ... }."""
        self.take("{")
        found, value = {}, 0
        while not self.accept("}"):
            name = self.take()
            if self.accept("="):
                value = self.number(",", "}")
            found[name] = self.module.numbers[name] = value
            value += 1
            self.accept(",")
        return found

    def members(self, name):
        """The members of { ... }, as text of _fields_; inner structs and unions are declared before."""
        self.take("{")
        fields = []
        while not self.accept("}"):
            if self.peek() in ("struct", "union") and self.peek(1) == "{":
                kind = self.take().capitalize().replace("Struct", "Structure")
                inner = f"{name}_{len(self.module.lines)}"
                body = self.members(inner)
                self.module.lines.append(f"class {inner}({kind}):\n    _fields_ = [{', '.join(body)}]\n\n")
                fields.append(f'("{self.take()}", {inner})')
                self.take(";")
                continue
            base, _ = self.base()
            while True:
                member, text = self.declarator(base)
                fields.append(f'("{member}", {text})')
                if not self.accept(","):
                    break
            self.take(";")
        return fields

    def typedef(self):
        if self.accept("enum"):
            name, found = self.take(), self.enum()
            self.module.add_enum(name, found)
        elif self.peek() == "struct" and self.peek(2) == "{":
            self.take("struct")
            name = self.take()
            self.module.structs.add(name)
            body = ",\n    ".join(self.members(name))
            self.module.lines.append(f"{name}._fields_ = [\n    {body}]\n")
        elif self.peek() == "struct" and self.peek(2) == self.peek(1):
            self.skip_to(";")  # an opaque struct: its pointers are c_void_p
            return
        else:
            name, text = self.declarator(self.base()[0])
            self.module.lines.append(f"{name} = {text}\n")
        self.skip_to(";")

    def function(self):
        self.take("FSDP_API")
        self.accept("FSDP_CHECKED")
        base, _ = self.base()
        result = self.module.type(base, self.pointers())
        name, types = self.take(), self.parameters()
        if types is not None:
            self.module.functions.append((name, self.module.plain(result), types))
        self.skip_to(";")

    def run(self):
        while self.peek():
            if self.accept("typedef"):
                self.typedef()
            elif self.peek() == "enum" and self.peek(1) == "{":
                self.take("enum")
                for name, value in self.enum().items():
                    self.module.lines.append(f"{name} = {value}\n")
                self.take(";")
            elif self.peek() == "FSDP_API":
                self.function()
            elif self.peek() == "struct" and self.peek(2) == ";":
                self.skip_to(";")
            elif self.peek() == "fsdp_status" and self.peek(1) == "fsdp_fail":
                self.skip_to(";")
            else:
                self.take("a declaration of this project's kind")


class Module:
    def __init__(self):
        self.numbers, self.enums, self.structs = {"INT32_MIN": -(1 << 31)}, set(), set()
        self.lines, self.functions = [], []

    def add_enum(self, name, found):
        self.enums.add(name)
        prefix = commonprefix(list(found))
        prefix = prefix[:prefix.rindex("_") + 1]
        words = ", ".join(f'"{key[len(prefix):].lower()}": {value}' for key, value in found.items())
        self.lines.append(f"class {name}(Enum):\n    words = {{{words}}}\n\n")
        self.lines.extend(f"{key} = {value}\n" for key, value in found.items())

    def type(self, name, stars):
        """The ctypes expression of a type with so many stars."""
        if stars and name == "char":
            text, stars = "c_char_p", stars - 1
        elif stars and name not in self.structs and name not in SCALARS and name not in self.enums:
            text, stars = "c_void_p", stars - 1  # void, or an opaque struct
        elif name == "void":
            return "None"
        else:
            text = SCALARS.get(name, name)
        for _ in range(stars):
            text = f"POINTER({text})"
        return text

    def plain(self, text):
        """Enums are numbers in calls."""
        return "c_int" if text in self.enums else text

    def write(self, version, out):
        out.write(HEAD.format(version=version))
        out.write("\n\n")
        for name in sorted(self.structs):
            out.write(f"class {name}(Structure):\n    pass\n\n\n")
        out.write("".join(self.lines))
        out.write("\n# name: its result and its parameters\nFUNCTIONS = {\n")
        for name, result, types in self.functions:
            out.write(f'    "{name}": lambda: ({result}, [{", ".join(types)}]),\n')
        out.write("}\n")


def main():
    module = Module()
    texts = [clean(open(path, encoding="utf-8").read()) for path in sys.argv[2:]]
    for text in texts:
        Parser(text, module).run()
    module.write(sys.argv[1], sys.stdout)


main()
