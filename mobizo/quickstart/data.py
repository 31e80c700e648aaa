"""The owner's file as a data set of the device, and a task for it."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice, permutations
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from device_agent.cli.tasks import read_task
from device_agent.datasets.build import Addition, FieldMap, add
from device_agent.datasets.formats import Format, Source, open_source
from device_agent.datasets.splits import SplitRule
from device_agent.datasets.store import DatasetStore
from device_agent.datasets.task_check import TaskCheck
from device_agent.home import AgentHome
from device_agent.policy.task_approvals import TaskApprovals, TaskState
from shared.canonical import canonical_json, file_sha256, sha256_hex
from shared.durable import write_durably
from shared.errors import BadRequest, InvalidDataset
from shared.task import MAX_LABEL, Answer, Task
from shared.task_records import MISSING, field_value, label_key
from shared.task_templates import named_task

TEXT, LABEL = "text", "label"
PROMPT, ANSWER, COMPLETION, MESSAGES = "prompt", "answer", "completion", "messages"
CONVERSATIONS = "conversations"  # of files in ShareGPT's form
CHOSEN, REJECTED = "chosen", "rejected"
SPLITS = (SplitRule().text, "80/20", "100")  # the first one whose splits all have records is used
MAX_LABELS = 16  # of a suggested task
MIN_RECORDS = 2  # of each label
MAX_LISTED = 60  # characters of all labels: a longer list costs more time than the accuracy is worth
LOOKED_AT = 1000  # records whose fields suggest a task


@dataclass(frozen=True)
class FileOptions:
    """The owner's file and how it is read. adds: its records join those of the data set of this name.

    seed: of a new data set's split.
    """

    path: Path
    fields: tuple[str, ...] = ()
    task: str | None = None
    name: str | None = None
    adds: bool = False
    form: Format | None = None
    delimiter: str | None = None
    encoding: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class CheckedData:
    """A checked file of records and its task.

    suggested: whether the task was derived from the file's columns. files: keys of the files in the data set, this one
    included. duplicates: records of the file that repeat others.
    """

    addition: Addition
    task: Task
    suggested: bool
    check: TaskCheck
    files: tuple[str, ...]
    duplicates: int

    def save(self, home: AgentHome) -> None:
        """Copies the records to the device's home and approves the task, because the caller is the device's owner."""
        home.create()
        # Before the records: a run that is interrupted between the two adds the same records again, and no others.
        origins = _origins(home) | {
            self.addition.name: {"files": self.files, "task": self.task.model_dump(mode="json")}
        }
        write_durably(_origins_file(home), json.dumps(origins, indent=1).encode())
        add(DatasetStore(home.data), self.addition)
        TaskApprovals(home.tasks).decide(self.task, [self.addition.name], TaskState.APPROVED)


def _origins_file(home: AgentHome) -> Path:
    return home.path.parent / "data.json"


def _origins(home: AgentHome) -> dict[str, Any]:
    """Returns the files and the task of each data set that quickstart made."""
    file = _origins_file(home)
    return dict(json.loads(file.read_bytes())) if file.is_file() else {}


def slug(text: str) -> str:
    """Returns a valid name for data sets, adapters and bases, derived from any text."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "data"


def file_format(name: str | None) -> Format | None:
    """Returns the format that an option names. Raises BadRequest."""
    if name is not None and name not in list(Format):
        raise BadRequest(f"--format {name!r} is unknown; choose {', '.join(Format)}")
    return None if name is None else Format(name)


