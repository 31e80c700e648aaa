"""From what is asked to what the scorer is told: names to content, texts to tokens, tokens' numbers to answers.

Whoever may not have an adapter learns nothing of it: another tenant's is as absent as one that never was. Knows no HTTP
and no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy.orm import Session
from tokenizers import Tokenizer

from server.adapters.models import StoredVersion
from server.adapters.resolution import resolve
from server.artifacts.store import ArtifactStore
from server.bases.models import BaseModelEntry
from server.bases.service import BaseService
from server.scoring.errors import TextTooLong
from server.scoring.frames import ServedAdapterRef, ServedBaseRef, TextToGrow, TextToScore
from shared.encoding import Example, Row, check_tokenizer, encode_choice, score_rows
from shared.errors import BadRequest, BaseMismatch, VersionHeld
from shared.registry import MAIN, VersionState
from shared.scoring import AnswerScore, GenerateRequest, RowScore, ScoredBy, ScoreRequest, ScoreRow
from shared.task import Choice, Task, read_question
from shared.tasks import named_task

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Met:
    """What a row meets: a base, and a version of an adapter or none."""

    base: BaseModelEntry
    name: str | None
    version: StoredVersion | None

    @property
    def told(self) -> dict[str, object]:
        """As the API tells it."""
        version = self.version
        return ScoredBy(
            base=self.base.name,
            adapter=self.name,
            version=None if version is None else version.version,
            revision=None if version is None else version.revision,
        ).model_dump()

    @property
    def base_ref(self) -> ServedBaseRef:
        """The base as the scorer is told of it."""
        base = self.base
        return ServedBaseRef(sha256=base.sha256, source=base.source, nbytes=FLOAT_BYTES * base.parameters)


@dataclass(frozen=True)
class ReadRow:
    """A row as tokens. labels: of each answer, of a task's record."""

    met: Met
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
        return RowScore.model_validate(self.met.told | {"answers": answers, "best": scores.index(highest)})


@dataclass
class Call:
    """What the scorer is asked for one base. where: of each text, its row and the answers that it scores."""

    base: ServedBaseRef
    adapters: list[ServedAdapterRef] = field(default_factory=list)
    texts: list[TextToScore] = field(default_factory=list)
    where: list[tuple[int, list[int]]] = field(default_factory=list)


