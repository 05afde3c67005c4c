"""Layouts that several ranks write: Accelerate, transformers' shards, Lightning's directories, torchtitan,
verl, SkyRL, DeepSpeed, Megatron. Two processes with gloo.
"""

import importlib
import random
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from layouts_common import (
    TOKENIZER,
    TOKENS,
    Net,
    beside,
    case,
    expect,
    logits_of,
    net_loss,
    path,
    ranks,
    refused,
    seeded_net,
    tiny_llama,
    tiny_tokenizer,
    versions,
    write_json,
)

STEPS = 2


def mesh():
    return torch.distributed.device_mesh.init_device_mesh(
        "cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",)
    )


def fsdp2(net):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net, mesh=mesh())


def fsdp1(net):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)


def train(model, loss=net_loss):
    """All ranks have the same batch, so that one process computes what they do."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model, torch.tensor(TOKENS)).backward()
        optimizer.step()
    return optimizer


def llama_loss(model, tokens):
    return model(tokens, labels=tokens).loss


def keep_whole(model, rank):
    """The whole tensors, gathered by PyTorch itself: what the result is compared with."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(whole, "../whole.pt")


def whole():
    place = Path("../whole.pt")
    tensors = torch.load(place)
    place.unlink()
    return tensors


def whole_net():
    net, tensors = Net(), whole()
    net.load_state_dict(tensors)
    return tensors, logits_of(net)


def whole_llama():
    model, tensors = tiny_llama(), whole()
    model.load_state_dict(tensors)
    return tensors, logits_of(model)


def accelerate_rank(rank, folder, version, kind, use_dcp):
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.checkpointing import save_accelerator_state
    from accelerate.state import PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    PartialState(cpu=True)  # its logger wants one
    net = (fsdp1 if version == 1 else fsdp2)(seeded_net())
    optimizer = train(net)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
    accelerator = types.SimpleNamespace(
        process_index=rank,
        num_processes=2,
        is_main_process=rank == 0,
        wait_for_everyone=torch.distributed.barrier,
        device=torch.device("cpu"),
    )
    save_fsdp_model(plugin, accelerator, net, folder, use_dcp=use_dcp)
    save_fsdp_optimizer(plugin, accelerator, optimizer, net, folder, use_dcp=use_dcp)
    save_accelerator_state(Path(folder), [], [], [scheduler], [], rank, 2)
    keep_whole(net, rank)


def write_accelerate(version, kind, use_dcp=True):
    """Calls what Accelerator.save_state() calls, in a project directory with automatic_checkpoint_naming."""
    folder = "run/checkpoints/checkpoint_0"
    Path(folder).mkdir(parents=True)
    ranks(accelerate_rank, folder, version, kind, use_dcp)
    tensors, logits = whole_net()
    outer = ["run", "run/checkpoints", folder]
    common = {
        "tensors": tensors,
        "left_out": ["optimizer"],
        "loader": "net",
        "logits": logits,
        "made_with": versions("accelerate", "torch"),
    }
    return folder, outer, common


@case
def accelerate_fsdp1(data):
    folder, outer, common = write_accelerate(1, "SHARDED_STATE_DICT")
    expect(
        "Accelerate with FSDP1: save_state(), SHARDED_STATE_DICT",
        "checkpoint_N/pytorch_model_fsdp_0/, optimizer_0/",
        [
            *outer,
            path(f"{folder}/pytorch_model_fsdp_0", left_out=[]),
            refused(f"{folder}/optimizer_0", "optimizer"),
        ],
        **common,
    )


@case
def accelerate_fsdp2(data):
    folder, outer, common = write_accelerate(2, "SHARDED_STATE_DICT")
    expect(
        "Accelerate with FSDP2: save_state()",
        "checkpoint_N/pytorch_model_fsdp_0/, optimizer_0/, random_states_R.pkl",
        [*outer, path(f"{folder}/pytorch_model_fsdp_0", left_out=[])],
        **common,
    )


@case
def accelerate_full(data):
    folder, outer, common = write_accelerate(1, "FULL_STATE_DICT")
    expect(
        "Accelerate with FSDP1: save_state(), FULL_STATE_DICT",
        "checkpoint_N/pytorch_model_fsdp.bin, optimizer.bin",
        [*outer, path(f"{folder}/pytorch_model_fsdp.bin", left_out=[])],
        **common,
    )


