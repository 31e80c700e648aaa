"""The commands about jobs and tokens, and `client.jobs`, against a real server."""

import json
import threading
from datetime import datetime

import pytest

from mobizo import Client
from shared.errors import NotFound
from shared.job import JobState, JobView, Progress
from tests.server.actors import job_request


@pytest.fixture
def request_file(tmp_path):
    """Writes a job with changes to a file; returns the file."""

    def write(**changes):
        path = tmp_path / "job.json"
        path.write_text(json.dumps(job_request(**changes)))
        return path

    return write


def test_submit_list_cancel(command, request_file):
    job = json.loads(command("job", "submit", request_file(), "--json"))
    assert [item["id"] for item in json.loads(command("job", "list", "--json"))] == [job["id"]]
    assert job["id"] in command("job", "list")
    assert json.loads(command("job", "cancel", job["id"], "--json"))["state"] == "cancelled"
    assert f"mobizo job retry {job['id']}" in command("job", "watch", job["id"], exit_code=1)


def test_a_job_repeats_until_it_is_cancelled_after_its_end(command, home, fleet, app, device, request_file):
    assert "such as 12h or 7d" in command("job", "submit", request_file(), "--every", "week", exit_code=2)
    job = json.loads(command("job", "submit", request_file(), "--every", "7d", "--json"))
    assert job["request"]["repeat"]["every"] == "7d"
    home.compile()
    device.finish(device.lease())
    assert f"series {job['id']}: the next job is created at" in command("job", "view", job["id"])
    command("job", "cancel", job["id"])
    assert f"series {job['id']} has ended: it was cancelled" in command("job", "view", job["id"])


def test_a_job_is_submitted_with_a_start(command, fleet, app, device, request_file):
    assert "auto or a version" in command("job", "submit", request_file(), "--start", "No@v1", exit_code=2)
    fleet.ready_job(app)
    version = device.finish(device.lease())
    for start, expected in (
        ("auto", "auto"),
        ("alice-movies@v1", {"adapter": "alice-movies", "revision": version["revision"]}),
    ):
        job = json.loads(command("job", "submit", request_file(), "--start", start, "--json"))
        assert job["request"]["start"] == expected


def test_retry_submits_the_same_request_as_a_new_job(command, fleet, app, device, request_file):
    fleet.ready_job(app)
    device.finish(device.lease())
    changes = {"recipe": {"estimator": "auto"}, "start": {"adapter": "alice-movies"}, "rules": {"charging": True}}
    first = json.loads(command("job", "submit", request_file(**changes, priority=3), "--json"))
    assert "cancel it" in command("job", "retry", first["id"], exit_code=1)
    command("job", "cancel", first["id"])
    second = json.loads(command("job", "retry", first["id"], "--json"))
    assert second["id"] != first["id"]
    assert (second["request"], second["recipe_id"]) == (first["request"], first["recipe_id"])
    assert len(command("job", "list", "--limit", "1").splitlines()) == 1


def test_a_finished_job_is_watched_listed_and_downloaded(command, fleet, app, device, tmp_path):
    job = fleet.ready_job(app)
    lease = device.lease()
    device.post(f"/v1/leases/{lease['id']}/heartbeat", json={"phase": "training", "step": 2, "steps": 3, "loss": 0.5})
    version = device.finish(lease, phase_seconds={"loading": 0.5, "training": 1.5})
    events = [json.loads(line) for line in command("job", "watch", job["id"], "--json").splitlines()]
    assert events[0]["state"] == "queued"
    assert any(event.get("step") == 2 and event.get("loss") == 0.5 for event in events)
    assert events[-1]["state"] == "succeeded"
    assert set(events[-1]["state_seconds"]) == {"queued", "compiling", "ready", "training"}
    duration = datetime.fromisoformat(events[-1]["updated_at"]) - datetime.fromisoformat(events[-1]["created_at"])
    assert sum(events[-1]["state_seconds"].values()) == pytest.approx(duration.total_seconds(), abs=0.01)
    output = command("job", "view", job["id"])
    assert "seconds: queued " in output
    assert "on the device: loading 0.5, training 1.5" in output
    assert "succeeded" in command("job", "watch", job["id"])
    assert "step 2/3" in command("job", "watch", job["id"], stderr=True)
    assert [item["name"] for item in json.loads(command("adapter", "list", "--json"))] == [version["adapter"]]
    command("adapter", "pull", version["adapter"], "--to", tmp_path / "adapter")
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "README.md", "mobizo.json"}


