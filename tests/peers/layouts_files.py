"""Layouts that one process writes with torch.save, safetensors or MLX, after the sources of the frameworks:
nanoGPT, nanochat, Meta's Llama, torchtune, MLX, Nanotron.
"""

import json
from pathlib import Path

import numpy as np
import torch
from layouts_common import (
    TOKENIZER,
    beside,
    case,
    expect,
    logits_of,
    path,
    refused,
    seeded_net,
    tiny_llama,
    tiny_tokenizer,
    trained_net,
    versions,
    write_json,
)
from safetensors.torch import load_file, save_file


@case
def nanogpt(data):
    net, optimizer = trained_net()
    Path("out-shakespeare").mkdir()
    torch.save(
        {
            "model": {f"_orig_mod.{name}": tensor for name, tensor in net.state_dict().items()},
            "optimizer": optimizer.state_dict(),
            "model_args": {"n_layer": 1, "vocab_size": 32, "bias": False},
            "iter_num": 2,
            "best_val_loss": torch.tensor(3.5),
            "config": {"out_dir": "out-shakespeare"},
        },
        "out-shakespeare/ckpt.pt",
    )
    expect(
        "nanoGPT",
        "out/ckpt.pt: {'model', 'optimizer', 'model_args', 'iter_num', 'best_val_loss', 'config'}",
        ["out-shakespeare", "out-shakespeare/ckpt.pt"],
        tensors=net.state_dict(),
        loader="net",
        logits=logits_of(net),
        left_out=["optimizer", "best_val_loss"],
        made_with=versions("torch"),
        source="karpathy/nanoGPT train.py",
    )


@case
def nanochat(data):
    """Two steps; the optimizer of each rank is a file of its own."""
    folder = Path("base_checkpoints/d4")
    folder.mkdir(parents=True)
    for step in (1, 2):
        net, optimizer = trained_net(step)
        torch.save(
            {f"_orig_mod.{name}": tensor for name, tensor in net.state_dict().items()},
            folder / f"model_{step:06d}.pt",
        )
        for rank in range(2):
            moments = optimizer.state_dict()["state"][0]["exp_avg"].chunk(2)[rank].clone()
            torch.save([{"state": {0: {"exp_avg": moments}}}], folder / f"optim_{step:06d}_rank{rank}.pt")
        write_json(
            folder / f"meta_{step:06d}.json", {"step": step, "val_bpb": 1.5, "model_config": {"n_layer": 4}}
        )
    first, _ = trained_net(1)
    expect(
        "nanochat",
        "base_checkpoints/dN/model_00000S.pt, optim_00000S_rankR.pt, meta_00000S.json",
        [
            path("base_checkpoints", says=["model_000002.pt"]),
            path(str(folder), says=["model_000002.pt"]),
            path(f"{folder}/model_000002.pt", left_out=[]),
            path(f"{folder}/model_000001.pt", tensors=first.state_dict(), left_out=[], logits=False),
            refused(f"{folder}/optim_000002_rank0.pt", "optim"),
        ],
        tensors=net.state_dict(),
        left_out=["optimizer"],
        loader="net",
        logits=logits_of(net),
        made_with=versions("torch"),
        source="karpathy/nanochat nanochat/checkpoint_manager.py (save_checkpoint)",
    )


def meta_llama(seed=9):
    torch.manual_seed(seed)
    shapes = {
        "tok_embeddings.weight": (32, 8),
        "layers.0.attention.wq.weight": (8, 8),
        "layers.0.attention.wo.weight": (8, 8),
        "layers.0.feed_forward.w1.weight": (12, 8),
        "layers.0.feed_forward.w2.weight": (8, 12),
        "layers.0.attention_norm.weight": (8,),
        "norm.weight": (8,),
        "output.weight": (32, 8),
    }
    return {name: torch.rand(shape).bfloat16() for name, shape in shapes.items()}


META = "consolidated.NN.pth, params.json, tokenizer.model"


