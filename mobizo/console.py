"""What the commands share: a connection, its options, and printing for people or for machines. Knows no route."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Column

from mobizo.client import Client
from mobizo.pins import Pins, default_path
from shared.errors import MobizoError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Server = Annotated[str, typer.Option(envvar="MOBIZO_SERVER", help="base URL of the server")]
Token = Annotated[str, typer.Option(envvar="MOBIZO_TOKEN", help="an app's or operator's token", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
DEFAULT_SERVER = "http://127.0.0.1:8000"


@contextmanager
def connected(server: str, token: str) -> Iterator[Client]:
    """A client of the server; what it refuses ends the command, as one line and a status."""
    if not token:
        raise stop("no token: give --token or set MOBIZO_TOKEN", 2)
    if not re.fullmatch(r"[!-~]+", token):  # what a header can carry
        raise stop("the token has spaces, line ends or letters that no token has; copy it again", 2)
    try:
        with Client(server, token, pins=Pins(default_path())) as client:
            yield client
    except MobizoError as error:
        raise stop(error.detail, 1) from error
    except (json.JSONDecodeError, ValidationError) as error:
        raise stop(f"{server} does not answer as a mobizo server of this version does", 1) from error


def stop(message: str, status: int) -> typer.Exit:
    """Says why, in red, and is raised to end the command."""
    err.print(message, style="red", markup=False, soft_wrap=True)
    return typer.Exit(status)


def whole(name: str) -> Column:
    """A column whose cells are never broken: they are copied into other commands."""
    return Column(name, no_wrap=True, overflow="ignore")


def print_json(value: BaseModel | list[BaseModel] | dict[str, Any]) -> None:
    """Prints for machines."""
    if isinstance(value, BaseModel):
        plain: Any = value.model_dump(mode="json")
    elif isinstance(value, list):
        plain = [item.model_dump(mode="json") for item in value]
    else:
        plain = value
    out.print_json(json.dumps(plain))
