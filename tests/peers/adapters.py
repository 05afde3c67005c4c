"""fsdp-convert --adapter merges adapters that PEFT wrote as PEFT's own merge_and_unload does.

usage: adapters.py FSDP_CONVERT [CASE...]
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CONVERT = sys.argv[1]
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def llama(dtype=torch.float32, tied=False, **more):
    config = transformers.LlamaConfig(vocab_size=250, hidden_size=64, intermediate_size=96,
                                      num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
                                      tie_word_embeddings=tied, **more)
    return transformers.LlamaForCausalLM(config).to(dtype)


def gpt2(dtype=torch.float32, tied=True):
    config = transformers.GPT2Config(vocab_size=99, n_embd=48, n_layer=2, n_head=4, n_positions=32,
                                     tie_word_embeddings=tied)
    return transformers.GPT2LMHeadModel(config).to(dtype)


def convert(*arguments):
    return subprocess.run([CONVERT, *arguments], capture_output=True, text=True, timeout=120)


def write(model, config):
    """The base, and a trained adapter: its parameters are random, and those of the base did not change."""
    model.save_pretrained("base")
    trained = get_peft_model(model, config)
    for name, parameter in trained.named_parameters():
        if parameter.requires_grad:
            whole = "lora_A" in name or "lora_B" in name or "embedding_" in name
            noise = 0.05 * torch.randn_like(parameter)
            parameter.data = noise if whole else parameter.data + noise
    trained.save_pretrained("adapter")


def merged(dtype):
    base = transformers.AutoModelForCausalLM.from_pretrained("base", dtype=dtype)
    return PeftModel.from_pretrained(base, "adapter").merge_and_unload()


def check(model, dtype, **settings):
    write(model, LoraConfig(**{"r": 4, "lora_alpha": 16, **settings}))
    theirs = merged(dtype)
    theirs.save_pretrained("theirs")
    shutil.rmtree("ours", ignore_errors=True)
    done = convert("base", "ours", "--to", "hf", "--adapter", "adapter", "--mem", "64M")
    assert done.returncode == 0, done.stderr
    ours, wanted, base = (load_file(f"{name}/model.safetensors") for name in ("ours", "theirs", "base"))
    assert set(ours) == set(wanted), set(ours) ^ set(wanted)
    changed = 0
    for name, tensor in wanted.items():
        assert ours[name].dtype == tensor.dtype == dtype, name
        # bf16: PEFT rounds the product and the sum, fsdp-convert the sum alone
        close = {"rtol": 0, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-9}
        assert torch.allclose(ours[name].float(), tensor.float(), **close), name
        changed += name not in base or not torch.equal(base[name], ours[name])
    assert changed > 0
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        "ours", dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    tokens = torch.tensor([[1, 5, 9, 2, 30]])
    with torch.no_grad():
        first, second = loaded.eval()(tokens).logits, theirs.eval()(tokens).logits
    assert torch.allclose(first.float(), second.float(), atol=1e-5 if dtype == torch.float32 else 5e-2)


MODULES = ["q_proj", "v_proj", "down_proj"]


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.tensor([[1, 5, 9, 2, 30]])).logits


def llama_logits(path):
    return logits(transformers.AutoModelForCausalLM.from_pretrained(path))


@case
def patterns_of_ranks_and_factors():
    check(llama(), torch.float32, target_modules=MODULES, rank_pattern={"layers.1.self_attn.q_proj": 7},
          alpha_pattern={"v_proj": 3, r"layers\.[02]\.mlp\.down_proj": 40, "down_proj": 5})


@case
def patterns_are_expressions_of_python():
    check(llama(), torch.float32, target_modules=r".*\.layers\.\d+\.(?:self_attn\.[qv]_proj|mlp\.down_proj)",
          rank_pattern={r"layers\.[^1]\.\w+\.q_proj": 7},
          alpha_pattern={r"model\.layers\.\d+\.self_attn\.q_proj": 64, r"^(?!.*\.1\.).*v_proj": 3,
                         r"\bdown_pro": 99, r"(?:self|cross)_attn\.v_proj|down_proj": 40})
    check(llama(), torch.float32, target_modules=MODULES, exclude_modules=r".*\.v_proj",
          layers_to_transform=[0, 2], layers_pattern=["h", "layers"])


@case
def rank_stabilized():
    check(llama(), torch.float32, target_modules="all-linear", use_rslora=True)


@case
def modules_that_were_trained_whole():
    check(llama(), torch.float32, target_modules=MODULES, modules_to_save=["lm_head", "embed_tokens"])


@case
def an_embedding():
    check(llama(), torch.float32, target_modules=["q_proj", "embed_tokens"])


@case
def an_embedding_that_is_tied():
    check(llama(tied=True), torch.float32, target_modules=["q_proj", "embed_tokens"])


@case
def an_output_that_is_tied():
    """A product of either is added to the tensor that is both."""
    check(llama(tied=True), torch.float32, target_modules=["q_proj", "lm_head"])
    check(llama(tied=True), torch.float32, target_modules=["embed_tokens", "lm_head"])


@case
def tied_weights_that_were_trained_whole():
    """The embedding and the output are two tensors then, unless PEFT keeps them tied."""
    for model in (llama, gpt2):
        embedding, modules = ("embed_tokens", MODULES) if model == llama else ("wte", ["c_attn"])
        for whole in ([embedding], ["lm_head"], [embedding, "lm_head"]):
            check(model(tied=True), torch.float32, target_modules=modules, modules_to_save=whole)
            assert "lm_head.weight" in load_file("ours/model.safetensors"), whole
            with open("ours/config.json") as file:
                assert json.load(file)["tie_word_embeddings"] is False, whole
    check(llama(tied=True), torch.float32, target_modules=MODULES, modules_to_save=["embed_tokens"],
          ensure_weight_tying=True)
    assert "lm_head.weight" not in load_file("ours/model.safetensors")


@case
def biases_of_all_modules():
    check(llama(attention_bias=True), torch.float32, target_modules=MODULES, bias="all")


@case
def biases_of_its_modules():
    check(llama(attention_bias=True), torch.float32, target_modules=MODULES, bias="lora_only")


@case
def dora():
    check(llama(), torch.float32, target_modules=MODULES, use_dora=True)


@case
def bf16():
    check(llama(torch.bfloat16), torch.bfloat16, target_modules=MODULES)


@case
def gpt2_whose_weights_are_transposed():
    check(gpt2(), torch.float32, target_modules=["c_attn", "c_proj", "wte"], fan_in_fan_out=True)


@case
def gpt2_with_linear_modules_of_both_kinds():
    modules = ["c_attn", "c_proj", "lm_head"]
    check(gpt2(tied=False), torch.float32, target_modules=modules, fan_in_fan_out=True)
    with open("adapter/adapter_config.json") as file:
        assert not json.load(file)["fan_in_fan_out"]  # as lm_head has it, which comes last


@case
def dora_of_gpt2():
    check(gpt2(), torch.float32, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, use_dora=True)


@case
def dora_of_gpt2_in_bf16():
    check(gpt2(torch.bfloat16), torch.bfloat16, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True,
          use_dora=True)
    done = convert("base", "half", "--to", "hf", "--adapter", "adapter", "--dtype", "f32")
    assert done.returncode == 0, done.stderr


@case
def a_file_of_torch_save():
    write(llama(), LoraConfig(r=4, target_modules=MODULES))
    assert convert("base", "safe", "--to", "hf", "--adapter", "adapter").returncode == 0
    torch.save(load_file("adapter/adapter_model.safetensors"), "adapter/adapter_model.bin")
    os.remove("adapter/adapter_model.safetensors")
    done = convert("base", "ours", "--to", "hf", "--adapter", "adapter")
    assert done.returncode == 0, done.stderr
    ours, wanted = (load_file(f"{name}/model.safetensors") for name in ("ours", "safe"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in wanted.items())


@case
def an_adapter_beside_its_base():
    """transformers takes the settings of an adapter for one: they do not go along without it."""
    model = llama()
    write(model, LoraConfig(r=4, target_modules=MODULES))
    shutil.copytree("adapter", "base", dirs_exist_ok=True)
    assert convert("base", "plain", "--to", "hf").returncode == 0
    done = convert("base", "ours", "--to", "hf", "--adapter", "base")
    assert done.returncode == 0, done.stderr
    os.remove("base/adapter_config.json")
    for path, wanted in (("plain", llama_logits("base")), ("ours", logits(merged(torch.float32)))):
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not any(info.values()) and not getattr(loaded, "peft_config", None), info
        assert torch.allclose(logits(loaded), wanted, atol=1e-5), path


@case
def a_checkpoint_of_a_trainer():
    """The state of an optimizer next to it makes a whole of several parts of the directory."""
    write(llama(), LoraConfig(r=4, target_modules=MODULES))
    os.makedirs("run")
    shutil.copytree("adapter", "run/checkpoint-3")
    state = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": []}
    torch.save(state, "run/checkpoint-3/optimizer.pt")
    with open("run/checkpoint-3/trainer_state.json", "w") as file:
        json.dump({"global_step": 3}, file)
    wanted = merged(torch.float32).state_dict()
    for path in ("run/checkpoint-3", "run"):
        shutil.rmtree("ours", ignore_errors=True)
        done = convert("base", "ours", "--to", "hf", "--adapter", path)
        assert done.returncode == 0, done.stderr
        ours = load_file("ours/model.safetensors")
        assert all(torch.allclose(tensor, wanted[name], atol=1e-6) for name, tensor in ours.items()), path


@case
def adapters_that_are_not_merged():
    """PEFT's merge changes other tensors, too, or has a product of another kind."""
    tokens = {"target_modules": MODULES, "trainable_token_indices": [1, 5]}
    for words, model, settings in (
            ("init_lora_weights 'pissa'", llama(), {"target_modules": MODULES, "init_lora_weights": "pissa"}),
            ("init_lora_weights 'olora'", llama(), {"target_modules": MODULES, "init_lora_weights": "olora"}),
            ("has layer_replication", llama(),
             {"target_modules": MODULES, "layer_replication": [[0, 2], [1, 3]]}),
            ("biases (lora_bias)", llama(attention_bias=True),
             {"target_modules": ["q_proj"], "lora_bias": True}),
            ("alora_invocation_tokens", llama(),
             {"target_modules": MODULES, "task_type": "CAUSAL_LM", "alora_invocation_tokens": [1, 2]}),
            ("single trained tokens", llama(), tokens)):
        write(model, LoraConfig(r=4, **settings))
        done = convert("base", "ours", "--to", "hf", "--adapter", "adapter")
        assert done.returncode == 2 and words in done.stderr, (words, done.returncode, done.stderr)
        assert not os.path.exists("ours"), words


