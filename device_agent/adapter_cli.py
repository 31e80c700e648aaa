"""The commands that use adapters on this device: `predict` and `chat`. They know no network.

Both take an adapter that is newer by then before each record or text, without being started again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from device_agent.options import HomeOption, JsonOption, NameArgument
from device_agent.state import Home
from shared.errors import BadRequest, InvalidDataset

if TYPE_CHECKING:
    from device_agent.chat import Chat
    from device_agent.personal import PersonalModel
    from device_agent.predict import Prediction

app = typer.Typer(pretty_exceptions_enable=False)

BaseOption = Annotated[bool, typer.Option("--base", help="the base model without the adapter, to compare")]


class FormName(StrEnum):
    """How a text is put to the model; see `device_agent.chat`."""

    AUTO = "auto"
    PLAIN = "plain"
    CHATML = "chatml"


@app.command()
def predict(
    name: NameArgument,
    text: Annotated[str | None, typer.Option("--text", help="the task's one text field")] = None,
    field: Annotated[
        list[str] | None, typer.Option("--field", metavar="NAME=VALUE", help="a field of the task")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="F.jsonl", help="records, a JSON object a line")
    ] = None,
    base: BaseOption = False,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Answer by the adapter's task, offline: each candidate with its probability. Records come from options, a file or
    standard input.
    """
    from device_agent.live import LiveModel
    from device_agent.predict import predict as answer

    given = (text is not None or bool(field)) + (file is not None)
    if given > 1:
        raise BadRequest("records come from --text and --field, or from --file: choose one")
    with closing(LiveModel(Home.locate(home), name, base=base)) as live:
        for where, record in _records(live.model, text, field or [], file):
            _tell(live.refresh())
            _show(answer(live.model, record, where), json_lines)


def _records(
    model: PersonalModel, text: str | None, fields: list[str], file: Path | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    from device_agent.predict import question_fields, record_of, records_of
    from shared.encoding import read_jsonl

    if file is not None:
        return read_jsonl(file)
    if text is not None or fields:
        return iter([("the command line", dict(record_of(model.task, text, fields)))])
    if sys.stdin.isatty():
        asked = question_fields(model.task)
        form = "a text" if len(asked) == 1 else f"a JSON object with {', '.join(asked)}"
        typer.echo(f"{form} on each line; Ctrl-D ends", err=True)
    return records_of(model.task, sys.stdin, "standard input")


def _show(found: Prediction, json_lines: bool) -> None:
    if json_lines:
        candidates = [vars(candidate) for candidate in found.candidates]
        best = found.best
        facts = {"answer": best.text, "label": best.label, "candidates": candidates, "truncated": found.truncated}
        typer.echo(json.dumps(facts))
        return
    ranked = sorted(found.candidates, key=lambda candidate: -candidate.log_probability)
    line = "  ".join(f"{candidate.text.strip()} {candidate.probability:.1%}" for candidate in ranked)
    typer.echo(line + ("  (the text was cut to the program's length)" if found.truncated else ""))


@app.command()
def chat(
    name: NameArgument,
    text: Annotated[str | None, typer.Option("--text", help="answer this one text, then exit")] = None,
    most: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="of the draws at a temperature above 0")] = 0,
    form: Annotated[FormName, typer.Option(help="how your text is put to the model")] = FormName.AUTO,
    base: BaseOption = False,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Let the adapter go on with your texts, offline, as its tokens come; Ctrl-C stops an answer, Ctrl-D ends."""
    from device_agent.chat import Chat, Form, known_form
    from device_agent.live import LiveModel

    with closing(LiveModel(Home.locate(home), name, base=base)) as live:
        chosen: Form
        if form is FormName.AUTO:
            chosen, why = known_form(live.model.tokenizer, live.model.manifest.recipe.base.name)
            typer.echo(why, err=True)
        else:
            chosen = "chatml" if form is FormName.CHATML else "plain"
        talk = Chat(live.model, chosen, most, temperature, seed)
        if text is not None:
            _say(talk, text, json_lines)
            return
        while (line := _heard()) is not None:
            if line.strip():
                _tell(live.refresh())
                talk.use(live.model)
                try:
                    _say(talk, line, json_lines)
                except BadRequest as error:
                    typer.echo(error.detail, err=True)


def _tell(happened: str | None) -> None:
    """Says beside the answers that another adapter is in use."""
    if happened is not None:
        typer.echo(happened, err=True)


def _heard() -> str | None:
    """A person's next line; None at the end."""
    if sys.stdin.isatty():
        typer.echo("> ", nl=False, err=True)
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        return None
    except UnicodeDecodeError as error:
        raise InvalidDataset(f"standard input is not UTF-8 ({error})") from error
    return line.rstrip("\r\n") if line else None


def _say(talk: Chat, text: str, json_lines: bool) -> None:
    """Shows an answer as it comes."""
    pieces, said = talk.answer(text), ""
    try:
        for piece in pieces:
            said += piece
            if not json_lines:
                typer.echo(piece, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pieces.close()
    if json_lines:
        typer.echo(json.dumps({"text": said, "ended": talk.ended, "forgotten_turns": talk.forgotten}))
    else:
        typer.echo()
