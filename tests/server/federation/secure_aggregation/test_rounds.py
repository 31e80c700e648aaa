"""Masked rounds over HTTP: real device halves, a real server, a worker; what is published, kept, refused."""

import numpy as np
import pytest
from sqlalchemy import select
from sqlalchemy.orm import undefer

from device_agent.jobs.secure_aggregation_upload import LeaseSecureAggregationTransport
from device_agent.protocol.client import DeviceClient
from device_agent.secure_aggregation.participant import SecureAggregationParticipant
from server.database.columns import utc_now
from server.federation.secure_aggregation.repository import SecureAggregationMember, SecureAggregationRound
from server.web.state import AppState
from shared.errors import LeftOutOfRound
from shared.federation.secure_aggregation.device import mask
from shared.federation.secure_aggregation.fixed_point import encode, mean_error
from shared.federation.secure_aggregation.redaction import NO_FILE, redacted_result
from shared.federation.secure_aggregation.settings import SecureAggregationParameters
from shared.result import Result
from tests.server.actors import adapter_bytes, result
from tests.server.federation.conftest import Band, band

__all__ = ["Band", "band"]  # a fixture
URL = "/v1/cohorts/readers"
USERS = ("alice", "bob", "carol", "dave")
MASKED = {
    "upload": "masked",
    "masking": {"minimum": 3},
    "aggregator": {"name": "mean", "clip_norm": 8.0},
    "quorum": 3,
}


class Member:
    """One user's device in a masked round, with an update."""

    def __init__(self, band, user, at):
        self.actor, self.lease = band.devices[user], band.lease(user)
        task = self.lease["round"]
        self.parameters = SecureAggregationParameters.model_validate(task["masking"])
        # Of norms below and over the clip.
        self.flat = np.random.default_rng(at).normal(size=self.parameters.size, scale=0.02 + at).astype(np.float32)
        self.link = LeaseSecureAggregationTransport(self.client(band.fleet.url), self.lease["id"])
        self.part = SecureAggregationParticipant(
            self.link,
            None,
            self.parameters,
            self.actor.device_id,
            self.actor.signer._key,
            lambda members: None,
            lambda: encode(self.flat, 1, self.parameters),
        )

    def client(self, url):
        return DeviceClient(url, self.actor.token, self.actor.signer._key)

    def clipped(self):
        norm = np.linalg.norm(self.flat.astype(float))
        return self.flat.astype(float) * min(1, self.parameters.clip / norm)

    def complete(self):
        bare_result = redacted_result(Result.model_validate(result())).model_dump(mode="json")
        body = {"adapter_sha256": NO_FILE, "result": bare_result}
        return self.actor.post(f"/v1/leases/{self.lease['id']}/complete", json=body)


@pytest.fixture
def masked(band):
    """An open masked round, and its members at the end of their training."""
    band.begin(*USERS, **MASKED)
    band.members = {user: Member(band, user, at) for at, user in enumerate(USERS)}
    yield band
    for member in band.members.values():
        member.link.client.__exit__(None, None, None)


def turn(band, *users):
    return [band.members[user].part.advance() for user in users]


def phase(band):
    return band.home.scalar(select(SecureAggregationRound)).phase


def pass_phase(band):
    """The deadline of the phase is over; whoever looks ends it."""
    band.home.change(SecureAggregationRound, closes_at=utc_now())


def assert_mean(band, *users):
    """What is published is the mean of these users' clipped updates, within the bound of fixed point."""
    true = np.mean([band.members[user].clipped() for user in users], axis=0)
    bound = mean_error(len(users), len(users), band.members["alice"].parameters)
    assert np.abs(band.b() - true).max() <= bound + 2**-24 * np.abs(true).max()


def restart(band, standing):
    """A server that has nothing but what is on disk."""
    state = standing[0].state.mobizo
    standing[0].state.mobizo = AppState(state.settings, state.database, state.artifacts, state.public_key, utc_now())


@pytest.mark.both_databases
def test_a_version_is_made_of_updates_that_nobody_saw(masked, standing):
    for user in USERS:
        turn(masked, user)
    for _ in range(5):
        restart(masked, standing)
        turn(masked, *USERS)
    assert turn(masked, *USERS) == [True] * 4
    masked.work()
    for member in masked.members.values():
        answer = member.complete()
        assert answer.status_code == 200, answer.text
        assert member.complete().json() == answer.json() == {"cohort": "readers", "round": 1, "updates": 4}
    round_view = masked.round()
    assert (round_view["state"], round_view["version"], round_view["updates"]) == ("published", 1, 4)
    assert_mean(masked, *USERS)
    for part in masked.parts().values():
        assert part["state"] == "counted"
        assert part["bytes"] == 4 * (masked.b().size + 1)
        assert [part[name] for name in ("claimed_examples", "norm", "start_accuracy", "tuned_accuracy")] == [None] * 4
    for row in masked.home.scalars(select(SecureAggregationMember).options(undefer("*"))):
        assert (row.sealed, row.seeds, row.keys, row.vector_sha256) == (None,) * 4
    job = masked.app.get(f"/v1/jobs/{masked.members['alice'].lease['job']['id']}").json()
    assert (job["state"], job["result"]["tuned_accuracy"], job["result"]["train_examples"]) == ("succeeded", None, None)


