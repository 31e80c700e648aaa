"""The adapter store: adapters for use on this device, each with its signed manifest and task.

    adapters/NAME/00000007/about.json             a `StoredAdapter`
    adapters/NAME/00000007/adapter.safetensors    B
    adapters/lock                                 held while the store is changed

A version is a directory that one rename creates, so it is always complete. The highest number is in use; the previous
version is kept for a rollback.
"""

from __future__ import annotations

import re
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import Field

from device_agent.durable import locked, read_document, write_document
from device_agent.home import AgentHome
from shared.canonical import sha256_hex
from shared.durable import sync, write_durably
from shared.errors import AdapterNotFound, BadRequest, NotFound, Untrusted
from shared.job import NAME
from shared.program import ProgramFile, ProgramManifest, SignedManifest
from shared.recipe import Sha256
from shared.registry import SignedAdapter
from shared.signing import choose_key, verify_adapter, verify_manifest
from shared.strict_model import StrictModel
from shared.task import Task
from shared.zo.lora import F32, load_adapter

KEPT_VERSIONS = 2  # the current one and the previous one


class StoredAdapter(StrictModel):
    """Metadata of one stored adapter."""

    name: str = Field(pattern=NAME)
    job_id: str | None = Field(description="null: a registry version of a federated round")
    task: Task
    signed: SignedManifest
    sha256: Sha256 = Field(description="of the adapter file")
    kept_at: datetime
    origin: SignedAdapter | None = Field(None, description="the registry version; null: trained on this device")

    @property
    def description(self) -> str:
        """The version's origin, for messages."""
        if self.origin is None:
            return f"of job {self.job_id}"
        manifest = self.origin.manifest
        if manifest.cohort is not None:
            return f"version {manifest.version}, of round {manifest.cohort.round} of cohort {manifest.cohort.cohort}"
        return f"version {manifest.version}, of job {self.job_id}"

    @property
    def files(self) -> tuple[ProgramFile, ...]:
        """The program files needed for inference; empty if the program has no inference file."""
        manifest = self.signed.manifest
        if manifest.inference_context is None:
            return ()
        return (manifest.file("inference"), manifest.file("weights"), manifest.file("tokenizer"))


@dataclass(frozen=True)
class LoadedAdapter:
    """A verified adapter: flat B (D,) and its program's manifest."""

    about: StoredAdapter
    manifest: ProgramManifest
    flat: F32


