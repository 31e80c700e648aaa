"""The calibration of a recipe, read from the store, where it lies under the sha256 that the recipe names.

Knows no database.
"""

from __future__ import annotations

from functools import lru_cache

from server.artifacts.store import ArtifactStore, Damaged
from shared.calibration import Calibration, load_calibration
from shared.errors import InvalidUpload, NotFound
from shared.recipe import Recipe


def calibration_file(artifacts: ArtifactStore, recipe: Recipe) -> bytes | None:
    """The file of the calibration that the recipe names, its hash checked; None if it names none.

    Raises Damaged if it is not there any more, or Unavailable.
    """
    if recipe.calibration is None:
        return None
    try:
        return artifacts.read(recipe.calibration)
    except NotFound as error:
        raise _gone(recipe.calibration) from error


def calibration_of(artifacts: ArtifactStore, recipe: Recipe) -> Calibration | None:
    """The calibration that the recipe names; None if it names none. Raises as `calibration_file`."""
    return None if recipe.calibration is None else _loaded(artifacts, recipe.calibration)


@lru_cache(maxsize=4)
def _loaded(artifacts: ArtifactStore, sha256: str) -> Calibration:
    try:
        return load_calibration(artifacts.read(sha256))
    except (NotFound, InvalidUpload) as error:
        raise _gone(sha256) from error


def _gone(sha256: str) -> Damaged:
    return Damaged(
        f"the calibration {sha256} that the recipe takes A from is damaged or gone; register its file again "
        "(`mobizo-server calibrations add`), or restore it from a backup"
    )
