"""Writes files of safetensors without the library of that name."""

import json


def write(path, tensors, texts=None):
    """{name: (dtype, shape, bytes)}, such as {"w": ("F32", [2], bytes(8))}; texts: the metadata, or None"""
    header, at = {"__metadata__": texts} if texts else {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors.values():
            file.write(data)
