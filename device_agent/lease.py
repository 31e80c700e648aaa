"""Keeping a lease alive from a thread of its own while the job runs. Knows no training and no file."""

from __future__ import annotations

import threading
from types import TracebackType

import structlog

from device_agent.backoff import Backoff
from device_agent.client import DeviceClient
from shared.errors import Gone, MobizoError, NotFound, Unauthorized
from shared.job import Progress
from shared.protocol import Lease, LeaseState

# Seconds between heartbeats. The longest is for people who watch the progress, and for a cancelled job to be noticed
# soon; the shortest keeps a server's odd answer from making a flood.
SHORTEST, LONGEST = 0.2, 5.0
LONGEST_AWAY = 60.0  # between tries while the server does not answer
JOIN_SECONDS = 2.0

_log = structlog.get_logger()


class LeaseKeeper:
    """Sends a heartbeat every quarter of the lease's time or sooner; an unreachable server does not disturb the run.

    Set for whoever asks: `lost` when the lease is another's or over, `refused` when the server knows this device no
    more, `cancelled` when the job was.
    """

    def __init__(self, client: DeviceClient, lease: Lease) -> None:
        self._client, self._lease = client, lease
        # By the server's own clock: this device's may be hours off.
        self._interval = interval(client.clock.left(lease.expires_at))
        self._away = Backoff(self._interval, LONGEST_AWAY)
        self._silent = False
        self._progress = Progress(phase="downloading")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self.lost = threading.Event()
        self.refused = threading.Event()
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
        """Whether there is nothing left to train for."""
        return self.lost.is_set() or self.refused.is_set() or self.cancelled.is_set()

    def tell(self, progress: Progress) -> None:
        """What the next heartbeat says."""
        self._progress = progress

    def _keep(self) -> None:
        while True:
            pause = self._beat()
            if self.ended or self._done.wait(pause):
                return

    def _beat(self) -> float:
        """One heartbeat; seconds until the next."""
        try:
            self._heard(self._client.heartbeat(self._lease.id, self._progress))
        except Unauthorized as error:
            _log.warning("the server does not know this device any more", detail=error.detail)
            self.refused.set()
        except (Gone, NotFound) as error:
            _log.warning("lease lost", job=self._lease.job.id, detail=error.detail)
            self.lost.set()
        except MobizoError as error:
            # A server that is away for days is worth one line, not one per try.
            if not self._silent:
                _log.warning("heartbeat failed; training goes on", detail=error.detail)
            self._silent = True
            return self._away.pause()
        return self._interval

    def _heard(self, state: LeaseState) -> None:
        if self._silent:
            _log.info("the server answers again")
        self._silent = False
        self._interval = interval(self._client.clock.left(state.expires_at))
        self._away = Backoff(self._interval, LONGEST_AWAY)
        if state.stop:
            self.cancelled.set()


def interval(left: float) -> float:
    """Seconds between heartbeats of a lease that has `left` seconds: a quarter of them, within bounds."""
    return min(max(left / 4, SHORTEST), LONGEST)
