"""The descriptions of models (statedict/models/builtin) next to transformers: models of every
row are built from many configs and saved; their names and shapes must be those that fsdp-verify --like
expects from config.json, no more and no fewer. Tensors that a description may do without are counted, too.
A model of the default config of every row must be that of a config.json without members.

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
ROUTED = {"n_routed_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2,
          "first_k_dense_replace": 1}
DEEPSEEK = {**SMALL, **ROUTED, "n_group": 2, "topk_group": 1, "q_lora_rank": 6, "kv_lora_rank": 4,
            "qk_rope_head_dim": 4, "qk_nope_head_dim": 2, "v_head_dim": 3}
FALCON = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
          "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
       "image_size": 32, "patch_size": 8, "encoder_stride": 8}
WHISPER = {"vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 3,
           "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
           "decoder_ffn_dim": 20, "num_mel_bins": 8,
           "max_source_positions": 20, "max_target_positions": 12, "classifier_proj_size": 6,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
           "begin_suppress_tokens": [1, 2]}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 3, "d_ff": 24, "num_layers": 2, "num_heads": 4,
      "relative_attention_num_buckets": 8}
MAMBA2 = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8,
          "state_size": 4, "n_groups": 2}
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
    ("Granite", SMALL, [TIED, WIDE, BIAS, {"mlp_bias": True}]),
    ("SmolLM3", SMALL, [UNTIED, LABELS, BIAS, {"mlp_bias": True}]),
    ("Olmo2", SMALL, [TIED, BIAS, ONE_HEAD]),
    ("Olmo3", SMALL, [TIED, BIAS, ONE_HEAD]),
    ("Gemma3Text", SMALL, [UNTIED, LABELS, WIDE, BIAS]),
    ("GptOss", {**SMALL, "num_local_experts": 3, "num_experts_per_tok": 2},
     [TIED, LABELS, WIDE, {"attention_bias": False}]),
    ("DeepseekV3", DEEPSEEK, [TIED, LABELS, BIAS, {"q_lora_rank": None}, {"first_k_dense_replace": 0},
                              {"n_shared_experts": 2}, {"q_lora_rank": None, "attention_bias": True}]),
    ("Glm4", SMALL, [TIED, LABELS, WIDE, {"attention_bias": False}]),
    ("Glm4Moe", {**SMALL, **ROUTED},
     [TIED, BIAS, {"use_qk_norm": True, "head_dim": 8}, {"n_shared_experts": 2}]),
    ("Falcon", FALCON, [UNTIED, LABELS, {"multi_query": False}, {"bias": True}, {"ffn_hidden_size": 20},
                        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
                        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
                        {"parallel_attn": False, "alibi": True}]),
    ("Starcoder2", SMALL, [UNTIED, LABELS, {"use_bias": False}]),
    ("Cohere2", SMALL, [UNTIED, BIAS, ONE_HEAD]),
    ("ViT", VIT, [LABELS, {"qkv_bias": False}, {"pooler_output_size": 12}, {"num_channels": 1}]),
    ("Whisper", WHISPER, [UNTIED, LABELS, {"use_weighted_layer_sum": True}, {"encoder_layers": 4}]),
    ("T5", T5, [UNTIED, LABELS, {"feed_forward_proj": "gated-gelu"}, {"num_decoder_layers": 4}]),
    ("Mamba2", MAMBA2, [TIED, {"use_bias": True}, {"use_conv_bias": False}, {"expand": 3, "num_heads": 6}]),
]
HEADS = ["Model", "ForCausalLM", "LMHeadModel", "DoubleHeadsModel", "ForSequenceClassification",
         "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM", "ForPreTraining",
         "ForNextSentencePrediction", "ForMultipleChoice", "ForImageClassification", "ForMaskedImageModeling",
         "ForConditionalGeneration", "ForAudioClassification", "EncoderModel"]
CLASSES = {"Gemma3TextForCausalLM": "Gemma3ForCausalLM"}    # that are named otherwise


def class_of(row, head):
    return getattr(transformers, CLASSES.get(row + head, row + head), None)


def verify(build, folder, *options):
    command = [f"{build}/bin/fsdp-verify", "--json", *options, str(folder), "--like", f"{folder}/config.json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode in (0, 1), f"{run.args}: {run.stderr}"
    return json.loads(run.stdout)["paths"][0]


def check(build, folder, name, *options):
    """Every tensor is expected, and no other. Returns the number of those that need not be there."""
    report = verify(build, folder, *options)
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
    model = class_of(row, head)(config)
    fill(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        optional = check(build, Path(folder), f"{row}{head} {members}")
        check_in_memory(build, model, Path(folder), f"{row}{head} {members}")
    return optional


def write_sparse(model, path):
    """The tensors of a model without memory, as a file of zeros that takes no space."""
    header, at = {}, 0
    for name, tensor in model.state_dict().items():
        header[name] = {"dtype": "U8", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.numel()]}
        at += tensor.numel()
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def check_defaults(build, row):
    """Compares the model of a config without members, which has the defaults of its class."""
    head = next(head for head in ("ForCausalLM", "ForConditionalGeneration", "ForImageClassification",
                                  "LMHeadModel", "ForMaskedLM") if class_of(row, head))
    config = getattr(transformers, f"{row}Config")()
    with torch.device("meta"):
        model = class_of(row, head)(config)
    with tempfile.TemporaryDirectory() as folder:
        write_sparse(model, Path(folder) / "model.safetensors")
        members = {"model_type": config.model_type, "architectures": [type(model).__name__]}
        (Path(folder) / "config.json").write_text(json.dumps(members))
        check(build, Path(folder), f"the default {row}", "--quick")


def compare(build):
    for row, *_ in ROWS:
        check_defaults(build, row)
    cases = [(row, head, base | changes) for row, base, more in ROWS for changes in [{}, *more]
             for head in HEADS if class_of(row, head)]
    chosen = cases[::EVERY]
    optional = [check_model(build, *case) for case in chosen]
    print(f"{len(chosen)} of {len(cases)} models, {sum(optional)} tensors that need not be there")
    # a pooler or a head beside the model; otherwise every tensor must be there
    assert min(optional) >= 0 and sum(optional) <= len(chosen), optional


if __name__ == "__main__":
    compare(sys.argv[1])
