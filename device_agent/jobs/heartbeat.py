"""Keeps the lease of a job alive while the job runs, from a thread of its own."""

from __future__ import annotations

import threading
from types import TracebackType

import structlog

from device_agent.protocol.client import Backoff, DeviceClient
from shared.errors import Gone, MobizoError, NotFound, Unauthorized
from shared.job import Progress
from shared.protocol import Lease, LeaseState

# Seconds between heartbeats. The longest keeps the shown progress current and notices a cancelled job soon; the
# shortest prevents a flood of requests if the server states an invalid expiry.
SHORTEST_SECONDS, LONGEST_SECONDS = 0.2, 5.0
LONGEST_RETRY_SECONDS = 60.0  # between attempts while the server does not answer
JOIN_SECONDS = 2.0

_log = structlog.get_logger()


class LeaseHeartbeat:
    """Sends heartbeats at a quarter of the lease's duration or more often; an unreachable server does not interrupt
    the run.

    Events: `lost` (the lease has ended), `refused` (the server refuses this device), `cancelled` (the job was
    cancelled).
    """

    def __init__(self, client: DeviceClient, lease: Lease) -> None:
        self._client, self._lease = client, lease
        # The server's clock, because this device's clock may be hours off.
        self._interval = interval(client.clock.seconds_until(lease.expires_at))
        self._retry = Backoff(self._interval, LONGEST_RETRY_SECONDS)
        self._unreachable = False
        self._progress = Progress(phase="downloading")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self.lost = threading.Event()
        self.refused = threading.Event()
        self.cancelled = threading.Event()

    def __enter__(self) -> LeaseHeartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(JOIN_SECONDS)

    @property
    def ended(self) -> bool:
        """Whether the job must stop."""
        return self.lost.is_set() or self.refused.is_set() or self.cancelled.is_set()

    def report(self, progress: Progress) -> None:
        """Sets the progress that the next heartbeat reports."""
        self._progress = progress

    def _run(self) -> None:
        while True:
            pause = self._send()
            if self.ended or self._done.wait(pause):
                return

    def _send(self) -> float:
        """Sends one heartbeat; returns the seconds until the next one."""
        try:
            self._apply_state(self._client.heartbeat(self._lease.id, self._progress))
        except Unauthorized as error:
            _log.warning("the server refuses this device", detail=error.detail)
            self.refused.set()
        except (Gone, NotFound) as error:
            _log.warning("lease lost", job=self._lease.job.id, detail=error.detail)
            self.lost.set()
        except MobizoError as error:
            # Log an unreachable server once, not at every attempt.
            if not self._unreachable:
                _log.warning("heartbeat failed; training continues", detail=error.detail)
            self._unreachable = True
            return self._retry.pause()
        return self._interval

    def _apply_state(self, state: LeaseState) -> None:
        if self._unreachable:
            _log.info("the server answers again")
        self._unreachable = False
        self._interval = interval(self._client.clock.seconds_until(state.expires_at))
        self._retry = Backoff(self._interval, LONGEST_RETRY_SECONDS)
        if state.stop:
            self.cancelled.set()


def interval(left: float) -> float:
    """Returns the seconds between heartbeats for a lease that expires in `left` seconds: a quarter, within bounds."""
    return min(max(left / 4, SHORTEST_SECONDS), LONGEST_SECONDS)
