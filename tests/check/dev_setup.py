"""Checks what ./dev says of packages and of .peers, and which toolkit ./dev gpu-bundle takes; programs of its
own stand for dpkg, apt, Python, CMake and nvcc.

usage: dev_setup.py REPOSITORY
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(sys.argv[1]).resolve()
NEEDED = ("bash", "cat", "dirname", "env", "grep", "mkdir", "nproc", "rm", "sed", "sort", "tail",
          "touch")
SCRIPTS = {
    "dpkg-query": 'cat "$STAND/installed"',
    "apt-get": 'echo "$*" >>"$STAND/apt"',
    "id": 'echo "${USER_ID:-0}"',
    "sudo": '[ "$1" != -n ] || shift\n[ -n "$MAY_SUDO" ] && "$@"',
    # a Python that makes environments of itself
    "python": 'case "$2" in\n venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;\n'
              ' pip) shift 2; echo "$*" >>"$STAND/pip" ;;\n *) echo "Python 3.11.2" ;;\nesac',
}


class Stand:
    """A copy of dev, and all programs that it can find."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        for name in (*NEEDED, "cp"):
            (self.bin / name).symlink_to(shutil.which(name))
        for name, script in SCRIPTS.items():
            self.make(self.bin / name, script)
        self.edit(r"^PYTHON=.*", f"PYTHON={self.bin}/python", (REPOSITORY / "dev").read_text())
        lists = re.findall(r"^(\w*PACKAGES)=\((?: #[^\n]*)?\n(.*?)^\)", self.text, re.M | re.S)
        lists = {name: re.findall(r"[a-z][a-z0-9+.-]*=[^ '\n]+", text) for name, text in lists}
        self.build = lists["BUILD_PACKAGES"]
        self.packages = [package for packages in lists.values() for package in packages]
        self.peers = ["python3-venv=3.11.2-1+b1", "python3-torch=1.13.1+dfsg-4"]

    def edit(self, pattern, replacement, text=None):
        self.text = re.sub(pattern, replacement, text or self.text, count=1, flags=re.M)
        (self.folder / "dev").write_text(self.text)

    def make(self, path, script):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(0o755)

    def have(self, packages):
        (self.folder / "installed").write_text("".join(f"ii {package}\n" for package in packages))

    def dev(self, *arguments, **variables):
        for log in ("apt", "pip"):
            (self.folder / log).write_text("")
        environment = {"PATH": str(self.bin), "STAND": str(self.folder), **variables}
        result = subprocess.run(["bash", "dev", *arguments], cwd=self.folder, env=environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False)
        return result.returncode, result.stdout, *((self.folder / log).read_text() for log in ("apt", "pip"))


def expect(condition, what, *shown):
    if not condition:
        sys.exit("\n".join([f"wrong: {what}", *map(str, shown)]))


def try_packages(stand):
    stand.have(stand.packages)
    code, said, apt, _ = stand.dev("setup")
    expect(code == 0 and not apt and "packages are there" in said and "version" not in said,
           "all are there in their versions", code, said)

    gcc = next(package for package in stand.packages if package.startswith("gcc="))
    stand.have(["gcc=4:9.9-9" if package == gcc else package for package in stand.packages])
    code, said, apt, _ = stand.dev("setup")
    expect(code == 0 and not apt and "as long as tests pass: gcc\n" in said,
           "another version is named", code, said)

    stand.have([package for package in stand.packages if package != gcc])
    code, said, apt, _ = stand.dev("setup")
    expect(code == 0 and apt.endswith("--no-install-recommends gcc\n"),
           "a missing one is installed, in the version that there is", said, apt)
    code, said, apt, _ = stand.dev("setup", USER_ID="1000", MAY_SUDO="1")
    expect(code == 0 and apt.endswith("--no-install-recommends gcc\n"),
           "a user with sudo installs it", code, said, apt)
    code, said, apt, _ = stand.dev("setup", USER_ID="1000")
    expect(code == 2 and not apt and "\n    apt-get install --no-install-recommends gcc\n" in said
           and "at least a C17 compiler" in said, "without, there is a line for an administrator", code,
           said)
    stand.have(stand.build)
    code, said, apt, _ = stand.dev("test", USER_ID="1000")
    expect(code == 2 and "./dev build and ./dev demo work" in said, "what works meanwhile", code, said)
    stand.have([package for package in stand.packages if package != gcc])

    (stand.bin / "apt-get").rename(stand.folder / "apt-get")
    code, said, _, _ = stand.dev("setup")
    expect(code == 1 and "needed: gcc\n" in said, "without apt-get it is named", code, said)
    (stand.folder / "apt-get").rename(stand.bin / "apt-get")


def try_other_system(stand):
    (stand.bin / "dpkg-query").rename(stand.folder / "dpkg-query")
    code, said, apt, _ = stand.dev("setup")
    listed = all(package.replace("=", " ", 1) in said for package in stand.packages)
    expect(code == 1 and not apt and listed and "packages are there" not in said,
           "without dpkg-query all are listed with their versions", code, said)
    (stand.bin / "cmake").symlink_to("/bin/true")
    (stand.bin / "true").symlink_to("/bin/true")
    code, said, _, _ = stand.dev("build")
    expect(code == 0 and "./dev setup lists them" in said and "==> build" in said,
           "a build goes on", code, said)
    (stand.folder / "dpkg-query").rename(stand.bin / "dpkg-query")


def try_peers(stand):
    stand.have(stand.packages + stand.peers)
    code, said, _, pip = stand.dev("peers")
    expect(code == 0 and "torch==" in pip and "safetensors==" in pip, "they are installed", code, said, pip)
    code, said, _, pip = stand.dev("peers")
    expect(code == 0 and not pip and "is complete" in said, "a second call installs nothing", said, pip)
    stand.edit(r"safetensors==[0-9.]+", "safetensors==99.1")
    code, said, _, pip = stand.dev("peers")
    expect(code == 0 and "made with other pins" in said and "safetensors==99.1" in pip,
           "a changed pin makes them anew", said, pip)
    (stand.folder / ".peers/complete").write_text("")
    code, said, _, pip = stand.dev("peers")
    expect("made with other pins" in said and "torch==" in pip, "peers without pins are made anew", said, pip)


def try_gpu_bundle(stand):
    """A toolkit of CUDA 12 is used in a build folder of its own."""
    toolkit = stand.folder / "toolkit"
    stand.make(stand.bin / "cmake", 'echo "cmake $*"')
    stand.make(stand.folder / "build-cuda12/gpu/gpu-check", 'echo "$0 $1"')
    stand.make(toolkit / "bin/nvcc", "echo Cuda compilation tools, release 12.9, V12.9.86")
    code, said, _, _ = stand.dev("gpu-bundle", CUDA_HOME_12=str(toolkit))
    expect(code == 0 and f" -DFSDP_WITH_CUDA=ON -DCUDAToolkit_ROOT={toolkit}\n" in said
           and "--build build-cuda12 " in said and "build-cuda12/gpu/gpu-check --version\n" in said,
           "the toolkit of CUDA 12 is taken", code, said)
    stand.make(toolkit / "bin/nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
    code, said, _, _ = stand.dev("gpu-bundle", CUDA_HOME_12=str(toolkit))
    expect(code == 1 and "is not of CUDA 12" in said and "cmake" not in said, "CUDA 13 is refused", said)


def main():
    with tempfile.TemporaryDirectory() as folder:
        stand = Stand(os.path.realpath(folder))
        try_packages(stand)
        try_other_system(stand)
        try_peers(stand)
        try_gpu_bundle(stand)
    print(f"{len(stand.packages)} packages, and the peers")


main()
