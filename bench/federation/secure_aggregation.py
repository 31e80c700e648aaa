"""The cost of secure aggregation: bytes and seconds of each device and the server, in rounds of 16, 64, 256 devices.

The real halves of device and server run in one process, without HTTP and database (`simulation.secure_aggregation`). A
tenth of the devices fails when it costs the server most, after the shares and before the vectors. The sum must equal
that of the devices' integers.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.result import Measured, Row
from device_agent.secure_aggregation.participant import InMemoryKnowledge, SecureAggregationParticipant
from shared.federation.secure_aggregation.fixed_point import Words, decode, encode, word
from shared.federation.secure_aggregation.messages import Phase, SecureAggregationView
from shared.federation.secure_aggregation.settings import Bits, SecureAggregationParameters
from simulation.secure_aggregation import RoundLink, RoundServer

SIZE = 368_640  # D of SmolLM2-135M at rank 16 on q_proj and v_proj
DEVICES, QUICK_DEVICES = (16, 64, 256), (16,)


def masking(quick: bool) -> Measured:
    """Returns a row for each number of devices. quick: only 16."""
    rows = [masked_round(count) for count in (QUICK_DEVICES if quick else DEVICES)]
    last = rows[-1]
    return rows, {
        "masking_device_seconds": last["device_seconds"],
        "masking_device_bytes": last["sent_bytes"] + last["received_bytes"],
    }


class MeasuredLink:
    """A device's link that counts the bytes received and the seconds of the server's half."""

    def __init__(self, link: RoundLink) -> None:
        self.link, self.received, self.server_seconds = link, 0, 0.0

    def __getattr__(self, name: str) -> Callable[..., SecureAggregationView]:
        def call(*arguments: object) -> SecureAggregationView:
            began = time.perf_counter()
            view: SecureAggregationView = getattr(self.link, name)(*arguments)
            self.server_seconds += time.perf_counter() - began
            self.received += len(view.model_dump_json())
            return view

        return call


def masked_round(count: int) -> Row:
    """Runs one round of `count` devices, of which a tenth drops out before its vector."""
    parameters = parameters_of(count, 32)
    server = RoundServer(parameters, count)
    links: list[Any] = []
    parts = []
    for number in range(count):
        link = RoundLink(server, f"device_{number:04}", Ed25519PrivateKey.generate())
        links.append(MeasuredLink(link))
        about = (links[-1], InMemoryKnowledge(), parameters, link.member, link.identity)
        parts.append(SecureAggregationParticipant(*about, lambda _members: None, partial(_encoded, number, parameters)))
    staying = count - count // 10
    seconds = [0.0] * count
    phase = Phase.KEYS
    while phase is not Phase.SUMMING:
        there = count if phase in (Phase.KEYS, Phase.SHARES) else staying
        for number, part in enumerate(parts[:there]):
            entered = time.perf_counter()
            part.advance()
            seconds[number] += time.perf_counter() - entered
        phase = server.end_phase()
    began = time.perf_counter()
    total = server.session.total()
    unmask_seconds = time.perf_counter() - began
    true = np.zeros(SIZE + 1, word(parameters))
    for number in range(staying):
        true += _encoded(number, parameters)
    if not np.array_equal(total.mean, decode(true, staying, parameters).mean):
        raise AssertionError("the sum is not that of the devices' integers")
    return {
        "what": "masked round",
        "devices": count,
        "dropped": count - staying,
        "size_d": SIZE,
        "bits": parameters.bits,
        "sent_bytes": mean(each.link.sent for each in links[:staying]),
        "received_bytes": mean(each.received for each in links[:staying]),
        "device_seconds": mean(seconds[at] - links[at].server_seconds for at in range(staying)),
        "server_phase_seconds": sum(each.server_seconds for each in links),
        "unmask_seconds": unmask_seconds,
    }


def _encoded(number: int, parameters: SecureAggregationParameters) -> Words:
    """Returns the update of one device, the same at every call."""
    update = np.random.default_rng(number).normal(size=SIZE, scale=parameters.clip / np.sqrt(SIZE)).astype(np.float32)
    return encode(update, 1, parameters)


def parameters_of(members: int, bits: Bits) -> SecureAggregationParameters:
    """Returns the parameters of a round of devices of equal weight."""
    return SecureAggregationParameters(
        cohort="cohort",
        round=1,
        start_sha256=None,
        recipe_id="0" * 64,
        size=SIZE,
        clip=1.0,
        most_members=members,
        minimum=3,
        threshold="two-thirds",
        bits=bits,
    )
