"""Models of transformers in Megatron's files of ranks (mp_rank_TT_PPP_EEE), which this script cuts by its own
code, become models of transformers with the same bits and outputs, and Megatron-Core's torch_dist.

usage: megatron_ranks.py FSDP_CONVERT [CASE...]
"""

import argparse
import os
import subprocess

import torch
import transformers
from maps_common import CONVERT, check_model, convert, gpt2, read_dcp, run_cases, same, sizes
from megatron_layouts import (gpt2_layer, gpt2_outside, llama_layer, llama_mlp, llama_outside, megatron,
                              mixtral_mlp, padded)

CASES = {}
ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def case(function):
    CASES[function.__name__] = function
    return function


def part_of(name, tensor, rank, ranks, halves):
    """The part of a weight that a rank of tensor parallelism holds."""
    if name.endswith(ROWS):
        return tensor.chunk(ranks)[rank]
    if name.endswith(COLUMNS):
        return tensor.chunk(ranks, 1)[rank]
    if name.endswith(("linear_fc1.weight", "linear_fc1.bias")):
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(halves)])
    return tensor


def experts_of(layer, rank, ranks, grouped):
    """The experts of a rank, each a weight of its own, in place of the stacked ones of all."""
    out = {}
    for name, tensor in layer.items():
        before, found, after = name.partition("experts.experts.")
        for i, expert in enumerate(tensor.chunk(ranks)[rank] if found else ()):
            projection = after.removesuffix(".weight")
            out[f"{before}experts.{projection}.weight{i}" if grouped
                else f"{before}experts.local_experts.{i}.{after}"] = expert
        if not found:
            out[name] = tensor
    return out


class Run:
    """A run with stages: the numbers of the layers of each, or of each of its chunks."""

    def __init__(self, model, layers, outside, stages, tensor=2, experts=1, halves=2, grouped=False,
                 spread=None):
        self.model, self.layers, self.outside, self.stages = model, layers, outside, stages
        self.tensor, self.experts, self.halves, self.grouped = tensor, experts, halves, grouped
        self.chunks = len(stages[0]) if isinstance(stages[0][0], list) else 0
        self.spread = spread or (lambda first, last: {})

    def arguments(self):
        return argparse.Namespace(
            tensor_model_parallel_size=self.tensor, pipeline_model_parallel_size=len(self.stages),
            expert_model_parallel_size=self.experts, expert_tensor_parallel_size=self.tensor,
            swiglu=self.halves == 2, hidden_size=64, padded_vocab_size=256, params_dtype=torch.float32)

    def chunk(self, numbers, rank, expert, first, last):
        whole = {}
        for name, tensor in self.outside.items():
            if first if name.startswith("embedding.") else last:
                whole[name] = tensor
        whole |= self.spread(first, last)
        for local, number in enumerate(numbers):
            for name, tensor in experts_of(self.layers[number], expert, self.experts, self.grouped).items():
                whole[f"decoder.layers.{local}.{name}"] = tensor
            whole[f"decoder.layers.{local}.mlp.linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)
        halves = self.halves
        return {name: part_of(name.rstrip("0123456789"), tensor, rank, self.tensor, halves).clone()
                for name, tensor in whole.items()}

    def file(self, rank, stage, expert):
        last = len(self.stages) - 1
        out = {"args": self.arguments(), "checkpoint_version": 3.0, "iteration": 5,
               "optimizer": {"optimizer": {"state": {0: {"exp_avg": torch.ones(7)}}}},
               "rng_state": [{"torch_rng_state": torch.zeros(8, dtype=torch.uint8)}]}
        if not self.chunks:
            return out | {"model": self.chunk(self.stages[stage], rank, expert, stage == 0, stage == last)}
        for number, layers in enumerate(self.stages[stage]):
            first, behind = stage == number == 0, stage == last and number == self.chunks - 1
            out[f"model{number}"] = self.chunk(layers, rank, expert, first, behind)
        return out

    def write(self, path):
        for rank in range(self.tensor):
            for stage in range(len(self.stages)):
                for expert in range(self.experts):
                    folder = f"{path}/iter_0000005/mp_rank_{rank:02d}"
                    folder += f"_{stage:03d}" if len(self.stages) > 1 else ""
                    folder += f"_{expert:03d}" if self.experts > 1 else ""
                    os.makedirs(folder)
                    torch.save(self.file(rank, stage, expert), f"{folder}/model_optim_rng.pt")

    def check(self):
        self.model.save_pretrained("hf")
        self.write("run")
        convert("run", "out", "--copy-from", "hf", "--to", "hf")
        check_model("out", self.model)
        convert("run", "core", "--to", "megatron")
        outside = self.outside | self.spread(False, True)
        same(read_dcp("core"), megatron(self.layers, outside))
        with torch.serialization.safe_globals([argparse.Namespace]):
            common = torch.load("core/common.pt")
        plain = {key: value for key, value in vars(self.arguments()).items() if key != "params_dtype"}
        assert vars(common.pop("args")) == plain
        assert common == {"checkpoint_version": 3.0, "iteration": 5}, common


def llama_run(model, stages, mlp=llama_mlp, **more):
    state, config = model.state_dict(), model.config
    layers = [{**llama_layer(state, i, config), **mlp(state, i)} for i in range(config.num_hidden_layers)]
    return Run(model, layers, llama_outside(model), stages, **more)


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes(**more)))


