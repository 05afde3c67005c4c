#!/usr/bin/env python3
"""A checkpoint of fsdp-train becomes a Hugging Face directory that holds all it needs: config.json,
tokenizer.json, and weights without the prefix; fsdp-train reads it back with the same loss and the same
samples, and the command that fsdp-convert proposes compares both.

Usage: export.py BUILD
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

BUILD = pathlib.Path(sys.argv[1]).resolve()
TEXT = "It was the best of times, it was the worst of times.\n" * 80


def run(work, *command):
    path = f"{BUILD / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PATH": path})
    assert done.returncode == 0, (command, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def check_llama(work):
    """Llama's own names begin with "model.": only the key above the model goes, also without train.*."""
    run(work, "fsdp-train", "--run", "llama", "--data.path", "text", "--np", "1", "--steps", "1",
        "--model.family", "llama", "--model.tie", "false", "--model.layers", "1", "--model.width", "12",
        "--model.heads", "2", "--model.context", "8", "--train.batch", "1", "-q")
    run(work, "fsdp-convert", "-q", "llama", "bare", "--to", "fsdp", "--only", "model", "--drop", "values")
    run(work, "fsdp-convert", "-q", "llama", "tied", "--to", "fsdp", "-X", "lm_head")
    for source in ("llama", "bare", "tied"):
        allowed = ["--allow-missing", "lm_head"] if source == "tied" else []
        run(work, "fsdp-convert", "-q", source, f"{source}-hf", "--to", "hf", *allowed)
        names = json.loads(run(work, "fsdp-ls", "--json", f"{source}-hf"))["tensors"]
        assert {"model.embed_tokens.weight", "model.norm.weight"} < set(names), names
        assert source == "tied" or "lm_head.weight" in names, names
        assert not any(name.startswith("model.model.") for name in names), names


def main():
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        (work / "text").write_text(TEXT, encoding="utf-8")
        run(work, "fsdp-train", "--run", "run", "--data.path", "text", "--np", "2", "--steps", "3",
            "--model.layers", "2", "--model.width", "36", "--model.heads", "6", "--model.context", "16",
            "--train.batch", "3", "-q")
        told = run(work, "fsdp-convert", "run", "hf", "--to", "hf")
        files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
        assert sorted(os.listdir(work / "hf")) == files, told
        names = json.loads(run(work, "fsdp-ls", "--json", "hf"))["tensors"]
        assert "transformer.wte.weight" in names, names
        assert not any(name.startswith("model.") for name in names), names
        config = json.loads((work / "hf/config.json").read_text())
        assert (config["model_type"], config["n_embd"], config["vocab_size"]) == ("gpt2", 36, 256), config
        assert len(json.loads((work / "hf/tokenizer.json").read_text())["model"]["vocab"]) == 256
        for command in (["--eval"], ["--sample"]):
            rest = ["--data", "text"] if command == ["--eval"] else ["--prompt", "It was", "-n", "20"]
            of_run = run(work, "fsdp-train", *command, "run", *rest)
            assert run(work, "fsdp-train", *command, "hf", *rest) == of_run
        proposed = told.split("next  ")[1].splitlines()[0]
        assert "s/^model" in proposed, told
        run(work, "bash", "-c", proposed)
        check_llama(work)
    print("ok")


if __name__ == "__main__":
    main()
