"""The commands that use adapters on this device: `adapters list|pull|rollback|remove`, `predict`, `chat`.

Only `pull` knows the network.
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

from device_agent.adapters import AdapterShelf, KeptAdapter
from device_agent.cache import FileCache
from device_agent.client import DeviceClient
from device_agent.options import HomeOption, JsonOption
from device_agent.state import Home
from shared.errors import BadRequest, InvalidDataset, NotFound

if TYPE_CHECKING:
    from device_agent.chat import Chat
    from device_agent.personal import PersonalModel
    from device_agent.predict import Prediction

app = typer.Typer(pretty_exceptions_enable=False)
shelf_app = typer.Typer(help="Adapters kept on this device.", no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(shelf_app, name="adapters")

NameArgument = Annotated[str, typer.Argument(metavar="ADAPTER", help="its name; `adapters list` shows them")]
BaseOption = Annotated[bool, typer.Option("--base", help="the base model without the adapter, to compare")]


class FormName(StrEnum):
    """How a text is put to the model; see `device_agent.chat`."""

    AUTO = "auto"
    PLAIN = "plain"
    CHATML = "chatml"


@shelf_app.command("list")
def list_adapters(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Show what is kept here, and whether it can be used offline."""
    place = Home.locate(home)
    shelf = AdapterShelf(place)
    kept = shelf.kept()
    for about in kept:
        use, previous = _usable(place, about), shelf.has_previous(about.name)
        if json_lines:
            typer.echo(json.dumps(_facts(about) | {"usable": use is None, "why_not": use, "previous": previous}))
            continue
        before = ", the one before it too" if previous else ""
        words = f"{about.task.name}, of job {about.job_id}, kept {about.kept_at:%Y-%m-%d %H:%M} UTC{before}"
        typer.echo(f"{about.name}: {words}" + ("" if use is None else f"; {use}"))
    if not kept and not json_lines:
        typer.echo("none is kept yet; an adapter is kept when its job completes on this device")


@shelf_app.command()
def pull(
    name: Annotated[str | None, typer.Argument(metavar="[ADAPTER]", help="all that are kept, if none is named")] = None,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Fetch what the use of kept adapters lacks, so that `predict` and `chat` work without a network."""
    place = Home.locate(home)
    config, shelf = place.config(), AdapterShelf(place)
    kept = [about for about in shelf.kept() if name in (None, about.name)]
    if name is not None and not kept:
        raise NotFound(f"no adapter {name!r} is kept on this device; one is kept when its job completes here")
    cache = FileCache(place.cache, pins=shelf.pins)
    with DeviceClient(config.server, config.token) as client:
        for about in kept:
            lacking = [file for file in about.files if not cache.holds(file)]
            cache.reserve(lacking)
            for file in lacking:
                cache.fetch(client, file)
            size = sum(file.size for file in lacking)
            if json_lines:
                typer.echo(json.dumps({"adapter": about.name, "files": len(lacking), "bytes": size}))
            else:
                typer.echo(f"{about.name}: " + (f"fetched {size / 1e6:.1f} MB" if lacking else "nothing was lacking"))


@shelf_app.command()
def rollback(name: NameArgument, home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Use the adapter before the newest instead; done twice, all is as it was."""
    about = AdapterShelf(Home.locate(home)).rollback(name)
    typer.echo(json.dumps(_facts(about)) if json_lines else f"{name} is the adapter of job {about.job_id} now")


@shelf_app.command()
def remove(name: NameArgument, home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Forget an adapter on this device, so that the room of its program's files can be used."""
    AdapterShelf(Home.locate(home)).remove(name)
    typer.echo(json.dumps({"removed": name}) if json_lines else f"{name} is forgotten on this device")


def _facts(about: KeptAdapter) -> dict[str, Any]:
    return {
        "name": about.name,
        "job_id": about.job_id,
        "task": about.task.name,
        "base": about.signed.manifest.recipe.base.name,
        "sha256": about.sha256,
        "kept_at": about.kept_at.isoformat(),
    }


def _usable(place: Home, about: KeptAdapter) -> str | None:
    """Why an adapter cannot be used offline; None if it can. By the files' sizes: hashing takes seconds."""
    if not about.files:
        return f"a program of backend {about.signed.manifest.recipe.backend} cannot be used on the device"
    cache = FileCache(place.cache)
    here = (path.is_file() and path.stat().st_size == file.size for file in about.files for path in [cache.path(file)])
    return None if all(here) else f"`mobizo-agent adapters pull {about.name}` fetches what its use lacks"


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
    from device_agent.personal import open_personal
    from device_agent.predict import predict as answer

    given = (text is not None or bool(field)) + (file is not None)
    if given > 1:
        raise BadRequest("records come from --text and --field, or from --file: choose one")
    with closing(open_personal(Home.locate(home), name, base=base)) as model:
        for where, record in _records(model, text, field or [], file):
            _show(answer(model, record, where), json_lines)


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
    from device_agent.personal import open_personal

    with closing(open_personal(Home.locate(home), name, base=base)) as model:
        chosen: Form
        if form is FormName.AUTO:
            chosen, why = known_form(model.tokenizer, model.manifest.recipe.base.name)
            typer.echo(why, err=True)
        else:
            chosen = "chatml" if form is FormName.CHATML else "plain"
        talk = Chat(model, chosen, most, temperature, seed)
        if text is not None:
            _say(talk, text, json_lines)
            return
        while (line := _heard()) is not None:
            if line.strip():
                try:
                    _say(talk, line, json_lines)
                except BadRequest as error:
                    typer.echo(error.detail, err=True)


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
