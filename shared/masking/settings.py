"""What a cohort sets of its masked rounds, and the parameters that all devices of one round agree on.

Knows no cryptography.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.canonical import canonical_json

Bits = Literal[32, 64]
Threshold = Literal["majority", "two-thirds"]
MOST_MEMBERS = 1024
LEAST_LEVELS = 1024  # steps between zero and the clip bound that an update of weight 1 can have


class MaskingSettings(BaseModel):
    """How a cohort's rounds are masked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    minimum: int = Field(3, ge=3, le=MOST_MEMBERS, description="k: fewer devices than these are never summed")
    threshold: Threshold = Field(
        "two-thirds",
        description="t: more than this part of the devices that began must be there at the end to remove the masks",
    )
    bits: Bits = Field(32, description="width of a number under its mask; 64 doubles the upload and is finer")
    most_members: int = Field(256, ge=3, le=MOST_MEMBERS, description="that one round may have; the sum has room for")
    phase_seconds: float = Field(
        300, ge=1, le=86_400, allow_inf_nan=False, description="for which a device may be silent before it is dropped"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.minimum > self.most_members:
            raise ValueError(f"minimum is {self.minimum}, and a round has {self.most_members} members at most")
        return self


class MaskingParameters(BaseModel):
    """One round's: the server tells them to each device, and devices that were told others cannot take part together.

    Every key, share and signature is bound to `context`, so that a server which tells two devices two things has
    ciphertexts that do not open instead of a sum.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = Field(1, description="of the protocol: devices of another one refuse each other's keys")
    cohort: str = Field(max_length=200)
    round: int = Field(ge=0)
    start_sha256: str | None = Field(max_length=64, description="LoRA-B file that updates are against; null: B = 0")
    recipe_id: str = Field(max_length=64)
    size: int = Field(ge=1, lt=2**31, description="D: elements of an update")
    clip: float = Field(gt=0, le=1e30, allow_inf_nan=False, description="C: L2 norm that an update is scaled down to")
    most_weight: int = Field(1, ge=1, lt=2**24, description="W: examples that one update may count for; 1: all equal")
    most_members: int = Field(ge=3, le=MOST_MEMBERS, description="N")
    minimum: int = Field(ge=3, le=MOST_MEMBERS, description="k")
    threshold: Threshold
    bits: Bits

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        room = 2 ** (self.bits - 1) - 1
        if self.minimum > self.most_members:
            raise ValueError(f"minimum is {self.minimum}, and a round has {self.most_members} members at most")
        if self.most_members * self.most_weight > room or self.scale * self.clip < LEAST_LEVELS:
            raise ValueError(
                f"{self.most_members} updates of weight {self.most_weight} leave too little of {self.bits} bits for an "
                "update's own numbers: take 64 bits, or lower most_members or most_examples"
            )
        return self

    @property
    def scale(self) -> float:
        """s: the power of two by which weighted elements are multiplied before they are rounded.

        The largest with N (s W C + 1/2) <= 2^(bits - 1) - 1. An element of an update is at most C, its weight at most
        W, and rounding adds at most 1/2, so that no sum of N of them leaves the signed range.
        """
        room = (2 ** (self.bits - 1) - 1) / self.most_members - 0.5
        # One power lower where the quotient is one itself, as float64 may have rounded it up to that.
        return math.ldexp(1.0, math.ceil(math.log2(room / (self.most_weight * self.clip))) - 1)

    def needed(self, members: int) -> int:
        """t: of `members` devices that shared their secrets, how many it takes to remove masks; never fewer than k."""
        part = members // 2 if self.threshold == "majority" else 2 * members // 3
        return max(part + 1, self.minimum)

    @property
    def context(self) -> bytes:
        """32 bytes that stand for these parameters and for this protocol."""
        return hashlib.sha256(b"mobizo masking\n" + canonical_json(self.model_dump(mode="json"))).digest()
