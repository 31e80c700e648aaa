"""Commands that read the registry: lists, model cards, comparisons, audit trails and downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.table import Table

from mobizo.adapter_paths import split_reference
from mobizo.cli.console import (
    DEFAULT_SERVER,
    Json,
    Server,
    Token,
    connected,
    err,
    measured,
    out,
    percent,
    print_json,
    stop,
    unwrapped,
)
from mobizo.cli.progress import download_progress
from mobizo.downloads import Format
from shared.protocol import AdapterVersion, AdapterView
from shared.registry import Comparison, VersionState

commands = typer.Typer()
REVISIONS = "A revision is main, v7, a tag, or at least 7 digits of the version's revision."
Name = Annotated[str, typer.Argument(metavar="ADAPTER", help="Name of the adapter.")]
Version = Annotated[
    str,
    typer.Argument(metavar="ADAPTER[@REVISION]", help=f"Adapter and version. Default: the version main. {REVISIONS}"),
]

SHOWN_DIGITS = 12  # of 40: a table with the whole revision does not fit in 80 columns


def name_and_revision(text: str) -> tuple[str, str]:
    """Returns the adapter and the revision of ADAPTER or ADAPTER@REVISION; without one, `main`."""
    name, revision = split_reference(text)
    return name, revision or "main"


def version_line(version: AdapterVersion) -> str:
    """Returns a version's adapter, number, revision, state and message as one line."""
    message = f": {version.message}" if version.message else ""
    return f"{version.adapter} v{version.version} {version.revision} {version.state}{message}"