@case
def adapters_that_do_not_fit():
    write(llama(), LoraConfig(r=4, target_modules=MODULES))
    tensors = load_file("adapter/adapter_model.safetensors")
    start = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    for change, words in (
            ({start + "A.weight": None}, "has one matrix of the pair"),
            ({start + "A.weight": torch.zeros(())},
             "error: 'model.layers.0.self_attn.q_proj': an adapter of a convolution"),
            ({start + "A.weight": torch.zeros(4, 63)}, "does not fit a weight of [64, 64]"),
            ({start + "A.weight": torch.zeros(0, 64), start + "B.weight": torch.zeros(64, 0)},
             "has the rank 0, but adapter_config.json says 4"),
            ({start + "B.weight": torch.full((64, 4), float("nan"))}, "a sum does not fit in f32"),
            ({"base_model.model.other.lora_A.weight": torch.zeros(4, 64)}, "belong to another model")):
        changed = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
        save_file(changed, "adapter/adapter_model.safetensors")
        done = convert("base", "ours", "--to", "hf", "--adapter", "adapter")
        assert done.returncode != 0 and words in done.stderr, (words, done.returncode, done.stderr)


@case
def dora_without_magnitudes():
    write(llama(), LoraConfig(r=4, target_modules=MODULES, use_dora=True))
    tensors = load_file("adapter/adapter_model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "magnitude" not in name},
              "adapter/adapter_model.safetensors")
    done = convert("base", "ours", "--to", "hf", "--adapter", "adapter")
    assert done.returncode == 4 and "says use_dora" in done.stderr, done.stderr


def main():
    for name in sys.argv[2:] or CASES:
        torch.manual_seed(7)
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            CASES[name]()
            os.chdir("/")
        print(f"{name}: as PEFT")


main()
