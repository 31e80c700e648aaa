"""A form that is sent twice, and a page that fails."""

import re

import pytest

from server.jobs.repository import JobRepository
from shared.access import Role
from tests.server.dashboard.test_actions import NEW
from tests.server.homes import at_once


@pytest.mark.both_databases
def test_a_form_that_is_sent_twice_leads_to_the_first_result(person, app):
    someone = person(Role.APP)
    page = someone.get("/ui/jobs/new")
    wrong = someone.send_form("/ui/jobs/new", page, **NEW, lr="much")
    assert wrong.status_code == 400
    answers = at_once(*(lambda: someone.send_form("/ui/jobs/new", page, **NEW) for _ in range(3)))
    assert {answer.status_code for answer in answers} == {303}
    assert len({answer.headers["location"] for answer in answers}) == 1
    (job,) = app.get("/v1/jobs").json()["items"]
    address = f"/ui/jobs/{job['id']}"
    assert answers[0].headers["location"] == f"{address}?note=submitted"
    # Another form of the same page, and the same form of another page, are other submissions.
    other = someone.send_form("/ui/jobs/new", page, **{**NEW, "adapter": "other"})
    again = someone.act("/ui/jobs/new", "/ui/jobs/new", **NEW)
    assert len({each.headers["location"] for each in (answers[0], other, again)}) == 3
    page = someone.get(address)
    assert [someone.send_form(f"{address}/cancel", page).status_code for _ in range(2)] == [303, 303]


def test_a_second_rollback_from_the_same_page_goes_back_one_version_only(fleet, person, app, device):
    for number, score in enumerate((0.7, 0.8, 0.9)):
        fleet.ready_job(app)
        device.finish(device.lease(), value=0.1 * number, zero_shot_accuracy=0.5, tuned_accuracy=score)
    someone, at = person(), "/ui/adapters/alice-movies"
    page = someone.get(at)
    answers = [someone.send_form(f"{at}/rollback", page, reason="worse") for _ in range(2)]
    assert [answer.headers["location"] for answer in answers] == [f"{at}?note=rolled-back"] * 2
    assert app.get("/v1/adapters/alice-movies").json()["main"] == 2


def test_an_unexpected_error_is_a_page_with_the_request_id(person, monkeypatch):
    def fail(*args):
        raise RuntimeError("a secret of the inside")

    someone = person()
    monkeypatch.setattr(JobRepository, "programs_page", fail)
    answer = someone.get("/ui/programs")
    assert answer.status_code == 500
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"]
    (request_id,) = re.findall("Request id: <code>([0-9a-f]{32})</code>", answer.text)
    assert answer.headers["x-request-id"] == request_id
    assert "secret" not in answer.text
    assert "Nothing was changed" in answer.text
    events = someone.get("/ui/programs", headers={"Accept": "text/event-stream"})
    assert events.json()["code"] == "internal-error"
