"""A tokenizer with bytes as a fallback (Llama 2, Mistral) works in llama.cpp as it does in transformers: the
tokens and scores of our GGUF file give the same numbers by llama.cpp's algorithm.

usage: gguf_tokens.py CONVERT REPOSITORY
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import transformers
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

CONVERT, ROOT = sys.argv[1], Path(sys.argv[2])
VOCAB = 700
SPECIAL = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
LINES = ["Sharded state", "two  spaces, and a tab\tend", "Grüße aus Köln", "数 and 🙂", "x" * 40, "aaaa bbbb"]


def train(texts):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=SPECIAL,
                                                             max_token_length=12))
    return tokenizer


def bytes_of(ids, part):
    return [ids[f"<0x{byte:02X}>"] for byte in part.encode()]


def llama_cpp(tokens, scores, text):
    """llm_tokenizer_spm: the pair with the highest score first, the leftmost of equal ones; then bytes."""
    ids = {token: number for number, token in enumerate(tokens)}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[ids[a + b]], at) for at, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ids]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at:at + 2] = [parts[at] + parts[at + 1]]
    return [number for part in parts
            for number in ([ids[part]] if part in ids else bytes_of(ids, part))]


def main():
    texts = [path.read_text() for path in sorted(ROOT.glob("docs/*.md"))]
    lines = [*LINES, *(line for text in texts[:4] for line in text.splitlines()[:60])]
    tokenizer = train(line for text in texts for line in text.splitlines())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=16,
                                          num_hidden_layers=1, num_attention_heads=2)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "hf")
        tokenizer.save(str(folder / "hf" / "tokenizer.json"))
        subprocess.run([CONVERT, folder / "hf", folder / "model.gguf", "-q"], check=True)
        fields = GGUFReader(folder / "model.gguf").fields
        assert fields["tokenizer.ggml.model"].contents() == "llama"
        tokens, scores = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "scores"))
    for line in filter(None, lines):
        ours, theirs = llama_cpp(tokens, scores, line), tokenizer.encode(line, add_special_tokens=False).ids
        assert ours == theirs, (line, [tokens[number] for number in ours], ours, theirs)
    print(f"{len(lines)} lines have the tokens of transformers")


main()
