"""The device's half of each phase, as functions of its state (`Knowledge`) and the server's messages.

The caller must store the state before it sends a message, so that after a crash the device sends the same message
again. A device that sent two different messages in one round could be made to reveal both shares of one secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ConfigDict

from shared.errors import Untrusted
from shared.federation.secure_aggregation.fixed_point import Words
from shared.federation.secure_aggregation.messages import (
    SEALED_BYTES,
    SIGNATURE_BYTES,
    Advertisement,
    Base64,
    Consent,
    Consents,
    Delivery,
    Key,
    Roster,
    SealedShares,
    Unmasking,
    advertised,
    consented,
)
from shared.federation.secure_aggregation.primitives import (
    add_mask,
    agree,
    check_signature,
    commitment,
    new_secret,
    public_of,
    seal,
    sign,
    unseal,
)
from shared.federation.secure_aggregation.settings import SecureAggregationParameters
from shared.federation.secure_aggregation.shamir import SHARE_BYTES, split

SEALING, MASKING = b"sealing", b"masking"
Trust = Callable[[Mapping[str, bytes]], None]


class Knowledge(BaseModel):
    """The secret state of one device in one round.

    sealing, masking: X25519 private keys. seed: of its own mask. own: its shares of its own two secrets.
    sealed_shares: its message in the phase SHARES. delivery, survivors: the server's messages, of which it accepts no
    second version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: SecureAggregationParameters
    member: str
    sealing: Key
    masking: Key
    seed: Key
    roster: Roster | None = None
    own: Base64 = b""
    sealed_shares: SealedShares | None = None
    delivery: Delivery | None = None
    survivors: tuple[int, ...] | None = None

    @property
    def number(self) -> int:
        """The device's number on the roster."""
        return next(number for number, one in self.listed.numbers().items() if one.member == self.member)

    @property
    def listed(self) -> Roster:
        """The accepted roster. Raises Untrusted if there is none."""
        if self.roster is None:
            raise Untrusted("the server skipped the roster")
        return self.roster

    @property
    def transcript(self) -> bytes:
        """The transcript of parameters and roster, 32 bytes."""
        return self.listed.transcript(self.parameters.context)

    @property
    def needed(self) -> int:
        """Shamir threshold t: the number of shares needed to reconstruct a secret."""
        return self.parameters.needed(len(self.listed.members))

    def taken(self) -> Delivery:
        """Returns the accepted delivery. Raises Untrusted if there is none."""
        if self.delivery is None:
            raise Untrusted("the server skipped the delivery of shares")
        return self.delivery


def begin(parameters: SecureAggregationParameters, member: str) -> Knowledge:
    """Returns the state of a new round, with new keys and a new seed."""
    return Knowledge(
        parameters=parameters, member=member, sealing=new_secret(), masking=new_secret(), seed=new_secret()
    )


def advertise(knowledge: Knowledge, identity: Ed25519PrivateKey) -> Advertisement:
    """Phase 0: returns the public keys, signed by the device's identity key."""
    sealing, masking = public_of(knowledge.sealing), public_of(knowledge.masking)
    message = advertised(knowledge.parameters.context, knowledge.member, sealing, masking)
    return Advertisement(
        member=knowledge.member,
        identity=identity.public_key().public_bytes_raw(),
        sealing=sealing,
        masking=masking,
        signature=sign(identity, message),
    )


def check_roster(roster: Roster, parameters: SecureAggregationParameters, trust: Trust) -> None:
    """Raises Untrusted for a roster with too few or too many devices, in the wrong order, or with an invalid key.

    trust: raises Untrusted if an identity key does not belong to the device id that it comes with.
    """
    names = [one.member for one in roster.members]
    if not parameters.minimum <= len(names) <= parameters.most_members:
        raise Untrusted(f"the roster has {len(names)} devices; at least {parameters.minimum} are required")
    keys = {key for one in roster.members for key in (one.sealing, one.masking)}
    identities = {one.identity for one in roster.members}
    if names != sorted(set(names)) or len(identities) < len(names) or len(keys) < 2 * len(names):
        raise Untrusted("the roster contains a device or a key twice")
    trust({one.member: one.identity for one in roster.members})
    for one in roster.members:
        check_signature(one.identity, one.signature, one.signed_bytes(parameters.context), one.member)


def share(knowledge: Knowledge, roster: Roster, trust: Trust) -> Knowledge:
    """Phase 1: seals shares of the mask key and the seed for each other device.

    They are in the returned state's `sealed_shares`.

    Raises Untrusted for a roster that `check_roster` rejects or that lacks this device's own keys.
    """
    if knowledge.roster is not None:
        if roster != knowledge.roster:
            raise Untrusted("the server sent a second roster in one round")
        return knowledge
    check_roster(roster, knowledge.parameters, trust)
    mine = [one for one in roster.members if one.member == knowledge.member]
    keys = public_of(knowledge.sealing), public_of(knowledge.masking)
    if [(one.sealing, one.masking) for one in mine] != [keys]:
        raise Untrusted("the roster does not contain the keys that this device advertised")
    knowledge = knowledge.model_copy(update={"roster": roster})
    context, number, count = knowledge.transcript, knowledge.number, len(roster.members)
    halves = zip(
        split(knowledge.masking, knowledge.needed, count), split(knowledge.seed, knowledge.needed, count), strict=True
    )
    sealed, own = b"", b""
    for (other, one), (key_share, seed_share) in zip(roster.numbers().items(), halves, strict=True):
        if other == number:
            own = key_share + seed_share
            sealed += bytes(SEALED_BYTES)
            continue
        key = agree(knowledge.sealing, one.sealing, SEALING, context)
        sealed += seal(key, key_share + seed_share, _about(number, other))
    sealed_shares = SealedShares(sealed=sealed, commitment=commitment(knowledge.seed, context))
    return knowledge.model_copy(update={"own": own, "sealed_shares": sealed_shares})


