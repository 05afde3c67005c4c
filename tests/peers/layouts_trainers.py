"""Layouts of trainers, and of libraries with a from_pretrained of their own: transformers, peft, lightning,
diffusers, sentence-transformers, timm, keras.
"""

import shutil
from pathlib import Path

import torch
from layouts_common import (
    IMAGE,
    TOKENIZER,
    TOKENS,
    VALUES,
    VOCAB,
    beside,
    case,
    expect,
    logits_of,
    net_loss,
    path,
    refused,
    seeded_net,
    tiny_llama,
    tiny_tokenizer,
    trained_net,
    versions,
    write_json,
)
from safetensors.torch import load_file

HF = ["config.json", "generation_config.json"]


def output_of(model, *inputs):
    model.eval()
    with torch.no_grad():
        return model(*inputs)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        row = TOKENS[i % 2]
        return {"input_ids": row, "labels": row}


def trainer_run(model, run, *, steps=4, save_steps=2, **more):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(run),
        max_steps=steps,
        save_steps=save_steps,
        per_device_train_batch_size=2,
        report_to=[],
        learning_rate=1e-2,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
        **more,
    )
    trainer = Trainer(model, arguments, train_dataset=Rows(), processing_class=tiny_tokenizer())
    trainer.train()
    return trainer


def hf_files(folder):
    return [name for name in HF + TOKENIZER if (folder / name).is_file()]


@case
def hf_trainer(data):
    run = data / "run"
    model = trainer_run(tiny_llama(), run).model
    older, newer = (run / name for name in ("checkpoint-2", "checkpoint-4"))
    expect(
        "Trainer of transformers",
        "RUN/checkpoint-N/model.safetensors, optimizer.pt, trainer_state.json",
        [
            path("run", says=["checkpoint-4"]),
            "run/checkpoint-4",
            path(
                "run/checkpoint-2",
                tensors=load_file(older / "model.safetensors"),
                files=beside("run/checkpoint-2", hf_files(older)),
            ),
            path("run/checkpoint-4/model.safetensors", left_out=[]),
        ],
        tensors=load_file(newer / "model.safetensors"),
        files=beside("run/checkpoint-4", hf_files(newer)),
        left_out=["optimizer"],
        loader="transformers",
        logits=logits_of(model),
        made_with=versions("transformers", "accelerate", "torch"),
    )


@case
def hf_trainer_saved(data):
    """A run that ended with save_model(): its directory is the model, and has checkpoints as well."""
    run = data / "run"
    trainer = trainer_run(tiny_llama(tied=True), run, save_only_model=True)
    shutil.rmtree(run / "checkpoint-2")
    trainer.save_model()
    expect(
        "Trainer.save_model() of transformers",
        "RUN/model.safetensors beside RUN/checkpoint-N",
        ["run"],
        tensors=load_file(run / "model.safetensors"),
        files=beside("run", hf_files(run)),
        loader="transformers",
        logits=logits_of(trainer.model),
        made_with=versions("transformers", "accelerate", "torch"),
    )


def lora_of(model):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # they begin as zeros, which any mistake would give as well
            torch.nn.init.normal_(parameter)
    return model


@case
def hf_trainer_lora(data):
    run = data / "run"
    model = trainer_run(lora_of(tiny_llama()), run, steps=2).model
    step = run / "checkpoint-2"
    expect(
        "Trainer of transformers with a PEFT adapter",
        "RUN/checkpoint-N/adapter_model.safetensors",
        ["run", "run/checkpoint-2"],
        tensors=load_file(step / "adapter_model.safetensors"),
        weights="adapter_model.safetensors",
        left_out=["optimizer"],
        loader="peft",
        logits=logits_of(model),
        files=beside("run/checkpoint-2", ["adapter_config.json", *hf_files(step)]),
        made_with=versions("transformers", "peft", "torch"),
    )


@case
def peft_adapter(data):
    model = lora_of(tiny_llama())
    model.save_pretrained(data / "adapter")
    expect(
        "PEFT save_pretrained()",
        "adapter_model.safetensors, adapter_config.json",
        ["adapter", path("adapter/adapter_model.safetensors", files={})],
        tensors=load_file(data / "adapter/adapter_model.safetensors"),
        weights="adapter_model.safetensors",
        files=beside("adapter", ["adapter_config.json"]),
        loader="peft",
        logits=logits_of(model),
        made_with=versions("peft", "torch"),
    )


@case
def peft_beside_base(data):
    """The adapter lies in the directory of its base model: from_pretrained there loads the base."""
    model = tiny_llama()
    model.save_pretrained(data / "model")
    tensors = load_file(data / "model/model.safetensors")
    lora_of(model).save_pretrained(data / "model")
    expect(
        "PEFT save_pretrained() into the directory of the base model",
        "model.safetensors, adapter_model.safetensors",
        [path("model", says=["adapter_model.safetensors"])],
        tensors=tensors,
        files=beside("model", HF),
        made_with=versions("peft", "torch"),
    )


