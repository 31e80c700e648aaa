"""This device's part in a masked round: its trained update goes into a sum, and nobody sees it alone.

The device answers phase after phase (shared.masking.device) over a transport: the server's routes, or a session in
memory. What it knows is on disk before what it says is sent, so that it goes on after a restart; without that file it
is out of the round, as it may not say anything twice in two ways. Knows no training and no lease.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError

from device_agent.durable import write_durably
from shared.errors import MaskingOut, Untrusted
from shared.masking import device
from shared.masking.device import Knowledge, Trust
from shared.masking.fixed_point import Words
from shared.masking.messages import (
    Advertisement,
    Consent,
    MaskingView,
    Phase,
    SealedShares,
    Unmasking,
)
from shared.masking.settings import MaskingParameters


class MaskingTransport(Protocol):
    """The way to the server's half; each answer is how the round stands after it."""

    def look(self, known: Phase | None) -> MaskingView:
        """How it stands; what the phase gives to work with, unless `known` is that phase."""

    def advertise(self, advertisement: Advertisement) -> MaskingView:
        """Phase 0."""

    def share(self, shares: SealedShares) -> MaskingView:
        """Phase 1."""

    def mask(self, vector: bytes) -> MaskingView:
        """Phase 2."""

    def consent(self, consent: Consent) -> MaskingView:
        """Phase 3."""

    def unmask(self, unmasking: Unmasking) -> MaskingView:
        """Phase 4."""


class Notebook(Protocol):
    """Where a device keeps what it knows of one round."""

    def read(self) -> Knowledge | None:
        """What was kept."""

    def write(self, knowledge: Knowledge) -> None:
        """Keeps it in place of what was."""

    def remove(self) -> None:
        """Forgets it."""


class MemoryNotebook:
    """A `Notebook` that does not outlive its process."""

    def __init__(self) -> None:
        self._knowledge: Knowledge | None = None

    def read(self) -> Knowledge | None:
        """What was kept."""
        return self._knowledge

    def write(self, knowledge: Knowledge) -> None:
        """Keeps it in place of what was."""
        self._knowledge = knowledge

    def remove(self) -> None:
        """Forgets it."""
        self._knowledge = None


@dataclass(frozen=True)
class FileNotebook:
    """A `Notebook` in a file that this user alone may read: it holds the keys to this device's own mask."""

    path: Path

    def read(self) -> Knowledge | None:
        """What was kept. Raises MaskingOut for a file that is damaged."""
        try:
            return Knowledge.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise MaskingOut(f"{self.path} is damaged, and with it this device's part in the masked round") from error

    def write(self, knowledge: Knowledge) -> None:
        """Keeps it in place of what was, on disk before this returns."""
        write_durably(self.path, knowledge.model_dump_json().encode())

    def remove(self) -> None:
        """Forgets it."""
        self.path.unlink(missing_ok=True)


class MaskedPart:
    """One device in one masked round, from its keys to the shares that unmask the sum."""

    def __init__(
        self,
        transport: MaskingTransport,
        notebook: Notebook,
        parameters: MaskingParameters,
        member: str,
        identity: Ed25519PrivateKey,
        trust: Trust,
        encoded: Callable[[], Words],
    ) -> None:
        """member: this device's id. identity: its own key. trust: raises Untrusted for another device's changed key.

        encoded: this device's update as `shared.masking.fixed_point.encode` makes it, the same at every call.
        """
        self._transport, self._notebook, self._parameters = transport, notebook, parameters
        self._member, self._identity, self._trust, self._encoded = member, identity, trust, encoded
        self._knowledge = notebook.read()
        self._answered: Phase | None = None
        self._advertised = False

    def turn(self) -> bool:
        """Looks once, and answers if the server waits for this device; whether its part is done, its update counted.

        Raises MaskingOut when the round fails or goes on without this device, Untrusted when the server asks for what
        would give the update away; in both cases nothing more is said, and what was known is forgotten.
        """
        try:
            return self._turn()
        except (MaskingOut, Untrusted):
            self._notebook.remove()
            raise

    def _turn(self) -> bool:
        if self._knowledge is None:
            self._keep(device.begin(self._parameters, self._member))
        if self._known.parameters != self._parameters:
            raise Untrusted("the server changed the masked round's parameters while it went on")
        view = self._transport.look(self._answered)
        if view.phase is Phase.KEYS and not self._advertised:
            # Even where the server has keys of this device: they may be of an agent that lost what it knew.
            view = self._transport.advertise(device.advertise(self._known, self._identity))
            self._advertised = True
        while not view.waits and view.phase is not self._answered and not view.phase.over:
            answering = view.phase
            view = self._answer(view)
            self._answered = answering
        return self._is_done(view)

    def _answer(self, view: MaskingView) -> MaskingView:
        if view.phase is Phase.SHARES and view.roster is not None:
            knowledge = self._keep(device.share(self._known, view.roster, self._trust))
            if knowledge.said is not None:
                return self._transport.share(knowledge.said)
        if view.phase is Phase.VECTORS and view.delivery is not None:
            knowledge = self._keep(device.receive(self._known, view.delivery))
            return self._transport.mask(device.mask(knowledge, self._encoded()).tobytes())
        if view.phase is Phase.CONSENTS and view.survivors is not None:
            knowledge, consent = device.consent(self._known, view.survivors, self._identity)
            self._keep(knowledge)
            return self._transport.consent(consent)
        if view.phase is Phase.UNMASKING and view.consents is not None:
            return self._transport.unmask(device.unmask(self._known, view.consents))
        raise Untrusted(f"the server waits in phase {view.phase} without saying for what")

    def _is_done(self, view: MaskingView) -> bool:
        if view.phase is Phase.FAILED or view.why is not None:
            raise MaskingOut(view.why or "the masked round failed")
        if view.phase.over:
            self._notebook.remove()
            return True
        return False

    @property
    def _known(self) -> Knowledge:
        if self._knowledge is None:
            raise MaskingOut("this device's part in the masked round is over")
        return self._knowledge

    def _keep(self, knowledge: Knowledge) -> Knowledge:
        if knowledge != self._knowledge:
            self._notebook.write(knowledge)
            self._knowledge = knowledge
        return knowledge
