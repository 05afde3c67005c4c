"""gguf-py reads the GGUF files that we write: the same pairs, tensors and bytes as in the file before.

usage: gguf_reads.py CONVERT GOLDEN
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, dequantize

CONVERT, GOLDEN = sys.argv[1], Path(sys.argv[2])


def convert(source, target):
    command = [CONVERT, str(source), str(target), "-q", "--no-sync", "--only", "all"]
    subprocess.run(command, check=True)


def pairs(reader):
    """Values by key; the file's own numbers (GGUF.version, ...) stay out."""
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


def compare(path, again):
    before, after = GGUFReader(path), GGUFReader(again)
    assert pairs(before) == pairs(after), (path, pairs(after))
    assert before.alignment == after.alignment
    assert [one.name for one in before.tensors] == [one.name for one in after.tensors]
    for one, other in zip(before.tensors, after.tensors):
        assert one.tensor_type == other.tensor_type and list(one.shape) == list(other.shape), one.name
        assert np.array_equal(one.data.view(np.uint8), other.data.view(np.uint8)), one.name
        assert other.data_offset % after.alignment == 0, one.name
        dequantize(other.data, other.tensor_type)
    assert after.fields["llama.block_count"].types == [GGUFValueType.UINT32]
    assert after.fields["llama.rope.freq_base"].types == [GGUFValueType.FLOAT32]
    return len(after.tensors)


def main():
    tensors = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in sorted(GOLDEN.glob("gguf/*/data/*.gguf")):
            native, again = folder / f"{path.parts[-3]}.fsdp", folder / f"{path.parts[-3]}.gguf"
            convert(path, native)
            convert(native, again)
            tensors += compare(path, again)
    assert tensors > 20, tensors
    print(f"gguf-py reads {tensors} tensors that we wrote")


main()
