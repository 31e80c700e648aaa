"""Request ids, entity tags, and that no error leaves its form."""

import pytest

from server.operations import health as info
from tests.server.actors import job_request


def test_a_given_request_id_is_kept_if_it_is_harmless(app):
    assert app.get("/healthz", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert app.get("/healthz", headers={"X-Request-Id": "a b"}).headers["x-request-id"] != "a b"
    assert len(app.get("/healthz", headers={"X-Request-Id": "a" * 1000}).headers["x-request-id"]) == 32


def test_the_fields_at_fault_are_named(app, problem):
    response = app.post("/v1/jobs", json=job_request(recipe={"rank": 0}, training={"steps": 0}))
    document = problem(response, 422, "invalid-request")
    assert {error["field"] for error in document["errors"]} == {"recipe.rank", "training.steps"}
    assert all(error["message"] for error in document["errors"])
    assert "recipe.rank" in document["detail"]
    assert document["instance"] == "/v1/jobs"


def test_the_unexpected_is_told_without_its_internals(fleet, app, problem, monkeypatch):
    def explode(key):
        raise RuntimeError("the secret is 42")

    monkeypatch.setattr(info, "server_info", explode)
    response = app.get("/v1/server")
    problem(response, 500, "internal-error")
    assert "42" not in response.text
    assert "RuntimeError" not in response.text
    assert response.headers["x-request-id"]
    monkeypatch.undo()
    assert app.get("/v1/server").status_code == 200


@pytest.fixture
def job(app):
    return f"/v1/jobs/{app.submit()['id']}"


def test_what_the_client_has_is_not_sent_again(app, job):
    tag = app.get(job).headers["etag"]
    for condition in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        answer = app.get(job, headers={"If-None-Match": condition})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == tag
        assert "content-type" not in answer.headers
    for other in ('"other"', "nonsense", "", tag.strip('"')):
        assert app.get(job, headers={"If-None-Match": other}).status_code == 200
    app.post(f"{job}/cancel")
    assert app.get(job, headers={"If-None-Match": tag}).status_code == 200


def test_several_header_lines_are_one_list(app, job):
    tag = app.get(job).headers["etag"]
    assert app.get(job, headers=[("If-None-Match", '"a"'), ("If-None-Match", tag)]).status_code == 304


def test_what_is_read_is_to_be_asked_for_again_and_what_is_done_is_not_kept(app, operator, job):
    assert app.get(job).headers["cache-control"] == "private, no-cache"
    assert operator.post("/v1/enrollments", json={}).headers["cache-control"] == "no-store"
    assert app.get("/v1/jobs/none").headers["cache-control"] == "no-store"