@case
def hf_variants(data):
    """The plain file and a variant: from_pretrained takes the plain one."""
    model = tiny_llama()
    model.save_pretrained(data / "model")
    half = {name: tensor.half() for name, tensor in load_file(data / "model/model.safetensors").items()}
    logits = logits_of(model)
    model.half().save_pretrained(data / "model", variant="fp16")
    model.float().config.dtype = torch.float32
    model.config.save_pretrained(data / "model")
    expect(
        "save_pretrained(variant='fp16') of transformers",
        "model.safetensors, model.fp16.safetensors",
        [
            path("model", says=["model.fp16.safetensors"]),
            path(
                "model --variant fp16",
                tensors=half,
                says=["model.safetensors"],
                edited={"config.json": {"dtype": "float16"}},
                logits=False,
            ),
        ],
        tensors=load_file(data / "model/model.safetensors"),
        files=beside("model", HF),
        loader="transformers",
        logits=logits,
        made_with=versions("transformers", "torch"),
    )


def lightning_module():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = seeded_net()

        def training_step(self, batch, _):
            return net_loss(self.net, batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module()


@case
def lightning_ckpt(data):
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    loader = torch.utils.data.DataLoader(torch.tensor(TOKENS), batch_size=2)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=CSVLogger(data),
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(save_top_k=-1)],
        enable_model_summary=False,
    )
    trainer.fit(lightning_module(), loader)
    folder = "lightning_logs/version_0/checkpoints"
    names = ["epoch=0-step=1.ckpt", "epoch=1-step=2.ckpt"]
    first, last = (torch.load(data / folder / name, weights_only=False)["state_dict"] for name in names)
    expect(
        "Trainer of Lightning",
        "lightning_logs/version_N/checkpoints/epoch=E-step=S.ckpt",
        [path(outer, says=[names[1]]) for outer in ("lightning_logs", "lightning_logs/version_0", folder)]
        + [f"{folder}/{names[1]}", path(f"{folder}/{names[0]}", tensors=first)],
        tensors=last,
        left_out=["optimizer"],
        loader="torch",
        made_with=versions("lightning", "torch"),
    )


@case
def pytorch_ddp(data):
    """The checkpoint of PyTorch's tutorials; DistributedDataParallel and torch.compile wrap the model."""
    net, optimizer = trained_net()
    (data / "checkpoints").mkdir()
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in net.state_dict().items()}
    torch.save(
        {
            "epoch": 3,
            "model_state_dict": wrapped,
            "optimizer_state_dict": optimizer.state_dict(),
            "loss": 0.25,
        },
        data / "checkpoints/epoch_3.pt",
    )
    expect(
        "torch.save of a training loop with DistributedDataParallel",
        "{'epoch', 'model_state_dict', 'optimizer_state_dict', 'loss'}",
        ["checkpoints", "checkpoints/epoch_3.pt"],
        tensors=net.state_dict(),
        left_out=["optimizer"],
        loader="net",
        logits=logits_of(net),
        made_with=versions("torch"),
    )


@case
def diffusers_pipeline(data):
    from diffusers import DDIMScheduler, LDMPipeline, UNet2DModel, VQModel

    torch.manual_seed(5)
    unet = UNet2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(4, 8),
        norm_num_groups=2,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )
    vqvae = VQModel(block_out_channels=(4,), latent_channels=4, norm_num_groups=2, num_vq_embeddings=8)
    LDMPipeline(vqvae=vqvae, unet=unet, scheduler=DDIMScheduler()).save_pretrained(data / "pipeline")
    weights = "diffusion_pytorch_model.safetensors"
    held = {part: load_file(data / "pipeline" / part / weights) for part in ("unet", "vqvae")}
    expect(
        "save_pretrained() of a diffusers pipeline",
        "model_index.json, unet/diffusion_pytorch_model.safetensors",
        [
            refused("pipeline", "fsdp-convert pipeline/unet out", "pipeline/vqvae"),
            "pipeline/unet",
            path("pipeline/vqvae", tensors=held["vqvae"], files=beside("pipeline/vqvae", ["config.json"])),
        ],
        tensors=held["unet"],
        weights=weights,
        files=beside("pipeline/unet", ["config.json"]),
        loader="diffusers",
        logits=output_of(unet, VALUES, 3).sample.numpy(),
        made_with=versions("diffusers", "torch"),
    )


