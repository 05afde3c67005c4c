"""bench collectives next to another library: every row has both sides, and the peer ends with us.

usage: against.py BENCH openmpi|gloo
"""

import json
import os
import subprocess
import sys
import tempfile

BENCH, PEER = sys.argv[1:3]


def run(*options):
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("FSDP_NP", "FSDP_THREADS", "OMPI_COMM", "PMIX_"))}
    with tempfile.TemporaryDirectory() as place:
        environment["TMPDIR"] = place
        done = subprocess.run([BENCH, "collectives", "--against", PEER, "--json", *options],
                              env=environment, capture_output=True, text=True, timeout=250)
        left = [name for name in os.listdir(place) if name.startswith("fsdp-bench-")]
    if left:
        sys.exit(f"left behind: {left}")
    return done


def main():
    done = run("--np", "2", "--sizes", "4K,100000")
    if done.returncode != 0:
        sys.exit(f"exit {done.returncode}: {done.stderr}")
    rows = json.loads(done.stdout)["rows"]
    wanted = [f"{op}-pool-2-{size}" for size in ("4K", "100000") for op in ("ag", "rs", "ar")]
    if [row["work"] for row in rows] != wanted:
        sys.exit(f"rows {[row['work'] for row in rows]}")
    for row in rows:
        if row["against"] != PEER or not row["against_s"] > 0 or not row["goal"].startswith("ratio"):
            sys.exit(f"not a row beside {PEER}: {row}")
    done = run("--threads", "2", "--sizes", "4K", "--dtype", "f8_e5m2", "--ops", "ag")
    if done.returncode != 2 or "cannot do ag f8_e5m2" not in done.stderr:
        sys.exit(f"a type that {PEER} has not: exit {done.returncode}, {done.stderr}")
    done = run("--np", "2", "--sizes", "4K", "--peer", "/nowhere/peer")
    if done.returncode == 0 or "'/nowhere/peer' ended early" not in done.stderr:
        sys.exit(f"no peer: exit {done.returncode}, {done.stderr}")


main()
