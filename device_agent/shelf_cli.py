"""The commands of the shelf of kept adapters: `adapters list|pull|rollback|remove`. Only `pull` knows the network."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from device_agent.adapters import AdapterShelf, KeptAdapter
from device_agent.cache import FileCache
from device_agent.client import DeviceClient
from device_agent.options import HomeOption, JsonOption, NameArgument
from device_agent.pull import fetch_lacking, parse_reference
from device_agent.pull import pull as pull_version
from device_agent.state import Home
from shared.errors import NotFound

app = typer.Typer(help="Adapters kept on this device.", no_args_is_help=True, pretty_exceptions_enable=False)


@app.command("list")
def list_adapters(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Show what is kept here, and whether it can be used offline."""
    place = Home.locate(home)
    shelf = AdapterShelf(place)
    kept = shelf.kept()
    for about in kept:
        use, previous = _usable(place, about), shelf.has_previous(about.name)
        if json_lines:
            typer.echo(json.dumps(_facts(about) | {"usable": use is None, "why_not": use, "previous": previous}))
            continue
        before = ", the one before it too" if previous else ""
        words = f"{about.task.name}, {about.words}, kept {about.kept_at:%Y-%m-%d %H:%M} UTC{before}"
        typer.echo(f"{about.name}: {words}" + ("" if use is None else f"; {use}"))
    if not kept and not json_lines:
        typer.echo("none is kept yet; an adapter is kept when its job completes on this device, or when it is pulled")


@app.command()
def pull(
    reference: Annotated[
        str | None,
        typer.Argument(metavar="[ADAPTER[@REVISION]]", help="all that are kept, if none is named"),
    ] = None,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Fetch what the use of kept adapters lacks, so that `predict` and `chat` work without a network.

    With a revision (main, v7, a tag, or digits of a hash): fetch that version from the server, to be used from now on.
    """
    name, revision = (None, None) if reference is None else parse_reference(reference)
    place = Home.locate(home)
    config = place.config()
    with DeviceClient(config.server, config.token) as client:
        if name is not None and revision is not None:
            about, lacking = pull_version(place, client, name, revision)
            _show_pulled(about, sum(file.size for file in lacking), json_lines)
        else:
            _restock(place, client, name, json_lines)


def _show_pulled(about: KeptAdapter, size: int, json_lines: bool) -> None:
    if json_lines:
        typer.echo(json.dumps(_facts(about) | {"bytes": size}))
    else:
        files = f"; its program took {size / 1e6:.1f} MB" if size else ""
        typer.echo(f"{about.name} is the adapter {about.words} now{files}")


def _restock(place: Home, client: DeviceClient, name: str | None, json_lines: bool) -> None:
    shelf = AdapterShelf(place)
    kept = [about for about in shelf.kept() if name in (None, about.name)]
    if name is not None and not kept:
        raise NotFound(
            f"no adapter {name!r} is kept on this device; one is kept when its job completes here, or after "
            f"`mobizo-agent adapters pull {name}@main`"
        )
    cache = FileCache(place.cache, pins=shelf.pins)
    for about in kept:
        lacking = fetch_lacking(cache, client, list(about.files))
        size = sum(file.size for file in lacking)
        if json_lines:
            typer.echo(json.dumps({"adapter": about.name, "files": len(lacking), "bytes": size}))
        else:
            typer.echo(f"{about.name}: " + (f"fetched {size / 1e6:.1f} MB" if lacking else "nothing was lacking"))


@app.command()
def rollback(name: NameArgument, home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Use the adapter before the newest instead; done twice, all is as it was."""
    about = AdapterShelf(Home.locate(home)).rollback(name)
    typer.echo(json.dumps(_facts(about)) if json_lines else f"{name} is the adapter {about.words} now")


@app.command()
def remove(name: NameArgument, home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Forget an adapter on this device, so that the room of its program's files can be used."""
    AdapterShelf(Home.locate(home)).remove(name)
    typer.echo(json.dumps({"removed": name}) if json_lines else f"{name} is forgotten on this device")


def _facts(about: KeptAdapter) -> dict[str, Any]:
    origin = about.origin
    return {
        "name": about.name,
        "job_id": about.job_id,
        "task": about.task.name,
        "base": about.signed.manifest.recipe.base.name,
        "sha256": about.sha256,
        "version": None if origin is None else origin.manifest.version,
        "revision": None if origin is None else origin.manifest.revision,
        "kept_at": about.kept_at.isoformat(),
    }


def _usable(place: Home, about: KeptAdapter) -> str | None:
    """Why an adapter cannot be used offline; None if it can. By the files' sizes: hashing takes seconds."""
    if not about.files:
        return f"a program of backend {about.signed.manifest.recipe.backend} cannot be used on the device"
    cache = FileCache(place.cache)
    here = (path.is_file() and path.stat().st_size == file.size for file in about.files for path in [cache.path(file)])
    return None if all(here) else f"`mobizo-agent adapters pull {about.name}` fetches what its use lacks"
