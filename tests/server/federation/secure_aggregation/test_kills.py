"""kill -9 of a real server in the middle of a masked round: the next one goes on, and nobody is in the sum twice."""

from shared.federation.secure_aggregation import device
from shared.federation.secure_aggregation.fixed_point import encode
from tests.server.federation.conftest import band
from tests.server.federation.secure_aggregation.test_rounds import USERS, assert_mean, masked, phase, turn
from tests.server.federation.test_workers import eventually
from tests.server.operations.test_serving import running

__all__ = ["band", "masked"]  # fixtures


def ask_at(masked, url):
    """The devices speak to this server from now on."""
    for member in masked.members.values():
        member.actor.base_url = url
        member.link.client.__exit__(None, None, None)
        member.link.client = member.client(url)


def vector(member):
    """What a device says in phase 2; the same each time."""
    knowledge = member.part._state
    return device.mask(knowledge, encode(member.flat, 1, member.parameters)).tobytes()


def test_killed_between_phases_and_in_one_the_round_ends_right(masked, home):
    alice = masked.members["alice"]
    with running(home, "--workers", "0") as (process, url):
        ask_at(masked, url)
        turn(masked, *USERS)  # the last to come shares at once, as the roster is complete
        turn(masked, "alice", "bob", "carol")  # the last to share sends its vector at once
        turn(masked, "alice")
        process.kill()
        process.wait()
    assert phase(masked) == "vectors"
    with running(home) as (_, url):
        ask_at(masked, url)
        # As a device does that never heard the answer to what it said.
        again = alice.part._transport.mask(vector(alice))
        assert (again.phase, again.waits) == ("vectors", True)
        for _ in range(3):
            turn(masked, *USERS)
        assert turn(masked, *USERS) == [True] * 4
        # The server's own worker, a process beside it, removes the masks.
        eventually(lambda: masked.round()["state"] == "published", seconds=60)
        answers = [member.complete() for member in masked.members.values()]
    assert [answer.status_code for answer in answers] == [200] * 4, answers[0].text
    round_view = masked.round()
    assert (round_view["version"], round_view["updates"]) == (1, 4)
    assert_mean(masked, *USERS)
    assert {part["state"] for part in masked.parts().values()} == {"counted"}
    assert masked.app.get("/v1/adapters/readers").json()["versions"] == 1