@case
def llama_uneven_stages():
    llama_run(llama(tie_word_embeddings=False), [[0, 1], [2]]).check()


@case
def llama_one_rank():
    llama_run(llama(tie_word_embeddings=False), [[0, 1, 2]], tensor=1).check()


@case
def llama_tied_between_stages():
    """The last stage has the embeddings once more, and those of the first count."""
    model = llama(tie_word_embeddings=True)
    weight = padded(model.state_dict()["model.embed_tokens.weight"])
    llama_run(model, [[0], [1], [2]],
              spread=lambda first, last: {"embedding.word_embeddings.weight": weight} if last else {}).check()


@case
def llama_tied_output():
    """The last stage has them as its output, as Megatron-Core's GPTModel has."""
    model = llama(tie_word_embeddings=True)
    weight = padded(model.state_dict()["model.embed_tokens.weight"])
    llama_run(model, [[0, 1], [2]],
              spread=lambda first, last: {"output_layer.weight": weight} if last else {}).check()


@case
def qwen2_chunks_of_stages():
    """Stages that alternate: the layers of the first chunks come before those of the second ones."""
    more = sizes(tie_word_embeddings=False) | {"num_hidden_layers": 12}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**more))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    llama_run(model, [[[0, 1], [5, 6]], [[2], [7, 8, 9]], [[3, 4], [10, 11]]]).check()


def mixtral(**more):
    config = transformers.MixtralConfig(**sizes(num_local_experts=4, num_experts_per_tok=2))
    return llama_run(transformers.MixtralForCausalLM(config), mlp=mixtral_mlp, **more)


@case
def mixtral_all_ranks():
    mixtral(stages=[[0], [1, 2]], experts=2).check()


@case
def mixtral_experts_without_stages():
    """The second number of a folder is that of experts."""
    mixtral(stages=[[0, 1, 2]], experts=4, tensor=1, grouped=True).check()


@case
def mixtral_one_rank_of_experts():
    mixtral(stages=[[0, 1, 2]], tensor=2).check()


@case
def gpt2_tied():
    model = gpt2()
    layers = [gpt2_layer(model.state_dict(), i, model.config.n_head) for i in range(2)]
    outside = gpt2_outside(model)
    tied = {"output_layer.weight": outside["embedding.word_embeddings.weight"]}
    Run(model, layers, outside, [[0], [1]], halves=1, spread=lambda first, last: tied if last else {}).check()


def refused(*arguments):
    done = subprocess.run([CONVERT, *arguments], capture_output=True, text=True, timeout=120)
    assert not os.path.exists(arguments[1]), arguments
    return done.returncode, done.stderr


@case
def ranks_that_are_missing():
    run = llama_run(llama(tie_word_embeddings=False), [[0, 1], [2]], tensor=2)
    run.check()
    os.rename("run/iter_0000005/mp_rank_01_000", "away")
    code, text = refused("run", "less", "--copy-from", "hf")
    assert code == 4 and "mp_rank_01_000' is missing" in text, text
    os.rename("run/iter_0000005/mp_rank_01_001", "away1")  # nothing but the options tells that there were two
    code, text = refused("run", "less", "--copy-from", "hf")
    assert code == 4 and "mp_rank_01_000' is missing" in text, text
    os.rename("away", "run/iter_0000005/mp_rank_01_000")
    os.rename("away1", "run/iter_0000005/mp_rank_01_001")
    os.remove("run/iter_0000005/mp_rank_01_001/model_optim_rng.pt")
    code, text = refused("run", "less", "--copy-from", "hf")
    assert code in (3, 4) and "mp_rank_01_001/model_optim_rng.pt" in text, text


run_cases(CASES)
