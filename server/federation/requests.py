"""Builds the job request of a member in a round, and the round's description for the device."""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.federation.models import Cohort, secure_aggregation_parameters
from server.federation.repository import CohortRepository
from server.federation.round_repository import Part, RoundRepository
from server.jobs.repository import Job
from server.registry.models import StoredVersion
from server.registry.warm_start import parent_of
from shared.federation.cohort import RoundTask
from shared.federation.seeds import member_seed
from shared.job import JobRequest, JobStart


def part_request(cohort: Cohort, part: Part, start: StoredVersion | None) -> JobRequest:
    """Returns the job request for a member's part in a round, bound to the member's device."""
    settings, member = cohort.settings, part.member
    seed = member_seed(settings.training.seed, cohort.name, part.round.position, member.user)
    parent = None if start is None else parent_of(start)
    return JobRequest(
        base=settings.base,
        user=member.user,
        adapter=cohort.name,
        task=cohort.task,
        dataset=settings.dataset,
        recipe=cohort.recipe.requested(),
        start=None if parent is None else JobStart(adapter=parent.adapter, revision=parent.revision),
        training=settings.training.model_copy(update={"seed": seed}),
        privacy=None if settings.privacy is None else settings.privacy.examples,
        device=member.device_id,
        trajectory="instead" if settings.upload == "trajectory" else "none",
    )


def round_task(session: Session, job: Job) -> RoundTask | None:
    """Returns the description of the round that a job belongs to, or None if it belongs to no round."""
    part = None if job.round is None else RoundRepository(session).of_job(job)
    if part is None:
        return None
    cohort = CohortRepository(session).by_number(part.round.cohort_number)
    settings = cohort.settings
    return RoundTask(
        cohort=cohort.name,
        number=part.round.position,
        algorithm=settings.algorithm,
        upload=settings.upload,
        privacy=settings.privacy,
        masking=secure_aggregation_parameters(cohort, part.round),
        deadline=part.round.deadline,
    )
