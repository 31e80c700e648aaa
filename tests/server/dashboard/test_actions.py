"""What people do on the pages: each form has the effect, the refusals and the scope of its REST route."""

import json
import re
from datetime import UTC, datetime, timedelta

import pytest

from shared.access import Role, Scope
from shared.signing import new_private_key, public_text
from tests.server.actors import JOB, job_request
from tests.server.dashboard.seed import progress

NEW = {
    "base": "tiny",
    "user": "alice",
    "adapter": "mine",
    "task": "sst2",
    "dataset": "movies",
    "rank": "2",
    "steps": "3",
}


@pytest.fixture
def offering(device):
    """A device of `alice` that has reported its data set."""
    assert device.lease("movies") is None
    return device


def test_a_job_is_submitted_by_fields_or_as_json_and_cancelled(person, app, offering):
    someone = person(Role.APP)
    answer = someone.act("/ui/jobs/new", "/ui/jobs/new", **NEW, estimator="replay", lr="0.01", priority="2")
    assert answer.status_code == 303, answer.text
    place = answer.headers["location"]
    page = someone.get(place)
    assert "The job is submitted." in page.text
    job = app.get(f"/v1/jobs/{place.split('/')[3].partition('?')[0]}").json()
    assert (job["request"]["adapter"], job["recipe"]["rank"], job["request"]["priority"]) == ("mine", 2, 2)
    wrong = someone.act("/ui/jobs/new", "/ui/jobs/new", **NEW, start="No@v1")
    assert 'name="start" value="No@v1" inputmode="text" aria-invalid="true"' in wrong.text
    place = someone.act("/ui/jobs/new", "/ui/jobs/new", **NEW | {"adapter": "best"}, start="auto").headers["location"]
    job = app.get(f"/v1/jobs/{place.split('/')[3].partition('?')[0]}").json()
    assert job["request"]["start"] == "auto"
    text = json.dumps(job_request(adapter="pasted"))
    place = someone.act("/ui/jobs/new", "/ui/jobs/new", json=text).headers["location"]
    address = place.partition("?")[0]
    assert someone.act(f"{address}/cancel", address).status_code == 303
    job = app.get(f"/v1/jobs/{address.split('/')[3]}").json()
    assert (job["request"]["adapter"], job["state"]) == ("pasted", "cancelled")
    assert "/cancel" not in someone.get(address).text


def test_the_page_of_a_job_that_repeats_names_its_series_and_ends_it(person, fleet, app, device):
    first = fleet.ready_job(app, adapter="weekly", repeat={"every": "7d"})
    address, someone = f"/ui/jobs/{first['id']}", person(Role.APP)
    assert "The series ends." in someone.get(address).text
    while (lease := device.lease())["job"]["id"] != first["id"]:
        device.finish(lease)
    device.finish(lease, earlier_accuracy_before=0.8, earlier_accuracy_after=0.79, reference_loss_change=0.0123)
    for page in (address, "/ui/adapters/weekly/versions/1"):
        assert "<dt>Loss of the reference texts</dt><dd>+1.2 %</dd>" in someone.get(page).text
    text = someone.get(address).text
    assert "every 7d since" in text
    assert "80.0% before, 79.0% after" in text
    assert "End the series" in text
    assert someone.act(f"{address}/cancel", address).status_code == 303
    assert "ended: it was cancelled" in someone.get(address).text


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"rank": "many"}, 400, "LoRA rank: &#39;many&#39; is not a number"),
        ({"rank": "0"}, 400, "LoRA rank: Input should be"),
        ({"user": ""}, 400, "User: fill this in"),
        ({"user": "bob"}, 400, "User: no device is bound to bob; <code>mobizo device bind DEVICE bob</code> binds one"),
        (
            {"dataset": "books"},
            400,
            "Data set: no device of alice offers books; <code>mobizo-agent data add books FILE</code>",
        ),
        ({"layers": "few"}, 400, "Layers: must be all, last:K"),
        ({"json": json.dumps({**JOB, "user": "bob"})}, 400, "no device is bound to bob"),
        ({"base": "none"}, 404, "none"),
        ({"json": "{"}, 400, "not JSON"),
        ({"json": "[" * 100 + "]" * 100}, 400, "nested"),
        ({"json": json.dumps({**JOB, "extra": 1})}, 400, "extra"),
        ({"json": json.dumps({**JOB, "device": "device_none"})}, 404, "device"),
    ],
)
def test_a_job_that_cannot_be_submitted_comes_back_with_what_is_wrong(person, offering, changes, status, words):
    someone = person()
    answer = someone.act("/ui/jobs/new", "/ui/jobs/new", **{**NEW, **changes})
    assert answer.status_code == status
    assert 'role="alert"' in answer.text
    assert words in answer.text.split('role="alert"')[1][:200]
    assert 'value="mine"' in answer.text  # what was typed is still there
    assert "No job was submitted" in someone.get("/ui/jobs").text


