"""Reads the device's data, a directory of JSONL files, into splits for training and measurement.

The data never leaves the device. A record that does not fit the task is left out. Whether a job fails depends on the
number of records, and on noised counts of those that fit the task (`CountNoise`), so that no single record's content
decides it. A split of which nothing fits has a blank example instead, and trains nothing. A record of a task of kind
`text` becomes several examples, which stay in one split.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from tokenizers import Tokenizer

from device_agent.datasets.store import check_directory
from device_agent.datasets.task_check import MIN_SHARE
from device_agent.training.run_directory import RunDirectory
from shared.canonical import canonical_json, file_sha256
from shared.errors import InvalidDataset, MobizoError
from shared.program import ProgramManifest
from shared.recipe import Recipe
from shared.task import Task
from shared.training_settings import TrainingSettings
from shared.zo.encoding import Example, Row, check_task, read_object, token_ids
from shared.zo.noise import permutation
from shared.zo.packing import scoring_plan
from shared.zo.writing import PLAIN_FORMAT, Encoder, TextFormat

# One fixed seed and epochs that training never reaches: every job splits and samples alike, so runs of different
# job seeds can be compared.
SPLIT_SEED = 0
HELD_OUT_EPOCH = 0xFFFFFFFF
SAMPLE_EPOCH = 0xFFFFFFFE
HELD_OUT_SHARE = 5
# Records below that share that never end a job: 10 scales of the noise, so that a small file whose records all fit does
# not fail for its noise (probability below 1 in 40,000 for a file of any size).
SLACK = 100
EPSILON = 0.1  # that each count may tell of one record
SCALE = 1 / EPSILON  # records
MAX_REASONS = 20  # that are kept for the owner
REASON_LENGTH = 500  # characters

T = TypeVar("T")  # examples, or records that are none yet
Record = tuple[Example, ...]  # the examples of one record; none if it does not fit


@dataclass(frozen=True)
class Splits:
    """Examples for training, for selecting the best B, and for the final report. test is None if not read.

    records: of the data set's training split. truncated, unusable: how many of them were cut to the recipe's sequence
    length, and how many do not fit the task; from the owner's records with noise (`CountNoise`).
    """

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example] | None
    records: int
    truncated: int = 0
    unusable: int = 0
    reasons: tuple[str, ...] = ()  # why records of any split do not fit, for the owner only; the first line sums up
    blank: bool = False  # no training record fits; `train` has a blank example, and steps leave B as it is
    rehearsed: int = 0  # examples at the end of `train` that earlier runs trained
    earlier: Sequence[Example] | None = None  # held-out examples of earlier runs, of tasks of kind choice
    reference: Sequence[Example] | None = None  # pieces of the reference texts


def text_format_of(manifest: ProgramManifest, now: datetime | None = None) -> TextFormat:
    """Returns what a program's manifest says of its base's texts. now: the time that its chat template may write."""
    template = manifest.chat_template
    return TextFormat(
        end_token=manifest.end_of_text,
        stop_tokens=manifest.stop_tokens,
        render=None if template is None else partial(template.render, now=now),
        vocabulary=manifest.shape.vocabulary,
    )


def read_splits(
    directory: Path,
    task: Task,
    tokenizer: Tokenizer,
    recipe: Recipe,
    settings: TrainingSettings,
    *,
    noise_key: str,
    with_test: bool = True,
    text_format: TextFormat = PLAIN_FORMAT,
    earlier: Mapping[str, int] = MappingProxyType({}),
    run: RunDirectory | None = None,
) -> Splits:
    """Returns the splits of a data set: train.jsonl, and validation.jsonl and test.jsonl if present.

    Without validation.jsonl a fifth of train.jsonl is held out. with_test: also read the test split; without an example
    it is not read. Records are held out and sampled before those that do not fit the task are left out, so that a
    record's content decides about that record only. noise_key: of `AgentHome.noise_key`. text_format: how the base
    writes texts, for tasks that write them. Raises InvalidTask for a task that no record could fit, and InvalidDataset
    for files that cannot be read or have no records, and for a file of which less than MIN_SHARE fits the task: its
    noised count of fitting records must miss that share by more than SLACK. The recipe's lengths do not matter there: a
    submitter who varies them gets no further answers.

    earlier: how many records at the beginning of each split earlier runs had. The run rehearses them, and the records
    of other data sets that `run` has, if some of its own are new.

    A recipe with clipping trains on all of train.jsonl and measures nothing, because neither the split nor the accuracy
    may depend on private examples. It never fails for the number of records that fit.
    """
    check_directory(directory)
    check_task(task, tokenizer, recipe)
    encoder = Encoder(task, tokenizer, recipe, text_format)
    reader = _Reader(encoder, CountNoise(noise_key, task.model_dump(mode="json")))
    private = recipe.privacy == "clipped"
    train = reader.read(directory / "train.jsonl", checked=not private)
    if private:
        return reader.splits(train)
    trained = earlier.get("train", 0)
    if (directory / "validation.jsonl").is_file():
        held_out = reader.read(directory / "validation.jsonl", checked=True)
        known = held_out[: earlier.get("validation", 0)]
    else:
        kept, removed = hold_out(range(len(train)), directory)
        held_out = [train[index] for index in removed]
        known = [train[index] for index in removed if index < trained]
        trained, train = sum(index < trained for index in kept), [train[index] for index in kept]
    test = None
    if with_test and (directory / "test.jsonl").is_file():
        records = reader.read(directory / "test.jsonl", checked=True)
        known = records[: earlier.get("test", 0)]
        test = reader.measured(records, settings.test_limit) or None
    splits = reader.splits(train, reader.measured(held_out, settings.validation_limit), test)
    if run is not None:
        new = reader.usable(train[trained:])
        rehearsed = reader.usable([*train[:trained], *reader.read_copy(run.rehearsed)])
        if new and rehearsed:
            splits = replace(splits, train=[*new, *rehearsed], rehearsed=len(rehearsed))
            if not task.generates:
                known = [*known, *reader.read_copy(run.held_out)]
                splits = replace(splits, earlier=reader.measured(known, settings.validation_limit) or None)
    blank = (_blank(tokenizer, 1 if task.generates and task.preference_loss is None else 2),)
    return replace(splits, train=splits.train or blank, validation=splits.validation or blank, blank=not splits.train)


def _blank(tokenizer: Tokenizer, candidates: int) -> Example:
    """Returns an example that fits every recipe. With two candidates, which are equal, no model gets it right: the
    first of several best ones is the prediction. Of a preference, both answers are equal.
    """
    tokens = tuple(token_ids(tokenizer, "x", special=False)[:1]) or (0,)
    return Example((Row(tokens, tokens),) * candidates, candidates - 1, truncated=False)


@dataclass(frozen=True)
class CountNoise:
    """The noise of one device on one task's counts. key: of `AgentHome.noise_key`. task: the task as JSON.

    Laplace noise of scale 1 / EPSILON hides whether a given record was counted: an observer who knows all other records
    learns at most EPSILON about it (Dwork et al., TCC 2006). The noise is a function (HMAC-SHA256) of a secret of the
    device and of what is counted. Asking again therefore gives the same answer, and repeated jobs cannot average the
    noise away.
    """

    key: str
    task: Any

    def on(self, count: int, purpose: str, *of: Any) -> int:
        """Returns the count of records plus its noise, rounded; it may be negative.

        of: everything in addition to the task that the count depends on (JSON types), such as the file's sha256. Two
        different counts must not share their noise: their difference would then be exact.
        """
        message = canonical_json([purpose, self.task, *of])
        digest = hmac.new(bytes.fromhex(self.key), message, hashlib.sha256).digest()
        centred = (int.from_bytes(digest[:8]) + 0.5) / 2**64 - 0.5  # uniform, in (-0.5, 0.5)
        return count + round(-math.copysign(SCALE, centred) * math.log1p(-2 * min(abs(centred), 0.5 - 2**-53)))


@dataclass
class _Reader:
    """Reads files record by record."""

    encoder: Encoder
    noise: CountNoise
    unusable: int = 0
    reasons: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)  # sha256 by file
    _fit: int = 0  # records of the latest file that fit the task at some length

    def read(self, path: Path, *, checked: bool = False) -> list[Record]:
        """Returns one entry for each line that is not blank. Raises InvalidDataset if the file cannot be read.

        checked: also for a file without records, and if clearly less than MIN_SHARE of them fit the task, by a count
        with noise.
        """
        self._fit = 0
        try:
            with path.open("rb") as file:
                lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
                records = [self._record(line, f"{path}:{number}") for number, line in lines]
            self.hashes[path.name] = sha256 = file_sha256(path)
        except OSError as error:
            raise InvalidDataset(f"{path}: cannot be read ({error})") from error
        if checked and not records:
            raise InvalidDataset(f"{path}: the file contains no records")
        if checked and self.noise.on(self._fit, "fit", sha256) < MIN_SHARE * len(records) - SLACK:
            raise InvalidDataset(
                f"{path}: {self._fit} of {len(records)} records fit task {self.encoder.task.name!r}; at least "
                f"{MIN_SHARE:.0%} must. {' '.join(self.reasons[:1])}"
            )
        return records

    def read_copy(self, path: Path) -> list[Record]:
        """Returns the records of a file of the run's directory, which exists if the run rehearses other data sets."""
        return self.read(path) if path.is_file() else []

    def measured(self, records: Sequence[Record], limit: int | None) -> list[Example]:
        """Returns at most `limit` examples of a sample, without records whose candidates do not fit the rows of one
        `score` call.
        """
        rows = self.encoder.recipe.score_rows
        scored: list[Record] = []
        for record in sample(records, limit):
            if any(len(scoring_plan(example, self.encoder.recipe).readings) > rows for example in record):
                self._leave_out(f"a record's candidates do not fit the program's {rows} score rows")
            else:
                scored.append(record)
        return self.usable(scored, limit)

    def usable(self, records: Sequence[Record], limit: int | None = None) -> list[Example]:
        """Returns the examples of all records; the first `limit` ones, if there is a limit."""
        return self.encoder.with_other_answers([example for record in records for example in record][:limit])

    def splits(
        self, train: Sequence[Record], validation: Sequence[Example] = (), test: Sequence[Example] | None = None
    ) -> Splits:
        """Returns the splits, without the training records that do not fit."""
        summary = f"{self.unusable} records of the data set do not fit task {self.encoder.task.name!r}"
        truncated = sum(any(example.truncated for example in record) for record in train)
        return Splits(
            train=self.usable(train),
            validation=validation,
            test=test,
            records=len(train),
            truncated=self._noised("truncated", truncated, len(train)),
            unusable=self._noised("unusable", sum(not record for record in train), len(train)),
            reasons=(summary, *self.reasons) if self.unusable else (),
        )

    def _noised(self, purpose: str, count: int, records: int) -> int:
        """Returns a count of training records with noise, between 0 and their number."""
        recipe, sha256 = self.encoder.recipe, self.hashes["train.jsonl"]
        # What the count depends on and nothing else: the same count must not get new noise with another rank.
        shape = [recipe.base.sha256, recipe.sequence_length, recipe.answer_length, recipe.choices]
        return min(max(self.noise.on(count, purpose, sha256, records, shape), 0), records)

    def _record(self, line: bytes, location: str) -> Record:
        try:
            record = read_object(line.decode("utf-8-sig"), location)
            self.encoder.read(record, location)
            self._fit += 1
            return self.encoder.encode(record, location)
        except UnicodeDecodeError:
            self._leave_out(f"{location}: the line is not UTF-8")
        except Exception as error:  # whatever one record provokes must not end the job
            self._leave_out(
                error.detail if isinstance(error, MobizoError) else f"{location}: {type(error).__name__}: {error}"
            )
        return ()

    def _leave_out(self, reason: str) -> None:
        self.unusable += 1
        if len(self.reasons) < MAX_REASONS:
            self.reasons.append(reason[:REASON_LENGTH])


def hold_out(examples: Sequence[T], directory: Path) -> tuple[list[T], list[T]]:
    """Splits off a fifth of the examples, at least one; returns (train, validation). Raises InvalidDataset for
    fewer than 2.
    """
    if len(examples) < 2:
        reason = "one record cannot both train and validate; add records or a validation.jsonl"
        raise InvalidDataset(f"{directory / 'train.jsonl'}: {reason}")
    order = permutation(SPLIT_SEED, HELD_OUT_EPOCH, len(examples))
    count = max(len(examples) // HELD_OUT_SHARE, 1)
    validation_indices = set(order[:count].tolist())
    train = [example for index, example in enumerate(examples) if index not in validation_indices]
    return train, [examples[index] for index in sorted(validation_indices)]


def sample(examples: Sequence[T], limit: int | None) -> Sequence[T]:
    """Returns a random sample of at most `limit` examples, since files are often sorted by label."""
    if limit is None or len(examples) <= limit:
        return examples
    return [examples[index] for index in permutation(SPLIT_SEED, SAMPLE_EPOCH, len(examples))[:limit]]
