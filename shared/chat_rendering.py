"""Renders chat templates as `transformers` does (`apply_chat_template`): the same environment, filters and functions,
in a sandbox that lets a template read its inputs and nothing else.

Imports jinja2 and the standard library only. As a program it renders the conversation on standard input within a limit
of memory; `ChatTemplate.render_in_subprocess` starts it, because a template may loop without end.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED = 8_000_000  # characters of a rendered conversation
MAX_MEMORY = 1 << 30  # bytes of address space of the program
LIMITED_SECONDS = 5.0
LIMITED_MEMORY = 256 << 20  # bytes beyond those that the process has


class RenderingError(Exception):
    """The template refuses the conversation, fails, or writes a text without end."""


class _Generation(Extension):
    """`{% generation %}`, by which a template marks the assistant's text; it renders what it encloses."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the enclosed nodes."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


_ENVIRONMENT = _environment()


def render(
    template: str,
    tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    *,
    answer: bool,
    now: datetime | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Returns a conversation as text. answer: the text ends where the assistant's next turn begins.

    tools: those that the assistant may call, as OpenAI's API describes them.
    now: what the template's `strftime_now` writes; None: the present time. Raises RenderingError.
    """
    pieces: list[str] = []
    remaining = MAX_RENDERED
    variables = {
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": answer,
        "strftime_now": (now or datetime.now().astimezone()).strftime,
        **tokens,
    }
    try:
        compiled = _ENVIRONMENT.from_string(template)
        for piece in compiled.generate(variables):
            remaining -= len(piece)
            if remaining < 0:
                raise RenderingError(f"the chat template writes more than {MAX_RENDERED} characters")
            pieces.append(piece)
    except SecurityError as error:
        raise RenderingError(f"the chat template does what a template may not: {error}") from error
    except RecursionError as error:
        raise RenderingError("the chat template calls itself without end") from error
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise RenderingError(f"the chat template does not take these messages: {error}") from error
    return "".join(pieces)


@contextmanager
def limited() -> Iterator[None]:
    """Limits time and memory of the process meanwhile. Only for the main thread of a process that does nothing else.

    Raises RenderingError if a limit is exceeded.
    """
    import psutil  # which agents and servers have

    def expire(*_: object) -> NoReturn:
        raise RenderingError(f"the chat template does not render the messages within {LIMITED_SECONDS:.0f} seconds")

    limits = resource.getrlimit(resource.RLIMIT_DATA)
    used = psutil.Process().memory_info().data
    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, LIMITED_SECONDS)
    try:
        with suppress(ValueError, OSError):  # a system without this limit, or with a lower one
            resource.setrlimit(resource.RLIMIT_DATA, (used + LIMITED_MEMORY, limits[1]))
        yield
    except MemoryError as error:
        raise RenderingError(f"the chat template takes more than {LIMITED_MEMORY >> 20} MiB of memory") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def main() -> None:
    """Reads {"template", "tokens", "messages", "answer", "tools"} and writes {"text"} or {"refused"}."""
    with suppress(ValueError, OSError):  # a system without this limit, or with a lower one
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    request = json.load(sys.stdin)
    try:
        template, tokens, messages = request.pop("template"), request.pop("tokens"), request.pop("messages")
        result = {"text": render(template, tokens, messages, **request)}
    except RenderingError as error:
        result = {"refused": str(error)}
    except MemoryError:
        result = {"refused": f"the chat template takes more than {MAX_MEMORY >> 20} MiB of memory"}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
