"""GGUF and llm.c, and formats that are recognised and named, not read: Orbax, Flax, TorchScript,
torch.export, pointers of git-lfs.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch
from layouts_common import case, expect, path, refused, seeded_net, versions, write_json


@case
def gguf(data):
    import gguf as library

    writer = library.GGUFWriter("model-f16.gguf", "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    Path("Llama-tiny").mkdir()
    Path("Llama-tiny/model-f16.gguf").write_bytes(Path("model-f16.gguf").read_bytes())
    expect(
        "llama.cpp",
        "*.gguf",
        [path("model-f16.gguf", out="out --drop values"), path("Llama-tiny", out="out --drop values")],
        tensors={"token_embd.weight": np.zeros((4, 8), np.float32)},
        made_with=versions("gguf"),
    )


@case
def llmc(data):
    """gpt2_124M.bin: 256 integers, then the parameters: here tensor number i is full of i."""
    length, layers, width, vocab = 16, 1, 8, 128
    shapes = {
        "wte": (vocab, width), "wpe": (length, width), "ln1w": (layers, width), "ln1b": (layers, width),
        "qkvw": (layers, 3 * width, width), "qkvb": (layers, 3 * width), "attprojw": (layers, width, width),
        "attprojb": (layers, width), "ln2w": (layers, width), "ln2b": (layers, width),
        "fcw": (layers, 4 * width, width), "fcb": (layers, 4 * width), "fcprojw": (layers, width, 4 * width),
        "fcprojb": (layers, width), "lnfw": (width,), "lnfb": (width,),
    }
    tensors = {name: np.full(shapes[name], number, np.float32) for number, name in enumerate(shapes)}
    for name, numbers, data in (
        ("gpt2_tiny.bin", (20240326, 3, length, 32, layers, 2, width, vocab), tensors.values()),
        ("state_00000010_00000.bin", (20240527, 1, 1, 0, 1), [np.zeros(64, np.float32)]),
    ):
        header = np.zeros(256, np.int32)
        header[: len(numbers)] = numbers
        Path(name).write_bytes(header.tobytes() + b"".join(one.tobytes() for one in data))
    expect(
        "llm.c",
        "gpt2_124M.bin, state_S_R.bin",
        [path("gpt2_tiny.bin", out="out --drop values"), refused("state_00000010_00000.bin", "llm.c")],
        tensors=tensors,
        source="karpathy/llm.c train_gpt2.py (write_model), train_gpt2.cu (save_state)",
        made_with=versions("numpy"),
    )


@case
def orbax(data):
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(Path("run").absolute())
    manager.save(2, args=ocp.args.StandardSave({"params": {"kernel": np.zeros((2, 3), np.float32)}}))
    manager.wait_until_finished()
    manager.close()
    for marker in Path("run").rglob("commit_success.txt"):  # it names the directory of this machine
        marker.write_text("Checkpoint commit was successful to run/2")
    expect(
        "Orbax",
        "RUN/N/_CHECKPOINT_METADATA, default/manifest.ocdbt",
        [refused("run", "Orbax"), refused("run/2", "Orbax"), refused("run/2/default", "Orbax")],
        made_with=versions("orbax-checkpoint", "jax"),
    )


@case
def flax_msgpack(data):
    import flax.serialization

    Path("model").mkdir()
    state = {"params": {"dense": {"kernel": np.ones((2, 3), np.float32)}}}
    Path("model/flax_model.msgpack").write_bytes(flax.serialization.msgpack_serialize(state))
    write_json(Path("model/config.json"), {"model_type": "bert"})
    expect(
        "Flax",
        "flax_model.msgpack",
        [refused("model", "Flax", "from_flax"), refused("model/flax_model.msgpack", "Flax")],
        made_with=versions("flax"),
    )


@case
def torchscript(data):
    torch.jit.save(torch.jit.script(seeded_net()), "model.pt")
    expect(
        "torch.jit.save",
        "a zip with code/",
        [refused("model.pt", "TorchScript", "torch.jit.load")],
        made_with=versions("torch"),
    )


@case
def pt2(data):
    program = torch.export.export(seeded_net(), (torch.zeros(1, 4, dtype=torch.long),))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    torch.export.save(program, "model.pt2")
    expect(
        "torch.export.save", "*.pt2", [refused("model.pt2", "torch.export.load")], made_with=versions("torch")
    )


@case
def lfs_pointers(data):
    """A clone without git-lfs: text in the place of the weights."""
    Path("model").mkdir()
    write_json(Path("model/config.json"), {"model_type": "llama"})
    for name in ("model.safetensors", "pytorch_model.bin"):
        digest = hashlib.sha256(name.encode()).hexdigest()
        Path("model", name).write_text(
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize 4096\n"
        )
    expect(
        "git clone without git-lfs",
        "model.safetensors of 130 bytes: version https://git-lfs...",
        [
            refused("model", "git lfs pull"),
            refused("model/model.safetensors", "git lfs pull"),
            refused("model/pytorch_model.bin", "git lfs pull"),
        ],
        source="git-lfs/git-lfs docs/spec.md",
    )
