"""Writes a base model's tokenizer as one `tokenizer.json`, which the `tokenizers` library reads on any device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from server.compiler.checkpoints.base import VOCABULARY_FILES, BaseFiles
from server.compiler.checkpoints.gguf_file import GgufFile
from server.compiler.checkpoints.gguf_tokenizer import check_fields, gguf_tokenizer
from shared.errors import UnreadableCheckpoint
from shared.tokenizer import read_tokenizer

# Special tokens that a chat template may name, as in transformers.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def write_tokenizer(files: BaseFiles, path: Path) -> None:
    """Writes the base's tokenizer to `path`: its tokenizer.json, or a conversion of its other files.

    As in transformers, tokenizer_config.json may add tokens to a tokenizer.json, and its `add_bos_token` is for
    tokenizers without that file only.

    Raises UnreadableCheckpoint if the base has no tokenizer that can be read or converted.
    """
    tokenizer_file = files.root / "tokenizer.json"
    if files.form == "huggingface" and tokenizer_file.is_file():
        try:
            tokenizer = read_tokenizer(tokenizer_file.read_bytes())
        except Exception as error:  # the library raises no narrower one
            raise UnreadableCheckpoint(f"tokenizer.json cannot be read ({error}); copy or download it again") from error
        if _add_tokens(tokenizer, token_config(files.root)):
            tokenizer.save(str(path))
        else:
            shutil.copyfile(tokenizer_file, path)
        return
    if files.form == "gguf":
        gguf_tokenizer(GgufFile.read(files.root).metadata).save(str(path))
    else:
        _convert(files.root).save(str(path))


def check_tokenizer(files: BaseFiles) -> None:
    """Raises UnreadableCheckpoint or UnsupportedModel for a base whose tokenizer is missing or of an unsupported kind.

    The tokenizer itself is not read.
    """
    if files.form == "gguf":
        check_fields(GgufFile.read(files.root).metadata)
    elif not any((files.root / name).is_file() for name in ("tokenizer.json", "tokenizer.model", *VOCABULARY_FILES)):
        raise UnreadableCheckpoint(f"{files.root.name} has no tokenizer.json; copy or download that file too")


def end_tokens(files: BaseFiles, vocabulary: int) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a text, as the base's own files say; the first one ends texts to learn.

    vocabulary: rows of the embedding table; a token beyond it is never written and is left out.
    """
    if files.form == "gguf":
        metadata = GgufFile.read(files.root).metadata
        value: Any = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    else:
        configs = (read_object(files.root / name) for name in ("generation_config.json", "config.json"))
        value = next((config["eos_token_id"] for config in configs if config.get("eos_token_id") is not None), None)
    numbers = value if isinstance(value, list) else [value]
    ids = (number for number in numbers if isinstance(number, int) and not isinstance(number, bool))
    return tuple(dict.fromkeys(number for number in ids if 0 <= number < vocabulary))


def token_config(directory: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json, with the named tokens of special_tokens_map.json that it lacks.

    Raises UnreadableCheckpoint.
    """
    return read_object(directory / "special_tokens_map.json") | read_object(directory / "tokenizer_config.json")


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; an empty one without the file. Raises UnreadableCheckpoint."""
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise UnreadableCheckpoint(f"{path.name} is not JSON: {error}") from error
    return document if isinstance(document, dict) else {}


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Returns the spellings of the special tokens that a tokenizer's configuration names."""
    tokens = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _add_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> bool:
    """Adds the tokens of a tokenizer_config.json as transformers does; returns whether the tokenizer lacked any."""
    named, stated = named_tokens(config), tokenizer.get_added_tokens_decoder().values()
    decoder = config.get("added_tokens_decoder", {})
    added = [_added_token(decoder[number]) for number in sorted(decoder, key=int)]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    special = [*named.values(), *(extra.values() if isinstance(extra, dict) else extra)]
    contents = {token.content for token in (*stated, *added)}
    added += [token for token in map(_added_token, special) if token.content not in contents]
    known = {repr(token) for token in stated}
    new = [token for token in added if repr(token) not in known]
    for token in new:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    return bool(new)


def _added_token(value: str | dict[str, Any]) -> AddedToken:
    """Returns a token that tokenizer_config.json adds; one given by its spelling alone is special."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return AddedToken(**{name: given for name, given in value.items() if not name.startswith("__")})


def _convert(directory: Path) -> Tokenizer:
    """Returns the tokenizer of a directory without tokenizer.json as transformers converts it.

    Raises UnreadableCheckpoint.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory))
        if not tokenizer.is_fast:
            raise ValueError("its tokenizer is written in Python")
        backend: Tokenizer = tokenizer.backend_tokenizer
        return backend
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnreadableCheckpoint(f"{directory.name} has no tokenizer that transformers can convert") from error
