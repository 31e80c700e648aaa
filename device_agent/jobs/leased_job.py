"""Works on one leased job from lease to outcome: verifies, downloads, trains and uploads, or reports why it cannot.

Every error is handled here; reports to the server contain none of the device's data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from device_agent.datasets.store import AvailableDatasets, DatasetRemoved, HeldDataset
from device_agent.durable import describe_error
from device_agent.errors import (
    ExecutorEnded,
    NoRunner,
    OwnerRefuses,
    PolicyForbids,
    RuntimeFailed,
    Stopped,
    TooFewNewRecords,
    TooLittleMemory,
)
from device_agent.executors.process import Launcher
from device_agent.home import AgentHome
from device_agent.inference.adapter_store import AdapterStore
from device_agent.jobs.lease_and_policy import LeaseHeartbeat, PolicyGatedRun
from device_agent.jobs.rehearsal import Continuation
from device_agent.jobs.secure_aggregation_upload import SecureAggregationUpload
from device_agent.jobs.start_choice import choose_start
from device_agent.jobs.upload import Upload, UploadSummary
from device_agent.policy.evaluator import OwnerConsent, PolicyEvaluator
from device_agent.policy.privacy_ledger import PrivacyCost, PrivacyLedger, spending_of
from device_agent.policy.task_approvals import TaskApprovals
from device_agent.programs import (
    ProgramCache,
    verify_program,
    verify_start,
    verify_version,
)
from device_agent.protocol.client import DeviceClient
from device_agent.training.run_directory import RunDirectory
from device_agent.training.run_plan import RunPlan, own_texts
from shared.canonical import file_sha256
from shared.capabilities import may_take_part
from shared.errors import (
    Gone,
    InvalidDataset,
    LeftOutOfRound,
    MobizoError,
    NotFound,
    TooManyRequests,
    Unauthorized,
    Unavailable,
    Untrusted,
)
from shared.federation.secure_aggregation.redaction import redacted_progress
from shared.job import AUTO, JobError, JobStart, Progress, TrajectoryUpload
from shared.program import ProgramFile, ProgramManifest
from shared.protocol import Decline, Lease
from shared.result import Result
from shared.transport import ByteProgress

COOLDOWN_SECONDS = 300.0  # after a job that this device cannot train now; the server may lease it again at once

_log = structlog.get_logger()


class Outcome(StrEnum):
    """How a job ended on this device."""

    COMPLETED = "completed"
    FAILED = "failed"  # reported; the job would fail on every device
    DECLINED = "declined"  # returned with sizes: it needs more memory than is available
    RELEASED = "released"  # returned; it may succeed later or on another device
    LOST = "lost"  # the lease ended; the run is kept
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"  # the daemon was asked to stop; the run is kept


@dataclass(frozen=True)
class JobEnd:
    """A job's outcome and reason, for this device only. cooldown: seconds to wait before the next job.

    upload: what was uploaded.
    """

    outcome: Outcome
    detail: str | None = None
    cooldown: float = 0.0
    upload: UploadSummary | None = None


@dataclass(frozen=True)
class AgentContext:
    """The agent's services that every job uses."""

    cache: ProgramCache
    store: AdapterStore
    evaluator: PolicyEvaluator
    launchers: Callable[[ProgramManifest], Launcher]
    consents: OwnerConsent
    tasks: TaskApprovals
    privacy: PrivacyLedger
    datasets: AvailableDatasets
    home: AgentHome


