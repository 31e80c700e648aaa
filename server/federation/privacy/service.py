"""What a job may spend of its user's privacy, and what was spent.

Spent is counted from above: a job counts once it is submitted, once more for every further device that gets it, and is
given back only if it ends before any device had it. All of a user's jobs are taken to see the same data.
"""

from __future__ import annotations

import math

from sqlalchemy.orm import Session

from server.clock import utc_now
from server.federation.privacy.models import PrivacySpending
from server.federation.privacy.repository import PrivacyRepository
from server.jobs.models import Job
from shared.errors import BudgetExceeded, InvalidRecipe
from shared.federation.accounting import Spending, epsilon_of, noise_for, of_run
from shared.job import JobRequest
from shared.privacy import DELTA, UserPrivacy


def resolve_privacy(request: JobRequest) -> JobRequest:
    """The request with its noise found, where it asks for an epsilon, and with a recipe that keeps its privacy.

    Raises InvalidRecipe for a recipe that clips without privacy, or cannot; InvalidRequest if no noise is enough.
    """
    recipe, privacy = request.recipe, request.privacy
    if privacy is None:
        if recipe.privacy == "clipped":
            raise InvalidRecipe("recipe.privacy is clipped, so the job must say by how much: give it `privacy`")
        return request
    if recipe.privacy != "clipped":
        try:
            recipe = type(recipe).model_validate(recipe.model_dump() | {"privacy": "clipped"})
        except ValueError as error:
            raise InvalidRecipe(f"privacy: {error}") from error
    if privacy.noise_multiplier is None and privacy.epsilon is not None:
        steps, rate = request.training.steps, privacy.sampling_rate
        noise = noise_for(privacy.epsilon, privacy.delta, rate, steps)
        privacy = privacy.model_copy(update={"noise_multiplier": noise})
    elif privacy.epsilon is not None:
        cost = epsilon_of([of_run(privacy, request.training.steps)], privacy.delta)
        if cost > privacy.epsilon:
            raise BudgetExceeded(
                f"with noise_multiplier {privacy.sigma:g} the run costs epsilon {cost:.3g} at delta {privacy.delta:g}, "
                f"more than the {privacy.epsilon:g} that the job allows: leave noise_multiplier out and it is found",
                epsilon=cost,
                budget=privacy.epsilon,
                delta=privacy.delta,
            )
    return request.model_copy(update={"recipe": recipe, "privacy": privacy})


class PrivacyService:
    """Spendings and budgets in one transaction."""

    def __init__(self, session: Session) -> None:
        self._privacy = PrivacyRepository(session)

    def admit(self, tenant: str, request: JobRequest) -> None:
        """Raises BudgetExceeded if a job (settled) would spend more than its user's budget has left."""
        privacy = request.privacy
        self._check(tenant, request.user, None if privacy is None else of_run(privacy, request.training.steps))

    def budget_checks(self, tenant: str, request: JobRequest) -> list[tuple[list[Spending], float]]:
        """Returns what `admit` will account for: spendings with their delta. Empty without a budget or `privacy`."""
        limit = self._privacy.limit(tenant, request.user)
        if request.privacy is None or limit is None or limit.epsilon is None:
            return []
        spent = self._privacy.of_user(tenant, request.user)
        return [(spent, limit.delta), ([*spent, of_run(request.privacy, request.training.steps)], limit.delta)]

    def reserve(self, job: Job) -> None:
        """Notes what a new job will spend."""
        self._spend(job, None)

    def begin(self, job: Job, device_id: str) -> None:
        """Notes that a device gets a job; one that had it before goes on with its own run.

        Raises BudgetExceeded if another run of it would be one too many.
        """
        if job.request.privacy is None:
            return
        runs = self._privacy.of_job(job.id)
        if any(run.device_id == device_id for run in runs):
            return
        if runs and runs[0].device_id is None:
            runs[0].device_id, runs[0].spent_at = device_id, utc_now()
            return
        self._check(job.tenant, job.user, of_run(job.request.privacy, job.request.training.steps))
        self._spend(job, device_id)

    def forget_reserved(self, job: Job) -> None:
        """Gives back what a job that has ended did not begin to spend."""
        if job.request.privacy is not None:
            self._privacy.forget_reserved(job.id)

    def set_limit(self, tenant: str, user: str, epsilon: float | None, delta: float) -> None:
        """Sets a user's budget, which holds from the next job on."""
        self._privacy.keep_limit(tenant, user, epsilon, delta)

    def of_user(self, tenant: str, user: str) -> UserPrivacy:
        """What was spent on a user's data."""
        limit = self._privacy.limit(tenant, user)
        delta = DELTA if limit is None else limit.delta
        return UserPrivacy(
            user=user,
            epsilon=_finite(epsilon_of(self._privacy.of_user(tenant, user), delta)),
            delta=delta,
            budget=None if limit is None else limit.epsilon,
            runs=self._privacy.runs(tenant, user),
            unprotected=self._privacy.unprotected(tenant, user),
        )

    def _spend(self, job: Job, device_id: str | None) -> None:
        privacy = job.request.privacy
        if privacy is None:
            return
        self._privacy.add(
            PrivacySpending(
                tenant=job.tenant,
                user=job.user,
                cohort=None if job.round is None else job.round.cohort,
                job_id=job.id,
                device_id=device_id,
                sampling_rate=privacy.sampling_rate,
                noise_multiplier=privacy.sigma,
                steps=job.request.training.steps,
                spent_at=utc_now(),
            )
        )

    def _check(self, tenant: str, user: str, asked: Spending | None) -> None:
        limit = self._privacy.limit(tenant, user, lock=True)
        if limit is None or limit.epsilon is None:
            return
        if asked is None:
            raise BudgetExceeded(
                f"user {user!r} has a privacy budget of epsilon {limit.epsilon:g}, and a job without `privacy` has no "
                "bound at all: give it one",
                budget=limit.epsilon,
                delta=limit.delta,
            )
        spent = self._privacy.of_user(tenant, user)
        before, after = epsilon_of(spent, limit.delta), epsilon_of([*spent, asked], limit.delta)
        if after > limit.epsilon:
            raise BudgetExceeded(
                f"user {user!r}: {before:.3g} of a privacy budget of epsilon {limit.epsilon:g} is spent at delta "
                f"{limit.delta:g}, and with this run it would be {after:.3g}",
                spent=_finite(before),
                epsilon=_finite(after),
                budget=limit.epsilon,
                delta=limit.delta,
            )


def _finite(epsilon: float) -> float | None:
    """None for what JSON has no number for."""
    return epsilon if math.isfinite(epsilon) else None
