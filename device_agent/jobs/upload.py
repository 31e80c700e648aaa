"""Uploads a finished run: B to the server and to this device's adapter store.

If the job asks for the trajectory and the owner consents, it is uploaded in addition to B or instead of it. The run of
a federated round is an update and is not stored as an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import structlog

from device_agent.durable import describe_error
from device_agent.errors import PolicyForbids
from device_agent.inference.adapter_store import AdapterStore
from device_agent.jobs.lease_and_policy import Answer, PolicyGatedRun
from device_agent.protocol.client import Backoff, DeviceClient
from device_agent.training.run_directory import RunDirectory
from shared.canonical import sha256_hex
from shared.errors import (
    DigestMismatch,
    Gone,
    InvalidTrajectory,
    MobizoError,
    NotFound,
    NotReplayable,
    QuotaExceeded,
    TooLarge,
    TooManyRequests,
    TooSlow,
    TrajectoryMismatch,
    Unavailable,
)
from shared.federation.cohort import RoundReceipt
from shared.job import Progress, TrajectoryUpload
from shared.protocol import AdapterVersion, Completion, Lease
from shared.result import Result
from shared.zo.trajectory import parse_trajectory

UploadForm = Literal["weights", "trajectory", "both", "masked"]

PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 120.0
# What passes, or what the server's administrator can change: a run of hours must not be lost by it.
RETRIED = (DigestMismatch, QuotaExceeded, TooManyRequests, TooSlow, Unavailable)

_log = structlog.get_logger()


@dataclass(frozen=True)
class UploadSummary:
    """The result of an upload. bytes: size of the accepted bodies, without headers and failed attempts."""

    form: UploadForm
    bytes: int


def until_answered(call: Callable[[], Answer], policy_run: PolicyGatedRun, gone: str) -> Answer:
    """Returns what `call` returns, which is repeated while it raises RETRIED.

    Raises Stopped if the job must stop, Gone, which explains it by `gone`, if the server no longer accepts the job,
    PolicyForbids if the rules forbid the network for too long.
    """
    pauses = Backoff(PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
    while True:
        policy_run.check()
        try:
            return policy_run.transfer(lambda _progress: call())
        except PolicyForbids:
            raise
        except (Gone, NotFound) as error:
            refused = f"the job is trained, but the server no longer accepts it from this device ({error.detail})"
            raise Gone(f"{refused}: {gone}") from error
        except RETRIED as error:
            pause = pauses.pause()
            _log.warning("upload failed; retried", detail=error.detail, next_try_seconds=round(pause, 1))
            policy_run.wait(pause)


@dataclass(frozen=True)
class Upload:
    """The upload of one run. trajectory: how much of the trajectory is uploaded."""

    client: DeviceClient
    lease: Lease
    run: RunDirectory
    store: AdapterStore
    trajectory: TrajectoryUpload = "none"

    def send(self, policy_run: PolicyGatedRun, result: Result) -> UploadSummary:
        """Uploads the selected B and completes the job; retries until the server accepts or refuses it. Repeated
        uploads count once.

        Raises Gone if the server no longer accepts it, PolicyForbids if the rules forbid the network for too long.
        """
        policy_run.report(Progress(phase="uploading", step=result.steps, steps=result.steps))
        data = self.run.best.read_bytes()
        likely = "another device has leased it" if self.lease.round is None else "its round has ended"
        gone = f"most likely {likely}; the result stays in {self.run.path} until newer runs replace it"
        return until_answered(lambda: self._send_once(data, result), policy_run, gone)

    def _send_once(self, data: bytes, result: Result) -> UploadSummary:
        trajectory = self._trajectory()
        if trajectory is not None:
            try:
                return self._send_both(trajectory, data, result)
            except (InvalidTrajectory, TrajectoryMismatch, TooLarge) as error:
                _log.warning("the server rejects the trajectory; only the adapter is uploaded", detail=error.detail)
        self.client.upload(self.lease.id, data)
        # Stored before the job is completed: after a kill in between, the job would not be leased again.
        self._store(data)
        return self._end(UploadSummary("weights", len(data)), data, result)

    def _send_both(self, trajectory: bytes, data: bytes, result: Result) -> UploadSummary:
        """Uploads the trajectory, and B unless the server can replay it."""
        self.client.upload_trajectory(self.lease.id, trajectory)
        instead = self.trajectory == "instead" and (self.lease.round is not None or len(trajectory) < len(data))
        if not instead:
            self.client.upload(self.lease.id, data)
        self._store(data)
        if instead:
            with suppress(NotReplayable):
                return self._end(UploadSummary("trajectory", len(trajectory)), data, result, trajectory)
            self.client.upload(self.lease.id, data)
        return self._end(UploadSummary("both", len(trajectory) + len(data)), data, result, trajectory)

    def _end(
        self, summary: UploadSummary, data: bytes, result: Result, trajectory: bytes | None = None
    ) -> UploadSummary:
        """Completes the job with the uploaded hashes, and returns the summary."""
        replayed = None if trajectory is None else sha256_hex(trajectory)
        body = Completion(adapter_sha256=sha256_hex(data), result=result, trajectory_sha256=replayed)
        if self.lease.round is not None:
            receipt = self.client.complete(RoundReceipt, self.lease.id, body)
            facts = {"cohort": receipt.cohort, "round": receipt.round, "updates": receipt.updates}
            _log.info("update accepted", **facts, form=summary.form, bytes=summary.bytes)
            return summary
        version = self.client.complete(AdapterVersion, self.lease.id, body)
        _log.info(
            "adapter stored",
            adapter=version.adapter,
            version=version.version,
            bytes=version.size,
            verified=version.verified,
        )
        return summary

    def _trajectory(self) -> bytes | None:
        """Returns the trajectory's complete frames, or None."""
        if self.trajectory == "none" or not self.run.trajectory.exists():
            return None
        data = self.run.trajectory.read_bytes()
        return data[: parse_trajectory(data)[1]]

    def _store(self, data: bytes) -> None:
        """Adds the adapter to this device's adapter store; a failure is only logged."""
        job = self.lease.job
        if self.lease.round is not None:
            return
        try:
            self.store.add(job.request.adapter, data, self.lease.manifest, job.task, job.id)
        except (MobizoError, OSError) as error:
            reason = describe_error(error)
            _log.warning("the adapter could not be stored on this device", adapter=job.request.adapter, detail=reason)
