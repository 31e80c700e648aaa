"""Protocol violations that a device rejects from a server, and a server from a device."""

import numpy as np
import pytest

from shared.errors import InvalidUpload, Untrusted
from shared.federation.secure_aggregation import device
from shared.federation.secure_aggregation.messages import Consents, Phase, Roster, Unmasking, consent_bytes
from shared.federation.secure_aggregation.primitives import check_public, new_secret, public_of
from shared.federation.secure_aggregation.server import UnmaskingInputs, check_advertisement, unmask_sum
from shared.federation.secure_aggregation.shamir import SHARE_BYTES
from tests.shared.federation.secure_aggregation.devices import Round
from tests.shared.federation.secure_aggregation.test_settings import parameters


def accept_all_keys(members):
    """Accepts every identity key."""


@pytest.fixture
def masked():
    return Round(5)


def until(masked, phase):
    """Runs the round up to the start of a phase. Returns the state of each device."""
    while masked.server.phase is not phase:
        masked.run_turn()
        masked.server.tick()
    return [member.stored_state() for member in masked.devices.values()]


def view(masked, number=0):
    """Returns the server's view of the round for one device."""
    return masked.server.session.view(f"device-{number:03}")


def test_a_key_that_its_owner_did_not_sign_is_refused(masked):
    state, *_ = until(masked, Phase.SHARES)
    roster = view(masked).roster
    # The server replaces another device's key by its own, to read the shares for that device.
    other = roster.members[1].model_copy(update={"sealing": public_of(new_secret())})
    forged = Roster(members=(roster.members[0], other, *roster.members[2:]))
    with pytest.raises(Untrusted, match="valid signature"):
        device.share(state, forged, accept_all_keys)


def test_an_identity_that_changed_is_refused_before_any_share_is_made(masked):
    state, *_ = until(masked, Phase.SHARES)

    def reject_keys(members):
        assert set(members) == set(masked.devices)
        raise Untrusted("another key than before")

    with pytest.raises(Untrusted, match="than before"):
        device.share(state, view(masked).roster, reject_keys)


def test_rosters_that_are_refused(masked):
    state, *_ = until(masked, Phase.SHARES)
    members = view(masked).roster.members
    for wrong in (members[:2], members[::-1], (*members[:4], members[3])):
        with pytest.raises(Untrusted, match="roster"):
            device.share(state, Roster(members=wrong), accept_all_keys)
    with pytest.raises(Untrusted, match="keys that this device advertised"):
        device.share(state, Roster(members=members[1:]), accept_all_keys)
    shared = device.share(state, Roster(members=members), accept_all_keys)
    with pytest.raises(Untrusted, match="second roster"):
        device.share(shared, Roster(members=members[:4]), accept_all_keys)


def test_keys_of_another_round_are_refused(masked):
    until(masked, Phase.SHARES)
    other = device.begin_round(parameters(round=4, most_members=5, most_weight=9, size=5), "device-000")
    with pytest.raises(Untrusted, match="valid signature"):
        device.check_roster(view(masked).roster, other.parameters, accept_all_keys)


def test_shares_of_too_few_or_without_this_device_are_refused(masked):
    state, *_ = until(masked, Phase.VECTORS)
    delivery = view(masked).delivery
    fewer = delivery.model_copy(update={"shared": delivery.shared[:3]})
    with pytest.raises(Untrusted, match="only 3 devices"):
        device.receive(state, fewer)
    without = delivery.model_copy(update={"shared": delivery.shared[1:]})
    with pytest.raises(Untrusted, match="not among"):
        device.receive(state, without)
    with pytest.raises(Untrusted, match="out of order"):
        device.receive(state, delivery.model_copy(update={"shared": (1, 2, 3, 9)}))
    with pytest.raises(Untrusted, match="number of delivered shares"):
        device.receive(state, delivery.model_copy(update={"sealed": delivery.sealed[1:]}))
    received = device.receive(state, delivery)
    with pytest.raises(Untrusted, match="second set"):
        device.receive(received, fewer)


def test_a_device_consents_to_one_sum_per_round(masked):
    state, *_ = until(masked, Phase.CONSENTS)
    identity = masked.devices["device-000"].identity
    all_of_them, fewer = (1, 2, 3, 4, 5), (1, 2, 3, 4)
    after, _ = device.consent(state, all_of_them, identity)
    with pytest.raises(Untrusted, match="second sum"):
        device.consent(after, fewer, identity)
    with pytest.raises(Untrusted, match="only 3"):
        device.consent(state, (1, 2, 3), identity)
    with pytest.raises(Untrusted, match="not among"):
        device.consent(state, (2, 3, 4, 5), identity)


