"""The programs of this device: the cache of their files, and which programs and adapters it trusts.

    SHA256        a complete file; its access time is updated at each use
    SHA256.part   a partial download
    SHA256.packed, SHA256.packed.index
                  weights as the native runner packed them for this processor; never older than the weights

Files are named by their sha256, downloaded once, verified before every use, and limited in size. The least recently
used file is evicted first, except for files of the current run and of stored adapters. Packed weights are evicted
before all others, because the runner packs them again.

A program is trusted by its signature, after key rotations, its recipe and rollback protection.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import RootModel

from device_agent.durable import locked, read_document, write_document
from device_agent.errors import DoesNotFit
from device_agent.home import AgentHome, DeviceConfig
from shared.canonical import file_sha256
from shared.errors import NotFound, StartDeleted, Unavailable, Untrusted
from shared.job import JobStart
from shared.program import ProgramFile, ProgramManifest
from shared.registry import AdapterManifest, SignedAdapter
from shared.signing import choose_key, verify_adapter, verify_manifest

if TYPE_CHECKING:
    from device_agent.protocol.client import DeviceClient
    from shared.protocol import Lease
    from shared.transport import ByteProgress

MARGIN_BYTES = 64 << 20  # left free for the run's own files
MAX_BYTES = 20 * 10**9  # of all files, unless the disk is small
DISK_SHARE = 0.5  # of the whole disk, at most


_log = structlog.get_logger()


class ProgramCache:
    """A size-limited directory of program files named by their sha256."""

    def __init__(self, directory: Path, limit: int | None = None, pins: Callable[[], Iterable[str]] = tuple) -> None:
        """limit: maximum size of all files in bytes; default: MAX_BYTES or DISK_SHARE of the disk, whichever is
        less.

        pins: returns the sha256 of files that must not be evicted.
        """
        self._directory, self._limit, self._pins = directory, limit, pins
        self._hashes_in_use: frozenset[str] = frozenset()
        # (sha256, size, mtime in ns) of files that this process has verified, because hashing gigabytes takes seconds.
        self._checked: set[tuple[str, int, int]] = set()

    def path(self, file: ProgramFile) -> Path:
        """Returns the path of a file, whether or not it exists."""
        return self._directory / file.sha256

    def holds(self, file: ProgramFile) -> bool:
        """Returns whether the complete file is cached; removes a damaged one."""
        path = self.path(file)
        try:
            stat = path.stat()
        except FileNotFoundError:
            return False
        fingerprint = (file.sha256, stat.st_size, stat.st_mtime_ns)
        if fingerprint in self._checked:
            return True
        if stat.st_size == file.size and file_sha256(path) == file.sha256:
            self._checked.add(fingerprint)
            return True
        path.unlink()
        return False

    @contextlib.contextmanager
    def hold(self, files: Sequence[ProgramFile]) -> Iterator[None]:
        """Protects `files` from eviction while they are in use."""
        previous, self._hashes_in_use = self._hashes_in_use, self._hashes_in_use | {file.sha256 for file in files}
        try:
            yield
        finally:
            self._hashes_in_use = previous

    def reserve(self, files: Sequence[ProgramFile]) -> None:
        """Evicts files until the missing ones of `files` fit. Raises DoesNotFit if that is not possible."""
        needed = sum(file.size - self._arrived(file) for file in files if not self.holds(file))
        if needed == 0:
            return
        disk = shutil.disk_usage(self._directory)
        limit = min(MAX_BYTES, int(disk.total * DISK_SHARE)) if self._limit is None else self._limit
        entries = self._files()
        used = sum(size for _, _, size in entries)
        pinned = self._hashes_in_use.union(self._pins(), (file.sha256 for file in files))
        in_use = self._hashes_in_use.union(file.sha256 for file in files)
        unpinned = [(path, size) for _, path, size in sorted(entries) if _packed(path) and path.stem not in in_use]
        unpinned += [(path, size) for _, path, size in sorted(entries) if not _packed(path) and path.stem not in pinned]
        evictable = sum(size for _, size in unpinned)
        if needed > limit - used + evictable:
            raise DoesNotFit(
                f"the program needs {needed / 1e6:.0f} MB in a cache of at most {limit / 1e6:.0f} MB, of which "
                f"runs and stored adapters use {(used - evictable) / 1e6:.0f} MB; remove a stored adapter"
            )
        if needed + MARGIN_BYTES > disk.free + evictable:
            raise DoesNotFit(
                f"the program needs {needed / 1e6:.0f} MB on disk and {MARGIN_BYTES / 1e6:.0f} MB for the run, "
                f"but {self._directory} has {disk.free / 1e6:.0f} MB free; free some space, and the job is retried"
            )
        excess = max(used + needed - limit, needed + MARGIN_BYTES - disk.free)
        for path, size in unpinned:
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            if _packed(path):
                path.with_name(f"{path.name}.index").unlink(missing_ok=True)
            excess -= size
            _log.info("evicted the least recently used program file", sha256=path.stem, bytes=size)

    def fetch(self, client: DeviceClient, file: ProgramFile, progress: ByteProgress | None = None) -> Path:
        """Returns the path of a file, downloading it if necessary. Raises Untrusted if two downloads have another
        hash.
        """
        path = self.path(file)
        if not self.holds(file):
            try:
                self._download(client, file, progress)
            except Untrusted:
                # A resumed partial download may be corrupt: retry once from the beginning.
                self._part(file).unlink(missing_ok=True)
                self._download(client, file, progress)
        with contextlib.suppress(OSError):  # a file system without access times must not fail the job
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return path

    def _download(self, client: DeviceClient, file: ProgramFile, progress: ByteProgress | None) -> None:
        """Resumes the download for as long as each attempt transfers data. Raises Unavailable if another process
        downloads the file.
        """
        from shared.transport import Unreachable

        held = Unavailable(
            "another process of the agent downloads the same program file; try again when it has finished"
        )
        with locked(self._part(file), held):
            if self.holds(file):  # another process has just downloaded it
                self._part(file).unlink()
            while not self.path(file).exists():
                previous_size = self._arrived(file)
                try:
                    client.download(file, self.path(file), progress)
                except Unreachable:
                    if self._arrived(file) <= previous_size:
                        raise

    def _files(self) -> list[tuple[int, Path, int]]:
        """Returns (last use in ns, path, bytes) of every complete, partial or packed file."""
        entries = []
        for path in self._directory.iterdir():
            if re.fullmatch(r"[0-9a-f]{64}(\.part|\.packed)?", path.name):
                stat = path.stat()
                entries.append((stat.st_atime_ns, path, stat.st_size))
        return entries

    def _part(self, file: ProgramFile) -> Path:
        return self._directory / f"{file.sha256}.part"

    def _arrived(self, file: ProgramFile) -> int:
        part = self._part(file)
        return min(part.stat().st_size, file.size) if part.exists() else 0


def _packed(path: Path) -> bool:
    return path.suffix == ".packed"


def follow_key_rotation(home: AgentHome, config: DeviceConfig, client: DeviceClient, key_id: str) -> DeviceConfig:
    """Returns the configuration with the server's current key, or the given one if the chain of rotations is not
    valid.

    key_id: the key of a received signature; the server is asked only if it is not the pinned key. Raises MobizoError if
    the server does not answer.
    """
    from shared.key_rotation import follow

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


_Versions = RootModel[dict[str, int]]  # by recipe id


def check_rollback(path: Path, manifest: ProgramManifest) -> None:
    """Records the version of a verified manifest. Raises Untrusted if a higher version was recorded before.

    path: the file with the highest version of each recipe's program; it is removed when this device is enrolled again.
    """
    # Treating a damaged file as empty would accept every old program.
    damaged = Untrusted(f"{path} cannot be read; enroll this device again")
    versions = (read_document(path, _Versions, damaged) or _Versions({})).root
    highest = versions.get(manifest.recipe_id, 0)
    if manifest.version < highest:
        raise Untrusted(
            f"the program is version {manifest.version} of recipe {manifest.recipe_id[:12]}, but this device has "
            f"seen version {highest}: an old program has replaced the new one; if the server was rolled back on "
            f"purpose, enroll this device again"
        )
    if manifest.version > highest:
        write_document(path, _Versions(versions | {manifest.recipe_id: manifest.version}))


def verify_program(lease: Lease, key: Ed25519PublicKey, versions: Path) -> ProgramManifest:
    """Returns the verified manifest of the lease's program. Raises Untrusted if any check fails.

    versions: the file of `check_rollback`.
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
    check_rollback(versions, manifest)
    return manifest


