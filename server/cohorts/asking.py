"""What a round asks of a member: the request of his job, and what his device is told besides. Knows no HTTP."""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.adapters.models import StoredVersion
from server.cohorts.models import Cohort
from server.cohorts.repository import CohortRepository
from server.cohorts.round_repository import Part, RoundRepository
from server.jobs.models import Job
from server.jobs.starts import parent_of
from server.masking.parameters import masking_parameters
from shared.cohort import RoundTask
from shared.federation.seeds import member_seed
from shared.job import JobRequest, JobStart
from shared.recipe import RecipeSettings

_SETTINGS = tuple(RecipeSettings.model_fields)


def part_request(cohort: Cohort, part: Part, start: StoredVersion | None) -> JobRequest:
    """The request of a member's job in a round, as if he had submitted it himself for his device."""
    settings, member = cohort.settings, part.member
    seed = member_seed(settings.training.seed, cohort.name, part.round.position, member.user)
    parent = None if start is None else parent_of(start)
    return JobRequest(
        base=settings.base,
        user=member.user,
        adapter=cohort.name,
        task=cohort.task,
        dataset=settings.dataset,
        recipe=RecipeSettings(**{name: getattr(cohort.recipe, name) for name in _SETTINGS}),
        start=None if parent is None else JobStart(adapter=parent.adapter, revision=parent.revision),
        training=settings.training.model_copy(update={"seed": seed}),
        privacy=None if settings.privacy is None else settings.privacy.examples,
        device=member.device_id,
        history="instead" if settings.upload == "trajectory" else "none",
    )


def round_task(session: Session, job: Job) -> RoundTask | None:
    """What a device is told of the round that its job belongs to; None for a job of no round."""
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
        masking=masking_parameters(cohort, part.round),
        deadline=part.round.deadline,
    )
