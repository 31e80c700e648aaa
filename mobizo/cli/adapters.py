"""Commands that read the registry: lists, model cards, comparisons, audit trails and downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mobizo.adapter_paths import split_reference
from mobizo.cli.connect import Connect, server_command
from mobizo.cli.console import Json, err, percent, score_text, show
from mobizo.cli.progress import download_progress
from mobizo.cli.tables import MAX_ROWS, Limit, print_items, take_newest
from mobizo.downloads import Format
from shared.protocol import AdapterVersion, AdapterView
from shared.registry import Comparison, VersionState

commands = typer.Typer()
REVISIONS = "A revision is main, v7, or at least 7 digits of the version's revision."
Name = Annotated[str, typer.Argument(metavar="ADAPTER", help="Name of the adapter.")]
Version = Annotated[
    str,
    typer.Argument(metavar="ADAPTER[@REVISION]", help=f"Adapter and version. Default: the version main. {REVISIONS}"),
]

REVISION_DIGITS = 12  # of 40: a table with the whole revision does not fit in 80 columns


def name_and_revision(text: str) -> tuple[str, str]:
    """Returns the adapter and the revision of ADAPTER or ADAPTER@REVISION; without one, `main`."""
    name, revision = split_reference(text)
    return name, revision or "main"


def version_line(version: AdapterVersion) -> str:
    """Returns a version's adapter, number, revision, state and message as one line."""
    message = f": {version.message}" if version.message else ""
    return f"{version.adapter} v{version.version} {version.revision} {version.state}{message}"


@commands.command("list")
@server_command
def list_adapters(
    connect: Connect,
    deleted: Annotated[bool, typer.Option("--deleted", help="List deleted adapters that can be restored.")] = False,
    limit: Limit = MAX_ROWS,
    as_json: Json = False,
) -> None:
    """List adapters, newest first."""
    with connect() as client:
        adapters = take_newest(client.adapters.list(deleted=deleted), limit)
    rows = []
    for adapter in adapters:
        main = "" if adapter.main is None else f"v{adapter.main}"
        score, created = "", ""
        if adapter.latest is not None:
            score = score_text(adapter.latest.result)
            created = adapter.latest.created_at.isoformat(" ", "seconds")
        rows.append((adapter.name, main, str(adapter.versions), adapter.user, score, created))
    print_items(
        as_json,
        adapters,
        ("adapter", "main", "versions", "user", "tuned accuracy", "latest"),
        rows,
        empty="no adapters; a job creates the first version of one, see `mobizo job submit --help`",
    )


@commands.command()
@server_command
def view(
    connect: Connect,
    reference: Annotated[
        str, typer.Argument(metavar="ADAPTER[@REVISION]", help=f"An adapter, or one of its versions. {REVISIONS}")
    ],
    as_json: Json = False,
) -> None:
    """Show an adapter with its `main` and its latest version, or one version."""
    name, revision = split_reference(reference)
    with connect() as client:
        item = client.adapters.get(name) if revision is None else client.adapters.version(name, revision)
    lines = _adapter_lines(item) if isinstance(item, AdapterView) else _version_lines(item)
    show(as_json, item, "\n".join(lines))


def _adapter_lines(adapter: AdapterView) -> list[str]:
    lines = [f"{adapter.name}: {adapter.versions} versions, user {adapter.user}"]
    lines += [] if adapter.main is None else [f"main: v{adapter.main}"]
    return lines if adapter.latest is None else [*lines, "latest:", *_version_lines(adapter.latest)]


def _version_lines(version: AdapterVersion) -> list[str]:
    scores = [percent(version.result.before_accuracy), score_text(version.result)]
    lines = [version_line(version), f"accuracy: {' -> '.join(filter(None, scores)) or 'not measured'}"]
    return [*lines, f"created: {version.created_at:%Y-%m-%d %H:%M} UTC"]


