"""Shows the trajectory of a version."""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.registry.repository import resolve
from server.registry.trajectories.repository import TrajectoryRepository
from shared.errors import NotFound
from shared.protocol import TrajectoryView


class TrajectoryService:
    """Trajectories in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def view(self, tenant: str, name: str, version: int) -> TrajectoryView:
        """Returns the trajectory of a version. Raises AdapterNotFound, RevisionNotFound or NotFound."""
        adapter, stored = resolve(self._session, tenant, name, f"v{version}")
        found = TrajectoryRepository(self._session).of_version(stored)
        if found is None:
            raise NotFound(f"version {version} of adapter {name!r} came without a trajectory")
        return TrajectoryView(
            adapter=adapter.name,
            version=stored.version,
            sha256=found.sha256,
            size=found.size,
            steps=found.steps,
            verified=stored.verified,
            instead=stored.from_trajectory,
            start_sha256=found.start_sha256,
        )
