"""The rooms of the product, for the checks of includes (layers.py) and of calls (calls.py)."""

# The rooms of each folder, from the ground up: a room includes itself and those before it. "." stands for the
# files of the folder itself: its face, the headers that other folders and programs see, which every room may
# include (calls.py sees to it that no room calls one above it).
ROOMS = {
    "base": [".", "core", "data", "io"],
    "kernels": [".", "bytes", "cast", "train", "nn", "x86", "cuda"],
    "formats": [".", "zip", "tokenizer", "source", "target", "pickle", "gguf", "llmc", "npy", "hdf5",
                "hdf5_child", "native", "safetensors", "torch", "ranks", "torch_checkpointing", "deepspeed",
                "dcp", "detect", "frameworks"],
    "statedict": [".", "ctl", "sd", "models", "select", "manifest", "transfer", "commit", "checkpoint", "run",
                  "expect", "like", "gguf_model", "derive", "map", "save", "convert", "diff"],
    "runtime": [".", "bootstrap", "device", "comm", "comm_shared", "comm_message", "comm_nccl", "launch",
                "param", "context", "group", "step", "optim", "staging", "state", "background",
                "tokens", "transformer", "wrap"],
    "tools": ["cli", "ls", "convert", "train", "bench", "plot", "."],
}


# Endings of sources and of headers; .cu and .cuh are CUDA's.
SOURCES, HEADERS = (".c", ".cu"), (".h", ".cuh")


def sources(folder, endings=SOURCES + HEADERS):
    """The files of a folder with one of these endings."""
    return (path for path in folder.rglob("*.*") if path.suffix in endings)


def room(path):
    """The room of a file, by its path from the root of the tree."""
    inside = path.split("/")[1:-1]
    return inside[0] if inside else "."
