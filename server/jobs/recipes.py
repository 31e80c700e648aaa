"""From a job request to a whole recipe, and what must be refused before anything is compiled. Knows no database."""

from __future__ import annotations

from tokenizers import Tokenizer

from shared.encoding import answer_sizes
from shared.errors import InvalidRecipe, InvalidTask
from shared.job import JobRequest
from shared.lora import BaseShape, lora_modules
from shared.recipe import BaseRef, Recipe, check_trainable, resolve_layers
from shared.task import Task
from shared.tasks import named_task


def resolve_task(request: JobRequest) -> Task:
    """The task that the request names or brings. Raises InvalidTask."""
    return named_task(request.task) if isinstance(request.task, str) else request.task


def resolve_recipe(request: JobRequest, task: Task, base: BaseRef, shape: BaseShape, tokenizer: Tokenizer) -> Recipe:
    """The request's recipe with nothing left open.

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
    _check(recipe, task, shape)
    return recipe


def _answer_sizes(request: JobRequest, task: Task, tokenizer: Tokenizer) -> tuple[int, int]:
    """(T, C), the request's own or the task's."""
    given_length, given_choices = request.recipe.answer_length, request.recipe.choices
    if task.fixed_answers is None:
        if given_length is None or given_choices is None:
            answer_sizes(task, tokenizer)  # raises InvalidTask and says what to set
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
    """Sequences that one example's candidates take when they are scored."""
    return 1 if recipe.answer_length == 1 and task.shares_prompt else recipe.choices


def _check(recipe: Recipe, task: Task, shape: BaseShape) -> None:
    lora_modules(recipe, shape)  # raises InvalidRecipe for a layer or a target that the base lacks
    check_trainable(recipe.precision)
    if recipe.noise == "randn":
        raise InvalidRecipe(
            "recipe.noise: a run on the runtime's own noise can be neither resumed nor audited; use gaussian, which "
            "has the same distribution"
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
        raise InvalidRecipe(f"recipe.loss: task {task.name!r} gives candidates prompts of their own; use loss 'full'")
    if scored_rows(recipe, task) > recipe.score_rows:
        raise InvalidRecipe(
            f"recipe.choices is {recipe.choices}; scoring that many takes 2 x queries x effective_batch of at least as "
            f"many, here {recipe.score_rows}"
        )