@case
def accelerate_rank_files(data):
    folder, outer, common = write_accelerate(2, "SHARDED_STATE_DICT", use_dcp=False)
    expect(
        "Accelerate: save_state(use_dcp=False)",
        "checkpoint_N/pytorch_model_fsdp_0_rankR.bin, optimizer_0_rankR.bin",
        [*outer, path(folder + "/pytorch_model_fsdp_0_rank{r}.bin", quoted=True, left_out=[])],
        **common,
    )


def sharded_rank(rank, folder):
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = fsdp2(tiny_llama())
    writer = HuggingFaceStorageWriter(path=folder, save_distributed=True, enable_consolidation=False)
    dcp.save(get_model_state_dict(model), storage_writer=writer)
    keep_whole(model, rank)


@case
def transformers_sharded(data):
    """save_pretrained(distributed_checkpoint=True) calls this writer."""
    folder = data / "model/sharded"
    tiny_llama().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    tiny_tokenizer().save_pretrained(folder)
    ranks(sharded_rank, str(folder))
    tensors, logits = whole_llama()
    expect(
        "save_pretrained(distributed_checkpoint=True) of transformers 5",
        "shard-0000R-model-00001-of-0000N.safetensors, config.json",
        ["model", "model/sharded"],
        tensors=tensors,
        loader="transformers",
        logits=logits,
        files=beside("model/sharded", ["config.json", "generation_config.json", *TOKENIZER]),
        made_with=versions("transformers", "torch"),
    )


def states_of(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    return get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)


def lightning_rank(rank, folder):
    from lightning.fabric.strategies.fsdp import _METADATA_FILENAME
    from lightning.fabric.strategies.model_parallel import _distributed_checkpoint_save

    net = fsdp2(seeded_net())
    model, optimizer = states_of(net, train(net))
    model = {f"net.{name}": tensor for name, tensor in model.items()}
    _distributed_checkpoint_save({"model": model, "optimizer_0": optimizer}, Path(folder))
    if rank == 0:  # the rest of the checkpoint, as ModelParallelStrategy.save_checkpoint writes it
        rest = {
            "epoch": 1,
            "global_step": STEPS,
            "pytorch-lightning_version": "2.6.6",
            "loops": {},
            "lr_schedulers": [],
            "hyper_parameters": {"lr": 1e-2},
        }
        torch.save(rest, Path(folder) / _METADATA_FILENAME)
    keep_whole(net, rank)


@case
def lightning_sharded(data):
    outer = "lightning_logs/version_0/checkpoints"
    folder = f"{outer}/epoch=0-step=2.ckpt"
    Path(folder).mkdir(parents=True)
    ranks(lightning_rank, folder)
    expect(
        "Lightning: FSDPStrategy or ModelParallelStrategy, sharded",
        "checkpoints/epoch=E-step=S.ckpt/: .metadata, *.distcp, meta.pt",
        ["lightning_logs", "lightning_logs/version_0", outer, folder],
        tensors={f"net.{name}": tensor for name, tensor in whole().items()},
        left_out=["optimizer"],
        loader="torch",
        made_with=versions("lightning", "torch"),
    )


