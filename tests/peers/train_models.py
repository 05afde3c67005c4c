"""fsdp-train against PyTorch and transformers: 50 steps of the same model, and exports that
transformers loads.

usage: train_models.py BUILD
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, Qwen3Config

BUILD = Path(sys.argv[1]).resolve()
STEPS = 50
GPT2 = GPT2Config(n_layer=2, n_head=6, n_embd=36, n_positions=32, vocab_size=97, resid_pdrop=0, embd_pdrop=0,
                  attn_pdrop=0, bos_token_id=1, eos_token_id=2)
LLAMA = LlamaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=72, num_attention_heads=4,
                    num_key_value_heads=2, vocab_size=97, max_position_embeddings=32)
QWEN3 = Qwen3Config(num_hidden_layers=2, hidden_size=32, intermediate_size=72, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=12, vocab_size=97, max_position_embeddings=32)
problems = []


def check(what, ok, told):
    if not ok:
        problems.append(f"{what}: {told}")


def tool(name, *arguments):
    done = subprocess.run([str(word) for word in (BUILD / "bin" / name, *arguments)], capture_output=True,
                          text=True, timeout=250)
    if done.returncode != 0:
        sys.exit(f"{name} {arguments}: exit {done.returncode}\n{done.stderr}")
    return done.stdout


# --- 50 steps ---


def torch_losses(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for batch in torch.from_numpy(batches):
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def check_steps(name, config, work):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    model.save_pretrained(work / name)
    batches = np.random.default_rng(5).integers(0, 20, (STEPS, 3, 25))
    np.save(work / "batches.npy", batches)
    run = work / f"{name}.run"
    tool("fsdp-train", "--init", work / name, "--batches", work / "batches.npy", "--steps", STEPS, "--np", 2,
         "--run", run, "--optim.lr", 1e-3, "--optim.schedule", "constant", "--optim.decay", "all", "--quiet",
         "--save.every", 0)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ours = [line["loss"] for line in lines if "loss" in line]
    theirs = torch_losses(model, batches)
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    check(f"{name}: losses of {STEPS} steps", apart <= 1e-4, apart)
    check_export(name, run, work)


# --- exports ---


def check_export(name, run, work):
    out = work / f"{name}.hf"
    tool("fsdp-convert", run, out, "--to", "hf", "--quiet")
    model = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").float().eval()
    vocab = model.config.vocab_size
    tokens = np.random.default_rng(7).integers(0, min(vocab, 97), (2, 16))
    np.save(work / "tokens.npy", tokens)
    np.save(work / "prompt.npy", tokens[:1])
    tool("fsdp-train", "--eval", run, "--tokens", work / "tokens.npy", "--logits-out", work / "logits.npy")
    tool("fsdp-train", "--sample", run, "--tokens", work / "prompt.npy", "-n", 12, "--temperature", 0,
         "--out", work / "ids.npy", "--np", 2)
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)).logits.numpy()
        ids = torch.from_numpy(tokens[:1])
        for _ in range(12):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    apart = np.abs(np.load(work / "logits.npy") - theirs).max()
    check(f"{name}: logits of the export", apart <= 2e-5 * max(1, np.abs(theirs).max()), apart)
    check(f"{name}: greedy ids of the export", (np.load(work / "ids.npy") == ids[:, 16:].numpy()).all(), ids)
    return out


def check_bytes(family, work):
    """A model of bytes that fsdp-train made itself, with its tokenizer."""
    text = "".join(f"Line {i} says {i * i % 89}, naïvely.\n" for i in range(500))
    (work / "data.txt").write_text(text)
    run = work / f"bytes.{family}"
    tool("fsdp-train", "--run", run, "--data.path", work / "data.txt", "--model.family", family,
         "--model.layers", 2, "--model.width", 32, "--model.context", 32, "--steps", 20, "--np", 2, "--quiet")
    out = check_export(run.name, run, work)
    tokenizer = AutoTokenizer.from_pretrained(out)
    for line in ("plain text", " naïve — 数 🙂\n\ttabs  and   blanks ", "\x00\x7f"):
        ids = tokenizer(line, add_special_tokens=False)["input_ids"]
        check(f"{family}: ids of bytes", ids == list(line.encode()), (line, ids))
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        check(f"{family}: text of bytes", text == line, (line, text))


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        check_steps("gpt2", GPT2, Path(work))
        check_steps("llama", LLAMA, Path(work))
        check_steps("qwen3", QWEN3, Path(work))
        for family in "gpt2", "llama", "mistral", "qwen2", "qwen3":
            check_bytes(family, Path(work))
    print("\n".join(problems) or "ok")
    return 1 if problems else 0


sys.exit(main())
