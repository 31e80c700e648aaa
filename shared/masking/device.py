"""The device's half of each phase, as functions from what it knows and hears to what it knows and says.

What a device knows (`Knowledge`) is to be kept before what it says is sent, so that after a kill it says the same
again: a device that said two things in one round could be made to give both shares of one secret away. Knows no
transport and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ConfigDict

from shared.errors import Untrusted
from shared.masking.fixed_point import Words
from shared.masking.masks import add_mask
from shared.masking.messages import (
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
from shared.masking.primitives import (
    agree,
    check_signature,
    commitment,
    new_secret,
    public_of,
    seal,
    sign,
    unseal,
)
from shared.masking.settings import MaskingParameters
from shared.masking.shamir import SHARE_BYTES, split

SEALING, MASKING = b"sealing", b"masking"
Trust = Callable[[Mapping[str, bytes]], None]


class Knowledge(BaseModel):
    """All that one device knows of one round; secret.

    sealing, masking: X25519 private keys. seed: of its own mask. own: its shares of its own two secrets. said: what it
    sent in the shares' phase. delivery, survivors: what it was told, of which it takes no second version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: MaskingParameters
    member: str
    sealing: Key
    masking: Key
    seed: Key
    roster: Roster | None = None
    own: Base64 = b""
    said: SealedShares | None = None
    delivery: Delivery | None = None
    survivors: tuple[int, ...] | None = None

    @property
    def number(self) -> int:
        """This device's, in the roster."""
        return next(number for number, one in self.listed.numbers().items() if one.member == self.member)

    @property
    def listed(self) -> Roster:
        """The roster that it took."""
        if self.roster is None:
            raise Untrusted("the server skipped the roster")
        return self.roster

    @property
    def transcript(self) -> bytes:
        """Of round and roster."""
        return self.listed.transcript(self.parameters.context)

    @property
    def needed(self) -> int:
        """t."""
        return self.parameters.needed(len(self.listed.members))

    def taken(self) -> Delivery:
        """The delivery that it took."""
        if self.delivery is None:
            raise Untrusted("the server skipped the delivery of shares")
        return self.delivery


def begin(parameters: MaskingParameters, member: str) -> Knowledge:
    """Fresh keys and a fresh seed for one round."""
    return Knowledge(
        parameters=parameters, member=member, sealing=new_secret(), masking=new_secret(), seed=new_secret()
    )


def advertise(knowledge: Knowledge, identity: Ed25519PrivateKey) -> Advertisement:
    """Phase 0: the public keys, signed by the device's own key."""
    sealing, masking = public_of(knowledge.sealing), public_of(knowledge.masking)
    said = advertised(knowledge.parameters.context, knowledge.member, sealing, masking)
    return Advertisement(
        member=knowledge.member,
        identity=identity.public_key().public_bytes_raw(),
        sealing=sealing,
        masking=masking,
        signature=sign(identity, said),
    )


def check_roster(roster: Roster, parameters: MaskingParameters, trust: Trust) -> None:
    """Raises Untrusted for a roster that is too short or too long, not in order, or with a key not its owner's.

    trust: raises Untrusted if an identity key is not that of the device id which it comes with.
    """
    names = [one.member for one in roster.members]
    if not parameters.minimum <= len(names) <= parameters.most_members:
        raise Untrusted(f"the roster has {len(names)} devices; {parameters.minimum} are the least here")
    keys = {key for one in roster.members for key in (one.sealing, one.masking)}
    identities = {one.identity for one in roster.members}
    if names != sorted(set(names)) or len(identities) < len(names) or len(keys) < 2 * len(names):
        raise Untrusted("the roster has a device or a key twice")
    trust({one.member: one.identity for one in roster.members})
    for one in roster.members:
        check_signature(one.identity, one.signature, one.said(parameters.context), one.member)


