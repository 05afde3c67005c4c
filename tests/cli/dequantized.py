"""fsdp-convert --dequant without its peers: config.json decides about blocks, and numbers that are not finite
are named, in the last of several pieces, too.

usage: dequantized.py BUILD
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import safetensors_file

BUILD = Path(sys.argv[1]).resolve()
SIZES = {"F8_E4M3": 1, "F32": 4, "U8": 1, "I8": 1, "I32": 4, "BF16": 2}
TWO = 0x40  # 2.0 in e4m3
NO_NUMBER = 255  # of an exponent of MXFP4
LARGE = (1000, 400)  # more than three pieces of 131,072 numbers, the last one partial
CASES = []


def case(function):
    CASES.append(function)
    return function


def write(config, **tensors):
    """{name: (dtype, shape, bytes)}; a '/' in a name stands for a '.'."""
    for name, (dtype, shape, data) in tensors.items():
        assert len(data) == SIZES[dtype] * product(shape), name
    shutil.rmtree("model", ignore_errors=True)
    os.makedirs("model")
    safetensors_file.write("model/model.safetensors",
                           {name.replace("/", "."): tensor for name, tensor in tensors.items()})
    if config is not None:
        Path("model/config.json").write_text(json.dumps(config))


def product(shape):
    count = 1
    for size in shape:
        count *= size
    return count


def f8(*shape):
    return "F8_E4M3", shape, bytes([TWO]) * product(shape)


def scales(*shape, first=1.0, last=None):
    values = [first + i for i in range(product(shape))]
    values[-1] = values[-1] if last is None else last
    return "F32", shape, struct.pack(f"<{len(values)}f", *values)


def blocks(size, member="weight_block_size"):
    quantization = {"quant_method": "fp8", member: size}
    return {"model_type": "unknown", "quantization_config": quantization}


def convert(*options):
    shutil.rmtree("plain", ignore_errors=True)
    return subprocess.run([BUILD / "bin" / "fsdp-convert", "-q", "model", "plain", "--to", "hf", *options],
                          capture_output=True, text=True, timeout=60)


def values(name="w.weight"):
    data = Path("plain/model.safetensors").read_bytes()
    size, = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8:8 + size])[name]
    assert entry["dtype"] == "F32", entry
    first, end = (8 + size + offset for offset in entry["data_offsets"])
    return entry["shape"], struct.unpack(f"<{(end - first) // 4}f", data[first:end])


def check_scales(config, shape, scale_shape, block):
    """Each number is 2 times the scale of its block; the scales of a matrix are 1, 2, 3, ..."""
    write(config, **{"w/weight": f8(*shape), "w/weight_scale_inv": scales(*scale_shape)})
    done = convert("--dequant", "f32")
    assert done.returncode == 0, (config, done.stderr)
    found_shape, found = values()
    assert found_shape == list(shape)
    columns = -(-shape[-1] // block[1])
    rows = -(-shape[-2] // block[0])
    for i in range(0, len(found), 7):
        outer, row, column = i // (shape[-1] * shape[-2]), i // shape[-1] % shape[-2], i % shape[-1]
        scale = 1 + (outer * rows + row // block[0]) * columns + column // block[1]
        assert found[i] == 2 * scale, (config, i, found[i], scale)


def refused(words, config, shape, scale_shape, status=4, **more):
    write(config, **{"w/weight": f8(*shape), "w/weight_scale_inv": scales(*scale_shape, **more)})
    done = convert("--dequant", "f32")
    assert done.returncode == status and words in done.stderr, (config, done.returncode, done.stderr)
    assert not os.path.exists("plain"), config


@case
def a_weight_has_one_scale():
    """Another one would make another weight; scales of activations go with the weight."""
    weight, all_ones = f8(150, 150), scales(2, 2)
    for name in ("w/weight_scale", "w/scale"):
        write(None, **{"w/weight": weight, "w/weight_scale_inv": all_ones, name: scales(2, 2, first=3.0)})
        done = convert("--dequant", "f32")
        words = f"'w.weight': it has two scales, 'w.weight_scale_inv' and '{name.replace('/', '.')}'"
        assert done.returncode == 4 and words in done.stderr, done.stderr
    write(None, **{"w/weight": weight, "w/weight_scale_inv": all_ones, "w/activation_scale": scales(1)})
    assert convert("--dequant", "f32").returncode == 0
    data = Path("plain/model.safetensors").read_bytes()
    assert b"activation_scale" not in data[8:8 + struct.unpack("<Q", data[:8])[0]]


@case
def config_decides_about_blocks():
    for size in ([128, 128], [64, 64], [100, 200], [1000, 7], [1, 400]):
        shape = (-(-LARGE[0] // size[0]), -(-LARGE[1] // size[1]))
        check_scales(blocks(size), LARGE, shape, size)
        refused(f"blocks of {size[0]} x {size[1]}, which config.json has (weight_block_size)", blocks(size),
                LARGE, (shape[0] + 1, shape[1]))
    # 150 rows are two blocks of 128, and of 100, and of 75
    for block in (128, 100, 75):
        check_scales(blocks([block, block]), (150, 150), (2, 2), (block, block))
    check_scales(blocks([16, 32], "block_structure"), (5, 40, 70), (5, 3, 3), (16, 32))
    nested = {"config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": [16, 32]}}}}
    check_scales({"text_config": {"quantization_config": nested}}, (40, 70), (3, 3), (16, 32))
    for shape in ((), (1,), (1, 1), (150, 1), (150,)):
        refused("blocks of 128 x 128", blocks([128, 128]), (150, 150), shape)


@case
def config_without_blocks():
    for config in (None, {}, blocks([128, 128], "other"), blocks(None, "block_structure")):
        check_scales(config, (150, 300), (2, 3), (128, 128))
        refused("not those of the tensor, of rows, or of blocks of 128 x 128", config, (150, 300), (2, 1))
        refused("not those of the tensor, of rows, or of blocks of 128 x 128", config, (4, 4), (2,))
        refused("not those of the tensor", config, (150, 300), (3, 3))
    refused("config.json has no blocks", blocks(None), (150, 300), (2, 3))
    for config in (None, {}, blocks(None)):
        check_scales(config, (150, 300), (), (150, 300))
        check_scales(config, (150, 300), (150,), (1, 300))
        check_scales(config, (150, 300), (150, 1), (1, 300))
        check_scales(config, (5, 30, 20), (5, 1, 1), (30, 20))
        check_scales(config, (5, 30, 20), (5,), (30, 20))


@case
def sizes_that_are_none():
    for size in ([128], [128, 128, 128], [], [0, 128], [-1, 128], [128, 1.5], "128", [[128, 128]]):
        refused("config.json", blocks(size), (150, 150), (2, 2))
    groups = {name: {"weights": {"block_structure": [size, 128]}} for name, size in (("a", 128), ("b", 64))}
    refused("blocks of 128 x 128 and of 64 x 128", {"quantization_config": {"config_groups": groups}},
            (150, 150), (2, 2), status=2)


@case
def scales_that_are_not_finite():
    for last in (float("nan"), float("inf"), float("-inf"), 1e38):
        for size in ([128, 128], [64, 64]):
            shape = (-(-LARGE[0] // size[0]), -(-LARGE[1] // size[1]))
            refused("a scale is ", blocks(size), LARGE, shape, last=last)
        refused("'w.weight'", None, LARGE, (), last=last)
    write(None, **{"w/weight": f8(2, 2), "w/weight_scale": scales(1, first=5e33)})
    assert convert("--dequant", "f32").returncode == 0
    assert values()[1] == (struct.unpack("<f", struct.pack("<f", 5e33))[0] * 2,) * 4


@case
def exponents_that_are_not_finite():
    for exponent, expected, both, place in ((127, 0, 0x66, -1), (252, 0, 0x66, -1), (253, 4, 0x66, -1),
                                            (NO_NUMBER, 4, 0x66, -1), (NO_NUMBER, 4, 0, -1),
                                            (NO_NUMBER, 4, 0x66, 0), (NO_NUMBER, 4, 0x66, 7000)):
        numbers = bytes([both]) * (5000 * 3 * 16)  # 0x66: twice 4 in a byte
        exponents = bytearray([127]) * (5000 * 3)
        exponents[place] = exponent
        write(None, w_blocks=("U8", (5000, 3, 16), numbers), w_scales=("U8", (5000, 3), exponents))
        done = convert("--dequant", "f32")
        assert done.returncode == expected, (exponent, done.returncode, done.stderr)
        assert expected == 0 or "'w'" in done.stderr and "not finite" in done.stderr, done.stderr
    write(None, w_blocks=("U8", (2, 3, 8), bytes(48)), w_scales=("U8", (2, 3), bytes(6)))
    done = convert("--dequant", "bf16")
    assert done.returncode == 4 and "not MXFP4 blocks" in done.stderr, done.stderr


@case
def modules_keep_what_their_configs_say():
    write(blocks([128, 128]), **{"w/weight": f8(2, 2), "w/weight_scale_inv": scales(1, 1)})
    module = {"idx": 1, "name": "1", "path": "1_Dense", "type": "sentence_transformers.models.Dense"}
    Path("model/modules.json").write_text(json.dumps([module]))
    os.makedirs("model/1_Dense")
    Path("model/1_Dense/config.json").write_text(json.dumps({"quantization_config": {"bits": 4}}))
    done = convert("--dequant", "f32")
    assert done.returncode == 0, done.stderr
    assert "quantization_config" not in json.loads(Path("plain/config.json").read_text())
    assert json.loads(Path("plain/1_Dense/config.json").read_text())["quantization_config"] == {"bits": 4}


@case
def models_that_lack_tensors():
    """The model is compared with config.json without its quantization, copied or not."""
    config = blocks([128, 128]) | {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "vocab_size": 11, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    layer = {"input_layernorm": (16,), "post_attention_layernorm": (16,), "self_attn/q_proj": (16, 16),
             "self_attn/k_proj": (8, 16), "self_attn/v_proj": (8, 16), "self_attn/o_proj": (16, 16),
             "mlp/gate_proj": (24, 16), "mlp/up_proj": (24, 16), "mlp/down_proj": (16, 24)}
    shapes = {"model/embed_tokens": (11, 16), "model/norm": (16,), "lm_head": (11, 16)}
    shapes |= {f"model/layers/0/{name}": shape for name, shape in layer.items()}
    for lost, status in (None, 0), ("model/norm", 4):
        tensors = {f"{name}/weight": scales(*shape) for name, shape in shapes.items() if name != lost}
        query = "model/layers/0/self_attn/q_proj/weight"
        tensors |= {query: f8(16, 16), f"{query}_scale_inv": scales(1, 1)}
        write(config, **tensors)
        done = subprocess.run([BUILD / "bin" / "fsdp-convert", "-q", "model", "out.gguf", "--dequant", "f32",
                               "--overwrite"], capture_output=True, text=True, timeout=60)
        assert done.returncode == status, (lost, done.returncode, done.stderr)
        assert lost is None or "1 missing: 'model.norm.weight'" in done.stderr, done.stderr
        done = convert("--dequant", "f32")
        assert done.returncode == status, (lost, done)
        assert lost is None or "1 missing: 'model.norm.weight'" in done.stderr, done.stderr


def integers(dtype, *shape):
    return dtype, shape, bytes(SIZES[dtype] * product(shape))


def cast(options):
    shutil.rmtree("plain", ignore_errors=True)
    done = subprocess.run([BUILD / "bin" / "fsdp-convert", "model", "plain", "--to", "hf", *options.split()],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (options, done.stderr)
    return done.stdout, done.stderr


@case
def casts_of_quantized_weights_are_named():
    """A cast leaves integers as they are: the plan and the last line say how many weights that concerns."""
    plain = {"norm/weight": integers("F32", 5), "ids": integers("I32", 2, 3), "mask": integers("U8", 2, 2)}
    mxfp4 = {"x_blocks": integers("U8", 2, 3, 16), "x_scales": integers("U8", 2, 3)}
    for tensors, count, words in (
            (mxfp4, 1, "1 weight stays quantized: --dtype bf16 does not apply the scales of integers, "
                       "--dequant bf16 does"),
            ({"a/weight_packed": integers("I32", 4, 2), "a/weight_scale": integers("BF16", 4, 1)}, 1,
             "1 weight stays quantized"),
            ({"a/weight": integers("I8", 4, 4), "a/weight_scale": integers("BF16", 4, 1)}, 1,
             "1 weight stays"),
            ({"a/weight_qdata": integers("I8", 4, 4), "a/weight_scale": integers("F32", 4, 1)}, 1,
             "1 weight stays"),
            ({"a/qweight": integers("I32", 4, 4), "a/scales": integers("BF16", 4, 1),
              "b/qdata": integers("I8", 4, 4), "b/scale": integers("BF16", 4), **mxfp4}, 3,
             "3 weights stay quantized: --dtype bf16 does not apply the scales of integers, --dequant bf16 "
             "applies 1 of them"),
            ({}, 0, "")):
        write(None, **plain, **tensors)
        out, noted = cast("--dtype bf16")
        last = f"{count} weight{'s' if count > 1 else ''} still quantized"
        assert (last in out and words in noted) if count else "quantized" not in out + noted, (out, noted)
        planned, _ = cast("--dtype bf16 -n")
        assert words in planned and ("quantized" in planned) == (count > 0), planned
        told = json.loads(cast("--dtype bf16 -n --json")[0])
        assert told.get("quantized", 0) == count, told
        for options in ("", "--dtype keep"):
            out, noted = cast(options)
            assert "quantized" not in out + noted, (out, noted)
    write(None, **plain, **mxfp4)
    out, noted = cast("--dequant bf16 --dtype bf16")
    assert "still quantized" not in out + noted, (out, noted)


def main():
    for run in CASES:
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            run()
            os.chdir("/")
        print(run.__name__)


main()
