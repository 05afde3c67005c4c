"""A tokenizer with bytes as a fallback (Llama 2, Mistral) works in llama.cpp as it does in transformers: the
tokens and scores of our GGUF file give the same numbers by llama.cpp's algorithm. That holds for
tokenizer.json and for SentencePiece's tokenizer.model, and both give the same tokens and types. So does a
tokenizer of the model Unigram (T5), in tokenizer.json and in spiece.model, and one of the model WordPiece
(BERT), in tokenizer.json and in vocab.txt, whose files come back out of GGUF.

usage: gguf_tokens.py CONVERT REPOSITORY
"""

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import transformers
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
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


# --- the model Unigram ---

ENDS = ["<pad>", "</s>", "<unk>"]


def make_charsmap():
    """SentencePiece's map of characters: a trie of 256 units, where TAB leads to a leaf, and the space that
    replaces it."""
    units = [0] * 256
    units[9] = 9 | 1 << 8 | 1 << 10  # its letter, a leaf, and the distance to its value
    units[9 ^ 1] = 1 << 31
    return struct.pack("<I256I", 4 * 256, *units) + b" \0"


def train_unigram(texts):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Precompiled(make_charsmap())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(),
                                                       pre_tokenizers.Metaspace(prepend_scheme="always")])
    tokenizer.train_from_iterator(texts, trainers.UnigramTrainer(vocab_size=300, special_tokens=ENDS,
                                                                 unk_token="<unk>", show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def spiece(tokenizer):
    proto = ModelProto()
    proto.trainer_spec.model_type = 1
    proto.trainer_spec.bos_id = -1
    proto.trainer_spec.pad_id, proto.trainer_spec.eos_id, proto.trainer_spec.unk_id = 0, 1, 2
    proto.normalizer_spec.precompiled_charsmap = make_charsmap()
    kinds = ModelProto.SentencePiece
    types = {"<pad>": kinds.CONTROL, "</s>": kinds.CONTROL, "<unk>": kinds.UNKNOWN}
    for token, score in json.loads(tokenizer.to_str())["model"]["vocab"]:
        proto.pieces.add(piece=token, score=score, type=types.get(token, kinds.NORMAL))
    return proto


def llama_cpp_unigram(keys, text):
    """llm_tokenizer_ugm: characters are replaced, spaces in a row are one, and of all ways to cut the text
    the one counts whose scores are the largest together; then </s>."""
    names = ("tokens", "scores", "token_type")
    pieces = list(zip(*(keys[f"tokenizer.ggml.{name}"] for name in names), strict=True))
    normal = {token: (score, number) for number, (token, score, kind) in enumerate(pieces)
              if kind in (1, 4, 5)}
    unknown = keys["tokenizer.ggml.unknown_token_id"]
    penalty = min(score for token, score, kind in pieces if kind == 1) - 10
    charsmap = bytes(keys["tokenizer.ggml.precompiled_charsmap"])
    words = normalizers.Precompiled(charsmap).normalize_str(text).split(" ")
    text = "".join("▁" + word for word in words if word)
    best = [(0.0, 0, 0)] + [(-1e300, 0, 0)] * len(text)
    for start in range(len(text)):
        for end in range(start + 1, min(start + 40, len(text)) + 1):
            score, number = normal.get(text[start:end], (penalty if end == start + 1 else -1e300, unknown))
            best[end] = max(best[end], (best[start][0] + score, start, number), key=lambda one: one[0])
    ids, at = [keys["tokenizer.ggml.eos_token_id"]], len(text)
    while at > 0:
        _, at, number = best[at]
        if number != unknown or ids[-1] != unknown:
            ids.append(number)
    return ids[::-1]


def check_unigram(texts, lines):
    tokenizer = train_unigram(line for text in texts for line in text.splitlines())
    config = transformers.T5Config(vocab_size=310, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config)
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / kind for kind in ("trained", "pieces")]
        for folder in folders:
            model.save_pretrained(folder)
        tokenizer.save(str(folders[0] / "tokenizer.json"))
        (folders[1] / "spiece.model").write_bytes(spiece(tokenizer).SerializeToString())
        keys = [convert(folder) for folder in folders]
        file = GGUFReader(folders[0].with_suffix(".gguf"))
        charsmap = file.fields["tokenizer.ggml.precompiled_charsmap"]
    assert [kind.name for kind in charsmap.types] == ["ARRAY", "UINT8"], "llama.cpp reads nothing else"
    assert keys[0]["tokenizer.ggml.model"] == "t5" and len(keys[0]["tokenizer.ggml.tokens"]) == 310
    assert keys[0] == keys[1], {name: (keys[0].get(name), keys[1].get(name)) for name in keys[0] | keys[1]
                                if keys[0].get(name) != keys[1].get(name)}
    for line in filter(str.strip, lines):
        ours, theirs = llama_cpp_unigram(keys[0], line), tokenizer.encode(line).ids
        # a run of one character has several cuts with the same pieces, and so with the same score
        assert ours == theirs or sorted(ours) == sorted(theirs), (line, ours, theirs)


# --- the model WordPiece ---

def train_words(texts, **normalizer):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(**normalizer)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(
        vocab_size=VOCAB - 5, special_tokens=["[PAD]", "[MASK]", "[SEP]", "[UNK]", "[CLS]"]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 4), ("[SEP]", 2)])
    return tokenizer


def wordpieces(keys, words):
    """llm_tokenizer_wpm: the longest token first, of a word with the sign at its beginning."""
    ids = {token: number for number, token in enumerate(keys["tokenizer.ggml.tokens"])}
    numbers = [keys["tokenizer.ggml.bos_token_id"]]
    for word in words:
        rest, found = "▁" + word, []
        while rest:
            end = next((end for end in range(len(rest), 0, -1) if rest[:end] in ids), None)
            if end is None:
                found = [keys["tokenizer.ggml.unknown_token_id"]]
                break
            found.append(ids[rest[:end]])
            rest = rest[end:]
        numbers += found
    return [*numbers, keys["tokenizer.ggml.seperator_token_id"]]


def check_words(folder, tokenizer, lines):
    config = transformers.BertConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=16,
                                     num_hidden_layers=1, num_attention_heads=2)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    keys, back = convert(folder), folder.with_name(f"{folder.name}_back")
    for line in lines:
        normal = tokenizer.normalizer.normalize_str(line)
        words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]
        assert wordpieces(keys, words) == tokenizer.encode(line).ids, line
    subprocess.run([CONVERT, folder.with_suffix(".gguf"), back, "-q"], check=True)
    made = Tokenizer.from_file(str(back / "tokenizer.json"))
    assert json.loads(made.to_str()) == json.loads(tokenizer.to_str())
    loaded = transformers.AutoTokenizer.from_pretrained(back)
    for line in lines:
        assert loaded(line, lines[0]).input_ids == tokenizer.encode(line, lines[0]).ids, line
    (back / "tokenizer.json").unlink()  # vocab.txt is left
    assert convert(back) == keys
    assert keys["tokenizer.ggml.model"] == "bert" and keys["tokenizer.ggml.token_type_count"] == 2


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
    check_unigram(texts, [" two  spaces\tand a tab  ", *lines])
    with tempfile.TemporaryDirectory() as name:
        for kind, rules in (("lower", {}), ("cased", {"lowercase": False}),
                            ("accents", {"strip_accents": False})):
            words = train_words((line for text in texts for line in text.splitlines()), **rules)
            check_words(Path(name) / kind, words, lines)
    print(f"{len(lines)} lines have the tokens of transformers, with tokenizer.json and tokenizer.model")


main()
