"""One leased job, from lease to whatever end it takes: check, fetch, train, upload, or say why not.

Every way a job can go wrong ends here, told to the server as far as no data is told. Knows nothing of other jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from device_agent.cache import FileCache
from device_agent.client import DeviceClient
from device_agent.engines import Engine
from device_agent.errors import DoesNotFit
from device_agent.journal import RunDirectory, RunPlan
from device_agent.lease import LeaseKeeper
from device_agent.memory import spare_bytes
from device_agent.messages import Message, describe
from shared.canonical import sha256_hex
from shared.errors import Gone, MobizoError, NotFound, Unavailable, Untrusted
from shared.job import JobError, Progress, Result
from shared.program import ProgramManifest, Role
from shared.protocol import Lease
from shared.signing import verify_manifest

UPLOAD_PAUSE_SECONDS = 2.0
LONGEST_UPLOAD_PAUSE_SECONDS = 120.0

_log = structlog.get_logger()


class Outcome(StrEnum):
    """How one job ended for this device."""

    COMPLETED = "completed"
    FAILED = "failed"  # reported; no device will do better
    RELEASED = "released"  # given back; later, or another device, may do better
    LOST = "lost"  # the lease ended; the journal stays
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"  # the daemon was asked to stop; the journal stays


@dataclass(frozen=True)
class Ended:
    """How a job ended and why, as this device may know it."""

    outcome: Outcome
    detail: str | None = None


class _Halted(Exception):
    """The daemon is asked to stop, or there is no lease to work for any more."""


@dataclass(frozen=True)
class Assignment:
    """A lease and all that it takes to work on it.

    show: told the progress. wait: sleeps that many seconds and says whether the daemon is asked to stop.
    """

    client: DeviceClient
    lease: Lease
    keeper: LeaseKeeper
    key: Ed25519PublicKey
    cache: FileCache
    run: RunDirectory
    dataset: Path
    engine: Engine
    show: Callable[[Progress], None]
    wait: Callable[[float], bool]

    def work(self) -> Ended:
        """Does the job. Raises nothing: whatever happens is an end."""
        try:
            return self._attempt()
        except _Halted:
            return self._halted()
        except (Gone, NotFound) as error:
            return Ended(Outcome.LOST, error.detail)
        except Unavailable as error:
            return self._release(error.detail)
        except MobizoError as error:
            return self._fail(describe(error))
        except OSError as error:
            return self._release(f"{type(error).__name__}: {error}")
        except Exception as error:
            _log.exception("a job broke the agent")
            # Only the kind of error leaves the device: its text could quote data.
            reason = JobError(code=MobizoError.code, detail=f"the agent failed with {type(error).__name__}")
            return self._fail(Message(error=reason, detail=str(error)))

    def _attempt(self) -> Ended:
        manifest = verify_manifest(self.lease.manifest, self.key)
        if manifest.recipe != self.lease.job.recipe:
            raise Untrusted("the program that came with the job is not of the job's recipe")
        result = self.run.result()
        if result is None:
            self.run.begin(self._prepare(manifest))
            message = self.engine.train(self.run, self._tell, self._over)
            if message.error is not None:
                return self._fail(message)
            if message.result is None:
                raise _Halted
            result = message.result
        return self._upload(result)

    def _prepare(self, manifest: ProgramManifest) -> RunPlan:
        """Everything the training process needs, on this disk, and room for it."""
        self._tell(Progress(phase="downloading", steps=self.lease.job.request.training.steps))
        self.cache.reserve(manifest.training_files)
        check_memory(manifest)
        paths: dict[Role, Path] = {}
        for file in manifest.training_files:
            paths[file.role] = self.cache.fetch(self.client, file, lambda _arrived, _size: self._check())
        self._check()
        return RunPlan(
            job_id=self.lease.job.id,
            task=self.lease.job.task,
            training=self.lease.job.request.training,
            manifest=manifest,
            dataset=self.dataset,
            program=paths["program"],
            weights=paths["weights"],
            tokenizer=paths["tokenizer"],
        )

    def _upload(self, result: Result) -> Ended:
        """Hands the best B in, however long the server takes to be there again. Raises Gone when it refuses."""
        self._tell(Progress(phase="uploading", step=result.steps, steps=result.steps))
        data = self.run.best.read_bytes()
        pause = UPLOAD_PAUSE_SECONDS
        while True:
            self._check()
            try:
                self.client.upload(self.lease.id, data)
                version = self.client.complete(self.lease.id, sha256_hex(data), result)
            except Unavailable as error:
                _log.warning("upload failed; tried again", detail=error.detail, next_try_seconds=pause)
                self.wait(pause)
                pause = min(pause * 2, LONGEST_UPLOAD_PAUSE_SECONDS)
            else:
                _log.info("adapter stored", adapter=version.adapter, version=version.version, bytes=len(data))
                return Ended(Outcome.COMPLETED)

    def _tell(self, progress: Progress) -> None:
        self.keeper.tell(progress)
        self.show(progress)

    def _over(self) -> bool:
        return self.keeper.ended or self.wait(0)

    def _check(self) -> None:
        if self._over():
            raise _Halted

    def _halted(self) -> Ended:
        if self.keeper.cancelled.is_set():
            self.run.remove()
            return Ended(Outcome.CANCELLED)
        if self.keeper.lost.is_set():
            return Ended(Outcome.LOST, "the lease has ended; the run goes on if the job comes back")
        return Ended(Outcome.INTERRUPTED)

    def _fail(self, message: Message) -> Ended:
        """Reports a job that cannot be trained."""
        reason = message.error or JobError(code=MobizoError.code, detail="no reason given")
        self._say(lambda: self.client.fail(self.lease.id, reason))
        return Ended(Outcome.FAILED, message.detail or reason.detail)

    def _release(self, detail: str) -> Ended:
        """Gives a job back that cannot be trained now."""
        self._say(lambda: self.client.release(self.lease.id))
        return Ended(Outcome.RELEASED, detail)

    def _say(self, call: Callable[[], object]) -> None:
        try:
            call()
        except MobizoError as error:
            # The lease runs out by itself; there is nothing better to do.
            _log.warning("the server was not told", detail=error.detail)


def check_memory(manifest: ProgramManifest) -> None:
    """Raises DoesNotFit unless weights and planned memory fit what is available now."""
    needed = manifest.file("weights").size + manifest.planned_bytes
    available = spare_bytes()
    if needed > available:
        raise DoesNotFit(
            f"the program needs {needed / 1e6:.0f} MB of memory for weights and activations, "
            f"but {available / 1e6:.0f} MB are available; stop something and the job is tried again"
        )