def titan_rank(rank, folder):
    """The model's entries lie at the root, those of the others below their names."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    net = fsdp2(seeded_net())
    optimizer = train(net)
    model, _ = states_of(net, optimizer)
    flat = get_optimizer_state_dict(
        net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    for step in (1, STEPS):
        held = {
            **model,
            "optimizer": flat,
            "lr_scheduler": {"last_epoch": step, "_step_count": step + 1},
            "train_state": {
                "step": torch.tensor(step, dtype=torch.int32),
                "ntokens_seen": torch.tensor(16 * step),
            },
            "dataloader": {f"dp_rank_{rank}": b"state", "world_size": 2},
        }
        if step == 1:  # the first step stays small: it is there to be older
            held = {
                **{name: tensor * 0 for name, tensor in model.items()},
                "train_state": held["train_state"],
            }
        dcp.save(held, checkpoint_id=f"{folder}/step-{step}")
    keep_whole(net, rank)


@case
def torchtitan(data):
    folder = "outputs/checkpoint"
    Path(folder).mkdir(parents=True)
    ranks(titan_rank, folder)
    tensors, logits = whole_net()
    expect(
        "torchtitan",
        "outputs/checkpoint/step-N/: .metadata, *.distcp",
        ["outputs", folder, f"{folder}/step-{STEPS}"],
        tensors=tensors,
        left_out=["optimizer"],
        loader="net",
        logits=logits,
        made_with=versions("torch"),
        source="pytorch/torchtitan torchtitan/components/checkpoint.py (_flattened_model_states_sd)",
    )


def app_rank(rank, folder):
    net = fsdp2(seeded_net())
    model, optimizer = states_of(net, train(net))
    average = {name: tensor * 0.5 for name, tensor in model.items()}
    dcp.save(
        {"app": {"model": model, "optim": optimizer, "ema": average}, "step": STEPS}, checkpoint_id=folder
    )
    keep_whole(net, rank)


@case
def dcp_app(data):
    """The AppState of PyTorch's recipe for DCP, with an average next to the model."""
    ranks(app_rank, "checkpoint")
    tensors, logits = whole_net()
    average = {name: tensor * 0.5 for name, tensor in tensors.items()}
    expect(
        "torch.distributed.checkpoint of {'app': AppState}",
        ".metadata, *.distcp; entries app.model.*, app.optim.*",
        ["checkpoint", path("checkpoint --part ema", tensors=average, left_out=[], logits=False)],
        tensors=tensors,
        left_out=["optimizer", "ema"],
        loader="net",
        logits=logits,
        made_with=versions("torch"),
    )


def rng_state():
    return {
        "cpu": torch.get_rng_state()[:64],
        "numpy": np.random.RandomState(0).get_state()[1][:16],
        "random": random.Random(0).getstate()[1][:8],
    }


def verl_rank(rank, folder):
    """FSDPCheckpointManager.save_checkpoint; random states are cut short."""
    torch.manual_seed(7)
    model = fsdp2(tiny_llama())
    optimizer = train(model, llama_loss)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    place = f"world_size_2_rank_{rank}.pt"
    torch.save(model.state_dict(), f"{folder}/model_{place}")
    torch.save(optimizer.state_dict(), f"{folder}/optim_{place}")
    torch.save({"lr_scheduler": scheduler.state_dict(), "rng": rng_state()}, f"{folder}/extra_state_{place}")
    keep_whole(model, rank)


def write_verl(folder):
    model = tiny_llama()
    hf = Path(folder) / "huggingface"
    model.config.save_pretrained(hf)
    model.generation_config.save_pretrained(hf)
    tiny_tokenizer().save_pretrained(hf)
    write_json(Path(folder) / "fsdp_config.json", {"FSDP_version": 2, "world_size": 2})
    ranks(verl_rank, folder)
    tensors, logits = whole_llama()
    return {
        "tensors": tensors,
        "logits": logits,
        "left_out": ["optimizer"],
        "loader": "transformers",
        "files": beside(f"{folder}/huggingface", ["config.json", "generation_config.json", *TOKENIZER]),
        "made_with": versions("torch", "transformers"),
    }


@case
def verl(data):
    step = "checkpoints/project/run/global_step_2"
    common = write_verl(f"{step}/actor")
    torch.save({"_snapshot": {"_main_snapshot": {"_num_yielded": 2}}}, f"{step}/data.pt")
    Path("checkpoints/project/run/latest_checkpointed_iteration.txt").write_text("2")
    expect(
        "verl",
        "global_step_N/actor/model_world_size_W_rank_R.pt, huggingface/",
        [
            "checkpoints/project/run",
            step,
            f"{step}/actor",
            path(f"{step}/actor/model_world_size_{{W}}_rank_{{r}}.pt", quoted=True, left_out=[]),
        ],
        **common,
        source="volcengine/verl verl/utils/checkpoint/fsdp_checkpoint_manager.py, trainer/ppo/ray_trainer.py",
    )


