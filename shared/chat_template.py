"""A base model's chat template: a Jinja template from its own files that writes a conversation as one text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import Field

from shared.errors import BadRequest
from shared.strict_model import StrictModel

MAX_CHARACTERS = 200_000  # of a template
RENDER_SECONDS = 20.0  # limit for rendering in a subprocess, including its start
Tools = Sequence[Mapping[str, Any]] | None


class NoChatTemplate(BadRequest, status=422):
    """The base model has no chat template; use /v1/completions, which continues a prompt."""


class InvalidConversation(BadRequest, status=422):
    """The base model's chat template refuses these messages; the reason names the problem."""


class ChatTemplate(StrictModel):
    """A base model's chat template. tokens: the special tokens that it may name, such as `bos_token`."""

    template: str = Field(min_length=1, max_length=MAX_CHARACTERS)
    tokens: dict[str, str] = Field(default_factory=dict)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        answer: bool = True,
        now: datetime | None = None,
        tools: Tools = None,
    ) -> str:
        """Returns a conversation as text. answer: the text ends where the assistant's next turn begins.

        now: the time that the template may write; None: the present time. tools: those that the assistant may call, as
        OpenAI's API describes them.
        Raises InvalidConversation if the template refuses the messages, fails, or writes a text without end.
        """
        from shared.chat_rendering import RenderingError, render  # jinja2, which a client of the server does not have

        try:
            return render(self.template, self.tokens, messages, answer=answer, now=now, tools=tools)
        except RenderingError as error:
            raise InvalidConversation(str(error)) from error

    def render_limited(self, messages: Sequence[Mapping[str, Any]], tools: Tools = None) -> str:
        """Like `render`, with limits of time and memory. Only for the main thread of a process without other work.

        Raises InvalidConversation too if a limit is exceeded.
        """
        from shared.chat_rendering import RenderingError, limited

        try:
            with limited():
                return self.render(messages, tools=tools)
        except RenderingError as error:
            raise InvalidConversation(str(error)) from error

    def render_in_subprocess(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        answer: bool = True,
        seconds: float = RENDER_SECONDS,
        tools: Tools = None,
    ) -> str:
        """Like `render`, in a process of its own with limits of time and memory; it takes about 0.1 s.

        Raises InvalidConversation too if a limit is exceeded; its cause is TimeoutExpired if that is the time.
        """
        request = self.model_dump() | {"messages": list(messages), "answer": answer, "tools": tools}
        command = [sys.executable, "-m", "shared.chat_rendering"]
        try:
            process = subprocess.run(
                command, input=json.dumps(request), capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise InvalidConversation(
                f"the chat template does not render the messages within {seconds:.0f} seconds"
            ) from error
        result = (
            json.loads(process.stdout) if process.returncode == 0 else {"refused": process.stderr.rpartition("\n")[2]}
        )
        if "refused" in result:
            raise InvalidConversation(result["refused"] or f"the chat template ends with status {process.returncode}")
        return str(result["text"])
