"""Registering calibrations, and whether a recipe may name one. Knows no HTTP and no torch."""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.artifacts.naming import hold
from server.artifacts.store import ArtifactStore
from server.calibrations.models import StoredCalibration
from server.calibrations.reading import calibration_of
from server.calibrations.repository import CalibrationRepository
from server.clock import utc_now
from shared.calibration import load_calibration
from shared.errors import BadRequest, Conflict, InvalidRecipe, NotFound, UnknownBase
from shared.lora import BaseShape, frozen_a, lora_modules
from shared.recipe import Recipe

_LISTS = "`mobizo-server calibrations list` and GET /v1/calibrations list those that are"


class CalibrationService:
    """Calibrations in one transaction."""

    def __init__(self, session: Session, artifacts: ArtifactStore) -> None:
        self._session, self._artifacts = session, artifacts
        self._calibrations = CalibrationRepository(session)

    def register(self, data: bytes) -> StoredCalibration:
        """Stores a calibration file for jobs to name; the same again changes nothing.

        Raises InvalidUpload for a file that is none, UnknownBase if its base model is not registered, or BadRequest if
        it is not of that model's shape.
        """
        made = load_calibration(data)
        bases = self._calibrations.bases(made.about.base.sha256)
        if not bases:
            raise UnknownBase(
                f"the calibration was made for {made.about.base.name!r} of sha256 {made.about.base.sha256[:12]}..., "
                "and no such base model is registered; `mobizo-server bases add` registers it"
            )
        sha256 = self._artifacts.put(data)
        hold(self._session, self._artifacts, [sha256])
        known = self._calibrations.named(sha256)
        if known is not None:
            return known
        found = StoredCalibration(
            sha256=sha256,
            base_number=bases[0].number,
            kind=made.about.kind,
            task=made.about.task,
            examples=made.about.examples,
            modules=len(made.directions),
            width=made.width,
            size=len(data),
            created_at=utc_now(),
        )
        self._calibrations.add(found)
        return found

    def check(self, recipe: Recipe, shape: BaseShape) -> None:
        """Raises InvalidRecipe unless the recipe's A can be had: drawn, or from a calibration that is registered.

        Nobody removes that calibration until the transaction ends.
        """
        if recipe.calibration is None:
            return
        if self._calibrations.named_shared(recipe.calibration) is None:
            raise InvalidRecipe(f"recipe.calibration: none of sha256 {recipe.calibration} is registered here; {_LISTS}")
        calibration = calibration_of(self._artifacts, recipe)
        for module in lora_modules(recipe, shape):
            try:
                frozen_a(recipe, module, calibration)
            except InvalidRecipe as error:
                raise InvalidRecipe(f"recipe.{error.detail}") from error

    def remove(self, beginning: str) -> StoredCalibration:
        """Forgets the calibration whose sha256 begins so.

        Raises NotFound, BadRequest if it is not the only one, or Conflict while something needs it.
        """
        found = self._calibrations.beginning_locked(beginning)
        if not found:
            raise NotFound(f"no calibration's sha256 begins with {beginning!r}; {_LISTS}")
        if len(found) > 1:
            raise BadRequest(f"{len(found)} calibrations' sha256 begin with {beginning!r}; say more of it")
        user = self._calibrations.user(found[0].sha256)
        if user is not None:
            raise Conflict(f"{user} takes its A from calibration {found[0].sha256}; it cannot be removed while it does")
        self._calibrations.remove(found[0])
        return found[0]
