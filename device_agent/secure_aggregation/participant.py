"""This device's part in a secure aggregation round, in which the server learns only the sum of the updates.

The device answers phase by phase (shared.federation.secure_aggregation.device) over a transport. Its state is stored
before each message is sent, so that it resumes after a restart. Without its state it leaves the round, because
repeating a phase with other values would be unsafe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import RootModel

from device_agent.durable import read_document, write_document
from shared.errors import LeftOutOfRound, Untrusted
from shared.federation.secure_aggregation import device
from shared.federation.secure_aggregation.device import DeviceRoundState, IdentityCheck
from shared.federation.secure_aggregation.fixed_point import IntegerVector
from shared.federation.secure_aggregation.messages import (
    Advertisement,
    Consent,
    Phase,
    SealedShares,
    SecureAggregationView,
    Unmasking,
)
from shared.federation.secure_aggregation.settings import SecureAggregationParameters

DeviceMessage = Advertisement | SealedShares | Consent | Unmasking


class SecureAggregationTransport(Protocol):
    """The connection to the server's half; each method returns the round's new state."""

    def fetch_view(self, known_phase: Phase | None) -> SecureAggregationView:
        """Returns the round's state, without the data of `known_phase`."""

    def send(self, message: DeviceMessage) -> SecureAggregationView:
        """Sends this device's message of a phase."""

    def mask(self, vector: bytes) -> SecureAggregationView:
        """Sends the masked update."""


class SecureAggregationParticipant:
    """One device in one masked round, from the key exchange to unmasking."""

    def __init__(
        self,
        transport: SecureAggregationTransport,
        state_file: Path | None,
        parameters: SecureAggregationParameters,
        member: str,
        identity: Ed25519PrivateKey,
        check_identity: IdentityCheck,
        encode: Callable[[], IntegerVector],
    ) -> None:
        """state_file: private, since the state contains this device's mask keys; None: this process runs the whole
        round. member: this device's id. identity: its own key. check_identity: raises Untrusted for a changed key of
        another device. Raises LeftOutOfRound if the file is damaged.

        encode: returns this device's update as `shared.federation.secure_aggregation.fixed_point.encode` does, equal
        at every call.
        """
        self._transport, self._state_file, self._parameters = transport, state_file, parameters
        self._member, self._identity, self._check_identity, self._encode = member, identity, check_identity, encode
        self._state: DeviceRoundState | None = None
        if state_file is not None:
            damaged = LeftOutOfRound(f"{state_file} is damaged; this device leaves the masked round")
            self._state = read_document(state_file, DeviceRoundState, damaged)
        self._answered_phase: Phase | None = None
        self._advertised = False

    def advance(self) -> bool:
        """Polls once and answers if the server waits for this device. Returns whether the update has been counted.

        Raises LeftOutOfRound if the round fails or continues without this device, Untrusted if a request of the server
        would reveal the update; the state is deleted in both cases.
        """
        try:
            return self._advance()
        except (LeftOutOfRound, Untrusted):
            self._remove_state()
            raise

    def _advance(self) -> bool:
        if self._state is None:
            self._update(device.begin_round(self._parameters, self._member))
        if self._current.parameters != self._parameters:
            raise Untrusted("the server changed the masked round's parameters during the round")
        view = self._transport.fetch_view(self._answered_phase)
        if view.phase is Phase.KEYS and not self._advertised:
            # The server may have this device's keys already, but an agent that lost its state may have sent them.
            view = self._transport.send(device.advertise(self._current, self._identity))
            self._advertised = True
        while not view.waits and view.phase is not self._answered_phase and not view.phase.over:
            answering = view.phase
            view = self._answer(view)
            self._answered_phase = answering
        return self._is_done(view)

    def _answer(self, view: SecureAggregationView) -> SecureAggregationView:
        if view.phase is Phase.SHARES and view.roster is not None:
            state = self._update(device.share(self._current, view.roster, self._check_identity))
            if state.sealed_shares is not None:
                return self._transport.send(state.sealed_shares)
        if view.phase is Phase.VECTORS and view.delivery is not None:
            state = self._update(device.receive(self._current, view.delivery))
            return self._transport.mask(device.mask(state, self._encode()).tobytes())
        if view.phase is Phase.CONSENTS and view.survivors is not None:
            state, consent = device.consent(self._current, view.survivors, self._identity)
            self._update(state)
            return self._transport.send(consent)
        if view.phase is Phase.UNMASKING and view.consents is not None:
            return self._transport.send(device.unmask(self._current, view.consents))
        raise Untrusted(f"the server requests an answer in phase {view.phase} without the data for it")

    def _is_done(self, view: SecureAggregationView) -> bool:
        if view.phase is Phase.FAILED or view.why is not None:
            raise LeftOutOfRound(view.why or "the masked round failed")
        if view.phase.over:
            self._remove_state()
            return True
        return False

    def _remove_state(self) -> None:
        if self._state_file is not None:
            self._state_file.unlink(missing_ok=True)

    @property
    def _current(self) -> DeviceRoundState:
        if self._state is None:
            raise LeftOutOfRound("this device has left the masked round")
        return self._state

    def _update(self, state: DeviceRoundState) -> DeviceRoundState:
        if state != self._state:
            if self._state_file is not None:
                write_document(self._state_file, state)
            self._state = state
        return state


_Keys = RootModel[dict[str, str]]  # Ed25519 public keys by device id, in hexadecimal


def trust_keys(path: Path, members: Mapping[str, bytes]) -> None:
    """Records devices' public keys, all or none. Raises Untrusted if a different key was recorded before.

    path: the file of other devices' keys, which are trusted on first use. A device that enrolls again gets a new id, so
    the key of an id never changes. A server that substitutes a key is therefore detected by every device that has met
    the id before.
    """
    # Treating a damaged file as empty would trust every key.
    damaged = Untrusted(f"{path} cannot be read; remove it to trust other devices anew")
    recorded_keys = (read_document(path, _Keys, damaged) or _Keys({})).root
    presented = {member: identity.hex() for member, identity in members.items()}
    for member, key in presented.items():
        if recorded_keys.get(member, key) != key:
            raise Untrusted(
                f"the server presents another key for device {member} than before, and could read messages to that "
                "device; this device does not take part"
            )
    if presented.keys() - recorded_keys.keys():
        write_document(path, _Keys(recorded_keys | presented))
