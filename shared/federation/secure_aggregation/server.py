"""The server's half of secure aggregation: validation of messages, and the sum after the masks are removed.

The server detects shares that do not reconstruct the secret which their owner advertised or committed to, and tries
other shares. A device's own update is not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from shared.errors import InvalidUpload, Untrusted
from shared.federation.secure_aggregation.device import MASKING
from shared.federation.secure_aggregation.fixed_point import IntegerVector, Total, decode, element_dtype, vector_bytes
from shared.federation.secure_aggregation.messages import SEALED_BYTES, Advertisement, Roster, SealedShares, Unmasking
from shared.federation.secure_aggregation.primitives import (
    add_mask,
    agree,
    check_public,
    check_signature,
    commitment,
    public_of,
)
from shared.federation.secure_aggregation.settings import SecureAggregationParameters
from shared.federation.secure_aggregation.shamir import SHARE_BYTES, combine, weights_at_zero


@dataclass(frozen=True)
class UnmaskingInputs:
    """The messages of all phases. shared: numbers that shared secrets. survivors: numbers whose vectors are in the sum.

    commitments: of `shared`, by number. unmaskings: by number, at least t.
    """

    parameters: SecureAggregationParameters
    roster: Roster
    shared: tuple[int, ...]
    survivors: tuple[int, ...]
    commitments: Mapping[int, bytes]
    unmaskings: Mapping[int, Unmasking]

    @property
    def dropped(self) -> tuple[int, ...]:
        """Numbers that agreed on masks but sent no vector."""
        return tuple(number for number in self.shared if number not in self.survivors)


def check_advertisement(advertisement: Advertisement, member: str, identity: bytes, context: bytes) -> None:
    """Raises Untrusted unless the advertisement is the device's, with a valid signature and usable keys."""
    if (advertisement.member, advertisement.identity) != (member, identity):
        raise Untrusted("a device may advertise only its own keys, signed with its enrollment key")
    check_signature(identity, advertisement.signature, advertisement.signed_bytes(context), member)
    if advertisement.sealing == advertisement.masking:
        raise Untrusted("the two keys of a device must differ")
    for key in (advertisement.sealing, advertisement.masking):
        check_public(key)


def check_shares(shares: SealedShares, members: int) -> None:
    """Raises InvalidUpload unless there is one sealed share for each member."""
    if len(shares.sealed) != members * SEALED_BYTES:
        raise InvalidUpload(f"{len(shares.sealed)} bytes of shares; {members} devices need {members * SEALED_BYTES}")


def check_unmasking(unmasking: Unmasking, survivors: int, dropped: int) -> None:
    """Raises InvalidUpload unless there is one share for each requested seed and key."""
    expected_lengths = survivors * SHARE_BYTES, dropped * SHARE_BYTES
    if (len(unmasking.seeds), len(unmasking.keys)) != expected_lengths:
        raise InvalidUpload(f"exactly the shares of {survivors} seeds and {dropped} keys are required")


def parse_vector(data: bytes | memoryview, parameters: SecureAggregationParameters) -> IntegerVector:
    """Returns a masked vector (D + 1,), read-only. Raises InvalidUpload for another length."""
    if len(data) != vector_bytes(parameters):
        raise InvalidUpload(f"the masked vector has {len(data)} bytes; the round requires {vector_bytes(parameters)}")
    return np.frombuffer(data, element_dtype(parameters))


def unmask_sum(inputs: UnmaskingInputs, vectors: Iterable[bytes]) -> Total:
    """Returns the decoded sum of the survivors' masked vectors with all masks removed.

    vectors: of `survivors`, one each, in any order, read one at a time. Memory is O(D). The time is one stream of D for
    each survivor, and one for each pair of a survivor and a device that dropped out between SHARES and VECTORS. Raises
    Untrusted if no t shares match the commitments, InvalidUpload for a sum that is impossible for honest devices.
    """
    parameters = inputs.parameters
    seeds, keys = _secrets(inputs)
    total = np.zeros(parameters.size + 1, element_dtype(parameters))
    count = 0
    for data in vectors:
        np.add(total, parse_vector(data, parameters), out=total)
        count += 1
    if count != len(inputs.survivors):
        raise Untrusted(f"only {count} of {len(inputs.survivors)} masked vectors are available")
    for seed in seeds.values():
        add_mask(total, seed, -1)
    members, context = inputs.roster.numbers(), inputs.roster.transcript(parameters.context)
    for dropped, key in keys.items():
        for number in inputs.survivors:
            # The survivor's mask for the dropped device, with the opposite sign.
            mask = agree(key, members[number].masking, MASKING, context)
            add_mask(total, mask, -1 if number < dropped else 1)
    return decode(total, count, parameters)


def _secrets(inputs: UnmaskingInputs) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Returns the survivors' seeds and the dropped devices' mask keys, each verified against its owner's commitment."""
    context = inputs.roster.transcript(inputs.parameters.context)
    members = inputs.roster.numbers()
    required = inputs.parameters.required_devices(len(members))
    senders = sorted(inputs.unmaskings)
    if len(senders) < required:
        raise Untrusted(f"{len(senders)} devices sent shares; {required} are needed")

    def seed(number: int, secret: bytes) -> bool:
        return commitment(secret, context) == inputs.commitments[number]

    def key(number: int, secret: bytes) -> bool:
        return public_of(secret) == members[number].masking

    # Tries t consecutive devices in a ring, so that any single dishonest device is left out of some choice.
    for first in range(len(senders) if len(senders) > required else 1):
        ring_senders = [*senders[first:], *senders[:first]][:required]
        weights = weights_at_zero(ring_senders)
        try:
            seeds = _combine_secrets(
                inputs, ring_senders, weights, inputs.survivors, lambda unmasking: unmasking.seeds, seed
            )
            keys = _combine_secrets(
                inputs, ring_senders, weights, inputs.dropped, lambda unmasking: unmasking.keys, key
            )
        except Untrusted:
            continue
        return seeds, keys
    raise Untrusted("the received shares do not reconstruct the committed secrets; nothing is unmasked")


def _combine_secrets(
    inputs: UnmaskingInputs,
    senders: list[int],
    weights: list[int],
    owners: tuple[int, ...],
    shares_of: Callable[[Unmasking], bytes],
    is_valid: Callable[[int, bytes], bool],
) -> dict[int, bytes]:
    secrets = {}
    for index, owner in enumerate(owners):
        span = slice(index * SHARE_BYTES, (index + 1) * SHARE_BYTES)
        secret = combine({sender: shares_of(inputs.unmaskings[sender])[span] for sender in senders}, weights)
        if not is_valid(owner, secret):
            raise Untrusted(f"the shares of device {owner}'s secret do not reconstruct it")
        secrets[owner] = secret
    return secrets
