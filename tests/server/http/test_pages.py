"""Cursors, and the lists that they page."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.http.pages import read_cursor, write_cursor
from shared.errors import BadRequest


@given(st.integers(0, 2**63 - 1))
def test_round_trip(number):
    assert read_cursor(write_cursor(number)) == number


@given(st.text(max_size=40))
def test_anything_else_is_refused_or_a_number(text):
    with contextlib.suppress(BadRequest):
        assert 0 <= read_cursor(text) < 2**63


def test_the_last_page_has_no_cursor():
    assert write_cursor(None) is None


@pytest.mark.parametrize("cursor", ["x", "!!!!", "LTE=", "", "8J+YgA=="])
def test_a_bad_cursor_is_a_problem(app, problem, cursor):
    problem(app.get("/v1/jobs", params={"cursor": cursor}), 400, "bad-request")


@pytest.mark.parametrize("limit", ["0", "-1", "201", "x", "1e3"])
def test_a_bad_limit_is_a_problem(app, problem, limit):
    document = problem(app.get("/v1/jobs", params={"limit": limit}), 422, "invalid-request")
    assert document["errors"][0]["field"] == "query.limit"


def test_pages_tell_everything_once_newest_first(app):
    made = [app.submit(adapter=f"a{number}")["id"] for number in range(5)]
    seen, cursor, sizes = [], None, []
    while True:
        page = app.get("/v1/jobs", params={"limit": 2, **({"cursor": cursor} if cursor else {})}).json()
        seen += [job["id"] for job in page["items"]]
        sizes.append(len(page["items"]))
        cursor = page["next"]
        if cursor is None:
            break
    assert seen == made[::-1]
    assert sizes == [2, 2, 1]


def test_a_page_is_stable_while_jobs_are_added(app):
    made = [app.submit(adapter=f"a{number}")["id"] for number in range(4)]
    first = app.get("/v1/jobs", params={"limit": 2}).json()
    app.submit(adapter="later")
    second = app.get("/v1/jobs", params={"limit": 2, "cursor": first["next"]}).json()
    assert [job["id"] for job in second["items"]] == [made[1], made[0]]
    assert second["next"] is None
