"""Tiny models and the expectations of tests/golden/layouts; one function per directory is in
layouts_trainers.py, layouts_ranks.py, layouts_files.py and layouts_named.py.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import nn

VOCAB = 32
NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}
NUMPY_NAMES = {"float32": "F32", "float16": "F16", "int64": "I64", "uint32": "U32", "int32": "I32"}
TOKENS = [[1, 5, 9, 2, 30, 7, 11, 3], [4, 4, 17, 21, 8, 0, 6, 2]]
IMAGE = torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16)
VALUES = torch.linspace(-1, 1, 4 * 8 * 8).reshape(1, 4, 8, 8)
TOKENIZER = ["tokenizer.json", "tokenizer_config.json"]
CASES = {}


def case(function):
    """Registers a function(data) that writes the case of its name into data, the current directory."""
    CASES[function.__name__] = function
    return function


class Net(nn.Module):
    """The model of frameworks that bring none."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 8)
        self.fc = nn.Linear(8, 6)
        self.head = nn.Linear(6, VOCAB, bias=False)

    def forward(self, tokens):
        return self.head(torch.tanh(self.fc(self.emb(tokens))))


def seeded_net(seed=1):
    torch.manual_seed(seed)
    return Net()


def net_loss(model, tokens):
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def trained_net(steps=2, seed=1):
    """A net and its AdamW after some steps."""
    net = seeded_net(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        net_loss(net, torch.tensor(TOKENS)).backward()
        optimizer.step()
    return net, optimizer


def tiny_llama(tied=False, seed=7, **more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        **more,
    )
    return LlamaForCausalLM(config).float()


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def raw(tensor):
    """The bytes of a tensor, row-major."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).tobytes()
    tensor = tensor.detach().contiguous().reshape(-1)
    return bytes(tensor.view(torch.uint8).numpy()) if tensor.numel() else b""


def described(tensors):
    """The description of the tensors that the weights file must hold."""
    told = {}
    for name, tensor in sorted(tensors.items()):
        dtype = NUMPY_NAMES[tensor.dtype.name] if isinstance(tensor, np.ndarray) else NAMES[tensor.dtype]
        told[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "sha256": hashlib.sha256(raw(tensor)).hexdigest(),
        }
    return told


def path(typed, *, out="out", **more):
    """A path that a person types; more: what differs from the case (tensors, exit, says, ...)."""
    if "tensors" in more:
        more["tensors"] = described(more["tensors"])
    if "quoted" in more:
        typed, more = f"'{typed}'", {key: value for key, value in more.items() if key != "quoted"}
    return {"command": f"fsdp-convert {typed} {out}", **more}


def refused(typed, *says, **more):
    """A path that is named, not converted: the message holds these words, nothing is written."""
    return path(typed, exit="refused", says=list(says), **more)


def expect(
    made_by,
    looks_like,
    paths,
    *,
    tensors=None,
    parts=None,
    weights="model.safetensors",
    files=None,
    left_out=(),
    loader=None,
    made_with=(),
    source=None,
    logits=None,
):
    """Writes expected.json next to data/. files: those next to the weights, each with that of SRC."""
    told = {"made_by": made_by, "looks_like": looks_like, "made_with": list(made_with)}
    if source:
        told["source"] = source
    told["paths"] = [path(one) if isinstance(one, str) else one for one in paths]
    if tensors is not None:
        told |= {
            "weights": weights,
            "tensors": described(tensors),
            "files": files or {},
            "left_out": list(left_out),
        }
    if parts:
        told["parts"] = {name: described(held) for name, held in parts.items()}
    if loader:
        told["loader"] = loader
    if logits is not None:
        np.save("../logits.npy", logits)
    Path("../expected.json").write_text(json.dumps(told, indent=1) + "\n")


def beside(folder, names):
    """{name: folder/name} for files that a result holds under their own names."""
    return {name: f"{folder}/{name}" for name in names}


def logits_of(model):
    model.eval()
    with torch.no_grad():
        result = model(torch.tensor(TOKENS))
    return getattr(result, "logits", result).float().numpy()


def versions(*packages):
    from importlib.metadata import version

    return [f"{package} {version(package)}" for package in packages]


def write_json(place, value):
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(value, indent=2) + "\n")


def write_case(golden, name):
    """In its own directory, so that no file holds a path of this machine."""
    folder = golden / "layouts" / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    os.chdir(folder / "data")
    CASES[name](Path())


def ranks(worker, *arguments, count=2):
    """Runs worker(rank, *arguments) in processes that are joined by gloo."""
    import tempfile

    with tempfile.TemporaryDirectory() as meeting:
        torch.multiprocessing.start_processes(
            _rank, (worker, f"{meeting}/store", count, arguments), nprocs=count, start_method="fork"
        )


def _rank(rank, worker, store, count, arguments):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29417",
    )
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    try:
        worker(rank, *arguments)
    finally:
        torch.distributed.destroy_process_group()
