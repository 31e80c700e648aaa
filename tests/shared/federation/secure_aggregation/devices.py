"""The device half of secure aggregation over an in-memory session, for any number of devices."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_agent.secure_aggregation.participant import SecureAggregationParticipant
from shared.canonical import sha256_hex
from shared.errors import LeftOutOfRound
from shared.federation.secure_aggregation.device import DeviceRoundState
from shared.federation.secure_aggregation.fixed_point import encode
from shared.federation.secure_aggregation.memory import MemoryStore
from shared.federation.secure_aggregation.messages import Phase
from shared.federation.secure_aggregation.session import SecureAggregationSession
from simulation.secure_aggregation import deliver
from tests.shared.federation.secure_aggregation.test_settings import parameters

CLOCK_START = datetime(2026, 1, 1, tzinfo=UTC)
PHASE_SECONDS = 60.0


class Server:
    """The server of one masked round, with a clock that tests advance."""

    def __init__(self, round_parameters, expected):
        self.parameters, self.store, self.now = round_parameters, MemoryStore(), CLOCK_START
        self.store.session.closes_at = CLOCK_START + timedelta(seconds=PHASE_SECONDS)
        self.expected = set(expected)

    @property
    def session(self):
        return SecureAggregationSession(self.store, self.parameters, PHASE_SECONDS, self.now)

    @property
    def phase(self):
        return self.store.session.phase

    def tick(self, unreachable=()):
        missing = self.expected - set(self.store.members) - set(unreachable)
        return self.session.tick(bool(missing), unreachable=unreachable)

    def pass_deadline(self):
        self.now += timedelta(seconds=PHASE_SECONDS + 1)
        return self.tick()


class Link:
    """A device's transport to a server in this process. sent_messages: the device's message of each phase."""

    def __init__(self, server, member, identity):
        self.server, self.member, self.identity, self.sent_messages = server, member, identity, {}

    def fetch_view(self, known):
        return self.server.session.view(self.member, known)

    def send(self, message):
        phase = deliver(self.server.session, self.member, self.identity, message)
        self.sent_messages[phase] = message
        return self.fetch_view(phase)

    def mask(self, vector):
        self.sent_messages[Phase.VECTORS] = vector
        self.server.session.submit_vector(self.member, sha256_hex(vector), vector)
        return self.fetch_view(Phase.VECTORS)


class Device:
    """A member with its update and weight."""

    def __init__(self, server, member, update, weight, state_file):
        self.member, self.update, self.weight = member, update, weight
        self.identity = Ed25519PrivateKey.generate()
        self.link = Link(server, member, self.identity)
        self.state_file, self.server = state_file, server
        self.restart()

    def restart(self):
        """Replaces the participant by a new one that reads the stored state."""
        self.participant = SecureAggregationParticipant(
            self.link,
            self.state_file,
            self.server.parameters,
            self.member,
            self.identity,
            lambda members: None,
            lambda: encode(self.update, self.weight, self.server.parameters),
        )

    def stored_state(self):
        """Returns the state on disk, or None."""
        return DeviceRoundState.model_validate_json(self.state_file.read_bytes()) if self.state_file.exists() else None


class Round:
    """A server and its devices, with updates drawn from a seed."""

    def __init__(self, count, seed=0, **changes):
        round_parameters = parameters(**{"size": 5, "most_members": max(count, 3), "most_weight": 9} | changes)
        rng = np.random.default_rng(seed)
        names = [f"device-{index:03}" for index in range(count)]
        self.server = Server(round_parameters, names)
        self.devices = {}
        directory = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, directory)
        for name in names:
            update = (rng.standard_normal(round_parameters.size) * 0.4).astype(np.float32)
            weight = int(rng.integers(1, round_parameters.most_weight + 1))
            self.devices[name] = Device(self.server, name, update, weight, directory / f"{name}.json")

    def run_turn(self, absent=()):
        """Lets every device except the absent ones advance once. Excluded devices stay excluded."""
        for name, device in self.devices.items():
            if name not in absent:
                try:
                    device.participant.advance()
                except LeftOutOfRound:
                    continue

    def run_to_end(self, absent):
        """Runs all phases and returns the last one. absent: members that drop out from a phase on, by phase."""
        dropped = set()
        while not self.server.phase.over:
            phase = self.server.phase
            dropped |= set(absent.get(phase, ()))
            self.run_turn(dropped)
            if self.server.tick() is phase:
                self.server.pass_deadline()
        return self.server.phase

    def true_sum(self, names):
        """Returns the sum of these devices' encoded vectors, modulo 2^bits, (D + 1,)."""
        vectors = [
            encode(self.devices[name].update, self.devices[name].weight, self.server.parameters) for name in names
        ]
        return np.sum(vectors, axis=0, dtype=vectors[0].dtype)
