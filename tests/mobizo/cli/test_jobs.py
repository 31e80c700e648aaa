"""The commands about jobs and tokens, and `client.jobs`, against a real server."""

import json
import threading
from datetime import datetime

import pytest
from typer.testing import CliRunner

from mobizo import Client
from mobizo.cli import app as cli
from shared.errors import NotFound
from shared.job import JobState, JobView, Progress
from tests.server.conftest import job_request


@pytest.fixture
def call(fleet, app, monkeypatch):
    monkeypatch.setenv("MOBIZO_SERVER", fleet.url)
    monkeypatch.setenv("MOBIZO_TOKEN", app.token)

    def call(*arguments):
        return CliRunner().invoke(cli, [str(argument) for argument in arguments], terminal_width=200)

    return call


@pytest.fixture
def request_file(tmp_path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job_request()))
    return path


def test_submit_list_cancel(call, request_file):
    result = call("job", "submit", request_file, "--json")
    assert result.exit_code == 0, result.output
    job = json.loads(result.stdout)
    assert [item["id"] for item in json.loads(call("job", "list", "--json").stdout)] == [job["id"]]
    assert job["id"] in call("job", "list").stdout
    cancelled_job = json.loads(call("job", "cancel", job["id"], "--json").stdout)
    assert cancelled_job["state"] == "cancelled"
    watch_result = call("job", "watch", job["id"])
    assert watch_result.exit_code == 1
    assert f"mobizo job retry {job['id']}" in watch_result.stderr


def test_retry_submits_the_same_request_as_a_new_job(call, fleet, app, device, tmp_path):
    fleet.ready_job(app)
    device.finish(device.lease())
    changes = {"recipe": {"estimator": "auto"}, "start": {"adapter": "alice-movies"}, "rules": {"charging": True}}
    (tmp_path / "job.json").write_text(json.dumps(job_request(**changes, priority=3)))
    first = json.loads(call("job", "submit", tmp_path / "job.json", "--json").stdout)
    result = call("job", "retry", first["id"])
    assert result.exit_code == 1
    assert "cancel it" in result.stderr
    call("job", "cancel", first["id"])
    second = json.loads(call("job", "retry", first["id"], "--json").stdout)
    assert second["id"] != first["id"]
    assert {name: second[name] for name in ("request", "recipe_id")} == {
        name: first[name] for name in ("request", "recipe_id")
    }
    assert len(call("job", "list", "--limit", "1").stdout.splitlines()) == 1


def test_a_job_chooses_its_whole_recipe(call, tmp_path):
    recipe = {"precision": "int8", "layers": [1], "estimator": "stored", "noise": "gaussian", "targets": ["down_proj"]}
    (tmp_path / "job.json").write_text(json.dumps(job_request(recipe=recipe, training={"eps": 0.02})))
    job = json.loads(call("job", "submit", tmp_path / "job.json", "--json").stdout)
    assert {name: job["recipe"][name] for name in recipe} == recipe | {"layers": "last:1"}
    assert job["request"]["recipe"]["layers"] == [1]
    assert job["request"]["training"]["eps"] == 0.02
    assert json.loads(call("job", "view", job["id"], "--json").stdout) == job
    (summary,) = json.loads(call("job", "list", "--json").stdout)
    assert {name: summary[name] for name in ("id", "state", "recipe_id")} == {
        name: job[name] for name in ("id", "state", "recipe_id")
    }


def test_a_finished_job_is_watched_listed_and_downloaded(call, fleet, app, device, tmp_path):
    job = fleet.ready_job(app)
    lease = device.lease()
    device.post(f"/v1/leases/{lease['id']}/heartbeat", json={"phase": "training", "step": 2, "steps": 3, "loss": 0.5})
    version = device.finish(lease, phase_seconds={"loading": 0.5, "training": 1.5})
    events = [json.loads(line) for line in call("job", "watch", job["id"], "--json").stdout.splitlines()]
    assert events[0]["state"] == "queued"
    assert any(event.get("step") == 2 and event.get("loss") == 0.5 for event in events)
    assert events[-1]["state"] == "succeeded"
    assert set(events[-1]["state_seconds"]) == {"queued", "compiling", "ready", "training"}
    duration = datetime.fromisoformat(events[-1]["updated_at"]) - datetime.fromisoformat(events[-1]["created_at"])
    assert sum(events[-1]["state_seconds"].values()) == pytest.approx(duration.total_seconds(), abs=0.01)
    assert "seconds: queued " in call("job", "view", job["id"]).stdout
    assert "on the device: loading 0.5, training 1.5" in call("job", "view", job["id"]).stdout
    watch_result = call("job", "watch", job["id"])
    assert "succeeded" in watch_result.stdout
    assert "step 2/3" in watch_result.stderr
    assert [item["name"] for item in json.loads(call("adapter", "list", "--json").stdout)] == [version["adapter"]]
    assert version["adapter"] in call("adapter", "list").stdout
    pull_result = call("adapter", "pull", version["adapter"], "--to", tmp_path / "adapter")
    assert pull_result.exit_code == 0, pull_result.output
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "README.md", "mobizo.json"}


