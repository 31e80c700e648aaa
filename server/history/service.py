"""What is known of a version's trajectory. Knows no HTTP and no files."""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.adapters.resolution import resolve
from server.history.repository import HistoryRepository
from shared.errors import NotFound
from shared.protocol import TrajectoryView


class HistoryService:
    """Trajectories in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def view(self, tenant: str, name: str, version: int) -> TrajectoryView:
        """The trajectory that came with a version. Raises AdapterNotFound, RevisionNotFound or NotFound."""
        adapter, stored = resolve(self._session, tenant, name, f"v{version}")
        found = HistoryRepository(self._session).of_version(stored)
        if found is None:
            raise NotFound(f"version {version} of adapter {name!r} came without a trajectory")
        return TrajectoryView(
            adapter=adapter.name,
            version=stored.version,
            sha256=found.sha256,
            size=found.size,
            steps=found.steps,
            verified=stored.verified,
            instead=stored.by_ledger,
            start_sha256=found.start_sha256,
        )
