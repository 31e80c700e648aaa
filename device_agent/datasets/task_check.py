"""Compares a data set's records with a task: how many fit it, why others do not, and how long the prompts are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from shared.errors import InvalidDataset
from shared.task import Answer, Task
from shared.task_records import (
    Choice,
    UnknownText,
    read_completion,
    read_messages,
    read_preference,
    read_question,
)
from shared.zo.encoding import token_ids

CHARACTERS_PER_TOKEN = 4  # of English text, roughly; other languages need more tokens
SEQUENCE_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)  # tokens
ENOUGH = 0.95  # of the records must fit the suggested sequence length
MIN_SHARE = 0.5  # of a file's records must fit the task, or jobs fail (device_agent.training.data)
MIN_BYTES_PER_TOKEN = 3.4  # measured: 2.8 to 3.1 for languages the base was not made for, 3.8 to 4.7 for the others
MESSAGE_TOKENS = 8  # that a chat template writes around a message, roughly


@dataclass
class TaskCheck:
    """Counts of the records that were added. Its size does not depend on their number.

    tokenizer: the base's, which measures lengths; None: they are estimated.
    """

    task: Task
    tokenizer: Tokenizer | None = None
    fitting: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)  # by reason: where the first such record is
    labels: Counter[str] = field(default_factory=Counter)
    _text_bytes: int = 0
    _text_tokens: int = 0  # of the base's tokenizer, for all _text_bytes
    _tokens: Counter[int] = field(default_factory=Counter)  # records by their tokens that the model reads
    _answer_bits: Counter[int] = field(default_factory=Counter)  # records by the power of two of their answer's tokens

    def add(self, location: str, record: Mapping[str, Any]) -> None:
        """Counts one record."""
        try:
            length = self._read(record, location)
        except InvalidDataset as error:
            if isinstance(error, UnknownText):
                reason = f"field {error.field!r} is blank or has a text that the task does not know"
            elif self.task.kind == "messages":
                reason = (
                    f"field {self.task.messages_field!r} is not a list of messages with at least one assistant turn"
                )
            else:
                reason = error.detail.removeprefix(f"{location}: ")
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
            self.first.setdefault(reason, location)
            return
        self.fitting += 1
        self._tokens[min(length, SEQUENCE_LENGTHS[-1] + 1)] += 1

    def _read(self, record: Mapping[str, Any], location: str) -> int:
        """Returns the tokens that the model reads of a record; counts the label of a task that chooses answers.

        Raises InvalidDataset.
        """
        if self.task.kind == "messages":
            messages = read_messages(self.task, record, location)
            return self._length(*(message["content"] for message in messages), others=MESSAGE_TOKENS * len(messages))
        if self.task.kind == "preference":
            return self._read_preference(record, location)
        if self.task.generates:
            text = read_completion(self.task, record, location)
            if self.task.kind == "completion":
                self._answer_bits[self._length(text.answer, others=1).bit_length()] += 1
            return self._length(text.prompt, text.answer, others=1)  # the end of the text
        question = read_question(self.task, record, location)
        self.labels[_label_name(self.task.answers[question.correct])] += 1
        longest = max(question.choices, key=lambda choice: len(choice.prompt) + len(choice.answer))
        return self._length(longest.prompt, longest.answer)

    def _read_preference(self, record: Mapping[str, Any], location: str) -> int:
        """As `_read`, of the longest answer; counts the label of a record that has one answer."""
        preference = read_preference(self.task, record, location)
        if self.task.rejected is None:
            self.labels["true" if preference.liked else "false"] += 1
        lengths, answer_lengths = [], []
        for answer in preference.answers:
            if isinstance(answer, Choice):
                texts, others = [answer.prompt, answer.answer], 1
            else:
                texts, others = [message["content"] for message in answer], MESSAGE_TOKENS * len(answer)
            lengths.append(self._length(*texts, others=others))
            answer_lengths.append(self._length(texts[-1], others=others))
        self._answer_bits[max(answer_lengths).bit_length()] += 1
        return max(lengths)

    def _length(self, *texts: str, others: int = 0) -> int:
        """Returns the tokens of texts without the last one: counted, with `others` beside them, or estimated."""
        if self.tokenizer is None:
            return sum(map(len, texts)) // CHARACTERS_PER_TOKEN
        tokens = sum(len(token_ids(self.tokenizer, text)) for text in texts)
        self._text_bytes += sum(len(text.encode(errors="replace")) for text in texts)
        self._text_tokens += tokens
        return others - 1 + tokens

    @property
    def records(self) -> int:
        """Number of records that were added."""
        return self.fitting + sum(self.reasons.values())

    @property
    def label_fault(self) -> str | None:
        """Why a task of kind preference with labels cannot learn from these records; None if it can."""
        if self.task.preference_loss != "kto" or len(self.labels) != 1:
            return None
        return (
            f"every label of task {self.task.name!r} is {next(iter(self.labels))}; a model learns what people prefer "
            "from answers that they liked and answers that they did not: add records of the other kind"
        )

    @property
    def enough(self) -> bool:
        """Whether enough records fit, so that a job does not fail because of the others."""
        return self.fitting > 0 and self.fitting >= MIN_SHARE * self.records

    def cut(self, tokens: int) -> int:
        """Returns how many of the fitting records are longer than `tokens` tokens: by the tokenizer, or an estimate."""
        return sum(count for length, count in self._tokens.items() if length > tokens)

    def share(self, tokens: int) -> float:
        """Returns the share of the fitting records that fit into `tokens` tokens."""
        return 1 - self.cut(tokens) / max(self.fitting, 1) if self.fitting else 0.0

    @property
    def suggested(self) -> int:
        """The shortest sequence length, in tokens, that holds most records."""
        return next((tokens for tokens in SEQUENCE_LENGTHS if self.share(tokens) >= ENOUGH), SEQUENCE_LENGTHS[-1])

    @property
    def suggested_answer(self) -> int | None:
        """The smallest power of two of tokens that holds most answers; None if the task writes none."""
        if not self._answer_bits:
            return None
        covered_answers, bits = 0, min(self._answer_bits)
        while (covered_answers := covered_answers + self._answer_bits[bits]) < ENOUGH * self.fitting:
            bits += 1
        return max(1 << bits, 8)

    @property
    def bytes_per_token(self) -> float | None:
        """How many bytes of UTF-8 a token of these texts has on average; None without a tokenizer or texts."""
        return self._text_bytes / self._text_tokens if self._text_tokens else None

    def facts(self) -> dict[str, Any]:
        """Returns the counts for JSON; it has names, line numbers and the task's own labels, and no record's text."""
        reasons = [
            {"reason": reason, "records": count, "first": self.first[reason]} for reason, count in self.reasons.items()
        ]
        return {
            "task": self.task.name,
            "records": self.records,
            "fitting": self.fitting,
            "unusable": reasons,
            "labels": {label: self.labels[label] for label in self._label_names()},
            "sequence_length": self.suggested,
            "share_uncut": round(self.share(self.suggested), 4),
            "cut": self.cut(self.suggested),
            "by_tokenizer": self.tokenizer is not None,
            "bytes_per_token": None if self.bytes_per_token is None else round(self.bytes_per_token, 2),
            **({} if self.suggested_answer is None else {"answer_length": self.suggested_answer}),
        }

    def _label_names(self) -> list[str]:
        if self.task.preference_loss == "kto":
            return ["true", "false"]
        return [_label_name(answer) for answer in self.task.answers]

    def lines(self) -> list[str]:
        """Returns the counts for people."""
        lines = [f"task {self.task.name}: {self.fitting} of {self.records} records fit"]
        lines += [f"  {count} do not: {reason}; first {self.first[reason]}" for reason, count in self.reasons.items()]
        if not self.fitting:
            return lines
        if self._label_names():
            lines.append("labels: " + ", ".join(f"{label}: {self.labels[label]}" for label in self._label_names()))
        lines += self.length_lines(self.suggested)
        if self.suggested_answer is not None:
            lines.append(f"answer_length {self.suggested_answer} holds about {ENOUGH:.0%} of the answers")
        return lines

    def length_lines(self, tokens: int) -> list[str]:
        """Returns for people how many records are longer than a sequence length, and whether the base knows them."""
        text = (
            f"sequence_length {tokens} holds {self.share(tokens):.0%} of the records uncut; {self.cut(tokens)} are cut"
        )
        if self.tokenizer is not None:
            lines = [f"{text} (by the base's tokenizer)"]
            if self.bytes_per_token is not None and self.bytes_per_token < MIN_BYTES_PER_TOKEN:
                lines.append(
                    f"the base's tokenizer splits these texts into tokens of {self.bytes_per_token:.1f} bytes; in "
                    "languages that the base was made for, they have about 4: another base is likely to learn more"
                )
            return lines
        return [
            f"{text} (an estimate of {CHARACTERS_PER_TOKEN} characters a token; other languages than English need more)"
        ]


def _label_name(answer: Answer) -> str:
    return "/".join(answer.labels)
