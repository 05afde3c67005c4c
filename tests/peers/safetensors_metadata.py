"""Texts next to the tensors, as the library of safetensors writes and reads them, survive conversions.

usage: safetensors_metadata.py FSDP-CONVERT
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

CONVERT = sys.argv[1]
SAMPLES = {
    "adapter of diffusers": {
        "format": "pt",
        "lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 32})},
    "kohya": {
        "ss_network_alpha": "32",
        "ss_tag_frequency": json.dumps({"a \u00e4\n": 3}),
        "modelspec.title": "x" * 70000},
    "quantized": {
        "format": "pt",
        "tensor_names": json.dumps(["w"]),
        "w": json.dumps({"_type": "Int8Tensor"})},
}


def texts_of(path):
    found = []
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with safe_open(file, "pt") as opened:
            found.append(opened.metadata())
    return found


def convert(source, target, *options):
    subprocess.run([CONVERT, source, target, "-q", *options], check=True)
    return target


def main():
    problems = 0
    for name, texts in SAMPLES.items():
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder)
            source = here / "source.safetensors"
            save_file({"w.a": torch.ones(300), "w.b": torch.ones(300)}, source, texts)
            ways = {
                "one file": convert(source, here / "one.safetensors"),
                "shards": convert(source, here / "hf", "--max-shard-size", "1200"),
                "joined": convert(here / "hf", here / "joined.safetensors"),
                "native and back": convert(convert(source, here / "native", "--to", "fsdp", "--world", "3"),
                                           here / "back.safetensors"),
            }
            for way, path in ways.items():
                for found in texts_of(path):
                    if found != {"format": "pt", **texts}:
                        problems += 1
                        print(f"{name}, {way}: {found} instead of {texts}"[:300])
    print(f"{len(SAMPLES)} samples, {problems} problems")
    return 1 if problems else 0


sys.exit(main())
