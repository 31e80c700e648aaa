"""The tokenizers of GGUF files split texts as llama.cpp does, or are refused by name."""

import json
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from server.compiler.checkpoints.gguf_file import GgufFile
from server.compiler.checkpoints.gguf_tokenizer import PATTERNS, gguf_tokenizer
from shared.errors import UnreadableCheckpoint, UnsupportedModel
from tests.server.compiler.checkpoints.test_checkpoint import write_gguf
from tests.server.compiler.conftest import make_tiny
from tests.server.registry.exports.stock import LlamaCpp

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>", "<\uff5cUser\uff5c>", "<tool>"]
TYPES = [2, 3, 3, 1, 3, 4]  # `<|im_end|>` is flagged as a normal token, and `<tool>` as one of a user
PIECES = [
    *("a", " b", "  ", "   ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2003", "\u200b", "it's", "I'LL", "DON'T"),
    *("²", "½", "٣", "①", "123456", "7", "1,000.00", "é", "e\u0301", "ß", "漢字", "かな", "🙂", "👨\u200d👩\u200d👧"),
    *("हिन्दी", "عربي", "foo_bar", "(x)", "==", "...", "?!", "$5", "+%", "<=>", "^~|", "`", "«»", "—", "A.B", "ﬁ", "'s"),
    *("\U0001d518", "\x01", *SPECIAL),
]
SAMPLES = ["it's a b foo bar 123 it is the end of the day don't 漢字 é ß ... the bar"] * 9


def hard_texts(count=200):
    choose = random.Random(0)
    return [*PIECES, *("".join(choose.choices(PIECES, k=choose.randint(2, 12))) for _ in range(count - len(PIECES)))]


def byte_level(**fields):
    """Metadata of a byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SAMPLES, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return {
        "model": "gpt2",
        "tokens": [*SPECIAL, *sorted(model["vocab"], key=model["vocab"].get)],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 1,
    } | fields


def sentencepiece(**fields):
    """Metadata of a SentencePiece BPE with byte fallback."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.train_from_iterator(SAMPLES, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["".join(merge) for merge in model["merges"]]
    letters = [token for token in model["vocab"] if token not in pieces]
    tokens = [*SPECIAL, *byte_tokens, *pieces, *letters]
    ranks = {piece: -float(rank) for rank, piece in enumerate([*pieces, *letters])}
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [ranks.get(token, 0.0) for token in tokens],
        "token_type": [*TYPES, *[6] * len(byte_tokens), *[1] * (len(pieces) + len(letters))],
        "unknown_token_id": 0,
    } | fields


def written(path, fields):
    """A tiny base with a tokenizer; the metadata as they are read."""
    fields = {"token_type": [*TYPES, *[1] * (len(fields["tokens"]) - len(TYPES))]} | fields
    base = make_tiny(path.parent / "base", vocab_size=len(fields["tokens"]))
    metadata = {f"tokenizer__ggml__{name}": value for name, value in fields.items() if value is not None}
    write_gguf(base, path, **metadata)
    return GgufFile.read(path).metadata


FILES = {
    **{pre: byte_level(pre=pre) for pre in PATTERNS},
    "without pre": byte_level(),
    "bos": byte_level(pre="qwen2", add_bos_token=True),
    "llama-bpe without bos": byte_level(pre="llama-bpe", add_bos_token=False),
    "sentencepiece": sentencepiece(),
    "without space": sentencepiece(add_space_prefix=False),
    "without bos": sentencepiece(add_bos_token=False),
    "other bos": sentencepiece(bos_token_id=2),
}


@pytest.mark.parametrize("name", FILES)
def test_tokens_are_those_of_llama_cpp(tmp_path, name):
    assert_tokens_of_llama_cpp(written(tmp_path / "tiny.gguf", FILES[name]), tmp_path / "tiny.gguf")


@pytest.mark.slow
def test_tokens_of_the_real_model_are_those_of_llama_cpp(smollm2_gguf):
    assert_tokens_of_llama_cpp(GgufFile.read(smollm2_gguf).metadata, smollm2_gguf)


def assert_tokens_of_llama_cpp(metadata, path):
    ours, llama_cpp = gguf_tokenizer(metadata), LlamaCpp(path)
    for text in hard_texts():
        expected = llama_cpp.tokens(text, special=False)
        assert ours.encode(text, add_special_tokens=False).ids == expected, text
        decoded = ours.decode(expected, skip_special_tokens=False)
        assert decoded == text or "\u2581" in text or any(special in text for special in SPECIAL)
    for text in ("", "a b"):
        assert ours.encode(text).ids == llama_cpp.tokens(text, special=True)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"pre": "viking"}, UnsupportedModel, "pre-tokenizer 'viking' is not supported"),
        ({"model": "bert"}, UnsupportedModel, "tokenizer 'bert' is not supported"),
        ({"model": "llama"}, UnreadableCheckpoint, "no score for each token"),
        ({"tokens": None}, UnreadableCheckpoint, "no tokenizer"),
        ({"token_type": [1]}, UnreadableCheckpoint, "types of tokens"),
        ({"bos_token_id": 9999, "add_bos_token": True}, UnreadableCheckpoint, "bos_token_id is 9999"),
    ],
)
def test_other_tokenizers_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        gguf_tokenizer({f"tokenizer.ggml.{name}": value for name, value in (byte_level() | fields).items()})
