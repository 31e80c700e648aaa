"""Golden files of the messages of a masked round, which today's code reads and writes; see `test_golden_formats`."""

import pytest

from shared.federation.secure_aggregation.messages import (
    Advertisement,
    Consent,
    Consents,
    Delivery,
    Roster,
    SealedShares,
    SecureAggregationView,
    Unmasking,
    advertisement_bytes,
    consent_bytes,
)
from shared.federation.secure_aggregation.settings import SecureAggregationParameters
from tests.shared.test_golden_formats import KEY, golden

KINDS = {
    "parameters": SecureAggregationParameters,
    "advertisement": Advertisement,
    "roster": Roster,
    "sealed-shares": SealedShares,
    "delivery": Delivery,
    "consent": Consent,
    "consents": Consents,
    "unmasking": Unmasking,
    "view-waiting": SecureAggregationView,
    "view-unmasking": SecureAggregationView,
}


def message(name):
    return KINDS[name].model_validate_json(golden(f"masking-{name}.json"))


@pytest.mark.parametrize("name", KINDS)
def test_masking_message(name):
    assert message(name).model_dump_json().encode() == golden(f"masking-{name}.json")


def test_signed_bytes_of_a_masked_round():
    roster, context = message("roster"), message("parameters").context
    first = roster.members[0]
    signed = advertisement_bytes(context, first.member, first.sealing, first.masking)
    assert signed == golden("masking-advertised.bin")
    KEY.public_key().verify(first.signature, signed)
    # The bytes contain the transcript, which is the hash of the round's context and the roster.
    agreed = consent_bytes(roster.transcript(context), (1, 2))
    assert agreed == golden("masking-consented.bin")
    KEY.public_key().verify(message("consent").signature, agreed)
