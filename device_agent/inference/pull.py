"""Pulls an adapter version from the server's registry into this device's adapter store, after verifying signature
and hash.
"""

from __future__ import annotations

import re

from pydantic import ValidationError

from device_agent.home import AgentHome
from device_agent.inference.adapter_store import AdapterStore, StoredAdapter
from device_agent.programs import ProgramCache, check_fit, check_rollback, follow_key_rotation
from device_agent.protocol.client import DeviceClient
from shared.errors import BadRequest, Untrusted
from shared.job import JobStart
from shared.program import ProgramFile, ProgramManifest
from shared.protocol import DeviceAdapter
from shared.registry import AdapterManifest
from shared.signing import choose_key, verify_adapter, verify_manifest

_NUMBER = re.compile(r"v?([1-9][0-9]*)")
_DIGITS = re.compile(r"[0-9a-f]{40}")


def parse_reference(text: str) -> tuple[str, str | None]:
    """Returns (name, revision) of NAME or NAME@REVISION. Raises BadRequest."""
    try:
        reference = JobStart.model_validate(text)
    except ValidationError as error:
        raise BadRequest(
            f"{text!r} is neither an adapter name nor NAME@REVISION; a revision is main, v7, or digits of a hash"
        ) from error
    return reference.adapter, reference.revision if "@" in text else None


def pull(home: AgentHome, client: DeviceClient, name: str, revision: str) -> tuple[StoredAdapter, list[ProgramFile]]:
    """Stores a registry version as the newest of its name; returns it and the downloaded program files.

    The current version stays available for `rollback`. Raises AdapterNotFound for an adapter that is not for this
    device, RevisionNotFound, VersionHeld, Untrusted, BadRequest, DoesNotFit or Unavailable; nothing is stored then.
    """
    offered = client.adapter(name, revision)
    adapter, program = _verify(home, client, offered, name, revision)
    if program.inference_context is None:
        raise BadRequest(f"a program of backend {program.recipe.backend} cannot be used on the device")
    store = AdapterStore(home)
    files = [program.file("inference"), program.file("weights"), program.file("tokenizer")]
    cache = ProgramCache(home.cache, pins=store.pins)
    with cache.hold(files):
        # The program's files come first, so that the newest version can always be used.
        missing = fetch_missing(cache, client, files)
        download = store.arriving(adapter.sha256)
        client.download_adapter(adapter, download)
        stored = store.add(name, download.read_bytes(), offered.program, adapter.task, adapter.job_id, offered.adapter)
    download.unlink()
    return stored, missing


def fetch_missing(cache: ProgramCache, client: DeviceClient, files: list[ProgramFile]) -> list[ProgramFile]:
    """Downloads the missing ones of `files` and returns them. Raises like `ProgramCache.fetch`."""
    missing = [file for file in files if not cache.holds(file)]
    cache.reserve(missing)
    for file in missing:
        cache.fetch(client, file)
    return missing


def _verify(
    home: AgentHome, client: DeviceClient, offered: DeviceAdapter, name: str, revision: str
) -> tuple[AdapterManifest, ProgramManifest]:
    """Verifies both manifests and that they belong together. Raises Untrusted."""
    keys = follow_key_rotation(home, home.config(), client, offered.program.key_id).trusted_keys()
    adapter = verify_adapter(offered.adapter, choose_key(offered.adapter.key_id, keys))
    program = verify_manifest(offered.program, keys[0])
    number = _NUMBER.fullmatch(revision)
    mismatch = (
        adapter.adapter != name
        or (number is not None and adapter.version != int(number[1]))
        or (_DIGITS.fullmatch(revision) is not None and adapter.revision != revision)
    )
    if mismatch:
        raise Untrusted(
            f"requested {name}@{revision}, but the server sent version {adapter.version} of {adapter.adapter!r}"
        )
    check_fit(adapter, program)
    if adapter.recipe_id != program.recipe_id:
        raise Untrusted(f"the program that came with {name}@{revision} has another recipe")
    check_rollback(home.program_versions, program)
    return adapter, program
