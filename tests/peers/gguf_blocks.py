"""Quantized blocks are decoded and encoded as gguf-py does it, bit for bit.

usage: gguf_blocks.py BLOCK_VALUES
"""

import subprocess
import sys

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

PROGRAM = sys.argv[1]
BLOCKS = 4000
# where a block has its f16 numbers
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
          "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def run(name, way, data):
    return subprocess.run([PROGRAM, name.lower(), way], input=data, capture_output=True, check=True).stdout


def decode(name, rng):
    kind = GGMLQuantizationType[name]
    size = GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
    for at in SCALES[name]:  # any f16 but infinities and NaN, whose payloads are the processor's choice
        exponent = blocks[:, at + 1] & 0x7C
        blocks[exponent == 0x7C, at + 1] &= 0xBF
    want = dequantize(blocks.reshape(-1), kind)
    got = np.frombuffer(run(name, "decode", blocks.tobytes()), dtype=np.float32)
    assert got.size == want.size, (name, got.size, want.size)
    assert np.array_equal(got.view(np.uint32), want.reshape(-1).view(np.uint32)), name


def encode(name, rng):
    values = rng.standard_normal((BLOCKS, 32)).astype(np.float32)
    values *= np.exp2(rng.integers(-40, 20, (BLOCKS, 1))).astype(np.float32)
    values[:4] = 0
    values[4:8] = np.arange(32, dtype=np.float32) - 16
    values[8:12, 3] = 0.0
    values[12:20] = np.round(values[12:20])
    want = quantize(values, GGMLQuantizationType[name]).tobytes()
    assert run(name, "encode", values.tobytes()) == want, name


generator = np.random.default_rng(5)
for block_type in SCALES:
    decode(block_type, generator)
encode("Q8_0", generator)
encode("Q4_0", generator)
print(f"{len(SCALES)} types decoded and 2 encoded as gguf-py does")
