"""A model of transformers whose files hold one of the names of a tied tensor, as a DCP directory: a strict
dcp.load finds every name of the model's state_dict. The way back holds the names that transformers saved.

usage: tied_loads.py FSDP_CONVERT
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors import safe_open
from transformers import (BartConfig, BartForConditionalGeneration, BertConfig, BertForMaskedLM, GemmaConfig,
                          GemmaForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM,
                          OPTConfig, OPTForCausalLM, T5Config, T5ForConditionalGeneration)

CONVERT = Path(sys.argv[1]).resolve()
SIZES = {"vocab_size": 24, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
         "intermediate_size": 32}
HEADS = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16}
CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True)),
    "gemma": (GemmaForCausalLM, GemmaConfig(**SIZES, **HEADS)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=24, n_embd=16, n_layer=1, n_head=2, n_positions=16)),
    "opt": (OPTForCausalLM, OPTConfig(**SIZES, ffn_dim=32, word_embed_proj_dim=16)),
    "bert": (BertForMaskedLM, BertConfig(**SIZES)),
    "t5": (T5ForConditionalGeneration,
           T5Config(vocab_size=24, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)),
    "bart": (BartForConditionalGeneration,
             BartConfig(vocab_size=24, d_model=16, encoder_layers=1, decoder_layers=1,
                        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
                        decoder_ffn_dim=32)),
    "untied": (LlamaForCausalLM, LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False)),
}


def convert(*words):
    done = subprocess.run([CONVERT, *map(str, words), "--no-sync"], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def load(path):
    with safe_open(path / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def check(case, folder):
    kind, config = CASES[case]
    model = kind(config).eval()
    state = model.state_dict()
    for number, one in enumerate(state.values()):
        one.copy_(torch.rand(one.shape, generator=torch.Generator().manual_seed(number)))
    model.save_pretrained(folder / "hf")
    saved = load(folder / "hf")
    assert (saved.keys() == state.keys()) == (case == "untied")
    said = convert(folder / "hf", folder / "dcp", "--to", "dcp", "--tied", "keep", "--world-size", "3")
    assert ("added, since PyTorch's loaders ask for" in said) == (case != "untied"), said
    found = {name: torch.zeros_like(one) for name, one in state.items()}
    dcp.load(found, checkpoint_id=folder / "dcp", no_dist=True)
    assert all(torch.equal(found[name], one) for name, one in state.items()), case
    convert(folder / "dcp", folder / "back", "--to", "hf", "--copy-from", folder / "hf")
    back = load(folder / "back")
    assert back.keys() == saved.keys(), (case, sorted(back.keys() ^ saved.keys()))
    assert all(torch.equal(back[name], one) for name, one in saved.items()), case


def main():
    transformers.logging.set_verbosity_error()
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            check(case, Path(folder))
        print(case, "is loaded strictly")


if __name__ == "__main__":
    main()
