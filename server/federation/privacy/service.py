"""Privacy budgets: checks a job against its user's budget and its data set's, and accounts for the spending.

Spent is counted from above: a job counts once it is submitted, once more for every further device that gets it, and is
given back only if it ends before any device had it. All of a user's jobs are taken to see the same data.

A run is also charged to the data set of the device that trains it, whatever user the job names. The server does not
know which of a device's users a data set belongs to, so the budget of each of them bounds what is spent on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.database.database import Database
from server.federation.privacy.repository import PrivacyRepository, PrivacySpending
from server.identity.devices.repository import BindingRepository
from server.jobs.repository import Job
from server.jobs.service import JobSubscriber
from shared.errors import BudgetExceeded, InvalidRecipe
from shared.federation.accounting import (
    AccountingRequest,
    Spending,
    exact_epsilon_of,
    fast_epsilon_of,
    known_answer,
    known_epsilon_of,
    run_spending,
)
from shared.job import JobRequest
from shared.privacy import DELTA, DatasetPrivacy, UserPrivacy, check_clip


def resolve_privacy(
    request: JobRequest, answer: Callable[[AccountingRequest], float] = AccountingRequest.answer
) -> JobRequest:
    """Returns the request with the noise multiplier of its epsilon, and with a recipe that clips.

    answer: gives the exact answers of accounting. Raises InvalidRecipe for a recipe that clips without privacy,
    cannot, or needs a C that is not given; InvalidRequest if no noise is enough; and what `answer` raises.
    """
    recipe, privacy = request.recipe, request.privacy
    if privacy is None:
        if recipe.privacy == "clipped":
            raise InvalidRecipe("recipe.privacy is clipped, so the job must say by how much: give it `privacy`")
        return request
    check_clip(privacy, recipe.estimator)
    if recipe.privacy != "clipped":
        try:
            recipe = type(recipe).model_validate(recipe.model_dump() | {"privacy": "clipped"})
        except ValueError as error:
            raise InvalidRecipe(f"privacy: {error}") from error
    if privacy.noise_multiplier is None and privacy.epsilon is not None:
        steps, rate = request.training.steps, privacy.sampling_rate
        noise = answer(AccountingRequest(epsilon=privacy.epsilon, delta=privacy.delta, sampling_rate=rate, steps=steps))
        privacy = privacy.model_copy(update={"noise_multiplier": noise})
    elif privacy.epsilon is not None:
        spent = (run_spending(privacy, request.training.steps),)
        cost = fast_epsilon_of(spent, privacy.delta)
        if cost > privacy.epsilon:
            cost = answer(AccountingRequest(spendings=spent, delta=privacy.delta))
        if cost > privacy.epsilon:
            raise BudgetExceeded(
                f"with noise_multiplier {privacy.sigma:g} the run costs epsilon {cost:.3g} at delta {privacy.delta:g}, "
                f"more than the {privacy.epsilon:g} that the job allows: leave noise_multiplier out and it is found",
                epsilon=cost,
                budget=privacy.epsilon,
                delta=privacy.delta,
            )
    return request.model_copy(update={"recipe": recipe, "privacy": privacy})


def prepare_privacy(database: Database, tenant: str, request: JobRequest) -> None:
    """Checks before the transaction of a private job that it will find its accounting in the cache.

    Raises as `resolve_privacy`, or NotAccounted.
    """
    resolved = resolve_privacy(request, known_answer)
    with database.reading() as session:
        checks = PrivacyService(session).budget_checks(tenant, resolved)
    for check in checks:
        known_answer(check)


class PrivacyService(JobSubscriber):
    """Spendings and budgets in one transaction. As a subscriber it charges jobs to them."""

    def __init__(self, session: Session) -> None:
        self._privacy = PrivacyRepository(session)
        self._bindings = BindingRepository(session)
        self._with_budgets: dict[str, bool] = {}  # by tenant: one transaction may begin many jobs

    def resolve_request(self, request: JobRequest) -> JobRequest:
        """Returns the request with its noise multiplier computed. Raises the errors of `resolve_privacy`."""
        return resolve_privacy(request)

    def admit(self, tenant: str, request: JobRequest) -> None:
        """Raises BudgetExceeded if a resolved job would spend more than its user's budget has left.

        Also if it would spend more than is left of its data set on the one device that may train it.
        """
        spending = _spending_of(request)
        self._check(tenant, request.user, spending)
        if request.device is not None:
            self._check_dataset(tenant, request, request.device, spending)

    def budget_checks(self, tenant: str, request: JobRequest) -> list[AccountingRequest]:
        """Returns what `admit` will account for; nothing without a budget, or if the fast bound shows it is enough."""
        limit = self._privacy.limit(tenant, request.user)
        if request.privacy is None or limit is None or limit.epsilon is None:
            return []
        before = self._privacy.of_user(tenant, request.user)
        after = [*before, run_spending(request.privacy, request.training.steps)]
        if known_epsilon_of(after, limit.delta) <= limit.epsilon:
            return []
        return [AccountingRequest(spendings=tuple(spent), delta=limit.delta) for spent in (before, after)]

    def created(self, job: Job) -> None:
        """Reserves what a new job will spend."""
        self._spend(job, None)

    def begin(self, job: Job, device_id: str) -> None:
        """Notes that a device, which is locked, gets a job; one that had it before goes on with its own run.

        Raises BudgetExceeded if another run of it would be one too many for its user, or for the device's data set.
        """
        spending = _spending_of(job.request)
        runs = self._privacy.of_job(job.id) if spending is not None else []
        if any(run.device_id == device_id for run in runs):
            return
        reserved = next((run for run in runs if run.device_id is None), None)
        if spending is not None and reserved is None:
            self._check(job.tenant, job.user, spending)
        self._check_dataset(job.tenant, job.request, device_id, spending)
        if reserved is None:
            self._spend(job, device_id)
        else:
            reserved.device_id, reserved.spent_at = device_id, utc_now()

    def ended(self, job: Job) -> None:
        """Deletes the unspent reservation of a job that has ended."""
        if job.request.privacy is not None:
            self._privacy.forget_reserved(job.id)

    def of_user(self, tenant: str, user: str) -> UserPrivacy:
        """Returns the privacy spent on a user's data. Raises NotAccounted."""
        limit = self._privacy.limit(tenant, user)
        delta = DELTA if limit is None else limit.delta
        return UserPrivacy(
            user=user,
            epsilon=_finite(exact_epsilon_of(self._privacy.of_user(tenant, user), delta)),
            delta=delta,
            budget=None if limit is None else limit.epsilon,
            runs=self._privacy.runs(tenant, user),
            unprotected=self._privacy.unprotected(tenant, user),
        )

    def of_device(self, tenant: str, device_id: str) -> list[DatasetPrivacy]:
        """Returns the privacy spent on each data set of a device. Raises NotAccounted."""
        bound_users, views = self._bindings.users(device_id), []
        for dataset, runs in self._privacy.datasets_of(device_id).items():
            spent = self._privacy.of_dataset(device_id, dataset)
            limits = self._privacy.limits(tenant, bound_users | spent.keys())
            delta = limits[0].delta if limits else DELTA
            views.append(
                DatasetPrivacy(
                    dataset=dataset,
                    users=sorted(spent),
                    epsilon=_finite(exact_epsilon_of(_all(spent), delta)),
                    delta=delta,
                    budget=limits[0].epsilon if limits else None,
                    runs=runs,
                )
            )
        return views

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
                dataset=job.dataset,
                device_id=device_id,
                sampling_rate=privacy.sampling_rate,
                noise_multiplier=privacy.sigma,
                steps=job.request.training.steps,
                spent_at=utc_now(),
            )
        )

    def _check(self, tenant: str, user: str, spending: Spending | None) -> None:
        limit = self._privacy.limit(tenant, user, lock=True)
        if limit is None or limit.epsilon is None:
            return
        if spending is None:
            raise BudgetExceeded(
                f"user {user!r} has a privacy budget of epsilon {limit.epsilon:g}, and a job without `privacy` has no "
                "bound at all: give it one",
                budget=limit.epsilon,
                delta=limit.delta,
            )
        spent = self._privacy.of_user(tenant, user)
        # Called within writing transactions. Before that of a submission, `prepare_privacy` has computed both.
        before, after = known_epsilon_of(spent, limit.delta), known_epsilon_of([*spent, spending], limit.delta)
        if after > limit.epsilon:
            raise BudgetExceeded(
                f"user {user!r}: {before:.3g} of a privacy budget of epsilon {limit.epsilon:g} is spent at delta "
                f"{limit.delta:g}, and with this run it would be {after:.3g}",
                spent=_finite(before),
                epsilon=_finite(after),
                budget=limit.epsilon,
                delta=limit.delta,
            )

    def _check_dataset(self, tenant: str, request: JobRequest, device_id: str, spending: Spending | None) -> None:
        """Raises BudgetExceeded if a run would spend more on a device's data set than the strictest budget allows.

        The budgets are those of the users who are bound to the device, or whose jobs have spent on the data set.
        """
        if not self._has_budgets(tenant):
            return
        spent = self._privacy.of_dataset(device_id, request.dataset)
        for limit in self._privacy.limits(tenant, self._bindings.users(device_id) | spent.keys()):
            dataset_name = f"data set {request.dataset!r} of device {device_id}"
            if spending is None:
                raise BudgetExceeded(
                    f"{dataset_name} has a privacy budget of epsilon {limit.epsilon:g}, that of user {limit.user!r}, "
                    "and a job without `privacy` has no bound at all: give it one",
                    budget=limit.epsilon,
                    delta=limit.delta,
                )
            if limit.user == request.user and spent.keys() <= {request.user}:
                continue  # a part of what the user was charged, which is within the user's budget
            # The fast bound, because this is called within writing transactions.
            after = fast_epsilon_of([*_all(spent), spending], limit.delta)
            if limit.epsilon is not None and after > limit.epsilon:
                raise BudgetExceeded(
                    f"{dataset_name}: with this run, up to {after:.3g} of a privacy budget of epsilon "
                    f"{limit.epsilon:g} at delta {limit.delta:g} would be spent; "
                    f"the budget is that of user {limit.user!r}",
                    epsilon=_finite(after),
                    budget=limit.epsilon,
                    delta=limit.delta,
                )

    def _has_budgets(self, tenant: str) -> bool:
        if tenant not in self._with_budgets:
            self._with_budgets[tenant] = self._privacy.has_limits(tenant)
        return self._with_budgets[tenant]


def _spending_of(request: JobRequest) -> Spending | None:
    """Returns the privacy that a run of a resolved job spends; None: it is not private."""
    return None if request.privacy is None else run_spending(request.privacy, request.training.steps)


def _all(spent: Mapping[str, Sequence[Spending]]) -> list[Spending]:
    return [spending for spendings in spent.values() for spending in spendings]


def _finite(epsilon: float) -> float | None:
    """None for what JSON has no number for."""
    return epsilon if math.isfinite(epsilon) else None