def test_who_drops_out_after_sharing_is_left_out_and_the_sum_is_that_of_the_rest(masked):
    turn(masked, *USERS)  # the last to come shares at once, as the roster is complete
    rest = USERS[:3]
    turn(masked, *rest)
    turn(masked, *rest)
    assert phase(masked) == "vectors"
    # As a device does that never heard the answer to its vector: it is not in the sum twice.
    alice = masked.members["alice"]
    vector = mask(alice.part._state, encode(alice.flat, 1, alice.parameters)).tobytes()
    again = alice.link.mask(vector)
    assert (again.phase, again.waits) == ("vectors", True)
    pass_phase(masked)
    for _ in range(4):
        turn(masked, *rest)
    masked.work()
    assert masked.round()["updates"] == 3
    assert_mean(masked, *rest)
    parts = masked.parts()
    assert [parts[user]["state"] for user in USERS] == ["counted", "counted", "counted", "missed"]
    answer = masked.members["dave"].complete()
    assert answer.status_code == 410, answer.text


def test_with_too_few_left_the_round_is_abandoned_and_nothing_is_unmasked(masked):
    turn(masked, *USERS)
    turn(masked, "alice", "bob", "carol")  # the last to share sends its vector at once
    turn(masked, "alice")
    pass_phase(masked)
    masked.work()
    round_view = masked.round()
    assert round_view["state"] == "abandoned"
    assert "2 of 4 devices remained in phase vectors" in round_view["why"]
    assert not any(row.vector_sha256 for row in masked.home.scalars(select(SecureAggregationMember)))
    response = masked.members["alice"].actor.post(f"/v1/leases/{masked.members['alice'].lease['id']}/release")
    assert response.json()["stop"], "its job was cancelled with the round"


@pytest.mark.parametrize("leaves", [True, False])
def test_who_left_the_cohort_or_was_late_is_waited_for_no_more(masked, leaves):
    turn(masked, *USERS[:3])
    if leaves:
        assert masked.app.delete(f"{URL}/members/dave").status_code == 204
    else:
        pass_phase(masked)
    masked.work()
    assert phase(masked) == "shares"
    for _ in range(4):
        turn(masked, *USERS[:3])
    if not leaves:
        with pytest.raises(LeftOutOfRound, match="without this device"):
            turn(masked, "dave")
    masked.work()
    assert (masked.round()["state"], masked.round()["updates"]) == ("published", 3)


def test_no_update_is_taken_in_clear(masked, problem):
    member = masked.members["alice"]
    data = adapter_bytes(member.parameters.size)
    problem(member.actor.upload(member.lease, data), 422, "invalid-update")
    answer = member.actor.put(f"/v1/leases/{member.lease['id']}/trajectory", content=b"x")
    problem(answer, 422, "invalid-update")
    assert problem(member.complete(), 409, "conflict")["detail"].startswith("the sum contains no")


def test_a_device_whose_lease_lapsed_looks_and_goes_on(masked, problem):
    alice, lease = masked.members["alice"], masked.members["alice"].lease
    url = f"/v1/leases/{lease['id']}/masking"
    masked.home.let_run_out(lease)
    masked.home.take_back()
    assert alice.actor.get(url).json()["phase"] == "keys"
    turn(masked, "alice")
    assert alice.actor.post(f"/v1/leases/{lease['id']}/release").status_code == 200
    problem(alice.actor.get(url), 410, "lease-ended")


def test_what_a_device_may_not_say(masked, problem):
    alice, bob = masked.members["alice"], masked.members["bob"]
    turn(masked, "alice", "bob")
    advertisement = select(SecureAggregationMember.advertisement).filter_by(member=bob.actor.device_id)
    foreign_keys = masked.home.scalar(advertisement).model_dump(mode="json")
    url = f"/v1/leases/{alice.lease['id']}/masking"
    problem(alice.actor.post(f"{url}/keys", json=foreign_keys), 422, "untrusted")
    problem(alice.actor.post(f"{url}/shares", json={"sealed": "", "commitment": "A" * 43 + "="}), 409, "masking-out")
    problem(alice.actor.post(f"{url}/keys", json={}), 422, "invalid-request")
    turn(masked, "carol", "dave")
    turn(masked, *USERS)
    turn(masked, "alice")
    problem(alice.actor.put(f"{url}/vector", content=b"1" * 4 * (alice.parameters.size + 1)), 409, "masking-out")
    problem(bob.actor.put(f"/v1/leases/{bob.lease['id']}/masking/vector", content=b"1234"), 422, "invalid-upload")


def test_what_masking_cannot_be_combined_with(band, problem):
    for changes in (
        {"masking": None},
        {"upload": "weights"},
        {"aggregator": {"name": "median", "clip_norm": 1.0}},
        {"aggregator": {"name": "krum", "clip_norm": 1.0}, "quorum": 9},
        {"aggregator": {"name": "mean"}},
        {"norm_limit": 1.0},
        {"quorum": 2},
        {"algorithm": {"name": "fedbuff"}},
        {"weights": "examples", "most_examples": 2**24},
    ):
        body = {"name": "readers", "base": "tiny", "task": "sst2", "dataset": "movies"} | MASKED | changes
        problem(band.app.post("/v1/cohorts", json=body), 422, "invalid-request")
