"""The example of the README: opens, converts and saves checkpoints. It makes the checkpoint that it opens."""

import fsdp
import numpy

state = {"embed_tokens": {"weight": numpy.ones((64, 8), "f4")}}
fsdp.save({"model": state}, "checkpoint-500", to="dcp", world_size=2)

with fsdp.open("checkpoint-500") as checkpoint:  # DCP, ZeRO, .pt, safetensors, GGUF, native, ...
    rows = checkpoint["model.embed_tokens.weight"][10:20]  # reads these rows

fsdp.convert("checkpoint-500", "model.safetensors", only="model", dtype="bf16")
fsdp.save({"model": state, "step": 500}, "native", compress=True)
assert fsdp.verify("native")