class ScoringService:
    """What one request asks for, looked up in one transaction."""

    def __init__(self, session: Session, artifacts: ArtifactStore, tenant: str) -> None:
        self._session, self._tenant = session, tenant
        self._bases = BaseService(session, artifacts)
        self._met: dict[str | None, Met] = {}

    def read(self, request: ScoreRequest, most_tokens: int) -> list[ReadRow]:
        """The rows as tokens. Raises what is wrong with one, naming it; TextTooLong over `most_tokens` in all."""
        task = named_task(request.task) if isinstance(request.task, str) else request.task
        found = []
        total = 0
        for number, row in enumerate(request.rows):
            met = self.meet(request, row.adapter)
            found.append(self._read(row, task, met, f"rows.{number}"))
            total += sum(len(each.tokens) for each in found[-1].rows)
            if total > most_tokens:
                raise TextTooLong(
                    f"the rows have over {most_tokens} tokens together, the most of one request; split it"
                )
        return found

    def meet(self, request: ScoreRequest | GenerateRequest, adapter: str | None) -> Met:
        """What is asked for by a row that names `adapter`.

        Raises UnknownBase, AdapterNotFound, RevisionNotFound, VersionHeld or BaseMismatch.
        """
        if adapter not in self._met:
            self._met[adapter] = self._look_up(request, adapter)
        return self._met[adapter]

    def _look_up(self, request: ScoreRequest | GenerateRequest, adapter: str | None) -> Met:
        asked = None if request.base is None else self._bases.named(request.base)
        if adapter is None:
            if asked is None:
                raise BadRequest("without an adapter, say which base model is meant: base")
            met = Met(asked, None, None)
        else:
            name, _, revision = adapter.partition("@")
            _, version = resolve(self._session, self._tenant, name, revision or MAIN)
            if version.state is VersionState.HELD:
                raise VersionHeld(f"version {version.version} of adapter {name!r} waits for a person to approve it")
            own = version.recipe.base
            met = Met(asked or self._bases.named(own.name), name, version)
            if met.base.sha256 != own.sha256:
                raise BaseMismatch(
                    f"adapter {name!r} was trained on base model {own.name!r} with sha256 {own.sha256}; "
                    f"{met.base.name!r} has {met.base.sha256}"
                )
        if request.base_sha256 not in (None, met.base.sha256):
            raise BaseMismatch(
                f"base model {met.base.name!r} has sha256 {met.base.sha256}; asked for was {request.base_sha256}"
            )
        return met

    def tokenizer(self, met: Met) -> Tokenizer:
        """The base's. Raises InvalidTask if it closes every text with a special token."""
        tokenizer = self._bases.tokenizer(met.base)
        check_tokenizer(tokenizer)
        return tokenizer

    def _read(self, row: ScoreRow, task: Task | None, met: Met, where: str) -> ReadRow:
        choices: tuple[Choice, ...]
        labels: tuple[str | None, ...]
        if row.record is not None and task is not None:
            unlabelled = row.record | {task.label_field: task.answers[0].labels[0]}
            choices = read_question(task, unlabelled, where).choices
            labels = tuple(answer.labels[0] for answer in task.answers)
        else:
            choices = tuple(Choice(row.prompt or "", answer) for answer in row.answers)
            labels = (None,) * len(choices)
        tokenizer = self.tokenizer(met)
        rows = tuple(encode_choice(tokenizer, choice) for choice in choices)
        context = met.base.shape.context_length
        for each in rows:
            if not each.prompt or not each.answer:
                raise BadRequest(f"{where}: the prompt or an answer has no token")
            if len(each.tokens) > context:
                raise TextTooLong(
                    f"{where} has {len(each.tokens)} tokens; the context of {met.base.name!r} has {context}"
                )
        return ReadRow(met, choices, labels, rows)


def calls_of(rows: Sequence[ReadRow]) -> list[Call]:
    """What the scorer is to be asked, one call for each base. Answers that read the same tokens share a text."""
    calls: dict[str, Call] = {}
    places: dict[tuple[str, int], int] = {}  # (base, version's number): its index in the call's adapters
    for number, row in enumerate(rows):
        call = calls.setdefault(row.met.base.sha256, Call(row.met.base_ref))
        adapter = None
        if row.met.version is not None:
            key = (row.met.base.sha256, row.met.version.number)
            if key not in places:
                places[key] = len(call.adapters)
                call.adapters += refs_of(row.met)
            adapter = places[key]
        for group in score_rows(Example(row.rows, 0, False)):
            first = row.rows[group[0]]
            answers = tuple(row.rows[index].answer for index in group)
            call.texts.append(
                TextToScore(tokens=first.tokens, start=len(first.prompt) - 1, answers=answers, adapter=adapter)
            )
            call.where.append((number, group))
    return list(calls.values())


def refs_of(met: Met) -> list[ServedAdapterRef]:
    """The version that a row meets, if any, as the scorer is told of it."""
    version = met.version
    return (
        [] if version is None else [ServedAdapterRef(sha256=version.sha256, recipe=version.recipe, shape=version.shape)]
    )


def text_to_grow(request: GenerateRequest, met: Met, tokenizer: Tokenizer) -> TextToGrow:
    """A request's text as tokens. Raises TextTooLong if the base's context has no room for one more token.

    Any special token ends a text, whichever the base was trained on: none of them is text.
    """
    tokens = tuple(tokenizer.encode(request.prompt).ids)
    context = met.base.shape.context_length
    if not tokens:
        raise BadRequest("prompt: has no token")
    if len(tokens) > context:
        raise TextTooLong(f"prompt: has {len(tokens)} tokens; the context of {met.base.name!r} has {context}")
    ends = tuple(token for token, how in tokenizer.get_added_tokens_decoder().items() if how.special)
    return TextToGrow(
        tokens=tokens,
        # The last token is never read.
        most=min(request.max_tokens, context - len(tokens) + 1),
        adapter=None if met.version is None else 0,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        ends=ends,
    )
