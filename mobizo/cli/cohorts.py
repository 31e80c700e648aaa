"""`mobizo cohort`: cohorts, their members and their rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import Json, out, percent, read_file, show
from mobizo.cli.tables import MAX_ROWS, Limit, print_items, take_newest
from shared.federation.cohort import CohortSettings, CohortView, RoundView

group = typer.Typer(help="Average the adapters of many users into one, in rounds.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="COHORT", help="Name of the cohort.")]
Number = Annotated[int | None, typer.Option("--round", help="Number of the round. Default: the latest round.", min=1)]


def _version(version: int | None) -> str:
    """Returns a version number for display; without a version, LoRA-B is zero."""
    return "B = 0" if version is None else f"v{version}"


def _round_line(view: RoundView) -> str:
    """Returns a round's state as one line."""
    parts = [f"round {view.number} {view.state}", f"{view.updates} of {view.members} updates"]
    parts.append(f"from {_version(view.start_version)}")
    if view.version is not None:
        parts.append(f"published {_version(view.version)}")
    if view.start_accuracy is not None:
        parts.append(
            f"{_version(view.start_version)} had {view.start_accuracy:.1%} accuracy on {view.measured} devices"
        )
    if not view.state.final:
        parts.append(f"deadline {view.deadline:%Y-%m-%d %H:%M} UTC")
    return ", ".join(parts) + (f": {view.why}" if view.why else "")


def _print_view(view: CohortView | RoundView, as_json: bool) -> None:
    if isinstance(view, RoundView):
        show(as_json, view, f"{view.cohort}: {_round_line(view)}")
        return
    settings = view.settings
    lines = [
        f"{view.name}: {view.members} members, {view.rounds} rounds; the next round starts from "
        f"{_version(view.version)}",
        f"{settings.algorithm.name}, {settings.aggregator.name}, {settings.optimizer.name}, "
        f"weights {settings.weights}, quorum {settings.quorum}, uploads {settings.upload}",
        f"base {settings.base}, task {view.task.name}, data set {settings.dataset}, D = {view.size_d:,}, "
        f"A {view.a_sha256[:12]}",
    ]
    if view.round is not None:
        lines.append(_round_line(view.round))
    show(as_json, view, "\n".join(lines))


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
    settings = read_file(file, CohortSettings)
    with connect() as client:
        _print_view(client.cohorts.create(settings), as_json)


@group.command("list")
@server_command
def list_cohorts(connect: Connect, limit: Limit = MAX_ROWS, as_json: Json = False) -> None:
    """List cohorts, newest first."""
    with connect() as client:
        cohorts = take_newest(client.cohorts.list(), limit)
    rows = []
    for cohort in cohorts:
        latest = "" if cohort.round is None else str(cohort.round.state)
        version = "" if cohort.version is None else f"v{cohort.version}"
        row = (cohort.name, str(cohort.members), str(cohort.rounds), version, latest, cohort.settings.algorithm.name)
        rows.append(row)
    print_items(
        as_json,
        cohorts,
        ("cohort", "members", "rounds", "version", "latest round", "algorithm"),
        rows,
        empty="no cohorts; `mobizo cohort create FILE` creates one",
    )


@group.command()
@server_command
def view(connect: Connect, name: Name, as_json: Json = False) -> None:
    """Show a cohort, its settings and its latest round."""
    with connect() as client:
        _print_view(client.cohorts.get(name), as_json)


@group.command()
@server_command
def members(connect: Connect, name: Name, limit: Limit = MAX_ROWS, as_json: Json = False) -> None:
    """List the members of a cohort."""
    with connect() as client:
        member_views = take_newest(client.cohorts.members(name), limit)
    rows = [
        (member.user, member.device_id, str(member.updates), member.joined_at.isoformat(" ", "seconds"))
        for member in member_views
    ]
    empty = f"no members; `mobizo cohort join {name} USER --device DEVICE` adds one"
    print_items(as_json, member_views, ("user", "device", "updates", "joined"), rows, empty=empty)


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
    show(as_json, member, f"{member.user} joined {name} with device {member.device_id}")


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
def rounds(connect: Connect, name: Name, limit: Limit = MAX_ROWS, as_json: Json = False) -> None:
    """List a cohort's rounds, newest first."""
    with connect() as client:
        round_views = take_newest(client.cohorts.rounds(name), limit)
    rows = [
        (
            str(view.number),
            str(view.state),
            f"{view.updates} of {view.members}",
            _version(view.start_version),
            "" if view.version is None else f"v{view.version}",
            percent(view.start_accuracy),
            f"{view.upload_bytes:,}",
            view.why,
        )
        for view in round_views
    ]
    print_items(
        as_json,
        round_views,
        ("round", "state", "updates", "from", "published", "accuracy at start", "bytes", "reason"),
        rows,
        empty=f"no rounds; `mobizo cohort open {name}` opens one",
    )


@group.command()
@server_command
def updates(connect: Connect, name: Name, number: Number = None, as_json: Json = False) -> None:
    """List the state of each member's update in a round."""
    with connect() as client:
        update_views = list(client.cohorts.updates(name, number or client.cohorts.get(name).rounds or 1))
    rows = [
        (
            update.user,
            str(update.state),
            "" if update.examples is None else str(update.examples),
            "" if update.norm is None else f"{update.norm:.3g}",
            "" if update.staleness is None else str(update.staleness),
            "" if update.bytes is None else f"{update.bytes:,}",
            " → ".join(filter(None, (percent(update.start_accuracy), percent(update.tuned_accuracy)))),
        )
        for update in update_views
    ]
    columns = "user", "state", "examples", "norm", "stale", "bytes", "accuracy"
    print_items(as_json, update_views, columns, rows)


@group.command("open")
@server_command
def open_round(connect: Connect, name: Name, as_json: Json = False) -> None:
    """Open a round, in which the device of each member is asked for an update."""
    with connect() as client:
        _print_view(client.cohorts.open_round(name), as_json)


@group.command("close")
@server_command
def close_round(connect: Connect, name: Name, number: Number = None, as_json: Json = False) -> None:
    """Close a round now, with the updates received so far. No further round opens automatically."""
    with connect() as client:
        _print_view(client.cohorts.close_round(name, number or client.cohorts.get(name).rounds or 1), as_json)
