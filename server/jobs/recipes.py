"""Resolves a job request to a complete recipe, and rejects invalid ones before anything is compiled.

For estimator `auto` the estimator is chosen when the job is submitted, by the request and by the devices' memory. A
device that then has too little memory declines the job, which continues with a smaller micro-batch or without a reverse
pass (`server.jobs.leases.declines`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy.orm import Session
from tokenizers import Tokenizer

from server.catalog.bases import BaseModelEntry
from server.identity.devices.repository import BindingRepository, DeviceRepository
from server.jobs.memory import predicted_peak, rough
from server.jobs.scheduling.matching import DeviceOffer, can_run, needs_of
from shared.errors import InvalidRecipe, InvalidTask
from shared.estimator_choice import (
    AUTOMATIC,
    Demands,
    PossibleEstimators,
    possible_estimators,
    settings_with,
    unused_setting,
)
from shared.job import JobRequest
from shared.precisions import check_precision
from shared.recipe import (
    PREFERENCE_LOSSES,
    REVERSE_ESTIMATORS,
    BaseRef,
    Recipe,
    RecipeSettings,
    RequestedRecipe,
    check_trainable,
    resolve_layers,
)
from shared.task import Task
from shared.task_templates import named_task
from shared.zo.encoding import answer_sizes, check_answers
from shared.zo.lora import BaseShape, flat_size, lora_modules

MAX_EXAMPLE_GRADIENTS = 1 << 28  # elements of the gradients of all examples computed at once: 1 GiB

MAX_ANSWER_TOKENS = 512  # the largest recipe.answer_length

MAX_DEVICES = 100  # newest devices whose reports are read


def resolve_task(request: JobRequest) -> Task:
    """Returns the task that the request names or contains. Raises InvalidTask."""
    return named_task(request.task) if isinstance(request.task, str) else request.task


def resolve_recipe(request: JobRequest, task: Task, base: BaseModelEntry, tokenizer: Tokenizer) -> Recipe:
    """Returns the request's recipe with all fields set.

    Raises InvalidRecipe naming the field, or InvalidTask if the task's answers cannot give the sizes.
    """
    settings = request.recipe
    answer_length, choices = _answer_sizes(request, task, tokenizer)
    values = settings.model_dump() | {
        "base": BaseRef(name=base.name, sha256=base.sha256),
        "answer_length": answer_length,
        "choices": choices,
        "layers": resolve_layers(settings.layers, base.shape.layers),
        "kl": request.training.kl_weight > 0,
    }
    recipe = Recipe.model_validate(values)
    if recipe.loss == "candidates":
        check_answers(task, tokenizer)
    _check(recipe, task, base.shape, request)
    return recipe


def _answer_sizes(request: JobRequest, task: Task, tokenizer: Tokenizer) -> tuple[int, int]:
    """Returns (T, C), tokens of an answer and number of choices, from the request or the task."""
    given_length, given_choices = request.recipe.answer_length, request.recipe.choices
    if task.generates:
        return _writing_sizes(request.recipe, task)
    if task.fixed_answers is None:
        if given_length is None or given_choices is None:
            answer_sizes(task, tokenizer)  # raises InvalidTask, which names the missing fields
            raise InvalidTask
        length, choices = 1, len(task.answers)
    else:
        length, choices = answer_sizes(task, tokenizer)
    if given_length is not None and given_length < length:
        raise InvalidRecipe(
            f"recipe.answer_length is {given_length}; task {task.name!r} has answers of {length} tokens"
        )
    if given_choices is not None and given_choices < choices:
        raise InvalidRecipe(f"recipe.choices is {given_choices}; task {task.name!r} has {choices} answers")
    if length < 1:
        raise InvalidTask(f"task {task.name!r} has an answer without a token")
    return given_length or length, given_choices or choices


def _writing_sizes(settings: RequestedRecipe, task: Task) -> tuple[int, int]:
    """Returns (T, C) of a task that writes text: by default every token of a document, and half of another text."""
    choices = 1 if task.preference_loss is None else 2  # two answers may begin alike, and are then read in one text
    if settings.choices not in (None, choices):
        raise InvalidRecipe(f"recipe.choices is {settings.choices}; task {task.name!r} writes text and has one answer")
    length = settings.sequence_length
    default = length - 1 if task.kind == "text" else max(length // 2, 1)
    return settings.answer_length or min(default, MAX_ANSWER_TOKENS), choices


def scored_rows(recipe: Recipe, task: Task) -> int:
    """Returns the number of sequences that score one example's candidates."""
    return 1 if recipe.answer_length == 1 and task.shares_prompt else recipe.choices


def check_example_gradients(recipe: Recipe, size: int) -> None:
    """Raises InvalidRecipe if a private recipe's gradients of single examples take too much memory. size: D."""
    if recipe.privacy != "clipped" or recipe.estimator not in REVERSE_ESTIMATORS:
        return
    if recipe.rows * size <= MAX_EXAMPLE_GRADIENTS:
        return
    rows = next((rows for rows in range(recipe.rows, 0, -1) if _fits(rows, recipe.effective_batch, size)), None)
    remedy = "use fewer layers, fewer targets or a lower rank" if rows is None else f"set micro_batch to {rows}"
    raise InvalidRecipe(
        f"privacy with estimator {recipe.estimator} keeps the gradient of every example that is computed at once: "
        f"{recipe.rows} x {size:,} numbers are {4 * recipe.rows * size / 1e9:.1f} GB, above the limit of "
        f"{4 * MAX_EXAMPLE_GRADIENTS / 1e9:.1f} GB; {remedy}, or use estimator replay, which keeps q numbers of each"
    )


def _fits(rows: int, batch: int, size: int) -> bool:
    return batch % rows == 0 and rows * size <= MAX_EXAMPLE_GRADIENTS


