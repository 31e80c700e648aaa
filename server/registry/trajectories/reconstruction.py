"""Rebuilds the published LoRA-B file of a version from its trajectory.

Rebuilt files are stored without a reference: garbage collection removes a file that was not requested for a while, and
the next request rebuilds it and checks it against its first hash.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np

from server.database.columns import utc_now
from server.database.database import Database
from server.registry.models import StoredVersion
from server.registry.repository import AdapterRepository
from server.registry.trajectories.service import trajectory_of
from server.storage.store import ArtifactStore, Damaged
from shared.canonical import sha256_hex
from shared.errors import NotFound, NotReplayable, Unavailable
from shared.zo.lora import F32, load_adapter
from shared.zo.replay import replay
from shared.zo.trajectory import TrajectoryHeader
from shared.zo.trajectory_reader import read_ledger

RENEWED = timedelta(minutes=30)  # a requested file that is older is stored again, so that it is not collected
REPLAYS = max(1, (os.cpu_count() or 1) // 2)  # in one process
WAITING = 8  # threads that may wait for a slot; the other threads stay free for requests without a replay
WAIT_SECONDS = 30.0

_slots = threading.BoundedSemaphore(REPLAYS)
_admitted: Counter[str] = Counter()  # threads with a slot, or that wait for one, by tenant
_admission = threading.Lock()


def b_file(database: Database, artifacts: ArtifactStore, version: StoredVersion) -> str:
    """Returns the sha256 of a version's LoRA-B file, after making sure that the store has the file.

    Call this before reading the file. Raises Damaged if the file cannot be rebuilt, or Unavailable.
    """
    if not version.from_trajectory or _is_stored(artifacts, version.sha256):
        return version.sha256
    with replay_slot(version.manifest.tenant):
        # Another thread may have rebuilt it in the meantime.
        if not _is_stored(artifacts, version.sha256):
            with database.reading() as session:
                stored = trajectory_of(session, version)
            if stored is None:
                raise Damaged(f"the trajectory of the LoRA-B file {version.sha256} is gone; restore it from a backup")
            ledger, start = read_ledger(artifacts.read(stored.sha256)), np.zeros(version.size_d, np.float32)
            _put(artifacts, stored.head, replay(ledger, start, version.result.best_step), version.sha256)
    return version.sha256


def start_of(database: Database, artifacts: ArtifactStore, tenant: str, header: TrajectoryHeader) -> F32:
    """Returns the B that a run started from, float32 (D,). Raises NotReplayable if its version was purged."""
    if header.start_sha256 is None:
        return np.zeros(header.size, np.float32)
    with database.reading() as session:
        version = AdapterRepository(session).with_b(tenant, header.start_sha256)
    if version is None:
        raise NotReplayable(f"the run started from the LoRA-B file {header.start_sha256}, which is gone")
    return load_adapter(artifacts.read(b_file(database, artifacts, version)), header.size)


def _put(artifacts: ArtifactStore, head: bytes, flat: F32, sha256: str) -> None:
    """Stores a rebuilt file. Raises Damaged if its hash differs from the first one."""
    data = head + flat.astype("<f4").tobytes()
    if sha256_hex(data) != sha256:
        raise Damaged(f"the trajectory no longer yields the LoRA-B file {sha256}; restore it from a backup")
    artifacts.put(data)


def _is_stored(artifacts: ArtifactStore, sha256: str) -> bool:
    """Returns whether the store has a file, and protects the file from garbage collection for a while."""
    stored_at = artifacts.stored_at(sha256)
    if stored_at is None:
        return False
    if stored_at < utc_now() - RENEWED:
        try:
            artifacts.put(artifacts.read(sha256))
        except (NotFound, Damaged):
            return False
    return True


@contextmanager
def replay_slot(tenant: str) -> Iterator[None]:
    """Occupies a slot; blocks its thread. Raises Unavailable if too many threads wait, or this one for too long.

    One tenant may have half of the threads.
    """
    busy = Unavailable("the server is replaying other trajectories; try again in a moment")
    most = REPLAYS + WAITING
    with _admission:
        if _admitted.total() >= most or _admitted[tenant] >= most // 2:
            raise busy
        _admitted[tenant] += 1
    try:
        if not _slots.acquire(timeout=WAIT_SECONDS):
            raise busy
        try:
            yield
        finally:
            _slots.release()
    finally:
        with _admission:
            _admitted[tenant] -= 1