def verify_start(lease: Lease, program: ProgramManifest, keys: Sequence[Ed25519PublicKey]) -> AdapterManifest | None:
    """Returns the manifest of the version that the job begins with; None for B = 0, and if the device chooses.

    keys: the server's current and former keys. Raises StartDeleted, or Untrusted if the version is not the job's or
    does not fit the program.
    """
    requested = lease.job.request.start
    if not isinstance(requested, JobStart) and lease.start is None:
        return None
    if lease.start is None:
        raise StartDeleted
    start = verify_version(lease.start, program, keys)
    if not isinstance(requested, JobStart) or (start.adapter, start.revision) != (
        requested.adapter,
        requested.revision,
    ):
        raise Untrusted("the adapter that came with the job is not the one that the job starts from")
    return start


def verify_version(
    signed: SignedAdapter, program: ProgramManifest, keys: Sequence[Ed25519PublicKey]
) -> AdapterManifest:
    """Returns the manifest of an adapter version. Raises Untrusted unless one of the keys signed it and its B fits the
    program.
    """
    adapter = verify_adapter(signed, choose_key(signed.key_id, keys))
    check_fit(adapter, program)
    return adapter


def check_fit(adapter: AdapterManifest, program: ProgramManifest) -> None:
    """Raises Untrusted unless an adapter version's B fits the program."""
    for name, actual, required in (
        ("base model", adapter.base.sha256, program.recipe.base.sha256),
        ("frozen A", adapter.a_sha256, program.a_sha256),
        ("D", adapter.size_d, program.size),
    ):
        if actual != required:
            raise Untrusted(f"adapter {adapter.adapter!r} has {name} {actual}, but its program requires {required}")
