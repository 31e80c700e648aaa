"""`mobizo cohort`: cohorts, their members and their rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, ValidationError

from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import (
    Json,
    invalid_field,
    out,
    percent,
    print_json,
    stop,
)
from mobizo.cli.tables import MOST_ROWS, Limit, newest, print_table
from shared.errors import BadRequest
from shared.federation.cohort import CohortSettings, CohortView, RoundView

group = typer.Typer(help="Average the adapters of many users into one, in rounds.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="COHORT", help="Name of the cohort.")]
Number = Annotated[int | None, typer.Option("--round", help="Number of the round. Default: the latest round.", min=1)]


def read_settings(file: Path) -> CohortSettings:
    """Returns the cohort in a JSON file, in the format of POST /v1/cohorts.

    Raises BadRequest, which names the field.
    """
    try:
        return CohortSettings.model_validate_json(json.dumps(json.loads(file.read_bytes())))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadRequest(f"{file} is not a JSON file: {error}") from error
    except ValidationError as error:
        raise BadRequest(f"{file}: {invalid_field(error)}") from error


def _version(version: int | None) -> str:
    """Returns a version number for display; without a version, LoRA-B is zero."""
    return "B = 0" if version is None else f"v{version}"


def _line(found: RoundView) -> str:
    """Returns a round's state as one line."""
    parts = [f"round {found.number} {found.state}", f"{found.updates} of {found.members} updates"]
    parts.append(f"from {_version(found.start_version)}")
    if found.version is not None:
        parts.append(f"published {_version(found.version)}")
    if found.start_accuracy is not None:
        parts.append(
            f"{_version(found.start_version)} had {found.start_accuracy:.1%} accuracy on {found.measured} devices"
        )
    if not found.state.final:
        parts.append(f"deadline {found.deadline:%Y-%m-%d %H:%M} UTC")
    return ", ".join(parts) + (f": {found.why}" if found.why else "")


