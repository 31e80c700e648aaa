"""What jobs spend of their users' privacy, and what a budget makes of it."""

import asyncio
import sys

import httpx
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from server.federation.privacy.repository import PrivacyRepository
from server.jobs import accounting as jobs_accounting
from shared.federation import accounting
from tests.server.actors import assert_problem, job_request
from tests.server.federation.conftest import NO_FIGURES, epsilon_of
from tests.server.homes import eventually

PRIVACY = {"clip": 0.2, "noise_multiplier": 1.0, "sampling_rate": 0.02}
STEPS = 150


def private(**changes):
    return {"privacy": PRIVACY | changes.pop("privacy", {}), "training": {"steps": STEPS}} | changes


def epsilon(runs, noise=1.0):
    return epsilon_of(PoissonSampledDpEvent(0.02, GaussianDpEvent(noise)), runs * STEPS)


def privacy_view(app, user="alice"):
    response = app.get(f"/v1/users/{user}/privacy")
    assert response.status_code == 200, response.text
    return response.json()


def limit(operator, epsilon, user="alice", **changes):
    response = operator.put(f"/v1/users/{user}/privacy", json={"epsilon": epsilon, **changes})
    assert response.status_code == 200, response.text
    return response.json()


def assert_refused(app, **changes):
    return assert_problem(app.post("/v1/jobs", json=job_request(**changes)), 409, "privacy-budget-exceeded")


def test_a_private_job_has_a_recipe_that_clips_and_is_accounted_for(app, fleet):
    job = app.submit(**private())
    assert job["recipe"]["privacy"] == "clipped"
    privacy = privacy_view(app)
    assert privacy["epsilon"] == pytest.approx(epsilon(1), rel=2e-3)
    assert privacy["epsilon"] >= epsilon(1) - 1e-9  # what is told is never too little
    assert (privacy["runs"], privacy["budget"], privacy["unprotected"]) == (1, None, 0)
    assert privacy_view(fleet.app("other"))["runs"] == 0
    empty_view = {"epsilon": 0.0, "delta": 1e-5, "budget": None, "runs": 0, "unprotected": 0}
    assert privacy_view(app, "bob") == {"user": "bob"} | empty_view


@pytest.mark.parametrize(("estimator", "value"), [("gradient", 10), ("directional", 160)])
def test_a_bound_of_gradients_has_no_default(app, estimator, value):
    request = job_request(privacy={"noise_multiplier": 1.0, "sampling_rate": 0.02})
    request["recipe"] |= {"estimator": estimator, "queries": None}
    problem = assert_problem(app.post("/v1/jobs", json=request), 422, "invalid-recipe")
    assert "privacy.clip is not given" in problem["detail"]
    assert f"as {value} does" in problem["detail"]
    request["privacy"]["clip"] = value
    assert app.post("/v1/jobs", json=request).status_code == 202


def test_an_epsilon_is_turned_into_the_least_noise(app):
    privacy = {"noise_multiplier": None, "epsilon": 2.0}
    noise = app.submit(**private(privacy=privacy))["request"]["privacy"]["noise_multiplier"]
    assert epsilon(1, noise) <= 2.0 < epsilon(1, noise - 0.002)


def test_noise_that_is_not_enough_for_the_epsilon_it_names_is_refused(app):
    problem = assert_refused(app, **private(privacy={"epsilon": 0.5}))
    assert problem["budget"] == 0.5
    assert problem["epsilon"] == pytest.approx(epsilon(1), rel=2e-3)


def test_an_epsilon_out_of_reach_says_so(app):
    privacy = {"noise_multiplier": None, "epsilon": 1e-4, "sampling_rate": 1.0}
    body = job_request(**private(privacy=privacy))
    assert "larger epsilon" in assert_problem(app.post("/v1/jobs", json=body), 422, "invalid-request")["detail"]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [({"privacy": "clipped"}, "give it `privacy`"), ({"estimator": "stored"}, "or 'replay'")],
)
def test_recipe_and_privacy_go_together(app, recipe, message):
    changes = {"recipe": recipe} | ({} if recipe.get("privacy") else private())
    problem = assert_problem(app.post("/v1/jobs", json=job_request(**changes)), 422, "invalid-recipe")
    assert message in problem["detail"]


