"""Translates API requests into scorer tasks: names into content hashes, texts into tokens.

An adapter of another tenant is reported as absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sqlalchemy.orm import Session
from tokenizers import Tokenizer

from server.catalog.bases import BaseModelEntry, BaseService
from server.inference.frames import ServedAdapterRef, ServedBaseRef, TextToGenerate, TextToScore
from server.registry.models import StoredVersion
from server.registry.repository import resolve
from server.storage.store import ArtifactStore
from shared.errors import AdapterNotFound, BadRequest, BaseMismatch, VersionHeld
from shared.registry import MAIN, VersionState
from shared.scoring import AnswerScore, RowScore, ScoredBy, ScoreRequest, ScoreRow, TextTooLong
from shared.task import Choice, Task, filled_length, read_question
from shared.task_templates import named_task
from shared.zo.encoding import Example, Row, check_tokenizer, encode_choice, score_rows, token_ids

FLOAT_BYTES = 4
TEXT_CHARACTERS = 16  # of one text, for each token of the base's context; a longer text is not tokenized
TOTAL_CHARACTERS = 8  # of all texts, for each token that a request may have


class BaseChoice(Protocol):
    """The part of a request that names its base model; see `shared.scoring`."""

    @property
    def base(self) -> str | None:
        """A registered base model; None: the base of the adapter."""

    @property
    def base_sha256(self) -> str | None:
        """Refuse any other base model."""


@dataclass(frozen=True)
class _OwnBase:
    """Leaves the base model to the adapter."""

    base: None = None
    base_sha256: None = None


@dataclass(frozen=True)
class ModelName:
    """A model as OpenAI's API names it: an adapter `NAME` or `NAME@REVISION`, or else a registered base model."""

    name: str


@dataclass(frozen=True)
class TextRequest:
    """One text to generate. The fields are those of `shared.scoring.GenerateRequest`, except these.

    model: names base and adapter together. prompt: returns the prompt's text for a base model. special: the tokenizer
    adds its own tokens, such as BOS. likeliest: see `TextToGenerate`.
    """

    prompt: Callable[[BaseModelEntry], str]
    base: str | None = None
    base_sha256: str | None = None
    adapter: str | None = None
    model: ModelName | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    special: bool = True
    likeliest: int | None = None


@dataclass(frozen=True)
class ResolvedTarget:
    """The base model and adapter version (or None) that a row is scored by."""

    base: BaseModelEntry
    name: str | None
    version: StoredVersion | None

    @property
    def scored_by(self) -> dict[str, object]:
        """The fields of `ScoredBy`."""
        version = self.version
        return ScoredBy(
            base=self.base.name,
            adapter=self.name,
            version=None if version is None else version.version,
            revision=None if version is None else version.revision,
        ).model_dump()

    @property
    def base_ref(self) -> ServedBaseRef:
        """The base model as a scorer task refers to it."""
        base = self.base
        return ServedBaseRef(sha256=base.sha256, source=base.source, nbytes=FLOAT_BYTES * base.parameters)


@dataclass(frozen=True)
class ReadRow:
    """A row as tokens. labels: label of each answer, None without a task."""

    target: ResolvedTarget
    choices: tuple[Choice, ...]
    labels: tuple[str | None, ...]
    rows: tuple[Row, ...]

    def result(self, scores: Sequence[float]) -> RowScore:
        """The row with the log-probabilities of its answers, nats."""
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
        return RowScore.model_validate(self.target.scored_by | {"answers": answers, "best": scores.index(highest)})


@dataclass
class Call:
    """One call of the scorer, for one base. where: for each text, its row and the answers it scores."""

    base: ServedBaseRef
    adapters: list[ServedAdapterRef] = field(default_factory=list)
    texts: list[TextToScore] = field(default_factory=list)
    where: list[tuple[int, list[int]]] = field(default_factory=list)


