"""Reads a base model's tokenizer.json, spells its tokens, and checks that they have a row in the embedding table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer, processors

from shared.errors import BadRequest

SPACE = "\u2581"  # in the tokens of SentencePiece models
TEXT_CHARACTERS = 16  # maximum characters of a text for each token of the context


class TextTooLong(BadRequest, status=422):
    """A text has more tokens than can be read; shorten it, or send fewer at once."""


class UnknownToken(BadRequest, status=422):
    """The text has a token without a row in the base model's embedding table; remove that token from the text."""


def read_tokenizer(content: bytes) -> Tokenizer:
    """Returns the tokenizer in a tokenizer.json. It reads texts whole and adds special tokens at the front only.

    Truncation, padding and an end-of-text token that the file adds to every text are switched off: a prompt is
    continued, and cutting a text to a program's length is not the tokenizer's part.
    """
    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.encode("x").special_tokens_mask[-1:] == [1]:
        document = json.loads(tokenizer.to_str())
        document["post_processor"] = _without_end(document["post_processor"])
        tokenizer = Tokenizer.from_str(json.dumps(document))
    return tokenizer


def _without_end(processor: dict[str, Any]) -> dict[str, Any]:
    """Returns a post-processor that adds no special token after a text."""
    match processor["type"]:
        case "Sequence":
            return processor | {"processors": [_without_end(each) for each in processor["processors"]]}
        case "BertProcessing" | "RobertaProcessing":
            token, number = processor["cls"]
            front = processors.TemplateProcessing(single=[token, "$A"], special_tokens=[(token, number)])
            return dict(json.loads(front.__getstate__()))
        case "TemplateProcessing":
            last = max(at for at, item in enumerate(processor["single"]) if "Sequence" in item)
            return processor | {"single": processor["single"][: last + 1]}
    return processor


def check_length(text: str, context: int, where: str) -> None:
    """Raises TextTooLong for a text of far more characters than a context of so many tokens can hold."""
    if len(text) > TEXT_CHARACTERS * context:
        raise TextTooLong(
            f"{where} has {len(text)} characters; at most {TEXT_CHARACTERS * context} are read for a context of "
            f"{context} tokens"
        )


def check_tokens(tokens: Sequence[int], context: int, vocabulary: int, where: str, read: int | None = None) -> None:
    """Raises TextTooLong for more tokens than the context has, and UnknownToken.

    read: how many of the tokens the model reads; None: all.
    """
    count = len(tokens) if read is None else read
    if count > context:
        raise TextTooLong(f"{where} has {count} tokens; the context has {context}")
    check_known(tokens, vocabulary, where)


def check_known(tokens: Iterable[int], vocabulary: int, where: str) -> None:
    """Raises UnknownToken for a token without a row. vocabulary: V, rows of the embedding table."""
    unknown = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if unknown is not None:
        raise UnknownToken(
            f"{where} has the token {unknown}, but the base model's embedding table has {vocabulary} rows; such a "
            "token was added to its tokenizer without resizing the model"
        )


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Returns the bytes that a token adds to a text in UTF-8, with its leading space; they may be part of a character.

    They are those of the tokenizer's decoder, which returns whole texts only.
    """
    piece, decoder = tokenizer.id_to_token(token) or "", str(tokenizer.decoder)
    if "ByteLevel(" in decoder:
        bytes_of = _byte_level()
        return b"".join(bytes_of[character] for character in piece) if bytes_of.keys() >= set(piece) else piece.encode()
    if "ByteFallback(" in decoder and (byte := re.fullmatch("<0x([0-9A-F]{2})>", piece)):
        return bytes.fromhex(byte[1])
    if SPACE in decoder:
        return piece.replace(SPACE, " ").encode()
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return text.encode()


@cache
def _byte_level() -> dict[str, bytes]:
    """Returns the byte of each character of a byte-level vocabulary: GPT-2's table."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(0x100 + at): bytes([byte]) for at, byte in enumerate(others)
    }