def _check(recipe: Recipe, task: Task, shape: BaseShape, request: JobRequest) -> None:
    lora_modules(recipe, shape)  # raises InvalidRecipe for a layer or a target that the base lacks
    check_trainable(recipe.precision)
    check_precision(recipe.precision, shape, reverse=recipe.estimator in REVERSE_ESTIMATORS)
    if recipe.noise == "randn":
        raise InvalidRecipe(
            "recipe.noise: a run on the runtime's own noise can be neither resumed nor audited; use gaussian, which "
            "has the same distribution"
        )
    if recipe.estimator == "gradient" and request.trajectory != "none":
        raise InvalidRecipe(
            f"trajectory {request.trajectory!r} requests a trajectory, which runs of estimator gradient do not have: "
            "their updates are not combinations of recorded directions; leave trajectory out, or use estimator "
            "directional"
        )
    check_example_gradients(recipe, flat_size(recipe, shape))
    unused = unused_setting(request.training)
    if recipe.estimator != "gradient" and unused is not None:
        raise InvalidRecipe(
            f"training.{unused} has no effect with estimator {recipe.estimator}; leave it out, or use estimator "
            "gradient"
        )
    exact = recipe.estimator in REVERSE_ESTIMATORS and recipe.privacy == "none"
    if recipe.kl and (not exact or recipe.loss in PREFERENCE_LOSSES):
        raise InvalidRecipe(
            "training.kl_weight needs estimator gradient or directional, loss full or candidates, and no privacy; "
            "training.proximal pulls B to the start with any other"
        )
    if recipe.sequence_length > shape.context_length:
        raise InvalidRecipe(
            f"recipe.sequence_length is {recipe.sequence_length}; the context of {recipe.base.name!r} has "
            f"{shape.context_length} tokens"
        )
    if recipe.answer_length >= recipe.sequence_length:
        raise InvalidRecipe(
            f"recipe.sequence_length is {recipe.sequence_length}; answers of {recipe.answer_length} tokens leave no "
            "room for a prompt"
        )
    if fault := task.loss_fault(recipe.loss):
        raise InvalidRecipe(f"recipe.loss: {fault}")
    if recipe.loss == "candidates" and task.generates:
        raise InvalidRecipe(f"recipe.loss: task {task.name!r} writes text and has no candidates; use loss 'full'")
    if task.compares_texts and recipe.backend != "xnnpack":
        raise InvalidRecipe(
            f"task {task.name!r} has metric {task.metric}, for which the device writes texts; a program of backend "
            f"{recipe.backend} cannot. Use metric loss or backend xnnpack"
        )
    if recipe.loss == "candidates" and not task.shares_prompt:
        raise InvalidRecipe(
            f"recipe.loss: task {task.name!r} has a separate prompt for each candidate; use loss 'full'"
        )
    if scored_rows(recipe, task) > recipe.score_rows:
        raise InvalidRecipe(
            f"recipe.choices is {recipe.choices}; scoring that many takes 2 x queries x effective_batch (with "
            "estimators gradient and directional micro_batch or effective_batch alone) of at least as many, here "
            f"{recipe.score_rows}"
        )


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
    request: JobRequest,
    task: Task,
    base: BaseModelEntry,
    tokenizer: Tokenizer,
    spare: SpareMemory | None,
    demands: Demands | None = None,
) -> ChosenRecipe:
    """Returns the recipe of a request, its estimator chosen if the request leaves that to the server.

    Takes the first estimator that can serve the request and whose predicted memory fits: the whole batch at once, then
    smaller micro-batches, then the next estimator. If none fits, takes the one that needs the least memory. spare: None
    if no suitable device has reported its memory. demands: those of the request if None.

    Raises as `resolve_recipe`, and InvalidRecipe if no estimator can serve the request.
    """

    def resolve(settings: RequestedRecipe) -> Recipe:
        explicit = request.model_copy(update={"recipe": settings})
        return resolve_recipe(explicit, task, base, tokenizer)

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
        earlier_causes = [] if better.estimator == AUTOMATIC[0] else causes
        causes = [*earlier_causes, f"{estimator_name(better)} would take about {_megabytes(first)}"]
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
        devices = [] if device is None else [device]
    else:
        devices = list(BindingRepository(session).newest_devices(tenant, request.user, MAX_DEVICES))
    needs = needs_of(request, request.recipe, None)
    spare = [
        SpareMemory(device.name, report.memory_bytes)
        for device in devices
        if (report := device.report) is not None
        and report.memory_bytes is not None
        and request.dataset in report.datasets
        and can_run(needs, DeviceOffer.reported(device, report, [request.user]))
    ]
    return max(spare, key=lambda each: each.available_bytes, default=None)


def _in_order(requested: RequestedRecipe, possible: PossibleEstimators) -> Iterator[RecipeSettings]:
    """Yields the settings that may serve a request, best first."""
    for estimator in possible.names:
        yield settings_with(requested, estimator)
        if estimator in REVERSE_ESTIMATORS:
            batch = requested.effective_batch
            for rows in range((requested.micro_batch or batch) - 1, 0, -1):
                if batch % rows == 0 and rows % requested.rows_per_example == 0:
                    yield settings_with(requested, estimator, rows)


def _sentence(recipe: Recipe, causes: list[str]) -> str:
    return f"estimator {estimator_name(recipe)}: {'; '.join(causes)}"


def estimator_name(recipe: Recipe) -> str:
    """Returns a recipe's estimator with its micro-batch."""
    part = "" if recipe.micro_batch is None else f" with micro-batch {recipe.micro_batch}"
    return f"{recipe.estimator}{part}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _spare(spare: SpareMemory) -> str:
    return _megabytes(rough(spare.available_bytes))
