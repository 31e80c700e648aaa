"""Decides which programs and adapters this device trusts: signatures, key rotations, recipe and rollback protection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import RootModel, ValidationError

from device_agent.durable import write_durably
from device_agent.home import AgentHome, DeviceConfig
from device_agent.protocol.client import DeviceClient
from shared.errors import NotFound, StartDeleted, Untrusted
from shared.key_rotation import follow
from shared.program import ProgramManifest
from shared.protocol import Lease
from shared.registry import AdapterManifest
from shared.signing import choose_key, verify_adapter, verify_manifest

_log = structlog.get_logger()


def follow_key_rotation(home: AgentHome, config: DeviceConfig, client: DeviceClient, key_id: str) -> DeviceConfig:
    """Returns the configuration with the server's current key, or the given one if the chain of rotations is not
    valid.

    key_id: the key of a received signature; the server is asked only if it is not the pinned key. Raises MobizoError if
    the server does not answer.
    """
    if key_id == config.key_id:
        return config
    try:
        path = follow(config.public_key, client.server_keys())
    except (Untrusted, NotFound) as error:
        # Verification then rejects everything that is signed with the new key.
        _log.warning(
            "the server's new signing key is not trusted",
            key_id=key_id,
            detail=error.detail,
        )
        return config
    if not path:
        return config
    config = home.pin(config.public_key, path)
    _log.info("the server has rotated its signing key; the new key is now pinned", key_id=config.key_id)
    return config


class _Versions(RootModel[dict[str, int]]):
    """Version by recipe id."""


class RollbackProtection:
    """A file with the highest verified version of each recipe's program; reset when this device is enrolled again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self, manifest: ProgramManifest) -> None:
        """Records the version of a verified manifest. Raises Untrusted if a higher version was recorded before."""
        versions = self._read()
        highest = versions.get(manifest.recipe_id, 0)
        if manifest.version < highest:
            raise Untrusted(
                f"the program is version {manifest.version} of recipe {manifest.recipe_id[:12]}, but this device has "
                f"seen version {highest}: an old program has replaced the new one; if the server was rolled back on "
                f"purpose, enroll this device again"
            )
        if manifest.version > highest:
            document = _Versions(versions | {manifest.recipe_id: manifest.version})
            write_durably(self._path, document.model_dump_json(indent=1).encode())

    def _read(self) -> dict[str, int]:
        try:
            return _Versions.model_validate_json(self._path.read_bytes()).root
        except FileNotFoundError:
            return {}
        except ValidationError as error:
            # Treating it as empty would accept every old program.
            raise Untrusted(f"{self._path} cannot be read; enroll this device again") from error


def verify_program(lease: Lease, key: Ed25519PublicKey, rollback: RollbackProtection) -> ProgramManifest:
    """Returns the verified manifest of the lease's program and records its version. Raises Untrusted if any check
    fails.
    """
    manifest = verify_manifest(lease.manifest, key)
    if manifest.recipe != lease.job.recipe:
        raise Untrusted(
            "the program that came with the job has another recipe than the job; check the server's programs"
        )
    privacy = lease.job.request.privacy
    if (privacy is not None) != (manifest.recipe.privacy == "clipped"):
        raise Untrusted("the job and its program disagree on differential privacy: exactly one of them requires it")
    if privacy is not None and privacy.noise_multiplier is None:
        raise Untrusted("the private job has no noise multiplier")
    rollback.check(manifest)
    return manifest


def verify_start(lease: Lease, program: ProgramManifest, keys: Sequence[Ed25519PublicKey]) -> AdapterManifest | None:
    """Returns the manifest of the version that the job begins with; None if it begins with B = 0.

    keys: the server's current and former keys. Raises StartDeleted, or Untrusted if the version is not the job's or
    does not fit the program.
    """
    requested = lease.job.request.start
    if requested is None and lease.start is None:
        return None
    if lease.start is None:
        raise StartDeleted
    start = verify_adapter(lease.start, choose_key(lease.start.key_id, keys))
    if requested is None or (start.adapter, start.revision) != (requested.adapter, requested.revision):
        raise Untrusted("the adapter that came with the job is not the one that the job starts from")
    check_fit(start, program)
    return start


def check_fit(adapter: AdapterManifest, program: ProgramManifest) -> None:
    """Raises Untrusted unless an adapter version's B fits the program."""
    for name, actual, required in (
        ("base model", adapter.base.sha256, program.recipe.base.sha256),
        ("frozen A", adapter.a_sha256, program.a_sha256),
        ("D", adapter.size_d, program.size),
    ):
        if actual != required:
            raise Untrusted(f"adapter {adapter.adapter!r} has {name} {actual}, but its program requires {required}")
