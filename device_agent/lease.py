"""Keeping a lease alive from a thread of its own while the job runs. Knows no training and no file."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from types import TracebackType

import structlog

from device_agent.client import DeviceClient
from shared.errors import Gone, MobizoError, NotFound
from shared.job import Progress
from shared.protocol import Lease, LeaseState

# Seconds between heartbeats. The shortest is for clocks of server and device that disagree; the longest, for
# people who watch the progress and for a cancelled job to be noticed soon.
SHORTEST, LONGEST = 0.2, 5.0
JOIN_SECONDS = 2.0

_log = structlog.get_logger()


class LeaseKeeper:
    """Sends a heartbeat every quarter of the lease's time or sooner; an unreachable server does not disturb the run."""

    def __init__(self, client: DeviceClient, lease: Lease) -> None:
        self._client, self._lease = client, lease
        self._interval = _interval(lease.expires_at)
        self._progress = Progress(phase="downloading")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self.lost = threading.Event()
        self.cancelled = threading.Event()

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(JOIN_SECONDS)

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to train for: the lease was lost or the job cancelled."""
        return self.lost.is_set() or self.cancelled.is_set()

    def tell(self, progress: Progress) -> None:
        """What the next heartbeat says."""
        self._progress = progress

    def _keep(self) -> None:
        while True:
            try:
                self._heard(self._client.heartbeat(self._lease.id, self._progress))
            except (Gone, NotFound) as error:
                _log.warning("lease lost", job=self._lease.job.id, detail=error.detail)
                self.lost.set()
            except MobizoError as error:
                _log.warning("heartbeat failed; training goes on", detail=error.detail)
            if self.ended or self._done.wait(self._interval):
                return

    def _heard(self, state: LeaseState) -> None:
        self._interval = _interval(state.expires_at)
        if state.stop:
            self.cancelled.set()


def _interval(expires_at: datetime) -> float:
    """Seconds between heartbeats: a quarter of what is left of the lease, within bounds."""
    left = (expires_at - datetime.now(UTC)).total_seconds()
    return min(max(left / 4, SHORTEST), LONGEST)
