"""Checks a member's update at upload, and accepts it when the device completes the job.

The update is B after the run minus B before it. No update is accepted twice: a part has one job, a job is completed
once, and a member has one part in a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.federation.models import Cohort, MemberUpdate
from server.federation.repository import CohortRepository
from server.federation.round_repository import RoundRepository
from server.federation.secure_aggregation.service import SecureAggregationProgress
from server.jobs.leases.repository import JobLease
from server.jobs.repository import Job
from server.storage.store import ArtifactStore
from shared.errors import CohortMismatch, Conflict, InvalidUpdate, NotAMember, RoundClosed
from shared.federation.cohort import RoundReceipt, RoundState, UpdateState
from shared.federation.update import F32, difference, euclidean_norm
from shared.result import Result
from shared.zo.lora import HEADER_BYTES, load_adapter, named_fingerprint


@dataclass(frozen=True)
class ExpectedUpdate:
    """The requirements on an update. start_sha256: LoRA-B file that its run began from; None: B = 0."""

    cohort: str
    a_sha256: str
    size_d: int
    start_sha256: str | None
    norm_limit: float | None


class UpdateService:
    """Handles updates in one transaction."""

    def __init__(self, session: Session) -> None:
        self._cohorts, self._rounds = CohortRepository(session), RoundRepository(session)
        self._secure_aggregation = SecureAggregationProgress(session)

    def lock(self, lease_id: str) -> None:
        """Locks the cohort of a leased job. Call it before locking the job (see `server.database.database`)."""
        self._cohorts.lock_of_lease(lease_id)

    def expect(self, job: Job) -> ExpectedUpdate | None:
        """Returns the requirements on a job's update, or None for a job of no round. Raises RoundClosed, NotAMember."""
        if job.round is None:
            return None
        part = self._rounds.of_job(job)
        cohort = part.round.cohort
        self._check_open(part)
        self.check_clear(job)
        return ExpectedUpdate(
            cohort.name, cohort.a_sha256, cohort.size_d, part.start_sha256, cohort.settings.norm_limit
        )

    def count(self, job: Job, lease: JobLease, result: Result) -> Cohort:
        """Accepts the update uploaded under a lease of a round's job, and returns its cohort, which is locked.

        Its figures are stored unless the members are private: sums and means of them would reveal single members.

        Raises RoundClosed, NotAMember, or InvalidUpdate if the update has no examples to weigh it by.
        """
        part = self._rounds.of_job(job)
        cohort = part.round.cohort
        self._check_open(part)
        settings, claimed = cohort.settings, result.train_examples
        if settings.weights == "examples" and not claimed:
            raise InvalidUpdate(
                f"cohort {cohort.name!r} weights updates by their number of examples, and the device reported none"
            )
        part.round.updates += 1
        part.state, part.updated_at = UpdateState.COUNTED, utc_now()
        part.sha256 = lease.upload_sha256
        part.sent_bytes = lease.upload_size if lease.trajectory_size is None else lease.trajectory_size
        # The number of versions published since the starting version of the update.
        part.staleness = self._rounds.published_since(cohort, part.start_version or 0)
        if not settings.hides_figures:
            part.norm = lease.upload_norm
            part.claimed_examples = claimed
            part.examples = None if claimed is None else min(claimed, settings.most_examples)
            part.start_accuracy, part.tuned_accuracy = result.before_accuracy, result.tuned_accuracy
        return cohort

    def is_masked(self, job: Job) -> bool:
        """Returns whether a job belongs to a masked round."""
        return job.round is not None and self._rounds.of_job(job).round.cohort.settings.masking is not None

    def check_clear(self, job: Job) -> None:
        """Raises InvalidUpdate if the job's round accepts masked updates only."""
        if self.is_masked(job):
            raise InvalidUpdate("this round accepts masked updates only")

    def check_summed(self, job: Job, device_id: str) -> None:
        """Raises Conflict unless a device's masked vector is in the sum of its job's round."""
        if not self._secure_aggregation.is_summed(self._rounds.of_job(job).round, device_id):
            raise Conflict("the sum contains no masked vector of this device; take part in every phase, then complete")

    def receipt(self, job: Job) -> RoundReceipt:
        """Returns the response to a completion that was already accepted."""
        cohort_round = self._rounds.of_job(job).round
        cohort = cohort_round.cohort.name
        return RoundReceipt(cohort=cohort, round=cohort_round.position, updates=cohort_round.updates)

    def _check_open(self, part: MemberUpdate) -> None:
        cohort = part.round.cohort.name
        round_name = f"round {part.round.position} of cohort {cohort!r}"
        if part.state is UpdateState.LEFT:
            raise NotAMember(f"user {part.member.user!r} has left cohort {cohort!r}; the update is discarded")
        if part.state is UpdateState.MISSED or part.round.state is not RoundState.OPEN:
            raise RoundClosed(f"{round_name} is {part.round.state}; the update came too late")
        if utc_now() >= part.round.deadline:
            raise RoundClosed(f"the deadline of {round_name} has passed; the update came too late")


def measure(artifacts: ArtifactStore, expected: ExpectedUpdate, path: Path, flat: F32) -> float:
    """Returns the Euclidean norm of an update. path: of its adapter file; flat: the file's B (D,).

    Raises CohortMismatch for another frozen A, InvalidUpdate for a norm above the cohort's limit.
    """
    with path.open("rb") as file:
        update_fingerprint = named_fingerprint(file.read(8 + HEADER_BYTES))
    if update_fingerprint != expected.a_sha256 or flat.size != expected.size_d:
        raise CohortMismatch(
            f"the update's frozen A has fingerprint {update_fingerprint or '(not stated)'} and D = {flat.size}; cohort "
            f"{expected.cohort!r} has {expected.a_sha256} and {expected.size_d}. Only updates of one A can be averaged",
            update=update_fingerprint,
            cohort=expected.a_sha256,
        )
    if expected.start_sha256 is None:
        norm = euclidean_norm(flat)
    else:
        start = load_adapter(artifacts.read(expected.start_sha256), expected.size_d)
        norm = euclidean_norm(difference(flat, start))
    if expected.norm_limit is not None and norm > expected.norm_limit:
        raise InvalidUpdate(
            f"the update has a Euclidean norm of {norm:.4g}; cohort {expected.cohort!r} allows at most "
            f"{expected.norm_limit:.4g}",
            norm=norm,
            limit=expected.norm_limit,
        )
    return norm
