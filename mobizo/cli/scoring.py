"""`mobizo score`: the log-probabilities of answers, computed on the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import Json, print_json, stop
from mobizo.cli.tables import print_table
from shared.errors import BadRequest
from shared.invalid_fields import first_invalid
from shared.scoring import ScoreRequest

commands = typer.Typer()
Adapter = Annotated[
    str | None,
    typer.Option("--adapter", "-a", help="NAME or NAME@REVISION. Default: the base model without an adapter."),
]
Base = Annotated[str | None, typer.Option(help="Name of a registered base model. Default: the adapter's base model.")]


@commands.command()
@server_command
def score(
    connect: Connect,
    prompt: Annotated[str | None, typer.Argument(help="Text before the answers.")] = None,
    adapter: Adapter = None,
    answer: Annotated[
        list[str] | None, typer.Option(help="Answer, with its leading space if it has one; repeatable.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="JSON lines with the rows of POST /v1/score or, with --task, with records of the task."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Name of a built-in task, which makes prompts and answers of the file's records.")
    ] = None,
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Score answers with an adapter on the server. Each row of a file may name its own adapter."""
    if (prompt is None) == (file is None):
        raise stop("give either a prompt and --answer, or --file", 2)
    try:
        rows = [{"prompt": prompt, "answers": answer or ()}] if file is None else _rows(file, task is not None)
        request = ScoreRequest.model_validate(
            _without_none(rows=[_without_none(adapter=adapter) | row for row in rows], task=task, base=base)
        )
    except BadRequest as error:
        raise stop(error.detail, 2) from error
    except ValidationError as error:
        raise stop(str(first_invalid(error)), 2) from error
    with connect() as client:
        result = client.scoring.score(request)
    if as_json:
        print_json(result)
        return
    lines = []
    for number, row in enumerate(result.rows, 1):
        adapter_label = "" if row.adapter is None else f"{row.adapter} v{row.version}"
        for index, item in enumerate(row.answers):
            mark = "*" if index == row.best else " "
            scores = f"{item.log_probability:.4f}", f"{item.probability:.1%}"
            lines.append((str(number), adapter_label, f"{mark} {item.text!r}", *scores))
    print_table(("row", "adapter", "answer", "log-probability", "probability"), lines)


def _without_none(**fields: Any) -> dict[str, Any]:
    """Returns the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _rows(file: Path, records: bool) -> list[dict[str, Any]]:
    """Returns the rows of a file. Raises BadRequest, which names the line."""
    rows = []
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # JSON strings may have other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{file} cannot be read ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BadRequest(f"{file}:{number}: the line is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise BadRequest(f"{file}:{number}: the line is not a JSON object")
        rows.append({"record": row} if records else row)
    return rows
