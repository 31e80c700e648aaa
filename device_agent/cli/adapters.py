"""The commands of the adapter store: `adapter list|pull|rollback|remove`. Only `pull` uses the network."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from device_agent.cli.options import HomeOption, JsonOption, NameArgument, show
from device_agent.home import AgentHome
from device_agent.inference.adapter_store import AdapterStore, StoredAdapter
from device_agent.inference.pull import fetch_missing, parse_reference
from device_agent.inference.pull import pull as pull_version
from device_agent.programs import ProgramCache
from device_agent.protocol.client import DeviceClient
from shared.errors import NotFound

app = typer.Typer(
    help="Manage the adapters stored on this device.", no_args_is_help=True, pretty_exceptions_enable=False
)


@app.command("list")
def list_adapters(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """List the adapters stored on this device and whether each can be used offline."""
    agent_home = AgentHome.locate(home)
    store = AdapterStore(agent_home)
    stored = store.stored()
    for about in stored:
        problem, previous = _problem(agent_home, about), store.has_previous(about.name)
        text = f"{about.name}: {about.task.name}, {about.description}, stored {about.kept_at:%Y-%m-%d %H:%M} UTC"
        text += (", rollback possible" if previous else "") + (f"; {problem}" if problem else "")
        show(json_lines, _facts(about) | {"usable": problem is None, "why_not": problem, "previous": previous}, text)
    if not stored and not json_lines:
        typer.echo(
            "no adapters stored yet; an adapter is stored when its job completes on this device or when it is pulled"
        )


@app.command()
def pull(
    reference: Annotated[
        str | None,
        typer.Argument(metavar="[ADAPTER[@REVISION]]", help="Default: every stored adapter."),
    ] = None,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Download the missing files of stored adapters, so that `predict` and `chat` work offline.

    With a revision (main, v7, or digits of a hash): download that version and use it from now on.
    """
    name, revision = (None, None) if reference is None else parse_reference(reference)
    agent_home = AgentHome.locate(home)
    config = agent_home.config()
    with DeviceClient(config.server, config.token) as client:
        if name is not None and revision is not None:
            about, downloaded = pull_version(agent_home, client, name, revision)
            size = sum(file.size for file in downloaded)
            files = f"; {size / 1e6:.1f} MB of program files downloaded" if size else ""
            text = f"{about.name} is now the adapter {about.description}{files}"
            show(json_lines, _facts(about) | {"bytes": size}, text)
        else:
            _download_missing(agent_home, client, name, json_lines)


def _download_missing(agent_home: AgentHome, client: DeviceClient, name: str | None, json_lines: bool) -> None:
    store = AdapterStore(agent_home)
    stored = [about for about in store.stored() if name in (None, about.name)]
    if name is not None and not stored:
        raise NotFound(
            f"no adapter {name!r} is stored on this device; an adapter is stored when its job completes here, or by "
            f"`mobizo-agent adapter pull {name}@main`"
        )
    cache = ProgramCache(agent_home.cache, pins=store.pins)
    for about in stored:
        downloaded = fetch_missing(cache, client, list(about.files))
        size = sum(file.size for file in downloaded)
        text = f"{about.name}: " + (f"downloaded {size / 1e6:.1f} MB" if downloaded else "complete")
        show(json_lines, {"adapter": about.name, "files": len(downloaded), "bytes": size}, text)


@app.command()
def rollback(name: NameArgument, home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Switch to the previous version of an adapter; a second rollback undoes the first."""
    about = AdapterStore(AgentHome.locate(home)).rollback(name)
    show(json_lines, _facts(about), f"{name} is now the adapter {about.description}")


@app.command()
def remove(name: NameArgument, home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Remove an adapter from this device, so that its program's files can be evicted from the cache."""
    AdapterStore(AgentHome.locate(home)).remove(name)
    show(json_lines, {"removed": name}, f"{name} was removed from this device")


def _facts(about: StoredAdapter) -> dict[str, Any]:
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


def _problem(agent_home: AgentHome, about: StoredAdapter) -> str | None:
    """Returns why an adapter cannot be used offline, or None. Compares file sizes only, since hashing takes seconds."""
    if not about.files:
        return f"a program of backend {about.signed.manifest.recipe.backend} cannot be used on the device"
    cache = ProgramCache(agent_home.cache)
    paths = ((cache.path(file), file.size) for file in about.files)
    if all(path.is_file() and path.stat().st_size == size for path, size in paths):
        return None
    return f"`mobizo-agent adapter pull {about.name}` downloads its missing files"
