"""The device's half of each phase, as functions of its state (`DeviceRoundState`) and the server's messages.

The caller must store the state before it sends a message, so that after a crash the device sends the same message
again. A device that sent two different messages in one round could be made to reveal both shares of one secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shared.errors import Untrusted
from shared.federation.secure_aggregation.fixed_point import IntegerVector
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
    advertisement_bytes,
    consent_bytes,
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
from shared.strict_model import StrictModel

SEALING, MASKING = b"sealing", b"masking"
IdentityCheck = Callable[[Mapping[str, bytes]], None]


class DeviceRoundState(StrictModel):
    """The secret state of one device in one round.

    sealing, masking: X25519 private keys. seed: of its own mask. own_shares: its shares of its own two secrets.
    sealed_shares: its message in the phase SHARES. delivery, survivors: the server's messages, of which it accepts no
    second version.
    """

    parameters: SecureAggregationParameters
    member: str
    sealing: Key
    masking: Key
    seed: Key
    roster: Roster | None = None
    own_shares: Base64 = b""
    sealed_shares: SealedShares | None = None
    delivery: Delivery | None = None
    survivors: tuple[int, ...] | None = None

    @property
    def number(self) -> int:
        """The device's number on the roster."""
        return next(
            number
            for number, advertisement in self.accepted_roster.numbers().items()
            if advertisement.member == self.member
        )

    @property
    def accepted_roster(self) -> Roster:
        """The accepted roster. Raises Untrusted if there is none."""
        if self.roster is None:
            raise Untrusted("the server skipped the roster")
        return self.roster

    @property
    def transcript(self) -> bytes:
        """The transcript of parameters and roster, 32 bytes."""
        return self.accepted_roster.transcript(self.parameters.context)

    @property
    def required_devices(self) -> int:
        """Shamir threshold t: the number of shares needed to reconstruct a secret."""
        return self.parameters.required_devices(len(self.accepted_roster.members))

    def accepted_delivery(self) -> Delivery:
        """Returns the accepted delivery. Raises Untrusted if there is none."""
        if self.delivery is None:
            raise Untrusted("the server skipped the delivery of shares")
        return self.delivery


def begin_round(parameters: SecureAggregationParameters, member: str) -> DeviceRoundState:
    """Returns the state of a new round, with new keys and a new seed."""
    return DeviceRoundState(
        parameters=parameters, member=member, sealing=new_secret(), masking=new_secret(), seed=new_secret()
    )


def advertise(state: DeviceRoundState, identity: Ed25519PrivateKey) -> Advertisement:
    """Phase 0: returns the public keys, signed by the device's identity key."""
    sealing, masking = public_of(state.sealing), public_of(state.masking)
    message = advertisement_bytes(state.parameters.context, state.member, sealing, masking)
    return Advertisement(
        member=state.member,
        identity=identity.public_key().public_bytes_raw(),
        sealing=sealing,
        masking=masking,
        signature=sign(identity, message),
    )


def check_roster(roster: Roster, parameters: SecureAggregationParameters, check_identities: IdentityCheck) -> None:
    """Raises Untrusted for a roster with too few or too many devices, in the wrong order, or with an invalid key.

    check_identities: raises Untrusted if an identity key does not belong to the device id that it comes with.
    """
    names = [advertisement.member for advertisement in roster.members]
    if not parameters.minimum <= len(names) <= parameters.most_members:
        raise Untrusted(f"the roster has {len(names)} devices; at least {parameters.minimum} are required")
    keys = {key for advertisement in roster.members for key in (advertisement.sealing, advertisement.masking)}
    identities = {advertisement.identity for advertisement in roster.members}
    if names != sorted(set(names)) or len(identities) < len(names) or len(keys) < 2 * len(names):
        raise Untrusted("the roster contains a device or a key twice")
    check_identities({advertisement.member: advertisement.identity for advertisement in roster.members})
    for advertisement in roster.members:
        check_signature(
            advertisement.identity,
            advertisement.signature,
            advertisement.signed_bytes(parameters.context),
            advertisement.member,
        )


def share(state: DeviceRoundState, roster: Roster, check_identities: IdentityCheck) -> DeviceRoundState:
    """Phase 1: seals shares of the mask key and the seed for each other device.

    They are in the returned state's `sealed_shares`.

    Raises Untrusted for a roster that `check_roster` rejects or that lacks this device's own keys.
    """
    if state.roster is not None:
        if roster != state.roster:
            raise Untrusted("the server sent a second roster in one round")
        return state
    check_roster(roster, state.parameters, check_identities)
    own_advertisements = [advertisement for advertisement in roster.members if advertisement.member == state.member]
    keys = public_of(state.sealing), public_of(state.masking)
    if [(advertisement.sealing, advertisement.masking) for advertisement in own_advertisements] != [keys]:
        raise Untrusted("the roster does not contain the keys that this device advertised")
    state = state.model_copy(update={"roster": roster})
    context, number, count = state.transcript, state.number, len(roster.members)
    share_pairs = zip(
        split(state.masking, state.required_devices, count),
        split(state.seed, state.required_devices, count),
        strict=True,
    )
    sealed, own_shares = b"", b""
    for (recipient, advertisement), (key_share, seed_share) in zip(roster.numbers().items(), share_pairs, strict=True):
        if recipient == number:
            own_shares = key_share + seed_share
            sealed += bytes(SEALED_BYTES)
            continue
        key = agree(state.sealing, advertisement.sealing, SEALING, context)
        sealed += seal(key, key_share + seed_share, _associated_data(number, recipient))
    sealed_shares = SealedShares(sealed=sealed, commitment=commitment(state.seed, context))
    return state.model_copy(update={"own_shares": own_shares, "sealed_shares": sealed_shares})


