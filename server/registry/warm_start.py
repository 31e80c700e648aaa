"""Warm starts: a job continues an adapter version, which is pinned when the job is submitted.

The device that leases the job downloads the version, unless it was deleted in the meantime. With start `auto`, the
device gets several candidates, and the version that it chooses is pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from server.jobs.repository import Job
from server.programs.service import ProgramRepository
from server.registry.device_adapters import SHARED
from server.registry.models import Adapter, StoredVersion
from server.registry.repository import resolve
from shared.errors import Conflict, NotFound, StartDeleted, StartMismatch, VersionHeld
from shared.job import AUTO, JobRequest, JobStart
from shared.program import ProgramManifest
from shared.recipe import Recipe
from shared.registry import Parent, SignedAdapter, VersionState
from shared.zo.lora import BaseShape, flat_size

MAX_CANDIDATES = 4
# The recipe fields that determine the layout of B: (field, its name in messages).
_LAYOUT = (("rank", "rank"), ("targets", "targets"), ("layers", "adapted layers"))


@dataclass(frozen=True)
class PinnedVersion:
    """The version that a new job continues."""

    version: StoredVersion
    programs: ProgramRepository
    user: str | None  # whose adapter it is; None: a cohort's

    @property
    def parent(self) -> Parent:
        """The version as the lineage of the result names it."""
        return parent_of(self.version)

    def check(self, recipe: Recipe, shape: BaseShape) -> None:
        """Raises StartMismatch unless a program of `recipe` can go on from the version's B."""
        check_fit(self.version, recipe, shape)
        signed, a_sha256 = self.programs.signed(recipe.id), self.version.a_sha256
        if signed is not None and a_sha256 != signed.manifest.a_sha256:
            raise _mismatch("a_sha256", "frozen A, by its sha256", a_sha256, signed.manifest.a_sha256)