def _show(found: CohortView | RoundView, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    if isinstance(found, RoundView):
        out.print(f"{found.cohort}: {_line(found)}", markup=False, soft_wrap=True)
        return
    settings = found.settings
    lines = [
        f"{found.name}: {found.members} members, {found.rounds} rounds; the next round starts from "
        f"{_version(found.version)}",
        f"{settings.algorithm.name}, {settings.aggregator.name}, {settings.optimizer.name}, "
        f"weights {settings.weights}, quorum {settings.quorum}, uploads {settings.upload}",
        f"base {settings.base}, task {found.task.name}, data set {settings.dataset}, D = {found.size_d:,}, "
        f"A {found.a_sha256[:12]}",
    ]
    if found.round is not None:
        lines.append(_line(found.round))
    out.print("\n".join(lines), markup=False, soft_wrap=True)


@group.command()
@server_command
def create(
    connect: Connect,
    file: Annotated[
        Path,
        typer.Argument(
            help="JSON file with the cohort, in the format of POST /v1/cohorts.", exists=True, dir_okay=False
        ),
    ],
    as_json: Json = False,
) -> None:
    """Create a cohort. Its settings cannot be changed later."""
    try:
        settings = read_settings(file)
    except BadRequest as error:
        raise stop(error.detail, 1) from error
    with connect() as client:
        _show(client.cohorts.create(settings), as_json)


@group.command("list")
@server_command
def list_cohorts(connect: Connect, limit: Limit = MOST_ROWS, as_json: Json = False) -> None:
    """List cohorts, newest first."""
    with connect() as client:
        cohorts = newest(client.cohorts.list(), limit)
    if as_json:
        print_json(list[BaseModel](cohorts))
        return
    rows = []
    for found in cohorts:
        latest = "" if found.round is None else str(found.round.state)
        version = "" if found.version is None else f"v{found.version}"
        row = (found.name, str(found.members), str(found.rounds), version, latest, found.settings.algorithm.name)
        rows.append(row)
    print_table(
        ("cohort", "members", "rounds", "version", "latest round", "algorithm"),
        rows,
        drop=("algorithm", "rounds", "members"),
        empty="no cohorts; `mobizo cohort create FILE` creates one",
    )


@group.command()
@server_command
def view(connect: Connect, name: Name, as_json: Json = False) -> None:
    """Show a cohort, its settings and its latest round."""
    with connect() as client:
        _show(client.cohorts.get(name), as_json)


@group.command()
@server_command
def members(connect: Connect, name: Name, limit: Limit = MOST_ROWS, as_json: Json = False) -> None:
    """List the members of a cohort."""
    with connect() as client:
        found = newest(client.cohorts.members(name), limit)
    if as_json:
        print_json(list[BaseModel](found))
        return
    rows = [(each.user, each.device_id, str(each.updates), each.joined_at.isoformat(" ", "seconds")) for each in found]
    empty = f"no members; `mobizo cohort join {name} USER --device DEVICE` adds one"
    print_table(("user", "device", "updates", "joined"), rows, drop=("joined", "updates"), empty=empty)


@group.command()
@server_command
def join(
    connect: Connect,
    name: Name,
    user: Annotated[str, typer.Argument(help="User to add.")],
    device: Annotated[str, typer.Option("--device", help="Id of the device that trains for the user.")],
    as_json: Json = False,
) -> None:
    """Add a user to a cohort, from the next round on."""
    with connect() as client:
        member = client.cohorts.add_member(name, user, device)
    print_json(member) if as_json else out.print(
        f"{member.user} joined {name} with device {member.device_id}", markup=False
    )


@group.command()
@server_command
def leave(
    connect: Connect,
    name: Name,
    user: Annotated[str, typer.Argument(help="User to remove.")],
) -> None:
    """Remove a user from a cohort. The user's update in an unfinished round is discarded."""
    with connect() as client:
        client.cohorts.remove_member(name, user)
    out.print(f"{user} left {name}", markup=False)


@group.command()
@server_command
def rounds(connect: Connect, name: Name, limit: Limit = MOST_ROWS, as_json: Json = False) -> None:
    """List a cohort's rounds, newest first."""
    with connect() as client:
        found = newest(client.cohorts.rounds(name), limit)
    if as_json:
        print_json(list[BaseModel](found))
        return
    rows = [
        (
            str(each.number),
            str(each.state),
            f"{each.updates} of {each.members}",
            _version(each.start_version),
            "" if each.version is None else f"v{each.version}",
            percent(each.start_accuracy),
            f"{each.upload_bytes:,}",
            each.why,
        )
        for each in found
    ]
    print_table(
        ("round", "state", "updates", "from", "published", "accuracy at start", "bytes", "reason"),
        rows,
        drop=("bytes", "reason", "accuracy at start", "from"),
        empty=f"no rounds; `mobizo cohort open {name}` opens one",
    )


@group.command()
@server_command
def updates(connect: Connect, name: Name, number: Number = None, as_json: Json = False) -> None:
    """List the state of each member's update in a round."""
    with connect() as client:
        found = list(client.cohorts.updates(name, number or client.cohorts.get(name).rounds or 1))
    if as_json:
        print_json(list[BaseModel](found))
        return
    rows = [
        (
            part.user,
            str(part.state),
            "" if part.examples is None else str(part.examples),
            "" if part.norm is None else f"{part.norm:.3g}",
            "" if part.staleness is None else str(part.staleness),
            "" if part.bytes is None else f"{part.bytes:,}",
            " → ".join(filter(None, (percent(part.start_accuracy), percent(part.tuned_accuracy)))),
        )
        for part in found
    ]
    print_table(
        ("user", "state", "examples", "norm", "stale", "bytes", "accuracy"),
        rows,
        drop=("stale", "bytes", "norm", "examples"),
    )


@group.command("open")
@server_command
def open_round(connect: Connect, name: Name, as_json: Json = False) -> None:
    """Open a round, in which the device of each member is asked for an update."""
    with connect() as client:
        _show(client.cohorts.open_round(name), as_json)


@group.command("close")
@server_command
def close_round(connect: Connect, name: Name, number: Number = None, as_json: Json = False) -> None:
    """Close a round now, with the updates received so far. No further round opens automatically."""
    with connect() as client:
        _show(client.cohorts.close_round(name, number or client.cohorts.get(name).rounds or 1), as_json)