def receive(state: DeviceRoundState, delivery: Delivery) -> DeviceRoundState:
    """Phase 2, first half: accepts the sealed shares of the other devices, with which masks will be agreed.

    Raises Untrusted unless there are enough of them, this device's included.
    """
    if state.delivery is not None:
        if delivery != state.delivery:
            raise Untrusted("the server delivered a second set of shares in one round")
        return state
    count = len(state.accepted_roster.members)
    _check_numbers(delivery.shared, range(1, count + 1), state, "shared their secrets")
    if len(delivery.sealed) != len(delivery.shared) * SEALED_BYTES:
        raise Untrusted("the number of delivered shares does not match the number of devices that sent shares")
    return state.model_copy(update={"delivery": delivery})


def mask(state: DeviceRoundState, encoded: IntegerVector) -> IntegerVector:
    """Phase 2: returns y = x + PRG(seed) + the sum of +-PRG(agreed key) over all other devices that shared.

    The lower number of a pair adds the mask that the higher one subtracts. Equal state and update give equal bytes.
    `encoded` is not changed.
    """
    vector = encoded.copy()
    number, context, members = state.number, state.transcript, state.accepted_roster.numbers()
    add_mask(vector, state.seed, 1)
    for sender in state.accepted_delivery().shared:
        if sender != number:
            key = agree(state.masking, members[sender].masking, MASKING, context)
            add_mask(vector, key, 1 if number < sender else -1)
    return vector


def consent(
    state: DeviceRoundState, survivors: tuple[int, ...], identity: Ed25519PrivateKey
) -> tuple[DeviceRoundState, Consent]:
    """Phase 3: signs the list of devices in the sum. The device then supports no other sum of this round.

    Raises Untrusted if they are too few, include devices that did not share, or differ from an earlier list.
    """
    if state.survivors is not None and state.survivors != survivors:
        raise Untrusted("the server requested a second sum of one round, which could reveal single updates")
    _check_numbers(survivors, state.accepted_delivery().shared, state, "are in the sum")
    message = consent_bytes(state.transcript, survivors)
    return state.model_copy(update={"survivors": survivors}), Consent(signature=sign(identity, message))


def unmask(state: DeviceRoundState, consents: Consents) -> Unmasking:
    """Phase 4: returns the shares of the seeds of devices in the sum, and of the mask keys of all others; never both.

    Raises Untrusted unless enough devices consented to the same sum, or if a needed share cannot be decrypted.
    """
    survivors, delivery, members = state.survivors, state.accepted_delivery(), state.accepted_roster.numbers()
    context = state.transcript
    if survivors is None:
        raise Untrusted("the server skipped the consents")
    _check_numbers(consents.numbers, survivors, state, "consented")
    if len(consents.signatures) != len(consents.numbers) * SIGNATURE_BYTES:
        raise Untrusted("the number of signatures does not match the number of consents")
    message = consent_bytes(context, survivors)
    for index, number in enumerate(consents.numbers):
        signature = consents.signatures[index * SIGNATURE_BYTES : (index + 1) * SIGNATURE_BYTES]
        check_signature(members[number].identity, signature, message, members[number].member)
    seeds, keys = b"", b""
    for index, number in enumerate(delivery.shared):
        shares = _open_shares(
            state, context, number, delivery.sealed[index * SEALED_BYTES : (index + 1) * SEALED_BYTES]
        )
        if number in survivors:
            seeds += shares[SHARE_BYTES:]
        else:
            keys += shares[:SHARE_BYTES]
    return Unmasking(seeds=seeds, keys=keys)


def _open_shares(state: DeviceRoundState, context: bytes, number: int, sealed: bytes) -> bytes:
    """Returns the two shares that a member made for this device: of its mask key, then of its seed."""
    own_number = state.number
    if number == own_number:
        return state.own_shares
    sender = state.accepted_roster.numbers()[number]
    key = agree(state.sealing, sender.sealing, SEALING, context)
    return unseal(key, sealed, _associated_data(number, own_number))


def _associated_data(sender: int, recipient: int) -> bytes:
    return f"{sender} to {recipient}".encode()


def _check_numbers(
    numbers: tuple[int, ...], allowed: range | tuple[int, ...], state: DeviceRoundState, description: str
) -> None:
    if list(numbers) != sorted(set(numbers)) or not set(numbers) <= set(allowed):
        raise Untrusted(f"the server's list of devices that {description} is out of order or contains unknown devices")
    if len(numbers) < state.required_devices:
        raise Untrusted(f"only {len(numbers)} devices {description}; at least {state.required_devices} are required")
    if state.number not in numbers and description != "consented":
        raise Untrusted(
            f"this device is not among the devices that {description}; it supports only sums that "
            "include its own update"
        )
