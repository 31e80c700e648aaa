"""Entity tags: what is read again only if it changed."""

import pytest


@pytest.fixture
def job(app):
    return f"/v1/jobs/{app.submit()['id']}"


def test_a_tag_changes_with_the_thing_and_only_then(app, job):
    first = app.get(job).headers["etag"]
    assert first == app.get(job).headers["etag"]
    assert first.startswith('"')
    app.post(f"{job}/cancel")
    assert app.get(job).headers["etag"] != first


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