def write_meta(folder):
    folder.mkdir()
    write_json(
        folder / "params.json", {"dim": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 32, "norm_eps": 1e-5}
    )
    (folder / "tokenizer.model").write_bytes(b"PHMK 0\nPHBhZD4= 1\n")
    return {"made_with": versions("torch"), "source": "meta-llama/llama llama/generation.py (Llama.build)"}


@case
def meta_one(data):
    common = write_meta(Path("Llama-tiny"))
    held = meta_llama()
    torch.save(held, "Llama-tiny/consolidated.00.pth")
    expect(
        "Meta's Llama, one file",
        META,
        ["Llama-tiny", "Llama-tiny/consolidated.00.pth"],
        tensors=held,
        files=beside("Llama-tiny", ["params.json", "tokenizer.model"]),
        loader="torch",
        **common,
    )


@case
def meta_two(data):
    """Tensor parallel parts: each file has every name, with a part of the tensor."""
    common = write_meta(Path("Llama-tiny"))
    held = meta_llama()
    rows = ("wq.weight", "w1.weight", "output.weight")
    for part in range(2):
        torch.save(
            {
                name: (
                    tensor
                    if tensor.dim() == 1
                    else tensor.chunk(2, 0 if name.endswith(rows) else 1)[part].clone()
                )
                for name, tensor in held.items()
            },
            f"Llama-tiny/consolidated.{part:02d}.pth",
        )
    expect(
        "Meta's Llama, several files",
        META,
        ["Llama-tiny", "'Llama-tiny/consolidated.{r}.pth'"],
        tensors=held,
        files=beside("Llama-tiny", ["params.json", "tokenizer.model"]),
        loader="torch",
        **common,
    )