class ScoringService:
    """Resolves one request in one transaction."""

    def __init__(self, session: Session, artifacts: ArtifactStore, tenant: str) -> None:
        self._session, self._tenant = session, tenant
        self._bases = BaseService(session, artifacts)
        self._targets: dict[str | None, ResolvedTarget] = {}

    def read(self, request: ScoreRequest, most_tokens: int, cancelled: Callable[[], bool]) -> list[ReadRow]:
        """Returns the rows as tokens. Errors name the row; raises TextTooLong over `most_tokens` in all.

        Texts that are far too long are refused before they are tokenized. cancelled: whether the client has left,
        which is asked before each row; raises BadRequest then.
        """
        task = named_task(request.task) if isinstance(request.task, str) else request.task
        characters = sum(_characters(row, task) for row in request.rows)
        if characters > TOTAL_CHARACTERS * most_tokens:
            raise TextTooLong(
                f"the prompts with their answers have {characters} characters in total, and one request may have "
                f"{TOTAL_CHARACTERS * most_tokens}; split it"
            )
        read_rows = []
        total = 0
        for number, row in enumerate(request.rows):
            if cancelled():
                raise BadRequest("the client has closed the connection")
            target = self.resolve_target(request, row.adapter)
            read_rows.append(self._read(row, task, target, f"rows.{number}"))
            total += sum(len(each.tokens) for each in read_rows[-1].rows)
            if total > most_tokens:
                raise TextTooLong(
                    f"the rows have more than {most_tokens} tokens in total, the limit of one request; split it"
                )
        return read_rows

    def resolve_target(self, request: BaseChoice, adapter: str | None) -> ResolvedTarget:
        """Resolves the base model and adapter of a row that names `adapter`.

        Raises UnknownBase, AdapterNotFound, RevisionNotFound, VersionHeld or BaseMismatch.
        """
        if adapter not in self._targets:
            self._targets[adapter] = self._resolve(request, adapter)
        return self._targets[adapter]

    def _resolve(self, request: BaseChoice, adapter: str | None) -> ResolvedTarget:
        requested_base = None if request.base is None else self._bases.by_name(request.base)
        if adapter is None:
            if requested_base is None:
                raise BadRequest("base is required for a row without an adapter")
            target = ResolvedTarget(requested_base, None, None)
        else:
            name, _, revision = adapter.partition("@")
            _, version = resolve(self._session, self._tenant, name, revision or MAIN)
            if version.state is VersionState.HELD:
                raise VersionHeld(f"version {version.version} of adapter {name!r} is waiting for approval")
            base = version.recipe.base
            target = ResolvedTarget(requested_base or self._bases.by_name(base.name), name, version)
            if target.base.sha256 != base.sha256:
                raise BaseMismatch(
                    f"adapter {name!r} was trained on base model {base.name!r} with sha256 {base.sha256}; "
                    f"{target.base.name!r} has {target.base.sha256}"
                )
        if request.base_sha256 not in (None, target.base.sha256):
            raise BaseMismatch(
                f"base model {target.base.name!r} has sha256 {target.base.sha256}; requested: {request.base_sha256}"
            )
        return target

    def resolve_model(self, model: ModelName) -> ResolvedTarget:
        """Resolves a model's name: the tenant's adapter of that name, or else the base model.

        Raises AdapterNotFound if there is neither, RevisionNotFound or VersionHeld.
        """
        try:
            return self._resolve(_OwnBase(), model.name)
        except AdapterNotFound:
            base = self._bases.find(model.name)
            if base is None:
                raise AdapterNotFound(
                    f"there is no adapter and no base model {model.name!r}; GET /v1/models lists what there is"
                ) from None
            return ResolvedTarget(base, None, None)

    def tokenizer(self, target: ResolvedTarget) -> Tokenizer:
        """Returns the base model's tokenizer. Raises InvalidTask if it ends every text with a special token."""
        tokenizer = self._bases.tokenizer(target.base)
        check_tokenizer(tokenizer)
        return tokenizer

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
        context = target.base.shape.context_length
        for choice in choices:
            _check_length(choice.prompt + choice.answer, context, f"{where}: the text")
        tokenizer = self.tokenizer(target)
        rows = tuple(encode_choice(tokenizer, choice) for choice in choices)
        for each in rows:
            if not each.prompt or not each.answer:
                raise BadRequest(f"{where}: the prompt or an answer has no tokens")
            if len(each.tokens) > context:
                raise TextTooLong(
                    f"{where} has {len(each.tokens)} tokens; the context of {target.base.name!r} has {context}"
                )
        return ReadRow(target, choices, labels, rows)


def _characters(row: ScoreRow, task: Task | None) -> int:
    """Returns how many characters the row's prompts and answers have; a prompt counts once for each answer."""
    if row.record is not None and task is not None:
        return filled_length(task, row.record)
    return sum(len(row.prompt or "") + len(answer) for answer in row.answers)


def _check_length(text: str, context: int, where: str) -> None:
    """Raises TextTooLong for a text of far more characters than the context can hold."""
    if len(text) > TEXT_CHARACTERS * context:
        raise TextTooLong(
            f"{where} has {len(text)} characters; at most {TEXT_CHARACTERS * context} are read for a context of "
            f"{context} tokens"
        )


def calls_of(rows: Sequence[ReadRow]) -> list[Call]:
    """Groups rows into one call for each base. Answers with the same tokens before them share a text."""
    calls: dict[str, Call] = {}
    places: dict[tuple[str, int], int] = {}  # (base, version number): index in the call's adapters
    for number, row in enumerate(rows):
        call = calls.setdefault(row.target.base.sha256, Call(row.target.base_ref))
        adapter = None
        if row.target.version is not None:
            key = (row.target.base.sha256, row.target.version.number)
            if key not in places:
                places[key] = len(call.adapters)
                call.adapters += refs_of(row.target)
            adapter = places[key]
        for group in score_rows(Example(row.rows, 0, False)):
            first = row.rows[group[0]]
            answers = tuple(row.rows[index].answer for index in group)
            call.texts.append(
                TextToScore(tokens=first.tokens, start=len(first.prompt) - 1, answers=answers, adapter=adapter)
            )
            call.where.append((number, group))
    return list(calls.values())


def refs_of(target: ResolvedTarget) -> list[ServedAdapterRef]:
    """Returns the version as a scorer task refers to it, or an empty list without an adapter."""
    version = target.version
    return (
        [] if version is None else [ServedAdapterRef(sha256=version.sha256, recipe=version.recipe, shape=version.shape)]
    )


def text_to_generate(request: TextRequest, target: ResolvedTarget, tokenizer: Tokenizer) -> TextToGenerate:
    """Returns the prompt as tokens. Raises TextTooLong if it exceeds the context of the base model.

    Any special token ends a text.
    """
    context = target.base.shape.context_length
    prompt = request.prompt(target.base)
    _check_length(prompt, context, "prompt:")
    tokens = tuple(token_ids(tokenizer, prompt, special=request.special))
    if not tokens:
        raise BadRequest("prompt: has no tokens")
    if len(tokens) > context:
        raise TextTooLong(f"prompt: has {len(tokens)} tokens; the context of {target.base.name!r} has {context}")
    ends = tuple(token for token, how in tokenizer.get_added_tokens_decoder().items() if how.special)
    return TextToGenerate(
        tokens=tokens,
        # The last token is never read.
        most=min(request.max_tokens, context - len(tokens) + 1),
        adapter=None if target.version is None else 0,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        ends=ends,
        likeliest=request.likeliest,
    )