def check_data(options: FileOptions, home: AgentHome, tokenizer: Tokenizer | None = None) -> CheckedData:
    """Reads a file and writes nothing. tokenizer: the base's; None: lengths in tokens are estimated.

    The task is the one that the options name, the one of the data set that the file joins, or else a suggested one.
    Raises BadRequest for options that are wrong, also for a file whose data set has records of other files unless it
    adds to them, and InvalidDataset for a file that cannot be used.
    """
    path = options.path
    source = open_source(path, options.form, options.delimiter, options.encoding)
    fields, name = FieldMap.parse(options.fields), slug(options.name or path.stem)
    origin = _origins(home).get(name, {})
    key = sha256_hex(canonical_json([file_sha256(path), dict(fields.columns), str(options.task)]))
    earlier_files: list[str] = origin.get("files", [])
    exists = name in DatasetStore(home.data).directories()
    if exists and not options.adds and key not in earlier_files:
        records = sum(DatasetStore(home.data).about(name).records.values())
        raise BadRequest(
            f"the data set and the adapter {name!r} exist, with {records} records of another file or task; use --add "
            "to train anew on the records of both files, --continue to train the adapter further on both, or another "
            "--name"
        )
    earlier_task = Task.model_validate(origin["task"]) if exists and "task" in origin else None
    if options.task is not None:
        task = read_task(Path(options.task)) if Path(options.task).is_file() else named_task(options.task)
        if earlier_task not in (None, task):
            raise BadRequest(f"the data set {name!r} has another task; leave out --task, or choose another --name")
    else:
        task = earlier_task or suggest_task(name, source, fields)
    files = tuple(dict.fromkeys([*earlier_files, key]))
    first_error: InvalidDataset | None = None
    for rule in [None] if exists else [SplitRule.parse(split, options.seed) for split in SPLITS]:
        addition = Addition(name, [source], fields, rule, "append" if exists else "new", task, tokenizer)
        try:
            outcome = add(DatasetStore(home.data), replace(addition, dry_run=True))
        except InvalidDataset as error:
            first_error = error
            continue
        assert outcome.check is not None  # noqa: S101  # there is a task
        suggested = options.task is None and earlier_task is None
        return CheckedData(addition, task, suggested, outcome.check, files, outcome.duplicates)
    assert first_error is not None  # noqa: S101  # every rule was tried and refused
    raise first_error


def suggest_task(name: str, source: Source, fields: FieldMap) -> Task:
    """Returns the task that the records' fields suggest.

    Conversations for `messages` or `conversations`; preferences for `chosen` and `rejected`, or for `prompt` and
    `completion` with a `label` that is true or false; completions for `prompt` with `answer` or `completion`; whole
    texts for `text` alone; and a choice between the labels for `text` with `label`. Raises BadRequest for other fields,
    and InvalidDataset without records.
    """
    columns, found = dict[str, None](), set[str]()
    values: dict[str, Any] = {}  # of the fields that are not blank
    for _, record in islice(source.records(fields.columns.values()), LOOKED_AT):
        columns |= dict.fromkeys(record)
        applied = fields.apply(record)
        found.update(applied)
        values |= {name: value for name, value in applied.items() if value is not None and str(value).strip()}
    if not columns:
        is_table = source.format in (Format.CSV, Format.TSV)
        advice = "; a table needs rows below the row with the names of its columns" if is_table else ""
        raise InvalidDataset(f"{source.path} has no records{advice}")
    fields.check_columns(source.path, found, columns)
    if TEXT in found and TEXT not in values:
        raise InvalidDataset(f"column {fields.columns.get(TEXT, TEXT)!r} of {source.path} is blank; map another one")
    for field in (MESSAGES, CONVERSATIONS):
        if isinstance(values.get(field), list):
            return Task(name=name, kind="messages", messages_field=field)
    if CHOSEN in values and REJECTED in values:
        return Task(name=name, kind="preference")
    if PROMPT in values and COMPLETION in values and isinstance(values.get(LABEL), bool):
        return Task(name=name, kind="preference", answer=f"{{{COMPLETION}}}")
    answer = COMPLETION if isinstance(values.get(COMPLETION), str) and LABEL not in found else ANSWER
    if PROMPT in values and answer in values:
        return Task(name=name, kind="completion", prompt=f"{{{PROMPT}}}\n", answer=f"{{{answer}}}")
    if TEXT not in values:
        raise BadRequest(
            f"{source.path} has no column {TEXT!r} (its columns: {', '.join(columns)}); name it with --map "
            f"{TEXT}=COLUMN, and with --map {LABEL}=COLUMN what a model is to choose; columns "
            f"{PROMPT!r} and {ANSWER!r}, or a list {MESSAGES!r}, teach it to answer, {CHOSEN!r} and {REJECTED!r} to "
            "prefer one answer; or give a task with --task"
        )
    return _suggest_choice(name, source, fields) if LABEL in found else Task(name=name, kind="text")


