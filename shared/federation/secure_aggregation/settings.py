"""Secure aggregation settings of a cohort, and the parameters that all devices of one round agree on."""

from __future__ import annotations

import hashlib
import math
from typing import Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from shared.canonical import canonical_json
from shared.strict_model import StrictModel

Bits = Literal[32, 64]
Threshold = Literal["majority", "two-thirds"]
MAX_MEMBERS = 1024
MIN_LEVELS = 1024  # minimum quantization steps between zero and the clip bound at weight 1


class SecureAggregationSettings(StrictModel):
    """A cohort's secure aggregation settings."""

    minimum: int = Field(3, ge=3, le=MAX_MEMBERS, description="k: minimum number of devices in a sum")
    threshold: Threshold = Field(
        "two-thirds",
        description="t: more than this share of the starting devices is needed to remove the masks",
    )
    bits: Bits = Field(32, description="width of a masked number; 64 doubles the upload and is more precise")
    most_members: int = Field(256, ge=3, le=MAX_MEMBERS, description="maximum number of devices in a round")
    phase_seconds: FiniteFloat = Field(
        300,
        ge=1,
        le=86_400,
        description="time after which a device that does not answer is excluded, seconds",
    )

    @model_validator(mode="after")
    def _check_minimum(self) -> Self:
        if self.minimum > self.most_members:
            raise ValueError(f"minimum is {self.minimum}, but most_members is {self.most_members}")
        return self


class SecureAggregationParameters(StrictModel):
    """The parameters of one round. Devices with different parameters cannot take part together.

    Every key, share and signature is bound to `context`. If the server sends two devices different parameters, their
    ciphertexts cannot be decrypted and no sum results.
    """

    version: Literal[1] = Field(
        1, description="protocol version; devices of different versions reject each other's keys"
    )
    cohort: str = Field(max_length=200)
    round: int = Field(ge=0)
    start_sha256: str | None = Field(
        max_length=64, description="sha256 of the LoRA-B file that updates are relative to; null: B = 0"
    )
    recipe_id: str = Field(max_length=64)
    size: int = Field(ge=1, lt=2**31, description="D: elements of an update")
    clip: FiniteFloat = Field(gt=0, le=1e30, description="C: L2 norm that an update is scaled down to")
    most_weight: int = Field(1, ge=1, lt=2**24, description="W: examples that one update may count for; 1: all equal")
    most_members: int = Field(ge=3, le=MAX_MEMBERS, description="N")
    minimum: int = Field(ge=3, le=MAX_MEMBERS, description="k")
    threshold: Threshold
    bits: Bits

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        largest = 2 ** (self.bits - 1) - 1
        if self.minimum > self.most_members:
            raise ValueError(f"minimum is {self.minimum}, but most_members is {self.most_members}")
        if self.most_members * self.most_weight > largest or self.scale * self.clip < MIN_LEVELS:
            raise ValueError(
                f"{self.most_members} updates of weight {self.most_weight} do not fit precisely into {self.bits} bits; "
                "use 64 bits, or lower most_members or most_examples"
            )
        return self

    @property
    def scale(self) -> float:
        """s: the power of two by which weighted elements are multiplied before rounding.

        It is the largest with N (s W C + 1/2) <= 2^(bits - 1) - 1. An element is at most C, a weight at most W, and
        rounding adds at most 1/2, so no sum of N elements overflows the signed range.
        """
        largest = (2 ** (self.bits - 1) - 1) / self.most_members - 0.5
        # One power lower if the quotient is a power of two, because float64 may have rounded it up.
        return math.ldexp(1.0, math.ceil(math.log2(largest / (self.most_weight * self.clip))) - 1)

    def required_devices(self, members: int) -> int:
        """Returns t, the number of the `members` devices needed to remove masks; at least k."""
        share = members // 2 if self.threshold == "majority" else 2 * members // 3
        return max(share + 1, self.minimum)

    @property
    def context(self) -> bytes:
        """32 bytes that identify these parameters and the protocol."""
        return hashlib.sha256(b"mobizo masking\n" + canonical_json(self.model_dump(mode="json"))).digest()
