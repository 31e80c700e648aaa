"""The options --server, --token and --profile, the client that they open, and the errors of its requests."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from mobizo.cli.console import stop
from mobizo.cli.settings import Settings, resolve_settings
from mobizo.client import Client
from mobizo.pinned_keys import PinnedKeys, default_path
from shared.errors import (
    AdapterNotFound,
    BadRequest,
    CohortNotFound,
    Forbidden,
    MobizoError,
    NotFound,
    RevisionNotFound,
    RoundNotFound,
    TooManyRequests,
    Unauthorized,
    UnknownBase,
    VersionHeld,
)
from shared.transport import Unreachable

Server = Annotated[
    str | None,
    typer.Option(help="Base URL of the server. [env var: MOBIZO_SERVER]", show_default=False, metavar="URL"),
]
Token = Annotated[
    str | None,
    typer.Option(help="API token of an app or an operator. [env var: MOBIZO_TOKEN]", show_default=False),
]
ProfileName = Annotated[
    str | None,
    typer.Option(
        help="Profile that `mobizo login` stored. [env var: MOBIZO_PROFILE]", show_default=False, metavar="NAME"
    ),
]

NEXT_STEPS: tuple[tuple[type[MobizoError], str], ...] = (
    (Unauthorized, "`mobizo login` stores a new token, and `mobizo config` shows where the present one comes from"),
    (Forbidden, "`mobizo whoami` shows what this token may do"),
    (Unreachable, "`mobizo config` shows where the address comes from"),
    (TooManyRequests, "try again later"),
    (AdapterNotFound, "`mobizo adapter list` shows the adapters"),
    (RevisionNotFound, "`mobizo adapter versions ADAPTER` shows the versions"),
    (VersionHeld, "`mobizo adapter approve ADAPTER@REVISION` approves a held version"),
    (CohortNotFound, "`mobizo cohort list` shows the cohorts"),
    (RoundNotFound, "`mobizo cohort rounds COHORT` shows the rounds"),
    (UnknownBase, "`mobizo base list` shows the base models"),
)


@dataclass(frozen=True)
class Connect:
    """Opens the client of one command. server, token, profile: the command's options."""

    server: str | None
    token: str | None
    profile: str | None

    def settings(self) -> Settings:
        """Returns the settings in effect. Ends the command with status 2 if the file of profiles cannot be used."""
        try:
            return resolve_settings(self.server, self.token, self.profile)
        except BadRequest as error:
            raise stop(error.detail, 2) from error

    @contextmanager
    def __call__(self, list_command: str = "") -> Iterator[Client]:
        """Yields a client. Ends the command with a one-line message and status 1 if a request fails.

        list_command: the command that lists the ids which this command accepts; shown if the id is unknown.
        """
        settings = self.settings()
        if settings.token.value is None:
            reason = "" if settings.token.origin == "not set" else f" ({settings.token.origin})"
            raise stop(f"no token for {settings.url}{reason}: run `mobizo login`, set MOBIZO_TOKEN or give --token", 2)
        with open_client(settings.url, settings.token.value, list_command) as client:
            yield client


@contextmanager
def open_client(url: str, token: str, list_command: str = "") -> Iterator[Client]:
    """Yields a client of a server. Errors end the command as in `Connect`."""
    if not re.fullmatch(r"[!-~]+", token):  # printable ASCII without spaces, as an HTTP header requires
        raise stop("the token contains spaces, line breaks or non-ASCII characters; copy it again", 2)
    try:
        with Client(url, token, pinned_keys=PinnedKeys(default_path())) as client:
            yield client
    except MobizoError as error:
        steps = [step for kind, step in NEXT_STEPS if isinstance(error, kind) and "`mobizo" not in error.detail]
        if type(error) is NotFound and list_command:
            steps = [f"`{list_command}` shows what exists"]
        raise stop("; ".join((error.detail, *steps)), 1) from error
    except (json.JSONDecodeError, ValidationError) as error:
        raise stop(
            f"{url} does not respond like a mobizo server of this version; check the address with `mobizo config`", 1
        ) from error


def server_command(run: Callable[..., None]) -> Callable[..., None]:
    """Adds --server, --token and --profile to a command; it gets them as one parameter, `connect`."""
    own_parameters = [
        item for item in inspect.signature(run, eval_str=True).parameters.values() if item.name != "connect"
    ]
    options = {"server": Server, "token": Token, "profile": ProfileName}
    option_parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]

    @functools.wraps(run)
    def command(**arguments: Any) -> None:
        connect = Connect(*(arguments.pop(name) for name in options))
        run(connect=connect, **arguments)

    command.__signature__ = inspect.Signature([*own_parameters, *option_parameters])  # type: ignore[attr-defined]  # typer reads it
    return command
