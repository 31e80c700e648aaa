"""Whole masked rounds: any devices drop out in any phase, and the sum is exactly that of the rest, or there is none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidUpload, LeftOutOfRound, Untrusted
from shared.federation.secure_aggregation.fixed_point import clipped, decode
from shared.federation.secure_aggregation.messages import Phase
from tests.shared.federation.secure_aggregation.devices import Device, Round

PHASES = [Phase.KEYS, Phase.SHARES, Phase.VECTORS, Phase.CONSENTS, Phase.UNMASKING]


@st.composite
def rounds_with_absences(draw):
    count = draw(st.integers(3, 9))
    names = [f"device-{at:03}" for at in range(count)]
    leaves = draw(st.lists(st.sampled_from([None, None, None, *PHASES]), min_size=count, max_size=count))
    absent = {phase: [name for name, left in zip(names, leaves, strict=True) if left is phase] for phase in PHASES}
    return count, draw(st.integers(0, 2**32 - 1)), absent, draw(st.sampled_from(["majority", "two-thirds"]))


@settings(max_examples=25, deadline=None)
@given(rounds_with_absences(), st.sampled_from([32, 64]))
def test_whoever_drops_out_whenever_the_sum_is_that_of_the_rest_or_none(case, bits):
    count, seed, absent, threshold = case
    masked = Round(count, seed, bits=bits, threshold=threshold)
    end = masked.run_to_end(absent)
    parameters = masked.server.parameters
    # By hand: who is there after each phase; the first that is too small ends the round.
    there, sizes = set(masked.devices), []
    for phase in PHASES:
        there -= set(absent[phase])
        sizes.append(len(there))
        if phase is Phase.VECTORS:
            survivors = sorted(there)
    needed = parameters.needed(sizes[0]) if sizes[0] >= 3 else 3
    if min(sizes) < needed:
        assert end is Phase.FAILED
        assert not masked.server.store.kept, "a round that failed keeps no vector"
        return
    assert end is Phase.SUMMING
    total = masked.server.session.total()
    expected = decode(masked.true_sum(survivors), len(survivors), parameters)
    assert np.array_equal(total.mean, expected.mean)
    assert (total.weight, total.count) == (expected.weight, len(survivors))
    counted = [masked.devices[name] for name in survivors]
    true = sum(each.weight * clipped(each.update, parameters.clip).astype(float) for each in counted)
    assert np.allclose(total.mean, true / total.weight, atol=1e-5)
    masked.server.session.finish()
    assert masked.server.phase is Phase.DONE
    rows = masked.server.store.rows()
    assert not masked.server.store.kept
    assert not any(row.sealed or row.seeds or row.keys for row in rows)


@pytest.mark.parametrize("restarted", PHASES)
def test_a_device_that_restarts_between_phases_goes_on(restarted):
    masked = Round(4)
    device = masked.devices["device-001"]
    while not masked.server.phase.over:
        if masked.server.phase is restarted:
            device.restart()
        masked.turn()
        if masked.server.phase is restarted:
            # As after a kill between keeping and sending: it says the very same.
            said = device.link.sent[restarted]
            device.restart()
            device.part.advance()
            assert device.link.sent[restarted] == said
        masked.server.tick()
    assert masked.server.phase is Phase.SUMMING
    assert masked.server.session.total().count == 4


def test_a_device_that_lost_what_it_knew_drops_out_and_the_others_finish():
    masked = Round(5)
    masked.turn()
    masked.server.tick()
    device = masked.devices["device-004"]
    device.notebook.remove()
    device.restart()
    with pytest.raises(Untrusted, match="keys that this device advertised"):
        device.part.advance()
    assert masked.run_to_end({Phase.SHARES: ["device-004"]}) is Phase.SUMMING
    assert masked.server.session.total().count == 4


def test_keys_may_be_replaced_until_the_roster_is_shown():
    masked = Round(3)
    first = masked.devices["device-000"]
    first.part.advance()
    before = masked.server.store.row("device-000").advertisement
    first.notebook.remove()
    first.restart()
    first.part.advance()
    assert masked.server.store.row("device-000").advertisement != before
    assert masked.run_to_end({}) is Phase.SUMMING
    assert masked.server.session.total().count == 3


def test_one_that_comes_late_is_out_and_one_too_many_is_refused():
    masked = Round(4, most_members=3)
    *first, last = masked.devices.values()
    for device in first:
        device.part.advance()
    with pytest.raises(LeftOutOfRound, match="maximum of 3 devices"):
        last.part.advance()
    masked.server.pass_deadline()
    stranger = Device(masked.server, "stranger", np.zeros(5, np.float32), 1)
    with pytest.raises(LeftOutOfRound, match="without this device"):
        stranger.part.advance()


def test_below_the_minimum_nothing_is_begun():
    masked = Round(4, minimum=4)
    assert masked.run_to_end({Phase.KEYS: ["device-000"]}) is Phase.FAILED
    assert "3 devices" in masked.server.store.session.why
    with pytest.raises(LeftOutOfRound, match="3 devices"):
        masked.devices["device-001"].part.advance()


def test_a_vector_of_another_length_or_sent_twice_differently_is_refused():
    masked = Round(3)
    for _ in range(2):
        masked.turn()
        masked.server.tick()
    assert masked.server.phase is Phase.VECTORS
    session = masked.server.session
    with pytest.raises(InvalidUpload, match="bytes"):
        session.masked("device-000", "0" * 64, bytes(7))
    session.masked("device-000", "1" * 64, bytes(24))
    with pytest.raises(LeftOutOfRound, match="a different message"):
        session.masked("device-000", "2" * 64, bytes([1]) * 24)


def test_a_masked_vector_alone_looks_random():
    # The same update by the same devices twice: what is sent has nothing in common.
    sent = []
    for _ in range(2):
        masked = Round(3, 7, size=4000)
        masked.run_to_end({})
        sent.append(np.frombuffer(masked.devices["device-000"].link.sent[Phase.VECTORS], "<u4"))
    assert np.count_nonzero(sent[0] == sent[1]) < 3
    # Bits of uniform numbers: 128,032 of them, half ones, within seven standard deviations.
    ones = int(np.bitwise_count(sent[0]).sum())
    assert abs(ones - 64_016) < 7 * np.sqrt(128_032) / 2
