"""The vocabulary of a Hugging Face model as metadata of a GGUF file, from its tokenizer.json.

llama.cpp has two kinds of BPE: over bytes (`gpt2`), whose pre-tokenizer it knows by a name, and over characters with a
score a token (`llama`, SentencePiece). A tokenizer of another kind, or with a pre-tokenizer that is not in
PRE_TOKENIZERS, is refused. Source: `conversion/base.py` of llama.cpp and `src/llama-vocab.cpp`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer

from server.catalog.chat_templates import read_chat_template
from server.compiler.checkpoints.base import BaseFiles
from server.compiler.checkpoints.tokenizer import end_of_text, write_tokenizer
from shared.errors import UnsupportedFormat

_REMEDY = "register the base as a GGUF file, or take the merged model as a directory and convert it with llama.cpp"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# How a byte-level tokenizer splits a text before its merges, with llama.cpp's name of that.
PRE_TOKENIZERS: Mapping[tuple[str, ...], str] = {
    (LLAMA3_SPLIT,): "llama-bpe",
    (QWEN2_SPLIT,): "qwen2",
    ("digits", "gpt2"): "smollm",
    ("gpt2",): "gpt-2",
}
_SPACE = "\u2581"  # how SentencePiece writes a space
_LEAST = -1e6  # the score of a token that no merge makes


def add_vocabulary(writer: GGUFWriter, files: BaseFiles, rows: int) -> None:
    """Adds the vocabulary, the special tokens and the chat template. rows: of the embedding table.

    Raises UnsupportedFormat for a tokenizer that llama.cpp would apply differently, or UnreadableCheckpoint.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        write_tokenizer(files, path)
        content = json.loads(path.read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_file(str(path))
    model = content["model"]
    if model.get("type") != "BPE":
        raise UnsupportedFormat(f"the base's tokenizer is of kind {model.get('type')}, not BPE; {_REMEDY}")
    numbers: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if max(numbers.values()) >= rows:
        raise UnsupportedFormat(f"the base's tokenizer has tokens beyond the {rows} rows of its embedding; {_REMEDY}")
    merges = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [TokenType.UNUSED] * rows
    for token, number in numbers.items():
        tokens[number], types[number] = token, TokenType.NORMAL
        if model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
            types[number] = TokenType.BYTE
    for added in content.get("added_tokens", []):
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    if model.get("byte_fallback"):
        _add_characters(writer, content, tokens, merges)
        if model.get("unk_token") in numbers:
            types[numbers[model["unk_token"]]] = TokenType.UNKNOWN
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(content))
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _add_special_tokens(writer, files, numbers, tokenizer)


def _add_characters(writer: GGUFWriter, content: dict[str, Any], tokens: list[str], merges: list[Any]) -> None:
    """Adds what a BPE over characters has: the earlier its merge, the higher a token's score."""
    scores = dict.fromkeys(tokens, _LEAST)
    for rank, (left, right) in enumerate(merges):
        scores[left + right] = max(scores.get(left + right, _LEAST), -float(rank))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([scores[token] for token in tokens])
    parts = [*_parts(content.get("normalizer"), "normalizers"), *_parts(content.get("pre_tokenizer"), "pretokenizers")]
    prefixed = any(
        part.get("prepend") == _SPACE or (part["type"] == "Metaspace" and part.get("prepend_scheme") != "never")
        for part in parts
    )
    writer.add_add_space_prefix(prefixed)


def _pre_tokenizer(content: dict[str, Any]) -> str:
    """Returns llama.cpp's name of a byte-level pre-tokenizer. Raises UnsupportedFormat if it has none."""
    steps: list[str] = []
    for part in _parts(content.get("pre_tokenizer"), "pretokenizers"):
        if part["type"] == "Split":
            steps.append(str(part["pattern"].get("Regex")))
        elif part["type"] == "Digits" and part["individual_digits"]:
            steps.append("digits")
        elif part["type"] == "ByteLevel":
            steps += ["gpt2"] if part.get("use_regex", True) else []
        else:
            steps.append(part["type"])
    name = PRE_TOKENIZERS.get(tuple(steps))
    if name is None:
        raise UnsupportedFormat(f"llama.cpp's name of the base's pre-tokenizer is not known here; {_REMEDY}")
    return name


def _parts(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or pre-tokenizer, which may be a sequence."""
    if step is None:
        return []
    return list(step[inner]) if step["type"] == "Sequence" else [step]


def _add_special_tokens(writer: GGUFWriter, files: BaseFiles, numbers: dict[str, int], tokenizer: Tokenizer) -> None:
    template = read_chat_template(files)
    config_path = files.root / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
    template_tokens = {} if template is None else template.tokens
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        value = template_tokens.get(name, config.get(name))
        text = value.get("content") if isinstance(value, dict) else value
        number = numbers.get(text) if isinstance(text, str) else None
        if number is None and name == "eos_token":
            number = end_of_text(files)
        if number is not None:
            add(number)
            if name == "bos_token":
                writer.add_add_bos_token(tokenizer.encode("a").ids[:1] == [number])
    if template is not None:
        writer.add_chat_template(template.template)
