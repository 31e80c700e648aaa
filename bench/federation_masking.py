"""What secure aggregation costs: bytes and seconds of each device and of the server, for rounds of 16, 64, 256 devices.

Real device halves and the real server half in one process, without HTTP and without a database; a tenth of the devices
drops out when it costs the server most, after the shares and before the vectors. The sum is compared with that of the
devices' own integers, to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel

from device_agent.masking import MaskedPart, MemoryNotebook
from shared.canonical import sha256_hex
from shared.masking.fixed_point import Words, decode, encode, mean_error, word
from shared.masking.memory import MemoryStore
from shared.masking.messages import Advertisement, Consent, MaskingView, Phase, SealedShares, Unmasking
from shared.masking.session import MaskingSession
from shared.masking.settings import MaskingParameters

SIZE = 368_640  # D of SmolLM2-135M at rank 16 on q_proj and v_proj
DEVICES, QUICK_DEVICES = (16, 64, 256), (16,)
CLIP = 1.0
PHASE = timedelta(minutes=1)
Row = dict[str, Any]


def measure(quick: bool) -> tuple[list[Row], dict[str, float]]:
    """A row for each number of devices. quick: 16 alone."""
    rows = [masked_round(count) for count in (QUICK_DEVICES if quick else DEVICES)]
    last = rows[-1]
    return rows, {
        "masking_device_seconds": last["device_seconds"],
        "masking_device_bytes": last["sent_bytes"] + last["received_bytes"],
    }


@dataclass
class Link:
    """A device's way to the session; counts bytes as the wire has them, and seconds that the server's half takes."""

    session: Callable[[], MaskingSession]
    member: str
    identity: Ed25519PrivateKey
    sent: int = 0
    received: int = 0
    server_seconds: float = 0.0

    def look(self, known: Phase | None) -> MaskingView:
        """How it stands."""
        return self._heard(lambda session: None, known)

    def advertise(self, advertisement: Advertisement) -> MaskingView:
        """Phase 0."""
        public = self.identity.public_key().public_bytes_raw()
        return self._said(advertisement, lambda it: it.advertise(self.member, public, advertisement), Phase.KEYS)

    def share(self, shares: SealedShares) -> MaskingView:
        """Phase 1."""
        return self._said(shares, lambda it: it.share(self.member, shares), Phase.SHARES)

    def mask(self, vector: bytes) -> MaskingView:
        """Phase 2."""
        self.sent += len(vector)
        return self._heard(lambda it: it.masked(self.member, sha256_hex(vector), vector), Phase.VECTORS)

    def consent(self, consent: Consent) -> MaskingView:
        """Phase 3."""
        return self._said(consent, lambda it: it.consent(self.member, consent), Phase.CONSENTS)

    def unmask(self, unmasking: Unmasking) -> MaskingView:
        """Phase 4."""
        return self._said(unmasking, lambda it: it.unmask(self.member, unmasking), Phase.UNMASKING)

    def _said(self, message: BaseModel, say: Callable[[MaskingSession], None], phase: Phase) -> MaskingView:
        self.sent += len(message.model_dump_json())
        return self._heard(say, phase)

    def _heard(self, say: Callable[[MaskingSession], None], known: Phase | None) -> MaskingView:
        began = time.perf_counter()
        say(self.session())
        view = self.session().view(self.member, known)
        self.server_seconds += time.perf_counter() - began
        self.received += len(view.model_dump_json())
        return view


def masked_round(count: int) -> Row:
    """One round of `count` devices, of which a tenth drops out before its vector."""
    parameters = MaskingParameters(
        cohort="cohort",
        round=1,
        start_sha256=None,
        recipe_id="0" * 64,
        size=SIZE,
        clip=CLIP,
        most_members=count,
        minimum=3,
        threshold="two-thirds",
        bits=32,
    )
    store, now = MemoryStore(), datetime.now(UTC)
    store.session.closes_at = now + PHASE
    links, parts = [], []
    for number in range(count):
        link = Link(
            lambda: MaskingSession(store, parameters, PHASE.total_seconds(), now),
            f"device_{number:04}",
            Ed25519PrivateKey.generate(),
        )
        encoded = partial(_encoded, number, parameters)
        links.append(link)
        parts.append(
            MaskedPart(link, MemoryNotebook(), parameters, link.member, link.identity, lambda _members: None, encoded)
        )
    staying = count - count // 10
    seconds = [0.0] * count
    began = time.perf_counter()
    while store.session.phase is not Phase.SUMMING:
        phase = store.session.phase
        there = count if phase in (Phase.KEYS, Phase.SHARES) else staying
        for number, part in enumerate(parts[:there]):
            entered = time.perf_counter()
            part.turn()
            seconds[number] += time.perf_counter() - entered
        session = MaskingSession(store, parameters, PHASE.total_seconds(), now)
        if session.tick(coming=len(store.members) < count) is phase:
            now += PHASE
            MaskingSession(store, parameters, PHASE.total_seconds(), now).tick(coming=False)
    wall = time.perf_counter() - began
    began = time.perf_counter()
    total = MaskingSession(store, parameters, PHASE.total_seconds(), now).total()
    unmask_seconds = time.perf_counter() - began
    true = np.zeros(SIZE + 1, word(parameters))
    for number in range(staying):
        true += _encoded(number, parameters)
    return {
        "what": "masked round",
        "devices": count,
        "dropped": count - staying,
        "size_d": SIZE,
        "bits": parameters.bits,
        "sent_bytes": _mean([link.sent for link in links[:staying]]),
        "received_bytes": _mean([link.received for link in links[:staying]]),
        "device_seconds": _mean([seconds[at] - links[at].server_seconds for at in range(staying)]),
        "server_phase_seconds": sum(link.server_seconds for link in links),
        "unmask_seconds": unmask_seconds,
        "wall_seconds": wall,
        "mean_error_bound": mean_error(staying, staying, parameters),
        "exact": bool(np.array_equal(total.mean, decode(true, staying, parameters).mean)),
    }


def _encoded(number: int, parameters: MaskingParameters) -> Words:
    """The update of one device, the same at every call."""
    update = np.random.default_rng(number).normal(size=SIZE, scale=CLIP / np.sqrt(SIZE)).astype(np.float32)
    return encode(update, 1, parameters)


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values)
