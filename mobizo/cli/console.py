"""Parts that all commands share: common options, the client, and output as text or JSON."""

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
from mobizo.pinned_keys import PinnedKeys, default_path
from shared.errors import MobizoError
from shared.job import Result

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Server = Annotated[str, typer.Option(envvar="MOBIZO_SERVER", help="Base URL of the server.")]
Token = Annotated[
    str, typer.Option(envvar="MOBIZO_TOKEN", help="API token of an app or an operator.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DEFAULT_SERVER = "http://127.0.0.1:8000"


@contextmanager
def connected(server: str, token: str) -> Iterator[Client]:
    """Yields a client of the server. Ends the command with a one-line message and status 1 if a request fails."""
    if not token:
        raise stop("no token: give --token or set MOBIZO_TOKEN", 2)
    if not re.fullmatch(r"[!-~]+", token):  # printable ASCII without spaces, as an HTTP header requires
        raise stop("the token contains spaces, line breaks or non-ASCII characters; copy it again", 2)
    try:
        with Client(server, token, pinned_keys=PinnedKeys(default_path())) as client:
            yield client
    except MobizoError as error:
        raise stop(error.detail, 1) from error
    except (json.JSONDecodeError, ValidationError) as error:
        raise stop(f"{server} does not respond like a mobizo server of this version; check the address", 1) from error


def stop(message: str, status: int) -> typer.Exit:
    """Prints a message in red on standard error, and returns the exception that ends the command with this status."""
    err.print(message, style="red", markup=False, soft_wrap=True)
    return typer.Exit(status)


def invalid_field(error: ValidationError) -> str:
    """Returns the first problem of a validation error as `field.path: message`."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


def percent(value: float | None) -> str:
    """Returns a fraction as percent with one decimal, or an empty text for None."""
    return "" if value is None else f"{value:.1%}"


def measured(result: Result) -> str:
    """Returns the accuracy of an adapter, and its examples unless they are test examples."""
    text = percent(result.tuned_accuracy)
    return f"{text} (validation)" if text and result.accuracy_split == "validation" else text


def unwrapped(name: str) -> Column:
    """Returns a table column whose cells are never wrapped, so that ids can be copied."""
    return Column(name, no_wrap=True, overflow="ignore")


def print_json(value: BaseModel | list[BaseModel] | dict[str, Any]) -> None:
    """Prints a value as JSON on standard output."""
    if isinstance(value, BaseModel):
        plain: Any = value.model_dump(mode="json")
    elif isinstance(value, list):
        plain = [item.model_dump(mode="json") for item in value]
    else:
        plain = value
    out.print_json(json.dumps(plain))
