"""Writes a base model's tokenizer as one `tokenizer.json`, which the `tokenizers` library reads on any device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from server.compiler.checkpoints.base import BaseFiles
from server.compiler.checkpoints.gguf_file import GgufFile
from shared.errors import UnreadableCheckpoint


def write_tokenizer(files: BaseFiles, path: Path) -> None:
    """Writes the base's tokenizer to `path`: a copy of its tokenizer.json, or a conversion by transformers.

    Raises UnreadableCheckpoint if the base has no tokenizer that can be converted.
    """
    tokenizer_file = files.root / "tokenizer.json"
    if files.form == "huggingface" and tokenizer_file.is_file():
        shutil.copyfile(tokenizer_file, path)
        return
    convert_tokenizer(files).backend_tokenizer.save(str(path))


def end_of_text(files: BaseFiles) -> int | None:
    """Returns the id of the token that ends a text, as the base's own files say; None if they do not.

    Of several such tokens the first one is taken.
    """
    if files.form == "gguf":
        token = GgufFile.read(files.root).metadata.get("tokenizer.ggml.eos_token_id")
    else:
        token = None
        for name in ("generation_config.json", "config.json"):
            path = files.root / name
            if token is None and path.is_file():
                token = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if isinstance(token, list):
        token = token[0] if token else None
    return token if isinstance(token, int) and not isinstance(token, bool) and token >= 0 else None


def convert_tokenizer(files: BaseFiles) -> Any:
    """Returns the base's tokenizer as transformers converts it. Raises UnreadableCheckpoint if it cannot."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if files.form == "gguf":
            # The class that AutoTokenizer chooses for every architecture that is supported here. AutoTokenizer itself
            # reads the whole file's header with the slow reader first.
            return PreTrainedTokenizerFast.from_pretrained(str(files.root.parent), gguf_file=files.root.name)
        tokenizer = AutoTokenizer.from_pretrained(str(files.root))
        if not tokenizer.is_fast:
            raise ValueError("its tokenizer is written in Python")
        return tokenizer
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnreadableCheckpoint(f"{files.root.name} has no tokenizer that transformers can convert") from error
