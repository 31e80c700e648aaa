"""Handing a finished run in: its B to the server, and onto this device's own shelf. Knows no training.

Where the job asks for the trajectory and the owner lets it go, that goes beside B or instead; a server that does not
take it gets B alone. A run of a cohort's round is an update there and no adapter, so the shelf does not get it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog

from device_agent.adapters import AdapterShelf
from device_agent.backoff import Backoff
from device_agent.client import DeviceClient
from device_agent.conduct import Conduct
from device_agent.errors import NotNow, os_words
from device_agent.journal import RunDirectory
from shared.canonical import sha256_hex
from shared.errors import (
    Gone,
    InvalidTrajectory,
    MobizoError,
    NotFound,
    NotReplayable,
    TooLarge,
    TrajectoryMismatch,
    Unavailable,
)
from shared.job import History, Progress, Result
from shared.protocol import Lease
from shared.trajectory import parse_trajectory

SentForm = Literal["weights", "trajectory", "both", "masked"]

PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 120.0

_log = structlog.get_logger()


@dataclass(frozen=True)
class Sent:
    """What the server took of a run. bytes: of the bodies, without headers and what was sent in vain."""

    form: SentForm
    bytes: int


@dataclass(frozen=True)
class HandOver:
    """One run and where it goes.

    check: raises if there is nothing left to work for. wait: sleeps that many seconds, less if the daemon is to stop.
    history: what is sent of the trajectory; the owner has allowed it.
    """

    client: DeviceClient
    lease: Lease
    run: RunDirectory
    shelf: AdapterShelf
    check: Callable[[], None]
    wait: Callable[[float], bool]
    history: History = "none"

    def send(self, conduct: Conduct, result: Result) -> Sent:
        """Sends the B that is handed in, however long the server takes to be there again; sent twice, it counts once.

        Raises Gone when the server takes it no more, NotNow when the rules keep it off the network for too long.
        """
        conduct.tell(Progress(phase="uploading", step=result.steps, steps=result.steps))
        data = self.run.best.read_bytes()
        pauses = Backoff(PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while True:
            self.check()
            try:
                return conduct.transfer(lambda _progress: self._send_once(data, result))
            except NotNow:
                raise
            except (Gone, NotFound) as error:
                likely = "another device has it by now" if self.lease.round is None else "its round has ended"
                raise Gone(
                    f"the job is trained, but the server takes it from this device no more ({error.detail}): most "
                    f"likely {likely}; the result stays in {self.run.path} until newer runs need the room"
                ) from error
            except Unavailable as error:
                pause = pauses.pause()
                _log.warning("upload failed; tried again", detail=error.detail, next_try_seconds=round(pause, 1))
                self.wait(pause)

    def _send_once(self, data: bytes, result: Result) -> Sent:
        ledger = self._ledger()
        if ledger is not None:
            try:
                return self._send_both(ledger, data, result)
            except (InvalidTrajectory, TrajectoryMismatch, TooLarge) as error:
                _log.warning("the server does not take the trajectory; the adapter goes alone", detail=error.detail)
        self.client.upload(self.lease.id, data)
        # Before the job ends, so that no kill can come between: nobody would hand the job out again.
        self._keep(data)
        sent = Sent("weights", len(data))
        self._end(sent, data, result)
        return sent

    def _send_both(self, ledger: bytes, data: bytes, result: Result) -> Sent:
        """Sends the trajectory, and the adapter unless the server may make it of that."""
        self.client.upload_trajectory(self.lease.id, ledger)
        instead = self.history == "instead" and (self.lease.round is not None or len(ledger) < len(data))
        if not instead:
            self.client.upload(self.lease.id, data)
        self._keep(data)
        if instead:
            sent = Sent("trajectory", len(ledger))
            try:
                self._end(sent, data, result, ledger)
            except NotReplayable:
                self.client.upload(self.lease.id, data)
            else:
                return sent
        sent = Sent("both", len(ledger) + len(data))
        self._end(sent, data, result, ledger)
        return sent

    def _end(self, sent: Sent, data: bytes, result: Result, ledger: bytes | None = None) -> None:
        """Ends the job with what was sent."""
        hashes = sha256_hex(data), None if ledger is None else sha256_hex(ledger)
        if self.lease.round is not None:
            receipt = self.client.complete_round(self.lease.id, hashes[0], result, hashes[1])
            facts = {"cohort": receipt.cohort, "round": receipt.round, "updates": receipt.updates}
            _log.info("update counts", **facts, form=sent.form, bytes=sent.bytes)
            return
        version = self.client.complete(self.lease.id, hashes[0], result, hashes[1])
        _log.info(
            "adapter stored",
            adapter=version.adapter,
            version=version.version,
            bytes=version.size,
            verified=version.verified,
        )

    def _ledger(self) -> bytes | None:
        """The trajectory's whole frames, if it is to be sent."""
        if self.history == "none":
            return None
        try:
            data = self.run.ledger.read_bytes()
        except FileNotFoundError:
            return None
        return data[: parse_trajectory(data)[1]]

    def _keep(self, data: bytes) -> None:
        """Puts the adapter on this device's own shelf; the job does not depend on it."""
        job = self.lease.job
        if self.lease.round is not None:
            return
        try:
            self.shelf.keep(job.request.adapter, data, self.lease.manifest, job.task, job.id)
        except (MobizoError, OSError) as error:
            words = os_words(error) if isinstance(error, OSError) else error.detail
            _log.warning("the adapter is not kept for use on this device", adapter=job.request.adapter, detail=words)
