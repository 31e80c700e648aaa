"""The server's half of secure aggregation: validation of messages, and the sum after the masks are removed.

The server detects shares that do not reconstruct the secret which their owner advertised or committed to, and tries
other shares. A device's own update is not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from shared.errors import InvalidUpload, Untrusted
from shared.federation.secure_aggregation.device import MASKING
from shared.federation.secure_aggregation.fixed_point import Total, Words, decode, vector_bytes, word
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

Found = TypeVar("Found")


@dataclass(frozen=True)
class Gathered:
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
    wanted = survivors * SHARE_BYTES, dropped * SHARE_BYTES
    if (len(unmasking.seeds), len(unmasking.keys)) != wanted:
        raise InvalidUpload(f"exactly the shares of {survivors} seeds and {dropped} keys are required")


def vector_of(data: bytes, parameters: SecureAggregationParameters) -> Words:
    """Returns a masked vector (D + 1,), read-only. Raises InvalidUpload for another length."""
    if len(data) != vector_bytes(parameters):
        raise InvalidUpload(f"the masked vector has {len(data)} bytes; the round requires {vector_bytes(parameters)}")
    return np.frombuffer(data, word(parameters))


def unmasked(gathered: Gathered, vectors: Iterable[bytes]) -> Total:
    """Returns the decoded sum of the survivors' masked vectors with all masks removed.

    vectors: of `survivors`, one each, in any order, read one at a time. Memory is O(D). The time is one stream of D for
    each survivor, and one for each pair of a survivor and a device that dropped out between SHARES and VECTORS. Raises
    Untrusted if no t shares match the commitments, InvalidUpload for a sum that is impossible for honest devices.
    """
    parameters = gathered.parameters
    seeds, keys = _secrets(gathered)
    total = np.zeros(parameters.size + 1, word(parameters))
    count = 0
    for data in vectors:
        np.add(total, vector_of(data, parameters), out=total)
        count += 1
    if count != len(gathered.survivors):
        raise Untrusted(f"only {count} of {len(gathered.survivors)} masked vectors are available")
    for seed in seeds.values():
        add_mask(total, seed, -1)
    members, context = gathered.roster.numbers(), gathered.roster.transcript(parameters.context)
    for dropped, key in keys.items():
        for number in gathered.survivors:
            # The survivor's mask for the dropped device, with the opposite sign.
            mask = agree(key, members[number].masking, MASKING, context)
            add_mask(total, mask, -1 if number < dropped else 1)
    return decode(total, count, parameters)


def _secrets(gathered: Gathered) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Returns the survivors' seeds and the dropped devices' mask keys, each verified against its owner's commitment."""
    context = gathered.roster.transcript(gathered.parameters.context)
    members = gathered.roster.numbers()
    needed = gathered.parameters.needed(len(members))
    givers = sorted(gathered.unmaskings)
    if len(givers) < needed:
        raise Untrusted(f"{len(givers)} devices sent shares; {needed} are needed")

    def seed(number: int, found: bytes) -> bool:
        return commitment(found, context) == gathered.commitments[number]

    def key(number: int, found: bytes) -> bool:
        return public_of(found) == members[number].masking

    # Tries t consecutive devices in a ring, so that any single dishonest device is left out of some choice.
    for first in range(len(givers) if len(givers) > needed else 1):
        chosen = [*givers[first:], *givers[:first]][:needed]
        weights = weights_at_zero(chosen)
        try:
            seeds = _combined(gathered, chosen, weights, gathered.survivors, lambda unmasking: unmasking.seeds, seed)
            keys = _combined(gathered, chosen, weights, gathered.dropped, lambda unmasking: unmasking.keys, key)
        except Untrusted:
            continue
        return seeds, keys
    raise Untrusted("the received shares do not reconstruct the committed secrets; nothing is unmasked")


def _combined(
    gathered: Gathered,
    chosen: list[int],
    weights: list[int],
    owners: tuple[int, ...],
    of: Callable[[Unmasking], bytes],
    fits: Callable[[int, bytes], bool],
) -> dict[int, bytes]:
    found = {}
    for at, owner in enumerate(owners):
        cut = slice(at * SHARE_BYTES, (at + 1) * SHARE_BYTES)
        secret = combine({giver: of(gathered.unmaskings[giver])[cut] for giver in chosen}, weights)
        if not fits(owner, secret):
            raise Untrusted(f"the shares of device {owner}'s secret do not reconstruct it")
        found[owner] = secret
    return found
