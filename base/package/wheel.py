"""Writes the wheel from an installed tree: one file that pip installs, for every Python from 3.9.

usage: wheel.py TREE PYTHON VERSION TAG EPOCH FOLDER

TREE is made by portable.sh, PYTHON is the folder of the module's files, TAG is the platform. The same inputs
give the same bytes: names are sorted, and every file has the time EPOCH. Prints the path of the wheel.
"""
import base64
import hashlib
import pathlib
import sys
import time
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

METADATA = """\
Metadata-Version: 2.1
Name: fsdp-toolkit
Version: {version}
Summary: Sharded training checkpoints: read, convert, verify and save every format, in C and from Python
License: Apache-2.0
Keywords: checkpoint,safetensors,pytorch,fsdp,dcp,deepspeed,gguf,hdf5
Classifier: Development Status :: 4 - Beta
Classifier: Environment :: Console
Classifier: Intended Audience :: Developers
Classifier: Intended Audience :: Science/Research
Classifier: License :: OSI Approved :: Apache Software License
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: C
Classifier: Programming Language :: Python :: 3
Classifier: Topic :: Scientific/Engineering :: Artificial Intelligence
Classifier: Typing :: Typed
Requires-Python: >=3.9
Provides-Extra: numpy
Requires-Dist: numpy; extra == 'numpy'
Provides-Extra: torch
Requires-Dist: torch; extra == 'torch'
{license_files}Description-Content-Type: text/markdown

{readme}"""

WHEEL = """\
Wheel-Version: 1.0
Generator: fsdp
Root-Is-Purelib: false
Tag: py3-none-{tag}
"""


def files_below(folder):
    """(path from folder, file) of every file, links to files included."""
    return [(str(path.relative_to(folder)), path) for path in folder.rglob("*") if path.is_file()]


def package_files(tree, python):
    """What lies in fsdp/, by its name there."""
    files = {}
    for path in sorted(python.iterdir()):
        if path.suffix in (".py", ".pyi", ".typed"):
            files[path.name] = path.read_bytes()
    for part in ("bin", "include", "lib/cmake", "lib/pkgconfig"):
        for name, path in files_below(tree / part):
            files[f"{part}/{name}"] = path.read_bytes()
    files["lib/libfsdp.so.0"] = (tree / "lib/libfsdp.so.0").read_bytes()
    files["lib/libfsdp.so"] = b"/* for linkers: a wheel has no symbolic links */\nINPUT(libfsdp.so.0)\n"
    for name, path in files_below(tree / "lib/fsdp/plugin"):
        files[f"plugin/{name}"] = path.read_bytes()
    return files


def wheel_files(tree, python, version, tag):
    """Every file of the wheel but RECORD, by its name: its bytes, and whether it is executable."""
    info, data = f"fsdp_toolkit-{version}.dist-info", f"fsdp_toolkit-{version}.data"
    files = {"fsdp/" + name: content for name, content in package_files(tree, python).items()}
    launcher = (HERE / "launcher.sh").read_text().replace("@VERSION@", version).encode()
    for tool in ["fsdp"] + sorted(path.name for path in (tree / "bin").iterdir()):
        files[f"{data}/scripts/{tool}"] = launcher
    for part in ("bash-completion", "fish", "fsdp", "man", "zsh"):
        for name, path in files_below(tree / "share" / part):
            files[f"{data}/data/share/{part}/{name}"] = path.read_bytes()
    licenses = {"LICENSE": (ROOT / "LICENSE").read_bytes()}
    for name, path in files_below(tree / "licenses"):
        licenses[name] = path.read_bytes()
    for name, content in licenses.items():
        files[f"{info}/licenses/{name}"] = content
    files[f"{info}/WHEEL"] = WHEEL.format(tag=tag).encode()
    files[f"{info}/METADATA"] = METADATA.format(
        version=version, license_files="".join(f"License-File: {name}\n" for name in sorted(licenses)),
        readme=(ROOT / "README.md").read_text()).encode()
    return files


def record_of(files, record):
    lines = []
    for name, content in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}\n")
    return ("".join(lines) + f"{record},,\n").encode()


def is_program(name):
    return "/scripts/" in name or name.startswith("fsdp/bin/")


def main(tree, python, version, tag, epoch, folder):
    files = wheel_files(pathlib.Path(tree), pathlib.Path(python), version, tag)
    record = f"fsdp_toolkit-{version}.dist-info/RECORD"
    files[record] = record_of(files, record)
    # dist-info is last, as installers like it
    order = sorted(files, key=lambda name: (".dist-info/" in name, name == record, name))
    path = pathlib.Path(folder) / f"fsdp_toolkit-{version}-py3-none-{tag}.whl"
    when = time.gmtime(max(int(epoch), 315532800))[:6]  # zip's time begins in 1980
    with zipfile.ZipFile(path, "w") as wheel:
        for name in order:
            entry = zipfile.ZipInfo(name, when)
            entry.create_system = 3
            entry.external_attr = (0o100755 if is_program(name) else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, files[name], compresslevel=9)
    print(path)


main(*sys.argv[1:])
