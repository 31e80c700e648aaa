"""Chooses the estimator of jobs with estimator `auto`, by their requests and by their devices' memory.

The choice is made when a job is submitted. A device that then has too little memory declines the job, which continues
with a smaller micro-batch or without a reverse pass (`server.jobs.leases.declines`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy.orm import Session
from tokenizers import Tokenizer

from server.identity.devices.repository import BindingRepository, DeviceRepository
from server.jobs.memory import predicted_peak
from server.jobs.recipes import resolve_recipe
from server.jobs.scheduling.matching import DeviceOffer, able, needs_of
from shared.errors import InvalidRecipe
from shared.estimator_choice import (
    AUTOMATIC,
    Demands,
    PossibleEstimators,
    possible_estimators,
    settings_with,
    unused_setting,
)
from shared.job import JobRequest
from shared.recipe import REVERSE_ESTIMATORS, BaseRef, Recipe, RecipeSettings, RequestedRecipe
from shared.task import Task
from shared.zo.lora import BaseShape

MOST_DEVICES = 100  # newest devices whose reports are read


@dataclass(frozen=True)
class RecipeBase:
    """What a recipe needs to know of its base. parameters: its number of weights."""

    reference: BaseRef
    shape: BaseShape
    parameters: int
    tokenizer: Tokenizer


@dataclass(frozen=True)
class SpareMemory:
    """The memory, bytes, that the device with the most of it can spare for a job, and the device's name."""

    device: str
    available_bytes: int


@dataclass(frozen=True)
class ChosenRecipe:
    """A complete recipe. reason: why it has its estimator; None if the request names the estimator."""

    recipe: Recipe
    reason: str | None = None


def demands_of(request: JobRequest) -> Demands:
    """Returns what a job demands of its estimator besides its recipe."""
    trajectory = None if request.trajectory == "none" else "the job requests a trajectory"
    return Demands(trajectory, unused_setting(request.training))


def possible_for(request: JobRequest) -> PossibleEstimators:
    """Returns the estimators that can serve a request with estimator `auto`. Raises InvalidRecipe if none can."""
    return possible_estimators(request.recipe, demands_of(request))


def choose_recipe(
    request: JobRequest, task: Task, base: RecipeBase, spare: SpareMemory | None, demands: Demands | None = None
) -> ChosenRecipe:
    """Returns the recipe of a request, its estimator chosen if the request leaves that to the server.

    Takes the first estimator that can serve the request and whose predicted memory fits: the whole batch at once, then
    smaller micro-batches, then the next estimator. If none fits, takes the one that needs the least memory. spare: None
    if no suitable device has reported its memory. demands: those of the request if None.

    Raises as `resolve_recipe`, and InvalidRecipe if no estimator can serve the request.
    """

    def resolve(settings: RequestedRecipe) -> Recipe:
        explicit = request.model_copy(update={"recipe": settings})
        return resolve_recipe(explicit, task, base.reference, base.shape, base.tokenizer)

    if request.recipe.estimator != "auto":
        return ChosenRecipe(resolve(request.recipe))
    possible = possible_estimators(request.recipe, demands or demands_of(request))
    causes, needs, errors = [possible.reason], list[tuple[int, Recipe]](), list[InvalidRecipe]()
    for settings in _in_order(request.recipe, possible):
        try:
            recipe = resolve(settings)
        except InvalidRecipe as error:
            errors.append(error)
            continue
        needs.append((predicted_peak(recipe, base.shape, base.parameters), recipe))
        if spare is None or needs[-1][0] <= spare.available_bytes:
            break
    if not needs:
        raise errors[0]
    if errors and AUTOMATIC.index(needs[0][1].estimator) > AUTOMATIC.index(possible.names[0]):
        causes = [errors[0].detail]
    need, recipe = needs[-1]
    if spare is None:
        causes.append(f"it takes about {_megabytes(need)}, and no suitable device has reported its memory yet")
        return ChosenRecipe(recipe, _sentence(recipe, causes))
    fits = need <= spare.available_bytes
    if len(needs) > 1:
        first, better = needs[0]
        kept = [] if better.estimator == AUTOMATIC[0] else causes
        causes = [*kept, f"{_name(better)} would take about {_megabytes(first)}"]
    if not fits:
        need, recipe = min(needs, key=lambda each: each[0])
        causes.append("no estimator fits, and this one needs the least memory")
    causes.append(f"it takes about {_megabytes(need)}, and device {spare.device} can spare {_spare(spare)}")
    return ChosenRecipe(recipe, _sentence(recipe, causes))


def spare_memory(session: Session, tenant: str, request: JobRequest) -> SpareMemory | None:
    """Returns the most memory that a suitable device reported; None if none has reported it.

    Suitable devices are the request's own device, or the user's newest ones with the data set and what the job needs.
    """
    if request.device is not None:
        device = DeviceRepository(session).get(tenant, request.device)
        found = [] if device is None else [device]
    else:
        found = list(BindingRepository(session).newest_devices(tenant, request.user, MOST_DEVICES))
    needs = needs_of(request, request.recipe, None)
    spare = [
        SpareMemory(device.name, report.memory_bytes)
        for device in found
        if (report := device.report) is not None
        and report.memory_bytes is not None
        and request.dataset in report.datasets
        and able(
            needs,
            DeviceOffer(
                tenant,
                device.id,
                frozenset({request.user}),
                frozenset(report.datasets),
                report.memory_bytes,
                report.capabilities,
                device.labels.root,
            ),
        )
    ]
    return max(spare, key=lambda each: each.available_bytes, default=None)


def _in_order(requested: RequestedRecipe, possible: PossibleEstimators) -> Iterator[RecipeSettings]:
    """Yields the settings that may serve a request, best first."""
    for estimator in possible.names:
        yield settings_with(requested, estimator)
        if estimator in REVERSE_ESTIMATORS:
            batch = requested.effective_batch
            for rows in range((requested.micro_batch or batch) - 1, 0, -1):
                if batch % rows == 0:
                    yield settings_with(requested, estimator, rows)


def _sentence(recipe: Recipe, causes: list[str]) -> str:
    return f"estimator {_name(recipe)}: {'; '.join(causes)}"


def _name(recipe: Recipe) -> str:
    part = "" if recipe.micro_batch is None else f" with micro-batch {recipe.micro_batch}"
    return f"{recipe.estimator}{part}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _spare(spare: SpareMemory) -> str:
    return _megabytes(spare.available_bytes)
