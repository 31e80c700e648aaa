"""Making LoRA-B files of trajectories: the one that a version was published with, or B after any earlier step.

What is made is put into the store, where nothing names it: the collector removes it when nobody has asked for it in a
while, and it is made again, and held against the hash of the first time, when somebody does. Knows no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from server.adapters.models import Adapter, StoredVersion
from server.artifacts.store import ArtifactStore, Damaged
from server.clock import utc_now
from server.db.database import Database
from server.history.models import MaterialisedStep, StoredTrajectory
from server.history.repository import HistoryRepository
from server.history.turns import turn
from shared.canonical import sha256_hex
from shared.errors import NotFound, NotReplayable
from shared.ledger import read_ledger
from shared.lora import F32, adapter_file, load_adapter, split_adapter
from shared.replay import replay
from shared.trajectory import TrajectoryHeader

RENEWED = timedelta(minutes=30)  # age from which what is asked for is made young again, lest it be removed meanwhile


def b_file(database: Database, artifacts: ArtifactStore, version: StoredVersion) -> str:
    """The sha256 of a version's LoRA-B file, which is in the store when this returns.

    Everyone who reads that file asks here first. Raises Damaged if it cannot be made again, or Unavailable.
    """
    if not version.by_ledger or _is_there(artifacts, version.sha256):
        return version.sha256
    with turn():
        # Who had the turn before may have made it.
        if not _is_there(artifacts, version.sha256):
            with database.reading() as session:
                stored = HistoryRepository(session).of_version(version)
                session.expunge_all()
            if stored is None:
                raise Damaged(f"the trajectory of the LoRA-B file {version.sha256} is gone; restore it from a backup")
            flat = _flat(artifacts, stored, np.zeros(version.size_d, np.float32), version.result.best_step)
            _put(artifacts, stored.head, flat, version.sha256)
    return version.sha256


def start_of(database: Database, artifacts: ArtifactStore, tenant: str, header: TrajectoryHeader) -> F32:
    """The B that a run started from, float32 (D,). Raises NotReplayable if the version that had it is gone."""
    if header.start_sha256 is None:
        return np.zeros(header.size, np.float32)
    with database.reading() as session:
        version = HistoryRepository(session).with_b(tenant, header.start_sha256)
        session.expunge_all()
    if version is None:
        raise NotReplayable(f"the run started from the LoRA-B file {header.start_sha256}, which is gone")
    return load_adapter(artifacts.read(b_file(database, artifacts, version)), header.size)


@dataclass(frozen=True)
class StepService:
    """B as it was after any step of a verified run."""

    database: Database
    artifacts: ArtifactStore

    def file(self, tenant: str, adapter: Adapter, version: StoredVersion, step: int) -> str:
        """The sha256 of the adapter file of B after `step` steps, which is in the store when this returns.

        Raises NotReplayable, NotFound if the run has fewer steps, Damaged or Unavailable.
        """
        with self.database.reading() as session:
            history = HistoryRepository(session)
            stored, made = history.of_version(version), history.step(version, step)
            session.expunge_all()
        if stored is None or not version.verified or version.job_id is None:
            raise NotReplayable
        if step > stored.steps:
            raise NotFound(f"the run of adapter {adapter.name!r}, version {version.version}, has {stored.steps} steps")
        if step == version.result.best_step:
            return b_file(self.database, self.artifacts, version)
        if made is not None and _is_there(self.artifacts, made.sha256):
            return made.sha256
        start = start_of(self.database, self.artifacts, tenant, read_ledger(self.artifacts.read(stored.sha256)).header)
        with turn():
            flat = _flat(self.artifacts, stored, start, step)
            if made is not None:
                return _put(self.artifacts, made.head, flat, made.sha256)
            data = adapter_file(
                flat, job_id=version.job_id, recipe_id=version.recipe_id, a_sha256=version.a_sha256, step=step
            )
            return self._note(version, step, data)

    def _note(self, version: StoredVersion, step: int, data: bytes) -> str:
        """Stores the file of B after a step, and what it is from now on."""
        head, _ = split_adapter(data, version.size_d)
        sha256 = self.artifacts.put(data)
        with self.database.writing() as session:
            history = HistoryRepository(session)
            if history.step(version, step) is None:
                history.add(MaterialisedStep(version_number=version.number, step=step, sha256=sha256, head=head))
        return sha256


def _flat(artifacts: ArtifactStore, stored: StoredTrajectory, start: F32, steps: int) -> F32:
    return replay(read_ledger(artifacts.read(stored.sha256)), start, steps)


def _put(artifacts: ArtifactStore, head: bytes, flat: F32, sha256: str) -> str:
    """Stores a file that was there before. Raises Damaged if it is another now."""
    data = head + flat.astype("<f4").tobytes()
    if sha256_hex(data) != sha256:
        raise Damaged(f"what a trajectory yields is not the LoRA-B file {sha256} any more; restore it from a backup")
    return artifacts.put(data)


def _is_there(artifacts: ArtifactStore, sha256: str) -> bool:
    """Whether the store has a file, which then stays for a while."""
    stored_at = artifacts.stored_at(sha256)
    if stored_at is None:
        return False
    if stored_at < utc_now() - RENEWED:
        try:
            artifacts.put(artifacts.read(sha256))
        except (NotFound, Damaged):
            return False
    return True
