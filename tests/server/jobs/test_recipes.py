"""From a request to a whole recipe: what is derived, and what is refused."""

import pytest

from server.jobs.recipes import MAX_EXAMPLE_GRADIENTS, check_example_gradients, resolve_recipe, resolve_task
from shared.errors import InvalidRecipe, InvalidTask
from shared.job import JobRequest
from shared.recipe import BaseRef, Recipe
from shared.task import Answer, Task
from tests.server.actors import job_request
from tests.server.homes import base_entry, word_tokenizer

BASE = base_entry("tiny", "")
TOKENIZER = word_tokenizer()
LONG = Task(
    name="long",
    prompt="{text}",
    answers=(Answer(text=" very good film", labels=("1",)), Answer(text=" bad", labels=("0",))),
)
FROM_RECORD = {
    "name": "own",
    "prompt": "{q}",
    "answers": [{"text": " {a}", "labels": ["0"]}, {"text": " {b}", "labels": ["1"]}],
}
WRITES = {
    "text": {"name": "diary", "kind": "text"},
    "completion": {"name": "reply", "kind": "completion", "prompt": "{q}", "answer": " {a}"},
    "messages": {"name": "talk", "kind": "messages"},
}


@pytest.fixture
def resolve():
    def resolve(**changes):
        request = JobRequest.model_validate(job_request(**changes))
        return resolve_recipe(request, resolve_task(request), BASE, TOKENIZER)

    return resolve


def test_sizes_come_from_the_task(resolve):
    recipe = resolve()
    assert (recipe.answer_length, recipe.choices) == (1, 2)
    assert recipe.base == BaseRef(name="tiny", sha256="b" * 64)
    recipe = resolve(task=LONG.model_dump(mode="json"))
    assert (recipe.answer_length, recipe.choices) == (3, 2)


@pytest.mark.parametrize(("kind", "tokens"), [("text", 31), ("completion", 16), ("messages", 16)])
def test_a_task_that_writes_has_sizes_of_its_own(resolve, kind, tokens):
    recipe = resolve(task=WRITES[kind], recipe={"sequence_length": 32})
    assert (recipe.answer_length, recipe.choices, recipe.loss) == (tokens, 1, "full")
    assert resolve(task=WRITES[kind], recipe={"sequence_length": 32, "answer_length": 5}).answer_length == 5


PAIRS = {"name": "style", "kind": "preference"}


def test_a_task_of_preferences_reads_two_answers_that_may_begin_alike(resolve):
    recipe = resolve(task=PAIRS, recipe={"sequence_length": 32, "loss": "dpo"})
    assert (recipe.answer_length, recipe.choices, recipe.examples_per_step) == (16, 2, 1)
    labelled = resolve(task=PAIRS | {"answer": "{completion}"}, recipe={"loss": "kto", "estimator": "replay"})
    assert (labelled.loss, labelled.choices) == ("kto", 2)


@pytest.mark.parametrize(
    ("task", "loss", "message"),
    [
        (PAIRS, "full", "pairs of texts and needs loss 'dpo', not 'full'"),
        (PAIRS, "kto", "needs loss 'dpo', not 'kto'"),
        (PAIRS | {"answer": "{completion}"}, "dpo", "records with labels and needs loss 'kto'"),
        (WRITES["completion"], "dpo", "loss 'dpo' needs a task of kind preference"),
        ("sst2", "kto", "task 'sst2' is of kind choice"),
    ],
)
def test_a_task_and_a_loss_of_preferences_must_fit(resolve, task, loss, message):
    with pytest.raises(InvalidRecipe, match=message):
        resolve(task=task, recipe={"loss": loss})