def share(knowledge: Knowledge, roster: Roster, trust: Trust) -> Knowledge:
    """Phase 1: shares of the mask key and of the seed, sealed for each other device; in the answer's `said`.

    Raises Untrusted for a roster that `check_roster` refuses or that lacks this device's own keys.
    """
    if knowledge.roster is not None:
        if roster != knowledge.roster:
            raise Untrusted("the server showed a second roster in one round")
        return knowledge
    check_roster(roster, knowledge.parameters, trust)
    mine = [one for one in roster.members if one.member == knowledge.member]
    keys = public_of(knowledge.sealing), public_of(knowledge.masking)
    if [(one.sealing, one.masking) for one in mine] != [keys]:
        raise Untrusted("the roster does not have this device's keys as it advertised them")
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
    said = SealedShares(sealed=sealed, commitment=commitment(knowledge.seed, context))
    return knowledge.model_copy(update={"own": own, "said": said})


def receive(knowledge: Knowledge, delivery: Delivery) -> Knowledge:
    """Phase 2, first half: takes the shares that others sealed, and with them who masks are agreed with.

    Raises Untrusted unless they are of enough members, this device among them.
    """
    if knowledge.delivery is not None:
        if delivery != knowledge.delivery:
            raise Untrusted("the server delivered a second set of shares in one round")
        return knowledge
    count = len(knowledge.listed.members)
    _check_numbers(delivery.shared, range(1, count + 1), knowledge, "shared their secrets")
    if len(delivery.sealed) != len(delivery.shared) * SEALED_BYTES:
        raise Untrusted("the server delivered more or fewer shares than there are devices that sent some")
    return knowledge.model_copy(update={"delivery": delivery})


def mask(knowledge: Knowledge, encoded: Words) -> Words:
    """Phase 2: y = x + PRG(seed) + the sum of +-PRG(agreed key) over all others that shared; `encoded` is not changed.

    The lower number of a pair adds the mask that the higher one takes away. The same knowledge and update make the same
    bytes again.
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
    """Phase 3: a signature over who is in the sum; ever after, no other sum of this round is helped with.

    Raises Untrusted if they are too few, others than shared, or others than were consented to before.
    """
    if knowledge.survivors is not None and knowledge.survivors != survivors:
        raise Untrusted("the server asked for a second sum of one round, from which single updates could be told")
    _check_numbers(survivors, knowledge.taken().shared, knowledge, "are in the sum")
    said = consented(knowledge.transcript, survivors)
    return knowledge.model_copy(update={"survivors": survivors}), Consent(signature=sign(identity, said))


def unmask(knowledge: Knowledge, consents: Consents) -> Unmasking:
    """Phase 4: of each device in the sum its share of the seed, of each other its share of the mask key; never both.

    Raises Untrusted unless enough devices consented to the same sum, or if a needed share does not open.
    """
    survivors, delivery, members = knowledge.survivors, knowledge.taken(), knowledge.listed.numbers()
    context = knowledge.transcript
    if survivors is None:
        raise Untrusted("the server skipped the consents")
    _check_numbers(consents.numbers, survivors, knowledge, "consented")
    if len(consents.signatures) != len(consents.numbers) * SIGNATURE_BYTES:
        raise Untrusted("the server sent more or fewer signatures than consents")
    said = consented(context, survivors)
    for at, number in enumerate(consents.numbers):
        signature = consents.signatures[at * SIGNATURE_BYTES : (at + 1) * SIGNATURE_BYTES]
        check_signature(members[number].identity, signature, said, members[number].member)
    seeds, keys = b"", b""
    for at, number in enumerate(delivery.shared):
        both = _opened(knowledge, context, number, delivery.sealed[at * SEALED_BYTES : (at + 1) * SEALED_BYTES])
        if number in survivors:
            seeds += both[SHARE_BYTES:]
        else:
            keys += both[:SHARE_BYTES]
    return Unmasking(seeds=seeds, keys=keys)


def _opened(knowledge: Knowledge, context: bytes, number: int, sealed: bytes) -> bytes:
    """The two shares that a member made for this device: of its mask key, then of its seed."""
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
        raise Untrusted(f"the server's list of devices that {what} is not in order, or has others than there are")
    if len(numbers) < knowledge.needed:
        raise Untrusted(f"only {len(numbers)} devices {what}; {knowledge.needed} are the least here")
    if knowledge.number not in numbers and what != "consented":
        raise Untrusted(f"this device is not among those that {what}; it helps with no sum that it is not in")
