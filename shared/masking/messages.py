"""What devices and the server say to each other in a masked round, as JSON; only masked vectors travel as bytes.

Members are numbered 1 to n in the order of their names, once the roster is complete; sets of members are lists of
numbers. Bytes are base64. Knows no cryptography beyond what is signed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from shared.canonical import canonical_json
from shared.masking.primitives import KEY_BYTES, NONCE_BYTES, TAG_BYTES
from shared.masking.settings import MOST_MEMBERS
from shared.masking.shamir import SHARE_BYTES

SEALED_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + TAG_BYTES  # a share of each of two secrets, for one recipient
SIGNATURE_BYTES = 64


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("not base64") from error
    if base64.b64encode(raw).decode() != value:
        raise ValueError("not base64 as it is to be written")
    return raw


Base64 = Annotated[
    bytes,
    BeforeValidator(_decoded),
    PlainSerializer(lambda raw: base64.b64encode(raw).decode(), return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]
Key = Annotated[Base64, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Signed = Annotated[Base64, Field(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Number = Annotated[int, Field(ge=1, le=MOST_MEMBERS)]
Numbers = Annotated[tuple[Number, ...], Field(max_length=MOST_MEMBERS)]


class Phase(StrEnum):
    """What a masked round waits for."""

    KEYS = "keys"  # devices advertise their keys
    SHARES = "shares"  # devices send shares of their secrets to each other
    VECTORS = "vectors"  # devices send their masked updates
    CONSENTS = "consents"  # devices sign who is in the sum
    UNMASKING = "unmasking"  # devices send the shares that remove the masks
    SUMMING = "summing"  # nothing more of devices
    DONE = "done"
    FAILED = "failed"  # too few were left; nothing was unmasked

    @property
    def over(self) -> bool:
        """Whether no device is needed any more."""
        return self in (Phase.SUMMING, Phase.DONE, Phase.FAILED)


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Advertisement(_Message):
    """A device's public keys of one round, signed by the key that it enrolled with."""

    member: str = Field(min_length=1, max_length=100, description="the device's id")
    identity: Key = Field(description="Ed25519, of its enrolment")
    sealing: Key = Field(description="X25519: shares for it are sealed with")
    masking: Key = Field(description="X25519: masks are agreed with")
    signature: Signed

    def said(self, context: bytes) -> bytes:
        """What the signature is over."""
        return advertised(context, self.member, self.sealing, self.masking)


def advertised(context: bytes, member: str, sealing: bytes, masking: bytes) -> bytes:
    """What a device signs of its keys."""
    words = {"sealing": sealing.hex(), "masking": masking.hex(), "member": member, "context": context.hex()}
    return b"mobizo masking keys\n" + canonical_json(words)


class Roster(_Message):
    """Everyone who advertised keys, in the order of their names; number 1 is the first."""

    members: tuple[Advertisement, ...] = Field(max_length=MOST_MEMBERS)

    def transcript(self, context: bytes) -> bytes:
        """32 bytes for this roster of this round: devices that were shown another one have nothing in common."""
        return hashlib.sha256(context + canonical_json(self.model_dump(mode="json"))).digest()

    def numbers(self) -> dict[int, Advertisement]:
        """Members by number."""
        return dict(enumerate(self.members, 1))


class SealedShares(_Message):
    """One device's shares for all others, SEALED_BYTES for each number of the roster, zeros for itself."""

    sealed: Annotated[Base64, Field(max_length=MOST_MEMBERS * SEALED_BYTES)]
    commitment: Key = Field(description="sha256 that holds it to the seed of its own mask")


class Delivery(_Message):
    """What others sealed for one device: SEALED_BYTES for each number of `shared`, in that order."""

    shared: Numbers = Field(description="who shared secrets; the masks are agreed among them")
    sealed: Annotated[Base64, Field(max_length=MOST_MEMBERS * SEALED_BYTES)]


class Consent(_Message):
    """A device's signature over who is in the sum."""

    signature: Signed


def consented(transcript: bytes, survivors: tuple[int, ...]) -> bytes:
    """What a device signs before it helps to remove masks."""
    words = {"transcript": transcript.hex(), "survivors": list(survivors)}
    return b"mobizo masking consent\n" + canonical_json(words)


class Consents(_Message):
    """The signatures of those that consented, each SIGNATURE_BYTES, in the order of `numbers`."""

    numbers: Numbers
    signatures: Annotated[Base64, Field(max_length=MOST_MEMBERS * SIGNATURE_BYTES)]


class Unmasking(_Message):
    """A device's shares, SHARE_BYTES each: of the seeds of those in the sum, of the mask keys of those that are not."""

    seeds: Annotated[Base64, Field(max_length=MOST_MEMBERS * SHARE_BYTES)] = Field(description="by number, survivors'")
    keys: Annotated[Base64, Field(max_length=MOST_MEMBERS * SHARE_BYTES)] = Field(description="by number, the others'")


class MaskingView(_Message):
    """Where a masked round stands for one device, and what the phase gives it to work with."""

    phase: Phase
    closes_at: datetime | None = Field(None, description="when the phase ends at the latest")
    number: int | None = Field(None, description="the device's, once there is a roster; null: it is not part of it")
    waits: bool = Field(description="the server has what it needs of this device in this phase")
    why: str | None = Field(None, description="why it failed, or why this device is out")
    roster: Roster | None = None
    delivery: Delivery | None = None
    survivors: Numbers | None = None
    consents: Consents | None = None
