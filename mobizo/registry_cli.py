"""`mobizo`'s commands about adapters and their versions: read, downloaded, decided on. The client knows the API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.table import Table

from mobizo.console import DEFAULT_SERVER, Json, Server, Token, connected, err, out, print_json, whole
from mobizo.progress import bars
from mobizo.pulling import Format
from shared.protocol import AdapterVersion
from shared.registry import Comparison

commands = typer.Typer()
Name = Annotated[str, typer.Argument(metavar="ADAPTER", help="its name in the tenant")]
Revision = Annotated[str, typer.Option("--revision", "-r", help="main, v7, a tag, or digits of a revision")]
Which = Annotated[str, typer.Argument(metavar="REVISION", help="v7, a tag, or digits of a revision")]
Reason = Annotated[str, typer.Option("--reason", help="for the audit trail")]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _shown(version: AdapterVersion) -> str:
    return f"{version.adapter} v{version.version} {version.revision} {version.state}"


@commands.command("adapters")
def list_adapters(server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List adapters."""
    with connected(server, token) as client:
        adapters = list(client.adapters())
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
def list_versions(name: Name, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List an adapter's versions, newest first, with what was decided of them."""
    with connected(server, token) as client:
        versions = list(client.versions(name))
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
            version.revision,
            version.state,
            " ".join(names),
            _share(version.result.before_accuracy),
            _share(version.result.tuned_accuracy),
            version.created_at.isoformat(" ", "seconds"),
        )
    out.print(table)


@commands.command()
def pull(
    name: Name,
    to: Annotated[Path, typer.Option("--to", help="directory to write")],
    revision: Revision = "main",
    format: Annotated[
        Format, typer.Option("--format", help="peft: a directory; gguf: for llama.cpp; raw: LoRA-B, for mobizo-agent")
    ] = Format.PEFT,
    base_sha256: Annotated[str | None, typer.Option(help="refuse an adapter for any other base model")] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Download a version, every file checked; what broke off goes on."""
    with connected(server, token) as client, bars(err) as progress:
        found = client.pull(name, to, revision, format, base_sha256=base_sha256, progress=progress)
    print_json(found) if as_json else out.print(f"{_shown(found)} -> {to}", soft_wrap=True, markup=False)


@commands.command()
def card(name: Name, revision: Revision = "main", server: Server = DEFAULT_SERVER, token: Token = "") -> None:
    """Print a version's model card."""
    with connected(server, token) as client:
        out.print(client.card(name, revision), markup=False, soft_wrap=True, end="")


@commands.command()
def tag(
    name: Name,
    tag: Annotated[str, typer.Argument(help="a word for a version")],
    revision: Revision = "main",
    reason: Reason = "",
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Put a tag on a version, or move it there."""
    with connected(server, token) as client:
        made = client.tag(name, tag, revision, reason)
    print_json(made) if as_json else out.print(f"{name} {made.name} is v{made.version}", markup=False)


@commands.command()
def untag(name: Name, tag: str, reason: Reason = "", server: Server = DEFAULT_SERVER, token: Token = "") -> None:
    """Take a tag away."""
    with connected(server, token) as client:
        client.untag(name, tag, reason)
    out.print(f"{name} {tag} is no more", markup=False)


@commands.command("tags")
def list_tags(name: Name, server: Server = DEFAULT_SERVER, token: Token = "", as_json: Json = False) -> None:
    """List an adapter's tags."""
    with connected(server, token) as client:
        tags = list(client.tags(name))
    if as_json:
        print_json(list[BaseModel](tags))
        return
    table = Table(whole("tag"), "version", whole("revision"), "since")
    for item in tags:
        table.add_row(item.name, f"v{item.version}", item.revision, item.moved_at.isoformat(" ", "seconds"))
    out.print(table)


@commands.command()
def compare(
    name: Name,
    left: Which,
    right: Which,
    server: Server = DEFAULT_SERVER,
    token: Token = "",
    as_json: Json = False,
) -> None:
    """Show what two versions of an adapter differ in."""
    with connected(server, token) as client:
        found = client.compare(name, left, right)
    print_json(found) if as_json else out.print("\n".join(_lines(found)), markup=False, soft_wrap=True)


def _lines(found: Comparison) -> list[str]:
    sides = found.left, found.right
    lines = ["  ->  ".join(f"{side.adapter} v{side.version}" for side in sides)]
    lines += [f"{item.field}: {item.left} -> {item.right}" for item in (*found.recipe, *found.task, *found.training)]
    for score in found.scores:
        if score.difference is not None:
            lines.append(f"{score.field}: {score.left:g} -> {score.right:g} ({score.difference:+g})")
    if found.weights is None:
        lines.append("B: over different A or of different sizes, not to be compared")
    else:
        cosine = "" if found.weights.cosine is None else f", cosine {found.weights.cosine:.4f}"
        norms = f"{found.weights.left_norm:.4g} -> {found.weights.right_norm:.4g}"
        lines.append(f"B: norm {norms}, of the difference {found.weights.difference_norm:.4g}{cosine}")
    return lines
