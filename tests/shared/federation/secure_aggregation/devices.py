"""Real device halves over a session in memory, as many as a test asks for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_agent.secure_aggregation.participant import InMemoryKnowledge, SecureAggregationParticipant
from shared.canonical import sha256_hex
from shared.errors import LeftOutOfRound
from shared.federation.secure_aggregation.fixed_point import encode
from shared.federation.secure_aggregation.memory import MemoryStore
from shared.federation.secure_aggregation.messages import Phase
from shared.federation.secure_aggregation.session import SecureAggregationSession
from tests.shared.federation.secure_aggregation.test_settings import parameters

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
PHASE_SECONDS = 60.0


class Server:
    """One masked round at a server whose clock a test moves."""

    def __init__(self, chosen, expected):
        self.parameters, self.store, self.now = chosen, MemoryStore(), BEGAN
        self.store.session.closes_at = BEGAN + timedelta(seconds=PHASE_SECONDS)
        self.expected = set(expected)

    @property
    def session(self):
        return SecureAggregationSession(self.store, self.parameters, PHASE_SECONDS, self.now)

    @property
    def phase(self):
        return self.store.session.phase

    def tick(self, gone=()):
        coming = self.expected - set(self.store.members) - set(gone)
        return self.session.tick(bool(coming), gone=gone)

    def pass_deadline(self):
        self.now += timedelta(seconds=PHASE_SECONDS + 1)
        return self.tick()


class Link:
    """A device's transport into a server of this process; `sent` is what it said, by phase."""

    def __init__(self, server, member, identity):
        self.server, self.member, self.identity, self.sent = server, member, identity, {}

    def look(self, known):
        return self.server.session.view(self.member, known)

    def advertise(self, advertisement):
        self.sent[Phase.KEYS] = advertisement
        public = self.identity.public_key().public_bytes_raw()
        self.server.session.advertise(self.member, public, advertisement)
        return self.look(Phase.KEYS)

    def share(self, shares):
        self.sent[Phase.SHARES] = shares
        self.server.session.share(self.member, shares)
        return self.look(Phase.SHARES)

    def mask(self, vector):
        self.sent[Phase.VECTORS] = vector
        self.server.session.masked(self.member, sha256_hex(vector), vector)
        return self.look(Phase.VECTORS)

    def consent(self, consent):
        self.sent[Phase.CONSENTS] = consent
        self.server.session.consent(self.member, consent)
        return self.look(Phase.CONSENTS)

    def unmask(self, unmasking):
        self.sent[Phase.UNMASKING] = unmasking
        self.server.session.unmask(self.member, unmasking)
        return self.look(Phase.UNMASKING)


class Device:
    """One member with its update and weight."""

    def __init__(self, server, member, update, weight, trust=lambda members: None):
        self.member, self.update, self.weight = member, update, weight
        self.identity = Ed25519PrivateKey.generate()
        self.link = Link(server, member, self.identity)
        self.notebook, self.trust, self.server = InMemoryKnowledge(), trust, server
        self.restart()

    def restart(self):
        """A new process, which knows what the notebook kept."""
        self.part = SecureAggregationParticipant(
            self.link,
            self.notebook,
            self.server.parameters,
            self.member,
            self.identity,
            self.trust,
            lambda: encode(self.update, self.weight, self.server.parameters),
        )


class Round:
    """A server and its devices, whose updates come from a seed."""

    def __init__(self, count, seed=0, **changes):
        chosen = parameters(**{"size": 5, "most_members": max(count, 3), "most_weight": 9} | changes)
        chance = np.random.default_rng(seed)
        names = [f"device-{at:03}" for at in range(count)]
        self.server = Server(chosen, names)
        self.devices = {}
        for name in names:
            update = (chance.standard_normal(chosen.size) * 0.4).astype(np.float32)
            weight = int(chance.integers(1, chosen.most_weight + 1))
            self.devices[name] = Device(self.server, name, update, weight)

    def turn(self, without=()):
        """Every device's turn once, but for those named; who is out stays out."""
        for name, device in self.devices.items():
            if name not in without:
                try:
                    device.part.advance()
                except LeftOutOfRound:
                    continue

    def run_to_end(self, absent):
        """All phases. absent: for each phase the members that are there no more from then on."""
        away = set()
        while not self.server.phase.over:
            phase = self.server.phase
            away |= set(absent.get(phase, ()))
            self.turn(away)
            if self.server.tick() is phase:
                self.server.pass_deadline()
        return self.server.phase

    def true_sum(self, names):
        """Sum of the integers that these devices encoded, modulo 2^bits, (D + 1,)."""
        words = [encode(self.devices[name].update, self.devices[name].weight, self.server.parameters) for name in names]
        return np.sum(words, axis=0, dtype=words[0].dtype)