def test_watch_from_the_start_sees_the_end(fleet, app, device):
    job = fleet.ready_job(app)
    events = []
    with Client(fleet.url, app.token) as client:
        watcher = threading.Thread(target=lambda: events.extend(client.jobs.watch(job["id"])))
        watcher.start()
        device.finish(device.lease())
        watcher.join(30)
    assert not watcher.is_alive()
    assert events[-1].state is JobState.SUCCEEDED
    assert all(isinstance(event, JobView | Progress) for event in events)


def test_the_client_reads_programs_and_usage(fleet, app, operator):
    job = fleet.ready_job(app)
    with Client(fleet.url, app.token) as client:
        assert client.programs.get(job["recipe_id"]).manifest.recipe_id == job["recipe_id"]
        assert [summary.id for summary in client.jobs.list()] == [job["id"]]
        with pytest.raises(NotFound):
            client.adapters.get("nobody")
    with Client(fleet.url, operator.token) as client:
        assert client.server.usage().peak_rss_bytes > 0


def test_an_operator_creates_an_enrollment_token(call, fleet, operator):
    result = call("device", "enroll-token", "--token", operator.token)
    assert result.exit_code == 0
    assert fleet.actor(result.stdout.strip()).get("/v1/jobs").status_code == 401  # it can only enroll


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": "unknown"}, "unknown"),
        ({"recipe": {"sequence_length": 4096}}, "4096"),
        ({"task": "sst-3"}, "sst2"),
    ],
)
def test_server_errors_are_one_line_with_status_1(call, tmp_path, change, message):
    (tmp_path / "job.json").write_text(json.dumps(job_request(**change)))
    result = call("job", "submit", tmp_path / "job.json")
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_an_invalid_job_names_the_field(call, tmp_path):
    (tmp_path / "job.json").write_text(json.dumps(job_request(recipe={"rank": 0})))
    result = call("job", "submit", tmp_path / "job.json")
    assert result.exit_code == 2
    assert "recipe.rank" in result.stderr


def test_a_wrong_or_missing_token_names_the_remedy(call, monkeypatch):
    wrong_result = call("job", "list", "--token", "wrong")
    assert wrong_result.exit_code == 1
    assert "token" in wrong_result.stderr
    monkeypatch.delenv("MOBIZO_TOKEN")
    missing_result = call("job", "list")
    assert missing_result.exit_code == 2
    assert "MOBIZO_TOKEN" in missing_result.stderr


def test_options_replace_the_rules_of_the_file(call, tmp_path):
    rules = {"battery_floor": 20, "idle": True, "hours": [{"start": "01:00", "end": "02:00"}]}
    (tmp_path / "job.json").write_text(json.dumps(job_request(rules=rules)))
    options = ["--charging", "--battery-floor", "40", "--temperature-ceiling", "42.5", "--daily-minutes", "90"]
    options += ["--hours", "22:00-06:00", "--hours", "12:30 - 13:00", "--unmetered", "--priority", "-3"]
    request = json.loads(call("job", "submit", tmp_path / "job.json", *options, "--json").stdout)["request"]
    assert request["priority"] == -3
    assert request["rules"] == {
        "charging": True,
        "battery_floor": 40,
        "temperature_ceiling": 42.5,
        "memory_floor_bytes": None,
        "idle": True,
        "hours": [{"start": "22:00:00", "end": "06:00:00"}, {"start": "12:30:00", "end": "13:00:00"}],
        "metered": False,
        "daily_minutes": 90,
    }
    unchanged_request = json.loads(call("job", "submit", tmp_path / "job.json", "--json").stdout)["request"]
    assert unchanged_request["priority"] == 0
    assert {name: unchanged_request["rules"][name] for name in rules} == rules | {
        "hours": [{"start": "01:00:00", "end": "02:00:00"}],
    }


