"""The adapters this device keeps for its own use, each with the signed manifest and the task that it goes with.

    adapters/NAME/00000007/about.json             a `KeptAdapter`
    adapters/NAME/00000007/adapter.safetensors    B
    adapters/lock                                 held while something is put on the shelf or moved

A version is a directory that appears whole, by one rename; the highest number is in use and the one before it stays.
Knows no runtime and no HTTP.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from device_agent.durable import sync_directory, write_durably
from device_agent.state import Home
from shared.canonical import sha256_hex
from shared.errors import BadRequest, NotFound, Untrusted
from shared.job import NAME
from shared.lora import F32, load_adapter
from shared.program import ProgramFile, ProgramManifest, SignedManifest
from shared.recipe import Sha256
from shared.registry import SignedAdapter
from shared.signing import choose_key, verify_adapter, verify_manifest
from shared.task import Task

KEPT_VERSIONS = 2  # the one in use, and the one to go back to


class KeptAdapter(BaseModel):
    """What is known of one adapter on the shelf."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=NAME)
    job_id: str | None = Field(description="null: the registry's version that a cohort's round made")
    task: Task
    signed: SignedManifest
    sha256: Sha256 = Field(description="of the adapter file")
    kept_at: datetime
    origin: SignedAdapter | None = Field(None, description="the registry's version that it is; null: trained here")

    @property
    def words(self) -> str:
        """Which adapter it is, for people."""
        if self.origin is None:
            return f"of job {self.job_id}"
        manifest = self.origin.manifest
        if manifest.cohort is not None:
            return f"version {manifest.version}, of round {manifest.cohort.round} of cohort {manifest.cohort.cohort}"
        return f"version {manifest.version}, of job {self.job_id}"

    @property
    def files(self) -> tuple[ProgramFile, ...]:
        """What its use needs of its program; nothing if the program has no inference file."""
        manifest = self.signed.manifest
        if manifest.inference_context is None:
            return ()
        return (manifest.file("inference"), manifest.file("weights"), manifest.file("tokenizer"))


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter ready for use: flat B (D,), and a manifest whose signature held."""

    about: KeptAdapter
    manifest: ProgramManifest
    flat: F32


class AdapterShelf:
    """The adapters kept in one home."""

    def __init__(self, home: Home) -> None:
        self._directory = home.path / "adapters"

    def keep(
        self,
        name: str,
        adapter: bytes,
        signed: SignedManifest,
        task: Task,
        job_id: str | None,
        origin: SignedAdapter | None = None,
    ) -> KeptAdapter:
        """Puts an adapter file on the shelf as the newest of its name; the same job's file twice is kept once.

        origin: the registry's version that it is, if it comes from there. Raises InvalidUpload if the file does not fit
        the manifest, OSError if the disk is full; nothing changed then.
        """
        load_adapter(adapter, signed.manifest.size)
        about = KeptAdapter(
            name=name,
            job_id=job_id,
            task=task,
            signed=signed,
            sha256=sha256_hex(adapter),
            kept_at=datetime.now(UTC),
            origin=origin,
        )
        with self._lock():
            versions = self._versions(name)
            newest = self._read(versions[-1]) if versions else None
            if newest is not None and (newest.job_id, newest.sha256) == (job_id, about.sha256):
                return newest
            self._put(self._next(name, versions), about, adapter)
            for old in self._versions(name)[:-KEPT_VERSIONS]:
                shutil.rmtree(old)
        return about

    def open(self, name: str, *keys: Ed25519PublicKey) -> OpenedAdapter:
        """The newest adapter of a name, once its manifest's signature by one of `keys` and its own sha256 hold.

        keys: the server's, and those that handed over to it before: what they signed was checked when it was kept.
        Raises NotFound if none is kept, Untrusted.
        """
        if not self._versions(name):
            names = ", ".join(about.name for about in self.kept()) or "none yet; one is kept when its job completes"
            raise NotFound(f"no adapter {name!r} is kept on this device (kept: {names})")
        version = self._versions(name)[-1]
        about = self._read(version)
        data = _adapter(version).read_bytes() if _adapter(version).is_file() else b""
        if about is None or sha256_hex(data) != about.sha256:
            raise Untrusted(f"{version} is damaged; `mobizo-agent adapters rollback {name}` takes the one before")
        manifest = verify_manifest(about.signed, choose_key(about.signed.key_id, keys))
        if about.origin is not None:
            origin = verify_adapter(about.origin, choose_key(about.origin.key_id, keys))
            if origin.sha256 != about.sha256:
                raise Untrusted(f"{version} is not the version that its server vouched for; pull it again")
        return OpenedAdapter(about, manifest, load_adapter(data, manifest.size))

    def kept(self) -> list[KeptAdapter]:
        """The newest adapter of every name, by name."""
        newest = (self._read(self._versions(name)[-1]) for name in self._names())
        return [about for about in newest if about is not None]

    def newest(self, name: str) -> str | None:
        """What tells one newest adapter of a name from the next; None if none is kept."""
        versions = self._versions(name)
        return versions[-1].name if versions else None

    def arriving(self, sha256: str) -> Path:
        """Where an adapter file is downloaded to, before it is kept; what a kill leaves there is gone on with."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._directory / f".{sha256}"

    def has_previous(self, name: str) -> bool:
        """Whether `rollback` can go back."""
        return len(self._versions(name)) > 1

    def rollback(self, name: str) -> KeptAdapter:
        """Makes the adapter before the newest the newest; done twice, all is as it was. Raises NotFound."""
        with self._lock():
            versions = self._versions(name)
            before = self._read(versions[-2]) if len(versions) > 1 else None
            if before is None:
                raise NotFound(f"no adapter {name!r} from before the one in use is kept on this device")
            versions[-2].rename(self._next(name, versions))
            sync_directory(self._directory / name)
        return before

    def remove(self, name: str) -> None:
        """Forgets every adapter of a name. Raises NotFound if none is kept."""
        with self._lock():
            if not self._versions(name):
                raise NotFound(f"no adapter {name!r} is kept on this device")
            shutil.rmtree(self._directory / name)

    def pins(self) -> frozenset[str]:
        """The sha256 of every cache file that a kept adapter needs, so that the cache keeps them."""
        versions = (self._read(version) for name in self._names() for version in self._versions(name))
        return frozenset(file.sha256 for about in versions if about is not None for file in about.files)

    def _put(self, place: Path, about: KeptAdapter, adapter: bytes) -> None:
        aside = place.with_name(".new")
        shutil.rmtree(aside, ignore_errors=True)  # what a kill left
        place.parent.mkdir(exist_ok=True, mode=0o700)
        aside.mkdir(mode=0o700)
        write_durably(_adapter(aside), adapter)
        write_durably(aside / "about.json", about.model_dump_json(indent=1).encode())
        aside.rename(place)
        sync_directory(place.parent)
        sync_directory(self._directory)

    def _next(self, name: str, versions: list[Path]) -> Path:
        return self._directory / name / f"{int(versions[-1].name) + 1 if versions else 1:08d}"

    def _names(self) -> list[str]:
        found = sorted(self._directory.glob("*/")) if self._directory.is_dir() else []
        return [path.name for path in found if self._versions(path.name)]

    def _versions(self, name: str) -> list[Path]:
        """The whole versions of a name, oldest first. Raises BadRequest for what is no adapter's name."""
        if not re.fullmatch(NAME, name):
            raise BadRequest(f"{name!r} is no adapter's name: lower-case letters, digits, '.', '_' or '-'")
        return sorted(path for path in (self._directory / name).glob("[0-9]*") if path.name.isdigit())

    def _read(self, version: Path) -> KeptAdapter | None:
        """What is known of a version; None if its file is gone or damaged."""
        try:
            return KeptAdapter.model_validate_json((version / "about.json").read_bytes())
        except (OSError, ValidationError):
            return None

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _adapter(version: Path) -> Path:
    return version / "adapter.safetensors"
