"""The commands `task list|approve|revoke`: the owner decides which tasks may read which data set."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from device_agent.cli.options import HomeOption, JsonOption, show
from device_agent.home import AgentHome
from device_agent.policy.task_approvals import (
    MIN_DIGITS,
    SHIPPED,
    TaskApprovals,
    TaskState,
    is_shipped,
    task_lines,
    task_sha256,
)
from shared.errors import BadRequest
from shared.invalid_fields import first_invalid
from shared.task import Task

app = typer.Typer(
    help="Decide which tasks may read which data set.", no_args_is_help=True, pretty_exceptions_enable=False
)

TaskArgument = Annotated[
    str, typer.Argument(metavar="TASK", help=f"At least {MIN_DIGITS} digits of a task's digest, or a shipped task.")
]
DatasetsOption = Annotated[list[str] | None, typer.Option("--data", metavar="NAME", help="Data set; may be repeated.")]


@app.command("list")
def list_tasks(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """List the shipped tasks, and every other task with the owner's decision and its exact text."""
    approvals = TaskApprovals(AgentHome.locate(home).tasks)
    decisions = approvals.decisions()
    if json_lines:
        for task in SHIPPED.values():
            typer.echo(json.dumps(_facts(task, None, TaskState.SHIPPED)))
    else:
        typer.echo(f"shipped tasks, approved for every data set unless listed below as revoked: {', '.join(SHIPPED)}")
    for decision in decisions:
        task, digits = decision.task, decision.sha256[:MIN_DIGITS]
        lines = [] if is_shipped(task) else [f"    {line}" for line in task_lines(task)]
        title = f"{decision.state}  {digits}  {task.name} for data set {decision.dataset}"
        show(json_lines, _facts(task, decision.dataset, decision.state), "\n".join([title, *lines]))


@app.command()
def approve(
    task: Annotated[
        str | None,
        typer.Argument(metavar="[TASK]", help=f"At least {MIN_DIGITS} digits of a task's digest, or a shipped task."),
    ] = None,
    data: DatasetsOption = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Approve the task in this JSON file, before a job requests it.")
    ] = None,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Allow a task to read data sets; default: those for which it waits. Prints the approved text."""
    approvals = TaskApprovals(_existing(home).tasks)
    if (task is None) == (file is None):
        raise BadRequest("name one task, by digits of its digest or with --file")
    definition = read_task(file) if file is not None else approvals.find(task or "")
    _decide(approvals, definition, data or approvals.waiting_for(definition), TaskState.APPROVED, json_lines)


@app.command()
def revoke(
    task: TaskArgument, data: DatasetsOption = None, home: HomeOption = None, json_lines: JsonOption = False
) -> None:
    """Stop a task from reading data sets, from the next job on; default: every data set with a decision about it."""
    approvals = TaskApprovals(_existing(home).tasks)
    definition = approvals.find(task)
    datasets = [decision.dataset for decision in approvals.decisions() if decision.task == definition]
    _decide(approvals, definition, data or datasets, TaskState.REVOKED, json_lines)


def _decide(approvals: TaskApprovals, task: Task, datasets: list[str], state: TaskState, json_lines: bool) -> None:
    if not datasets:
        raise BadRequest(f"task {task.name!r}: name the data sets with --data NAME")
    approvals.decide(task, datasets, state)
    if json_lines:
        for dataset in datasets:
            typer.echo(json.dumps(_facts(task, dataset, state)))
        return
    typer.echo(f"{state} for {', '.join(datasets)}: task {task.name} ({task_sha256(task)[:MIN_DIGITS]})")
    for line in task_lines(task):
        typer.echo(f"    {line}")


def _facts(task: Task, dataset: str | None, state: TaskState) -> dict[str, object]:
    return {"state": state, "dataset": dataset, "sha256": task_sha256(task), "task": task.model_dump(mode="json")}


def _existing(home: Path | None) -> AgentHome:
    agent_home = AgentHome.locate(home)
    agent_home.create()
    return agent_home


def read_task(file: Path) -> Task:
    """Returns the task in a JSON file. Raises BadRequest."""
    try:
        return Task.model_validate_json(file.read_bytes().removeprefix(BOM_UTF8))
    except OSError as error:
        raise BadRequest(f"{file} cannot be read ({error})") from error
    except ValidationError as error:
        raise BadRequest(f"{file} is not a task: {first_invalid(error)}") from error
