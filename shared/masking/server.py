"""The server's half: who is on the roster, and the sum once the masks are removed. Knows no phases' times, no storage.

The server trusts a device with its own update only: shares that do not give the secret which their owner advertised or
committed to are found out, and others are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from shared.errors import InvalidUpload, Untrusted
from shared.masking.device import MASKING
from shared.masking.fixed_point import Total, Words, decode, vector_bytes, word
from shared.masking.masks import add_mask
from shared.masking.messages import (
    SEALED_BYTES,
    Advertisement,
    Roster,
    SealedShares,
    Unmasking,
)
from shared.masking.primitives import agree, check_public, check_signature, commitment, public_of
from shared.masking.settings import MaskingParameters
from shared.masking.shamir import SHARE_BYTES, combine, weights_at_zero

Found = TypeVar("Found")


@dataclass(frozen=True)
class Gathered:
    """What the phases brought. shared: numbers that shared secrets. survivors: numbers whose vectors are in the sum.

    commitments: of `shared`, by number. unmaskings: by number, at least t.
    """

    parameters: MaskingParameters
    roster: Roster
    shared: tuple[int, ...]
    survivors: tuple[int, ...]
    commitments: Mapping[int, bytes]
    unmaskings: Mapping[int, Unmasking]

    @property
    def dropped(self) -> tuple[int, ...]:
        """Numbers that others agreed masks with, and that sent no vector."""
        return tuple(number for number in self.shared if number not in self.survivors)


def check_advertisement(advertisement: Advertisement, member: str, identity: bytes, context: bytes) -> None:
    """Raises Untrusted unless it is that device's, by the key it enrolled with, and its keys can be agreed with."""
    if (advertisement.member, advertisement.identity) != (member, identity):
        raise Untrusted("a device advertises its own keys only, signed by the key that it enrolled with")
    check_signature(identity, advertisement.signature, advertisement.said(context), member)
    if advertisement.sealing == advertisement.masking:
        raise Untrusted("a device's two keys must be two")
    for key in (advertisement.sealing, advertisement.masking):
        check_public(key)


def check_shares(shares: SealedShares, members: int) -> None:
    """Raises InvalidUpload unless there is one sealed share for each member."""
    if len(shares.sealed) != members * SEALED_BYTES:
        raise InvalidUpload(f"{len(shares.sealed)} bytes of shares; {members} devices need {members * SEALED_BYTES}")


def check_unmasking(unmasking: Unmasking, survivors: int, dropped: int) -> None:
    """Raises InvalidUpload unless there is one share for each seed and for each key that is asked for."""
    wanted = survivors * SHARE_BYTES, dropped * SHARE_BYTES
    if (len(unmasking.seeds), len(unmasking.keys)) != wanted:
        raise InvalidUpload(f"shares of {survivors} seeds and {dropped} keys are asked for, neither more nor fewer")


def vector_of(data: bytes, parameters: MaskingParameters) -> Words:
    """A masked vector (D + 1,), read only. Raises InvalidUpload for another length; all else of it is random."""
    if len(data) != vector_bytes(parameters):
        raise InvalidUpload(f"the masked vector has {len(data)} bytes; this round's has {vector_bytes(parameters)}")
    return np.frombuffer(data, word(parameters))


def unmasked(gathered: Gathered, vectors: Iterable[bytes]) -> Total:
    """The sum of the survivors' masked vectors with all masks removed, decoded.

    vectors: of `survivors`, one each, in any order; read one at a time. Memory is O(D); the time is one stream of D
    for each survivor, and for each pair of a survivor and a device that dropped out between shares and vectors. Raises
    Untrusted if no t shares give what was committed to, InvalidUpload for a sum that honest devices cannot have.
    """
    parameters = gathered.parameters
    seeds, keys = _secrets(gathered)
    total = np.zeros(parameters.size + 1, word(parameters))
    count = 0
    for data in vectors:
        np.add(total, vector_of(data, parameters), out=total)
        count += 1
    if count != len(gathered.survivors):
        raise Untrusted(f"{count} masked vectors are there of {len(gathered.survivors)}")
    for seed in seeds.values():
        add_mask(total, seed, -1)
    members, context = gathered.roster.numbers(), gathered.roster.transcript(parameters.context)
    for dropped, key in keys.items():
        for number in gathered.survivors:
            # What the survivor added for the one that dropped out, or took away, with the sign turned round.
            mask = agree(key, members[number].masking, MASKING, context)
            add_mask(total, mask, -1 if number < dropped else 1)
    return decode(total, count, parameters)


def _secrets(gathered: Gathered) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Seeds of the survivors and mask keys of those that dropped out, each found to be what its owner showed."""
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

    # In a ring, t givers from each on: of more than t, every single one that lies is left out of some.
    for first in range(len(givers) if len(givers) > needed else 1):
        chosen = [*givers[first:], *givers[:first]][:needed]
        weights = weights_at_zero(chosen)
        try:
            seeds = _combined(gathered, chosen, weights, gathered.survivors, lambda said: said.seeds, seed)
            keys = _combined(gathered, chosen, weights, gathered.dropped, lambda said: said.keys, key)
        except Untrusted:
            continue
        return seeds, keys
    raise Untrusted("the shares that came do not give the secrets that their owners committed to; nothing is unmasked")


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
            raise Untrusted(f"the shares of device {owner}'s secret do not give it")
        found[owner] = secret
    return found
