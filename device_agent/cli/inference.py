"""The commands that use adapters on this device, offline: `predict`, `chat` and `samples`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from enum import StrEnum
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from device_agent.cli.options import FeedbackOption, HomeOption, JsonOption, NameArgument, open_feedback, show
from device_agent.home import AgentHome
from shared.errors import BadRequest, InvalidDataset, MobizoError

if TYPE_CHECKING:
    from device_agent.inference.chat import Chat
    from device_agent.inference.personal_model import PersonalModel
    from device_agent.inference.predict import Prediction
    from device_agent.serving.feedback import Feedback

app = typer.Typer(pretty_exceptions_enable=False)

RATINGS: dict[str, Literal["up", "down"]] = {"/up": "up", "/down": "down", "/edit": "down"}  # lines of `chat`
BaseOption = Annotated[bool, typer.Option("--base", help="Use the base model without the adapter, for comparison.")]


class PromptFormat(StrEnum):
    """How the text is presented to the model: by the base's chat template, if there is one, or as it is."""

    AUTO = "auto"
    PLAIN = "plain"


@app.command()
def predict(
    name: NameArgument,
    text: Annotated[str | None, typer.Option("--text", help="Value of the task's only text field.")] = None,
    field: Annotated[
        list[str] | None, typer.Option("--field", metavar="NAME=VALUE", help="Value of one field of the task.")
    ] = None,
    base: BaseOption = False,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Classify records offline: print every candidate answer of the adapter's task with its probability. Records come
    from options or, one per line, from standard input.
    """
    from device_agent.inference.personal_model import open_personal
    from device_agent.inference.predict import predict as answer

    with closing(open_personal(AgentHome.locate(home), name, base=base)) as model:
        for location, record in _records(model, text, field or []):
            _show(answer(model, record, location), json_lines)


def _records(model: PersonalModel, text: str | None, fields: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    from device_agent.inference.predict import record_of, records_of
    from shared.task import record_fields

    if text is not None or fields:
        return iter([("the command line", dict(record_of(model.task, text, fields)))])
    if sys.stdin.isatty():
        fields_of_task = record_fields(model.task)
        form = "a text" if len(fields_of_task) == 1 else f"a JSON object with {', '.join(fields_of_task)}"
        typer.echo(f"enter {form} on each line; Ctrl-D exits", err=True)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig")  # a file may begin with a byte order mark
    return records_of(model.task, sys.stdin, "standard input")


def _show(prediction: Prediction, json_lines: bool) -> None:
    ranked = sorted(prediction.candidates, key=lambda candidate: -candidate.log_probability)
    best = ranked[0]
    candidates = [vars(candidate) for candidate in prediction.candidates]
    facts = {"answer": best.text, "label": best.label, "candidates": candidates, "truncated": prediction.truncated}
    line = "  ".join(f"{candidate.text.strip()} {candidate.probability:.1%}" for candidate in ranked)
    line += "  (the text was truncated to the program's length)" if prediction.truncated else ""
    show(json_lines, facts, line)


@app.command()
def chat(
    name: NameArgument,
    text: Annotated[str | None, typer.Option("--text", help="Answer this text, then exit.")] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Maximum number of tokens in an answer.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for a temperature above 0.")] = 0,
    form: Annotated[PromptFormat, typer.Option(help="Format of the prompt.")] = PromptFormat.AUTO,
    base: BaseOption = False,
    feedback: FeedbackOption = None,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Generate answers to your texts offline, printed token by token; Ctrl-C stops an answer, Ctrl-D exits. With
    --feedback, the line /up or /down after an answer rates it, and /edit TEXT gives a better one.
    """
    from device_agent.inference.chat import Chat
    from device_agent.inference.personal_model import open_personal

    if text is not None and feedback is not None:
        raise BadRequest("--feedback is for conversations, in which lines rate answers; leave --text out")
    agent_home = AgentHome.locate(home)
    ratings = open_feedback(agent_home, feedback)
    with closing(open_personal(agent_home, name, base=base)) as model:
        template = None
        if form is PromptFormat.AUTO:
            template = model.manifest.chat_template
            own = "the base's own chat template; your text is a turn of a conversation"
            typer.echo(own if template else "no chat template; the model continues your text", err=True)
        conversation = Chat(model, template, max_tokens, temperature, seed)
        if text is not None:
            _print_answer(conversation, text, json_lines)
            return
        number = 0  # of the last answer
        while (line := _read_line()) is not None:
            command = line.split(" ", 1)[0]
            if ratings is not None and command in RATINGS:
                _rate(ratings, number, line, json_lines)
            elif line.strip():
                try:
                    answer = _print_answer(conversation, line, json_lines)
                except BadRequest as error:
                    typer.echo(error.detail, err=True)
                    continue
                number += 1
                if ratings is not None:
                    ratings.keep(str(number), conversation.prompt, answer)


@app.command()
def samples(
    name: NameArgument,
    data: Annotated[str, typer.Option("--data", metavar="NAME", help="Data set of the home that has the records.")],
    limit: Annotated[int, typer.Option(min=1, max=100, help="Number of records.")] = 3,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Maximum number of tokens of each text.")] = 64,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Show what the base model and the adapter write for records that were held out, beside each record's own text.
    Nothing of this leaves the device.
    """
    from device_agent.datasets.store import DatasetStore
    from device_agent.inference.samples import write_samples

    agent_home = AgentHome.locate(home)
    split, texts = write_samples(agent_home, name, DatasetStore(agent_home.data).directory(data), limit, max_tokens)
    lines = [f"held-out records of {data} ({split}):"]
    for number, text in enumerate(texts, 1):
        lines.append(f"\n{number}  {text.prompt}")
        for label, content in (("own text", text.own), ("base model", text.base), (name, text.adapter)):
            lines.append(f"   {label}: {content.strip()}")
    show(json_lines, {"split": split, "texts": [vars(each) for each in texts]}, "\n".join(lines))


def _read_line() -> str | None:
    """Returns the next line of standard input, or None at its end."""
    if sys.stdin.isatty():
        typer.echo("> ", nl=False, err=True)
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        return None
    except UnicodeDecodeError as error:
        raise InvalidDataset(f"standard input is not UTF-8 ({error})") from error
    return line.rstrip("\r\n") if line else None


def _rate(feedback: Feedback, number: int, line: str, json_lines: bool) -> None:
    """Adds the feedback of a line on the last answer, and prints what became of it."""
    from pydantic import ValidationError

    from device_agent.serving.feedback import FeedbackRequest
    from shared.invalid_fields import first_invalid

    command, _, edit = line.partition(" ")
    try:
        if number == 0:
            raise BadRequest("write a text first; /up, /down and /edit rate the answer to it")
        request = FeedbackRequest(id=str(number), rating=RATINGS[command], edit=edit if command == "/edit" else None)
        receipt = asyncio.run(feedback.add(request))
    except ValidationError as error:
        typer.echo(str(first_invalid(error)), err=True)
    except MobizoError as error:
        typer.echo(error.detail, err=True)
    else:
        done = "added to" if receipt.added else "already in"
        show(json_lines, receipt.model_dump(), f"{done} data set {receipt.dataset}")


def _print_answer(conversation: Chat, text: str, json_lines: bool) -> str:
    """Prints an answer as it is generated, and returns it."""
    pieces, printed = conversation.answer(text), ""
    try:
        for piece in pieces:
            printed += piece
            if not json_lines:
                typer.echo(piece, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pieces.close()
    if json_lines:
        typer.echo(
            json.dumps({"text": printed, "ended": conversation.ended, "forgotten_turns": conversation.forgotten})
        )
    else:
        typer.echo()
    return printed
