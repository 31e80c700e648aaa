"""`mobizo score` and `mobizo generate`: adapters at work on the server. The client knows the API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from mobizo.console import DEFAULT_SERVER, Json, Server, Token, connected, out, print_json, stop
from shared.errors import BadRequest
from shared.scoring import GenerateRequest, GenerateResult, ScoreRequest

commands = typer.Typer()
Adapter = Annotated[
    str | None, typer.Option("--adapter", "-a", help="NAME or NAME@REVISION; default: the base model alone")
]
Base = Annotated[str | None, typer.Option(help="a registered base model; default: the adapter's")]


@commands.command()
def score(
    adapter: Adapter = None,
    prompt: Annotated[str | None, typer.Option(help="a text that the answers may follow")] = None,
    answer: Annotated[
        list[str] | None, typer.Option(help="with its leading space, if any; give at least two, one by one")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="JSON lines in place of --prompt: rows as POST /v1/score takes them, or with --task records"),
    ] = None,
    task: Annotated[str | None, typer.Option(help="a shipped task; the file's lines are records of it")] = None,
    base: Base = None,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Score answers after prompts, by an adapter on the server; rows of a file may each name their own."""
    if (prompt is None) == (file is None):
        raise stop("give --prompt with --answer, or --file", 2)
    try:
        rows = [{"prompt": prompt, "answers": answer or ()}] if file is None else _rows(file, task is not None)
        request = ScoreRequest.model_validate(
            _said(rows=[_said(adapter=adapter) | row for row in rows], task=task, base=base)
        )
    except (BadRequest, ValidationError) as error:
        raise stop(_first(error), 2) from error
    with connected(server, token) as client:
        found = client.score(request)
    if as_json:
        print_json(found)
        return
    table = Table("row", "adapter", "answer", "log-probability", "probability")
    for number, row in enumerate(found.rows, 1):
        named = "" if row.adapter is None else f"{row.adapter} v{row.version}"
        for index, item in enumerate(row.answers):
            chosen = "*" if index == row.best else " "
            told = f"{item.log_probability:.4f}", f"{item.probability:.1%}"
            table.add_row(str(number), named, f"{chosen} {item.text!r}", *told)
    out.print(table)


@commands.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="the text to go on with")],
    adapter: Adapter = None,
    max_tokens: Annotated[int | None, typer.Option(help="most tokens of the answer")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: the likeliest token each time")] = None,
    top_p: Annotated[float | None, typer.Option(help="draw from the likeliest tokens of this share")] = None,
    seed: Annotated[int | None, typer.Option(help="decides where the temperature is not 0")] = None,
    stop_at: Annotated[list[str] | None, typer.Option("--stop", help="a text before which it ends; repeatable")] = None,
    base: Base = None,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Go on with a text, by an adapter on the server; shown as it comes."""
    fields = _said(prompt=prompt, adapter=adapter, max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    try:
        request = GenerateRequest.model_validate(fields | _said(seed=seed, stop=stop_at, base=base))
    except ValidationError as error:
        raise stop(_first(error), 2) from error
    with connected(server, token) as client:
        if as_json:
            print_json(client.generate(request))
            return
        for piece in client.stream(request):
            if isinstance(piece, GenerateResult):
                typer.echo()
            else:
                typer.echo(piece, nl=False)


def _said(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _rows(file: Path, records: bool) -> list[dict[str, Any]]:
    """Rows of a request. Raises BadRequest naming the line."""
    rows = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
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
            raise BadRequest(f"{file}:{number}: the line is no JSON object")
        rows.append({"record": row} if records else row)
    return rows


def _first(error: BadRequest | ValidationError) -> str:
    if isinstance(error, BadRequest):
        return error.detail
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}".removeprefix(": ")
