"""An optimizer of Trainer, which numbers its parameters, becomes one with names that PyTorch loads.

Models whose parameters are in another order than their names train two steps in transformers' Trainer.
fsdp-convert makes a DCP directory, which FSDP2 loads with set_optimizer_state_dict: every moment is that of
its parameter. DeepSpeed's universal checkpoint has them in the folder of the parameter. Numbers without names
are refused.

usage: trainer_optim.py FSDP_CONVERT
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (get_model_state_dict, get_optimizer_state_dict,
                                                     set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard
from transformers import (BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig,
                          LlamaForCausalLM, OPTConfig, OPTForCausalLM, Trainer, TrainingArguments)

CONVERT = Path(sys.argv[1]).resolve()
VOCAB, LAYERS = 40, 11  # layer 10 is before layer 2 in the order of names

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False, attention_bias=True)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=LAYERS, n_head=2,
                                               n_positions=16)),
    "opt": lambda: OPTForCausalLM(OPTConfig(
        vocab_size=VOCAB, hidden_size=16, ffn_dim=24, num_hidden_layers=LAYERS, num_attention_heads=2,
        word_embed_proj_dim=16, max_position_embeddings=16)),
    "bert": lambda: BertForMaskedLM(BertConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS,
        num_attention_heads=2, max_position_embeddings=16)),
}


def run(*words, status=0):
    done = subprocess.run([CONVERT, *map(str, words), "--no-sync"], capture_output=True, text=True,
                          check=False)
    assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def train(model, folder, **options):
    """Trains two steps. Returns {name of a parameter: its state} and the groups' names."""
    torch.manual_seed(0)
    rows = [{key: torch.randint(0, VOCAB, (8,)) for key in ("input_ids", "labels")} for _ in range(4)]
    trainer = Trainer(model, TrainingArguments(
        str(folder), max_steps=2, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, weight_decay=0.1, **options), train_dataset=rows)
    trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
    assert len(groups) == 2 and all(groups)
    state = {names[id(parameter)]: {kind: value.clone() for kind, value in one.items()
                                    if torch.is_tensor(value)}
             for parameter, one in optimizer.state.items()}
    return state, groups


def same(found, wanted):
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    return torch.equal(found, wanted)


def loads(kind, folder):
    """FSDP2 takes the DCP directory: moments and groups are those of the names."""
    state, groups = train(MODELS[kind](), folder / "run")
    said = run(folder / "run/checkpoint-2", folder / "out.dcp", "--to", "dcp")
    assert "that the optimizer numbers get names" in said, said
    model = MODELS[kind]()
    fully_shard(model)
    decayed = set(groups[0])
    optimizer = torch.optim.AdamW([
        {"params": [one for name, one in model.named_parameters() if (name in decayed) == first],
         "weight_decay": 0.1 if first else 0.0} for first in (True, False)])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    named = dict(model.named_parameters())  # files have one name of a tied weight
    loaded = {"model": {name: one for name, one in get_model_state_dict(model).items() if name in named},
              "optim": get_optimizer_state_dict(model, optimizer)}
    assert loaded["optim"]["state"].keys() == state.keys()
    dcp.load(loaded, checkpoint_id=folder / "out.dcp")
    set_optimizer_state_dict(model, optimizer, loaded["optim"])
    for name, parameter in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            assert same(optimizer.state[parameter][moment], state[name][moment]), (kind, name, moment)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    return state


def is_universal(state, folder):
    run(folder / "run/checkpoint-2", folder / "universal", "--to", "universal")
    (zero,) = (folder / "universal").rglob("zero")
    assert {path.name for path in zero.iterdir() if path.is_dir()} == state.keys()
    for name, one in state.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            found = torch.load(zero / name / f"{moment}.pt", weights_only=False)["param"]
            assert torch.equal(found.reshape(one[moment].shape), one[moment]), (name, moment)


def refusals(folder):
    """A model that is not known; an optimizer whose moments have other shapes; another model."""
    source = folder / "run/checkpoint-2"
    config = source / "config.json"
    text = config.read_text()
    config.write_text(json.dumps(json.loads(text) | {"model_type": "another"}))
    said = run(source, folder / "no", "--to", "dcp", status=2)
    assert all(one in said for one in ("numbers its", "no order of the parameters", "--only model")), said
    run(source, folder / "model.dcp", "--to", "dcp", "--only", "model")
    run(source, folder / "numbers.dcp", "--to", "dcp", "--names", "keep")
    # pytorch_model.bin has the order of the model.
    from safetensors.torch import load_file
    stored = load_file(source / "model.safetensors")
    order = [name for name, _ in MODELS["llama"]().named_parameters()]
    torch.save({name: stored[name] for name in order}, source / "pytorch_model.bin")
    os.rename(source / "model.safetensors", folder / "model.safetensors")
    run(source, folder / "bin.dcp", "--to", "dcp")
    found = dcp.FileSystemReader(folder / "bin.dcp").read_metadata().state_dict_metadata
    assert f"optim.state.{order[-1]}.exp_avg" in found
    torch.save({name: stored[name] for name in order[1:]}, source / "pytorch_model.bin")
    assert "the model has" in run(source, folder / "no", "--to", "dcp", status=2)
    order[0], order[1] = order[1], order[0]
    torch.save({name: stored[name] for name in order}, source / "pytorch_model.bin")
    assert "does not have the shape of" in run(source, folder / "no", "--to", "dcp", status=2)
    os.remove(source / "pytorch_model.bin")
    config.write_text(text)


def adafactor(folder):
    train(MODELS["llama"](), folder / "ada", optim="adafactor")
    said = run(folder / "ada/checkpoint-2", folder / "no", "--to", "dcp", status=2)
    assert "does not have the shape of" in said, said


def param_names(folder):
    """Names that the optimizer has itself decide, whatever the order of its groups."""
    source = folder / "named.pt"
    model = MODELS["gpt2"]()
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": named[7:]}, {"params": named[:7], "lr": 0.5}])
    for _, parameter in named:
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    run(source, folder / "named.dcp", "--to", "dcp")
    wanted = {f"optimizer.state.{name}.exp_avg": optimizer.state[parameter]["exp_avg"]
              for name, parameter in named}
    loaded = {key: torch.zeros_like(value) for key, value in wanted.items()}
    dcp.load(loaded, checkpoint_id=folder / "named.dcp")
    assert all(torch.equal(loaded[key], wanted[key]) for key in wanted)


def main():
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for kind in MODELS:
            (folder / kind).mkdir()
            is_universal(loads(kind, folder / kind), folder / kind)
            print(f"{kind}: FSDP2 and DeepSpeed find each moment at its parameter")
        refusals(folder / "llama")
        adafactor(folder)
        param_names(folder)
        print("numbers without names are refused")
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
