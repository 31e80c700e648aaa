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

from device_agent.secure_aggregation.participant import InMemoryKnowledge, SecureAggregationParticipant
from shared.canonical import sha256_hex
from shared.errors import Conflict, LeftOutOfRound
from shared.federation.aggregation import Combined
from shared.federation.cohort import CohortSettings
from shared.federation.robust import clip_scale
from shared.federation.secure_aggregation.fixed_point import Words, encode
from shared.federation.secure_aggregation.memory import MemoryStore
from shared.federation.secure_aggregation.messages import (
    Advertisement,
    Consent,
    Phase,
    SealedShares,
    SecureAggregationView,
    Unmasking,
)
from shared.federation.secure_aggregation.session import ORDER, SecureAggregationSession
from shared.federation.secure_aggregation.settings import SecureAggregationParameters
from shared.federation.update import Update
from shared.program import ProgramManifest
from simulation.draws import generator

BEGAN = datetime(2000, 1, 1, tzinfo=UTC)  # start of the simulated clock
PHASE = timedelta(seconds=60)


class RoundServer:
    """A server of one round whose clock jumps to a phase's deadline when no device will answer any more."""

    def __init__(self, parameters: SecureAggregationParameters, expected: int) -> None:
        self.parameters, self.store, self._now, self._expected = parameters, MemoryStore(), BEGAN, expected
        self.store.session.closes_at = BEGAN + PHASE

    @property
    def session(self) -> SecureAggregationSession:
        """The round's current state."""
        return SecureAggregationSession(self.store, self.parameters, PHASE.total_seconds(), self._now)

    def end_phase(self) -> Phase:
        """Returns the next phase, after the deadline if a device is missing."""
        phase = self.store.session.phase
        if self.session.tick(len(self.store.members) < self._expected) is phase:
            self._now += PHASE + timedelta(seconds=1)
            self.session.tick(coming=True)
        return self.store.session.phase


@dataclass
class RoundLink:
    """A device's connection to the server. sent: bytes sent, without HTTP's overhead."""

    server: RoundServer
    member: str
    identity: Ed25519PrivateKey
    sent: int = 0

    def look(self, known: Phase | None) -> SecureAggregationView:
        """Returns the state of the session."""
        return self.server.session.view(self.member, known)

    def advertise(self, advertisement: Advertisement) -> SecureAggregationView:
        """Sends the keys (phase 0)."""
        self.sent += len(advertisement.model_dump_json())
        public = self.identity.public_key().public_bytes_raw()
        self.server.session.advertise(self.member, public, advertisement)
        return self.look(Phase.KEYS)

    def share(self, shares: SealedShares) -> SecureAggregationView:
        """Sends the shares (phase 1)."""
        self.sent += len(shares.model_dump_json())
        self.server.session.share(self.member, shares)
        return self.look(Phase.SHARES)

    def mask(self, vector: bytes) -> SecureAggregationView:
        """Sends the masked vector (phase 2)."""
        self.sent += len(vector)
        self.server.session.masked(self.member, sha256_hex(vector), vector)
        return self.look(Phase.VECTORS)

    def consent(self, consent: Consent) -> SecureAggregationView:
        """Sends the consent (phase 3)."""
        self.sent += len(consent.model_dump_json())
        self.server.session.consent(self.member, consent)
        return self.look(Phase.CONSENTS)

    def unmask(self, unmasking: Unmasking) -> SecureAggregationView:
        """Sends the unmasking (phase 4)."""
        self.sent += len(unmasking.model_dump_json())
        self.server.session.unmask(self.member, unmasking)
        return self.look(Phase.UNMASKING)


@dataclass(frozen=True)
class SecureAggregationRound:
    """The result of a round. bytes_sent: mean per device."""

    combined: Combined | None
    why: str
    bytes_sent: float


def combine_masked(
    cohort: CohortSettings,
    manifest: ProgramManifest,
    number: int,
    staying: Sequence[Update],
    leaving: Sequence[Update],
    seed: int,
) -> SecureAggregationRound:
    """Returns the mean of the updates whose masked vectors arrived.

    leaving: updates of devices that drop out in some phase.
    """
    parameters = _parameters(cohort, manifest, number)
    server = RoundServer(parameters, len(staying) + len(leaving))
    links: list[RoundLink] = []
    parts: dict[str, SecureAggregationParticipant] = {}
    for update in (*staying, *leaving):
        link = RoundLink(server, update.member, Ed25519PrivateKey.generate())
        links.append(link)
        encoded = partial(_encoded, update, cohort, parameters)
        parts[update.member] = SecureAggregationParticipant(
            link, InMemoryKnowledge(), parameters, update.member, link.identity, _trust, encoded
        )
    rng = generator(seed, "masked", number)
    answers = list(takewhile(lambda phase: phase is not Phase.SUMMING, ORDER))
    leaves = {update.member: answers[int(rng.integers(len(answers)))] for update in leaving}
    phase, gone = Phase.KEYS, set[str]()
    while not phase.over and phase is not Phase.SUMMING:
        gone |= {name for name, at in leaves.items() if at is phase}
        for name, part in parts.items():
            if name not in gone:
                _turn(part)
        phase = server.end_phase()
    sent = sum(link.sent for link in links) / len(links)
    if phase is not Phase.SUMMING:
        return SecureAggregationRound(None, server.store.session.why or "the masked round failed", sent)
    total = server.session.total()
    clipped = sum(clip_scale(update.norm, parameters.clip) < 1 for update in staying)
    return SecureAggregationRound(
        Combined(total.mean.astype(np.float32), total.count, float(total.weight), clipped), "", sent
    )


def _trust(*_: object) -> None:
    """Accepts every identity key, because all devices are in this process."""


def _turn(part: SecureAggregationParticipant) -> None:
    try:
        part.advance()
    except (LeftOutOfRound, Conflict):
        return


def _encoded(update: Update, cohort: CohortSettings, parameters: SecureAggregationParameters) -> Words:
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
