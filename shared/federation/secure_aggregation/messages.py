"""Messages between devices and server in secure aggregation, as JSON. Only masked vectors are sent as bytes.

Once the roster is complete, members are numbered 1 to n in the order of their names, and sets of members are lists of
numbers. Bytes are base64.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from shared.canonical import canonical_json
from shared.federation.secure_aggregation.primitives import KEY_BYTES, NONCE_BYTES, TAG_BYTES
from shared.federation.secure_aggregation.settings import MAX_MEMBERS
from shared.federation.secure_aggregation.shamir import SHARE_BYTES
from shared.strict_model import StrictModel

SEALED_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + TAG_BYTES  # a share of each of two secrets, for one recipient
SIGNATURE_BYTES = 64


def _decode_base64(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("not base64") from error
    if base64.b64encode(raw).decode() != value:
        raise ValueError("not canonical base64")
    return raw


Base64 = Annotated[
    bytes,
    BeforeValidator(_decode_base64),
    PlainSerializer(lambda raw: base64.b64encode(raw).decode(), return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]
Key = Annotated[Base64, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
SignatureBytes = Annotated[Base64, Field(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Number = Annotated[int, Field(ge=1, le=MAX_MEMBERS)]
Numbers = Annotated[tuple[Number, ...], Field(max_length=MAX_MEMBERS)]


class Phase(StrEnum):
    """The phase of a secure aggregation round."""

    KEYS = "keys"  # devices advertise their keys
    SHARES = "shares"  # devices send shares of their secrets to each other
    VECTORS = "vectors"  # devices send their masked updates
    CONSENTS = "consents"  # devices sign the list of devices in the sum
    UNMASKING = "unmasking"  # devices send the shares that remove the masks
    SUMMING = "summing"  # the server computes the sum
    DONE = "done"
    FAILED = "failed"  # too few devices remained; nothing was unmasked

    @property
    def over(self) -> bool:
        """Whether the round needs no more messages from devices."""
        return self in (Phase.SUMMING, Phase.DONE, Phase.FAILED)


class Advertisement(StrictModel):
    """A device's public keys for one round, signed by its identity key from enrollment."""

    member: str = Field(min_length=1, max_length=100, description="the device's id")
    identity: Key = Field(description="Ed25519 identity key from enrollment")
    sealing: Key = Field(description="X25519 key with which shares for it are sealed")
    masking: Key = Field(description="X25519 key with which masks are agreed")
    signature: SignatureBytes

    def signed_bytes(self, context: bytes) -> bytes:
        """Returns the signed bytes."""
        return advertisement_bytes(context, self.member, self.sealing, self.masking)


def advertisement_bytes(context: bytes, member: str, sealing: bytes, masking: bytes) -> bytes:
    """Returns the bytes that a device signs for its keys."""
    fields = {"sealing": sealing.hex(), "masking": masking.hex(), "member": member, "context": context.hex()}
    return b"mobizo masking keys\n" + canonical_json(fields)


class Roster(StrictModel):
    """All devices that advertised keys, in the order of their names, numbered from 1."""

    members: tuple[Advertisement, ...] = Field(max_length=MAX_MEMBERS)

    def transcript(self, context: bytes) -> bytes:
        """Returns 32 bytes that identify this roster in this round. All later keys and signatures depend on them."""
        return hashlib.sha256(context + canonical_json(self.model_dump(mode="json"))).digest()

    def numbers(self) -> dict[int, Advertisement]:
        """Returns the members by number."""
        return dict(enumerate(self.members, 1))


class SealedShares(StrictModel):
    """One device's shares for all others: SEALED_BYTES for each number of the roster, zeros for itself."""

    sealed: Annotated[Base64, Field(max_length=MAX_MEMBERS * SEALED_BYTES)]
    commitment: Key = Field(description="sha256 commitment to the seed of its own mask")


class Delivery(StrictModel):
    """The shares that others sealed for one device: SEALED_BYTES for each number of `shared`, in that order."""

    shared: Numbers = Field(description="devices that shared their secrets and agree on masks")
    sealed: Annotated[Base64, Field(max_length=MAX_MEMBERS * SEALED_BYTES)]


class Consent(StrictModel):
    """A device's signature over the list of devices in the sum."""

    signature: SignatureBytes


def consent_bytes(transcript: bytes, survivors: tuple[int, ...]) -> bytes:
    """Returns the bytes that a device signs before it helps to remove masks."""
    fields = {"transcript": transcript.hex(), "survivors": list(survivors)}
    return b"mobizo masking consent\n" + canonical_json(fields)


class Consents(StrictModel):
    """The signatures of the devices that consented, SIGNATURE_BYTES each, in the order of `numbers`."""

    numbers: Numbers
    signatures: Annotated[Base64, Field(max_length=MAX_MEMBERS * SIGNATURE_BYTES)]


class Unmasking(StrictModel):
    """A device's shares, SHARE_BYTES each: of the seeds of devices in the sum, and of the mask keys of the others."""

    seeds: Annotated[Base64, Field(max_length=MAX_MEMBERS * SHARE_BYTES)] = Field(
        description="shares of the survivors' seeds, by number"
    )
    keys: Annotated[Base64, Field(max_length=MAX_MEMBERS * SHARE_BYTES)] = Field(
        description="shares of the other devices' mask keys, by number"
    )


class SecureAggregationView(StrictModel):
    """The state of a secure aggregation round for one device, with the inputs of the current phase."""

    phase: Phase
    closes_at: datetime | None = Field(None, description="when the phase ends at the latest")
    number: int | None = Field(None, description="the device's number on the roster; null: not on the roster")
    waits: bool = Field(description="the device has nothing left to do in this phase")
    why: str | None = Field(None, description="why the round failed, or why this device is excluded")
    roster: Roster | None = None
    delivery: Delivery | None = None
    survivors: Numbers | None = None
    consents: Consents | None = None
