"""TensorBoard's own reader next to metrics.jsonl: every number of events.out.tfevents.*, step by step.

usage: tensorboard_reads.py BUILD
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

BUILD = Path(sys.argv[1]).resolve()
MEMBERS = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/lr": "lr"}


def train(work):
    (work / "data.txt").write_text("A text of which eight bytes at a time are learned. " * 40)
    words = [BUILD / "bin/fsdp-train", "--run", work / "run", "--data.path", work / "data.txt", "--steps", 5,
             "--model.layers", 1, "--model.width", 16, "--model.context", 8, "--train.batch", 4,
             "--eval.every", 2]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        sys.exit(f"fsdp-train: exit {done.returncode}\n{done.stderr}")
    lines = [json.loads(line) for line in (work / "run/metrics.jsonl").read_text().splitlines()]
    return ([line for line in lines if "grad_norm" in line],
            [line for line in lines if line.get("event") == "eval"])


def main():
    with tempfile.TemporaryDirectory() as folder:
        steps, evaluations = train(Path(folder))
        reader = EventAccumulator(f"{folder}/run")
        reader.Reload()
        tags = reader.Tags()["scalars"]
        seen = {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in tags}
    wanted = {tag: [(line["step"], float(np.float32(line[member]))) for line in steps]
              for tag, member in MEMBERS.items()}
    assert len(steps) == 5 and len(evaluations) == 2, (steps, evaluations)
    wanted["eval/loss"] = [(line["step"], float(np.float32(line["loss"]))) for line in evaluations]
    for tag, values in wanted.items():
        assert seen.get(tag) == values, (tag, seen.get(tag), values)

main()
