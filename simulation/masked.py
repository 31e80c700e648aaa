"""A masked round in this process: every device's half and the server's half, with drop-outs in any phase.

The protocol is `shared.masking` and the agent's part in it; only the way between them is short. Knows no training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import takewhile

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_agent.masking import MaskedPart, MemoryNotebook
from shared.canonical import sha256_hex
from shared.cohort import CohortSettings
from shared.errors import Conflict, MaskingOut
from shared.federation.aggregation import Combined
from shared.federation.robust import clip_scale
from shared.federation.update import Update
from shared.masking.fixed_point import Words, encode
from shared.masking.memory import MemoryStore
from shared.masking.messages import Advertisement, Consent, MaskingView, Phase, SealedShares, Unmasking
from shared.masking.session import ORDER, MaskingSession
from shared.masking.settings import MaskingParameters
from shared.program import ProgramManifest
from simulation.draws import generator

BEGAN = datetime(2000, 1, 1, tzinfo=UTC)  # by the round's own clock
PHASE = timedelta(seconds=60)


class _Server:
    """One masked round at a server whose clock jumps to a phase's deadline when nobody is left to answer."""

    def __init__(self, parameters: MaskingParameters, expected: int) -> None:
        self.parameters, self.store, self._now, self._expected = parameters, MemoryStore(), BEGAN, expected
        self.store.session.closes_at = BEGAN + PHASE

    @property
    def session(self) -> MaskingSession:
        """Its state now."""
        return MaskingSession(self.store, self.parameters, PHASE.total_seconds(), self._now)

    def end_phase(self) -> Phase:
        """The next phase, at the deadline if somebody is missing."""
        phase = self.store.session.phase
        if self.session.tick(len(self.store.members) < self._expected) is phase:
            self._now += PHASE + timedelta(seconds=1)
            self.session.tick(coming=True)
        return self.store.session.phase


@dataclass
class _Link:
    """A device's way to that server. sent: bytes that it has sent as the wire has them, without HTTP's own."""

    server: _Server
    member: str
    identity: Ed25519PrivateKey
    sent: int = 0

    def look(self, known: Phase | None) -> MaskingView:
        return self.server.session.view(self.member, known)

    def advertise(self, advertisement: Advertisement) -> MaskingView:
        self.sent += len(advertisement.model_dump_json())
        public = self.identity.public_key().public_bytes_raw()
        self.server.session.advertise(self.member, public, advertisement)
        return self.look(Phase.KEYS)

    def share(self, shares: SealedShares) -> MaskingView:
        self.sent += len(shares.model_dump_json())
        self.server.session.share(self.member, shares)
        return self.look(Phase.SHARES)

    def mask(self, vector: bytes) -> MaskingView:
        self.sent += len(vector)
        self.server.session.masked(self.member, sha256_hex(vector), vector)
        return self.look(Phase.VECTORS)

    def consent(self, consent: Consent) -> MaskingView:
        self.sent += len(consent.model_dump_json())
        self.server.session.consent(self.member, consent)
        return self.look(Phase.CONSENTS)

    def unmask(self, unmasking: Unmasking) -> MaskingView:
        self.sent += len(unmasking.model_dump_json())
        self.server.session.unmask(self.member, unmasking)
        return self.look(Phase.UNMASKING)


@dataclass(frozen=True)
class MaskedRound:
    """What came of it. bytes_sent: by a device, on average."""

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
) -> MaskedRound:
    """The mean of the updates whose masked vectors arrived. leaving: of devices that drop out, each in some phase."""
    parameters = _parameters(cohort, manifest, number)
    server = _Server(parameters, len(staying) + len(leaving))
    links: list[_Link] = []
    parts: dict[str, MaskedPart] = {}
    for update in (*staying, *leaving):
        link = _Link(server, update.member, Ed25519PrivateKey.generate())
        links.append(link)
        encoded = partial(_encoded, update, cohort, parameters)
        parts[update.member] = MaskedPart(
            link, MemoryNotebook(), parameters, update.member, link.identity, _trust, encoded
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
        return MaskedRound(None, server.store.session.why or "the masked round failed", sent)
    total = server.session.total()
    clipped = sum(clip_scale(update.norm, parameters.clip) < 1 for update in staying)
    return MaskedRound(Combined(total.mean.astype(np.float32), total.count, float(total.weight), clipped), "", sent)


def _trust(*_: object) -> None:
    """Whoever the server says is a device is one: there is nobody else in this process."""


def _turn(part: MaskedPart) -> None:
    try:
        part.turn()
    except (MaskingOut, Conflict):
        return


def _encoded(update: Update, cohort: CohortSettings, parameters: MaskingParameters) -> Words:
    weight = min(max(update.examples, 1), cohort.most_examples) if cohort.weights == "examples" else 1
    return encode(update.flat, weight, parameters)


def _parameters(cohort: CohortSettings, manifest: ProgramManifest, number: int) -> MaskingParameters:
    masking = cohort.masking
    if masking is None or cohort.aggregator.clip_norm is None:
        raise ValueError("a masked round needs the cohort's masking and clip_norm")
    return MaskingParameters(
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
