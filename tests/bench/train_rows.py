"""bench train: its rows, alone, next to a peer that says known times, and against PyTorch.

usage: train_rows.py BUILD [torch]
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

BUILD = sys.argv[1]
TINY = "--layers 1 --width 16 --heads 2 --vocab 100 --batch 3 --length 8 --turns 3".split()
ROWS = ["train-1", "train-2", "train-peak", "async-stall", "async-cost"]
MEMBERS = {"work", "ours_s", "against", "against_s", "ratio", "goal", "met", "peak_kib", "rounds"}
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_NP")}

# One second a step for FSDP2, half of one for a single process, a GiB each.
PEER = """#!/usr/bin/env python3
import os, sys
directory, ranks = sys.argv[-2], int(sys.argv[-1])
assert len(sys.argv) == 10, sys.argv
orders = [open(f"{directory}/go-{rank}") for rank in range(ranks)]
done = open(f"{directory}/done", "w")
print("ready", file=done, flush=True)
while all([order.readline() == "1\\n" for order in orders]):
    print(1.0 if ranks > 1 else 0.5, "0.25", 1 << 20, file=done, flush=True)
"""
# Steps of 0.1 s; before step 3, the only one that counts, a validation of three seconds.
LLMC = """#!/bin/sh
echo '[GPT-2]'
for step in 0 1 2 3 4; do
    if [ $step = 3 ]; then sleep 3; echo 'val loss 4.2'; fi
    sleep 0.1
    echo "step $step: train loss 4.1 (took 100 ms)"
done
"""


def run(*options):
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([f"{BUILD}/tests/bench_rows", "train", "--dir", folder, *TINY, *options],
                              capture_output=True, text=True, env=ENVIRONMENT, timeout=110)
        assert os.listdir(folder) == [], os.listdir(folder)
    return done


def rows(*options):
    done = run("--json", *options)
    assert done.returncode == 0, (done.returncode, done.stderr)
    found = json.loads(done.stdout)
    assert found["schema"] == 1
    for row in found["rows"]:
        assert MEMBERS <= row.keys() and (row["ours_s"] > 0 or row["work"] == "async-cost"), row
    return {row["work"]: row for row in found["rows"]}


def check_alone():
    found = rows()
    assert list(found) == ROWS, list(found)
    for work in ROWS[:3]:
        assert found[work]["against"] is None and found[work]["ratio"] is None, found[work]
    assert found["train-2"]["unsharded_ratio"] is None and found["train-2"]["llmc_ratio"] is None
    assert found["train-1"]["rounds"] == 1 and found["train-1"]["tokens_s"] > 0
    assert found["train-peak"]["peak_ratio"] is None and found["train-peak"]["peak_kib"] > 1000
    # Parameters and two moments of half the model, at most; bias and such make up the rest.
    wide = (100 + 1024) * 16 + 12 * 16 * 16
    assert 4 * 3 * wide / 2 <= found["async-stall"]["bytes_needed"] < 4 * 3 * wide * 0.6, found["async-stall"]
    assert found["async-stall"]["goal"] == "<= 1.5 x against"
    assert found["async-cost"]["goal"] == "<= 0.5 x against" and found["async-cost"]["against_s"] > 0


def check_peer():
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("peer", PEER), ("llmc", LLMC)):
            Path(folder, name).write_text(text)
            Path(folder, name).chmod(0o755)
        beside = ["--against", "torch", "--llmc", f"{folder}/llmc", "--peer"]
        alone = rows("--np", "1", *beside, f"{folder}/peer")
        found = rows("--np", "2", *beside, f"{folder}/peer")
        failed = run("--np", "1", *beside, f"{folder}/none")
    assert list(alone) == ROWS[:1] and list(found) == ROWS[1:], (alone, found)
    one, two, peak = alone["train-1"], found["train-2"], found["train-peak"]
    assert one["against_s"] == 0.5 and abs(one["ratio"] * one["ours_s"] / 0.5 - 1) < 1e-3, one
    assert one["goal"] == "ratio >= 1.00" and one["met"] is (one["ratio"] >= 1), one
    assert two["against_s"] == 1 and abs(two["unsharded_ratio"] / two["ratio"] - 0.5) < 1e-3, two
    assert two["goal"] == "ratio >= 1.90, unsharded >= 0.85, llm.c >= 5.00", two
    assert two["llmc_s"] > 0 and abs(two["llmc_ratio"] * two["ours_s"] / two["llmc_s"] - 1) < 0.1, two
    assert two["llmc_s"] < 2 * (3 * 8) / (4 * 64), two  # without validation
    assert peak["against_peak_kib"] == 1 << 20 and peak["goal"] == "peak <= 0.8 x against", peak
    assert abs(peak["peak_ratio"] - peak["peak_kib"] / (1 << 20)) < 1e-3 and peak["met"], peak
    assert failed.returncode == 8 and "none' ended early" in failed.stderr, failed


def check_refusals():
    for options, told in [
            ("--against gloo", "--against 'gloo': train has torch"),
            ("--heads 3", "--width 16 is no multiple of --heads 3"),
            ("--turns 2", "--turns 2 is out of range: 3 to 99"),
            ("--llmc x", "--llmc means nothing without --against"),
            ("--rows 4", "--rows has no meaning for train"),
            ("--size 1G", "--size has no meaning for train")]:
        done = run(*options.split())
        assert done.returncode == 2 and told in done.stderr and done.stdout == "", done
    for options, told in [("step --heads 2", "--heads has no meaning for step"),
                          ("save --width 2", "--width has no meaning for save")]:
        done = subprocess.run([f"{BUILD}/tests/bench_rows", *options.split()], capture_output=True, text=True)
        assert done.returncode == 2 and told in done.stderr, done


def check_torch():
    found = rows("--np", "2", "--against", "torch")
    assert list(found) == ROWS[1:], list(found)
    assert all(row["against"] for row in found.values()), found
    assert found["train-2"]["unsharded_s"] > 0 and found["train-2"]["llmc_s"] is None
    assert "llm.c" not in found["train-2"]["goal"], found["train-2"]
    assert found["train-peak"]["against_peak_kib"] > 100_000, found["train-peak"]


if sys.argv[2:] == ["torch"]:
    check_torch()
else:
    check_alone()
    check_peer()
    check_refusals()
print("bench train: as it should be")