def receive(knowledge: Knowledge, delivery: Delivery) -> Knowledge:
    """Phase 2, first half: accepts the sealed shares of the other devices, with which masks will be agreed.

    Raises Untrusted unless there are enough of them, this device's included.
    """
    if knowledge.delivery is not None:
        if delivery != knowledge.delivery:
            raise Untrusted("the server delivered a second set of shares in one round")
        return knowledge
    count = len(knowledge.listed.members)
    _check_numbers(delivery.shared, range(1, count + 1), knowledge, "shared their secrets")
    if len(delivery.sealed) != len(delivery.shared) * SEALED_BYTES:
        raise Untrusted("the number of delivered shares does not match the number of devices that sent shares")
    return knowledge.model_copy(update={"delivery": delivery})


def mask(knowledge: Knowledge, encoded: Words) -> Words:
    """Phase 2: returns y = x + PRG(seed) + the sum of +-PRG(agreed key) over all other devices that shared.

    The lower number of a pair adds the mask that the higher one subtracts. Equal state and update give equal bytes.
    `encoded` is not changed.
    """
    vector = encoded.copy()
    number, context, members = knowledge.number, knowledge.transcript, knowledge.listed.numbers()
    add_mask(vector, knowledge.seed, 1)
    for other in knowledge.taken().shared:
        if other != number:
            key = agree(knowledge.masking, members[other].masking, MASKING, context)
            add_mask(vector, key, 1 if number < other else -1)
    return vector


def consent(knowledge: Knowledge, survivors: tuple[int, ...], identity: Ed25519PrivateKey) -> tuple[Knowledge, Consent]:
    """Phase 3: signs the list of devices in the sum. The device then supports no other sum of this round.

    Raises Untrusted if they are too few, include devices that did not share, or differ from an earlier list.
    """
    if knowledge.survivors is not None and knowledge.survivors != survivors:
        raise Untrusted("the server requested a second sum of one round, which could reveal single updates")
    _check_numbers(survivors, knowledge.taken().shared, knowledge, "are in the sum")
    message = consented(knowledge.transcript, survivors)
    return knowledge.model_copy(update={"survivors": survivors}), Consent(signature=sign(identity, message))


def unmask(knowledge: Knowledge, consents: Consents) -> Unmasking:
    """Phase 4: returns the shares of the seeds of devices in the sum, and of the mask keys of all others; never both.

    Raises Untrusted unless enough devices consented to the same sum, or if a needed share cannot be decrypted.
    """
    survivors, delivery, members = knowledge.survivors, knowledge.taken(), knowledge.listed.numbers()
    context = knowledge.transcript
    if survivors is None:
        raise Untrusted("the server skipped the consents")
    _check_numbers(consents.numbers, survivors, knowledge, "consented")
    if len(consents.signatures) != len(consents.numbers) * SIGNATURE_BYTES:
        raise Untrusted("the number of signatures does not match the number of consents")
    message = consented(context, survivors)
    for at, number in enumerate(consents.numbers):
        signature = consents.signatures[at * SIGNATURE_BYTES : (at + 1) * SIGNATURE_BYTES]
        check_signature(members[number].identity, signature, message, members[number].member)
    seeds, keys = b"", b""
    for at, number in enumerate(delivery.shared):
        both = _opened(knowledge, context, number, delivery.sealed[at * SEALED_BYTES : (at + 1) * SEALED_BYTES])
        if number in survivors:
            seeds += both[SHARE_BYTES:]
        else:
            keys += both[:SHARE_BYTES]
    return Unmasking(seeds=seeds, keys=keys)


def _opened(knowledge: Knowledge, context: bytes, number: int, sealed: bytes) -> bytes:
    """Returns the two shares that a member made for this device: of its mask key, then of its seed."""
    mine = knowledge.number
    if number == mine:
        return knowledge.own
    sender = knowledge.listed.numbers()[number]
    key = agree(knowledge.sealing, sender.sealing, SEALING, context)
    return unseal(key, sealed, _about(number, mine))


def _about(sender: int, recipient: int) -> bytes:
    return f"{sender} to {recipient}".encode()


def _check_numbers(numbers: tuple[int, ...], among: range | tuple[int, ...], knowledge: Knowledge, what: str) -> None:
    if list(numbers) != sorted(set(numbers)) or not set(numbers) <= set(among):
        raise Untrusted(f"the server's list of devices that {what} is out of order or contains unknown devices")
    if len(numbers) < knowledge.needed:
        raise Untrusted(f"only {len(numbers)} devices {what}; at least {knowledge.needed} are required")
    if knowledge.number not in numbers and what != "consented":
        raise Untrusted(
            f"this device is not among the devices that {what}; it supports only sums that include its own update"
        )