def test_everything_wrong_is_said_at_once_and_in_words(person, offering):
    someone = person()
    wrong = {"adapter": "My adapter!", "user": "bob", "rank": "0", "steps": "few"}
    alert = (
        someone.act("/ui/jobs/new", "/ui/jobs/new", **{**NEW, **wrong}).text.split('role="alert"')[1].split("</div>")[0]
    )
    for words in ("Adapter: use lower-case letters", "User: no device is bound", "LoRA rank:", "Steps:"):
        assert words in alert
    assert "pattern" not in alert


def test_the_form_offers_what_exists(person, offering):
    form = person().get("/ui/jobs/new").text
    assert re.search(r'<select id="user"[^>]*><option>alice</option>', form)
    assert re.search(r'<select id="dataset"[^>]*><option>movies</option>', form)
    assert "<option selected>int8</option>" in form
    assert 'value="last:40%"' in form
    assert '<input id="user"' in person(Role.APP).get("/ui/jobs/new").text  # it may not read devices


def test_forms_larger_than_a_form_are_refused(person):
    someone = person()
    assert someone.act("/ui/jobs/new", "/ui/jobs/new", json="x" * 70_000).status_code == 413
    assert someone.post("/ui/jobs/new", json={}).status_code == 415
    assert someone.post("/ui/logout", data={str(number): "x" for number in range(200)}).status_code == 400


def test_a_device_is_let_in_by_a_token_and_revoked(fleet, person):
    someone = person()
    page = someone.get("/ui/devices/join")
    assert someone.send_form("/ui/devices/join", page, users="Not OK!").status_code == 400
    answer = someone.send_form("/ui/devices/join", page, users="alice, bob")
    token = re.search(r"--token (mobizo-enroll-\S+?)<", answer.text)[1]
    body = {"name": "phone", "public_key": public_text(new_private_key().public_key()), "platform": "linux"}
    device = fleet.actor(token).post("/v1/devices", json=body).json()["device_id"]
    assert fleet.operator().get(f"/v1/devices/{device}").json()["users"] == ["alice", "bob"]
    assert someone.act(f"/ui/devices/{device}/revoke", f"/ui/devices/{device}").status_code == 303
    assert fleet.operator().get(f"/v1/devices/{device}").json()["revoked_at"]
    trail = someone.get("/ui/operations/audit").text
    assert "device-invited" in trail
    assert "device-enrolled" in trail
    assert "device-revoked" in trail


def test_decisions_about_versions_are_the_registry_s(fleet, person, app, device):
    for number, score in enumerate((0.7, 0.8, 0.4)):
        fleet.ready_job(app)
        scores = {"zero_shot_accuracy": 0.5, "tuned_accuracy": score, "accuracy_split": "test"}
        device.finish(device.lease(), value=0.1 * number, **scores)
    someone, at = person(), "/ui/adapters/alice-movies"

    def main():
        return app.get("/v1/adapters/alice-movies").json()["main"]

    assert "alice-movies v3" in someone.get("/").text  # it is held, since its score fell
    assert "mobizo adapter pull" not in someone.get(f"{at}/versions/3").text
    assert 'action="/ui/adapters/alice-movies/versions/3/choose"' in someone.get(f"{at}/versions/3").text
    reader = person(scopes=[Scope.ADAPTERS_READ, Scope.ADAPTERS_SCORE])
    assert "can be tried here by those who may approve it" in reader.get(f"{at}/versions/3").text
    assert "mobizo adapter pull alice-movies@v2 --to alice-movies-v2" in someone.get(f"{at}/versions/2").text
    assert someone.act(f"{at}/versions/3/promote", reason="it is held").status_code == 409
    assert someone.act(f"{at}/versions/3/approve", f"{at}/versions/3", reason="checked by hand").status_code == 303
    assert main() == 3
    assert someone.act(f"{at}/versions/1/promote", f"{at}/versions/1").status_code == 303
    assert main() == 1
    assert someone.act(f"{at}/versions/1/approve", reason="x" * 2000).status_code == 400
    trail = app.get("/v1/adapters/alice-movies/events").json()["items"]
    assert [event["action"] for event in trail[:3]] == ["promoted", "approved", "held"]
    assert trail[1]["reason"] == "checked by hand"
    assert "checked by hand" in someone.get("/ui/operations/audit").text


