#!/usr/bin/env python3
"""Models that transformers wrote, through fsdp-train: logits, greedy ids, gradients and ten losses are those
that transformers computed, on any number of ranks.

Usage: models.py BUILD MODEL...   a MODEL is a directory with data/ and reference/
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

BUILD = pathlib.Path(sys.argv[1]).resolve()
RANKS = [int(n) for n in os.environ.get("FSDP_TEST_RANKS_OF_MODELS", "1,2,4").split(",")]


def run(*args):
    command = [BUILD / "bin/fsdp-train", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    if done.returncode != 0:
        raise SystemExit(f"fsdp-train {' '.join(map(str, args))}: exit {done.returncode}\n{done.stderr}")
    return done.stdout


def read_safetensors(path):
    data = pathlib.Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    return {name: np.frombuffer(data[8 + size:][entry["data_offsets"][0]:entry["data_offsets"][1]], "<f4")
            for name, entry in header.items() if name != "__metadata__"}


def check(problems, what, ok, told):
    if not ok:
        problems.append(f"{what}: {told}")


def check_logits(model, ranks, work, problems):
    expected = np.load(model / "reference/logits.npy")
    run("--eval", model / "data", "--tokens", model / "reference/tokens.npy", "--logits-out", work / "l.npy",
        "--np", ranks)
    apart = np.abs(np.load(work / "l.npy") - expected).max()
    bound = 2e-5 * max(1, np.abs(expected).max())
    check(problems, f"{model.name} np {ranks} logits", apart <= bound, f"{apart} > {bound}")


def check_ids(model, ranks, work, problems):
    tokens, expected = np.load(model / "reference/tokens.npy"), np.load(model / "reference/generated.npy")
    np.save(work / "t.npy", tokens[:1])
    run("--sample", model / "data", "--tokens", work / "t.npy", "-n", expected.size, "--temperature", 0,
        "--out", work / "g.npy", "--np", ranks)
    got = np.load(work / "g.npy").reshape(-1)
    same = (got == expected.reshape(-1)).all()
    check(problems, f"{model.name} np {ranks} greedy ids", same, (got, expected))


def check_grads(model, path, told, problems):
    expected, got = read_safetensors(model / "reference/grads.safetensors"), read_safetensors(path)
    total = np.sqrt(sum((b.astype("f8") ** 2).sum() for b in expected.values()))
    check(problems, f"{told} names of gradients", expected.keys() == got.keys(), expected.keys() ^ got.keys())
    for name in expected.keys() & got.keys():
        a, b = got[name].astype("f8"), expected[name].astype("f8")
        apart, bound = np.linalg.norm(a - b), 1e-5 * np.linalg.norm(b) + 1e-7 * total
        check(problems, f"{told} gradient of {name}", apart <= bound, f"{apart} > {bound}")


def check_training(model, ranks, work, problems):
    told = f"{model.name} np {ranks}"
    expected = json.loads((model / "reference/training.json").read_text())
    directory = work / f"run{ranks}"
    run("--init", model / "data", "--batches", model / "reference/batches.npy", "--steps", 10, "--np", ranks,
        "--run", directory, "--optim.lr", expected["optimizer"]["lr"], "--optim.schedule", "constant",
        "--optim.decay", "all", "--optim.clip", 0, "--dump-grads", work / "grads.safetensors", "--quiet")
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    for line, loss, norm in zip(lines, expected["losses"], expected["gradient_norms"], strict=True):
        check(problems, f"{told} loss of step {line['step']}", abs(line["loss"] - loss) <= 1e-5,
              f"{line['loss']} {loss}")
        check(problems, f"{told} norm of step {line['step']}", abs(line["grad_norm"] - norm) <= 1e-5 * norm,
              f"{line['grad_norm']} {norm}")
    check_grads(model, work / "grads.safetensors", told, problems)


def main():
    problems = []
    for path in sys.argv[2:]:
        model = pathlib.Path(path)
        for ranks in RANKS:
            with tempfile.TemporaryDirectory() as work:
                work = pathlib.Path(work)
                check_logits(model, ranks, work, problems)
                check_ids(model, ranks, work, problems)
                if (model / "reference/training.json").exists():
                    check_training(model, ranks, work, problems)
    print("\n".join(problems) or "ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
