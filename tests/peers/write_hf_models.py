"""Writes models of transformers into tests/golden/hf whose configs change the computation, each with what
transformers computes: logits, greedy ids, ten losses, norms and gradients. tests/train/models.py compares.

usage: write_hf_models.py GOLDEN
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

STEPS, LENGTH, VOCAB = 10, 10, 41
SMALL = {"vocab_size": VOCAB, "max_position_embeddings": 16, "initializer_range": 0.3, "num_hidden_layers": 2,
         "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 20,
         "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"vocab_size": VOCAB, "n_positions": 16, "initializer_range": 0.3, "n_layer": 3, "n_embd": 12,
        "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "gpt2_by_layer": transformers.GPT2Config(**GPT2, n_inner=20, activation_function="relu",
                                             scale_attn_by_inverse_layer_idx=True, layer_norm_epsilon=1e-3),
    "gpt2_unscaled": transformers.GPT2Config(**GPT2, activation_function="gelu", scale_attn_weights=False,
                                             tie_word_embeddings=False),
    "llama_biases": transformers.LlamaConfig(**SMALL, head_dim=6, attention_bias=True, mlp_bias=True,
                                             tie_word_embeddings=True, rms_norm_eps=1e-2,
                                             rope_parameters={"rope_type": "linear", "factor": 2.0,
                                                              "rope_theta": 50.0}),
    "mistral_window": transformers.MistralConfig(**SMALL, sliding_window=3, head_dim=4),
    "qwen2_windows": transformers.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=4,
                                              max_window_layers=1),
    "qwen3_heads": transformers.Qwen3Config(**SMALL, head_dim=6, attention_bias=True, rms_norm_eps=1e-3,
                                            use_sliding_window=True, sliding_window=4, max_window_layers=1),
}


def greedy(model, ids, count):
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[:, -count:]


def loss_of(model, batch):
    logits = model(batch[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def gradients(model):
    """By kept name; a tied weight once."""
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def train(model, batches, folder):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses, norms = [], []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if step == 0:
            save_file(gradients(model), folder / "grads.safetensors")
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
        losses.append(loss.item())
        optimizer.step()
    told = {"optimizer": {"name": "AdamW", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8,
                          "weight_decay": 0.1},
            "losses": losses, "gradient_norms": norms}
    (folder / "training.json").write_text(json.dumps(told, indent=1) + "\n")


def describe(name, folder):
    """expected.json, as the tools list the file."""
    tensors = {key: {"dtype": "f32", "shape": list(value.shape),
                     "sha256": hashlib.sha256(value.numpy().tobytes()).hexdigest()}
               for key, value in load_file(folder / "data/model.safetensors").items()}
    return {"what": f"{name}: members of config.json that change the mathematics",
            "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "files": ["model.safetensors"], "tensors": tensors, "values": {}}


def write(name, config, golden):
    torch.manual_seed(sum(name.encode()))
    folder = golden / "hf" / name
    (folder / "reference").mkdir(parents=True, exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():  # norms and biases of a new model are ones and zeros
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "data")
    (folder / "data/generation_config.json").unlink(missing_ok=True)
    random = np.random.default_rng(11)
    tokens = random.integers(0, VOCAB, (2, LENGTH))
    batches = random.integers(0, VOCAB, (STEPS, 4, LENGTH + 1))
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.numpy()
        ids = greedy(model, torch.from_numpy(tokens[:1]), 6).numpy()
    for part, array in (("tokens", tokens), ("batches", batches), ("logits", logits), ("generated", ids)):
        np.save(folder / "reference" / f"{part}.npy", array)
    train(model, torch.from_numpy(batches), folder / "reference")
    (folder / "expected.json").write_text(json.dumps(describe(name, folder), indent=1) + "\n")


for model_name, model_config in MODELS.items():
    write(model_name, model_config, Path(sys.argv[1]))
