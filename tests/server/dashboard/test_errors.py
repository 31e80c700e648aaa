"""A page that fails."""

import re

from server.jobs.repository import JobRepository


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