def test_the_end_is_scored_and_decided(command, fleet, app, device, request_file):
    scores = {"accuracy_split": "test", "majority_accuracy": 0.6, "baseline_accuracy": 0.7}
    fleet.ready_job(app)
    device.finish(device.lease(), reference_loss_change=0.0123, **scores)
    first = json.loads(command("job", "list", "--json"))[0]["id"]
    score = "test accuracy 75.0%, before training 50.0%, always the most frequent answer 60.0%, n-grams 70.0%"
    for verb in ("watch", "view"):
        lines = command("job", verb, first).splitlines()
        assert score in lines
        assert "loss of the reference texts +1.2%" in lines
        assert "alice-movies@v1 is approved" in lines
    fleet.ready_job(app, start="alice-movies@v1")
    device.finish(device.lease(), zero_shot_accuracy=None, start_accuracy=0.75, tuned_accuracy=0.5, **scores)
    second = json.loads(command("job", "list", "--json"))[0]["id"]
    held = command("job", "watch", second)
    assert "alice-movies@v2 is held: the score fell from 75.0% to 50.0%" in held
    assert "`mobizo adapter approve alice-movies@v2` approves it" in held
    third = json.loads(command("job", "submit", request_file(start="alice-movies@v1"), "--json"))
    assert third["request"]["start"]["adapter"] == "alice-movies"
    assert len(third["request"]["start"]["revision"]) == 40


def test_what_an_operator_can_do_is_shown(command, fleet, app):
    queued = app.submit(adapter="first")
    assert "; if it waits for long, `mobizo-server doctor` shows why" in command("job", "view", queued["id"])
    job = fleet.ready_job(app, adapter="second")
    shown = command("job", "view", job["id"])
    assert "no device is enrolled; an operator runs `mobizo device enroll-token --user alice`" in shown


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
        with pytest.raises(NotFound):
            client.adapters.get("nobody")
    with Client(fleet.url, operator.token) as client:
        assert client.server.usage().peak_rss_bytes > 0


def test_server_errors_are_one_line_with_status_1(command, request_file):
    message = command("job", "submit", request_file(task="sst-3"), exit_code=1)
    assert "sst2" in message
    assert len(message.splitlines()) == 1


def test_invalid_files_are_rejected(command, request_file, tmp_path):
    assert "recipe.rank" in command("job", "submit", request_file(recipe={"rank": 0}), exit_code=2)
    for text in ("", "[]", "nonsense", '{"rules": 1}'):
        (tmp_path / "job.json").write_text(text)
        assert "job.json" in command("job", "submit", tmp_path / "job.json", exit_code=2)


def test_a_wrong_or_missing_token_names_the_remedy(command, monkeypatch):
    assert "token" in command("job", "list", "--token", "wrong", exit_code=1)
    monkeypatch.delenv("MOBIZO_TOKEN")
    assert "MOBIZO_TOKEN" in command("job", "list", exit_code=2)


def test_why_a_device_waits_is_shown(command, fleet, app, device):
    job = fleet.ready_job(app)
    lease = device.lease()
    reason = "battery at 20 %, the floor is 40 % [rules of the job]"
    progress = {"phase": "waiting", "step": 1, "steps": 3, "why": reason}
    device.post(f"/v1/leases/{lease['id']}/heartbeat", json=progress)
    output = command("job", "view", job["id"])
    assert "training" in output
    assert f"waiting  step 1/3  {reason}" in output
    assert json.loads(command("job", "view", job["id"], "--json"))["progress"]["why"] == reason
    device.finish(lease)
    assert f"waiting  step 1/3  {reason}" in command("job", "watch", job["id"], stderr=True)
    assert reason not in command("job", "view", job["id"])


def test_the_estimator_is_shown_beside_the_requested_one(command, fleet, app, device):
    job = fleet.ready_job(app, recipe={"estimator": "auto", "queries": None})
    body = {"needed_bytes": 90_001, "available_bytes": 90_000}
    device.post(f"/v1/leases/{device.lease()['id']}/decline", json=body)
    output = command("job", "view", job["id"])
    assert "estimator gradient (requested: auto)" in output
    assert "can spare 90,000 bytes" in output


def test_why_a_job_failed_is_shown(command, fleet, app, device):
    job = fleet.ready_job(app, device=device.device_id)
    body = {"needed_bytes": 275_000, "available_bytes": 10_000}
    device.post(f"/v1/leases/{device.lease()['id']}/decline", json=body)
    assert "does-not-fit: device phone can spare 10,000 bytes" in command("job", "view", job["id"])
    assert "`mobizo job list` shows what exists" in command("job", "view", "job_none", exit_code=1)


def test_who_am_i_and_tokens(command, fleet, operator):
    identity = command("whoami")
    assert "app of tenant default" in identity
    assert "jobs:read" in identity
    command("token", "list", exit_code=1)
    operators = ("--token", operator.token)
    token = command("token", "create", *operators, "--name", "shop", "--scope", "jobs:read").strip()
    shop = json.loads(command("whoami", "--token", token, "--json"))
    assert (shop["name"], shop["scopes"], shop["role"]) == ("shop", ["jobs:read"], "app")
    assert "token shop" in command("whoami", "--token", token)
    tokens = json.loads(command("token", "list", *operators, "--json"))
    assert [item["name"] for item in tokens] == ["shop", "", ""]
    assert shop["token_id"] in command("token", "list", *operators)
    command("token", "revoke", shop["token_id"], *operators)
    command("whoami", "--token", token, exit_code=1)
    unlimited = command("token", "create", *operators, "--expires-in-days", "never", "--json")
    assert json.loads(unlimited)["view"]["expires_at"] is None
    enrollment_token = command("device", "enroll-token", *operators).strip()
    assert fleet.actor(enrollment_token).get("/v1/jobs").status_code == 401  # it can only enroll
