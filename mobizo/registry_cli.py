"""`mobizo`'s commands that read the registry: lists, cards, comparisons, downloads. The client knows the API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.table import Table

from mobizo.console import DEFAULT_SERVER, Json, Server, Token, connected, err, out, print_json, stop, whole
from mobizo.progress import bars
from mobizo.pulling import Format
from shared.protocol import AdapterVersion
from shared.registry import Comparison, VersionState

commands = typer.Typer()
Name = Annotated[str, typer.Argument(metavar="ADAPTER", help="its name in the tenant")]
Revision = Annotated[str, typer.Option("--revision", "-r", help="main, v7, a tag, or digits of a revision")]
Which = Annotated[str, typer.Argument(metavar="REVISION", help="main, v7, a tag, or digits of a revision")]

SHOWN_DIGITS = 12  # of a revision, in tables of 80 columns; any 7 that only it begins with name it


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def line(version: AdapterVersion) -> str:
    """A version on one line."""
    said = f": {version.message}" if version.message else ""
    return f"{version.adapter} v{version.version} {version.revision} {version.state}{said}"


@commands.command("adapters")
def list_adapters(
    deleted: Annotated[bool, typer.Option("--deleted", help="those that can be taken back")] = False,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """List adapters, newest first."""
    with connected(server, token) as client:
        adapters = list(client.adapters(deleted=deleted))
    if as_json:
        print_json(list[BaseModel](adapters))
        return
    table = Table(whole("adapter"), "main", "versions", "user", "tuned accuracy", "latest")
    for adapter in adapters:
        main = "" if adapter.main is None else f"v{adapter.main}"
        tuned, made = "", ""
        if adapter.latest is not None:
            tuned = _share(adapter.latest.result.tuned_accuracy)
            made = adapter.latest.created_at.isoformat(" ", "seconds")
        table.add_row(adapter.name, main, str(adapter.versions), adapter.user, tuned, made)
    out.print(table)


@commands.command("versions")
def list_versions(
    name: Name,
    state: Annotated[VersionState | None, typer.Option(help="only those")] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """List an adapter's versions, newest first, with what was decided of them."""
    with connected(server, token) as client:
        versions = list(client.versions(name, state))
        adapter = client.adapter(name)
    if as_json:
        print_json(list[BaseModel](versions))
        return
    table = Table("version", whole("revision"), "state", "names", "before", "after", "made")
    for version in versions:
        names = [tag for tag, number in sorted(adapter.tags.items()) if number == version.version]
        if adapter.main == version.version:
            names.insert(0, "main")
        table.add_row(
            f"v{version.version}",
            version.revision and version.revision[:SHOWN_DIGITS],
            version.state,
            " ".join(names),
            _share(version.result.before_accuracy),
            _share(version.result.tuned_accuracy),
            version.created_at.date().isoformat(),
        )
    out.print(table)


@commands.command("tags")
def list_tags(name: Name, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List an adapter's tags, and what `main` is."""
    with connected(server, token) as client:
        adapter = client.adapter(name)
    named = ({} if adapter.main is None else {"main": adapter.main}) | adapter.tags
    if as_json:
        print_json(named)
        return
    for tag, version in named.items():
        out.print(f"{tag}  v{version}", markup=False)


@commands.command()
def pull(
    name: Name,
    to: Annotated[Path, typer.Option("--to", help="directory to write")],
    revision: Revision = "main",
    format: Annotated[
        Format,
        typer.Option("--format", help="peft: a directory; gguf: for llama.cpp; raw: LoRA-B; merged: with its base"),
    ] = Format.PEFT,
    base_sha256: Annotated[str | None, typer.Option(help="refuse an adapter for any other base model")] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Download a version, every file checked; what broke off goes on."""
    with connected(server, token) as client, bars(err) as progress:
        found = client.pull(name, to, revision, format, base_sha256=base_sha256, progress=progress)
    print_json(found) if as_json else out.print(f"{line(found)} -> {to}", soft_wrap=True, markup=False)


@commands.command()
def card(name: Name, revision: Revision = "main", server: Server = DEFAULT_SERVER, token: Token = "") -> None:
    """Print a version's model card."""
    with connected(server, token) as client:
        typer.echo(client.card(name, revision), nl=False)


@commands.command()
def compare(
    name: Name,
    left: Which,
    right: Which,
    other: Annotated[str | None, typer.Option(help="the adapter on the right, if it is another")] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Show what two versions differ in."""
    with connected(server, token) as client:
        found = client.compare(name, left, right, other=other)
    print_json(found) if as_json else out.print("\n".join(_lines(found)), markup=False, soft_wrap=True)


def _lines(found: Comparison) -> list[str]:
    lines = [" -> ".join(f"{side.adapter} v{side.version}" for side in (found.left, found.right))]
    lines += [f"{item.field}: {item.left} -> {item.right}" for item in (*found.recipe, *found.task, *found.training)]
    for score in found.scores:
        if score.difference is not None:
            lines.append(f"{score.field}: {score.left:g} -> {score.right:g} ({score.difference:+g})")
    if found.weights is None:
        return [*lines, "B: over different A or of different sizes, not to be compared"]
    cosine = "" if found.weights.cosine is None else f", cosine {found.weights.cosine:.4f}"
    norms = f"{found.weights.left_norm:.4g} -> {found.weights.right_norm:.4g}"
    return [*lines, f"B: norm {norms}, of the difference {found.weights.difference_norm:.4g}{cosine}"]


@commands.command("events")
def list_events(name: Name, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """Show who did what to an adapter, when and why."""
    with connected(server, token) as client:
        events = list(client.events(name))
    if as_json:
        print_json(list[BaseModel](events))
        return
    table = Table("at", "who", "what", "version", "main", "why")
    for event in events:
        version = event.tag or "" if event.version is None else f"v{event.version} {event.tag or ''}"
        main = "" if event.main_after is None else f"v{event.main_after}"
        who = event.user or event.name or event.actor
        table.add_row(event.at.isoformat(" ", "seconds"), who, event.action, version, main, event.reason)
    out.print(table)


@commands.command()
def history(
    name: Name,
    to: Annotated[Path | None, typer.Option("--to", help="file to write the trajectory, or B, to")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="B as it was after this step of the run")] = None,
    revision: Revision = "main",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Show the trajectory that came with a version, download it, or B after any step of it."""
    if step is not None and to is None:
        raise stop("say with --to where B is to be written", 2)
    with connected(server, token) as client, bars(err) as progress:
        if step is not None and to is not None:
            version = client.pull_step(name, step, to, revision)
            print_json(version) if as_json else out.print(f"{name} v{version.version} after {step} steps -> {to}")
            return
        if to is None:
            found = client.trajectory(name, revision)
        else:
            found = client.pull_trajectory(name, to, revision, progress=progress)
    if as_json:
        print_json(found)
        return
    verified = "replayed, and gives its B bit for bit" if found.verified else "not replayed"
    kept = "in place of B" if found.instead else "beside B"
    out.print(f"{name} v{found.version}: {found.steps} steps, {found.size} bytes, kept {kept}; {verified}")
