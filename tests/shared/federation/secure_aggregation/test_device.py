"""What a device refuses, from a server that does not keep to the protocol, and what the server refuses of a device."""

import numpy as np
import pytest

from shared.errors import InvalidUpload, Untrusted
from shared.federation.secure_aggregation import device
from shared.federation.secure_aggregation.fixed_point import encode
from shared.federation.secure_aggregation.messages import Consents, Phase, Roster, Unmasking, consented
from shared.federation.secure_aggregation.primitives import check_public, new_secret, public_of, seal, unseal
from shared.federation.secure_aggregation.server import Gathered, check_advertisement, unmasked
from shared.federation.secure_aggregation.shamir import SHARE_BYTES
from tests.shared.federation.secure_aggregation.devices import Round
from tests.shared.federation.secure_aggregation.test_settings import parameters


def anybody(members):
    """Trusts every key."""


@pytest.fixture
def masked():
    return Round(5)


def until(masked, phase):
    """Everybody's turns, up to the beginning of a phase; what each device knows by then."""
    while masked.server.phase is not phase:
        masked.turn()
        masked.server.tick()
    return [one.notebook.read() for one in masked.devices.values()]


def view(masked, at=0):
    """What the server gives one device in this phase."""
    return masked.server.session.view(f"device-{at:03}")


def test_a_key_that_its_owner_did_not_sign_is_refused(masked):
    knowledge, *_ = until(masked, Phase.SHARES)
    roster = view(masked).roster
    # The server puts a key of its own in another device's place, to read the shares for it.
    other = roster.members[1].model_copy(update={"sealing": public_of(new_secret())})
    forged = Roster(members=(roster.members[0], other, *roster.members[2:]))
    with pytest.raises(Untrusted, match="valid signature"):
        device.share(knowledge, forged, anybody)


def test_an_identity_that_changed_is_refused_before_any_share_is_made(masked):
    knowledge, *_ = until(masked, Phase.SHARES)

    def trust(members):
        assert set(members) == set(masked.devices)
        raise Untrusted("another key than before")

    with pytest.raises(Untrusted, match="than before"):
        device.share(knowledge, view(masked).roster, trust)


def test_rosters_that_are_refused(masked):
    knowledge, *_ = until(masked, Phase.SHARES)
    members = view(masked).roster.members
    for wrong in (members[:2], members[::-1], (*members[:4], members[3])):
        with pytest.raises(Untrusted, match="roster"):
            device.share(knowledge, Roster(members=wrong), anybody)
    with pytest.raises(Untrusted, match="keys that this device advertised"):
        device.share(knowledge, Roster(members=members[1:]), anybody)
    shared = device.share(knowledge, Roster(members=members), anybody)
    with pytest.raises(Untrusted, match="second roster"):
        device.share(shared, Roster(members=members[:4]), anybody)


def test_keys_of_another_round_are_refused(masked):
    until(masked, Phase.SHARES)
    other = device.begin(parameters(round=4, most_members=5, most_weight=9, size=5), "device-000")
    with pytest.raises(Untrusted, match="valid signature"):
        device.check_roster(view(masked).roster, other.parameters, anybody)


def test_shares_of_too_few_or_without_this_device_are_refused(masked):
    knowledge, *_ = until(masked, Phase.VECTORS)
    delivery = view(masked).delivery
    fewer = delivery.model_copy(update={"shared": delivery.shared[:3]})
    with pytest.raises(Untrusted, match="only 3 devices"):
        device.receive(knowledge, fewer)
    without = delivery.model_copy(update={"shared": delivery.shared[1:]})
    with pytest.raises(Untrusted, match="not among"):
        device.receive(knowledge, without)
    with pytest.raises(Untrusted, match="out of order"):
        device.receive(knowledge, delivery.model_copy(update={"shared": (1, 2, 3, 9)}))
    with pytest.raises(Untrusted, match="number of delivered shares"):
        device.receive(knowledge, delivery.model_copy(update={"sealed": delivery.sealed[1:]}))
    taken = device.receive(knowledge, delivery)
    with pytest.raises(Untrusted, match="second set"):
        device.receive(taken, fewer)


def test_a_second_sum_of_one_round_is_not_helped_with(masked):
    knowledge, *_ = until(masked, Phase.CONSENTS)
    identity = masked.devices["device-000"].identity
    all_of_them, fewer = (1, 2, 3, 4, 5), (1, 2, 3, 4)
    after, _ = device.consent(knowledge, all_of_them, identity)
    with pytest.raises(Untrusted, match="second sum"):
        device.consent(after, fewer, identity)
    with pytest.raises(Untrusted, match="only 3"):
        device.consent(knowledge, (1, 2, 3), identity)
    with pytest.raises(Untrusted, match="not among"):
        device.consent(knowledge, (2, 3, 4, 5), identity)


