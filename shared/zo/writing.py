"""Encodes the records of tasks that write text: a completion, the assistant's turns of a conversation, or a document.

What the model is to write ends with the base's end-of-text token. A text that is too long is treated by its kind:

completion  the prompt is cut from its front; an answer of more than T tokens does not fit
messages    the conversation is cut from its front to S tokens, and of the assistant's tokens in it the last T count
text        the document becomes several examples: each token counts once, in pieces of at most T tokens, which see as
            many tokens before them as S has room for
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from shared.errors import InvalidDataset, InvalidTask
from shared.recipe import Recipe
from shared.task import Task, read_messages, read_question, read_writing
from shared.zo.encoding import Example, Row, encode_choice, encode_question, fit_row, token_ids

MOST_TEXT = 4_000_000  # characters of one document; a longer one does not fit
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class WritingStyle:
    """What a base's own files say of texts. end: its end-of-text token; None: texts have no end.

    render: writes messages as one text, by the base's chat template; `answer=True` ends it where the assistant's next
    turn begins. None: the base has no chat template.
    """

    end: int | None = None
    render: Callable[..., str] | None = None


PLAIN = WritingStyle()  # of a base of which nothing is known


@dataclass(frozen=True)
class Encoder:
    """Encodes records of one task in the shapes of one recipe."""

    task: Task
    tokenizer: Tokenizer
    recipe: Recipe
    style: WritingStyle = PLAIN

    def __post_init__(self) -> None:
        """Raises InvalidTask for a conversation with a base that has no chat template."""
        if self.task.kind == "messages" and self.style.render is None:
            raise InvalidTask(
                f"task {self.task.name!r} is of kind messages, but the program's base has no chat template; use kind "
                "completion, whose template says how prompt and answer are written"
            )

    def encode(self, record: Mapping[str, Any], where: str) -> tuple[Example, ...]:
        """Returns the record's examples: one, or of kind text one for each piece.

        Raises InvalidDataset, naming `where`, for a record that does not fit the task or the recipe.
        """
        match self.task.kind:
            case "choice":
                question = read_question(self.task, record, where)
                return (encode_question(self.tokenizer, question, self.recipe, where),)
            case "completion":
                row = encode_choice(self.tokenizer, read_writing(self.task, record, where))
                return (self._example(replace(row, answer=row.answer + self._end), where),)
            case "messages":
                return (self._conversation(read_messages(self.task, record, where), where),)
            case "text":
                return self._document(read_writing(self.task, record, where).answer, where)

    def read(self, record: Mapping[str, Any], where: str) -> None:
        """Raises InvalidDataset, naming `where`, for a record that does not fit the task, whatever the recipe is."""
        match self.task.kind:
            case "choice":
                read_question(self.task, record, where)
            case "messages":
                read_messages(self.task, record, where)
            case _:
                read_writing(self.task, record, where)

    @property
    def _end(self) -> tuple[int, ...]:
        return () if self.style.end is None else (self.style.end,)

    @property
    def _opening(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode("").ids)

    def _example(self, row: Row, where: str) -> Example:
        opening = self._opening
        fitted, cut = fit_row(row, opening, self.recipe, where)
        return Example((fitted,), 0, cut, len(opening) if fitted.prompt[: len(opening)] == opening else 0)

    def _document(self, text: str, where: str) -> tuple[Example, ...]:
        if len(text) > MOST_TEXT:
            raise InvalidDataset(f"{where}: the text has {len(text)} characters; the limit is {MOST_TEXT}")
        opening, tokens = self._opening, (*token_ids(self.tokenizer, text), *self._end)
        size, span = self.recipe.answer_length, self.recipe.sequence_length
        if len(tokens) < 2:
            raise InvalidDataset(f"{where}: the text has one token; there is nothing to predict from it")
        examples = []
        for start in range(1, len(tokens), size):
            # As much of what comes before as could fit; the opening stays at the front.
            first = max(start - span, 0)
            before = tokens[first:start] if first == 0 else opening + tokens[first:start]
            example = self._example(Row(before, tokens[start : start + size]), where)
            examples.append(replace(example, truncated=False))  # what is cut counts in an earlier piece
        # A private step counts examples as records: one record must be one example.
        return tuple(examples[:1] if self.recipe.privacy == "clipped" else examples)

    def _conversation(self, messages: list[dict[str, str]], where: str) -> Example:
        render = self.style.render
        assert render is not None  # noqa: S101  # __post_init__
        tokens: list[int] = []
        counted: list[int] = []
        text = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = render(messages[:number], answer=True)
            whole = render(messages[: number + 1], answer=False)
            if not asked.startswith(text) or not whole.startswith(asked):
                raise InvalidDataset(
                    f"{where}: the base's chat template does not write turn {number + 1} after the turns before it, so "
                    "that the assistant's text cannot be found in it"
                )
            tokens += token_ids(self.tokenizer, asked[len(text) :], special=not text)
            said = token_ids(self.tokenizer, whole[len(asked) :], special=False)
            last = self._last(said)
            counted += range(len(tokens), len(tokens) + last)
            tokens += said
            text = whole
        return self._cut(tokens, counted, where)

    def _last(self, said: list[int]) -> int:
        """Returns how many tokens of a turn count: up to its end-of-text token, without the line break after it."""
        end = self.style.end
        return len(said) - said[::-1].index(end) if end is not None and end in said else len(said)

    def _cut(self, tokens: list[int], counted: list[int], where: str) -> Example:
        """Returns the example of a conversation's last tokens, as many as fit."""
        read = counted[-1] + 1  # the last token that counts ends the row
        first = max(read - self.recipe.sequence_length - 1, 0)
        opening = self._opening if first else ()
        first += len(opening)
        # The first token kept predicts the next one and is predicted by none.
        kept = [place for place in counted if place > first][-self.recipe.answer_length :]
        if not kept:
            raise InvalidDataset(f"{where}: none of the assistant's tokens is left in {self.recipe.sequence_length}")
        row = Row(
            prompt=(*opening, *tokens[first : kept[0]]),
            answer=tuple(tokens[kept[0] : read]),
            counted=tuple(place - kept[0] for place in kept),
        )
        example = self._example(row, where)
        return replace(example, truncated=example.truncated or len(kept) < len(counted))
