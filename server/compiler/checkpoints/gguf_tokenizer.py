"""Converts the tokenizer in a GGUF file, so that it splits texts as llama.cpp does. Other kinds are refused by name.

llama.cpp has two kinds that the supported architectures use: `gpt2`, a byte-level BPE whose words are found by the
patterns of `tokenizer.ggml.pre`, and `llama`, a SentencePiece BPE, which merges the pieces of the highest score first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shared.errors import UnreadableCheckpoint, UnsupportedModel
from shared.tokenizer import SPACE

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SUFFIXES = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = (rf"(?:{_SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",)
_LLAMA3 = (rf"(?:{_SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",)
_CAPITALS, _SMALL = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"  # letters that begin a word, and go on
_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_CAPITALS}*{_SMALL}+|{_CAPITALS}+{_SMALL}*)"
_REST_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = (rf"{_WORD}(?:{_SUFFIXES})?|\p{{N}}{{1,3}}|{_REST_AND_SLASHES}",)
_TEKKEN = (rf"{_WORD}|\p{{N}}|{_REST_AND_SLASHES}",)
_SEED = (
    rf"(?:{_SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_HUNYUAN = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SINGLE_DIGITS = (r"\p{N}", _GPT2)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "pixtral")
# By `tokenizer.ggml.pre`: the patterns by which a text is split, each in the parts that the one before left.
PATTERNS: Mapping[str, Sequence[str]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _SINGLE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    **dict.fromkeys((*_LLAMA3_NAMES, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3),
    "gpt-4o": _GPT4O,
    "tekken": _TEKKEN,
    "seed-coder": _SEED,
    "hunyuan-dense": _HUNYUAN,
}
WHOLE_WORDS = (*_LLAMA3_NAMES, "tekken")  # whose words in the vocabulary are one token; BOS begins a text
# llama.cpp parses these as special tokens, whatever type the file gives them.
SPECIAL_LOOKING = re.compile(
    r"<\|(eot_id|eom_id|im_end|end|endoftext|end_of_text|(fim|code)_(prefix|suffix|middle)|fim_pad|fim_repo)\|>"
    r"|<\|(repo_name|file_sep)\|>|<(end_of_turn|end_of_utterance|EOT|PRE|SUF|MID|PAD|REPO|reponame|fim-repo)>|_<EOT>"
    r"|<fim[-_](prefix|suffix|middle|pad)>|\u2581<(PRE|SUF|MID)>"
    r"|<\uff5c(end\u2581of\u2581sentence|fim\u2581(begin|hole|end))\uff5c>"
)


class _Type(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer of a GGUF file's metadata. Raises UnreadableCheckpoint, UnsupportedModel."""
    fields = check_fields(metadata)
    tokens, bos = fields["tokens"], fields.get("bos_token_id")
    types = fields.get("token_type") or [_Type.NORMAL] * len(tokens)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if fields["model"] == "gpt2":
        tokenizer, adds_bos = _byte_level(fields, vocabulary)
    else:
        tokenizer, adds_bos = _sentencepiece(fields, vocabulary, types), True
        bos = 1 if bos is None else bos
    tokenizer.add_tokens([token for token in map(_added_token, tokens, types) if token is not None])
    if fields.get("add_bos_token", adds_bos) and bos is not None:
        if not 0 <= bos < len(tokens):
            raise UnreadableCheckpoint(f"the GGUF file's bos_token_id is {bos}, but it has {len(tokens)} tokens")
        front = (tokens[bos], bos)
        tokenizer.post_processor = processors.TemplateProcessing(single=[front[0], "$A"], special_tokens=[front])
    return tokenizer


def check_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a GGUF file's tokenizer, without their prefix, if there is one of a supported kind.

    Raises UnreadableCheckpoint, UnsupportedModel.
    """
    fields = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    kind, tokens, pre = fields.get("model"), fields.get("tokens"), fields.get("pre", "default")
    if not isinstance(kind, str) or not isinstance(tokens, list) or not tokens:
        raise UnreadableCheckpoint("the GGUF file has no tokenizer; convert the model again, with its tokenizer")
    if len(types := fields.get("token_type") or tokens) != len(tokens):
        raise UnreadableCheckpoint(f"the GGUF file has {len(tokens)} tokens and {len(types)} types of tokens")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"the GGUF file's tokenizer {kind!r} is not supported; supported: gpt2, llama")
    if kind == "gpt2" and pre not in PATTERNS:
        raise UnsupportedModel(
            f"the GGUF file's pre-tokenizer {pre!r} is not supported; supported: {', '.join(PATTERNS)}; use the model "
            "in Hugging Face's format"
        )
    scores = fields.get("scores")
    if kind == "llama" and not (isinstance(scores, list) and len(scores) == len(tokens)):
        raise UnreadableCheckpoint("the GGUF file's tokenizer has no score for each token; convert the model again")
    return fields


def _added_token(text: str, kind: int) -> AddedToken | None:
    """Returns a token that is found in a text before its words are, or None."""
    if kind in (_Type.CONTROL, _Type.UNKNOWN) or SPECIAL_LOOKING.fullmatch(text):
        return AddedToken(text, special=True, normalized=False)
    return AddedToken(text, special=False, normalized=False) if kind == _Type.USER_DEFINED else None


def _byte_level(fields: Mapping[str, Any], vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Returns a byte-level BPE, and whether BOS begins a text unless the file says otherwise."""
    pre = fields.get("pre", "default")
    merges = []
    for merge in fields.get("merges") or []:
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at > 0 and left in vocabulary and right in vocabulary and left + right in vocabulary:
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre in WHOLE_WORDS


def _sentencepiece(fields: Mapping[str, Any], vocabulary: dict[str, int], types: Sequence[int]) -> Tokenizer:
    """Returns a SentencePiece BPE: of all pairs of pieces that are a piece together, the highest score merges first."""
    tokens, scores = fields["tokens"], fields["scores"]
    merges = []
    for number, token in enumerate(tokens):
        if vocabulary[token] == number and types[number] in (_Type.NORMAL, _Type.USER_DEFINED, _Type.UNUSED):
            pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
            merges += [(scores[number], pair) for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
    merges.sort(key=lambda merge: -merge[0])
    unknown = fields.get("unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            [pair for _, pair in merges],
            unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    prefixed = bool(fields.get("add_space_prefix", True))
    prefix = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    spelling = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*spelling, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    return tokenizer
