"""Which estimator a job with estimator `auto` gets, where its reason is told, and what little memory changes."""

import pytest

from server.jobs.memory import predicted_peak
from server.jobs.recipes import SpareMemory, choose_recipe, resolve_task
from shared.job import JobRequest
from tests.server.actors import job_request
from tests.server.homes import base_entry
from tests.server.jobs.test_memory import SMOLLM2
from tests.server.jobs.test_recipes import TOKENIZER

AUTO = {"estimator": "auto", "queries": None}


def submit(app, recipe=None, **changes):
    return app.submit(recipe=AUTO | (recipe or {}), **changes)


def estimator(job):
    return job["recipe"]["estimator"]


def test_a_job_that_names_no_estimator_gets_exact_gradients(app):
    body = job_request()
    del body["recipe"]["estimator"], body["recipe"]["queries"]
    job = app.post("/v1/jobs", json=body).json()
    assert (estimator(job), job["recipe"]["queries"]) == ("gradient", 1)
    assert job["request"]["recipe"]["estimator"] == "auto"
    assert job["estimator_reason"].startswith("estimator gradient: exact gradients need the fewest steps")
    assert "no suitable device has reported its memory yet" in job["estimator_reason"]


def test_a_named_estimator_has_no_reason(app):
    job = app.submit()
    assert estimator(job) == "replay"
    assert "estimator_reason" not in job


@pytest.mark.parametrize(
    ("changes", "expected", "cause"),
    [
        ({"recipe": {"backend": "qnn"}}, "replay", "backend qnn has no reverse pass"),
        ({"recipe": {"backend": "vulkan"}}, "replay", "backend vulkan has no reverse pass"),
        ({"trajectory": "beside"}, "directional", "the job requests a trajectory"),
        ({"trajectory": "instead"}, "directional", "the job requests a trajectory"),
        ({"trajectory": "beside", "recipe": {"backend": "qnn"}}, "replay", "backend qnn"),
        ({"privacy": {"epsilon": 8, "sampling_rate": 0.01}}, "replay", "privacy 'clipped'"),
        ({"recipe": {"queries": 3}}, "directional", "recipe.queries is 3"),
        ({"recipe": {"noise": "gaussian"}}, "replay", "noise 'gaussian'"),
        ({"training": {"weight_decay": 0.1}}, "gradient", "exact gradients"),
        ({"training": {"kl_weight": 0.1}}, "gradient", "exact gradients"),
    ],
)
def test_the_request_decides_first(app, changes, expected, cause):
    job = submit(app, **changes)
    assert estimator(job) == expected
    assert cause in job["estimator_reason"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"recipe": {"backend": "qnn", "optimizer": "sgd"}},
            ("backend qnn", "optimizer 'sgd' needs estimator"),
        ),
        ({"recipe": {"estimator": "gradient", "backend": "qnn"}}, ("backend qnn has no reverse pass", "'replay'")),
        ({"recipe": {"estimator": "gradient"}, "trajectory": "beside"}, ("directional",)),
        ({"training": {"weight_decay": 0.1}, "trajectory": "beside"}, ("training.weight_decay", "trajectory")),
        ({"recipe": {"backend": "qnn"}, "training": {"kl_weight": 0.1}}, ("training.kl_weight", "training.proximal")),
        ({"recipe": {"precision": "int4-weight"}}, ("int4", "int8-weight")),
        ({"recipe": {"estimator": "exact"}}, ("auto", "gradient", "directional", "replay")),
    ],
)
def test_what_no_estimator_can_do_is_refused_with_the_reason(app, problem, changes, words):
    changes = {"recipe": AUTO | changes.get("recipe", {}), **{k: v for k, v in changes.items() if k != "recipe"}}
    response = app.post("/v1/jobs", json=job_request(**changes))
    assert response.status_code == 422
    for word in words:
        assert word in response.text


def test_too_few_rows_to_score_the_candidates_is_a_reason_too(app):
    """Exact gradients score E sequences at once, and perturbed passes 2qE."""
    job = submit(app, {"effective_batch": 1, "answer_length": 2, "choices": 4})
    assert estimator(job) == "replay"
    assert "recipe.choices is 4" in job["estimator_reason"]


def test_only_devices_that_may_train_it_count(fleet, app):
    small, large = fleet.device(name="small"), fleet.device(name="large")
    small.lease(memory_bytes=1)
    large.lease("books", memory_bytes=10**9)
    assert "device small" in submit(app)["estimator_reason"]
    assert "device large" in submit(app, dataset="books")["estimator_reason"]
    assert "device small" in submit(app, device=small.device_id)["estimator_reason"]
    large.lease("books", "movies", memory_bytes=10**9)
    assert "device large" in submit(app)["estimator_reason"]
    assert "device small" in submit(app, device=small.device_id)["estimator_reason"]


