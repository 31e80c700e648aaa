"""What each member trains in a round: the job request, and the recipe, which is the cohort's or suits the device.

Updates are averaged as B, so members need one A and one layout of B, and not one estimator.
"""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy.orm import Session

from server.catalog.bases import BaseModelEntry, BaseService
from server.federation.models import Cohort, MemberUpdate, secure_aggregation_parameters
from server.federation.round_repository import RoundRepository
from server.jobs.recipes import choose_recipe, demands_of, spare_memory
from server.jobs.repository import Job
from server.jobs.service import ResolvedJob
from server.registry.models import StoredVersion
from server.registry.warm_start import parent_of
from server.storage.store import ArtifactStore
from shared.estimator_choice import Demands
from shared.federation.cohort import CohortSettings, RoundTask
from shared.federation.seeds import member_seed
from shared.job import JobRequest, JobStart
from shared.recipe import RequestedRecipe
from shared.registry import Parent


def members_choose(settings: CohortSettings) -> bool:
    """Returns whether members may have different estimators.

    Masked members agree on one recipe beforehand. The clip of private examples has another unit with each estimator.
    """
    private = settings.privacy is not None and settings.privacy.examples is not None
    return settings.recipe.estimator == "auto" and settings.masking is None and not private


def member_demands(settings: CohortSettings, request: JobRequest) -> Demands:
    """Returns what a cohort demands of its members' estimators."""
    demands = demands_of(request)
    if settings.upload == "trajectory":
        demands = replace(demands, trajectory="the cohort's updates are trajectories")
    return demands


class MemberRecipes:
    """Resolves the jobs of a round's members in one transaction."""

    def __init__(
        self, session: Session, artifacts: ArtifactStore, cohort: Cohort, base: BaseModelEntry, start: Parent | None
    ) -> None:
        """start: the version from which the members start; None: B = 0."""
        self._session, self._cohort = session, cohort
        hides_figures = cohort.settings.hides_figures
        self._common = ResolvedJob(base, cohort.task, cohort.recipe, start, hides_figures=hides_figures)
        chosen = members_choose(cohort.settings)
        self._tokenizer = BaseService(session, artifacts).tokenizer(base) if chosen else None

    def resolve(self, request: JobRequest) -> tuple[JobRequest, ResolvedJob]:
        """Returns a member's request, with the recipe as the cohort requests it, and the resolved job."""
        if self._tokenizer is None:
            return request, self._common
        cohort, base = self._cohort, self._common.base
        fields = cohort.settings.recipe.model_dump(include=set(RequestedRecipe.model_fields))
        request = request.model_copy(update={"recipe": RequestedRecipe.model_validate(fields)})
        spare = spare_memory(self._session, cohort.tenant, request)
        demands = member_demands(cohort.settings, request)
        choice = choose_recipe(request, cohort.task, base, self._tokenizer, spare, demands)
        return request, replace(self._common, recipe=choice.recipe, estimator_reason=choice.reason)


def part_request(cohort: Cohort, part: MemberUpdate, start: StoredVersion | None) -> JobRequest:
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


def round_task(session: Session, job: Job) -> RoundTask:
    """Returns the description of the round that a job belongs to."""
    cohort_round = RoundRepository(session).of_job(job).round
    cohort, settings = cohort_round.cohort, cohort_round.cohort.settings
    return RoundTask(
        cohort=cohort.name,
        number=cohort_round.position,
        algorithm=settings.algorithm,
        upload=settings.upload,
        privacy=settings.privacy,
        masking=secure_aggregation_parameters(cohort_round),
        deadline=cohort_round.deadline,
    )
