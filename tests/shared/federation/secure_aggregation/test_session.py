"""Masked rounds: for any drop-outs in any phase, the sum is that of the remaining devices, or the round fails."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import LeftOutOfRound, Untrusted
from shared.federation.secure_aggregation.fixed_point import clip_to_norm, decode
from shared.federation.secure_aggregation.messages import Phase
from tests.shared.federation.secure_aggregation.devices import Device, Round

PHASES = [Phase.KEYS, Phase.SHARES, Phase.VECTORS, Phase.CONSENTS, Phase.UNMASKING]


@st.composite
def rounds_with_absences(draw):
    count = draw(st.integers(3, 9))
    names = [f"device-{index:03}" for index in range(count)]
    drop_phases = draw(st.lists(st.sampled_from([None, None, None, *PHASES]), min_size=count, max_size=count))
    absent = {
        phase: [name for name, drop_phase in zip(names, drop_phases, strict=True) if drop_phase is phase]
        for phase in PHASES
    }
    return count, draw(st.integers(0, 2**32 - 1)), absent, draw(st.sampled_from(["majority", "two-thirds"]))


@settings(max_examples=25, deadline=None)
@given(rounds_with_absences(), st.sampled_from([32, 64]))
def test_the_sum_is_of_the_remaining_devices_or_the_round_fails(case, bits):
    count, seed, absent, threshold = case
    masked = Round(count, seed, bits=bits, threshold=threshold)
    end = masked.run_to_end(absent)
    parameters = masked.server.parameters
    # Independent count of the devices left after each phase. The first phase with too few ends the round.
    present, sizes = set(masked.devices), []
    for phase in PHASES:
        present -= set(absent[phase])
        sizes.append(len(present))
        if phase is Phase.VECTORS:
            survivors = sorted(present)
    required = parameters.required_devices(sizes[0]) if sizes[0] >= 3 else 3
    if min(sizes) < required:
        assert end is Phase.FAILED
        assert not masked.server.store.stored_vectors, "a round that failed keeps no vector"
        return
    assert end is Phase.SUMMING
    total = masked.server.session.total()
    expected = decode(masked.true_sum(survivors), len(survivors), parameters)
    assert np.array_equal(total.mean, expected.mean)
    assert (total.weight, total.count) == (expected.weight, len(survivors))
    counted = [masked.devices[name] for name in survivors]
    weighted_sum = sum(device.weight * clip_to_norm(device.update, parameters.clip).astype(float) for device in counted)
    assert np.allclose(total.mean, weighted_sum / total.weight, atol=1e-5)
    masked.server.session.finish()
    assert masked.server.phase is Phase.DONE
    rows = masked.server.store.rows()
    assert not masked.server.store.stored_vectors
    assert not any(row.sealed or row.seeds or row.keys for row in rows)


@pytest.mark.parametrize("restarted", PHASES)
def test_a_device_resumes_after_a_restart_in_any_phase(restarted):
    masked = Round(4)
    device = masked.devices["device-001"]
    while not masked.server.phase.over:
        if masked.server.phase is restarted:
            device.restart()
        masked.run_turn()
        if masked.server.phase is restarted:
            # As after a kill between storing and sending: the device sends the same message.
            message = device.link.sent_messages[restarted]
            device.restart()
            device.participant.advance()
            assert device.link.sent_messages[restarted] == message
        masked.server.tick()
    assert masked.server.phase is Phase.SUMMING
    assert masked.server.session.total().count == 4


def test_a_device_without_its_state_drops_out_and_the_others_finish():
    masked = Round(5)
    masked.run_turn()
    masked.server.tick()
    device = masked.devices["device-004"]
    device.state_file.unlink()
    device.restart()
    with pytest.raises(Untrusted, match="keys that this device advertised"):
        device.participant.advance()
    assert masked.run_to_end({Phase.SHARES: ["device-004"]}) is Phase.SUMMING
    assert masked.server.session.total().count == 4


def test_keys_may_be_replaced_until_the_roster_is_shown():
    masked = Round(3)
    first = masked.devices["device-000"]
    first.participant.advance()
    before = masked.server.store.row("device-000").advertisement
    first.state_file.unlink()
    first.restart()
    first.participant.advance()
    assert masked.server.store.row("device-000").advertisement != before
    assert masked.run_to_end({}) is Phase.SUMMING
    assert masked.server.session.total().count == 3


def test_late_and_surplus_devices_are_excluded():
    masked = Round(4, most_members=3)
    *first, last = masked.devices.values()
    for device in first:
        device.participant.advance()
    with pytest.raises(LeftOutOfRound, match="maximum of 3 devices"):
        last.participant.advance()
    masked.server.pass_deadline()
    stranger = Device(masked.server, "stranger", np.zeros(5, np.float32), 1, last.state_file.with_name("stranger"))
    with pytest.raises(LeftOutOfRound, match="without this device"):
        stranger.participant.advance()


def test_a_masked_vector_alone_looks_random():
    # The same devices send the same updates twice: the masked vectors have nothing in common.
    vectors = []
    for _ in range(2):
        masked = Round(3, 7, size=4000)
        masked.run_to_end({})
        vectors.append(np.frombuffer(masked.devices["device-000"].link.sent_messages[Phase.VECTORS], "<u4"))
    assert np.count_nonzero(vectors[0] == vectors[1]) < 3
    # Bits of uniform numbers: 128,032 of them, half ones, within seven standard deviations.
    ones = int(np.bitwise_count(vectors[0]).sum())
    assert abs(ones - 64_016) < 7 * np.sqrt(128_032) / 2
