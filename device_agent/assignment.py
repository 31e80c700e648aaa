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
from pydantic import ValidationError

from device_agent.adapters import AdapterShelf
from device_agent.admission import admit, check_memory
from device_agent.cache import FileCache
from device_agent.client import DeviceClient
from device_agent.conduct import Conduct, Halted
from device_agent.engines import Engine
from device_agent.errors import DoesNotFit, NotNow, TooLittleMemory, os_words
from device_agent.guard import Guard
from device_agent.handover import HandOver, Sent
from device_agent.journal import RunDirectory, RunPlan
from device_agent.lease import LeaseKeeper
from device_agent.masked_handover import MaskedHandOver
from device_agent.messages import describe
from device_agent.rules_file import Consents
from device_agent.seen import SeenVersions
from device_agent.start import admit_start, fetch_start, holds_start
from device_agent.state import Home
from shared.capabilities import may_take_part
from shared.errors import Gone, MaskingOut, MobizoError, NotFound, Unauthorized, Unavailable, Untrusted
from shared.job import History, JobError, Progress, Result
from shared.masking.quiet import quiet_progress
from shared.program import ProgramFile, ProgramManifest
from shared.protocol import Decline, Lease
from shared.transport import ByteProgress

RULES_PAUSE_SECONDS = 300.0  # after a job that the rules did not allow: the server may hand it right back
PASSING = frozenset({Unavailable.code, DoesNotFit.code})  # errors of a training process that another time may not have

_log = structlog.get_logger()


class Outcome(StrEnum):
    """How one job ended for this device."""

    COMPLETED = "completed"
    FAILED = "failed"  # reported; no device will do better
    DECLINED = "declined"  # given back with numbers: it needs more memory than there is
    RELEASED = "released"  # given back; later, or another device, may do better
    LOST = "lost"  # the lease ended; the journal stays
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"  # the daemon was asked to stop; the journal stays


@dataclass(frozen=True)
class Ended:
    """How a job ended and why, as this device may know it. rest: seconds before the next job is worth asking for.

    sent: what the server took of it.
    """

    outcome: Outcome
    detail: str | None = None
    rest: float = 0.0
    sent: Sent | None = None


class _Failed(Exception):
    """The training process said why the run cannot be trained."""

    def __init__(self, reason: JobError, detail: str) -> None:
        """reason: for the server. detail: for this device."""
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Tools:
    """What every assignment of a device works with."""

    keys: tuple[Ed25519PublicKey, ...]  # the server's, then those that handed over to it
    cache: FileCache
    seen: SeenVersions
    shelf: AdapterShelf
    guard: Guard
    engines: Callable[[ProgramManifest], Engine]
    consents: Consents
    home: Home