class AdapterStore:
    """The adapters stored in one home."""

    def __init__(self, home: AgentHome) -> None:
        self._directory = home.path / "adapters"

    def add(
        self,
        name: str,
        adapter: bytes,
        signed: SignedManifest,
        task: Task,
        job_id: str | None,
        origin: SignedAdapter | None = None,
    ) -> StoredAdapter:
        """Stores an adapter file as the newest version of its name; the same job's file is stored once.

        origin: the registry version, if it was pulled. Raises InvalidUpload if the file does not fit the manifest,
        OSError if the disk is full; nothing has changed then.
        """
        load_adapter(adapter, signed.manifest.size)
        about = StoredAdapter(
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
                if newest.origin is None and origin is not None:  # trained here, and now known as a registry version
                    write_document(versions[-1] / "about.json", about)
                    return about
                return newest
            self._put(self._next(name, versions), about, adapter)
            for old in self._versions(name)[:-KEPT_VERSIONS]:
                shutil.rmtree(old)
        return about

    def open(self, name: str, *keys: Ed25519PublicKey) -> LoadedAdapter:
        """Returns the newest version of an adapter after verifying its manifest's signature and its sha256.

        keys: the server's current and former keys. Raises AdapterNotFound if none is stored, Untrusted.
        """
        versions = self._versions(name)
        if not versions:
            names = (
                ", ".join(about.name for about in self.stored())
                or "none yet; an adapter is stored when its job completes"
            )
            raise AdapterNotFound(f"no adapter {name!r} is stored on this device (stored: {names})")
        version = versions[-1]
        about = self._read(version)
        data = _adapter(version).read_bytes() if _adapter(version).is_file() else b""
        if about is None or sha256_hex(data) != about.sha256:
            raise Untrusted(
                f"{version} is damaged; `mobizo-agent adapter rollback {name}` restores the previous version"
            )
        manifest = verify_manifest(about.signed, choose_key(about.signed.key_id, keys))
        if about.origin is not None:
            origin = verify_adapter(about.origin, choose_key(about.origin.key_id, keys))
            if origin.sha256 != about.sha256:
                raise Untrusted(f"{version} differs from the version that the server signed; pull it again")
        return LoadedAdapter(about, manifest, load_adapter(data, manifest.size))

    def names(self) -> list[str]:
        """Returns the names of all stored adapters, sorted."""
        directories = sorted(self._directory.glob("*/")) if self._directory.is_dir() else []
        return [path.name for path in directories if self._versions(path.name)]

    def stored(self) -> list[StoredAdapter]:
        """Returns the newest version of every adapter, by name."""
        newest = (self._read(self._versions(name)[-1]) for name in self.names())
        return [about for about in newest if about is not None]

    def arriving(self, sha256: str) -> Path:
        """Returns the download path of an adapter file; partial downloads are resumed."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._directory / f".{sha256}"

    def has_previous(self, name: str) -> bool:
        """Returns whether `rollback` is possible."""
        return len(self._versions(name)) > 1

    def rollback(self, name: str) -> StoredAdapter:
        """Makes the previous version the newest; a second call undoes the first. Raises NotFound."""
        with self._lock():
            versions = self._versions(name)
            before = self._read(versions[-2]) if len(versions) > 1 else None
            if before is None:
                raise NotFound(f"no previous version of adapter {name!r} is stored on this device")
            versions[-2].rename(self._next(name, versions))
            sync(self._directory / name)
        return before

    def remove(self, name: str) -> None:
        """Deletes every version of an adapter. Raises NotFound."""
        with self._lock():
            if not self._versions(name):
                raise NotFound(f"no adapter {name!r} is stored on this device")
            shutil.rmtree(self._directory / name)

    def pins(self) -> frozenset[str]:
        """Returns the sha256 of every cached file that stored adapters need."""
        versions = (self._read(version) for name in self.names() for version in self._versions(name))
        return frozenset(file.sha256 for about in versions if about is not None for file in about.files)

    def _put(self, directory: Path, about: StoredAdapter, adapter: bytes) -> None:
        temporary = directory.with_name(".new")
        shutil.rmtree(temporary, ignore_errors=True)  # left by a kill
        directory.parent.mkdir(exist_ok=True, mode=0o700)
        temporary.mkdir(mode=0o700)
        write_durably(_adapter(temporary), adapter)
        write_document(temporary / "about.json", about)
        temporary.rename(directory)
        sync(directory.parent)
        sync(self._directory)

    def _next(self, name: str, versions: list[Path]) -> Path:
        return self._directory / name / f"{int(versions[-1].name) + 1 if versions else 1:08d}"

    def _versions(self, name: str) -> list[Path]:
        """Returns the versions of a name, oldest first. Raises BadRequest for an invalid name."""
        if not re.fullmatch(NAME, name):
            raise BadRequest(f"{name!r} is not an adapter name: use lower-case letters, digits, '.', '_' or '-'")
        return sorted(path for path in (self._directory / name).glob("[0-9]*") if path.name.isdigit())

    def _read(self, version: Path) -> StoredAdapter | None:
        """Returns a version's metadata; None if its file is missing or damaged."""
        return read_document(version / "about.json", StoredAdapter)

    def _lock(self) -> AbstractContextManager[object]:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return locked(self._directory / "lock")


def _adapter(version: Path) -> Path:
    return version / "adapter.safetensors"