def test_a_job_over_the_budget_is_refused_with_the_figures(app, operator):
    both = (epsilon(1) + epsilon(2)) / 2
    assert_problem(operator.put("/v1/users/alice/privacy", json={"epsilon": 0}), 422, "invalid-request")
    assert limit(operator, both)["budget"] == pytest.approx(both)
    app.submit(**private())
    problem = assert_refused(app, **private(adapter="alice-second"))
    assert problem["spent"] == pytest.approx(epsilon(1), rel=2e-3)
    assert problem["epsilon"] == pytest.approx(epsilon(2), rel=2e-3)
    assert (problem["budget"], problem["delta"]) == (pytest.approx(both), 1e-5)
    app.submit(**private(user="bob", adapter="bobs"))  # another's budget is another's
    limit(operator, None)
    app.submit(**private(adapter="alice-second"))


def test_where_there_is_a_budget_no_job_goes_without_privacy(app, operator):
    app.submit()
    limit(operator, 5)
    assert "no bound at all" in assert_refused(app)["detail"]


def test_what_no_device_began_is_given_back(app):
    job = app.submit(**private())
    assert app.post(f"/v1/jobs/{job['id']}/cancel").status_code == 200
    assert (privacy_view(app)["epsilon"], privacy_view(app)["runs"]) == (0.0, 0)


def test_what_a_device_began_is_spent_and_another_device_is_another_run(fleet, app, device, home):
    job = fleet.ready_job(app, **private())
    lease = device.lease()
    assert device.lease()["id"] == lease["id"]  # the same run goes on
    assert privacy_view(app)["runs"] == 1
    assert device.post(f"/v1/leases/{lease['id']}/release").status_code == 200
    other = fleet.device(name="tablet")
    assert other.lease()["job"]["id"] == job["id"]
    assert privacy_view(app)["runs"] == 2
    assert app.post(f"/v1/jobs/{job['id']}/cancel").status_code == 200
    assert privacy_view(app)["epsilon"] == pytest.approx(epsilon(2), rel=2e-3)


def test_a_second_run_over_the_budget_fails_the_job(fleet, app, operator, device):
    limit(operator, (epsilon(1) + epsilon(2)) / 2)
    job = fleet.ready_job(app, **private())
    lease = device.lease()
    assert device.post(f"/v1/leases/{lease['id']}/release").status_code == 200
    assert fleet.device(name="tablet").lease() is None
    view = app.get(f"/v1/jobs/{job['id']}").json()
    assert (view["state"], view["error"]["code"]) == ("failed", "privacy-budget-exceeded")
    assert privacy_view(app)["runs"] == 1


def test_jobs_without_privacy_are_told(fleet, app, device):
    fleet.ready_job(app)
    assert privacy_view(app)["unprotected"] == 0  # no example was used yet
    device.finish(device.lease())
    assert (privacy_view(app)["unprotected"], privacy_view(app)["epsilon"]) == (1, 0.0)


def test_accounting_holds_no_writing_transaction(home, app, operator, monkeypatch):
    """Each computation sets the budget meanwhile, which would wait in vain for a transaction that holds the budget and
    waits for the computation. Only the noise needs one: the fast bound shows that the budget is enough.
    """
    learn, learned = jobs_accounting.learn, []

    def set_limit():
        with home.database.writing() as session:
            PrivacyRepository(session).set_limit("default", "alice", 50, 1e-5)

    async def set_limit_and_learn(process, request):
        await asyncio.to_thread(set_limit)
        learned.append(request)
        await learn(process, request)

    monkeypatch.setattr(jobs_accounting, "learn", set_limit_and_learn)
    monkeypatch.setattr(accounting, "_epsilon", None)  # nothing exact is computed in this process
    limit(operator, 50)
    job = private(privacy={"noise_multiplier": None, "epsilon": 2.345})
    app.submit(**job)
    app.submit(**job)
    assert [request.epsilon for request in learned] == [2.345]


def test_accounting_ends_when_its_client_leaves(fleet, app, monkeypatch):
    """What computes is a process, and it is killed; another tenant's request is answered meanwhile."""
    processes, start = [], asyncio.create_subprocess_exec

    async def start_endless(*command, **options):
        process = await start(sys.executable, "-c", "import time; time.sleep(1000)", **options)
        processes.append(process)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_endless)
    job = private(privacy={"noise_multiplier": None, "epsilon": 3.456})
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            app.post("/v1/jobs", json=job_request(**job), timeout=0.5)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    fleet.app("other").submit(**private(privacy={"noise_multiplier": None, "epsilon": 4.567}))
    assert processes
    eventually(lambda: all(process.returncode is not None for process in processes), 20)