@commands.command("list")
def list_adapters(
    deleted: Annotated[bool, typer.Option("--deleted", help="List deleted adapters that can be restored.")] = False,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """List adapters, newest first."""
    with connected(server, token) as client:
        adapters = list(client.adapters.list(deleted=deleted))
    if as_json:
        print_json(list[BaseModel](adapters))
        return
    table = Table(unwrapped("adapter"), "main", "versions", "user", "tuned accuracy", "latest")
    for adapter in adapters:
        main = "" if adapter.main is None else f"v{adapter.main}"
        tuned, created = "", ""
        if adapter.latest is not None:
            tuned = measured(adapter.latest.result)
            created = adapter.latest.created_at.isoformat(" ", "seconds")
        table.add_row(adapter.name, main, str(adapter.versions), adapter.user, tuned, created)
    out.print(table)


@commands.command()
def view(
    reference: Annotated[
        str, typer.Argument(metavar="ADAPTER[@REVISION]", help=f"An adapter, or one of its versions. {REVISIONS}")
    ],
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Show an adapter with its `main`, its tags and its latest version, or one version."""
    name, revision = split_reference(reference)
    with connected(server, token) as client:
        found = client.adapters.get(name) if revision is None else client.adapters.version(name, revision)
    if as_json:
        print_json(found)
        return
    lines = _adapter_lines(found) if isinstance(found, AdapterView) else _version_lines(found)
    out.print("\n".join(lines), markup=False, soft_wrap=True)


def _adapter_lines(adapter: AdapterView) -> list[str]:
    named = ({} if adapter.main is None else {"main": adapter.main}) | adapter.tags
    lines = [f"{adapter.name}: {adapter.versions} versions, user {adapter.user}"]
    lines += [f"{tag}: v{version}" for tag, version in named.items()]
    return lines if adapter.latest is None else [*lines, "latest:", *_version_lines(adapter.latest)]


def _version_lines(version: AdapterVersion) -> list[str]:
    scores = [percent(version.result.before_accuracy), measured(version.result)]
    lines = [version_line(version), f"accuracy: {' -> '.join(filter(None, scores)) or 'not measured'}"]
    return [*lines, f"created: {version.created_at:%Y-%m-%d %H:%M} UTC"]


@commands.command("versions")
def list_versions(
    name: Name,
    state: Annotated[VersionState | None, typer.Option(help="Only versions in this state.")] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """List an adapter's versions, newest first, with states, tags and accuracy."""
    with connected(server, token) as client:
        versions = list(client.adapters.versions(name, state))
        adapter = client.adapters.get(name)
    if as_json:
        print_json(list[BaseModel](versions))
        return
    table = Table("version", "revision", "state", "tags", "before", "after", "created")
    for version in versions:
        tags = [tag for tag, number in sorted(adapter.tags.items()) if number == version.version]
        if adapter.main == version.version:
            tags.insert(0, "main")
        table.add_row(
            f"v{version.version}",
            version.revision and version.revision[:SHOWN_DIGITS],
            version.state,
            " ".join(tags),
            percent(version.result.before_accuracy),
            measured(version.result),
            version.created_at.date().isoformat(),
        )
    out.print(table)


@commands.command("tags")
def list_tags(name: Name, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List `main` and the tags of an adapter with the versions that they name."""
    with connected(server, token) as client:
        adapter = client.adapters.get(name)
    named = ({} if adapter.main is None else {"main": adapter.main}) | adapter.tags
    if as_json:
        print_json(named)
        return
    for tag, version in named.items():
        out.print(f"{tag}  v{version}", markup=False)


@commands.command()
def pull(
    version: Version,
    to: Annotated[Path, typer.Option("--to", help="Directory to write to.")],
    format: Annotated[
        Format,
        typer.Option(
            "--format",
            help="peft: a PEFT directory; gguf: one file for llama.cpp; raw: LoRA-B; merged: the merged base model.",
        ),
    ] = Format.PEFT,
    base_sha256: Annotated[
        str | None, typer.Option(help="Fail unless the adapter is for the base model with this sha256.")
    ] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Download a version and verify each file. An interrupted download is resumed."""
    name, revision = name_and_revision(version)
    with connected(server, token) as client, download_progress(err) as progress:
        pulled = client.adapters.download(name, to, revision, format, base_sha256=base_sha256, progress=progress)
    print_json(pulled) if as_json else out.print(f"{version_line(pulled)} -> {to}", soft_wrap=True, markup=False)


@commands.command()
def card(version: Version, server: Server = DEFAULT_SERVER, token: Token = "") -> None:
    """Print a version's model card."""
    with connected(server, token) as client:
        typer.echo(client.adapters.card(*name_and_revision(version)), nl=False)


@commands.command()
def compare(
    left: Version,
    right: Annotated[
        str | None,
        typer.Argument(metavar="[ADAPTER[@REVISION]]", help="Default: the version main of the same adapter."),
    ] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Show the differences between two versions in settings, scores and weights."""
    name, first = name_and_revision(left)
    other, second = name_and_revision(right or name)
    with connected(server, token) as client:
        found = client.adapters.compare(name, first, second, other=None if other == name else other)
    print_json(found) if as_json else out.print("\n".join(_lines(found)), markup=False, soft_wrap=True)


def _lines(found: Comparison) -> list[str]:
    lines = [" -> ".join(f"{side.adapter} v{side.version}" for side in (found.left, found.right))]
    lines += [f"{item.field}: {item.left} -> {item.right}" for item in (*found.recipe, *found.task, *found.training)]
    for score in found.scores:
        if score.difference is not None:
            lines.append(f"{score.field}: {score.left:g} -> {score.right:g} ({score.difference:+g})")
    if found.weights is None:
        return [*lines, "B: the versions have different frozen A or sizes, so their B cannot be compared"]
    cosine = "" if found.weights.cosine is None else f", cosine {found.weights.cosine:.4f}"
    norms = f"{found.weights.left_norm:.4g} -> {found.weights.right_norm:.4g}"
    return [*lines, f"B: norm {norms}, norm of the difference {found.weights.difference_norm:.4g}{cosine}"]


@commands.command("events")
def list_events(name: Name, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Show the audit trail of an adapter, newest first."""
    with connected(server, token) as client:
        events = list(client.adapters.events(name))
    if as_json:
        print_json(list[BaseModel](events))
        return
    table = Table("time", "actor", "action", "version", "main", "reason")
    for event in events:
        version = event.tag or "" if event.version is None else f"v{event.version} {event.tag or ''}"
        main = "" if event.main_after is None else f"v{event.main_after}"
        actor = event.user or event.name or event.actor
        table.add_row(event.at.isoformat(" ", "seconds"), actor, event.action, version, main, event.reason)
    out.print(table)


@commands.command()
def trajectory(
    version: Version,
    to: Annotated[Path | None, typer.Option("--to", help="File to write the trajectory, or LoRA-B, to.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Write LoRA-B as it was after this training step.")] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Show or download a version's trajectory, or LoRA-B after one of its steps."""
    if step is not None and to is None:
        raise stop("--step needs --to, the file to write LoRA-B to", 2)
    name, revision = name_and_revision(version)
    with connected(server, token) as client, download_progress(err) as progress:
        if step is not None and to is not None:
            written = client.trajectories.download_step(name, step, to, revision)
            print_json(written) if as_json else out.print(f"{name} v{written.version} after {step} steps -> {to}")
            return
        if to is None:
            found = client.trajectories.get(name, revision)
        else:
            found = client.trajectories.download(name, to, revision, progress=progress)
    if as_json:
        print_json(found)
        return
    verified = "verified: its replay gives the same LoRA-B" if found.verified else "not verified"
    kept = "instead of LoRA-B" if found.instead else "beside LoRA-B"
    out.print(f"{name} v{found.version}: {found.steps} steps, {found.size} bytes, stored {kept}; {verified}")