@case
def skyrl(data):
    """Policy and critic lie side by side: the person has to say which."""
    step = "ckpts/global_step_2"
    common = write_verl(f"{step}/policy")
    shutil.copytree(f"{step}/policy", f"{step}/critic", ignore=shutil.ignore_patterns("optim*", "extra*"))
    torch.save({"global_step": 2, "config": {}}, f"{step}/trainer_state.pt")
    Path("ckpts/latest_ckpt_global_step.txt").write_text("2")
    expect(
        "SkyRL",
        "ckpts/global_step_N/policy/model_world_size_W_rank_R.pt, critic/, huggingface/",
        [
            refused("ckpts", "fsdp-convert ckpts/global_step_2/policy out", "critic"),
            refused(step, f"fsdp-convert {step}/policy out", "critic"),
            f"{step}/policy",
        ],
        **common,
        source="NovaSky-AI/SkyRL skyrl-train/skyrl_train/distributed/fsdp_strategy.py, trainer.py",
    )


def deepspeed_rank(rank, stage):
    import deepspeed

    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # compiling it takes minutes
    net = seeded_net()
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2), config=config
    )
    engine.backward(net_loss(engine, torch.tensor(TOKENS)))
    engine.step()
    engine.save_checkpoint("run")


def write_deepspeed(stage, *more):
    ranks(deepspeed_rank, stage)
    sys.path.insert(0, "run")
    masters = importlib.import_module("zero_to_fp32").get_fp32_state_dict_from_zero_checkpoint("run")
    sys.path.remove("run")
    for script in Path("run").glob("*.py"):
        script.write_text("# zero_to_fp32.py of DeepSpeed: left out here\n")
    expect(
        f"DeepSpeed ZeRO-{stage}",
        "RUN/latest, global_stepN/*_optim_states.pt, zero_to_fp32.py",
        ["run", "run/global_step1", *more],
        tensors=masters,
        left_out=("optimizer", "lr_scheduler"),
        made_with=versions("deepspeed", "torch"),
    )


@case
def deepspeed_zero2(data):
    write_deepspeed(2)


@case
def deepspeed_zero3(data):
    """The model files hold no elements: to convert one gives no model."""
    file = "run/global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt"
    write_deepspeed(3, refused(file, "DeepSpeed"))


def megatron_rank(rank, folder):
    from megatron.core import dist_checkpointing

    torch.manual_seed(3)
    torch.cuda.synchronize = lambda: None  # the writer waits for a device, and sends its status from one
    torch.cuda.current_device = lambda: "cpu"
    shard = dist_checkpointing.ShardedTensor.from_rank_offsets
    names = {
        "embedding.word_embeddings.weight": (16, 8),
        "decoder.layers.self_attention.linear_qkv.weight": (12, 8),
    }
    held = {name: shard(name, torch.rand(shape), (0, rank, 2)) for name, shape in names.items()}
    held |= {
        f"optimizer.state.exp_avg.{name}": shard(
            f"optimizer.state.exp_avg.{name}", torch.rand(shape), (0, rank, 2)
        )
        for name, shape in names.items()
    }
    dist_checkpointing.save({**held, "iteration": 2, "checkpoint_version": 3.0}, folder)


@case
def megatron(data):
    Path("run/iter_0000002").mkdir(parents=True)
    ranks(megatron_rank, "run/iter_0000002")
    Path("run/latest_checkpointed_iteration.txt").write_text("2")
    expect(
        "Megatron-LM, Megatron-Core",
        "RUN/latest_checkpointed_iteration.txt, iter_N/: metadata.json, common.pt, *.distcp",
        [refused("run", "Megatron", "Megatron-Bridge"), refused("run/iter_0000002", "Megatron")],
        made_with=versions("megatron-core", "torch"),
    )


@case
def nemo(data):
    run = Path("results/checkpoints/model--step=2-epoch=0-last")
    (run / "weights").mkdir(parents=True)
    ranks(megatron_rank, str(run / "weights"))
    write_json(run / "context/io.json", {"objects": {}})
    (run / "context/model.yaml").write_text("_target_: nemo.collections.llm.LlamaModel\n")
    expect(
        "NeMo 2",
        "checkpoints/NAME--step=N/weights/, context/",
        [
            refused("results", "NeMo"),
            refused(str(run), "NeMo", "llm.export_ckpt"),
            refused(str(run / "weights"), "NeMo"),
        ],
        source="NVIDIA/NeMo nemo/lightning/io/pl.py, nemo/lightning/ckpt_utils.py",
        made_with=versions("megatron-core", "torch"),
    )
