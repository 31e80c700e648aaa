"""Tool calls: how families of models write them, and what a request's tools make of its prompt and its answers."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from shared.chat_template import ChatTemplate
from shared.errors import BadRequest
from shared.openai.requests import ChatRequest, FunctionCall, ToolCall


class ToolsNotSupported(BadRequest, status=400):
    """The base model's chat template has no tools, or calls of an unknown format; leave the tools out."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes a call: as JSON between two marks.

    template: a regular expression for the family's chat templates. arguments: their name in the JSON. listed: all calls
    are in one list.
    """

    template: str
    opening: str
    closing: str
    arguments: str
    listed: bool = False

    def schema(self, request: ChatRequest) -> str | None:
        """Returns the JSON schema of the call that a request requires, as JSON; None: it requires none."""
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    # With an id of its own, references within it keep their meaning.
                    self.arguments: {"$id": f"urn:tool:{number}", "type": "object"} | (tool.function.parameters or {}),
                },
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for number, tool in enumerate(request.required_tools)
        ]
        call = {"anyOf": calls}
        schema = {"type": "array", "items": call, "minItems": 1, "maxItems": 1} if self.listed else call
        return json.dumps(schema) if calls else None


FORMATS = (
    ToolFormat(r"<tool_call>(\\n|\s)*\{", "<tool_call>", "</tool_call>", "arguments"),  # Hermes; Qwen 2.5 and 3
    ToolFormat(r"\[TOOL_CALLS\] ?\[", "[TOOL_CALLS]", "", "arguments", listed=True),  # Mistral 7B v0.3, Nemo
    ToolFormat(r'"parameters": dictionary of argument name', "", "", "parameters"),  # Llama 3.1 to 3.3
)


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request to one base. schema: of the call that the answer has to be, as JSON; None: any answer."""

    format: ToolFormat
    names: frozenset[str]
    schema: str | None

    @classmethod
    def of(cls, request: ChatRequest, template: ChatTemplate) -> ToolUse | None:
        """Returns None for a request without tools. Raises ToolsNotSupported, also for a conversation with calls."""
        if not request.offered_tools and not any(turn.tool_calls or turn.tool_call_id for turn in request.messages):
            return None
        tool_format = next((each for each in FORMATS if re.search(each.template, template.template)), None)
        if tool_format is None or "tools" not in template.template:
            reason = "the base model's chat template has no tools, or calls of an unknown format"
            raise ToolsNotSupported(f"tools: {reason}", errors=[{"field": "tools", "message": reason}])
        if not request.offered_tools:
            return None
        names = frozenset(tool.function.name for tool in request.offered_tools)
        return cls(tool_format, names, tool_format.schema(request))

    @property
    def prompt_end(self) -> str:
        """What follows the rendered conversation: the mark before a call that is required."""
        return self.format.opening if self.schema else ""

    def opens(self, token: str) -> bool:
        """Returns whether a special token is the mark before a call, which does not end an answer."""
        return token == self.format.opening

    def read(self, text: str) -> tuple[str | None, tuple[ToolCall, ...]]:
        """Returns an answer's content and its calls. A text with a call that does not parse is content."""
        if self.schema or not self.format.opening:
            content, written = "", [text]
        else:
            content, *written = text.split(self.format.opening)
        try:
            calls = tuple(call for each in written for call in self._calls(each))
        except (ValueError, KeyError, TypeError):
            calls = ()
        return (content.strip() or None, calls) if calls else (text, ())

    def _calls(self, written: str) -> Iterator[ToolCall]:
        """Yields the calls in a text after an opening mark. Raises ValueError, KeyError or TypeError for others."""
        values: Any = from_json(written.strip().removesuffix(self.format.closing), allow_inf_nan=False)
        for value in values if self.format.listed else [values]:
            name, arguments = value["name"], value[self.format.arguments]
            if name not in self.names or not isinstance(arguments, dict):
                raise ValueError(f"the text calls no offered tool: {name}")
            # Mistral's templates take ids of nine letters and digits only.
            yield ToolCall(
                id=secrets.token_hex(5)[:9], function=FunctionCall(name=name, arguments=json.dumps(arguments))
            )
