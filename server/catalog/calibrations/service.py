"""Calibrations that the operator registered: their SQL, their rules, and reading the one that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache

from sqlalchemy import BigInteger, ColumnElement, ForeignKey, String, Text, select, type_coerce
from sqlalchemy.orm import InstrumentedAttribute, Mapped, Session, mapped_column

from server.catalog.bases import BaseModelEntry
from server.database.columns import Numbered, Table, UtcTime, utc_now, view_of
from server.database.database import Database, Repository, locked
from server.database.paging import PageRequest, PageRows, page_of
from server.ports import Port
from server.storage.store import ArtifactStore, Damaged, FileColumn, hold
from shared.catalog import CalibrationView
from shared.errors import BadRequest, Conflict, InvalidRecipe, InvalidUpload, NotFound, UnknownBase
from shared.recipe import Recipe, RequestedRecipe
from shared.zo.calibration import Calibration, load_calibration
from shared.zo.lora import BaseShape, frozen_a, lora_modules


class StoredCalibration(Numbered, Table):
    """A calibration, by the sha256 of its file, which recipes name. It belongs to the server and not to a tenant."""

    __tablename__ = "calibrations"

    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    base_number: Mapped[int] = mapped_column(ForeignKey("bases.number"))
    kind: Mapped[str] = mapped_column(String(16))
    task: Mapped[str] = mapped_column(String(200))
    examples: Mapped[int] = mapped_column(BigInteger)
    modules: Mapped[int] = mapped_column()
    width: Mapped[int] = mapped_column()
    size: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UtcTime)


FILES = (FileColumn(StoredCalibration.sha256),)


# Each returns the name of an object that needs A from the calibration of that sha256, or None.
USERS: Port[tuple[Callable[[Session, str], str | None], ...]] = Port("calibrations.users")


class CalibrationRepository(Repository):
    """Calibrations in one session."""

    def by_sha256(self, sha256: str) -> StoredCalibration | None:
        """Returns the calibration of that file, locked so that it is not removed until the transaction ends."""
        statement = select(StoredCalibration).where(StoredCalibration.sha256 == sha256)
        return self._session.scalar(statement.with_for_update(read=True))

    def base(self, calibration: StoredCalibration) -> BaseModelEntry:
        """A calibration's base model."""
        return self._session.get_one(BaseModelEntry, calibration.base_number)

    def page(self, request: PageRequest) -> PageRows[StoredCalibration]:
        """Some of all calibrations, newest first."""
        return page_of(self._session, StoredCalibration, request)

    def views(self, calibrations: Sequence[StoredCalibration]) -> list[CalibrationView]:
        """As the API shows them."""
        return [view_of(CalibrationView, each, base=self.base(each).name) for each in calibrations]

    def user(self, sha256: str) -> str | None:
        """Returns the name of an adapter, a cohort or an unfinished job that needs A from a calibration, or None."""
        for find in USERS.get():
            if (user := find(self._session, sha256)) is not None:
                return user
        return None


def names_calibration(recipe: InstrumentedAttribute[Recipe], sha256: str) -> ColumnElement[bool]:
    """Returns the condition that a recipe's JSON names a calibration. No other field can contain its sha256."""
    return type_coerce(recipe, Text).contains(f'"calibration":"{sha256}"')


def calibration_file(artifacts: ArtifactStore, recipe: Recipe) -> bytes | None:
    """Returns the verified file of the calibration that the recipe names; None if it names none.

    Raises Damaged if the file is missing, or Unavailable.
    """
    if recipe.calibration is None:
        return None
    try:
        return artifacts.read(recipe.calibration)
    except NotFound as error:
        raise _damaged(recipe.calibration) from error


def calibration_of(artifacts: ArtifactStore, recipe: Recipe | RequestedRecipe) -> Calibration | None:
    """Returns the calibration that the recipe names; None if it names none. Raises as `calibration_file`."""
    return None if recipe.calibration is None else _loaded(artifacts, recipe.calibration)


@lru_cache(maxsize=4)
def _loaded(artifacts: ArtifactStore, sha256: str) -> Calibration:
    try:
        return load_calibration(artifacts.read(sha256))
    except (NotFound, InvalidUpload) as error:
        raise _damaged(sha256) from error


