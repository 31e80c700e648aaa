"""Creates cohorts, and adds and removes their members.

The A that all members share is pinned when the cohort is created: base, layout, seed or calibration, and the sha256 of
its values. Every method changes a cohort with its row locked (`server.database.database`).
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.catalog.bases import BaseService
from server.catalog.calibrations.service import CalibrationService, calibration_of
from server.database.columns import utc_now
from server.database.database import lock_name
from server.federation.member_recipes import member_demands
from server.federation.models import Cohort, CohortMember
from server.federation.privacy.service import resolve_privacy
from server.federation.repository import CohortRepository, record
from server.federation.rounds import RoundService
from server.identity.devices.service import BindingService
from server.identity.quotas import Quota, QuotaService
from server.jobs.recipes import choose_recipe, resolve_task
from server.jobs.repository import JobRepository
from server.registry.models import Actor, Adapter
from server.registry.repository import AdapterRepository
from server.storage.store import ArtifactStore
from shared.errors import Conflict, NotFound
from shared.federation.cohort import CohortRecipe, CohortSettings, MemberRequest
from shared.job import JobRequest
from shared.registry import AdapterAction
from shared.zo.lora import a_fingerprint, flat_size

NO_USER = ""  # user of a cohort's adapter


def request_of_member(settings: CohortSettings) -> JobRequest:
    """Returns the request of a member's job in the cohort's rounds, as the settings state it."""
    return JobRequest(
        base=settings.base,
        user=settings.name,
        adapter=settings.name,
        task=settings.task,
        dataset=settings.dataset,
        recipe=settings.recipe,
        training=settings.training,
        privacy=None if settings.privacy is None else settings.privacy.examples,
    )


class CohortService:
    """Manages cohorts in one transaction."""

    def __init__(self, session: Session, artifacts: ArtifactStore) -> None:
        self._session, self._artifacts = session, artifacts
        self._cohorts = CohortRepository(session)
        self._adapters = AdapterRepository(session)
        self._rounds = RoundService(session)

    def create(self, tenant: str, settings: CohortSettings, actor: Actor) -> Cohort:
        """Creates a cohort and its adapter, without members and versions.

        Raises UnknownBase, InvalidTask, InvalidRecipe, BudgetExceeded if a run would exceed its epsilon, or Conflict if
        the name is taken by a cohort or an adapter, or QuotaExceeded.
        """
        self._check_name(tenant, settings.name)
        bases = BaseService(self._session, self._artifacts)
        base = bases.get(settings.base)
        request = resolve_privacy(request_of_member(settings))
        task = resolve_task(request)
        choice = choose_recipe(request, task, base, bases.tokenizer(base), None, member_demands(settings, request))
        recipe = choice.recipe
        CalibrationService(self._session, self._artifacts).check(recipe, base.shape)
        # Stored explicitly, so that a different default in a later release does not change this cohort.
        training = settings.training.model_copy(update={"eps": settings.training.eps_for(recipe)})
        now = utc_now()
        cohort = Cohort(
            tenant=tenant,
            name=settings.name,
            settings=settings.model_copy(update=_resolved_settings(settings, request) | {"training": training}),
            task=task,
            recipe=recipe,
            recipe_id=recipe.id,
            shape=base.shape,
            a_sha256=a_fingerprint(recipe, base.shape, calibration_of(self._artifacts, recipe)),
            size_d=flat_size(recipe, base.shape),
            rounds=0,
            opens=settings.automatic,
            busy=False,
            created_at=now,
        )
        self._cohorts.add(cohort)
        self._adapters.add(Adapter(tenant=tenant, name=settings.name, user=NO_USER, versions=0, created_at=now))
        QuotaService(self._session).check(tenant, Quota.COHORTS, lambda: self._cohorts.count(tenant))
        parts = settings.algorithm.name, settings.upload, choice.reason
        record(self._session, cohort, actor, AdapterAction.COHORT_CREATED, ", ".join(filter(None, parts)))
        return cohort

    def _check_name(self, tenant: str, name: str) -> None:
        """Raises Conflict if the name is taken by a cohort or an adapter."""
        lock_name(self._session, "adapter", tenant, name)
        if self._cohorts.get(tenant, name) is not None:
            raise Conflict(f"cohort {name!r} already exists")
        owner = JobRepository(self._session).other_user(tenant, name, NO_USER)
        adapter = self._adapters.get(tenant, name)
        if adapter is not None or owner is not None:
            user = adapter.user if adapter is not None else owner
            raise Conflict(f"adapter {name!r} belongs to user {user!r}; choose another name for the cohort")

    def join(self, cohort: Cohort, user: str, request: MemberRequest, actor: Actor) -> CohortMember:
        """Adds a user with a device, adds a former member again, or changes a member's device. Idempotent.

        cohort: locked. The user takes part in an open round only if it is asynchronous. Raises NotFound for an unknown
        device, DeviceNotBound for one that does not train for the user, or Conflict if the device belongs to another
        member.
        """
        BindingService(self._session).check(cohort.tenant, request.device, user)
        holder = self._cohorts.member_of_device(cohort, request.device)
        if holder is not None and holder.user != user:
            raise Conflict(
                f"device {request.device} already trains for user {holder.user!r} in this cohort; use another device"
            )
        member = self._cohorts.member(cohort, user)
        if member is not None and (member.device_id, member.left_at) == (request.device, None):
            return member
        if member is None:
            member = CohortMember(cohort_number=cohort.number, user=user, device_id=request.device)
        elif member.left_at is None:
            self._rounds.drop(cohort, member)  # jobs and updates of the former device
        member.device_id, member.joined_at, member.left_at = request.device, utc_now(), None
        self._cohorts.add(member)
        self._rounds.enlist(cohort)
        record(self._session, cohort, actor, AdapterAction.JOINED, f"user {user} with device {request.device}")
        return member

    def leave(self, cohort: Cohort, user: str, actor: Actor) -> None:
        """Removes a user and discards the user's updates to rounds that have not ended. Idempotent.

        cohort: locked. Raises NotFound for a user who was never a member.
        """
        member = self._cohorts.member(cohort, user)
        if member is None:
            raise NotFound(f"user {user!r} is not a member of cohort {cohort.name!r}")
        if member.left_at is not None:
            return
        member.left_at = utc_now()
        record(self._session, cohort, actor, AdapterAction.LEFT, f"user {user}")
        self._rounds.drop(cohort, member)


def _resolved_settings(settings: CohortSettings, request: JobRequest) -> dict[str, object]:
    """Returns the settings with the recipe and the noise multiplier that the privacy resolution computed."""
    if settings.privacy is None:
        return {}
    privacy = settings.privacy.model_copy(update={"examples": request.privacy})
    return {"recipe": CohortRecipe.model_validate(request.recipe.model_dump()), "privacy": privacy}
