"""Reads requests in one transaction: names into content hashes, texts into tokens.

An adapter of another tenant is reported as absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from sqlalchemy.orm import Session
from tokenizers import Tokenizer

from server.catalog.bases import BaseModelEntry, BaseService
from server.inference.texts import ServedAdapterRef, ServedBaseRef, Text
from server.registry.models import StoredVersion
from server.registry.repository import resolve
from server.storage.store import ArtifactStore
from shared.errors import AdapterNotFound, BadRequest, BaseMismatch, VersionHeld
from shared.registry import MAIN, VersionState
from shared.scoring import AnswerScore, RowScore, ScoreRequest, ScoreRow
from shared.task import Task
from shared.task_records import Choice, filled_length, read_question
from shared.task_templates import named_task
from shared.tokenizer import TextTooLong, check_length, check_tokens
from shared.zo.encoding import Row, encode_choice, same_beginning
from shared.zo.packing import ScoringPlan

REQUEST_TOKENS = 131_072  # maximum tokens of a scoring request
TOTAL_CHARACTERS = 8  # maximum characters of all texts for each token that a request may have


@dataclass(frozen=True)
class ResolvedTarget:
    """The base model and adapter version (or None) that a row is scored by."""

    base: BaseModelEntry
    name: str | None
    version: StoredVersion | None

    @cached_property
    def base_ref(self) -> ServedBaseRef:
        """The base model as the scorer knows it."""
        base = self.base
        return ServedBaseRef(
            sha256=base.sha256,
            source=base.source,
            nbytes=4 * base.parameters,
            token_bytes=4 * base.shape.cached_features,
            tokenizer=base.tokenizer_sha256,
        )

    @cached_property
    def adapter_ref(self) -> ServedAdapterRef | None:
        """The version as the scorer knows it."""
        if (version := self.version) is None:
            return None
        return ServedAdapterRef(sha256=version.sha256, recipe=version.recipe, shape=version.shape)


@dataclass(frozen=True)
class ReadRow:
    """A row as tokens. labels: label of each answer, None without a task."""

    target: ResolvedTarget
    choices: tuple[Choice, ...]
    labels: tuple[str | None, ...]
    rows: tuple[Row, ...]

    @cached_property
    def plan(self) -> ScoringPlan:
        """How the answers are scored: as the adapter was trained, or else over the whole vocabulary."""
        version = self.target.version
        restrict = version is not None and version.recipe.loss == "candidates"
        return ScoringPlan.of(self.rows, restrict=restrict and len({row.prompt for row in self.rows}) == 1)

    def check(self, where: str) -> None:
        """Raises BadRequest for answers between which the plan cannot choose."""
        texts = [choice.answer for choice in self.choices]
        if self.plan.restricted and (fault := same_beginning(texts, [row.answer for row in self.rows])):
            raise BadRequest(f"{where}: {fault}")

    def result(self, log_probabilities: Sequence[Sequence[Sequence[float]]]) -> RowScore:
        """Returns the row's result. log_probabilities: of the picks of each text of its plan, nats."""
        scores = self.plan.scores(log_probabilities)
        highest = max(scores)
        shares = [math.exp(score - highest) for score in scores]
        answers = tuple(
            AnswerScore(
                text=choice.answer,
                label=label,
                tokens=len(row.answer),
                log_probability=score,
                probability=share / sum(shares),
            )
            for choice, label, row, score, share in zip(
                self.choices, self.labels, self.rows, scores, shares, strict=True
            )
        )
        version = self.target.version
        return RowScore(
            base=self.target.base.name,
            adapter=self.target.name,
            version=None if version is None else version.version,
            revision=None if version is None else version.revision,
            answers=answers,
            best=scores.index(highest),
        )


