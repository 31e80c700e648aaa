"""Following a server's key rotations along an unbroken chain."""

import base64
import json
from datetime import UTC, datetime
from itertools import pairwise

import pytest
import rfc8785

from shared.errors import Untrusted
from shared.key_rotation import ServerKeys, SignedKeyRotation, follow, sign_key_rotation
from shared.signing import key_id, new_private_key, public_text

CREATED_AT = datetime(2026, 1, 1, tzinfo=UTC)
KEYS = [new_private_key() for _ in range(4)]
TEXTS = [public_text(key.public_key()) for key in KEYS]


def chain(*order, end=None):
    """Returns the rotation statements between the keys with these numbers. end: number of the current key."""
    links = [sign_key_rotation(KEYS[a], KEYS[b].public_key(), CREATED_AT) for a, b in pairwise(order)]
    last = order[-1] if end is None else end
    return ServerKeys(public_key=TEXTS[last], key_id=key_id(KEYS[last].public_key()), rotations=links)


def test_follow_returns_the_keys_after_the_pinned_one():
    assert follow(TEXTS[0], chain(0, 1, 2)) == TEXTS[1:3]
    assert follow(TEXTS[1], ServerKeys.model_validate_json(chain(0, 1, 2).model_dump_json())) == [TEXTS[2]]
    assert follow(TEXTS[2], chain(0, 1, 2)) == []


def test_the_signature_is_ed25519_over_the_canonical_json():
    (signed,) = chain(0, 1).rotations
    document = json.loads(signed.model_dump_json())
    KEYS[0].public_key().verify(base64.b64decode(document["signature"]), rfc8785.dumps(document["rotation"]))


def changed(signed, **changes):
    return signed.model_copy(update={"rotation": signed.rotation.model_copy(update=changes)})


@pytest.mark.parametrize(
    "keys",
    [
        chain(1, 2),  # starts with another key
        chain(0, 1, end=2),  # ends with another key
        chain(0, 1, 0, end=1),  # a circle
        chain(0, 1, 2, 1),
        chain(0, 1, 2, 3).model_copy(update={"rotations": chain(0, 1, 2, 3).rotations[::2]}),  # one is missing
        chain(0, 1, 2).model_copy(update={"rotations": chain(0, 1, 2).rotations[::-1]}),
        chain(0, 1).model_copy(update={"rotations": [changed(chain(0, 2).rotations[0], next_key=TEXTS[1])]}),
        chain(0, 1).model_copy(
            update={
                "rotations": [
                    changed(sign_key_rotation(KEYS[2], KEYS[1].public_key(), CREATED_AT), previous_key=TEXTS[0])
                ]
            }
        ),
        chain(0, 1).model_copy(
            update={"rotations": [SignedKeyRotation(rotation=chain(0, 1).rotations[0].rotation, signature="no base64")]}
        ),
        ServerKeys(public_key=TEXTS[1], key_id="k", rotations=[]),
    ],
)
def test_an_invalid_rotation_chain_is_rejected_with_the_remedy(keys):
    with pytest.raises(Untrusted, match="enroll this device again"):
        follow(TEXTS[0], keys)


def test_an_invalid_next_key_is_rejected():
    statement = chain(0, 1).rotations[0].rotation.model_copy(update={"next_key": "AAAA"})
    signature = base64.b64encode(KEYS[0].sign(rfc8785.dumps(statement.model_dump(mode="json")))).decode()
    keys = ServerKeys(
        public_key="AAAA", key_id="k", rotations=[SignedKeyRotation(rotation=statement, signature=signature)]
    )
    with pytest.raises(Untrusted, match="enroll this device again"):
        follow(TEXTS[0], keys)
