"""Command-line options that several commands of `mobizo-agent` share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from device_agent.home import AgentHome
from shared.errors import BadRequest
from shared.job import NAME

if TYPE_CHECKING:
    from device_agent.serving.feedback import Feedback

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        help="Home directory. Default: $MOBIZO_AGENT_HOME or the platform's data directory.",
    ),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="NAME=DIR",
        help="An additional data set: its directory with train.jsonl and optionally validation.jsonl and test.jsonl.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines on standard output.")]
RulesOption = Annotated[
    Path | None,
    typer.Option("--rules", metavar="FILE", help="The owner's rules. Default: rules.toml in the home directory."),
]
AdbOption = Annotated[
    str | None,
    typer.Option(
        "--adb", metavar="[SERIAL]", help="Train on the phone with this serial number, or on the only connected phone."
    ),
]
FeedbackOption = Annotated[
    str | None,
    typer.Option(
        "--feedback",
        metavar="DATASET",
        help="Add ratings and edits of answers to this data set. Default: feedback is refused.",
    ),
]
NameArgument = Annotated[
    str, typer.Argument(metavar="ADAPTER", help="Name of an adapter; see `mobizo-agent adapter list`.")
]


def check_name(option: str, name: str) -> None:
    """Raises BadRequest unless `name` may name a device or a data set. option: that has it, for the message."""
    if not re.fullmatch(NAME, name):
        raise BadRequest(f"{option} {name!r} must be lower-case letters, digits, '.', '_' or '-'")


def open_feedback(home: AgentHome, dataset: str | None) -> Feedback | None:
    """Returns what adds feedback to a data set of the home; None without one. Raises BadRequest for an invalid name."""
    if dataset is None:
        return None
    check_name("--feedback", dataset)
    from device_agent.datasets.store import DatasetStore
    from device_agent.serving.feedback import Feedback

    return Feedback(DatasetStore(home.data), dataset)


def show(json_lines: bool, facts: Mapping[str, object], text: str) -> None:
    """Prints the facts as one JSON line if asked to, otherwise the text for people."""
    typer.echo(json.dumps(facts) if json_lines else text)
