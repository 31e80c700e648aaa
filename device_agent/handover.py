"""Handing a finished run in: its B to the server, and onto this device's own shelf. Knows no training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from device_agent.adapters import AdapterShelf
from device_agent.backoff import Backoff
from device_agent.client import DeviceClient
from device_agent.conduct import Conduct
from device_agent.errors import NotNow, os_words
from device_agent.journal import RunDirectory
from shared.canonical import sha256_hex
from shared.errors import Gone, MobizoError, NotFound, Unavailable
from shared.job import Progress, Result
from shared.protocol import Lease

PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 120.0

_log = structlog.get_logger()


@dataclass(frozen=True)
class HandOver:
    """One run and where it goes.

    check: raises if there is nothing left to work for. wait: sleeps that many seconds, less if the daemon is to stop.
    """

    client: DeviceClient
    lease: Lease
    run: RunDirectory
    shelf: AdapterShelf
    check: Callable[[], None]
    wait: Callable[[float], bool]

    def send(self, conduct: Conduct, result: Result) -> None:
        """Sends the best B, however long the server takes to be there again; sent twice, it counts once.

        Raises Gone when the server takes it no more, NotNow when the rules keep it off the network for too long.
        """
        conduct.tell(Progress(phase="uploading", step=result.steps, steps=result.steps))
        data = self.run.best.read_bytes()
        pauses = Backoff(PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while True:
            self.check()
            try:
                conduct.transfer(lambda _progress: self._send_once(data, result))
            except NotNow:
                raise
            except (Gone, NotFound) as error:
                raise Gone(
                    f"the job is trained, but the server takes it from this device no more ({error.detail}): most "
                    f"likely another device has it by now; the result stays in {self.run.path} until newer runs "
                    f"need the room"
                ) from error
            except Unavailable as error:
                pause = pauses.pause()
                _log.warning("upload failed; tried again", detail=error.detail, next_try_seconds=round(pause, 1))
                self.wait(pause)
            else:
                return

    def _send_once(self, data: bytes, result: Result) -> None:
        self.client.upload(self.lease.id, data)
        # Before the job ends, so that no kill can come between: nobody would hand the job out again.
        self._keep(data)
        version = self.client.complete(self.lease.id, sha256_hex(data), result)
        _log.info("adapter stored", adapter=version.adapter, version=version.version, bytes=len(data))

    def _keep(self, data: bytes) -> None:
        """Puts the adapter on this device's own shelf; the job does not depend on it."""
        job = self.lease.job
        try:
            self.shelf.keep(job.request.adapter, data, self.lease.manifest, job.task, job.id)
        except (MobizoError, OSError) as error:
            words = os_words(error) if isinstance(error, OSError) else error.detail
            _log.warning("the adapter is not kept for use on this device", adapter=job.request.adapter, detail=words)
