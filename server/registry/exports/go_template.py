"""A base's chat template as the template of Go that Ollama uses, where the two write every conversation alike.

Most templates write each turn as a text before it, its content and a text after it, by its role. These texts are found
by rendering conversations of known contents; what they give is then compared with further renderings. Contents are
taken without white space around them, which some templates remove and Go's template cannot. Source: Ollama's
documentation of `Modelfile` and templates, Go's `text/template`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.chat_template import ChatTemplate, InvalidConversation

Turn = Mapping[str, str]
ROLES = ("system", "user", "assistant")
_SYSTEM, _FIRST, _ANSWER, _SECOND = (f"Qj{name}Zv" for name in ("system", "first", "answer", "second"))
_QUOTES = '"""'


class NotExpressible(Exception):
    """The chat template does more than to write texts around the turns."""


@dataclass(frozen=True)
class Turns:
    """The texts around the turns of a conversation. default: what stands for a system message where there is none."""

    around: Mapping[str, tuple[str, str]]  # by role: before the content, after it
    default: str
    begin_answer: str

    def render(self, messages: Sequence[Turn]) -> str:
        """Returns a conversation as Go's template writes it, up to the assistant's next turn."""
        system = any(message["role"] == "system" for message in messages)
        turns = (self.around[message["role"]] for message in messages)
        written = (
            before + message["content"] + after for message, (before, after) in zip(messages, turns, strict=True)
        )
        return ("" if system else self.default) + "".join(written) + self.begin_answer

    def go_template(self) -> str:
        """Returns the template. Raises NotExpressible for a text that a Modelfile cannot carry."""
        texts = [self.default, self.begin_answer, *(text for pair in self.around.values() for text in pair)]
        if any("{{" in text or "}}" in text or _QUOTES in text or not _printable(text) for text in texts):
            raise NotExpressible("a text of the chat template cannot be written in a Modelfile")
        parts = [f"{{{{ if not .System }}}}{self.default}{{{{ end }}}}"] if self.default else []
        parts.append("{{ range .Messages }}")
        for number, (role, (before, after)) in enumerate(self.around.items()):
            parts.append(f'{{{{ {"else if" if number else "if"} eq .Role "{role}" }}}}')
            parts.append(f"{before}{{{{ .Content }}}}{after}")
        return "".join([*parts, "{{ end }}{{ end }}", self.begin_answer])


def turns_of(template: ChatTemplate) -> Turns:
    """Returns the texts around the turns. Raises NotExpressible if these are not all that the template writes.

    A begin-of-text token at the beginning is left out, since Ollama adds it by the model's own settings.
    """
    try:
        turns = _derived(template)
        for messages in _probes():
            if turns.render(messages) != _rendered(template, messages):
                raise NotExpressible("the chat template writes some conversations in another way than turn by turn")
    except InvalidConversation as error:
        raise NotExpressible(f"the chat template refuses a usual conversation: {error.detail}") from error
    return turns


def _derived(template: ChatTemplate) -> Turns:
    user, system = {"role": "user", "content": _FIRST}, {"role": "system", "content": _SYSTEM}
    answer, second = {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _SECOND}
    _, after_user = _cut(_rendered(template, [user], answer=False), _FIRST)
    _, after_answer = _cut(_rendered(template, [user, answer], answer=False), _FIRST, _ANSWER)[1:]
    start, middle, between, end = _cut(_rendered(template, [user, answer, second]), _FIRST, _ANSWER, _SECOND)
    before_user = _without(between, after_answer, first=True)
    before_system, after_system, *_ = _cut(_rendered(template, [system, user]), _SYSTEM, _FIRST)
    return Turns(
        around={
            "system": (before_system, _without(after_system, before_user, first=False)),
            "user": (before_user, after_user),
            "assistant": (_without(middle, after_user, first=True), after_answer),
        },
        default=_without(start, before_user, first=False),
        begin_answer=_without(end, after_user, first=True),
    )


def _probes() -> list[list[Turn]]:
    system: Turn = {"role": "system", "content": "Two\nlines, and {braces}."}
    content = 'number {}: <b>"x"</b>\n\nü'
    turns: list[Turn] = [{"role": ROLES[1 + number % 2], "content": content.format(number)} for number in range(5)]
    return [*([*turns[:count]] for count in (1, 3, 5)), *([system, *turns[:count]] for count in (1, 3, 5))]


def _rendered(template: ChatTemplate, messages: Sequence[Turn], *, answer: bool = True) -> str:
    """Returns a conversation without its begin-of-text token. Raises NotExpressible if that is not at its beginning."""
    whole = template.render(messages, answer=answer)
    bare = template.model_copy(update={"tokens": template.tokens | {"bos_token": ""}}).render(messages, answer=answer)
    if whole not in (bare, template.tokens.get("bos_token", "") + bare):
        raise NotExpressible("the chat template writes the begin-of-text token within a conversation")
    return bare


def _cut(text: str, *contents: str) -> list[str]:
    """Returns the texts before, between and after these contents. Raises NotExpressible if one is not there once."""
    parts = []
    for content in contents:
        before, separator, text = text.partition(content)
        if not separator or content in text:
            raise NotExpressible("the chat template leaves out or repeats the content of a turn")
        parts.append(before)
    return [*parts, text]


def _without(text: str, part: str, *, first: bool) -> str:
    """Returns a text without the part that it begins with, or ends with. Raises NotExpressible if it does not."""
    if not (text.startswith(part) if first else text.endswith(part)):
        raise NotExpressible("the chat template writes a turn by more than its role")
    return text[len(part) :] if first else text[: len(text) - len(part)]


def _printable(text: str) -> bool:
    """Whether Ollama's parser keeps every character."""
    return all(character.isprintable() or character == "\n" for character in text)
