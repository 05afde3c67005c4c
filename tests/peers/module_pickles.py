"""A pickled module (torch.save(model)) has the names and the bits of its state_dict().

usage: module_pickles.py FSDP_CONVERT
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

CONVERT = Path(sys.argv[1]).resolve()


class Tied(nn.Module):
    """A parameter of two names, buffers of both kinds, a module twice, one that is None, an attribute."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU())
                                     for _ in range(11)])
        self.again = self.blocks[3]
        self.nothing = None
        self.register_module("absent", None)
        self.register_parameter("empty", None)
        self.scales = nn.ParameterDict({"ab": nn.Parameter(torch.rand(2))})
        self.parts = nn.ParameterList([nn.Parameter(torch.rand(3))])
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("scratch", torch.rand(5), persistent=False)
        self.plain = torch.rand(6)


MODELS = {
    "tied": Tied,
    "llama": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24,
                                                  num_hidden_layers=2, num_attention_heads=2)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=8)),
}


def convert(source, out, *options):
    done = subprocess.run([CONVERT, source, out, "--no-sync", *options], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, (source, done.returncode, done.stderr)


def same(found, wanted):
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        for name, make in MODELS.items():
            model = make()
            wanted = {key: one.detach() for key, one in model.state_dict().items()}
            ways = ({}, {"pickle_protocol": 5}, {"_use_new_zipfile_serialization": False})
            for number, options in enumerate(ways):
                source = folder / f"{name}{number}.pt"
                torch.save(model, source, **options)
                convert(source, folder / f"{name}{number}.safetensors", "--tied", "keep")
                same(load_file(folder / f"{name}{number}.safetensors"), wanted)
                convert(source, folder / f"{name}{number}.out.pt")
                found = torch.load(folder / f"{name}{number}.out.pt")
                same(found, wanted)
                make().load_state_dict(found)
            torch.save({"model": model, "epoch": 3}, folder / f"{name}.in.pt")
            convert(folder / f"{name}.in.pt", folder / f"{name}.in.out.pt")
            found = torch.load(folder / f"{name}.in.out.pt")
            assert found["epoch"] == 3
            same(found["model"], wanted)
            print(f"{name}: the names of its state_dict()")


if __name__ == "__main__":
    main()
