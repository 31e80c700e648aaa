"""An adapter version from the server's registry onto this device's shelf: checked by signature and hash, then kept.

A session that uses the adapter takes it before its next question (`device_agent.live`). Knows no command line.
"""

from __future__ import annotations

import re

from device_agent.adapters import AdapterShelf, KeptAdapter
from device_agent.cache import FileCache
from device_agent.client import DeviceClient
from device_agent.seen import SeenVersions
from device_agent.start import check_fit
from device_agent.state import Home
from device_agent.trust import follow_server
from shared.errors import BadRequest, Untrusted
from shared.job import NAME
from shared.program import ProgramFile, ProgramManifest
from shared.protocol import DeviceAdapter
from shared.registry import AdapterManifest
from shared.signing import choose_key, verify_adapter, verify_manifest

_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_NUMBER = re.compile(r"v?([1-9][0-9]*)")
_DIGITS = re.compile(r"[0-9a-f]{40}")


def parse_reference(text: str) -> tuple[str, str | None]:
    """(name, revision) of NAME or NAME@REVISION. Raises BadRequest."""
    name, at, revision = text.partition("@")
    if not re.fullmatch(NAME, name) or (at and not _REVISION.fullmatch(revision)):
        raise BadRequest(
            f"{text!r} is no adapter's name or NAME@REVISION; a revision is main, v7, a tag, or digits of a hash"
        )
    return name, revision if at else None


def pull(home: Home, client: DeviceClient, name: str, revision: str) -> tuple[KeptAdapter, list[ProgramFile]]:
    """Puts a version on the shelf as the newest of its name, with what its use needs; and the files fetched for that.

    The version that is in use stays, to go back to. Raises AdapterNotFound for one that this device may not have,
    RevisionNotFound, VersionHeld, Untrusted, BadRequest, DoesNotFit or Unavailable; the shelf is as it was then.
    """
    found = client.adapter(name, revision)
    adapter, program = _trusted(home, client, found, name, revision)
    if program.inference_context is None:
        raise BadRequest(f"a program of backend {program.recipe.backend} cannot be used on the device")
    shelf = AdapterShelf(home)
    files = [program.file("inference"), program.file("weights"), program.file("tokenizer")]
    cache = FileCache(home.cache, pins=shelf.pins)
    with cache.hold(files):
        # First, so that whoever uses the newest finds all that it needs.
        lacking = fetch_lacking(cache, client, files)
        arrived = shelf.arriving(adapter.sha256)
        client.download_adapter(adapter, arrived)
        kept = shelf.keep(name, arrived.read_bytes(), found.program, adapter.task, adapter.job_id, found.adapter)
    arrived.unlink()
    return kept, lacking


def fetch_lacking(cache: FileCache, client: DeviceClient, files: list[ProgramFile]) -> list[ProgramFile]:
    """Downloads those of `files` that are not here, and returns them. Raises as `FileCache.fetch` does."""
    lacking = [file for file in files if not cache.holds(file)]
    cache.reserve(lacking)
    for file in lacking:
        cache.fetch(client, file)
    return lacking


def _trusted(
    home: Home, client: DeviceClient, found: DeviceAdapter, name: str, revision: str
) -> tuple[AdapterManifest, ProgramManifest]:
    """Both manifests, once each is the server's and they belong together. Raises Untrusted."""
    keys = follow_server(home, home.config(), client, found.program.key_id).trusted_keys()
    adapter = verify_adapter(found.adapter, choose_key(found.adapter.key_id, keys))
    program = verify_manifest(found.program, keys[0])
    number = _NUMBER.fullmatch(revision)
    other = (
        adapter.adapter != name
        or (number is not None and adapter.version != int(number[1]))
        or (_DIGITS.fullmatch(revision) is not None and adapter.revision != revision)
    )
    if other:
        raise Untrusted(
            f"asked for {name}@{revision}, the server sent version {adapter.version} of {adapter.adapter!r}"
        )
    check_fit(adapter, program)
    if adapter.recipe_id != program.recipe_id:
        raise Untrusted(f"the program that came with {name}@{revision} is not of its recipe")
    SeenVersions(home.seen).admit(program)
    return adapter, program