def test_equal_requests_are_one_recipe(resolve):
    assert resolve().id == resolve(recipe={"answer_length": 1, "choices": 2}).id
    assert resolve().id != resolve(recipe={"rank": 3}).id


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"recipe": {"sequence_length": 65}}, "context"),
        ({"recipe": {"layers": "last:3"}}, "2 layers"),
        ({"recipe": {"layers": [0, 2]}}, "layer 2"),
        ({"recipe": {"noise": "randn", "estimator": "stored"}}, "neither resumed nor audited"),
        ({"recipe": {"estimator": "gradient"}, "trajectory": "beside"}, "'beside' requests a trajectory"),
        ({"recipe": {"estimator": "gradient"}, "trajectory": "instead"}, "or use estimator directional"),
        ({"training": {"max_norm": 1.0}}, "training.max_norm has no effect with estimator replay"),
        (
            {"recipe": {"estimator": "directional"}, "training": {"weight_decay": 0.1}},
            "training.weight_decay has no effect with estimator directional",
        ),
        ({"training": {"kl_weight": 0.1}}, "kl_weight needs estimator gradient or directional"),
        ({"recipe": {"precision": "int4"}}, "multiple of 32 input features; q_proj has 8; use int8"),
        ({"recipe": {"precision": "int4-weight"}}, "one scale per row.*use int4"),
        ({"recipe": {"sequence_length": 8, "answer_length": 8}}, "no"),
        ({"recipe": {"answer_length": 2}, "task": LONG.model_dump(mode="json")}, "answer_length"),
        ({"recipe": {"choices": 1}}, "choices"),
        ({"recipe": {"choices": 5, "answer_length": 2}}, "choices"),
        ({"task": WRITES["text"], "recipe": {"choices": 2}}, "has one answer"),
        ({"task": WRITES["text"], "recipe": {"loss": "candidates"}}, "has no candidates"),
        ({"task": WRITES["text"], "recipe": {"sequence_length": 8, "answer_length": 8}}, "no room"),
        ({"task": "winogrande", "recipe": {"loss": "candidates", "answer_length": 2, "choices": 2}}, "loss"),
    ],
)
def test_recipes_that_cannot_work(resolve, changes, word):
    with pytest.raises(InvalidRecipe, match=word):
        resolve(**changes)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("all", "all"), ("last:2", "all"), ([0, 1], "all"), ("last:1", "last:1"), ("last:50%", "last:1"), ([1], "last:1")],
)
def test_one_set_of_layers_is_one_recipe(resolve, layers, expected):
    recipe = resolve(recipe={"layers": layers})
    assert recipe.layers == expected
    assert recipe.id == resolve(recipe={"layers": expected}).id


def test_a_divergence_from_the_start_is_part_of_the_recipe(resolve):
    with_divergence = {"recipe": {"estimator": "gradient"}, "training": {"kl_weight": 0.1}}
    assert resolve(**with_divergence).kl
    assert resolve(**with_divergence).id != resolve(recipe={"estimator": "gradient"}).id
    with pytest.raises(InvalidRecipe, match=r"training\.proximal"):
        resolve(recipe={"estimator": "gradient", "privacy": "clipped"}, training={"kl_weight": 0.1})


def test_layers_that_are_not_the_last(resolve):
    assert resolve(recipe={"layers": [0]}).layers == (0,)


def test_the_longest_sequence_that_fits(resolve):
    assert resolve(recipe={"sequence_length": 64}).sequence_length == 64
    assert resolve(recipe={"sequence_length": 2}).sequence_length == 2


def test_answers_of_the_record_need_sizes(resolve):
    with pytest.raises(InvalidTask, match="answer_length"):
        resolve(task=FROM_RECORD)
    recipe = resolve(task=FROM_RECORD, recipe={"answer_length": 3, "choices": 2})
    assert (recipe.answer_length, recipe.choices) == (3, 2)


def test_gradients_of_examples_that_no_memory_holds_are_refused():
    base = BaseRef(name="tiny", sha256="b" * 64)
    recipe = Recipe(base=base, answer_length=1, choices=2, estimator="gradient", privacy="clipped", effective_batch=64)
    check_example_gradients(recipe, MAX_EXAMPLE_GRADIENTS // 64)
    with pytest.raises(InvalidRecipe, match=r"1\.4 GB, above the limit of 1\.1 GB; set micro_batch to 32, or use"):
        check_example_gradients(recipe, 5_400_000)
    with pytest.raises(InvalidRecipe, match="set micro_batch to 1, or use estimator replay"):
        check_example_gradients(recipe, MAX_EXAMPLE_GRADIENTS)
    with pytest.raises(InvalidRecipe, match="fewer layers, fewer targets or a lower rank, or use estimator replay"):
        check_example_gradients(recipe, MAX_EXAMPLE_GRADIENTS + 1)
    check_example_gradients(recipe.model_copy(update={"privacy": "none"}), MAX_EXAMPLE_GRADIENTS + 1)
    check_example_gradients(recipe.model_copy(update={"estimator": "replay"}), MAX_EXAMPLE_GRADIENTS + 1)


@pytest.mark.parametrize("estimator", ["gradient", "directional", "replay"])
def test_a_private_job_may_name_its_estimator(resolve, estimator):
    recipe = resolve(recipe={"estimator": estimator, "queries": None, "privacy": "clipped"})
    assert (recipe.estimator, recipe.privacy) == (estimator, "clipped")