class ScoringService:
    """Resolves one request in one transaction."""

    def __init__(self, session: Session, artifacts: ArtifactStore, tenant: str, allow_held: bool = False) -> None:
        """allow_held: whether held versions are used too, for a person who decides about them."""
        self._session, self._tenant, self._allow_held = session, tenant, allow_held
        self._bases = BaseService(session, artifacts)

    def read(self, request: ScoreRequest, cancelled: Callable[[], bool]) -> list[ReadRow]:
        """Returns the rows as tokens. Errors name the row; raises TextTooLong over REQUEST_TOKENS in all.

        Texts that are far too long are refused before they are tokenized. cancelled: whether the client has left,
        which is asked before each row; raises BadRequest then.
        """
        task = named_task(request.task) if isinstance(request.task, str) else request.task
        characters = sum(_characters(row, task) for row in request.rows)
        if characters > TOTAL_CHARACTERS * REQUEST_TOKENS:
            raise TextTooLong(
                f"the prompts with their answers have {characters} characters in total, and one request may have "
                f"{TOTAL_CHARACTERS * REQUEST_TOKENS}; split it"
            )
        read_rows: list[ReadRow] = []
        targets: dict[str | None, ResolvedTarget] = {}
        total = 0
        for number, row in enumerate(request.rows):
            if cancelled():
                raise BadRequest("the client has closed the connection")
            if row.adapter not in targets:
                targets[row.adapter] = self.resolve(row.adapter, request.base, request.base_sha256)
            read_rows.append(self._read(row, task, targets[row.adapter], f"rows.{number}"))
            total += sum(len(each.tokens) for each in read_rows[-1].rows)
            if total > REQUEST_TOKENS:
                raise TextTooLong(
                    f"the rows have more than {REQUEST_TOKENS} tokens in total, the limit of one request; split it"
                )
        return read_rows

    def resolve(self, adapter: str | None, base: str | None = None, base_sha256: str | None = None) -> ResolvedTarget:
        """Resolves an adapter, and the base model that is named or else the adapter's own.

        Raises UnknownBase, AdapterNotFound, RevisionNotFound, VersionHeld or BaseMismatch.
        """
        requested_base = None if base is None else self._bases.get(base)
        if adapter is None:
            if requested_base is None:
                raise BadRequest("base is required for a row without an adapter")
            target = ResolvedTarget(requested_base, None, None)
        else:
            name, _, revision = adapter.partition("@")
            _, version = resolve(self._session, self._tenant, name, revision or MAIN)
            if version.state is VersionState.HELD and not self._allow_held:
                raise VersionHeld(f"version {version.version} of adapter {name!r} is waiting for approval")
            own = version.recipe.base
            target = ResolvedTarget(requested_base or self._bases.get(own.name), name, version)
            if target.base.sha256 != own.sha256:
                raise BaseMismatch(
                    f"adapter {name!r} was trained on base model {own.name!r} with sha256 {own.sha256}; "
                    f"{target.base.name!r} has {target.base.sha256}"
                )
        if base_sha256 not in (None, target.base.sha256):
            raise BaseMismatch(
                f"base model {target.base.name!r} has sha256 {target.base.sha256}; requested: {base_sha256}"
            )
        return target

    def resolve_model(self, model: str) -> ResolvedTarget:
        """Resolves a model as OpenAI's API names it: an adapter `NAME` or `NAME@REVISION`, or else a base model.

        Raises AdapterNotFound if there is neither, RevisionNotFound or VersionHeld.
        """
        try:
            return self.resolve(model)
        except AdapterNotFound:
            base = self._bases.by_name(model)
            if base is None:
                raise AdapterNotFound(
                    f"there is no adapter and no base model {model!r}; GET /v1/models lists what there is"
                ) from None
            return ResolvedTarget(base, None, None)

    def tokenizer(self, target: ResolvedTarget) -> Tokenizer:
        """Returns the base model's tokenizer."""
        return self._bases.tokenizer(target.base)

    def _read(self, row: ScoreRow, task: Task | None, target: ResolvedTarget, where: str) -> ReadRow:
        choices: tuple[Choice, ...]
        labels: tuple[str | None, ...]
        if row.record is not None and task is not None:
            if task.generates:
                raise BadRequest(
                    f"{where}: task {task.name!r} writes text and has no answers to score; send prompt and answers, or "
                    "generate"
                )
            unlabelled = row.record | {task.label_field: task.answers[0].labels[0]}
            choices = read_question(task, unlabelled, where).choices
            labels = tuple(answer.labels[0] for answer in task.answers)
        else:
            choices = tuple(Choice(row.prompt or "", answer) for answer in row.answers)
            labels = (None,) * len(choices)
        shape = target.base.shape
        for choice in choices:
            check_length(choice.prompt + choice.answer, shape.context_length, f"{where}: the text")
        tokenizer = self.tokenizer(target)
        rows = tuple(encode_choice(tokenizer, choice) for choice in choices)
        for each in rows:
            if not each.prompt or not each.answer:
                raise BadRequest(f"{where}: the prompt or an answer has no tokens")
            tokens = (*each.prompt, *each.answer)
            check_tokens(tokens, shape.context_length, shape.vocabulary, where, len(each.tokens))
        read_row = ReadRow(target, choices, labels, rows)
        read_row.check(where)
        return read_row


def _characters(row: ScoreRow, task: Task | None) -> int:
    """Returns how many characters the row's prompts and answers have; a prompt counts once for each answer."""
    if row.record is not None and task is not None:
        return filled_length(task, row.record)
    return sum(len(row.prompt or "") + len(answer) for answer in row.answers)


def texts_to_score(row: ReadRow) -> list[Text]:
    """Returns the texts of a row's plan."""
    return [Text(reading.tokens, row.target.adapter_ref, reading.picks) for reading in row.plan.readings]