@commands.command("versions")
@server_command
def list_versions(
    connect: Connect,
    name: Name,
    state: Annotated[VersionState | None, typer.Option(help="Only versions in this state.")] = None,
    limit: Limit = MAX_ROWS,
    as_json: Json = False,
) -> None:
    """List an adapter's versions, newest first, with states and accuracy."""
    with connect() as client:
        versions = take_newest(client.adapters.versions(name, state), limit)
        adapter = client.adapters.get(name)
    rows = [
        (
            f"v{version.version}",
            version.revision[:REVISION_DIGITS],
            version.state,
            "main" if adapter.main == version.version else "",
            percent(version.result.before_accuracy),
            score_text(version.result),
            version.created_at.date().isoformat(),
        )
        for version in versions
    ]
    print_items(
        as_json,
        versions,
        ("version", "revision", "state", "main", "before", "after", "created"),
        rows,
        empty="no versions in this state" if state else "no versions",
    )


@commands.command()
@server_command
def pull(
    connect: Connect,
    version: Version,
    to: Annotated[Path, typer.Option("--to", help="Directory to write to.")],
    format: Annotated[
        Format,
        typer.Option(
            "--format",
            help="Files. peft: a PEFT directory; gguf: one file for llama.cpp; ollama: that file and a Modelfile; "
            "raw: LoRA-B.",
        ),
    ] = Format.PEFT,
    base_sha256: Annotated[
        str | None, typer.Option(help="Fail unless the adapter is for the base model with this sha256.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Download a version and verify each file. An interrupted download is resumed."""
    name, revision = name_and_revision(version)
    with connect() as client, download_progress(err) as progress:
        adapter_version = client.adapters.download(
            name, to, revision, format, base_sha256=base_sha256, progress=progress
        )
    show(as_json, adapter_version, f"{version_line(adapter_version)} -> {to}")


@commands.command()
@server_command
def card(connect: Connect, version: Version) -> None:
    """Print a version's model card."""
    with connect() as client:
        typer.echo(client.adapters.card(*name_and_revision(version)), nl=False)


@commands.command()
@server_command
def compare(
    connect: Connect,
    left: Version,
    right: Annotated[
        str | None,
        typer.Argument(metavar="[ADAPTER[@REVISION]]", help="Default: the version main of the same adapter."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the differences between two versions in settings and scores."""
    name, first = name_and_revision(left)
    other, second = name_and_revision(right or name)
    with connect() as client:
        comparison = client.adapters.compare(name, first, second, other=None if other == name else other)
    show(as_json, comparison, "\n".join(_comparison_lines(comparison)))


def _comparison_lines(comparison: Comparison) -> list[str]:
    lines = [" -> ".join(f"{side.adapter} v{side.version}" for side in (comparison.left, comparison.right))]
    lines += [
        f"{item.field}: {item.left} -> {item.right}"
        for item in (*comparison.recipe, *comparison.task, *comparison.training)
    ]
    for score in comparison.scores:
        if score.difference is not None:
            lines.append(f"{score.field}: {score.left:g} -> {score.right:g} ({score.difference:+g})")
    return lines


@commands.command("events")
@server_command
def list_events(connect: Connect, name: Name, limit: Limit = MAX_ROWS, as_json: Json = False) -> None:
    """Show the audit trail of an adapter, newest first."""
    with connect() as client:
        events = take_newest(client.adapters.events(name), limit)
    rows = []
    for event in events:
        version = event.tag or "" if event.version is None else f"v{event.version} {event.tag or ''}"
        main = "" if event.main_after is None else f"v{event.main_after}"
        actor = event.user or event.name or event.actor
        rows.append((event.at.isoformat(" ", "seconds"), actor, event.action, version, main, event.reason))
    print_items(as_json, events, ("time", "actor", "action", "version", "main", "reason"), rows)


@commands.command()
@server_command
def trajectory(
    connect: Connect,
    version: Version,
    to: Annotated[Path | None, typer.Option("--to", help="File to write the trajectory to.")] = None,
    as_json: Json = False,
) -> None:
    """Show or download a version's trajectory."""
    name, revision = name_and_revision(version)
    with connect() as client, download_progress(err) as progress:
        if to is None:
            details = client.trajectories.get(name, revision)
        else:
            details = client.trajectories.download(name, to, revision, progress=progress)
    verified = "verified: its replay gives the same LoRA-B" if details.verified else "not verified"
    location = "instead of LoRA-B" if details.replaces_weights else "beside LoRA-B"
    facts = f"{details.steps} steps, {details.size} bytes, stored {location}; {verified}"
    show(as_json, details, f"{name} v{details.version}: {facts}")
