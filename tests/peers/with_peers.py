"""Runs a script with the Python of the peers (PyTorch and friends).

usage: with_peers.py REPOSITORY SCRIPT [ARGUMENT...]    exit 77: no peers, not required
"""

import os
import re
import sys
from pathlib import Path

SKIPPED = 77
repository, arguments = Path(sys.argv[1]), sys.argv[2:]
peers = Path(os.environ.get("FSDP_PEERS", repository / ".peers"))
python = peers / "bin" / "python"
if not (peers / "complete").is_file():
    print(f"{peers} holds no peers: ./dev peers installs them")
    sys.exit(SKIPPED)
pins = [word for word in (peers / "complete").read_text().split() if "==" in word]
if not set(pins) <= set(re.findall(r"[^\s()]+", (repository / "dev").read_text())):
    print(f"{peers} was made with other pins than those of dev: ./dev peers makes it anew")
    sys.exit(SKIPPED)
environment = dict(os.environ, HF_HUB_OFFLINE="1")
environment.setdefault("OMP_NUM_THREADS", "1")
toolkit = Path("/usr/local/cuda/lib64")
if toolkit.is_dir():
    paths = [str(toolkit), os.environ.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))
os.execve(python, [str(python), *arguments], environment)