@dataclass(frozen=True)
class LeasedJob:
    """A lease and everything needed to work on it.

    keys: the server's current key, then its former keys. show: called with the progress. wait: sleeps up to that many
    seconds; returns whether the daemon was asked to stop.
    """

    client: DeviceClient
    lease: Lease
    heartbeat: LeaseHeartbeat
    context: AgentContext
    keys: tuple[Ed25519PublicKey, ...]
    run: RunDirectory
    dataset: HeldDataset
    show: Callable[[Progress], None]
    wait: Callable[[float], bool]

    def work(self) -> JobEnd:
        """Works on the job. Never raises: every error becomes an outcome."""
        try:
            return self._attempt()
        except Stopped:
            return self._halted()
        except Unauthorized as error:
            return self._refused(error.detail)
        except (Gone, NotFound) as error:
            return self._lost(error.detail)
        except TooLittleMemory as error:
            sizes = Decline(needed_bytes=error.needed, available_bytes=error.available)
            self._notify(partial(self.client.decline, self.lease.id, sizes))
            return JobEnd(Outcome.DECLINED, error.detail)
        except (PolicyForbids, LeftOutOfRound, NoRunner, ExecutorEnded) as error:
            return self._release(error.detail, COOLDOWN_SECONDS)
        except (TooManyRequests, Unavailable) as error:
            return self._release(error.detail)
        except (OwnerRefuses, TooFewNewRecords) as error:
            # The reason depends on no record's content.
            reason = JobError(code=error.code, detail=error.detail[:4000])
            self._notify(partial(self.client.fail, self.lease.id, reason))
            return JobEnd(Outcome.FAILED, error.detail)
        except MobizoError as error:
            if self.dataset.is_removed:
                return self._release(DatasetRemoved(self.dataset.name).detail)
            return self._fail(public_error(error), error.detail)
        except OSError as error:
            return self._release(describe_error(error))
        except Exception as error:
            _log.exception("unexpected error in a job")
            # Only the error's type leaves the device: its text could contain data.
            reason = JobError(code=MobizoError.code, detail=f"the agent failed with {type(error).__name__}")
            return self._fail(reason, str(error))

    def _attempt(self) -> JobEnd:
        self._check_consent()
        manifest = verify_program(self.lease, self.keys[0], self.context.home.program_versions)
        policy_run = PolicyGatedRun(
            self.context.evaluator, self.lease.job.request.rules, self._report, self._must_stop, self.wait
        )
        self._remove_outdated(manifest)
        request = self.lease.job.request
        cost = PrivacyCost(
            job_id=self.lease.job.id,
            dataset=request.dataset,
            directory=self.dataset.directory,
            spending=spending_of(request.privacy, request.training.steps),
        )
        self.context.privacy.check(cost, self.run)
        result = self.run.result()
        # An update of a round and a private run have no scores of texts.
        scored = self.lease.job.task.compares_texts and not self._private and self.lease.round is None
        scored = scored and manifest.inference_context is not None
        with self.context.cache.hold(manifest.files if scored else manifest.training_files):
            if result is None:
                result = self._train(policy_run, manifest, cost)
            if scored and result.written_after is None:
                # Imported here, because most jobs compare no texts, and an idle agent stays small.
                from device_agent.jobs.text_scores import score_texts

                result = score_texts(self.context.cache, self._fetch, policy_run, self.run, result)
        self._continuation.record()
        if not self._private:
            result = result.model_copy(update={"phase_seconds": policy_run.phase_seconds()})
        try:
            summary = self._upload().send(policy_run, result)
        except Gone as error:
            return JobEnd(Outcome.LOST, error.detail)
        return JobEnd(Outcome.COMPLETED, upload=summary)

    def _upload(self) -> Upload | SecureAggregationUpload:
        """Returns how the run is uploaded. A masked update is never uploaded in another form."""
        if self._masked:
            return SecureAggregationUpload(self.client, self.lease, self.run, self.context.home)
        return Upload(self.client, self.lease, self.run, self.context.store, self._trajectory_upload())

    @property
    def _masked(self) -> bool:
        return self.lease.round is not None and self.lease.round.upload == "masked"

    @property
    def _continuation(self) -> Continuation:
        return Continuation(self.lease, self.run, self.dataset, self.context)

    def _check_consent(self) -> None:
        """Raises TaskNotApproved unless the owner lets the job's task read the data set, PolicyForbids unless the owner
        consents to the job's round, Untrusted if job and lease disagree about it.

        The owner's consent may have changed since the lease was requested.
        """
        self.context.tasks.check(self.lease.job.task, self.lease.job.request.dataset)
        task, job_round = self.lease.round, self.lease.job.round
        if task is None and job_round is None:
            return
        # In asynchronous rounds, a job may count in a later round than the one that it was created for.
        if task is None or job_round is None or task.cohort != job_round.cohort or task.number < job_round.number:
            raise Untrusted("the job and its lease name different rounds")
        if not may_take_part(self.context.consents.cohorts, task.cohort):
            raise PolicyForbids(f"this device's rules.toml does not allow it to take part in cohort {task.cohort!r}")
        minimum = self.context.consents.masked_among
        devices = 0 if task.masking is None else task.masking.minimum
        if devices < minimum or (minimum and task.upload != "masked"):
            raise PolicyForbids(
                f"this device's rules.toml requires masked sums over at least {minimum} devices, but round "
                f"{task.number} of cohort {task.cohort!r} {f'sums over {devices}' if devices else 'is not masked'}"
            )

    def _trajectory_upload(self) -> TrajectoryUpload:
        """Returns how much of the trajectory is uploaded: nothing without the owner's consent."""
        if not self.context.consents.trajectory:
            return "none"
        if self.lease.round is not None:
            return "instead" if self.lease.round.upload == "trajectory" else "none"
        return self.lease.job.request.trajectory

    def _remove_outdated(self, manifest: ProgramManifest) -> None:
        """Removes an earlier run of this job if the job or the data set has changed since."""
        plan, job = self.run.begun_plan(), self.lease.job
        if plan is None:
            return
        requested_run = (manifest.recipe_id, job.request.training, job.request.privacy, job.task)
        changed = (plan.manifest.recipe_id, plan.training, plan.privacy, plan.task) != requested_run
        # The rest of a run must not be trained on other records than its first steps.
        if changed or (plan.dataset != self.dataset.directory and self.run.result() is None):
            _log.warning("the job differs from its run on this device; the run starts again", job=plan.job_id)
            self.run.remove()

    def _train(self, policy_run: PolicyGatedRun, manifest: ProgramManifest, cost: PrivacyCost) -> Result:
        policy_run.report(Progress(phase="downloading", steps=self.lease.job.request.training.steps))
        spare = self.context.evaluator.spare_bytes(policy_run.rules)
        if manifest.training_bytes > spare:
            raise TooLittleMemory(manifest.training_bytes, spare, policy_run.rules.memory_floor_bytes or 0)
        plan, launcher = self._prepare(policy_run, manifest), self.context.launchers(manifest)
        if self.lease.job.request.start == AUTO:
            plan = self._choose_start(policy_run, plan, launcher)
        self.run.begin(plan)
        policy_run.report(Progress(phase="loading", steps=self.lease.job.request.training.steps))
        try:
            # Charged last: a job that cannot start here spends nothing.
            return policy_run.train(launcher, self.run, manifest, lambda: self.context.privacy.charge(cost, self.run))
        finally:
            if (unusable := self.run.unusable()) is not None:
                _log.warning("records were left out", detail=unusable, see=str(self.run.path / "unusable.log"))

    def _prepare(self, policy_run: PolicyGatedRun, manifest: ProgramManifest) -> RunPlan:
        """Downloads what the training process needs and returns the run's plan."""
        cache = self.context.cache
        cache.reserve(manifest.training_files)
        start = verify_start(self.lease, manifest, self.keys)
        if start is not None:
            self._continuation.check_new_records(start)
        paths = {file.role: self._fetch(policy_run, file) for file in manifest.training_files}
        if start is not None and not (self.run.start.is_file() and file_sha256(self.run.start) == start.sha256):
            self.run.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            policy_run.transfer(
                partial(self.client.download_start, self.lease.id, start, self.run.start), download=True
            )
        policy_run.check()
        return RunPlan(
            job_id=self.lease.job.id,
            job_created_at=self.lease.job.created_at,
            task=self.lease.job.task,
            training=self.lease.job.request.training,
            manifest=manifest,
            dataset=self.dataset.directory,
            program=paths["program"],
            weights=paths["weights"],
            tokenizer=paths["tokenizer"],
            noise_key=self.context.home.noise_key(),
            start=None if start is None else self.run.start,
            start_sha256=None if start is None else start.sha256,
            round=self.lease.round,
            privacy=self.lease.job.request.privacy,
            earlier={} if start is None else self._continuation.earlier_records(start),
            reference_texts=self._reference_texts(),
            measurements=self.context.home.measurements,
        )

    def _reference_texts(self) -> tuple[str, ...]:
        """Returns the run's reference texts, as they were at first; none for private runs and rounds."""
        if self._private or self.lease.round is not None:
            return ()
        plan = self.run.begun_plan()
        return (self.lease.reference_texts or own_texts()) if plan is None else plan.reference_texts

    def _choose_start(self, policy_run: PolicyGatedRun, plan: RunPlan, launcher: Launcher) -> RunPlan:
        """Returns the plan with the start that this device chooses. The server learns its name."""
        candidates = [verify_version(signed, plan.manifest, self.keys) for signed in self.lease.starts]
        start = choose_start(self.client, policy_run, self.run, plan, launcher, candidates)
        name = None if start is None else JobStart(adapter=start.adapter, revision=start.revision)
        self.client.choose_start(self.lease.id, name)
        if start is None:
            return plan
        earlier = self._continuation.earlier_records(start)
        changes = {"start": self.run.start, "start_sha256": start.sha256, "earlier": earlier}
        return plan.model_copy(update=changes)

    def _fetch(self, policy_run: PolicyGatedRun, file: ProgramFile) -> Path:
        def move(progress: ByteProgress | None) -> Path:
            return self.context.cache.fetch(self.client, file, progress)

        # A cached file needs no network.
        return move(None) if self.context.cache.holds(file) else policy_run.transfer(move, download=True)

    def _report(self, progress: Progress) -> None:
        if self.lease.job.task.generates and self.lease.job.task.preference_loss is None:
            progress = progress.without_accuracies()
        # Losses and accuracies would reveal the masked or noised update; reports of a private run must not depend on
        # the data.
        task = self.lease.round
        is_private_member = task is not None and task.privacy is not None and task.privacy.members is not None
        public_progress = redacted_progress(progress) if self._masked or is_private_member else progress
        self.heartbeat.report(public_progress.private() if self._private else public_progress)
        self.show(progress)

    @property
    def _private(self) -> bool:
        return self.lease.job.request.privacy is not None

    def _must_stop(self) -> bool:
        return self.heartbeat.ended is not None or self.wait(0) or self.dataset.is_removed

    def _halted(self) -> JobEnd:
        if self.heartbeat.ended == "cancelled":
            self.run.remove()
            return JobEnd(Outcome.CANCELLED)
        if self.heartbeat.ended == "refused":
            return self._refused("its token is no longer valid")
        if self.heartbeat.ended == "lost":
            return self._lost("the lease has ended")
        if self.dataset.is_removed:
            return self._release(DatasetRemoved(self.dataset.name).detail)
        self._notify(lambda: self.client.leave(self.lease.id))
        return JobEnd(Outcome.INTERRUPTED)

    def _lost(self, detail: str) -> JobEnd:
        return JobEnd(Outcome.LOST, f"{detail}; the run resumes if this device leases the job again")

    def _refused(self, detail: str) -> JobEnd:
        return JobEnd(Outcome.LOST, f"the server refuses this device ({detail}); the run is kept")

    def _fail(self, reason: JobError, detail: str) -> JobEnd:
        """Reports a failed job; for a private job only the error code leaves the device."""
        if self._private:
            reason = JobError(code=reason.code, detail="the run is private; the device's log has the reason")
        self._notify(lambda: self.client.fail(self.lease.id, reason))
        return JobEnd(Outcome.FAILED, detail)

    def _release(self, detail: str, cooldown: float = 0.0) -> JobEnd:
        """Releases a job that cannot be trained now."""
        self._notify(lambda: self.client.release(self.lease.id))
        return JobEnd(Outcome.RELEASED, detail, cooldown)

    def _notify(self, call: Callable[[], object]) -> None:
        try:
            call()
        except MobizoError as error:
            # The lease expires by itself.
            _log.warning("the report to the server failed", detail=error.detail)


def public_error(error: MobizoError) -> JobError:
    """Returns what the server may know of an error: nothing that quotes the device's data."""
    detail = error.detail
    if isinstance(error, RuntimeFailed):
        detail = error.public
    elif isinstance(error, InvalidDataset):
        detail = "the data set cannot be read, or too few of its records fit the task; the device's own log says why"
    return JobError(code=error.code, detail=detail[:4000])
