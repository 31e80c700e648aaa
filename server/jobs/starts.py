"""The adapter version that a job goes on from: pinned when the job is submitted, handed to the device that holds it.

A version deleted after that is handed to nobody any more. Knows no HTTP and no files.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.adapters.models import StoredVersion
from server.adapters.resolution import resolve
from server.jobs.models import Job
from server.programs.repository import ProgramRepository
from shared.errors import NotFound, StartDeleted, StartMismatch, VersionHeld
from shared.job import JobRequest
from shared.lora import BaseShape, flat_size
from shared.recipe import Recipe, RecipeSettings
from shared.registry import Parent, SignedAdapter, VersionState

_SETTINGS = tuple(RecipeSettings.model_fields)
# What places B's elements: (field, its name for people).
_LAYOUT = (("rank", "rank"), ("targets", "targets"), ("layers", "adapted layers"))


class StartService:
    """Starts of jobs in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._programs = ProgramRepository(session)

    def pin(self, tenant: str, request: JobRequest) -> tuple[JobRequest, StoredVersion | None]:
        """The request with its start pinned to one version, and that version; None for a job without a start.

        A recipe that the request leaves out is the start's. Raises AdapterNotFound, RevisionNotFound, VersionHeld, or
        Unavailable for a version that an older server made and that is not signed yet.
        """
        if request.start is None:
            return request, None
        adapter, version = resolve(self._session, tenant, request.start.adapter, request.start.revision)
        if version.state is VersionState.HELD:
            raise VersionHeld(f"version {version.version} of {adapter.name!r} waits for approval: approve it first")
        start = request.start.model_copy(update={"revision": version.signed.manifest.revision})
        changes: dict[str, object] = {"start": start}
        if "recipe" not in request.model_fields_set:
            changes["recipe"] = RecipeSettings(**{name: getattr(version.recipe, name) for name in _SETTINGS})
        return request.model_copy(update=changes), version

    def check(self, start: StoredVersion, recipe: Recipe, shape: BaseShape) -> None:
        """Raises StartMismatch unless a program of `recipe` can go on from a version's B."""
        check_fit(start, recipe, shape)
        signed = self._programs.signed(recipe.id)
        if signed is not None and start.a_sha256 != signed.manifest.a_sha256:
            raise _mismatch("a_sha256", "frozen A, by its sha256", start.a_sha256, signed.manifest.a_sha256)

    def file(self, job: Job) -> StoredVersion:
        """The version whose B a job goes on from. Raises StartDeleted, or NotFound for a job without a start."""
        if job.start is None:
            raise NotFound(f"job {job.id} goes on from no adapter; it begins from B = 0")
        try:
            _, version = resolve(self._session, job.tenant, job.start.adapter, job.start.revision)
        except NotFound as error:
            named = f"version {job.start.version} of {job.start.adapter!r}"
            raise StartDeleted(f"{named}, which job {job.id} goes on from, was deleted") from error
        return version

    def signed(self, job: Job) -> SignedAdapter | None:
        """What the device that trains a job is told of its start; None for a job without one. Raises StartDeleted."""
        return None if job.start is None else self.file(job).signed


def parent_of(start: StoredVersion) -> Parent:
    """How the lineage of what is trained from a version names it."""
    manifest = start.signed.manifest
    return Parent(adapter=manifest.adapter, version=manifest.version, revision=manifest.revision)


def check_fit(start: StoredVersion, recipe: Recipe, shape: BaseShape) -> None:
    """Raises StartMismatch, naming what differs: base, layout of B, A, scale or D.

    A's values follow from base, layout and seed alone, so that equal ones need not be drawn to be known equal.
    """
    has = start.recipe
    if has.base.sha256 != recipe.base.sha256:
        raise _mismatch("base", "base model", has.base.sha256, recipe.base.sha256)
    for field, words in _LAYOUT:
        if getattr(has, field) != getattr(recipe, field):
            raise _mismatch(f"recipe.{field}", words, getattr(has, field), getattr(recipe, field))
    if has.a_seed != recipe.a_seed:
        raise _mismatch("recipe.a_seed", "frozen A, by its seed", has.a_seed, recipe.a_seed)
    if has.calibration != recipe.calibration:
        raise _mismatch("recipe.calibration", "frozen A, by its calibration", has.calibration, recipe.calibration)
    if has.alpha != recipe.alpha:
        raise _mismatch("recipe.alpha", "alpha, which scales B", has.alpha, recipe.alpha)
    if start.size_d != flat_size(recipe, shape):
        raise _mismatch("size_d", "D", start.size_d, flat_size(recipe, shape))


def _mismatch(field: str, words: str, start: object, job: object) -> StartMismatch:
    return StartMismatch(
        f"start: the version's {words} is {start}, the job's is {job}; give the job the same, or leave `recipe` out",
        field=field,
        start=start,
        job=job,
    )
