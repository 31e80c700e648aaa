"""Reads the chat template of a base model from its files, and refuses one that cannot be used."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from shared.chat_template import MAX_CHARACTERS, ChatTemplate, InvalidConversation
from shared.errors import UnreadableCheckpoint

if TYPE_CHECKING:
    from server.compiler.checkpoints.base import BaseFiles

CHECK_SECONDS = 20.0  # that a new base's template may take to render two short turns, process start included
_GGUF_NAMES = {"unk": "unknown", "pad": "padding", "sep": "seperator"}  # as llama.cpp spells them
SAMPLE = ({"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello, you."})
ASK_AGAIN = {"role": "user", "content": "Good-bye."}


def read_chat_template(files: BaseFiles) -> ChatTemplate | None:
    """Returns the chat template in a base model's files, or None. Raises UnreadableCheckpoint if it cannot be used."""
    template, tokens = _stored(files)
    if not template:
        return None
    if len(template) > MAX_CHARACTERS:
        raise UnreadableCheckpoint(f"the chat template has more than {MAX_CHARACTERS} characters")
    chat_template = ChatTemplate(template=template, tokens=tokens)
    _check(chat_template)
    return chat_template


def has_chat_template(files: BaseFiles) -> bool:
    """Whether a base model's files have a chat template, which is not rendered. Raises UnreadableCheckpoint."""
    return bool(_stored(files)[0])


def _stored(files: BaseFiles) -> tuple[str | None, dict[str, str]]:
    return _gguf(files.root) if files.form == "gguf" else _huggingface(files.root)


def _huggingface(directory: Path) -> tuple[str | None, dict[str, str]]:
    from server.compiler.checkpoints.tokenizer import named_tokens, token_config

    config = token_config(directory)
    template_file = directory / "chat_template.jinja"
    if template_file.is_file():
        return template_file.read_text(encoding="utf-8-sig"), named_tokens(config)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((each.get("template") for each in template if each.get("name") == "default"), None)
    return template if isinstance(template, str) else None, named_tokens(config)


def _gguf(path: Path) -> tuple[str | None, dict[str, str]]:
    from server.compiler.checkpoints.gguf_file import GgufFile
    from server.compiler.checkpoints.tokenizer import NAMED_TOKENS

    metadata = GgufFile.read(path).metadata
    template, spellings = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.ggml.tokens")
    tokens = {}
    for name in NAMED_TOKENS:
        key = re.sub("^(unk|pad|sep)", lambda match: _GGUF_NAMES[match[0]], name)
        number = metadata.get(f"tokenizer.ggml.{key}_id")
        # A file without such a token may number one that its vocabulary lacks.
        if isinstance(number, int) and isinstance(spellings, list) and 0 <= number < len(spellings):
            tokens[name] = str(spellings[number])
    return template if isinstance(template, str) else None, tokens


def _check(template: ChatTemplate) -> None:
    """Renders a conversation in a process of its own, because a template may loop without end.

    Raises UnreadableCheckpoint.
    """
    remedy = "remove it from the model's files to register the model without chat"
    try:
        text = template.render_in_subprocess([*SAMPLE, ASK_AGAIN], seconds=CHECK_SECONDS)
    except InvalidConversation as error:
        if isinstance(error.__cause__, subprocess.TimeoutExpired):
            raise UnreadableCheckpoint(
                f"the chat template does not render a short conversation within {CHECK_SECONDS:.0f} seconds; {remedy}"
            ) from error
        raise UnreadableCheckpoint(f"the chat template cannot be used: {error.detail}; {remedy}") from error
    if not text.strip():
        raise UnreadableCheckpoint(f"the chat template cannot be used: it renders nothing; {remedy}")