def test_unmasking_requires_enough_signatures_over_the_same_sum(masked):
    state, *_ = until(masked, Phase.UNMASKING)
    consents = view(masked).consents
    few = Consents(numbers=consents.numbers[:3], signatures=consents.signatures[: 3 * 64])
    with pytest.raises(Untrusted, match="only 3"):
        device.unmask(state, few)
    # The server requested another sum from the other devices, so their signatures are over that sum.
    message = consent_bytes(state.transcript, (1, 2, 3, 4))
    signature = masked.devices["device-001"].identity.sign(message)
    signatures = consents.signatures[:64] + signature + consents.signatures[128:]
    with pytest.raises(Untrusted, match="valid signature"):
        device.unmask(state, Consents(numbers=consents.numbers, signatures=signatures))
    with pytest.raises(Untrusted, match="number of signatures"):
        device.unmask(state, Consents(numbers=consents.numbers, signatures=consents.signatures[1:]))


def test_a_device_reveals_one_of_the_two_shares_of_each_other_device():
    masked = Round(6)
    masked.run_to_end({Phase.VECTORS: ["device-002"]})
    link = masked.devices["device-000"].link
    unmasking = link.sent_messages[Phase.UNMASKING]
    # Five in the sum, one that dropped out: a seed's share of each of the five, a key's share of the one.
    assert (len(unmasking.seeds), len(unmasking.keys)) == (5 * SHARE_BYTES, SHARE_BYTES)


def test_shares_for_another_device_cannot_be_decrypted(masked):
    state, *_ = until(masked, Phase.VECTORS)
    delivery = view(masked).delivery
    swapped = delivery.sealed[:94] + delivery.sealed[188:282] + delivery.sealed[94:188] + delivery.sealed[282:]
    received = device.receive(state, delivery.model_copy(update={"sealed": swapped}))
    consents = until(masked, Phase.UNMASKING) and view(masked).consents
    consented, _ = device.consent(received, (1, 2, 3, 4, 5), masked.devices["device-000"].identity)
    with pytest.raises(Untrusted, match="cannot be decrypted"):
        device.unmask(consented, consents)


def test_a_device_with_wrong_shares_is_detected_and_left_out():
    masked = Round(6)
    masked.run_to_end({Phase.VECTORS: ["device-005"]})
    unmasking_inputs = masked.server.session.unmasking_inputs()
    vectors = list(masked.server.store.vectors(masked.server.session.in_sum()))
    honest = unmask_sum(unmasking_inputs, vectors)
    for liar in unmasking_inputs.unmaskings:
        wrong = Unmasking(seeds=bytes(5 * SHARE_BYTES), keys=bytes(SHARE_BYTES))
        fewer = UnmaskingInputs(
            **{**vars(unmasking_inputs), "unmaskings": {**unmasking_inputs.unmaskings, liar: wrong}}
        )
        if len(unmasking_inputs.unmaskings) > unmasking_inputs.parameters.required_devices(6):
            assert np.array_equal(unmask_sum(fewer, vectors).mean, honest.mean)
        else:
            with pytest.raises(Untrusted, match="committed"):
                unmask_sum(fewer, vectors)


def test_an_invalid_vector_is_detected_by_the_sum_of_weights():
    masked = Round(4, most_weight=1)
    until(masked, Phase.SUMMING)
    session = masked.server.session
    vectors = list(masked.server.store.vectors(session.in_sum()))
    vectors[0] = bytes(len(vectors[0]))
    with pytest.raises(InvalidUpload, match="weights"):
        unmask_sum(session.unmasking_inputs(), vectors)
    with pytest.raises(Untrusted, match="only 3 of"):
        unmask_sum(session.unmasking_inputs(), vectors[1:])


def test_advertisements_of_another_device_or_round_are_rejected(masked):
    until(masked, Phase.SHARES)
    first, second, *_ = view(masked).roster.members
    context = masked.server.parameters.context
    check_advertisement(first, first.member, first.identity, context)
    for wrong in (
        (first, second.member, second.identity, context),
        (first, first.member, first.identity, bytes(32)),
        (first.model_copy(update={"sealing": first.masking}), first.member, first.identity, context),
    ):
        with pytest.raises(Untrusted):
            check_advertisement(*wrong)


@pytest.mark.parametrize("point", [0, 1])
def test_a_public_key_of_small_order_is_refused(point):
    with pytest.raises(Untrusted, match="weak key"):
        check_public(point.to_bytes(32, "little"))