def decline(device, lease, available):
    needed_bytes = lease["manifest"]["manifest"]["planned_bytes"] + 10**9
    body = {"needed_bytes": needed_bytes, "available_bytes": needed_bytes - available}
    return device.post(f"/v1/leases/{lease['id']}/decline", json=body)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({}, [("gradient", None), ("gradient", 1)]),  # `replay` would take more
        ({"effective_batch": 1, "rank": 64}, [("gradient", None), ("replay", None)]),
    ],
)
def test_a_device_without_the_memory_gets_a_lighter_estimator_but_the_same_batch(fleet, app, device, recipe, expected):
    """First a smaller micro-batch, then no reverse pass, then it waits for another device."""
    job = fleet.ready_job(app, recipe=AUTO | recipe)
    recipes = []
    while (lease := device.lease()) is not None:
        recipes.append(lease["job"]["recipe"])
        assert decline(device, lease, 1).status_code == 200
        fleet.home.compile()
    assert [(recipe["estimator"], recipe.get("micro_batch")) for recipe in recipes] == expected
    assert {(each["effective_batch"], each["precision"]) for each in recipes} == {
        (recipe.get("effective_batch", 2), "fp32")
    }
    job = app.get(f"/v1/jobs/{job['id']}").json()
    assert job["state"] == "ready"
    assert job["estimator_reason"].startswith(f"estimator {expected[-1][0]}: device phone can spare ")
    assert job["request"]["recipe"]["estimator"] == "auto"


def test_a_job_that_only_exact_gradients_serve_keeps_them(fleet, app, device):
    job = fleet.ready_job(app, recipe=AUTO, training={"weight_decay": 0.1})
    estimators = []
    while (lease := device.lease()) is not None:
        estimators.append(lease["job"]["recipe"]["estimator"])
        decline(device, lease, 1)
        fleet.home.compile()
    assert estimators == ["gradient", "gradient"]
    assert app.get(f"/v1/jobs/{job['id']}").json()["state"] == "ready"


def test_a_device_with_memory_for_less_is_offered_the_job(fleet, app, device):
    """It declines, and the job goes on with a lighter estimator; a named estimator waits for a larger device."""
    small_memory = {"memory_bytes": 1, "capabilities": {}}
    fleet.ready_job(app)
    assert device.lease(**small_memory) is None
    fleet.ready_job(app, recipe=AUTO, adapter="other")
    assert device.lease(**small_memory)["job"]["recipe"]["estimator"] == "gradient"


@pytest.fixture
def choose():
    """Chooses the recipe of a job on SmolLM2-135M, with so many bytes of memory on its device."""

    def choose(available, task="sst2", **recipe):
        request = JobRequest.model_validate(
            job_request(recipe=AUTO | {"effective_batch": 8, "layers": "last:8"} | recipe, task=task)
        )
        base = base_entry("smollm2", "", shape=SMOLLM2, parameters=134_515_008)
        spare = None if available is None else SpareMemory("phone", available)
        return choose_recipe(request, resolve_task(request), base, TOKENIZER, spare)

    return choose


def peak(choice):
    return predicted_peak(choice.recipe, SMOLLM2, 134_515_008)


def test_memory_decides_next(choose):
    """As it falls: the whole batch, smaller micro-batches, no reverse pass, and last what needs the least."""
    choices = [choose(10**9)]
    while len(choices) < 10 and "no estimator fits" not in choices[-1].reason:
        choices.append(choose(peak(choices[-1]) - 1))
    peaks = [peak(each) for each in choices[:-1]]
    assert peaks == sorted(set(peaks), reverse=True)
    kinds = [(each.recipe.estimator, each.recipe.micro_batch) for each in choices]
    assert kinds[:4] == [("gradient", None), ("gradient", 4), ("gradient", 2), ("gradient", 1)]
    assert kinds[4][0] == "replay"
    assert "no estimator fits" in choices[-1].reason
    assert choices[1].reason.startswith("estimator gradient with micro-batch 4: gradient would take about ")
    assert "device phone can spare" in choices[4].reason
    assert {each.recipe.precision for each in choices} == {"fp32"}


def test_the_rows_of_a_preference_stay_in_one_micro_batch(choose):
    preferences = {"task": {"name": "style", "kind": "preference"}, "loss": "dpo"}
    choices = [choose(10**12, **preferences)]
    while choices[-1].recipe.estimator == "gradient":
        choices.append(choose(peak(choices[-1]) - 1, **preferences))
    assert [each.recipe.micro_batch for each in choices[:-1]] == [None, 4, 2]


def test_a_trajectory_is_kept_when_memory_is_short(choose):
    choice = choose(10**9, queries=64)
    assert choice.recipe.estimator == "directional"
    smaller_choice = choose(peak(choice) - 1, queries=64)
    assert smaller_choice.recipe.micro_batch == 4
    assert smaller_choice.reason.startswith("estimator directional with micro-batch 4: recipe.queries is 64")
