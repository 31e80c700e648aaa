"""Chat templates: how a base model writes a conversation as one text, in Jinja as its own files have it.

Rendering follows `transformers` (`apply_chat_template`): the same environment, filters and functions, in a sandbox that
lets a template read what it is given and nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Field

from shared.errors import BadRequest, UnreadableCheckpoint

if TYPE_CHECKING:
    from server.compiler.checkpoints.base import BaseFiles

MOST_CHARACTERS = 200_000  # of a template
MOST_RENDERED = 8_000_000  # characters of a rendered conversation
CHECK_SECONDS = 20.0  # that a new base's template may take to render two short turns, process start included
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
SAMPLE = ({"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello, you."})
ASK_AGAIN = {"role": "user", "content": "Good-bye."}


class NoChatTemplate(BadRequest):
    """The base model has no chat template; use /v1/completions, which continues a prompt."""

    status, code, title = 422, "no-chat-template", "No chat template"


class InvalidConversation(BadRequest):
    """The base model's chat template refuses these messages; its reason says what it takes."""

    status, code, title = 422, "invalid-conversation", "Invalid conversation"


class _Generation(Extension):
    """`{% generation %}`, by which a template marks the assistant's text; it renders what it encloses."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the enclosed nodes."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return made


_ENVIRONMENT = _environment()


class ChatTemplate(BaseModel):
    """A base model's chat template. tokens: the special tokens that it may name, such as `bos_token`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str = Field(min_length=1, max_length=MOST_CHARACTERS)
    tokens: dict[str, str] = Field(default_factory=dict)

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
        """Returns a conversation as text. answer: the text ends where the assistant's next turn begins.

        Raises InvalidConversation if the template refuses the messages, fails, or writes a text without end.
        """
        pieces: list[str] = []
        left = MOST_RENDERED
        try:
            template = _ENVIRONMENT.from_string(self.template)
            for piece in template.generate(messages=messages, add_generation_prompt=answer, **self.tokens):
                left -= len(piece)
                if left < 0:
                    raise InvalidConversation(f"the chat template writes more than {MOST_RENDERED} characters")
                pieces.append(piece)
        except SecurityError as error:
            raise InvalidConversation(f"the chat template does what a template may not: {error}") from error
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise InvalidConversation(f"the chat template does not take these messages: {error}") from error
        return "".join(pieces)


def read_chat_template(files: BaseFiles) -> ChatTemplate | None:
    """Returns the chat template in a base model's files, or None. Raises UnreadableCheckpoint if it cannot be used."""
    template, tokens = _gguf(files.root) if files.form == "gguf" else _huggingface(files.root)
    if not template:
        return None
    if len(template) > MOST_CHARACTERS:
        raise UnreadableCheckpoint(f"the chat template has more than {MOST_CHARACTERS} characters")
    found = ChatTemplate(template=template, tokens=tokens)
    _check(found)
    return found


def _huggingface(directory: Path) -> tuple[str | None, dict[str, str]]:
    config = _object(directory / "tokenizer_config.json")
    named = _object(directory / "special_tokens_map.json") | config
    tokens = {}
    for name in TOKENS:
        value = named.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    own = directory / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8"), tokens
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((each.get("template") for each in template if each.get("name") == "default"), None)
    return template if isinstance(template, str) else None, tokens


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnreadableCheckpoint(f"{path.name} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _gguf(path: Path) -> tuple[str | None, dict[str, str]]:
    from server.compiler.checkpoints.gguf_file import GgufFile

    metadata = GgufFile.read(path).metadata
    template, spellings = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.ggml.tokens")
    tokens = {}
    for name in TOKENS:
        number = metadata.get(f"tokenizer.ggml.{name.replace('unk', 'unknown').replace('pad', 'padding')}_id")
        # A file without such a token may number one that its vocabulary lacks.
        if isinstance(number, int) and isinstance(spellings, list) and 0 <= number < len(spellings):
            tokens[name] = str(spellings[number])
    return template if isinstance(template, str) else None, tokens


def _check(template: ChatTemplate) -> None:
    """Renders a conversation in a process of its own, because a template may loop without end.

    Raises UnreadableCheckpoint.
    """
    command = [sys.executable, "-m", "server.catalog.chat_templates"]
    try:
        done = subprocess.run(
            command,
            input=template.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UnreadableCheckpoint(
            f"the chat template does not render a short conversation within {CHECK_SECONDS:.0f} seconds; remove it "
            "from the model's files to register the model without chat"
        ) from error
    if done.returncode:
        reason = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]
        raise UnreadableCheckpoint(
            f"the chat template cannot be used: {reason}; remove it from the model's files to register the model "
            "without chat"
        )


def main() -> int:
    """Renders a short conversation by the template on standard input; prints what is wrong with it."""
    template = ChatTemplate.model_validate_json(sys.stdin.read())
    try:
        if not template.render([*SAMPLE, ASK_AGAIN]).strip():
            raise InvalidConversation("it renders nothing")
    except InvalidConversation as error:
        sys.stdout.write(error.detail)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
