"""The real torchrun starts our program: both kinds of its store, a restart after a failure, two agents.

usage: torchrun.py LAUNCH_PROGRAM
"""

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "runtime"))
from ports import free_port

PROGRAM = sys.argv[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--no-python"]


def run(n, options, *command):
    done = subprocess.run([*TORCHRUN, "--nproc-per-node", str(n), *options, *map(str, command)],
                          capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout, done.stderr


def run_agents(n, program):
    """As on n hosts; what their ranks say, together."""
    port = free_port()
    command = [*TORCHRUN, "--nnodes", str(n), "--nproc-per-node", "2",
               "--master-addr", "127.0.0.1", "--master-port", str(port)]
    agents = [subprocess.Popen([*command, "--node-rank", str(node), program], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE) for node in range(n)]
    said = [agent.communicate(timeout=200) for agent in agents]
    return max(agent.returncode for agent in agents), *map("".join, zip(*said))


def check_ranks(n, said):
    mean = f"{(n - 1) / 2:g}"
    want = {f"rank {rank} of {n}: local {rank} of {n}, group of {n}, mean {mean}" for rank in range(n)}
    assert want <= set(said[1].splitlines()), said


check_ranks(3, run(3, ["--standalone"], PROGRAM))
# A shared store, a run id and a first try that fails: the second one must meet again.
with tempfile.TemporaryDirectory() as folder:
    flag = Path(folder) / "failed"
    script = f'if [ "$RANK" = 1 ] && mkdir {flag} 2>/dev/null; then exec {PROGRAM} exit 1 3; fi; ' \
             f'if [ "$TORCHELASTIC_RESTART_COUNT" = 0 ]; then exec {PROGRAM} exit 1 3; fi; exec {PROGRAM}'
    check_ranks(2, run(2, ["--standalone", "--max-restarts", "1"], "sh", "-c", script))
# Two agents share one store, which knows where rank 0 listens.
check_ranks(4, run_agents(2, PROGRAM))
print("torchrun: as it should be")