def test_rounds_are_opened_and_closed(stocked, person):
    fleet, *_ = stocked
    someone, at = person(), "/ui/cohorts/readers"
    assert someone.act(f"{at}/rounds").status_code == 409  # one is open
    assert someone.act(f"{at}/rounds/1/close", f"{at}/rounds/1").status_code == 303
    assert fleet.app().get("/v1/cohorts/readers/rounds/1").json()["state"] == "aggregating"
    assert "1 of 2" in someone.get(at).text


def test_revoking_a_token_ends_its_sessions(fleet, person):
    someone, other = person(), person()
    token_id = fleet.actor(other.token).get("/v1/whoami").json()["token_id"]
    assert someone.act(f"/ui/operations/tokens/{token_id}/revoke", "/ui/operations/tokens").status_code == 303
    assert other.get("/").status_code == 303
    assert someone.get("/").status_code == 200


def test_a_token_is_created_with_scopes_and_an_end_and_shown_once(fleet, person):
    someone, at = person(), "/ui/operations/tokens"
    fields = {"name": "importer", "role": "app", "scope-jobs:read": "on", "scope-adapters:read": "on", "days": "30"}
    text = re.search(r"mobizo-app-[\w-]+", someone.act(at, at, **fields).text)[0]
    view = fleet.actor(text).get("/v1/whoami").json()
    assert (view["name"], view["scopes"]) == ("importer", ["adapters:read", "jobs:read"])
    assert timedelta(days=29) < datetime.fromisoformat(view["expires_at"]) - datetime.now(UTC) < timedelta(days=30)
    assert text not in someone.get(at).text
    for wrong in ({"days": "0"}, {"days": "soon"}, {"role": "device"}, {"scope-all": "on"}, {"name": "x" * 97}):
        assert someone.act(at, at, **fields | wrong).status_code == 400
    limited = person(scopes=[Scope.TOKENS_WRITE])
    assert limited.act(at, at, **fields).status_code == 403  # more than its own scopes


def test_a_new_operator_is_shown_the_first_steps(fleet, person):
    page = person().get("/").text
    assert "First steps" in page
    assert 'href="/ui/devices/join">Enroll a device' in page
    assert "First steps" not in person(Role.APP).get("/").text


def test_events_continue_where_a_page_left_off(fleet, person, app, device, lease):
    for step in (1, 2, 3):
        device.post(f"/v1/leases/{lease['id']}/heartbeat", json=progress(step, 3)).raise_for_status()
    device.finish(lease)
    someone, path = person(), f"/ui/jobs/{lease['job']['id']}/events"

    def ids(answer):
        return [int(line.removeprefix("id: ")) for line in answer.text.splitlines() if line.startswith("id: ")]

    every = ids(someone.get(path))
    assert every == list(range(1, len(every) + 1))
    assert ids(someone.get(path, headers={"Last-Event-ID": "3"})) == every[3:]
    assert ids(someone.get(path, params={"after": 4})) == every[4:]
    assert ids(someone.get(path, params={"after": 4}, headers={"Last-Event-ID": "5"})) == every[5:]
    assert someone.get(path, params={"after": 999}).status_code == 400


def test_a_prompt_that_is_no_prompt_is_refused(person, device, lease):
    device.finish(lease)
    someone, at = person(), "/ui/adapters/alice-movies/versions/1"
    for fields in ({"prompt": ""}, {"prompt": "x", "temperature": "hot"}, {"prompt": "x", "max_tokens": "-1"}):
        answer = someone.act(f"{at}/try", at, **fields)
        assert answer.status_code == 400
        assert "write a prompt" in answer.text.lower()
