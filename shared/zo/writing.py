"""Encodes the records of tasks that write text: a completion, the assistant's turns of a conversation, a document, or
answers that people preferred to others.

The text to write ends with the base's end-of-text token. A text that is too long is treated by its kind:

completion  the prompt is cut from its front; an answer of more than T tokens does not fit
messages    the conversation is cut from its front to S tokens, and of the assistant's tokens in it the last T count
text        the document becomes several examples: each token counts once, in pieces of at most T tokens, which see as
            many tokens before them as S has room for
preference  the prompt is cut from its front, alike for both answers; one of more than T tokens does not fit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from shared.chat_template import InvalidConversation
from shared.errors import InvalidDataset, InvalidTask
from shared.recipe import Recipe
from shared.task import Task, Truncate
from shared.task_records import Choice, is_learned, read_completion, read_messages, read_preference, read_question
from shared.zo.encoding import (
    Example,
    Row,
    check_examples,
    encode_choice,
    encode_question,
    fit_row,
    token_ids,
    truncation,
)

MAX_TEXT = 4_000_000  # characters of one document; a longer one does not fit
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TextFormat:
    """How a base model marks the end of a text and writes conversations, from its own files.

    end_token: its end-of-text token; None: texts have no end. stop_tokens: all tokens that end a text.

    vocabulary: rows of its embedding table; None: not known.

    render: writes messages as one text, by the base's chat template; `answer=True` ends it where the assistant's next
    turn begins. None: the base has no chat template.
    """

    end_token: int | None = None
    render: Callable[..., str] | None = None
    stop_tokens: tuple[int, ...] = ()
    vocabulary: int | None = None


PLAIN_FORMAT = TextFormat()  # for a base without information on texts


class _TextToken(NamedTuple):
    """A token, and its first character in the text with the one after it."""

    number: int
    span: tuple[int, int]


@dataclass(frozen=True)
class Encoder:
    """Encodes records of one task in the shapes of one recipe."""

    task: Task
    tokenizer: Tokenizer
    recipe: Recipe
    text_format: TextFormat = PLAIN_FORMAT

    def __post_init__(self) -> None:
        """Raises InvalidTask for a conversation with a base that has no chat template."""
        if self.task.kind == "messages" and self.text_format.render is None:
            raise InvalidTask(
                f"task {self.task.name!r} is of kind messages, but the program's base has no chat template; use kind "
                "completion, whose template says how prompt and answer are written"
            )

    def encode(self, record: Mapping[str, Any], location: str) -> tuple[Example, ...]:
        """Returns the record's examples: one, or of kind text one for each piece.

        Raises InvalidDataset, naming `location`, for a record that does not fit the task, the recipe or the base.
        """
        try:
            examples = self._examples(record, location)
        except InvalidConversation as error:
            raise InvalidDataset(f"{location}: {error.detail}") from error
        check_examples(examples, self.text_format.vocabulary, location)
        return examples

    def _examples(self, record: Mapping[str, Any], location: str) -> tuple[Example, ...]:
        match self.task.kind:
            case "choice":
                question = read_question(self.task, record, location)
                return (encode_question(self.tokenizer, question, self.recipe, location),)
            case "completion":
                choice = read_completion(self.task, record, location)
                row = encode_choice(self.tokenizer, choice)
                row = replace(row, answer=row.answer + self._end_tokens)
                return (self._example(row, location, *truncation(self.tokenizer, choice)),)
            case "messages":
                return (self._cut(*self._counted(read_messages(self.task, record, location), location), location),)
            case "preference":
                return (self._preference(record, location),)
            case "text":
                return self._document(read_completion(self.task, record, location).answer, location)

    def read(self, record: Mapping[str, Any], location: str) -> None:
        """Raises InvalidDataset, naming `location`, for a record that does not fit the task, whatever the recipe is."""
        match self.task.kind:
            case "choice":
                read_question(self.task, record, location)
            case "messages":
                read_messages(self.task, record, location)
            case "preference":
                read_preference(self.task, record, location)
            case _:
                read_completion(self.task, record, location)

    @property
    def _end_tokens(self) -> tuple[int, ...]:
        return () if self.text_format.end_token is None else (self.text_format.end_token,)

    @property
    def _bos_tokens(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode("").ids)

    def _example(self, row: Row, location: str, truncate: Truncate = "head", ending: int = 0) -> Example:
        fitted, truncated = fit_row(row, self._bos_tokens, self.recipe, location, None, truncate, ending)
        return Example((fitted,), 0, truncated)

    def _preference(self, record: Mapping[str, Any], location: str) -> Example:
        """Returns an example of one or two answers, whose prompts leave room for the longer one."""
        preference = read_preference(self.task, record, location)
        rows, cuts = list[Row](), list[tuple[Truncate, int]]()
        for answer in preference.answers:
            if isinstance(answer, Choice):
                row = encode_choice(self.tokenizer, answer)
                rows.append(replace(row, answer=row.answer + self._end_tokens))
                cuts.append(truncation(self.tokenizer, answer))
                continue
            if self.text_format.render is None:
                raise InvalidDataset(f"{location}: the record has messages, but the base has no chat template")
            tokens, positions = self._counted(answer, location)
            begin = positions[0]
            counted = tuple(position - begin for position in positions)
            rows.append(Row(tuple(tokens[:begin]), tuple(tokens[begin : positions[-1] + 1]), counted))
            cuts.append(("head", 0))
        longest, bos_tokens = max(len(row.answer) for row in rows), self._bos_tokens
        fitted = [
            fit_row(row, bos_tokens, self.recipe, location, longest, *each)
            for row, each in zip(rows, cuts, strict=True)
        ]
        truncated = any(cut for _, cut in fitted)
        return Example(tuple(row for row, _ in fitted), 0, truncated, liked=preference.liked)

    def with_other_answers(self, examples: Sequence[Example]) -> list[Example]:
        """Returns the examples of a task whose records have labels with their second rows: the answer of the example
        before them, after their own prompt. Other examples stay as they are.
        """
        if self.recipe.loss != "kto":
            return list(examples)
        bos_tokens, completed = self._bos_tokens, []
        for at, example in enumerate(examples):
            own, other = example.rows[0], examples[at - 1].rows[0]
            row, _ = fit_row(replace(other, prompt=own.prompt), bos_tokens, self.recipe, "the answer of another record")
            completed.append(replace(example, rows=(own, row)))
        return completed

    def _document(self, text: str, location: str) -> tuple[Example, ...]:
        if len(text) > MAX_TEXT:
            raise InvalidDataset(f"{location}: the text has {len(text)} characters; the limit is {MAX_TEXT}")
        bos_tokens, tokens = self._bos_tokens, (*token_ids(self.tokenizer, text), *self._end_tokens)
        piece_length, sequence_length = self.recipe.answer_length, self.recipe.sequence_length
        if len(tokens) < 2:
            raise InvalidDataset(f"{location}: the text has one token; there is nothing to predict from it")
        examples = []
        for start in range(1, len(tokens), piece_length):
            # As many preceding tokens as could fit. The BOS tokens stay at the front.
            start_of_context = max(start - sequence_length, 0)
            context = (
                tokens[start_of_context:start] if start_of_context == 0 else bos_tokens + tokens[start_of_context:start]
            )
            example = self._example(Row(context, tokens[start : start + piece_length]), location)
            examples.append(replace(example, truncated=False))  # the tokens cut off count in an earlier piece
        # A private step counts examples as records: one record must be one example.
        return tuple(examples[:1] if self.recipe.privacy == "clipped" else examples)

    def _counted(self, messages: list[dict[str, Any]], location: str) -> tuple[list[int], list[int]]:
        """Returns a conversation's tokens and the positions of those that count. It is tokenized as one text like
        `apply_chat_template` does.

        A turn counts if the conversation has it as the model will write it: after the text that asks for it. Templates
        may write the last turn in another way than earlier ones, for example with an empty thought.
        """
        render = self.text_format.render
        assert render is not None  # noqa: S101  # __post_init__
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        text = render(messages[: turns[-1] + 1], answer=False)
        encoding = self.tokenizer.encode_batch([text], add_special_tokens=False)[0]
        tokens = [_TextToken(*each) for each in zip(encoding.ids, encoding.offsets, strict=True)]
        counted_positions: list[int] = []
        for number in turns:
            if not is_learned(messages[number]):
                continue
            prompt = render(messages[:number], answer=True)
            turn = render(messages[: number + 1], answer=False)
            content_end = len(self._without_end(turn))
            if text.startswith(prompt) and content_end > len(prompt) and text.startswith(turn[:content_end]):
                written = next((at for at, (a, b) in enumerate(zip(text, turn)) if a != b), len(turn))  # noqa: B905
                counted_positions += self._turn_positions(tokens, len(prompt), content_end, written)
        if not counted_positions:
            raise InvalidDataset(
                f"{location}: the base's chat template writes no turn of the assistant after the text that asks for "
                "it, so that none can be learned"
            )
        return encoding.ids, counted_positions

    def _without_end(self, text: str) -> str:
        """Returns a text without the white space and the special tokens that end it."""
        special_texts = self._special_texts
        while True:
            text = text.rstrip()
            ending = next((special for special in special_texts if text.endswith(special)), None)
            if ending is None:
                return text
            text = text[: -len(ending)]

    @cached_property
    def _special_texts(self) -> tuple[str, ...]:
        added_tokens = self.tokenizer.get_added_tokens_decoder()
        return tuple(
            token.content for number, token in added_tokens.items() if token.special or number in self._stop_tokens
        )

    @cached_property
    def _stop_tokens(self) -> frozenset[int]:
        return frozenset((*self.text_format.stop_tokens, *self._end_tokens))

    def _turn_positions(self, tokens: Sequence[_TextToken], start: int, content_end: int, end: int) -> range:
        """Returns the positions of a turn's tokens, up to the first that ends a text after its content.

        start, content_end, end: of the turn in the text, in characters. Without such a token the whole turn counts.
        """
        positions = [at for at, token in enumerate(tokens) if token.span[1] > start and token.span[0] < end]
        for at in positions:
            if tokens[at].number in self._stop_tokens and tokens[at].span[0] >= content_end:
                return range(positions[0], at + 1)
        return range(positions[0], positions[-1] + 1) if positions else range(0)

    def _cut(self, tokens: list[int], counted_positions: list[int], location: str) -> Example:
        """Returns the example of a conversation's last tokens, as many as fit."""
        end = counted_positions[-1] + 1  # the last token that counts ends the row
        start = max(end - self.recipe.sequence_length - 1, 0)
        bos_tokens = self._bos_tokens
        if not start or tuple(tokens[: len(bos_tokens)]) != bos_tokens:
            bos_tokens = ()
        start += len(bos_tokens)
        # The first token kept predicts the next one and is predicted by none.
        kept_positions = [position for position in counted_positions if position > start][-self.recipe.answer_length :]
        if not kept_positions:
            raise InvalidDataset(f"{location}: none of the assistant's tokens is left in {self.recipe.sequence_length}")
        row = Row(
            prompt=(*bos_tokens, *tokens[start : kept_positions[0]]),
            answer=tuple(tokens[kept_positions[0] : end]),
            counted=tuple(position - kept_positions[0] for position in kept_positions),
        )
        example = self._example(row, location)
        return replace(example, truncated=example.truncated or len(kept_positions) < len(counted_positions))
