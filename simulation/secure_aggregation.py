"""Simulates a secure aggregation round in one process, with drop-outs in any phase.

The protocol is `shared.federation.secure_aggregation` with the agent's participant; only the network is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import takewhile

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_agent.secure_aggregation.participant import DeviceMessage, SecureAggregationParticipant
from shared.canonical import sha256_hex
from shared.errors import Conflict, LeftOutOfRound
from shared.federation.aggregation import AggregationResult
from shared.federation.cohort import CohortSettings
from shared.federation.robust import clip_scale
from shared.federation.secure_aggregation.fixed_point import IntegerVector, encode
from shared.federation.secure_aggregation.memory import MemoryStore
from shared.federation.secure_aggregation.messages import (
    Advertisement,
    Consent,
    Phase,
    SealedShares,
    SecureAggregationView,
    Unmasking,
)
from shared.federation.secure_aggregation.session import PHASE_ORDER, SecureAggregationSession
from shared.federation.secure_aggregation.settings import SecureAggregationParameters
from shared.federation.update import Update
from shared.program import ProgramManifest
from simulation.randomness import generator

CLOCK_START = datetime(2000, 1, 1, tzinfo=UTC)  # start of the simulated clock
PHASE_DURATION = timedelta(seconds=60)


class RoundServer:
    """A server of one round whose clock jumps to a phase's deadline when no device will answer any more."""

    def __init__(self, parameters: SecureAggregationParameters, expected: int) -> None:
        self.parameters, self.store, self._now, self._expected = parameters, MemoryStore(), CLOCK_START, expected
        self.store.session.closes_at = CLOCK_START + PHASE_DURATION

    @property
    def session(self) -> SecureAggregationSession:
        """The round's current state."""
        return SecureAggregationSession(self.store, self.parameters, PHASE_DURATION.total_seconds(), self._now)

    def end_phase(self) -> Phase:
        """Returns the next phase, after the deadline if a device is missing."""
        phase = self.store.session.phase
        if self.session.tick(len(self.store.members) < self._expected) is phase:
            self._now += PHASE_DURATION + timedelta(seconds=1)
            self.session.tick(more_expected=True)
        return self.store.session.phase


@dataclass
class RoundLink:
    """A device's connection to the server. sent: bytes sent, without HTTP's overhead."""

    server: RoundServer
    member: str
    identity: Ed25519PrivateKey
    bytes_sent: int = 0

    def fetch_view(self, known_phase: Phase | None) -> SecureAggregationView:
        """Returns the state of the session."""
        return self.server.session.view(self.member, known_phase)

    def send(self, message: DeviceMessage) -> SecureAggregationView:
        """Sends a message to the session."""
        self.bytes_sent += len(message.model_dump_json())
        return self.fetch_view(deliver(self.server.session, self.member, self.identity, message))

    def mask(self, vector: bytes) -> SecureAggregationView:
        """Sends the masked vector."""
        self.bytes_sent += len(vector)
        self.server.session.submit_vector(self.member, sha256_hex(vector), vector)
        return self.fetch_view(Phase.VECTORS)


def deliver(
    session: SecureAggregationSession, member: str, identity: Ed25519PrivateKey, message: DeviceMessage
) -> Phase:
    """Gives a device's message to the session; returns the message's phase."""
    match message:
        case Advertisement():
            session.advertise(member, identity.public_key().public_bytes_raw(), message)
            return Phase.KEYS
        case SealedShares():
            session.share(member, message)
            return Phase.SHARES
        case Consent():
            session.consent(member, message)
            return Phase.CONSENTS
        case Unmasking():
            session.unmask(member, message)
            return Phase.UNMASKING


@dataclass(frozen=True)
class SecureAggregationRound:
    """The result of a round. bytes_sent: mean per device."""

    combined: AggregationResult | None
    why: str
    bytes_sent: float


def combine_masked(
    cohort: CohortSettings,
    manifest: ProgramManifest,
    number: int,
    remaining: Sequence[Update],
    dropping: Sequence[Update],
    seed: int,
) -> SecureAggregationRound:
    """Returns the mean of the updates whose masked vectors arrived.

    dropping: updates of devices that drop out in some phase.
    """
    parameters = _parameters(cohort, manifest, number)
    server = RoundServer(parameters, len(remaining) + len(dropping))
    links: list[RoundLink] = []
    participants: dict[str, SecureAggregationParticipant] = {}
    for update in (*remaining, *dropping):
        link = RoundLink(server, update.member, Ed25519PrivateKey.generate())
        links.append(link)
        encoded = partial(_encode, update, cohort, parameters)
        participants[update.member] = SecureAggregationParticipant(
            link, None, parameters, update.member, link.identity, _accept_identities, encoded
        )
    rng = generator(seed, "masked", number)
    phases = list(takewhile(lambda phase: phase is not Phase.SUMMING, PHASE_ORDER))
    drop_phases = {update.member: phases[int(rng.integers(len(phases)))] for update in dropping}
    phase, dropped = Phase.KEYS, set[str]()
    while not phase.over and phase is not Phase.SUMMING:
        dropped |= {name for name, drop_phase in drop_phases.items() if drop_phase is phase}
        for name, participant in participants.items():
            if name not in dropped:
                _advance(participant)
        phase = server.end_phase()
    mean_bytes = sum(link.bytes_sent for link in links) / len(links)
    if phase is not Phase.SUMMING:
        return SecureAggregationRound(None, server.store.session.why or "the masked round failed", mean_bytes)
    total = server.session.total()
    clipped = sum(clip_scale(update.norm, parameters.clip) < 1 for update in remaining)
    return SecureAggregationRound(
        AggregationResult(total.mean.astype(np.float32), total.count, float(total.weight), clipped), "", mean_bytes
    )


def _accept_identities(*_: object) -> None:
    """Accepts every identity key, because all devices are in this process."""


def _advance(participant: SecureAggregationParticipant) -> None:
    try:
        participant.advance()
    except (LeftOutOfRound, Conflict):
        return


def _encode(update: Update, cohort: CohortSettings, parameters: SecureAggregationParameters) -> IntegerVector:
    weight = min(max(update.examples, 1), cohort.most_examples) if cohort.weights == "examples" else 1
    return encode(update.flat, weight, parameters)


def _parameters(cohort: CohortSettings, manifest: ProgramManifest, number: int) -> SecureAggregationParameters:
    masking = cohort.masking
    if masking is None or cohort.aggregator.clip_norm is None:
        raise ValueError("a masked round requires the cohort's masking and clip_norm")
    return SecureAggregationParameters(
        cohort=cohort.name,
        round=number,
        start_sha256=None,
        recipe_id=manifest.recipe_id,
        size=manifest.size,
        clip=cohort.aggregator.clip_norm,
        most_weight=cohort.most_weight,
        most_members=masking.most_members,
        minimum=masking.minimum,
        threshold=masking.threshold,
        bits=masking.bits,
    )
