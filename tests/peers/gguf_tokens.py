"""A tokenizer with bytes as a fallback (Llama 2, Mistral) works in llama.cpp as it does in transformers: the
tokens and scores of our GGUF file give the same numbers by llama.cpp's algorithm. That holds for
tokenizer.json and for SentencePiece's tokenizer.model, and both give the same tokens and types.

usage: gguf_tokens.py CONVERT REPOSITORY
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import transformers
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers.tokenization_utils_base import generate_merges
from transformers.utils.sentencepiece_model_pb2_new import ModelProto

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


def type_of(token):
    if token == "<unk>":
        return ModelProto.SentencePiece.UNKNOWN
    if token in ("<s>", "</s>"):
        return ModelProto.SentencePiece.CONTROL
    return ModelProto.SentencePiece.BYTE if token in SPECIAL else ModelProto.SentencePiece.NORMAL


def sentencepiece(tokenizer):
    """The tokenizer as SentencePiece's trainer writes one: scores count down with the merges, then with the
    letters."""
    proto = ModelProto()
    proto.trainer_spec.model_type = 2  # BPE
    proto.trainer_spec.byte_fallback = True
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    scores = {}
    for number, (first, second) in enumerate(merges):
        scores.setdefault(first + second, -float(number))
    for number in range(VOCAB):
        token = tokenizer.id_to_token(number)
        kind = type_of(token)
        is_normal = kind == ModelProto.SentencePiece.NORMAL
        score = scores.get(token, -float(len(merges) + number)) if is_normal else 0.0
        proto.pieces.add(piece=token, score=score, type=kind)
    return proto


def of_transformers(proto):
    """The tokenizer that transformers makes of the pieces, with the merges that its own converter finds."""
    vocab = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    scores = {piece.piece: piece.score for piece in proto.pieces}
    return transformers.LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab, scores))


def write_model(folder):
    config = transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=16,
                                      num_hidden_layers=1, num_attention_heads=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def convert(folder):
    target = folder.with_suffix(".gguf")
    subprocess.run([CONVERT, folder, target, "-q"], check=True)
    fields = GGUFReader(target).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


def expect_same_numbers(keys, tokenizer, lines):
    assert keys["tokenizer.ggml.model"] == "llama"
    tokens, scores = (keys[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores"))
    for line in filter(None, lines):
        ours, theirs = llama_cpp(tokens, scores, line), tokenizer.encode(line, add_special_tokens=False).ids
        assert ours == theirs, (line, [tokens[number] for number in ours], ours, theirs)


def order(keys, merged):
    """The tokens that merges make, in the order in which llama.cpp makes them."""
    scores = keys["tokenizer.ggml.scores"]
    return sorted(merged, key=lambda number: -scores[number])


def expect_same_keys(ours, theirs):
    lists = ("tokenizer.ggml.scores", "tokenizer.ggml.merges")
    for name in sorted((ours.keys() | theirs.keys()) - set(lists)):
        assert ours.get(name) == theirs.get(name), (name, ours.get(name), theirs.get(name))
    merged = [number for number, score in enumerate(theirs["tokenizer.ggml.scores"]) if score > -1e6]
    assert len(merged) > 100 and order(ours, merged) == order(theirs, merged)
    assert "tokenizer.ggml.merges" not in ours


def main():
    texts = [path.read_text() for path in sorted(ROOT.glob("docs/*.md"))]
    lines = [*LINES, *(line for text in texts[:4] for line in text.splitlines()[:60])]
    tokenizer = train(line for text in texts for line in text.splitlines())
    proto = sentencepiece(tokenizer)
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / kind for kind in ("trained", "pieces", "transformers")]
        for folder in folders:
            write_model(folder)
        tokenizer.save(str(folders[0] / "tokenizer.json"))
        (folders[1] / "tokenizer.model").write_bytes(proto.SerializeToString())
        of_transformers(proto).save_pretrained(folders[2])
        keys = [convert(folder) for folder in folders]
        loaded = transformers.AutoTokenizer.from_pretrained(name, gguf_file="pieces.gguf")
        written = transformers.AutoTokenizer.from_pretrained(folders[2])
    expect_same_numbers(keys[0], tokenizer, lines)
    expect_same_numbers(keys[1], tokenizer, lines)
    config = {name for name in keys[2] if name.startswith("tokenizer.ggml.add_")}
    expect_same_keys(keys[1], {name: value for name, value in keys[2].items() if name not in config})
    for line in lines:
        assert loaded.tokenize(line) == written.tokenize(line), line
    print(f"{len(lines)} lines have the tokens of transformers, with tokenizer.json and tokenizer.model")


main()
