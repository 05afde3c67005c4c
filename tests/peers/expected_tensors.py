"""The descriptions of models (statedict/models/builtin) next to transformers: models of every
row are built from many configs and saved; their names and shapes must be those that fsdp-verify --like
expects from config.json, no more and no fewer. Tensors that the table may do without are counted, too.

load_layouts.py calls it.

usage: expected_tensors.py BUILD    FSDP_TEST_SAMPLE=n: every n-th model
"""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

warnings.filterwarnings("ignore")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
USUAL_SAMPLE = 13
EVERY = int(os.environ.get("FSDP_TEST_SAMPLE") or USUAL_SAMPLE)

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0}
OPT = {**{key: SMALL[key] for key in SMALL if not key.startswith(("num_key", "intermediate"))}, "ffn_dim": 24,
       "word_embed_proj_dim": 16}
MOE = {**SMALL, "moe_intermediate_size": 8, "num_experts": 3, "num_experts_per_tok": 2}
WIDE, ONE_HEAD, LABELS = {"head_dim": 6}, {"num_key_value_heads": 4}, {"num_labels": 5}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BIAS = {"attention_bias": True}
SPARSE = [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2},
          {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]}]
# The classes begin with the first word; each of the last gives a config of its own.
ROWS = [
    ("GPT2", GPT2, [UNTIED, LABELS, {"n_inner": 20}, {"add_cross_attention": True}]),
    ("Llama", SMALL, [TIED, LABELS, WIDE, ONE_HEAD, BIAS, {"mlp_bias": True}, {"num_hidden_layers": 11}]),
    ("Mistral", SMALL, [TIED, LABELS, WIDE, ONE_HEAD]),
    ("Mixtral", {**SMALL, "num_local_experts": 3}, [TIED, LABELS, WIDE, {"num_local_experts": 12}]),
    ("Qwen2", SMALL, [TIED, LABELS, ONE_HEAD]),
    ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 12},
     [TIED, LABELS, {"qkv_bias": False}, *SPARSE]),
    ("Qwen3", SMALL, [TIED, LABELS, WIDE, BIAS]),
    ("Qwen3Moe", MOE, [TIED, LABELS, WIDE, BIAS, *SPARSE]),
    ("Gemma", SMALL, [UNTIED, LABELS, WIDE, BIAS]),
    ("Gemma2", SMALL, [UNTIED, LABELS, WIDE, BIAS]),
    ("Phi3", SMALL, [TIED, LABELS, ONE_HEAD]),
    ("OPT", OPT, [UNTIED, LABELS, {"word_embed_proj_dim": 12, "do_layer_norm_before": False},
                  {"enable_bias": False}, {"layer_norm_elementwise_affine": False},
                  {"_remove_final_layer_norm": True}]),
    ("GPTNeoX", SMALL, [TIED, LABELS, {"attention_bias": False}]),
    ("Bert", SMALL, [UNTIED, LABELS, {"type_vocab_size": 1},
                     {"is_decoder": True, "add_cross_attention": True}]),
]
HEADS = ["Model", "ForCausalLM", "LMHeadModel", "DoubleHeadsModel", "ForSequenceClassification",
         "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM", "ForPreTraining",
         "ForNextSentencePrediction", "ForMultipleChoice"]


def verify(build, folder):
    command = [f"{build}/bin/fsdp-verify", "--json", str(folder), "--like", f"{folder}/config.json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode in (0, 1), f"{run.args}: {run.stderr}"
    return json.loads(run.stdout)["paths"][0]


def check(build, folder, name):
    """Every tensor is expected, and no other. Returns the number of those that need not be there."""
    report = verify(build, folder)
    saved, expected = report["tensors"], report["like"]["expected"]
    assert report["good"], f"{name}: " + "; ".join(f["text"] for f in report["findings"])
    return saved - expected


def check_in_memory(build, model, folder, name):
    """The names that a training has in memory, which differ for experts and some heads."""
    tensors = {key: value.contiguous().clone() for key, value in model.state_dict().items()}
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    check(build, folder, f"{name} in memory")


def fill(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()


def check_model(build, row, head, members):
    config = getattr(transformers, f"{row}Config")(**members)
    model = getattr(transformers, row + head)(config)
    fill(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        optional = check(build, Path(folder), f"{row}{head} {members}")
        check_in_memory(build, model, Path(folder), f"{row}{head} {members}")
    return optional


def compare(build):
    cases = [(row, head, base | changes) for row, base, more in ROWS for changes in [{}, *more]
             for head in HEADS if hasattr(transformers, row + head)]
    chosen = cases[::EVERY]
    optional = [check_model(build, *case) for case in chosen]
    print(f"{len(chosen)} of {len(cases)} models, {sum(optional)} tensors that need not be there")
    # a pooler or a head beside the model; otherwise every tensor must be there
    assert min(optional) >= 0 and sum(optional) <= len(chosen), optional


if __name__ == "__main__":
    compare(sys.argv[1])
