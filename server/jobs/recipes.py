"""Resolves a job request to a complete recipe, and rejects invalid ones before anything is compiled."""

from __future__ import annotations

from tokenizers import Tokenizer

from shared.errors import InvalidRecipe, InvalidTask
from shared.estimator_choice import unused_setting
from shared.job import JobRequest
from shared.recipe import BaseRef, Recipe, check_trainable, resolve_layers
from shared.task import Task
from shared.task_templates import named_task
from shared.zo.encoding import answer_sizes
from shared.zo.lora import BaseShape, lora_modules


def resolve_task(request: JobRequest) -> Task:
    """Returns the task that the request names or contains. Raises InvalidTask."""
    return named_task(request.task) if isinstance(request.task, str) else request.task


def resolve_recipe(request: JobRequest, task: Task, base: BaseRef, shape: BaseShape, tokenizer: Tokenizer) -> Recipe:
    """Returns the request's recipe with all fields set.

    Raises InvalidRecipe naming the field, or InvalidTask if the task's answers cannot give the sizes.
    """
    settings = request.recipe
    answer_length, choices = _answer_sizes(request, task, tokenizer)
    values = settings.model_dump() | {
        "base": base,
        "answer_length": answer_length,
        "choices": choices,
        "layers": resolve_layers(settings.layers, shape.layers),
    }
    recipe = Recipe.model_validate(values)
    _check(recipe, task, shape, request)
    return recipe


def _answer_sizes(request: JobRequest, task: Task, tokenizer: Tokenizer) -> tuple[int, int]:
    """Returns (T, C), tokens of an answer and number of choices, from the request or the task."""
    given_length, given_choices = request.recipe.answer_length, request.recipe.choices
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


def scored_rows(recipe: Recipe, task: Task) -> int:
    """Returns the number of sequences that score one example's candidates."""
    return 1 if recipe.answer_length == 1 and task.shares_prompt else recipe.choices


def _check(recipe: Recipe, task: Task, shape: BaseShape, request: JobRequest) -> None:
    lora_modules(recipe, shape)  # raises InvalidRecipe for a layer or a target that the base lacks
    check_trainable(recipe.precision)
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
    unused = unused_setting(request.training)
    if recipe.estimator != "gradient" and unused is not None:
        raise InvalidRecipe(
            f"training.{unused} has no effect with estimator {recipe.estimator}; leave it out, or use estimator "
            "gradient"
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
