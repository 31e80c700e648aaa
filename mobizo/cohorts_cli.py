"""`mobizo cohort`: cohorts, their members and rounds. The client knows the API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, ValidationError
from rich.table import Table

from mobizo.console import DEFAULT_SERVER, Json, Server, Token, connected, out, print_json, stop, whole
from shared.cohort import CohortSettings, CohortView, RoundView
from shared.errors import BadRequest

commands = typer.Typer(help="Many users' adapters become one, in rounds.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="COHORT", help="its name in the tenant")]
Number = Annotated[int | None, typer.Option("--round", help="its number; default: the latest", min=1)]


def read_settings(file: Path) -> CohortSettings:
    """The cohort in a JSON file, as POST /v1/cohorts takes it. Raises BadRequest, naming the field."""
    try:
        return CohortSettings.model_validate_json(json.dumps(json.loads(file.read_bytes())))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadRequest(f"{file} is not a JSON file: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{file}: {where}: {first['msg']}" if where else f"{file}: {first['msg']}") from error


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _version(version: int | None) -> str:
    return "B = 0" if version is None else f"v{version}"


def _line(found: RoundView) -> str:
    """A round on one line."""
    words = [f"round {found.number} {found.state}", f"{found.updates} of {found.members} updates"]
    words.append(f"from {_version(found.start_version)}")
    if found.version is not None:
        words.append(f"made {_version(found.version)}")
    if found.start_accuracy is not None:
        words.append(f"{_version(found.start_version)} scored {found.start_accuracy:.1%} on {found.measured} devices")
    if not found.state.final:
        words.append(f"until {found.deadline:%Y-%m-%d %H:%M} UTC")
    return ", ".join(words) + (f": {found.why}" if found.why else "")


def _show(found: CohortView | RoundView, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    if isinstance(found, RoundView):
        out.print(f"{found.cohort}: {_line(found)}", markup=False, soft_wrap=True)
        return
    settings = found.settings
    lines = [
        f"{found.name}: {found.members} members, {found.rounds} rounds, next from {_version(found.version)}",
        f"{settings.algorithm.name}, {settings.aggregator.name}, {settings.optimizer.name}, "
        f"weights {settings.weights}, quorum {settings.quorum}, uploads {settings.upload}",
        f"base {settings.base}, task {found.task.name}, data set {settings.dataset}, D = {found.size_d:,}, "
        f"A {found.a_sha256[:12]}",
    ]
    if found.round is not None:
        lines.append(_line(found.round))
    out.print("\n".join(lines), markup=False, soft_wrap=True)


@commands.command()
def create(
    file: Annotated[Path, typer.Argument(help="JSON file, as POST /v1/cohorts takes it", exists=True, dir_okay=False)],
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Make a cohort; its settings stay as they are."""
    try:
        settings = read_settings(file)
    except BadRequest as error:
        raise stop(error.detail, 1) from error
    with connected(server, token) as client:
        _show(client.create_cohort(settings), as_json)


@commands.command("list")
def list_cohorts(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List cohorts, newest first."""
    with connected(server, token) as client:
        cohorts = list(client.cohorts())
    if as_json:
        print_json(list[BaseModel](cohorts))
        return
    table = Table(whole("cohort"), "members", "rounds", "version", "latest round", "algorithm")
    for found in cohorts:
        latest = "" if found.round is None else str(found.round.state)
        version = "" if found.version is None else f"v{found.version}"
        row = (found.name, str(found.members), str(found.rounds), version, latest, found.settings.algorithm.name)
        table.add_row(*row)
    out.print(table)


@commands.command()
def show(name: Name, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Show a cohort, its settings and its latest round."""
    with connected(server, token) as client:
        _show(client.cohort(name), as_json)


@commands.command()
def members(name: Name, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List who is in a cohort."""
    with connected(server, token) as client:
        found = list(client.members(name))
    if as_json:
        print_json(list[BaseModel](found))
        return
    table = Table("user", whole("device"), "updates", "joined")
    for member in found:
        table.add_row(member.user, member.device_id, str(member.updates), member.joined_at.isoformat(" ", "seconds"))
    out.print(table)


@commands.command()
def join(
    name: Name,
    user: Annotated[str, typer.Argument(help="who joins")],
    device: Annotated[str, typer.Option("--device", help="id of the device that trains for him")],
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Let a user in; he takes part from the next round on."""
    with connected(server, token) as client:
        made = client.join_cohort(name, user, device)
    print_json(made) if as_json else out.print(f"{made.user} is in {name} with {made.device_id}", markup=False)


@commands.command()
def leave(
    name: Name,
    user: Annotated[str, typer.Argument(help="who leaves")],
    server: Server = DEFAULT_SERVER,
    token: Token = "",
) -> None:
    """Let a user out; what he sent to a round that has not ended does not count."""
    with connected(server, token) as client:
        client.leave_cohort(name, user)
    out.print(f"{user} has left {name}", markup=False)


@commands.command()
def rounds(name: Name, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List a cohort's rounds, newest first."""
    with connected(server, token) as client:
        found = list(client.rounds(name))
    if as_json:
        print_json(list[BaseModel](found))
        return
    table = Table("round", whole("state"), "updates", "from", "made", "its start scored", "bytes", "why")
    for each in found:
        table.add_row(
            str(each.number),
            str(each.state),
            f"{each.updates} of {each.members}",
            _version(each.start_version),
            "" if each.version is None else f"v{each.version}",
            _share(each.start_accuracy),
            f"{each.upload_bytes:,}",
            each.why,
        )
    out.print(table)


@commands.command()
def updates(
    name: Name, number: Number = None, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False
) -> None:
    """List each member's part in a round."""
    with connected(server, token) as client:
        found = list(client.updates(name, number or client.cohort(name).rounds or 1))
    if as_json:
        print_json(list[BaseModel](found))
        return
    # Seven columns fit 80 characters; `members` says whose device is which.
    table = Table(whole("user"), whole("state"), "examples", "norm", "stale", "bytes", "accuracy")
    for part in found:
        table.add_row(
            part.user,
            str(part.state),
            "" if part.examples is None else str(part.examples),
            "" if part.norm is None else f"{part.norm:.3g}",
            "" if part.staleness is None else str(part.staleness),
            "" if part.bytes is None else f"{part.bytes:,}",
            " → ".join(filter(None, (_share(part.start_accuracy), _share(part.tuned_accuracy)))),
        )
    out.print(table)


@commands.command("open")
def open_round(name: Name, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Open a round: every member's device is asked for an update."""
    with connected(server, token) as client:
        _show(client.open_round(name), as_json)


@commands.command("close")
def close_round(
    name: Name, number: Number = None, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False
) -> None:
    """End a round now, with what came; none opens by itself any more."""
    with connected(server, token) as client:
        _show(client.close_round(name, number or client.cohort(name).rounds or 1), as_json)
