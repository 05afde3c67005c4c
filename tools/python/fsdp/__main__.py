"""python -m fsdp COMMAND: the tools, and for builds of C programs the paths of the library.

python -m fsdp convert ...      fsdp-convert, and so on
python -m fsdp --pkg-config     a directory for PKG_CONFIG_PATH
python -m fsdp --cmake          a directory for CMAKE_PREFIX_PATH
"""

import os
import sys

from ._bindings import VERSION
from ._library import package_path


def commands():
    folder = package_path("bin")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name[len("fsdp-"):] for name in names if name.startswith("fsdp-"))


def main():
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in commands():
        os.execv(package_path("bin", "fsdp-" + command), ["fsdp-" + command] + sys.argv[2:])
    if command == "--version":
        print(VERSION)
    elif command == "--pkg-config":
        print(package_path("lib", "pkgconfig"))
    elif command == "--cmake":
        print(package_path())
    elif command in ("--help", "-h", "help"):
        print(__doc__.strip(), "\n\ncommands:", ", ".join(commands()))
    else:
        sys.stderr.write(f"fsdp: '{command}' is not a command; it knows {', '.join(commands())}\n")
        return 2
    return 0


sys.exit(main())