@case
def torchtune(data):
    model = tiny_llama()
    older, folder = (Path(f"output/epoch_{epoch}") for epoch in (0, 1))
    for epoch in (older, folder):
        model.save_pretrained(epoch)
        tiny_tokenizer().save_pretrained(epoch)
        held = load_file(epoch / "model.safetensors")
        (epoch / "model.safetensors").unlink()
        if epoch == older:
            held = {name: tensor * 0.5 for name, tensor in held.items()}
        save_file(held, epoch / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
        size = sum(tensor.nbytes for tensor in held.values())
        write_json(
            epoch / "model.safetensors.index.json",
            {
                "metadata": {"total_size": size},
                "weight_map": dict.fromkeys(held, "model-00001-of-00001.safetensors"),
            },
        )
    Path("output/recipe_state").mkdir()
    torch.save(
        {
            "epochs_run": 2,
            "seed": 1,
            "total_epochs": 3,
            "max_steps_per_epoch": 1,
            "optimizer": {"state": {}, "param_groups": []},
        },
        "output/recipe_state/recipe_state.pt",
    )
    expect(
        "torchtune",
        "output/epoch_N/model-0000I-of-0000N.safetensors, recipe_state/recipe_state.pt",
        [
            path("output", says=["epoch_1"]),
            path(str(folder), left_out=[]),
            path(
                str(older),
                left_out=[],
                logits=False,
                tensors=load_file(older / "model-00001-of-00001.safetensors"),
            ),
        ],
        tensors=held,
        files=beside(folder, ["config.json", "generation_config.json", *TOKENIZER]),
        left_out=["recipe_state"],
        loader="transformers",
        logits=logits_of(model),
        made_with=versions("torch", "transformers"),
        source="pytorch/torchtune torchtune/training/checkpointing/_checkpointer.py",
    )


@case
def mlx_model(data):
    """A model of mlx_lm.convert, quantized: packed weights with scales and biases."""
    import mlx.core as mx

    model = tiny_llama()
    folder = Path("mlx_model")
    folder.mkdir()
    mx.random.seed(1)
    packed, scales, biases = mx.quantize(mx.random.normal((16, 64)), group_size=32, bits=4)
    held = {
        "model.embed_tokens.weight": packed,
        "model.embed_tokens.scales": scales,
        "model.embed_tokens.biases": biases,
        "model.norm.weight": mx.ones((64,)),
    }
    mx.save_safetensors(str(folder / "model.safetensors"), held, metadata={"format": "mlx"})
    write_json(
        folder / "config.json",
        {**json.loads(model.config.to_json_string()), "quantization": {"group_size": 32, "bits": 4}},
    )
    tiny_tokenizer().save_pretrained(folder)
    expect(
        "mlx_lm.convert",
        "model.safetensors (metadata format: mlx), config.json with quantization",
        ["mlx_model"],
        tensors={name: np.array(tensor) for name, tensor in held.items()},
        files=beside("mlx_model", ["config.json", *TOKENIZER]),
        loader="safetensors",
        made_with=versions("mlx", "mlx-lm"),
    )


@case
def mlx_adapters(data):
    """mlx_lm.lora: the last adapters, and those of earlier steps next to them."""
    import mlx.core as mx

    folder = Path("adapters")
    folder.mkdir()
    for step in (100, 200):
        mx.random.seed(step)
        held = {
            f"model.layers.0.self_attn.q_proj.lora_{end}": mx.random.normal(shape)
            for end, shape in (("a", (8, 2)), ("b", (2, 8)))
        }
        mx.save_safetensors(str(folder / f"{step:07d}_adapters.safetensors"), held)
    mx.save_safetensors(str(folder / "adapters.safetensors"), held)
    write_json(
        folder / "adapter_config.json",
        {
            "fine_tune_type": "lora",
            "num_layers": 1,
            "lora_parameters": {"rank": 2, "scale": 20.0, "dropout": 0.0},
        },
    )
    expect(
        "mlx_lm.lora",
        "adapters.safetensors, 0000100_adapters.safetensors, adapter_config.json",
        [path("adapters", says=["0000100_adapters.safetensors"])],
        tensors={name: np.array(tensor) for name, tensor in held.items()},
        weights="adapters.safetensors",
        files=beside("adapters", ["adapter_config.json"]),
        loader="safetensors",
        made_with=versions("mlx", "mlx-lm"),
    )


@case
def mlx_npz(data):
    """weights.npz of MLX examples; bfloat16 is not in it."""
    import mlx.core as mx

    Path("mlx_model").mkdir()
    net = seeded_net()
    mx.savez(
        "mlx_model/weights.npz",
        **{name: mx.array(tensor.numpy()) for name, tensor in net.state_dict().items()},
    )
    write_json(Path("mlx_model/config.json"), {"model_type": "net", "vocab_size": 32})
    expect(
        "MLX: mx.savez",
        "weights.npz, config.json",
        ["mlx_model", path("mlx_model/weights.npz")],
        tensors=net.state_dict(),
        files=beside("mlx_model", ["config.json"]),
        loader="net",
        logits=logits_of(net),
        made_with=versions("mlx"),
    )


def spell_slices(begin, end, width):
    """SlicesPair.slice_to_str() of the rows begin:end and of all columns, which have these bounds or none."""
    return f"{begin},{end},None|" + ("None,None,None" if width is None else f"0,{width},None")


def shards_of(tensor, parts, rank, ranks):
    """The rows of a rank and SlicesPair.tuple_to_str() of them: each of the parts is cut over the ranks."""
    rows, pairs, begin, at = [], [], 0, 0
    for part in parts:
        size = part // ranks
        first = begin + rank * size
        width = tensor.shape[1] if begin else None
        rows.append(tensor[first : first + size])
        pairs.append(f"{spell_slices(at, at + size, width)}#{spell_slices(first, first + size, width)}")
        begin, at = begin + part, at + size
    return torch.cat(rows), ";".join(pairs)


def write_nanotron(root, held, parts):
    """get_path(): a file per parameter and rank of two, a directory per module. parts: of its rows."""
    for name, tensor in held.items():
        module, _, suffix = name.rpartition(".")
        folder = root / "model" / Path(*module.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        if tensor.dim() < 2:
            save_file({"data": tensor}, folder / f"model_{suffix}.safetensors", metadata={"version": "1.4"})
            continue
        for rank in range(2):
            shard, pairs = shards_of(tensor, parts.get(name, [len(tensor)]), rank, 2)
            metadata = {
                "version": "1.4",
                "local_global_slices_pairs": pairs,
                "unsharded_shape": str(tuple(tensor.shape)),
            }
            place = f"model_{suffix}_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors"
            save_file({"data": shard.clone()}, folder / place, metadata=metadata)


@case
def nanotron(data):
    torch.manual_seed(8)
    shapes = {
        "model.token_position_embeddings.pp_block.token_embedding.weight": (32, 8),
        "model.decoder.0.pp_block.input_layernorm.weight": (8,),
        "model.decoder.0.pp_block.attn.qkv_proj.weight": (16, 8),
        "model.lm_head.pp_block.weight": (32, 8),
    }
    held = {name: torch.rand(shape) for name, shape in shapes.items()}
    for step in (10, 20):
        root = Path(f"checkpoints/{step}")
        scale = {10: 0.5, 20: 1.0}[step]
        scaled = {name: tensor * scale for name, tensor in held.items()}
        write_nanotron(root, scaled, {"model.decoder.0.pp_block.attn.qkv_proj.weight": [8, 4, 4]})
        write_json(root / "model_config.json", {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 32})
        write_json(
            root / "checkpoint_metadata.json",
            {"version": "1.4", "tp": 2, "dp": 1, "metas": {"last_train_step": step}},
        )
        (root / "config.yaml").write_text("general:\n  project: tiny\n")
        (root / "optimizer").mkdir()
        torch.save(
            {"state": {0: {"exp_avg": torch.zeros(32, 8)}}, "names": {0: "lm_head"}},
            root / "optimizer/optimizer_pp-0-of-1_dp-0-of-1_tp-0-of-1.pt",
        )
        (root / "lr_scheduler").mkdir()
        torch.save({"last_epoch": step}, root / "lr_scheduler/lr_scheduler_pp-0-of-1_dp-0-of-1_tp-0-of-1.pt")
    Path("checkpoints/latest.txt").write_text("20")
    expect(
        "Nanotron",
        "checkpoints/latest.txt, N/model/.../model_weight_pp-rank-P-of-N_tp-rank-T-of-N.safetensors",
        [path("checkpoints", says=["20"]), "checkpoints/20"],
        tensors=held,
        left_out=["optimizer"],
        loader="torch",
        made_with=versions("torch", "safetensors"),
        source="huggingface/nanotron src/nanotron/serialize/weights.py, utils.py, parallel/parameters.py",
    )


def write_hub(index):
    """Two shards of transformers, and consolidated.safetensors for the company's own loader next to them."""
    model = tiny_llama()
    folder = Path("model")
    model.save_pretrained(folder, max_shard_size="3KB")
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(held, folder / "consolidated.safetensors")
    write_json(folder / "params.json", {"dim": 8, "n_layers": 1, "vocab_size": 32})
    if not index:
        (folder / "model.safetensors.index.json").unlink()
    return dict(
        tensors=held,
        files=beside("model", ["config.json", "generation_config.json"]),
        loader="transformers",
        logits=logits_of(model),
        made_with=versions("transformers", "safetensors"),
        source="mistralai/Mistral-7B-Instruct-v0.3 and others on the hub: names of their files",
    )


@case
def hub_consolidated(data):
    expect(
        "the hub: weights twice, for transformers and for another loader",
        "model-0000I-of-0000N.safetensors, model.safetensors.index.json, consolidated.safetensors",
        [path("model", says=["consolidated.safetensors"])],
        **write_hub(index=True),
    )


@case
def hub_no_index(data):
    expect(
        "the hub: the same without the index",
        "model-0000I-of-0000N.safetensors, consolidated.safetensors",
        [path("model", says=["consolidated.safetensors"])],
        **write_hub(index=False),
    )
