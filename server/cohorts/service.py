"""Making cohorts, letting users in and out. Knows no HTTP.

The A that all members share is pinned when the cohort is made: base, layout and seed or calibration, and the sha256
over its values.
Every method changes a cohort with its row locked (`server.db.locking`).
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.adapters.audit import Actor
from server.adapters.models import Adapter
from server.adapters.repository import AdapterRepository
from server.artifacts.store import ArtifactStore
from server.bases.service import BaseService
from server.calibrations.reading import calibration_of
from server.calibrations.service import CalibrationService
from server.clock import utc_now
from server.cohorts.models import Cohort, CohortMember
from server.cohorts.repository import CohortRepository
from server.cohorts.rounds import RoundService
from server.cohorts.trail import note
from server.devices.repository import DeviceRepository
from server.jobs.recipes import resolve_recipe, resolve_task
from server.jobs.repository import JobRepository
from server.privacy.service import settled
from shared.cohort import CohortSettings, MemberRequest
from shared.errors import CohortNotFound, Conflict, NotFound
from shared.job import JobRequest
from shared.lora import a_fingerprint, flat_size
from shared.recipe import BaseRef
from shared.registry import AdapterAction

NOBODY = ""  # whose a cohort's adapter is: no user's alone


class CohortService:
    """Cohorts in one transaction."""

    def __init__(self, session: Session, artifacts: ArtifactStore) -> None:
        self._session, self._artifacts = session, artifacts
        self._cohorts = CohortRepository(session)
        self._adapters = AdapterRepository(session)
        self._rounds = RoundService(session)

    def create(self, tenant: str, settings: CohortSettings, actor: Actor) -> Cohort:
        """A new cohort and its adapter, without members and versions.

        Raises UnknownBase, InvalidTask, InvalidRecipe, BudgetExceeded if a run would cost more than its epsilon, or
        Conflict if the name is taken by a cohort or an adapter.
        """
        self._check_name(tenant, settings.name)
        bases = BaseService(self._session, self._artifacts)
        base = bases.named(settings.base)
        request = JobRequest(
            base=settings.base,
            user=settings.name,
            adapter=settings.name,
            task=settings.task,
            dataset=settings.dataset,
            recipe=settings.recipe,
            training=settings.training,
            privacy=None if settings.privacy is None else settings.privacy.examples,
        )
        request = settled(request)
        task = resolve_task(request)
        reference = BaseRef(name=base.name, sha256=base.sha256)
        recipe = resolve_recipe(request, task, reference, base.shape, bases.tokenizer(base))
        CalibrationService(self._session, self._artifacts).check(recipe, base.shape)
        # A later release may have another default; this cohort keeps what it was given.
        training = settings.training.model_copy(update={"eps": settings.training.eps_for(recipe)})
        now = utc_now()
        cohort = Cohort(
            tenant=tenant,
            name=settings.name,
            settings=settings.model_copy(update=_settled_parts(settings, request) | {"training": training}),
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
        self._adapters.add(Adapter(tenant=tenant, name=settings.name, user=NOBODY, versions=0, created_at=now))
        note(self._session, cohort, actor, AdapterAction.COHORT_MADE, f"{settings.algorithm.name}, {settings.upload}")
        return cohort

    def _check_name(self, tenant: str, name: str) -> None:
        """The cohort's versions must be nobody else's."""
        if self._cohorts.get(tenant, name) is not None:
            raise Conflict(f"there is a cohort {name!r} already")
        owner = JobRepository(self._session).other_user(tenant, name, NOBODY)
        adapter = self._adapters.get(tenant, name)
        if adapter is not None or owner is not None:
            whose = adapter.user if adapter is not None else owner
            raise Conflict(f"adapter {name!r} is user {whose!r}'s; choose another name for the cohort")

    def get(self, tenant: str, name: str, *, lock: bool = False) -> Cohort:
        """A cohort of the tenant. Raises CohortNotFound."""
        found = self._cohorts.get_locked(tenant, name) if lock else self._cohorts.get(tenant, name)
        if found is None:
            raise CohortNotFound(f"there is no cohort {name!r}")
        return found

    def join(self, cohort: Cohort, user: str, asked: MemberRequest, actor: Actor) -> CohortMember:
        """A user joins with a device, or comes back, or takes another device; the same again changes nothing.

        cohort: locked. A round that is open goes on without him, unless it takes updates of any start. Raises
        NotFound for an unknown device, or Conflict if it is another member's.
        """
        device = DeviceRepository(self._session).get(cohort.tenant, asked.device)
        if device is None or device.revoked_at is not None:
            raise NotFound(f"device: no device {asked.device!r} is enrolled here")
        holder = self._cohorts.member_of_device(cohort, asked.device)
        if holder is not None and holder.user != user:
            raise Conflict(
                f"device {asked.device} trains for user {holder.user!r} in this cohort; one device, one user"
            )
        member = self._cohorts.member(cohort, user)
        if member is not None and (member.device_id, member.left_at) == (asked.device, None):
            return member
        if member is None:
            member = CohortMember(cohort_number=cohort.number, user=user, device_id=asked.device)
        elif member.left_at is None:
            self._rounds.drop(cohort, member)  # what the former device was asked for, or has sent
        member.device_id, member.joined_at, member.left_at = asked.device, utc_now(), None
        self._cohorts.add(member)
        self._rounds.enlist(cohort)
        note(self._session, cohort, actor, AdapterAction.JOINED, f"user {user} with device {asked.device}")
        return member

    def leave(self, cohort: Cohort, user: str, actor: Actor) -> None:
        """A user leaves; what he sent to a round that has not ended does not count. Leaving twice is fine.

        cohort: locked. Raises NotFound for a user who never was a member.
        """
        member = self._cohorts.member(cohort, user)
        if member is None:
            raise NotFound(f"user {user!r} is no member of cohort {cohort.name!r}")
        if member.left_at is not None:
            return
        member.left_at = utc_now()
        note(self._session, cohort, actor, AdapterAction.LEFT, f"user {user}")
        self._rounds.drop(cohort, member)


def _settled_parts(settings: CohortSettings, request: JobRequest) -> dict[str, object]:
    """What a request whose noise was found has besides what was asked for."""
    if settings.privacy is None:
        return {}
    privacy = settings.privacy.model_copy(update={"examples": request.privacy})
    return {"recipe": request.recipe, "privacy": privacy}
