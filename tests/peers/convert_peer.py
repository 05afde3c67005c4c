"""The programs that people use today for the rows of ./dev bench convert. Calls of a library are timed
without the start of Python.

usage: convert_peer.py TASK FROM TO     prints the seconds and the processor seconds of the work

`./dev bench convert` passes tests/peers/convert_peer, which runs this with the Python of ./dev peers.
"""

import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from safetensors.torch import save_file
from torch.distributed.checkpoint import _consolidate_hf_safetensors, format_utils
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

warnings.filterwarnings("ignore")
SHARDS, ZERO_RANKS = 4, 2
TENSORS, ROWS = 64, 1024


def dcp_to_torch_save(source, target):
    format_utils.dcp_to_torch_save(source, target)


def flat(state, before=""):
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        elif isinstance(value, torch.Tensor):
            yield before + key, value


def torch_to_safetensors(source, target):
    """A format without nesting gets names; one without shared storages gets the first of them."""
    tensors, seen = {}, set()
    for name, tensor in flat(torch.load(source, weights_only=True)):
        if tensor.data_ptr() not in seen:
            tensors[name] = tensor
        seen.add(tensor.data_ptr())
    save_file(tensors, target)


def names_of(folder):
    header = next(Path(folder).glob("*.safetensors")).open("rb")
    size = int.from_bytes(header.read(8), "little")
    return [name for name in json.loads(header.read(size)) if name != "__metadata__"]


def consolidate(source, target):
    """One output file, which no number of threads makes faster."""
    os.mkdir(target)
    mapping = {name: 1 for name in names_of(source)}
    _consolidate_hf_safetensors.consolidate_safetensors_files(source, target, mapping, num_threads=4)


def unpickle(source, _target):
    with open(Path(source) / ".metadata", "rb") as file:
        pickle.load(file)


def load_and_save(source, target):
    with open(Path(source) / ".metadata", "rb") as file:
        entries = pickle.load(file).state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=source, no_dist=True)
    dcp.save(state, checkpoint_id=target, no_dist=True)


def size_of(source):
    return sum(path.stat().st_size for path in Path(source).glob("shard-*"))


def make_columns(source, target):
    """Files of HuggingFaceStorageWriter for 4 ranks, tensors cut along dim 1; as large as source."""
    columns = max(size_of(source) // TENSORS // ROWS // 4 // SHARDS, 1)
    os.mkdir(target)
    for shard in range(SHARDS):
        generator = torch.Generator().manual_seed(shard)
        state = {}
        for i in range(TENSORS):
            state[f"layers.{i}.weight"] = torch.randn(ROWS, columns, generator=generator)
        info = {name: {"saved_offsets": [0, shard * columns]} for name in state}
        metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
        name = f"shard-{shard + 1:05}-model-00001-of-00001.safetensors"
        save_file(state, Path(target) / name, metadata=metadata)


def zero_to_fp32(source, target):
    """Runs the script that DeepSpeed leaves in every checkpoint. Its start counts, as fsdp-convert's does."""
    subprocess.run([sys.executable, Path(source) / "zero_to_fp32.py", source, target], check=True)


class Layers(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(ROWS, rows, bias=False) for _ in range(TENSORS))

    def forward(self, inputs):
        return sum(layer(inputs).float().square().mean() for layer in self.layers)


def train_a_step(rank, meeting, rows, target):
    import deepspeed

    torch.set_num_threads(1)
    torch.manual_seed(1)
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(ZERO_RANKS)}
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=ZERO_RANKS)
    model = Layers(rows)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.backward(engine(torch.randn(1, ROWS, dtype=torch.bfloat16)))
    engine.step()
    engine.save_checkpoint(target)


def make_zero(source, target):
    """A checkpoint of ZeRO-3 by two ranks, as large as source: 12 bytes a parameter, f32 with its moments."""
    rows = max(size_of(source) // TENSORS // ROWS // 12, 1)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train_a_step, (f"{folder}/meeting", rows, target), nprocs=ZERO_RANKS)


def processor_time():
    return sum(used.ru_utime + used.ru_stime
               for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def main():
    task, source, target = sys.argv[1:]
    task = task.replace("-", "_")
    answer = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # DeepSpeed prints while it works
    began, used = time.perf_counter(), processor_time()
    globals()[task](source, target)
    os.write(answer, f"{time.perf_counter() - began:.6f} {processor_time() - used:.6f}\n".encode())


if __name__ == "__main__":
    main()