def test_accounting_over_its_limits_is_refused(app, problem, monkeypatch):
    start = asyncio.create_subprocess_exec

    async def start_failing(*command, **options):
        return await start(sys.executable, "-c", "import sys; sys.exit(sys.stdin.readline() and 1)", **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_failing)
    job = private(privacy={"noise_multiplier": None, "epsilon": 5.678})
    problem(app.post("/v1/jobs", json=job_request(**job)), 503, "unavailable")


def train_private(fleet, app, device, **changes):
    """One private run on a device, which has no other job."""
    fleet.ready_job(app, **private(**changes))
    device.finish(device.lease(), steps=STEPS, best_step=STEPS, **NO_FIGURES)


def failed(app, job):
    view = app.get(f"/v1/jobs/{job['id']}").json()
    return view["state"] == "failed" and view["error"]["code"] == "privacy-budget-exceeded"


def test_another_name_for_the_user_does_not_reach_the_data(fleet, app, operator, device):
    limit(operator, (epsilon(1) + epsilon(2)) / 2)
    train_private(fleet, app, device)
    assert_refused(app, **private(adapter="alice-second"))
    fleet.ready_job(app, user="alice-2", adapter="second", **private())
    fleet.ready_job(app, user="alice-3", adapter="third")
    assert device.lease() is None


@pytest.mark.both_databases
def test_the_strictest_budget_of_a_device_s_users_bounds_each_of_its_data_sets(fleet, app, operator):
    shared = fleet.device(name="shared", users=["alice", "bob"])
    limit(operator, 1.5 * epsilon(2))
    train_private(fleet, app, shared)
    train_private(fleet, app, shared, user="bob", adapter="bobs")
    job_over_budget = fleet.ready_job(app, user="bob", adapter="bobs", **private(privacy={"noise_multiplier": 0.5}))
    assert shared.lease() is None
    assert failed(app, job_over_budget)
    (row,) = app.get(f"/v1/devices/{shared.device_id}/privacy").json()
    assert (row["dataset"], row["users"], row["runs"]) == ("movies", ["alice", "bob"], 2)
    assert row["epsilon"] == pytest.approx(epsilon(2), rel=2e-3)
    assert row["budget"] == pytest.approx(1.5 * epsilon(2))
    assert privacy_view(app, "bob")["runs"] == 1  # what was reserved for the refused run is given back


def test_no_job_without_privacy_reads_a_data_set_that_a_budget_bounds(fleet, app, operator):
    shared = fleet.device(name="shared", users=["alice", "bob"])
    limit(operator, 5)
    job = fleet.ready_job(app, user="bob", adapter="bobs")
    assert shared.lease() is None
    assert failed(app, job)
    assert "no bound at all" in assert_refused(app, user="bob", adapter="bobs", device=shared.device_id)["detail"]


def test_a_job_that_was_submitted_before_the_budget_does_not_begin_without_privacy(fleet, app, operator, device):
    job = fleet.ready_job(app)
    limit(operator, 5)
    assert device.lease() is None
    assert failed(app, job)


def test_a_data_set_remembers_the_budget_of_a_user_who_was_unbound(fleet, app, operator, device):
    train_private(fleet, app, device)
    limit(operator, 1.05 * epsilon(1))
    path = f"/v1/devices/{device.device_id}/users"
    assert operator.put(f"{path}/alice-2").status_code == 200
    assert operator.delete(f"{path}/alice").status_code == 204
    job = fleet.ready_job(app, user="alice-2", adapter="second", **private())
    assert device.lease() is None
    assert failed(app, job)


def test_other_data_sets_and_devices_have_accounts_of_their_own(fleet, app, operator):
    shared, other = fleet.device(name="shared", users=["alice", "bob"]), fleet.device(name="other", users=["bob"])
    limit(operator, 1.5 * epsilon(1))
    train_private(fleet, app, shared, user="bob", adapter="bobs")
    again = private(user="bob", adapter="bobs")
    assert fleet.ready_job(app, **again)["state"] == "ready"
    assert other.lease() is not None
    books = fleet.ready_job(app, dataset="books", **again)
    assert shared.lease("books")["job"]["id"] == books["id"]
    problem = assert_problem(app.get("/v1/devices/device_none/privacy"), 404, "not-found")
    assert "device_none" in problem["detail"]