def test_a_start_and_a_trajectory_are_options(call, fleet, app, device, request_file):
    fleet.ready_job(app)
    device.finish(device.lease())
    options = ["--start", "alice-movies@v1", "--trajectory", "beside"]
    request = json.loads(call("job", "submit", request_file, *options, "--json").stdout)["request"]
    assert request["start"]["adapter"] == "alice-movies"
    assert request["trajectory"] == "beside"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--start", "Alice"], "start.adapter"),
        (["--trajectory", "all"], "trajectory"),
        (["--hours", "22:00"], "22:00-06:00"),
        (["--hours", "late-early"], "22:00-06:00"),
        (["--hours", "22:00-22:00"], "22:00-06:00"),
        (["--battery-floor", "101"], "rules.battery_floor"),
        (["--daily-minutes", "-1"], "rules.daily_minutes"),
    ],
)
def test_invalid_options_name_the_field(call, request_file, options, message):
    result = call("job", "submit", request_file, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"rules": 1}'])
def test_invalid_files_are_rejected(call, tmp_path, text):
    (tmp_path / "job.json").write_text(text)
    result = call("job", "submit", tmp_path / "job.json", "--charging")
    assert result.exit_code == 2
    assert "job.json" in result.stderr
    assert "Traceback" not in result.output


def test_why_a_device_waits_is_shown(call, fleet, app, device):
    job = fleet.ready_job(app)
    lease = device.lease()
    reason = "battery at 20 %, the floor is 40 % [rules of the job]"
    progress = {"phase": "waiting", "step": 1, "steps": 3, "why": reason}
    device.post(f"/v1/leases/{lease['id']}/heartbeat", json=progress)
    output = call("job", "view", job["id"]).stdout
    assert "training" in output
    assert f"waiting  step 1/3  {reason}" in output
    assert json.loads(call("job", "view", job["id"], "--json").stdout)["progress"]["why"] == reason
    device.finish(lease)
    assert f"waiting  step 1/3  {reason}" in call("job", "watch", job["id"]).stderr
    assert reason not in call("job", "view", job["id"]).stdout


def test_the_estimator_is_shown_beside_the_requested_one(call, fleet, app, device):
    job = fleet.ready_job(app, recipe={"estimator": "auto", "queries": None})
    body = {"needed_bytes": 90_001, "available_bytes": 90_000}
    device.post(f"/v1/leases/{device.lease()['id']}/decline", json=body)
    output = call("job", "view", job["id"]).stdout
    assert "estimator gradient (requested: auto)" in output
    assert "can spare 90,000 bytes" in output


def test_a_chosen_estimator_is_shown_with_its_reason(call, request_file):
    options = ["--estimator", "auto", "--trajectory", "beside", "--json"]
    job = json.loads(call("job", "submit", request_file, *options).stdout)
    assert job["recipe"]["estimator"] == "directional"
    output = call("job", "view", job["id"]).stdout
    assert "estimator directional (requested: auto)" in output
    assert "estimator directional: the job requests a trajectory" in output
    gradient_job = json.loads(call("job", "submit", request_file, "--estimator", "gradient", "--json").stdout)
    assert gradient_job["recipe"]["estimator"] == "gradient"
    assert "requested" not in call("job", "view", gradient_job["id"]).stdout
    result = call("job", "submit", request_file, "--estimator", "exact")
    assert result.exit_code == 2
    assert "estimator" in result.stderr


def test_why_a_job_failed_is_shown(call, fleet, app, device):
    job = fleet.ready_job(app, device=device.device_id)
    body = {"needed_bytes": 275_000, "available_bytes": 10_000}
    device.post(f"/v1/leases/{device.lease()['id']}/decline", json=body)
    assert "does-not-fit: device phone can spare 10,000 bytes" in call("job", "view", job["id"]).stdout
    result = call("job", "view", "job_none")
    assert result.exit_code == 1
    assert "`mobizo job list` shows what exists" in result.stderr


def test_who_am_i_and_tokens(call, operator):
    identity = call("whoami")
    assert "app of tenant default" in identity.stdout
    assert "jobs:read" in identity.stdout
    assert call("token", "list").exit_code == 1
    creation = call("token", "create", "--token", operator.token, "--name", "shop", "--scope", "jobs:read")
    assert creation.exit_code == 0, creation.output
    shop = json.loads(call("whoami", "--token", creation.stdout.strip(), "--json").stdout)
    assert (shop["name"], shop["scopes"], shop["role"]) == ("shop", ["jobs:read"], "app")
    assert "token shop" in call("whoami", "--token", creation.stdout.strip()).stdout
    tokens = json.loads(call("token", "list", "--token", operator.token, "--json").stdout)
    assert [item["name"] for item in tokens] == ["shop", "", ""]
    assert shop["token_id"] in call("token", "list", "--token", operator.token).stdout
    assert call("token", "revoke", shop["token_id"], "--token", operator.token).exit_code == 0
    assert call("whoami", "--token", creation.stdout.strip()).exit_code == 1
    unlimited = call("token", "create", "--token", operator.token, "--expires-in-days", "never", "--json")
    assert json.loads(unlimited.stdout)["view"]["expires_at"] is None