def _damaged(sha256: str) -> Damaged:
    return Damaged(
        f"the calibration {sha256} that the recipe takes A from is damaged or gone; register its file again "
        "(`mobizo-server calibration add`), or restore it from a backup"
    )


def register_file(database: Database, artifacts: ArtifactStore, data: bytes) -> CalibrationView:
    """Stores and registers a calibration file, and returns it as the API shows it.

    Raises InvalidUpload for an invalid file, or as `CalibrationService.register`.
    """
    calibration = load_calibration(data)
    with database.reading() as session:
        CalibrationService(session, artifacts).base_of(calibration)
    artifacts.put(data)
    with database.writing() as session:
        calibrations = CalibrationService(session, artifacts)
        return calibrations.views([calibrations.register(calibration, len(data))])[0]


_LISTS = "`mobizo-server calibration list` and GET /v1/calibrations list those that are"


class CalibrationService(CalibrationRepository):
    """Calibrations and their files in one transaction."""

    def __init__(self, session: Session, artifacts: ArtifactStore) -> None:
        super().__init__(session)
        self._artifacts = artifacts

    def base_of(self, calibration: Calibration) -> BaseModelEntry:
        """Returns the base model that a calibration was made for. Raises UnknownBase if it is not registered."""
        sha256 = calibration.metadata.base.sha256
        statement = select(BaseModelEntry).where(BaseModelEntry.sha256 == sha256).order_by(BaseModelEntry.number)
        base = self._session.scalars(statement).first()
        if base is None:
            raise UnknownBase(
                f"the calibration was made for {calibration.metadata.base.name!r} of sha256 "
                f"{sha256[:12]}..., and no such base model is registered; "
                "`mobizo-server base add` registers it"
            )
        return base

    def register(self, calibration: Calibration, size: int) -> StoredCalibration:
        """Registers a calibration whose file of `size` bytes is stored. Registering it again changes nothing.

        Raises UnknownBase if its base model is not registered, or Collected.
        """
        base = self.base_of(calibration)
        sha256 = calibration.sha256
        hold(self._session, self._artifacts, [sha256])
        existing = self.by_sha256(sha256)
        if existing is not None:
            return existing
        stored = StoredCalibration(
            sha256=sha256,
            base_number=base.number,
            kind=calibration.metadata.kind,
            task=calibration.metadata.task,
            examples=calibration.metadata.examples,
            modules=len(calibration.directions),
            width=calibration.width,
            size=size,
            created_at=utc_now(),
        )
        self.add(stored)
        return stored

    def check(self, recipe: Recipe, shape: BaseShape) -> None:
        """Raises InvalidRecipe unless the recipe draws A or takes it from a registered calibration.

        That calibration is not removed until the transaction ends.
        """
        if recipe.calibration is None:
            return
        if self.by_sha256(recipe.calibration) is None:
            raise InvalidRecipe(f"recipe.calibration: none of sha256 {recipe.calibration} is registered here; {_LISTS}")
        calibration = calibration_of(self._artifacts, recipe)
        for module in lora_modules(recipe, shape):
            try:
                frozen_a(recipe, module, calibration)
            except InvalidRecipe as error:
                raise InvalidRecipe(f"recipe.{error.detail}") from error

    def remove(self, beginning: str) -> StoredCalibration:
        """Removes the calibration whose sha256 begins so.

        Raises NotFound, BadRequest if several match, or Conflict while it is in use.
        """
        # Locked, so that no new recipe names them.
        named = locked(select(StoredCalibration).where(StoredCalibration.sha256.startswith(beginning)))
        calibrations = self._session.scalars(named).all()
        if not calibrations:
            raise NotFound(f"no calibration's sha256 begins with {beginning!r}; {_LISTS}")
        if len(calibrations) > 1:
            raise BadRequest(f"{len(calibrations)} calibrations' sha256 begin with {beginning!r}; give more digits")
        user = self.user(calibrations[0].sha256)
        if user is not None:
            raise Conflict(
                f"{user} takes its A from calibration {calibrations[0].sha256}; it cannot be removed while it does"
            )
        self._session.delete(calibrations[0])  # the next garbage collection removes its file
        return calibrations[0]
