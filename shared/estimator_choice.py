"""Determines which estimators can serve a request with estimator `auto`.

`server.jobs.recipes` chooses among the estimators that remain by the memory of the devices that may train the job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shared.errors import InvalidRecipe
from shared.recipe import (
    LEDGER_ESTIMATORS,
    MAX_PATH_QUERIES,
    REVERSE_BACKENDS,
    REVERSE_ESTIMATORS,
    REVERSE_PRECISIONS,
    Estimator,
    RecipeSettings,
    RequestedRecipe,
)
from shared.training_settings import TrainingSettings

AUTOMATIC: tuple[Estimator, ...] = ("gradient", "directional", "replay")  # what `auto` may become, best first
AUTOMATIC_PRIVATE: tuple[Estimator, ...] = ("replay",)  # with privacy: `clip` has another unit with each (ADR 17)


@dataclass(frozen=True)
class Demands:
    """What a job demands of an estimator besides its recipe.

    trajectory: why the run must have a trajectory that reproduces B, as a clause; None if it need not.
    unused: a training setting that the job sets and only estimator gradient uses, such as weight_decay; None if none.
    """

    trajectory: str | None = None
    unused: str | None = None


def unused_setting(training: TrainingSettings) -> str | None:
    """Returns the first training setting that a job sets and only estimator gradient uses; None if there is none."""
    return next((name for name in ("max_norm", "weight_decay") if getattr(training, name)), None)


@dataclass(frozen=True)
class PossibleEstimators:
    """The estimators that can serve a request, best first and at least one, and why the others cannot, as clauses."""

    names: tuple[Estimator, ...]
    excluded: Mapping[Estimator, str]

    @property
    def reason(self) -> str:
        """Why the first of `names` is the best choice."""
        better = AUTOMATIC[: AUTOMATIC.index(self.names[0])]
        causes = {self.excluded[name]: None for name in better}
        return "; ".join(causes) if causes else "exact gradients need the fewest steps, and nothing rules them out"


def possible_estimators(requested: RequestedRecipe, demands: Demands) -> PossibleEstimators:
    """Returns the estimators that can serve a request with estimator `auto`.

    Raises InvalidRecipe with the reason for each estimator if none can.
    """
    excluded = {name: cause for name in AUTOMATIC if (cause := next(_obstacles(name, requested, demands), None))}
    names = tuple(name for name in AUTOMATIC if name not in excluded)
    if not names:
        causes = "; ".join(f"{name}: {cause}" for name, cause in excluded.items())
        raise InvalidRecipe(f"recipe.estimator: auto finds no estimator for this job, change one setting ({causes})")
    return PossibleEstimators(names, excluded)


def settings_with(requested: RequestedRecipe, estimator: Estimator, micro_batch: int | None = None) -> RecipeSettings:
    """Returns a request's settings with an estimator in place of `auto`.

    micro_batch: in place of the request's, which is used if None.
    """
    values = requested.model_dump() | {"estimator": estimator}
    if estimator not in REVERSE_ESTIMATORS:
        values["micro_batch"] = None
    elif micro_batch is not None:
        values["micro_batch"] = micro_batch
    return RecipeSettings.model_validate(values)


def _obstacles(name: Estimator, requested: RequestedRecipe, demands: Demands) -> Iterator[str]:
    """Yields why an estimator cannot serve a request, the strongest reason first."""
    if name in REVERSE_ESTIMATORS:
        if requested.backend not in REVERSE_BACKENDS:
            yield f"backend {requested.backend} has no reverse pass"
        if requested.precision not in REVERSE_PRECISIONS:
            yield f"precision {requested.precision} has no reverse pass"
    if requested.privacy == "clipped" and name not in AUTOMATIC_PRIVATE:
        yield (
            f"with privacy 'clipped', estimator {name} must be named, because privacy.clip bounds another quantity "
            "with each estimator"
        )
    if name in REVERSE_ESTIMATORS and requested.noise != "rademacher":
        yield f"noise {requested.noise!r} belongs to perturbed forward passes"
    if name not in LEDGER_ESTIMATORS and demands.trajectory is not None:
        yield f"{demands.trajectory}, which runs of estimator {name} do not have"
    if name == "gradient" and requested.queries is not None:
        yield f"recipe.queries is {requested.queries}, and estimator gradient has no directions"
    if name not in REVERSE_ESTIMATORS and requested.optimizer != "adam":
        yield f"optimizer {requested.optimizer!r} needs estimator gradient or directional"
    if name != "gradient" and demands.unused is not None:
        yield f"training.{demands.unused} needs estimator gradient"
    if name not in REVERSE_ESTIMATORS:
        if requested.micro_batch is not None:
            yield f"recipe.micro_batch is {requested.micro_batch}, and estimator {name} has no micro-batches"
        if (requested.queries or 0) > MAX_PATH_QUERIES:
            yield f"estimator {name} has at most {MAX_PATH_QUERIES} queries"
