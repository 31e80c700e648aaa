"""Reads a base model's tokenizer.json, spells its tokens, and checks that they have a row in the embedding table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from tokenizers import Tokenizer, processors

from shared.errors import BadRequest

SPACE = "\u2581"  # in the tokens of SentencePiece models


class UnknownToken(BadRequest):
    """The text has a token without a row in the base model's embedding table; remove that token from the text."""

    status, code, title = 422, "unknown-token", "Unknown token"


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
