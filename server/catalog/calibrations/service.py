"""Calibrations that the operator registered: their SQL, their rules, and reading the one that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache

from sqlalchemy import BigInteger, ColumnElement, ForeignKey, String, Text, select, type_coerce
from sqlalchemy.orm import InstrumentedAttribute, Mapped, Session, mapped_column

from server.catalog.bases import BaseModelEntry
from server.database.columns import Numbered, Table, UtcTime, utc_now
from server.database.database import Database, locked
from server.database.paging import PageRequest, PageRows, page_of
from server.ports import Port
from server.storage.store import ArtifactStore, Damaged, FileColumn, FileReferences, hold
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

    def view(self, base: str) -> CalibrationView:
        """Returns the calibration as the API shows it. base: the name of its base model."""
        return CalibrationView(
            sha256=self.sha256,
            base=base,
            kind=self.kind,
            task=self.task,
            examples=self.examples,
            modules=self.modules,
            width=self.width,
            size=self.size,
            created_at=self.created_at,
        )


FILES = FileReferences(columns=(FileColumn(StoredCalibration.sha256),))


# Each returns the name of an object that needs A from the calibration of that sha256, or None.
USERS: Port[tuple[Callable[[Session, str], str | None], ...]] = Port("calibrations.users")


class CalibrationRepository:
    """Calibrations in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, calibration: StoredCalibration) -> None:
        """Stores a new calibration."""
        self._session.add(calibration)
        self._session.flush()

    def remove(self, calibration: StoredCalibration) -> None:
        """Removes a calibration; the next garbage collection removes its file."""
        self._session.delete(calibration)

    def by_sha256(self, sha256: str) -> StoredCalibration | None:
        """Returns the calibration of that file."""
        return self._session.scalar(select(StoredCalibration).where(StoredCalibration.sha256 == sha256))

    def by_sha256_shared(self, sha256: str) -> StoredCalibration | None:
        """Returns the calibration of that file, locked so that it is not removed until the transaction ends."""
        statement = select(StoredCalibration).where(StoredCalibration.sha256 == sha256)
        return self._session.scalar(statement.with_for_update(read=True))

    def beginning_locked(self, beginning: str) -> Sequence[StoredCalibration]:
        """Returns the calibrations whose sha256 begins so, locked so that no new recipe names them."""
        sha256 = StoredCalibration.sha256
        return self._session.scalars(locked(select(StoredCalibration).where(sha256.startswith(beginning)))).all()

    def bases(self, sha256: str) -> Sequence[BaseModelEntry]:
        """Returns the base models with that sha256, whatever their names."""
        statement = select(BaseModelEntry).where(BaseModelEntry.sha256 == sha256).order_by(BaseModelEntry.number)
        return self._session.scalars(statement).all()

    def base(self, calibration: StoredCalibration) -> BaseModelEntry:
        """A calibration's base model."""
        return self._session.get_one(BaseModelEntry, calibration.base_number)

    def page(self, request: PageRequest) -> PageRows[StoredCalibration]:
        """Some of all calibrations, newest first."""
        return page_of(self._session, select(StoredCalibration), StoredCalibration, request)

    def views(self, calibrations: Sequence[StoredCalibration]) -> list[CalibrationView]:
        """As the API shows them."""
        return [calibration.view(self.base(calibration).name) for calibration in calibrations]

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
        stored = CalibrationService(session, artifacts).register(calibration, len(data))
        return CalibrationRepository(session).views([stored])[0]


_LISTS = "`mobizo-server calibration list` and GET /v1/calibrations list those that are"


class CalibrationService:
    """Calibrations in one transaction."""

    def __init__(self, session: Session, artifacts: ArtifactStore) -> None:
        self._session, self._artifacts = session, artifacts
        self._calibrations = CalibrationRepository(session)

    def base_of(self, calibration: Calibration) -> BaseModelEntry:
        """Returns the base model that a calibration was made for. Raises UnknownBase if it is not registered."""
        bases = self._calibrations.bases(calibration.metadata.base.sha256)
        if not bases:
            raise UnknownBase(
                f"the calibration was made for {calibration.metadata.base.name!r} of sha256 "
                f"{calibration.metadata.base.sha256[:12]}..., and no such base model is registered; "
                "`mobizo-server base add` registers it"
            )
        return bases[0]

    def register(self, calibration: Calibration, size: int) -> StoredCalibration:
        """Registers a calibration whose file of `size` bytes is stored. Registering it again changes nothing.

        Raises UnknownBase if its base model is not registered, or Collected.
        """
        base = self.base_of(calibration)
        sha256 = calibration.sha256
        hold(self._session, self._artifacts, [sha256])
        existing = self._calibrations.by_sha256(sha256)
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
        self._calibrations.add(stored)
        return stored

    def check(self, recipe: Recipe, shape: BaseShape) -> None:
        """Raises InvalidRecipe unless the recipe draws A or takes it from a registered calibration.

        That calibration is not removed until the transaction ends.
        """
        if recipe.calibration is None:
            return
        if self._calibrations.by_sha256_shared(recipe.calibration) is None:
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
        calibrations = self._calibrations.beginning_locked(beginning)
        if not calibrations:
            raise NotFound(f"no calibration's sha256 begins with {beginning!r}; {_LISTS}")
        if len(calibrations) > 1:
            raise BadRequest(f"{len(calibrations)} calibrations' sha256 begin with {beginning!r}; give more digits")
        user = self._calibrations.user(calibrations[0].sha256)
        if user is not None:
            raise Conflict(
                f"{user} takes its A from calibration {calibrations[0].sha256}; it cannot be removed while it does"
            )
        self._calibrations.remove(calibrations[0])
        return calibrations[0]
