"""Writes a base model's tokenizer as one `tokenizer.json`, which the `tokenizers` library reads on any device."""

from __future__ import annotations

import shutil
from pathlib import Path

from server.compiler.checkpoints.base import BaseFiles
from shared.errors import UnreadableCheckpoint


def write_tokenizer(files: BaseFiles, path: Path) -> None:
    """Writes the base's tokenizer to `path`: a copy of its tokenizer.json, or a conversion by transformers.

    Raises UnreadableCheckpoint if the base has no tokenizer that can be converted.
    """
    own = files.root / "tokenizer.json"
    if files.form == "huggingface" and own.is_file():
        shutil.copyfile(own, path)
        return
    from transformers import AutoTokenizer

    try:
        if files.form == "gguf":
            tokenizer = AutoTokenizer.from_pretrained(str(files.root.parent), gguf_file=files.root.name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(files.root))
        tokenizer.backend_tokenizer.save(str(path))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnreadableCheckpoint(f"{files.root.name} has no tokenizer that transformers can convert") from error
