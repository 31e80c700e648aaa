"""How many requests are taken: the buckets by a clock of the test's own, and what a client is told over HTTP."""

import pytest

from server.settings import Settings
from server.web import state
from server.web.state import AppState, Buckets, Limits, place_of
from shared.errors import TooManyRequests


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_burst_then_the_rate(clock):
    buckets = Buckets(rate=2, burst=3, clock=clock)
    assert [buckets.wait("a"), *(buckets.take("a") for _ in range(3))] == [0, 0, 0, 0]  # looking takes nothing
    assert buckets.wait("a") == buckets.take("a") == pytest.approx(0.5)
    assert buckets.take("b") == 0
    clock.now += 0.25
    assert buckets.take("a") == pytest.approx(0.25)
    clock.now += 0.25
    assert buckets.take("a") == 0
    clock.now += 1000
    assert [buckets.take("a") for _ in range(3)] == [0, 0, 0]
    assert buckets.take("a") > 0


def test_memory_is_bounded_and_the_longest_unused_goes(clock):
    buckets = Buckets(rate=1, burst=1, clock=clock, capacity=3)
    for key in ("a", "b", "c", "a", "d"):
        buckets.take(key)
    assert len(buckets) == 3
    assert [key in buckets for key in "abcd"] == [True, False, True, True]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("", "192.0.2.1", False),
    ],
)
def test_who_counts_as_one(one, other, same):
    assert (place_of(one) == place_of(other)) is same


@pytest.fixture
def limits(clock, monkeypatch):
    monkeypatch.setattr(state, "REFUSAL_RATE", 1)
    monkeypatch.setattr(state, "REFUSAL_BURST", 3)
    return Limits(Settings(token_rate=1, address_rate=1), clock)


def test_guessing_stops_and_those_beside_it_go_on(limits, clock):
    limits.before("good", "192.0.2.1")
    limits.good("good")
    for number in range(3):
        limits.before(f"guess{number}", "192.0.2.1")
        limits.refused(f"guess{number}", "192.0.2.1")
    with pytest.raises(TooManyRequests) as error_info:
        limits.before("guess3", "192.0.2.1")
    assert error_info.value.extra["limit"] == "refusals"
    limits.before("good", "192.0.2.1")
    limits.before("guess3", "192.0.2.2")
    clock.now += 1
    limits.before("guess3", "192.0.2.1")


def test_a_token_that_ended_is_a_guess_from_then_on(limits):
    limits.good("token")
    for _ in range(3):
        limits.before("token", "192.0.2.1")
        limits.refused("token", "192.0.2.1")
    with pytest.raises(TooManyRequests):
        limits.before("token", "192.0.2.1")


def test_tokens_that_were_never_valid_take_the_turns_of_their_address(limits):
    limits.good("good")
    assert limits.sender("good", "192.0.2.1") == "good"
    assert limits.sender("guess1", "192.0.2.1") == limits.sender("guess2", "192.0.2.1") == "192.0.2.1"


def test_refusals_repeated_at_once_are_held_back(limits, clock):
    burst, rate = state.REFUSED_BURST, state.REFUSED_RATE
    assert [limits.refusal_delay("a") for _ in range(burst)] == [0.0] * burst
    assert limits.refusal_delay("a") == pytest.approx(1 / rate)
    assert limits.refusal_delay("a") == pytest.approx(2 / rate)
    assert limits.refusal_delay("b") == 0
    assert max(limits.refusal_delay("a") for _ in range(1000)) == state.MAX_HELD_SECONDS
    clock.now += state.MAX_HELD_SECONDS + burst / rate
    assert limits.refusal_delay("a") == 0


@pytest.fixture
def strict(fleet, standing, monkeypatch):
    """The server with limits of two requests at once, and almost none after."""
    app, before = standing[0], standing[0].state.mobizo
    monkeypatch.setattr(state, "BURST_SECONDS", 200)
    monkeypatch.setattr(state, "REFUSAL_BURST", 2)

    def strict(**changes):
        app.state.mobizo = AppState(
            **{name: getattr(before, name) for name in ("database", "artifacts", "public_key", "started_at")},
            settings=before.settings.model_copy(update=changes),
        )

    return strict


def assert_limited(problem, answer, limit):
    document = problem(answer, 429, "too-many-requests")
    assert document["limit"] == limit
    assert 0 < document["retry_after_seconds"] <= int(answer.headers["retry-after"])
    assert answer.headers["ratelimit"] == f'"{limit}";r=0;t={answer.headers["retry-after"]}'


def test_each_token_has_its_own(strict, fleet, app, operator, problem):
    strict(token_rate=0.01)
    assert [app.get("/v1/jobs").status_code for _ in range(2)] == [200, 200]
    assert_limited(problem, app.get("/v1/jobs"), "token")
    assert operator.get("/v1/jobs").status_code == 200


def test_without_a_token_the_address_counts(strict, fleet, app, problem):
    strict(address_rate=0.01)
    nobody = fleet.actor()
    assert nobody.get("/v1/server").status_code == 200
    assert nobody.get("/v1/jobs").status_code == 401
    assert_limited(problem, nobody.get("/v1/server"), "address")
    assert_limited(problem, nobody.get("/v1/jobs"), "address")
    assert nobody.get("/healthz").status_code == nobody.get("/readyz").status_code == 200
    assert app.get("/v1/jobs").status_code == 200


@pytest.mark.parametrize("route", [("GET", "/v1/jobs"), ("POST", "/v1/devices")])
def test_bad_tokens_count_against_their_address(strict, fleet, app, operator, problem, route, monkeypatch):
    monkeypatch.setattr(state, "REFUSAL_RATE", 0.01)
    strict()
    assert app.get("/v1/jobs").status_code == 200
    body = {"name": "phone", "public_key": "A" * 43 + "=", "platform": "linux"}
    guesser = fleet.actor("mobizo-enroll-" + "x" * 43)
    for _ in range(2):
        problem(guesser.request(*route, json=body), 401, "unauthorized")
    assert_limited(problem, guesser.request(*route, json=body), "refusals")
    assert app.get("/v1/jobs").status_code == 200
    assert_limited(problem, operator.get("/v1/jobs"), "refusals")