@dataclass(frozen=True)
class Assignment:
    """A lease and all that it takes to work on it.

    show: told the progress. wait: sleeps that many seconds and says whether the daemon is asked to stop.
    """

    client: DeviceClient
    lease: Lease
    keeper: LeaseKeeper
    tools: Tools
    run: RunDirectory
    dataset: Path
    show: Callable[[Progress], None]
    wait: Callable[[float], bool]

    def work(self) -> Ended:
        """Does the job. Raises nothing: whatever happens is an end."""
        try:
            return self._attempt()
        except Halted:
            return self._halted()
        except Unauthorized as error:
            return self._refused(error.detail)
        except (Gone, NotFound) as error:
            return self._lost(error.detail)
        except TooLittleMemory as error:
            return self._decline(error)
        except (NotNow, MaskingOut) as error:
            return self._release(error.detail, RULES_PAUSE_SECONDS)
        except Unavailable as error:
            return self._release(error.detail)
        except MobizoError as error:
            told = describe(error)
            return self._fail(told.error or JobError(code=error.code, detail=error.detail), error.detail)
        except _Failed as error:
            if error.reason.code in PASSING:
                return self._release(error.detail)
            return self._fail(error.reason, error.detail)
        except OSError as error:
            return self._release(os_words(error))
        except Exception as error:
            _log.exception("a job broke the agent")
            # Only the kind of error leaves the device: its text could quote data.
            reason = JobError(code=MobizoError.code, detail=f"the agent failed with {type(error).__name__}")
            return self._fail(reason, str(error))

    def _attempt(self) -> Ended:
        self._check_leave()
        manifest = admit(self.lease, self.tools.keys[0], self.tools.seen)
        conduct = Conduct(self.tools.guard, self.lease.job.request.rules, self._tell, self._over, self.wait)
        self._forget_another(manifest)
        result = self.run.result()
        if result is None:
            with self.tools.cache.hold(manifest.training_files):
                result = self._train(conduct, manifest)
        try:
            sent = self._handover().send(conduct, result)
        except Gone as error:
            return Ended(Outcome.LOST, error.detail)
        return Ended(Outcome.COMPLETED, sent=sent)

    def _handover(self) -> HandOver | MaskedHandOver:
        """How the run is handed in. What is to be masked is never sent in any other form."""
        if self._masked:
            home, device_id = self.tools.home, self.tools.home.config().device_id
            return MaskedHandOver(self.client, self.lease, self.run, home, device_id, self._check, self.wait)
        shelf = self.tools.shelf
        return HandOver(self.client, self.lease, self.run, shelf, self._check, self.wait, self._history())

    @property
    def _masked(self) -> bool:
        return self.lease.round is not None and self.lease.round.upload == "masked"

    def _check_leave(self) -> None:
        """Raises NotNow unless the owner lets this device take part in the job's round, Untrusted for half a round.

        The server offers no other job; but the owner may have thought better of one that was begun.
        """
        task, named = self.lease.round, self.lease.job.round
        if task is None and named is None:
            return
        # A job may count in a later round than it was made for, where rounds are asynchronous.
        if task is None or named is None or task.cohort != named.cohort or task.number < named.number:
            raise Untrusted("the job and what came with it name different rounds")
        if not may_take_part(self.tools.consents.cohorts, task.cohort):
            raise NotNow(f"this device's rules.toml does not let it take part in cohort {task.cohort!r}")
        least, summed = self.tools.consents.masked_among, 0 if task.masking is None else task.masking.minimum
        if summed < least or (least and task.upload != "masked"):
            raise NotNow(
                f"this device's rules.toml lets its updates go into sums of at least {least} devices alone; round "
                f"{task.number} of cohort {task.cohort!r} {f'sums {summed}' if summed else 'is not masked'}"
            )

    def _history(self) -> History:
        """What is sent of the trajectory. Without the owner's leave B goes alone, which reveals less."""
        if not self.tools.consents.trajectory:
            return "none"
        if self.lease.round is not None:
            return "instead" if self.lease.round.upload == "trajectory" else "none"
        return self.lease.job.request.history

    def _forget_another(self, manifest: ProgramManifest) -> None:
        """Clears away a run of this job by another recipe: the server has put a smaller one in its place meanwhile."""
        try:
            plan = self.run.plan()
        except (FileNotFoundError, ValidationError):
            return
        training = self.lease.job.request.training
        if (plan.manifest.recipe_id, plan.training) != (manifest.recipe_id, training):
            _log.warning("the job has another recipe than its run on this device; it begins anew", job=plan.job_id)
            self.run.remove()

    def _train(self, conduct: Conduct, manifest: ProgramManifest) -> Result:
        conduct.tell(Progress(phase="downloading", steps=self.lease.job.request.training.steps))
        check_memory(manifest, self.tools.guard.spare_bytes(conduct.rules), conduct.rules)
        self.run.begin(self._prepare(conduct, manifest))
        message = conduct.train(self.tools.engines(manifest), self.run, manifest)
        if message.error is not None:
            raise _Failed(message.error, message.detail or message.error.detail)
        if message.result is None:
            raise Halted
        return message.result

    def _prepare(self, conduct: Conduct, manifest: ProgramManifest) -> RunPlan:
        """Everything the training process needs, on this disk."""
        cache = self.tools.cache
        cache.reserve(manifest.training_files)
        start = admit_start(self.lease, manifest, self.tools.keys)
        paths = {file.role: self._fetch(conduct, file) for file in manifest.training_files}
        if start is not None and not holds_start(self.run, start):
            conduct.transfer(lambda progress: fetch_start(self.client, self.lease.id, self.run, start, progress))
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
            start=None if start is None else self.run.start,
            start_sha256=None if start is None else start.sha256,
            round=self.lease.round,
            privacy=self.lease.job.request.privacy,
        )

    def _fetch(self, conduct: Conduct, file: ProgramFile) -> Path:
        def move(progress: ByteProgress | None) -> Path:
            return self.tools.cache.fetch(self.client, file, progress)

        # What is here already needs no network, whatever the rules say of it.
        return move(None) if self.tools.cache.holds(file) else conduct.transfer(move)

    def _tell(self, progress: Progress) -> None:
        # A masked update's losses and accuracies would tell of it; a private run tells nothing that data decides.
        told = quiet_progress(progress) if self._masked else progress
        self.keeper.tell(told.private() if self._private else told)
        self.show(progress)

    @property
    def _private(self) -> bool:
        return self.lease.job.request.privacy is not None

    def _over(self) -> bool:
        return self.keeper.ended or self.wait(0)

    def _check(self) -> None:
        if self._over():
            raise Halted

    def _halted(self) -> Ended:
        if self.keeper.cancelled.is_set():
            self.run.remove()
            return Ended(Outcome.CANCELLED)
        if self.keeper.refused.is_set():
            return self._refused("its token is not valid any more")
        if self.keeper.lost.is_set():
            return self._lost("the lease has ended")
        self._say(lambda: self.client.leave(self.lease.id))
        return Ended(Outcome.INTERRUPTED)

    def _lost(self, detail: str) -> Ended:
        return Ended(Outcome.LOST, f"{detail}; the run goes on if the job comes back")

    def _refused(self, detail: str) -> Ended:
        return Ended(Outcome.LOST, f"the server refuses this device ({detail}); the run is kept")

    def _fail(self, reason: JobError, detail: str) -> Ended:
        """Reports a job that cannot be trained; of a private one only that this device's log says why."""
        if self._private:
            reason = JobError(code=reason.code, detail="the device's own log says why; the run was private")
        self._say(lambda: self.client.fail(self.lease.id, reason))
        return Ended(Outcome.FAILED, detail)

    def _decline(self, error: TooLittleMemory) -> Ended:
        """Gives a job back that needs more memory than there is; the server may have a smaller program for it."""
        numbers = Decline(needed_bytes=error.needed, available_bytes=error.available)
        self._say(lambda: self.client.decline(self.lease.id, numbers))
        return Ended(Outcome.DECLINED, error.detail)

    def _release(self, detail: str, rest: float = 0.0) -> Ended:
        """Gives a job back that cannot be trained now."""
        self._say(lambda: self.client.release(self.lease.id))
        return Ended(Outcome.RELEASED, detail, rest)

    def _say(self, call: Callable[[], object]) -> None:
        try:
            call()
        except MobizoError as error:
            # The lease runs out by itself; there is nothing better to do.
            _log.warning("the server was not told", detail=error.detail)
