"""The commands `data add|list|view|check|remove`: the owner's data sets in the agent's home."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from tokenizers import Tokenizer

from device_agent.cli.options import HomeOption, JsonOption, check_name, show
from device_agent.cli.tasks import read_task
from device_agent.datasets.build import Addition, AdditionOutcome, FieldMap, add
from device_agent.datasets.formats import DELIMITERS, Format, open_source
from device_agent.datasets.splits import DEFAULT_SEED, SplitRule
from device_agent.datasets.store import DatasetStore
from device_agent.datasets.task_check import TaskCheck
from device_agent.home import AgentHome
from device_agent.policy.task_approvals import TaskApprovals, TaskState, is_shipped
from shared.errors import BadRequest, MobizoError
from shared.task import Task
from shared.tokenizer import read_tokenizer

SHOWN_CHARACTERS = 60  # of a value in the preview

app = typer.Typer(
    help="Manage the data sets in the agent's home.", no_args_is_help=True, pretty_exceptions_enable=False
)

DatasetArgument = Annotated[str, typer.Argument(metavar="NAME", help="Data set; see `mobizo-agent data list`.")]
BaseOption = Annotated[
    Path | None,
    typer.Option(help="The base's tokenizer.json, or the directory with it: lengths are then counted, not estimated."),
]
TASK_HELP = "a JSON file, a shipped task's name, or digits of a task's digest."


@app.command("add")
def add_files(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name by which jobs ask for the data set.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="The files with the records.")],
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="FIELD=COLUMN", help="Keep this column as this field. Default: keep all columns."
        ),
    ] = None,
    constants: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Give every record this field, such as a label."),
    ] = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="Format of the files. Default: by their suffix.")
    ] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(help=f"For CSV: one character or {', '.join(DELIMITERS)}. Default: detected from the first rows."),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Encoding of text files, such as cp1252. Default: UTF-8.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Percent of train/validation/test. Default: 80/10/10; with --append, as before.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="Random seed of the split. Default: 0.")
    ] = None,
    task: Annotated[str | None, typer.Option(help=f"Compare the records with a task: {TASK_HELP}")] = None,
    base: BaseOption = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the data set of this name.")] = False,
    append: Annotated[bool, typer.Option("--append", help="Add to the data set of this name.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be added and write nothing.")] = False,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Copy the records of files to the agent's home as a data set, split into train, validation and test."""
    check_name("NAME", name)
    if replace and append:
        raise BadRequest("choose one of --replace and --append")
    agent_home = AgentHome.locate(home)
    rule = None
    if split is not None or seed is not None:
        rule = SplitRule.parse(split or SplitRule().text, DEFAULT_SEED if seed is None else seed)
    addition = Addition(
        name=name,
        sources=[open_source(file, form, delimiter, encoding) for file in files],
        fields=FieldMap.parse(fields or (), constants or ()),
        rule=rule,
        mode="append" if append else "replace" if replace else "new",
        task=None if task is None else _find_task(agent_home, task),
        tokenizer=None if base is None else base_tokenizer(base),
        dry_run=dry_run,
    )
    if not dry_run:
        agent_home.create()
    outcome = add(DatasetStore(agent_home.data), addition)
    show(json_lines, _facts(addition, outcome), "\n".join(_lines(addition, outcome)))


def base_tokenizer(path: Path) -> Tokenizer:
    """Returns the tokenizer in a tokenizer.json, or in the directory that has it. Raises BadRequest."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return read_tokenizer(file.read_bytes())
    except Exception as error:  # tokenizers raises Exception itself
        raise BadRequest(
            f"--base {path} has no readable tokenizer.json ({error}); `mobizo-server base tokenizer` writes that of a "
            "registered base"
        ) from error


def _find_task(home: AgentHome, name_or_path: str) -> Task:
    return (
        read_task(Path(name_or_path)) if Path(name_or_path).is_file() else TaskApprovals(home.tasks).find(name_or_path)
    )


def _facts(addition: Addition, outcome: AdditionOutcome) -> dict[str, Any]:
    """Returns what `add` prints with --json; it has no record's text."""
    return {
        "name": addition.name,
        "sources": [
            {"file": str(source.path), "format": source.format, "delimiter": source.delimiter}
            for source in addition.sources
        ],
        "fields": sorted(outcome.fields),
        "read": outcome.read,
        "added": outcome.added,
        "duplicates": outcome.duplicates,
        "empty": outcome.empty,
        "too_long": outcome.too_long,
        "records": outcome.records,
        "split": outcome.rule.text,
        "seed": outcome.rule.seed,
        "task": None if outcome.check is None else outcome.check.facts(),
        "dry_run": addition.dry_run,
    }