class StartService:
    """Starts of jobs in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._programs = ProgramRepository(session)

    def pin(self, tenant: str, request: JobRequest, start: JobStart) -> tuple[JobRequest, PinnedVersion]:
        """Returns the request with its start pinned to one version, and that version.

        If the request leaves the recipe out, the start's recipe is used. Raises AdapterNotFound, RevisionNotFound,
        or VersionHeld.
        """
        adapter, version = resolve(self._session, tenant, start.adapter, start.revision)
        if version.state is VersionState.HELD:
            raise VersionHeld(f"version {version.version} of {adapter.name!r} waits for approval: approve it first")
        pinned = start.model_copy(update={"revision": version.signed.manifest.revision})
        changes: dict[str, object] = {"start": pinned}
        if "recipe" not in request.model_fields_set:
            changes["recipe"] = version.recipe.requested()
        return request.model_copy(update=changes), PinnedVersion(version, self._programs, adapter.user or None)

    def file(self, job: Job) -> StoredVersion:
        """Returns the version that a job continues. Raises StartDeleted, or NotFound for a job without a start."""
        if job.start is None:
            raise NotFound(f"job {job.id} goes on from no adapter; it begins from B = 0")
        try:
            _, version = resolve(self._session, job.tenant, job.start.adapter, job.start.revision)
        except NotFound as error:
            start_name = f"version {job.start.version} of {job.start.adapter!r}"
            raise StartDeleted(f"{start_name}, which job {job.id} goes on from, was deleted") from error
        return version

    def signed(self, job: Job) -> SignedAdapter:
        """Returns the signed version that a job continues. Raises as `file`."""
        return self.file(job).signed

    def candidates(self, job: Job, program: ProgramManifest) -> Sequence[SignedAdapter]:
        """Returns up to MAX_CANDIDATES versions among which the device of a job with start `auto` chooses; none for
        other jobs.

        They are `main` of the job's own adapter, then of the user's others, then of the cohorts that the device is a
        member of, newest first, as far as a program can go on from them. The device may download all of these.
        """
        if job.request.start != AUTO:
            return ()
        is_main = (Adapter.number == StoredVersion.adapter_number) & (Adapter.main_version == StoredVersion.version)
        shared = SHARED.get()(job.device_id or "")
        statement = (
            select(StoredVersion)
            .join(Adapter, is_main)
            .where(Adapter.tenant == job.tenant, Adapter.deleted_at.is_(None), StoredVersion.deleted_at.is_(None))
            .where(or_(Adapter.user == job.user, Adapter.number.in_(shared)))
            .where(StoredVersion.a_sha256 == program.a_sha256)
            .order_by(Adapter.name != job.adapter, Adapter.user != job.user, StoredVersion.number.desc())
        )
        fitting = (version.signed for version in self._session.scalars(statement) if _fits(version, job.recipe))
        return tuple(islice(fitting, MAX_CANDIDATES))

    def choose(self, job: Job, program: ProgramManifest, chosen: JobStart | None) -> None:
        """Pins the start of a job with start `auto` to a candidate; None: B = 0. Repeating it changes nothing.

        Raises NotFound if it is not a candidate, Conflict if the job has another start.
        """
        if job.request.start != AUTO:
            if job.request.start != chosen:
                raise Conflict(f"job {job.id} has another start already; ask for its lease again")
            return
        if chosen is not None:
            manifests = [candidate.manifest for candidate in self.candidates(job, program)]
            found = [each for each in manifests if (each.adapter, each.revision) == (chosen.adapter, chosen.revision)]
            if not found:
                raise NotFound(f"{chosen.adapter}@{chosen.revision} is not a start of job {job.id}")
            job.start = Parent(adapter=chosen.adapter, version=found[0].version, revision=chosen.revision)
        job.request = job.request.model_copy(update={"start": chosen})


def parent_of(start: StoredVersion) -> Parent:
    """Returns a version as the lineage of adapters trained from it names it."""
    manifest = start.signed.manifest
    return Parent(adapter=manifest.adapter, version=manifest.version, revision=manifest.revision)


def _fits(start: StoredVersion, recipe: Recipe) -> bool:
    """Returns whether a program of `recipe` can go on from the version's B."""
    try:
        check_fit(start, recipe, start.shape)
    except StartMismatch:
        return False
    return True


def check_fit(start: StoredVersion, recipe: Recipe, shape: BaseShape) -> None:
    """Raises StartMismatch, naming what differs: base, layout of B, A, scale or D.

    A's values follow from base, layout and seed alone, so that equal ones need not be drawn to be known equal.
    """
    start_recipe = start.recipe
    if start_recipe.base.sha256 != recipe.base.sha256:
        raise _mismatch("base", "base model", start_recipe.base.sha256, recipe.base.sha256)
    for field, description in _LAYOUT:
        if getattr(start_recipe, field) != getattr(recipe, field):
            raise _mismatch(f"recipe.{field}", description, getattr(start_recipe, field), getattr(recipe, field))
    if start_recipe.a_seed != recipe.a_seed:
        raise _mismatch("recipe.a_seed", "frozen A, by its seed", start_recipe.a_seed, recipe.a_seed)
    if start_recipe.calibration != recipe.calibration:
        raise _mismatch(
            "recipe.calibration", "frozen A, by its calibration", start_recipe.calibration, recipe.calibration
        )
    if start_recipe.alpha != recipe.alpha:
        raise _mismatch("recipe.alpha", "alpha, which scales B", start_recipe.alpha, recipe.alpha)
    if start.size_d != flat_size(recipe, shape):
        raise _mismatch("size_d", "D", start.size_d, flat_size(recipe, shape))


def _mismatch(field: str, description: str, start: object, job: object) -> StartMismatch:
    return StartMismatch(
        f"start: the version's {description} is {start}, the job's is {job}; give the job the same, or leave "
        "`recipe` out",
        field=field,
        start=start,
        job=job,
    )
