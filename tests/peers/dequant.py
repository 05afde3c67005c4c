"""fsdp-convert --dequant gives the weights that transformers' own functions give, and leaves others alone.

usage: dequant.py FSDP_CONVERT
"""

import json
import os
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

CONVERT = sys.argv[1]
F8 = torch.float8_e4m3fn


def convert(*arguments):
    return subprocess.run([CONVERT, *arguments], capture_output=True, text=True, timeout=120)


def write(path, tensors, config):
    os.makedirs(path)
    save_file(tensors, f"{path}/model.safetensors")
    with open(f"{path}/config.json", "w") as file:
        json.dump({"model_type": "unknown", "dtype": "bfloat16", **config}, file, indent=1)


def check(path, expected):
    done = convert(path, path + "-plain", "--to", "hf", "--dequant", "bf16")
    assert done.returncode == 0, done.stderr
    ours = load_file(f"{path}-plain/model.safetensors")
    assert set(ours) == set(expected), set(ours) ^ set(expected)
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, (name, ours[name].dtype)
        assert torch.equal(ours[name], tensor), name
    with open(f"{path}-plain/config.json") as file:
        config = json.load(file)
    assert "quantization_config" not in config, config
    assert config.get("kept", 1) == 1


def by_transformers(weight, scales, block):
    """Its function takes whole blocks: the weight is padded, and cut."""
    rows, columns = (-(-size // side) * side for size, side in zip(weight.shape, block))
    padded = torch.zeros(rows, columns, dtype=weight.dtype)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    whole = Fp8Dequantize(None)._dequantize_one(padded, scales, torch.bfloat16)
    return whole[: weight.shape[0], : weight.shape[1]]


def fp8():
    blocks, scales = torch.randn(200, 300).to(F8), torch.rand(2, 3) + 0.1
    rows, of_rows = torch.randn(16, 32).to(F8), torch.rand(16, 1)
    flat, of_flat = torch.randn(16, 32).to(F8), torch.rand(16)
    whole, of_whole = torch.randn(16, 32).to(F8), torch.tensor(0.37)
    norm = torch.randn(5, dtype=torch.bfloat16)
    of_blocks = {"a.weight": blocks, "a.weight_scale_inv": scales, "norm.weight": norm}
    others = {"b.weight": rows, "b.weight_scale": of_rows, "c.weight": whole, "c.weight_scale": of_whole,
              "c.input_scale": torch.tensor(1.0), "d.weight": flat, "d.weight_scale": of_flat}
    expected = {"a.weight": by_transformers(blocks, scales, (128, 128)), "norm.weight": norm}
    wide = {"b.weight": rows.float() * of_rows, "c.weight": whole.float() * of_whole,
            "d.weight": flat.float() * of_flat[:, None]}
    of_others = {name: tensor.bfloat16() for name, tensor in wide.items()}
    settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "kept": 1}
    write("fp8", of_blocks, settings)
    check("fp8", expected)
    write("without", {**of_blocks, **others}, {})
    check("without", {**expected, **of_others})
    write("rows", others, {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}})
    check("rows", of_others)
    done = convert("without", "wide-plain", "--to", "hf", "--dequant", "f32", "--mem", "64M")
    assert done.returncode == 0, done.stderr
    ours = load_file("wide-plain/model.safetensors")
    assert all(torch.equal(ours[name], wide[name]) for name in wide)
    odd, of_odd = torch.randn(96, 160).to(F8), torch.rand(3, 5)
    write("odd", {"a.weight": odd, "a.weight_scale_inv": of_odd},
          {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}})
    check("odd", {"a.weight": by_transformers(odd, of_odd, (32, 32))})
    small, of_small = torch.randn(150, 150).to(F8), torch.rand(2, 2)  # two blocks of 128, too
    write("small", {"a.weight": small, "a.weight_scale_inv": of_small},
          {"quantization_config": {"quant_method": "fp8", "weight_block_size": [75, 75]}})
    check("small", {"a.weight": by_transformers(small, of_small, (75, 75))})


def mxfp4():
    blocks = torch.randint(0, 256, (2, 96, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 96, 3), dtype=torch.uint8)
    write("mxfp4", {"x.gate_up_proj_blocks": blocks, "x.gate_up_proj_scales": scales},
          {"quantization_config": {"quant_method": "mxfp4"}})
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    check("mxfp4", {"x.gate_up_proj": expected})


def gptq():
    """Packed numbers of GPTQ pass; a cast of their scales would spoil them."""
    tensors = {"a.qweight": torch.randint(0, 99, (8, 16), dtype=torch.int32),
               "a.scales": torch.rand(2, 16).half(),
               "a.qzeros": torch.randint(0, 99, (2, 2), dtype=torch.int32),
               "a.g_idx": torch.zeros(64, dtype=torch.int32), "norm.weight": torch.rand(5).half()}
    write("gptq", tensors, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    done = convert("gptq", "gptq-copy", "--to", "hf")
    assert done.returncode == 0, done.stderr
    ours = load_file("gptq-copy/model.safetensors")
    assert set(ours) == set(tensors) and all(torch.equal(ours[name], tensors[name]) for name in tensors)
    done = convert("gptq", "gptq-cast", "--to", "hf", "--dtype", "bf16")
    assert done.returncode != 0 and "scales" in done.stderr, done.stderr
    done = convert("gptq", "gptq-plain", "--to", "hf", "--dequant", "bf16")
    assert done.returncode == 2 and "GPTQ or AWQ" in done.stderr, done.stderr


def refused():
    whole = {"a.weight": torch.rand(4, 4).to(F8)}
    for name, tensors, status, words in (
            ("plain", {"a.weight": torch.rand(4, 4)}, 2, "has no quantized weights"),
            ("alone", whole, 2, "has 8 bits but no scales"),
            ("misfit", {**whole, "a.weight_scale": torch.rand(3, 1)}, 4,
             "scales of [3, 1] do not fit a weight of [4, 4]"),
            ("nan", {**whole, "a.weight_scale": torch.full((1, 1), float("nan"))}, 4, "a scale is nan"),
            ("short", {"a_blocks": torch.zeros(2, 3, 8, dtype=torch.uint8),
                       "a_scales": torch.zeros(2, 3, dtype=torch.uint8)}, 4, "not MXFP4 blocks")):
        write(name, tensors, {"quantization_config": {"weight_block_size": [9223372036854775807, 128]}})
        done = convert(name, name + "-plain", "--to", "hf", "--dequant", "bf16")
        assert done.returncode == status and words in done.stderr, (name, done.stderr)


torch.manual_seed(5)
with tempfile.TemporaryDirectory() as directory:
    os.chdir(directory)
    for part in (fp8, mxfp4, gptq, refused):
        part()
        print(f"{part.__name__}: as transformers")
    os.chdir("/")