@case
def sentence_transformers_dense(data):
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel

    try:
        from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
    except ImportError:
        from sentence_transformers.models import Dense, Pooling, Transformer

    torch.manual_seed(2)
    bert = BertModel(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=16,
        )
    )
    bert.save_pretrained(data / "bert")
    tiny_tokenizer().save_pretrained(data / "bert")
    transformer = Transformer(str(data / "bert"))
    model = SentenceTransformer(modules=[transformer, Pooling(8), Dense(8, 4)], device="cpu")
    model.save(str(data / "model"))
    shutil.rmtree(data / "bert")
    names = [
        str(one.relative_to(data / "model"))
        for one in sorted((data / "model").rglob("*"))
        if one.is_file() and one.suffix != ".safetensors" and one.name != "README.md"
    ]
    expect(
        "SentenceTransformer.save()",
        "modules.json, model.safetensors, 1_Pooling/, 2_Dense/model.safetensors",
        ["model"],
        tensors=load_file(data / "model/model.safetensors"),
        files=beside("model", names),
        parts={"2_Dense": load_file(data / "model/2_Dense/model.safetensors")},
        loader="sentence_transformers",
        logits=model.encode(["w5 w9 w30"]),
        made_with=versions("sentence-transformers", "transformers", "torch"),
    )


VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 2}


def timm_model():
    import timm

    torch.manual_seed(4)
    return timm.create_model("vit_tiny_patch16_224", num_classes=4, **VIT)


@case
def timm_hub(data):
    """The files that push_to_hf_hub() uploads."""
    from timm.models import save_for_hf

    model = timm_model()
    save_for_hf(model, data / "model", model_args=VIT, safe_serialization=True)
    expect(
        "save_for_hf() of timm",
        "config.json with architecture, model.safetensors",
        ["model"],
        tensors=load_file(data / "model/model.safetensors"),
        files=beside("model", ["config.json"]),
        loader="timm",
        logits=output_of(model, IMAGE).numpy(),
        made_with=versions("timm", "torch"),
    )


@case
def timm_train(data):
    """train.py of timm leaves the model, its average (ema) and the optimizer in checkpoint-E.pth.tar."""
    import argparse

    from timm.utils import CheckpointSaver, ModelEmaV3

    model = timm_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = ModelEmaV3(model)
    model(torch.rand(1, 3, 16, 16)).sum().backward()
    optimizer.step()
    average.update(model, step=1)
    folder = data / "output/train/20261123-tiny"
    folder.mkdir(parents=True)
    saver = CheckpointSaver(
        model,
        optimizer,
        args=argparse.Namespace(model="vit_tiny_patch16_224"),
        model_ema=average,
        checkpoint_dir=str(folder),
        recovery_dir=str(folder),
        max_history=2,
    )
    saver.save_checkpoint(0, metric=50.0)
    name = "output/train/20261123-tiny"
    expect(
        "train.py of timm",
        "output/train/NAME/checkpoint-E.pth.tar, last.pth.tar, model_best.pth.tar",
        [
            "output/train",
            name,
            f"{name}/checkpoint-0.pth.tar",
            f"{name}/last.pth.tar",
            path(f"{name}/last.pth.tar --part ema", tensors=average.module.state_dict(), left_out=[]),
        ],
        tensors=model.state_dict(),
        left_out=["optimizer", "ema"],
        loader="torch",
        made_with=versions("timm", "torch"),
    )


@case
def keras_file(data):
    import io
    import zipfile

    import h5py
    import keras

    keras.utils.set_random_seed(6)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    model.save(data / "model.keras")
    held = {}
    with zipfile.ZipFile(data / "model.keras") as archive, h5py.File(
        io.BytesIO(archive.read("model.weights.h5"))
    ) as weights:
        weights.visititems(
            lambda name, one: held.__setitem__(name, one[()]) if hasattr(one, "dtype") else None
        )
    model_only = {name: value for name, value in held.items() if not name.startswith("optimizer")}
    expect(
        "model.save('x.keras') of Keras 3",
        "a zip: config.json, metadata.json, model.weights.h5",
        ["model.keras"],
        tensors=model_only,
        left_out=["optimizer"],
        made_with=versions("keras", "h5py"),
    )


@case
def transformers_bin(data):
    """transformers before 4.35, and torch.save of others: pytorch_model.bin, of two files with an index."""
    model = tiny_llama()
    folder = data / "model"
    model.save_pretrained(folder)
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(held)
    weight_map = {}
    for i, some in enumerate((names[:6], names[6:]), 1):
        file = f"pytorch_model-{i:05d}-of-00002.bin"
        torch.save({name: held[name] for name in some}, folder / file)
        weight_map |= dict.fromkeys(some, file)
    size = sum(tensor.nbytes for tensor in held.values())
    write_json(
        folder / "pytorch_model.bin.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map}
    )
    expect(
        "save_pretrained(safe_serialization=False) of transformers 4",
        "pytorch_model-i-of-N.bin, pytorch_model.bin.index.json",
        ["model"],
        tensors=held,
        files=beside("model", HF),
        loader="transformers",
        logits=logits_of(model),
        made_with=versions("transformers", "torch"),
    )