def _suggest_choice(name: str, source: Source, fields: FieldMap) -> Task:
    """Returns a choice task whose answers are the file's labels. Raises BadRequest for too few or too many labels.

    Labels that differ by white space or case are one. The name of the label's column ends the prompt; few short labels
    are listed in its first line.
    """
    spellings: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for _, record in source.records(fields.columns.values()):
        label = field_value(fields.apply(record), LABEL)
        if isinstance(label, (dict, list)):
            raise BadRequest(
                f"column {fields.columns.get(LABEL, LABEL)!r} of {source.path} has objects or lists; a label is a "
                f"text or a number: --map {LABEL}=COLUMN.NAME reads it in an object"
            )
        if label is not MISSING and (key := label_key(label)):
            is_number = isinstance(label, (bool, float)) or key.lstrip("-").isdigit()
            spellings[key][key if is_number else " ".join(str(label).split())] += 1
    frequent = sorted(counts.most_common(1)[0][0] for counts in spellings.values() if counts.total() >= MIN_RECORDS)
    column = fields.columns.get(LABEL, LABEL)
    if any(len(text) > MAX_LABEL for text in frequent):
        raise BadRequest(
            f"column {column!r} of {source.path} has labels of more than {MAX_LABEL} characters; map another column "
            f"with --map {LABEL}=COLUMN, or with --map {PROMPT}=COLUMN --map {ANSWER}=COLUMN teach the model to write"
        )
    if not 2 <= len(frequent) <= MAX_LABELS:
        raise BadRequest(
            f"column {column!r} of {source.path} {_label_fault(frequent, spellings)}; or give one with --task"
        )
    cue, listed = _escaped(column.strip()), ", ".join(frequent)
    first_line = f"{cue}: {_escaped(listed)}\n" if len(listed) <= MAX_LISTED else ""
    # A model chooses " in" or " in time" only by what comes after the shorter one; a label may have a full stop.
    end = next(
        end
        for end in ("", ".", "\n")
        if not any(
            (second + end).startswith(first + end) for first, second in permutations(map(str.lower, frequent), 2)
        )
    )
    answers = tuple(Answer(text=f" {_escaped(text)}{end}", labels=(text,)) for text in frequent)
    return Task(name=name, prompt=f"{first_line}{{{TEXT}}}\n{cue}:", answers=answers)


def _escaped(text: str) -> str:
    """Returns a template of a text."""
    return text.replace("{", "{{").replace("}", "}}")


def _label_fault(frequent: list[str], spellings: Mapping[str, Counter[str]]) -> str:
    """Returns why no task is suggested for these labels, and the remedy. frequent: those of MIN_RECORDS or more."""
    if len(frequent) == 1:
        return (
            f"has only the label {frequent[0]!r} in {MIN_RECORDS} records or more; a model learns to choose from "
            "records of two labels or more: add records of another one"
        )
    if not spellings:
        return f"is blank; map another column with --map {LABEL}=COLUMN"
    if not frequent:
        return f"has no label in {MIN_RECORDS} records or more; add records of each of its {len(spellings)} labels"
    return (
        f"has {len(frequent)} different labels of {MIN_RECORDS} records or more; a task is suggested for 2 to "
        f"{MAX_LABELS}: map another column with --map {LABEL}=COLUMN"
    )