def test_shares_are_given_only_for_what_enough_devices_signed(masked):
    knowledge, *_ = until(masked, Phase.UNMASKING)
    consents = view(masked).consents
    few = Consents(numbers=consents.numbers[:3], signatures=consents.signatures[: 3 * 64])
    with pytest.raises(Untrusted, match="only 3"):
        device.unmask(knowledge, few)
    # The server tells others another sum: their signatures are over that.
    said = consented(knowledge.transcript, (1, 2, 3, 4))
    other = masked.devices["device-001"].identity.sign(said)
    mixed = consents.signatures[:64] + other + consents.signatures[128:]
    with pytest.raises(Untrusted, match="valid signature"):
        device.unmask(knowledge, Consents(numbers=consents.numbers, signatures=mixed))
    with pytest.raises(Untrusted, match="number of signatures"):
        device.unmask(knowledge, Consents(numbers=consents.numbers, signatures=consents.signatures[1:]))


def test_of_no_device_both_shares_are_given():
    masked = Round(6)
    masked.run_to_end({Phase.VECTORS: ["device-002"]})
    knowledge = masked.devices["device-000"].link
    unmasking = knowledge.sent[Phase.UNMASKING]
    # Five in the sum, one that dropped out: a seed's share of each of the five, a key's share of the one.
    assert (len(unmasking.seeds), len(unmasking.keys)) == (5 * SHARE_BYTES, SHARE_BYTES)


def test_shares_meant_for_another_do_not_open(masked):
    knowledge, *_ = until(masked, Phase.VECTORS)
    delivery = view(masked).delivery
    swapped = delivery.sealed[:94] + delivery.sealed[188:282] + delivery.sealed[94:188] + delivery.sealed[282:]
    taken = device.receive(knowledge, delivery.model_copy(update={"sealed": swapped}))
    consents = until(masked, Phase.UNMASKING) and view(masked).consents
    agreed, _ = device.consent(taken, (1, 2, 3, 4, 5), masked.devices["device-000"].identity)
    with pytest.raises(Untrusted, match="cannot be decrypted"):
        device.unmask(agreed, consents)


def test_one_that_sends_wrong_shares_is_found_out_and_done_without():
    masked = Round(6)
    masked.run_to_end({Phase.VECTORS: ["device-005"]})
    gathered = masked.server.session.gathered()
    vectors = list(masked.server.store.vectors(masked.server.session.in_sum()))
    honest = unmasked(gathered, vectors)
    for liar in gathered.unmaskings:
        wrong = Unmasking(seeds=bytes(5 * SHARE_BYTES), keys=bytes(SHARE_BYTES))
        fewer = Gathered(**{**vars(gathered), "unmaskings": {**gathered.unmaskings, liar: wrong}})
        if len(gathered.unmaskings) > gathered.parameters.needed(6):
            assert np.array_equal(unmasked(fewer, vectors).mean, honest.mean)
        else:
            with pytest.raises(Untrusted, match="committed"):
                unmasked(fewer, vectors)


def test_a_vector_of_another_form_is_found_out_by_the_weights():
    masked = Round(4, most_weight=1)
    until(masked, Phase.SUMMING)
    session = masked.server.session
    vectors = list(masked.server.store.vectors(session.in_sum()))
    vectors[0] = bytes(len(vectors[0]))
    with pytest.raises(InvalidUpload, match="weights"):
        unmasked(session.gathered(), vectors)
    with pytest.raises(Untrusted, match="only 3 of"):
        unmasked(session.gathered(), vectors[1:])


def test_the_masks_of_a_round_cancel_and_each_alone_hides_its_update():
    masked = Round(4, size=300)
    until(masked, Phase.SUMMING)
    session = masked.server.session
    for row, data in zip(session.in_sum(), masked.server.store.vectors(session.in_sum()), strict=True):
        one = masked.devices[row.member]
        plain = encode(one.update, one.weight, masked.server.parameters)
        assert np.count_nonzero(np.frombuffer(data, "<u4") == plain) <= 1


def test_an_advertisement_is_its_own_devices_and_of_this_round(masked):
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


def test_what_is_sealed_opens_with_its_key_and_its_address_only():
    key = new_secret()
    sealed = seal(key, b"share", b"1 to 2")
    assert unseal(key, sealed, b"1 to 2") == b"share"
    for wrong in ((key, sealed, b"1 to 3"), (new_secret(), sealed, b"1 to 2"), (key, b"", b"1 to 2")):
        with pytest.raises(Untrusted, match="cannot be decrypted"):
            unseal(*wrong)
