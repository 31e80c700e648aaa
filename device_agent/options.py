"""The options that several of `mobizo-agent`'s commands share. Knows no command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HomeOption = Annotated[
    Path | None, typer.Option("--home", help="state, cache and runs; else $MOBIZO_AGENT_HOME or the platform's place")
]
DataOption = Annotated[
    list[str], typer.Option("--data", metavar="NAME=DIR", help="a data set: train.jsonl, validation.jsonl, test.jsonl")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON lines for machines, on standard output")]
RulesOption = Annotated[
    Path | None, typer.Option("--rules", metavar="FILE", help="the owner's rules; else rules.toml in the home")
]
AdbOption = Annotated[
    str | None,
    typer.Option("--adb", metavar="[SERIAL]", help="train on a phone behind adb: this one, or the only one there is"),
]
NameArgument = Annotated[str, typer.Argument(metavar="ADAPTER", help="its name; `adapters list` shows them")]
