"""Adds the records of files to a data set: maps fields, drops what cannot be used, splits, writes and publishes.

Readers (all but the one of JSON) and writers stream, and duplicates are found by digests on disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from tokenizers import Tokenizer

from device_agent.datasets.formats import Located, Source, no_column
from device_agent.datasets.splits import SplitRule, record_bytes
from device_agent.datasets.store import DatasetAbout, DatasetStore
from device_agent.datasets.task_check import TaskCheck
from shared.durable import new_file
from shared.errors import BadRequest, InvalidDataset, MobizoError, TooLarge
from shared.scoring import MAX_TEXT
from shared.task import Task, is_field_name
from shared.task_records import MISSING, field_value

MAX_RECORD_BYTES = MAX_TEXT  # bytes of a record as JSON; longer ones are dropped
PREVIEW = 3  # records
CACHE_KIB = 32 << 10  # of the digests
MAX_NAMES = 1000  # of fields that are remembered for the owner


@dataclass(frozen=True)
class FieldMap:
    """columns: the source column of each field; empty: all columns under their own names. constants: added fields.

    A column `answers.text` is also `text` of the object in `answers`.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, columns: Sequence[str] = (), constants: Sequence[str] = ()) -> FieldMap:
        """Returns the map that the options --map FIELD=COLUMN and --set FIELD=VALUE give. Raises BadRequest."""
        return cls(_pairs("--map", columns), _pairs("--set", constants))

    def check_constants(self, location: str, record: Mapping[str, Any]) -> None:
        """Raises InvalidDataset if a record has a column with the name of a constant."""
        collisions = sorted(set(self.constants) & set(self.columns or record))
        if collisions:
            raise InvalidDataset(
                f"{location}: there is a column {collisions[0]!r}; choose another field for --set, or use --map"
            )

    def check_columns(self, path: Path, found: Collection[str], names: Collection[str]) -> None:
        """Raises InvalidDataset if no record of a file has a mapped column.

        found: fields that some record has. names: columns of the first record.
        """
        missing = [column for name, column in self.columns.items() if name not in found]
        if missing:
            raise InvalidDataset(no_column(path, missing[0], names))

    def apply(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the record's fields without the constants. A column that the record lacks is left out."""
        if not self.columns:
            return dict(record)
        fields = {name: field_value(record, column) for name, column in self.columns.items()}
        return {name: value for name, value in fields.items() if value is not MISSING}


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not is_field_name(name) or name in pairs:
            raise BadRequest(
                f"{option} {text!r} must be FIELD=..., each FIELD once and made of letters, digits, '_' and '.'"
            )
        pairs[name] = value
    return pairs


@dataclass(frozen=True)
class Addition:
    """A request to add files.

    rule: None: the data set's own rule; for a new data set, the default. tokenizer: of the base that will be trained;
    None: lengths in tokens are estimated. records: added as they are, after the files. mode: what becomes of a data set
    of the same name; new: it is an error.
    """

    name: str
    sources: Sequence[Source]
    fields: FieldMap = FieldMap()
    rule: SplitRule | None = None
    mode: Literal["new", "replace", "append"] = "new"
    task: Task | None = None
    tokenizer: Tokenizer | None = None
    dry_run: bool = False
    records: Sequence[dict[str, Any]] = ()


@dataclass
class AdditionOutcome:
    """What was added. All counts except `records` are of the new files only."""

    rule: SplitRule
    records: dict[str, int]  # of the whole data set, by split
    check: TaskCheck | None
    read: int = 0
    added: int = 0
    duplicates: int = 0
    empty: int = 0
    too_long: int = 0
    fields: set[str] = field(default_factory=set)
    preview: list[dict[str, Any]] = field(default_factory=list)


def add(store: DatasetStore, addition: Addition) -> AdditionOutcome:
    """Adds files to a data set. Either the whole change happens or none of it, also after a kill.

    Raises BadRequest for an existing name or a rule that differs from it, InvalidDataset for files that cannot be used
    and splits that are too small, Conflict while another process changes data sets, and MobizoError if the disk is
    full.
    """
    try:
        with nullcontext() if addition.dry_run else store.changing():
            rule, existing_records = _existing(store, addition)
            with nullcontext(None) if addition.dry_run else store.staging(addition.name) as version:
                with ExitStack() as stack:
                    builder = _Builder(version, rule, addition, stack)
                    for location, record in existing_records:
                        builder.keep(location, record)
                    for source in addition.sources:
                        builder.read(source)
                    for record in addition.records:
                        builder.keep("the record", record)
                outcome = builder.outcome
                if addition.sources:  # a data set that grows by single records begins too small to train
                    _check(outcome)
                if version is not None:
                    about = DatasetAbout(
                        shares=rule.shares,
                        seed=rule.seed,
                        records=outcome.records,
                        fields=tuple(sorted(outcome.fields)),
                    )
                    store.publish(addition.name, version, about)
            return outcome
    except OSError as error:
        raise MobizoError(f"data set {addition.name} is unchanged ({error}); correct that and add it again") from error


def append_record(store: DatasetStore, name: str, record: dict[str, Any]) -> bool:
    """Adds one record to a data set, as `add` does, or creates the data set with it; returns whether the record is new.

    Raises TooLarge for a record of more than MAX_RECORD_BYTES, and what `add` raises.
    """
    exists = name in store.directories()
    outcome = add(store, Addition(name=name, sources=(), mode="append" if exists else "new", records=(record,)))
    if outcome.too_long:
        raise TooLarge(f"the record has more than {MAX_RECORD_BYTES} bytes as JSON")
    return outcome.duplicates == 0


def _existing(store: DatasetStore, addition: Addition) -> tuple[SplitRule, Iterable[Located]]:
    """Returns the rule, and the records that are kept."""
    name, directory = addition.name, store.directories().get(addition.name)
    if addition.mode != "append":
        if directory is not None and addition.mode == "new":
            raise BadRequest(f"there is a data set {name!r}; replace it with --replace, or add to it with --append")
        return addition.rule or SplitRule(), ()
    own = store.about(name).rule
    if addition.rule not in (None, own):
        raise BadRequest(f"data set {name!r} is split {own.text} with seed {own.seed}; it keeps both with --append")
    return own, (located for split in own.used for located in store.records(name, split))


def _check(outcome: AdditionOutcome) -> None:
    """Raises InvalidDataset for a data set that no job could train."""
    if sum(outcome.records.values()) == 0:
        dropped = {"without text": outcome.empty, "too long": outcome.too_long}
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
        raise InvalidDataset(
            f"none of the {outcome.read} records can be used ({reasons}); nothing was added; choose columns with --map"
            if outcome.read
            else "the files contain no records; nothing was added; a table needs rows below the names of its columns"
        )
    for split, count in outcome.records.items():
        minimum = outcome.rule.minimum(split)
        if count < minimum:
            advice = ", or choose other shares with --split, such as 80/20 or 100" if len(outcome.records) > 1 else ""
            if outcome.duplicates:
                advice += f" ({outcome.duplicates} of the {outcome.read} records read are duplicates)"
            raise InvalidDataset(
                f"split {split} has {count} records and needs at least {minimum}; nothing was added; add more records"
                f"{advice}"
            )
    if outcome.check is not None and (fault := outcome.check.label_fault):
        raise InvalidDataset(f"{fault}; nothing was added")
    if outcome.check is not None and not outcome.check.enough:
        reasons = ", ".join(f"{count}: {reason}" for reason, count in outcome.check.reasons.items())
        raise InvalidDataset(
            f"{outcome.check.fitting} of {outcome.check.records} records fit task {outcome.check.task.name!r}, and at "
            f"least half must ({reasons}); nothing was added; name the task's fields with --map FIELD=COLUMN"
        )


class SeenDigests:
    """A set of record digests in bounded memory, in SQLite's own temporary file."""

    def __init__(self) -> None:
        import sqlite3  # here to keep the daemon's memory small

        self._database = sqlite3.connect("", isolation_level=None)
        for setting in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{CACHE_KIB}"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("BEGIN")
        self._database_error = sqlite3.OperationalError

    def add(self, digest: bytes) -> bool:
        """Adds a digest; returns whether it is new. Raises OSError, such as for a full disk."""
        try:
            return self._database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1
        except self._database_error as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Removes the file."""
        self._database.close()


class _Builder:
    """Writes records to the files of a version; without a directory it only counts them."""

    def __init__(self, directory: Path | None, rule: SplitRule, addition: Addition, stack: ExitStack) -> None:
        """stack: closes the files."""
        self._fields, self._rule = addition.fields, rule
        check = None if addition.task is None else TaskCheck(addition.task, addition.tokenizer)
        self.outcome = AdditionOutcome(rule, dict.fromkeys(rule.used, 0), check)
        self._digests = stack.enter_context(closing(SeenDigests()))
        self._files: dict[str, BinaryIO] = {}
        if directory is not None:
            for split in rule.used:
                self._files[split] = stack.enter_context(new_file(directory / f"{split}.jsonl"))

    def read(self, source: Source) -> None:
        """Adds the records of a file."""
        outcome = self.outcome
        names: Collection[str] = ()  # of the first record
        found = set[str]()
        for number, (location, record) in enumerate(source.records(self._fields.columns.values())):
            if number == 0:
                names = tuple(record)
            if self._fields.constants:
                self._fields.check_constants(location, record)
            outcome.read += 1
            fields = self._fields.apply(record)
            found.update(fields)
            if all(value is None or (isinstance(value, str) and not value.strip()) for value in fields.values()):
                outcome.empty += 1
                continue
            fields |= self._fields.constants
            if self.keep(location, fields):
                outcome.added += 1
                if len(outcome.preview) < PREVIEW:
                    outcome.preview.append(fields)
        if names:
            self._fields.check_columns(source.path, found, names)

    def keep(self, location: str, record: dict[str, Any]) -> bool:
        """Writes a record to its split; returns False and counts it if it is a duplicate or too long."""
        try:
            content = record_bytes(record)
        except (ValueError, TypeError, RecursionError) as error:  # TypeError: dates or bytes deep in a Parquet row
            raise InvalidDataset(f"{location}: the record cannot be stored as JSON in UTF-8 ({error})") from error
        if len(content) > MAX_RECORD_BYTES:
            self.outcome.too_long += 1
            return False
        digest = self._rule.digest(content)
        if not self._digests.add(digest):
            self.outcome.duplicates += 1
            return False
        split = self._rule.split(digest)
        if self._files:
            self._files[split].write(content + b"\n")
        self.outcome.records[split] += 1
        if len(self.outcome.fields) < MAX_NAMES:
            self.outcome.fields.update(record)
        if self.outcome.check is not None:
            self.outcome.check.add(location, record)
        return True
