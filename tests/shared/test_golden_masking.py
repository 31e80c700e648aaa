"""Golden files of the messages of a masked round, which today's code writes and reads; see `test_golden_formats`."""

import pytest

from shared.federation.secure_aggregation.messages import (
    Advertisement,
    Consent,
    Consents,
    Delivery,
    Phase,
    Roster,
    SealedShares,
    SecureAggregationView,
    Unmasking,
    advertisement_bytes,
    consent_bytes,
)
from shared.federation.secure_aggregation.settings import SecureAggregationParameters
from tests.shared.test_golden_formats import CREATED, KEY, SMALL_RECIPE, golden

MASKING = SecureAggregationParameters(
    cohort="readers",
    round=3,
    start_sha256="ef" * 32,
    recipe_id=SMALL_RECIPE.id,
    size=24,
    clip=1.5,
    most_members=256,
    minimum=3,
    threshold="two-thirds",
    bits=32,
)


def filled(length, start):
    """Returns the bytes `start`, `start` + 1 and so on."""
    return bytes((start + number) % 256 for number in range(length))


def advertisement(member, start):
    sealing, masking = filled(32, start), filled(32, start + 1)
    return Advertisement(
        member=member,
        identity=KEY.public_key().public_bytes_raw(),
        sealing=sealing,
        masking=masking,
        signature=KEY.sign(advertisement_bytes(MASKING.context, member, sealing, masking)),
    )


def secure_aggregation_messages():
    """Returns one message of each kind. A share takes 33 bytes, the sealed shares for one recipient 94."""
    roster = Roster(members=tuple(advertisement(f"device_{name}", 40 * index) for index, name in enumerate("ab")))
    consent = KEY.sign(consent_bytes(roster.transcript(MASKING.context), (1, 2)))
    consents = Consents(numbers=(1, 2), signatures=2 * consent)
    return {
        "parameters": MASKING,
        "advertisement": advertisement("device_a", 0),
        "roster": roster,
        "sealed-shares": SealedShares(sealed=filled(2 * 94, 50), commitment=filled(32, 90)),
        "delivery": Delivery(shared=(1, 2), sealed=filled(2 * 94, 100)),
        "consent": Consent(signature=consent),
        "consents": consents,
        "unmasking": Unmasking(seeds=filled(2 * 33, 10), keys=filled(33, 20)),
        "view-waiting": SecureAggregationView(phase=Phase.KEYS, closes_at=CREATED, waits=False),
        "view-unmasking": SecureAggregationView(
            phase=Phase.UNMASKING,
            closes_at=CREATED,
            number=1,
            waits=True,
            why="for the golden file",
            roster=roster,
            survivors=(1, 2),
            consents=consents,
        ),
    }


@pytest.mark.parametrize("name", secure_aggregation_messages())
def test_masking_message(name):
    expected = golden(f"masking-{name}.json")
    message = secure_aggregation_messages()[name]
    assert message.model_dump_json().encode() == expected
    assert type(message).model_validate_json(expected) == message


def test_signed_bytes_of_a_masked_round():
    roster = Roster.model_validate_json(golden("masking-roster.json"))
    first = roster.members[0]
    signed = advertisement_bytes(MASKING.context, first.member, first.sealing, first.masking)
    assert signed == golden("masking-advertised.bin")
    KEY.public_key().verify(first.signature, signed)
    # The bytes contain the transcript, which is the hash of the round's context and the roster.
    message = consent_bytes(roster.transcript(MASKING.context), (1, 2))
    assert message == golden("masking-consented.bin")
    consent = Consent.model_validate_json(golden("masking-consent.json"))
    KEY.public_key().verify(consent.signature, message)
