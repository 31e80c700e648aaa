"""Cursors, and the lists that they page."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.web.pages import InvalidCursor, read_cursor, write_cursor

HERE = b"7 bytes"
NUMBERS = st.integers(0, 2**63 - 1)


@given(st.text(max_size=40) | st.from_regex(r"[A-Za-z0-9_-]{20}", fullmatch=True))
def test_anything_else_is_refused(text):
    with pytest.raises(InvalidCursor):
        read_cursor(text, HERE)


@given(NUMBERS, st.integers(0, 19), st.sampled_from("Az09_-"))
def test_one_sign_changed_never_leads_outside(number, place, sign):
    cursor = write_cursor(number, HERE)
    with contextlib.suppress(InvalidCursor):
        assert 0 <= read_cursor(cursor[:place] + sign + cursor[place + 1 :], HERE) < 2**63


def test_a_cursor_is_of_one_list_and_its_filters(fleet, app, operator, problem):
    for number in range(2):
        app.submit(adapter=f"a{number}")
    cursor = app.get("/v1/jobs", params={"limit": 1}).json()["next"]
    assert app.get("/v1/jobs", params={"cursor": cursor, "limit": 5}).status_code == 200
    problem(app.get("/v1/adapters", params={"cursor": cursor}), 400, "invalid-cursor")
    problem(operator.get("/v1/devices", params={"cursor": cursor}), 400, "invalid-cursor")
    problem(app.get("/v1/jobs", params={"cursor": cursor, "state": "ready"}), 400, "invalid-cursor")


def test_a_page_is_stable_while_jobs_are_added(app):
    submitted = [app.submit(adapter=f"a{number}")["id"] for number in range(4)]
    first = app.get("/v1/jobs", params={"limit": 2}).json()
    app.submit(adapter="later")
    second = app.get("/v1/jobs", params={"limit": 2, "cursor": first["next"]}).json()
    assert [job["id"] for job in second["items"]] == [submitted[1], submitted[0]]
    assert second["next"] is None