def _lines(addition: Addition, outcome: AdditionOutcome) -> Iterator[str]:
    for source in addition.sources:
        names = {value: key for key, value in DELIMITERS.items()}
        cut = source.delimiter and f", delimiter {names.get(source.delimiter, source.delimiter)}"
        yield f"{source.path}: {source.format}{cut or ''}"
    for record in outcome.preview:
        yield "  " + ", ".join(f"{_display_text(name)}: {_display_text(value)}" for name, value in record.items())
    yield (
        f"{outcome.read} records read, {outcome.added} added; dropped: {outcome.duplicates} duplicates, "
        f"{outcome.empty} empty, {outcome.too_long} too long"
    )
    if outcome.check is not None:
        yield from outcome.check.lines()
    counts = ", ".join(f"{split} {count}" for split, count in outcome.records.items())
    prefix = "nothing was written; it would have" if addition.dry_run else "it has"
    yield f"data set {addition.name}: {prefix} {counts} (split {outcome.rule.text}, seed {outcome.rule.seed})"
    if addition.task is not None and not is_shipped(addition.task) and not addition.dry_run:
        yield f"let the task read it: mobizo-agent task approve --file TASK --data {addition.name}"


def _display_text(value: Any) -> str:
    """Returns a value on one line, shortened; characters that do not print, such as terminal controls, are replaced."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
    return "".join(character if character.isprintable() else "�" for character in cut)


@app.command("list")
def list_datasets(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """List the data sets in the agent's home; `run` offers them to the server by name."""
    store = DatasetStore(AgentHome.locate(home).data)
    names = list(store.directories())
    for name in names:
        about = store.about(name)
        counts = ", ".join(f"{split} {count}" for split, count in about.records.items())
        facts = {"name": name, "records": about.records, "changed_at": about.changed_at.isoformat()}
        show(json_lines, facts, f"{name}: {counts}; changed {about.changed_at:%Y-%m-%d %H:%M} UTC")
    if not names and not json_lines:
        typer.echo("no data sets yet; add one with `mobizo-agent data add NAME FILE`")


@app.command()
def view(name: DatasetArgument, home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Show a data set: its fields, its splits, where it is stored, and the owner's decisions about tasks."""
    agent_home = AgentHome.locate(home)
    store = DatasetStore(agent_home.data)
    about, directory = store.about(name), store.directory(name)
    size = sum(path.stat().st_size for path in directory.glob("*.jsonl"))
    decisions = [entry for entry in TaskApprovals(agent_home.tasks).decisions() if entry.dataset == name]
    facts = {"name": name, "directory": str(directory), "bytes": size} | about.model_dump(mode="json")
    facts["tasks"] = [{"task": entry.task.name, "sha256": entry.sha256, "state": entry.state} for entry in decisions]
    lines = [
        f"{name} in {directory}, {size / 1e6:.1f} MB, changed {about.changed_at:%Y-%m-%d %H:%M} UTC",
        f"fields: {', '.join(map(_display_text, about.fields))}",
        *(f"{split}: {count} records" for split, count in about.records.items()),
        f"split {about.rule.text}, seed {about.seed}",
        *(f"task {entry.task.name} ({entry.sha256[:12]}): {entry.state}" for entry in decisions),
    ]
    show(json_lines, facts, "\n".join(lines))


@app.command()
def check(
    name: DatasetArgument,
    task: Annotated[str, typer.Option(help=f"Task: {TASK_HELP}")],
    base: BaseOption = None,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Compare a data set with a task; exit status 1 if so few records of a split fit that a job would fail."""
    agent_home = AgentHome.locate(home)
    store, checked_task = DatasetStore(agent_home.data), _find_task(agent_home, task)
    few, tokenizer = [], None if base is None else base_tokenizer(base)
    for split in store.about(name).records:
        result = TaskCheck(checked_task, tokenizer)
        for location, record in store.records(name, split):
            result.add(location, record)
        show(json_lines, {"split": split} | result.facts(), "\n  ".join([f"{split}:", *result.lines()]))
        if not result.enough:
            few.append(split)
    if few:
        raise MobizoError(
            f"less than half of {', '.join(few)} fits task {checked_task.name!r}; correct the data or the task"
        )


@app.command()
def remove(name: DatasetArgument, home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Remove a data set from the agent's home. Decisions about tasks and the privacy spent stay with its name."""
    agent_home = AgentHome.locate(home)
    store = DatasetStore(agent_home.data)
    store.directory(name)
    with store.changing():
        store.remove(name)
    decisions = TaskApprovals(agent_home.tasks).decisions()
    approved = [entry for entry in decisions if entry.dataset == name and entry.state is TaskState.APPROVED]
    text = f"{name} was removed from this device"
    if approved:
        text += f"\n{len(approved)} tasks may still read a data set of this name; see `mobizo-agent task revoke`"
    show(json_lines, {"removed": name, "tasks_approved": len(approved)}, text)
