"""From what a device made to what the server counts: the upload in its form, and the server's checks of it.

Both are the product's own: a LoRA-B file is read and refused as the server does, a trajectory is replayed by
`shared.replay`. Knows neither rounds nor programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.cohort import CohortSettings
from shared.errors import InvalidUpload
from shared.federation.algorithms import Algorithm
from shared.federation.update import Update, difference
from shared.lora import dump_adapter, load_adapter
from shared.replay import replay
from shared.trajectory import Ledger, Trajectory, parse_trajectory
from simulation.arrivals import Arrival
from simulation.attacks import ON_DATA, claimed, spoil_numbers
from simulation.settings import FaultSettings
from simulation.workshop import Errand

F32 = NDArray[np.float32]


def member(device: int) -> str:
    """A device's name: names sort as numbers do."""
    return f"device-{device:06}"


@dataclass(frozen=True)
class Sent:
    """What arrives of a device. data: a LoRA-B file or a trajectory."""

    device: int
    data: bytes
    examples: int  # as it says
    staleness: int
    start: F32  # B (D,) that the device began from


def send(arrival: Arrival, form: str, seed: int, round_: int) -> Sent:
    """What a device sends, or what it sends instead if it is poisoned."""
    errand, work = arrival.errand, arrival.work
    examples, data = len(errand.shard.train), work.ledger if form == "trajectory" else work.adapter
    if errand.faults is not None:
        examples = claimed(errand.faults, examples)
        if errand.faults.attack not in ON_DATA:
            spoil = _spoilt_trajectory if form == "trajectory" else _spoilt_weights
            data = spoil(data, errand, errand.faults, seed, round_)
    return Sent(errand.device, data, examples, arrival.staleness, errand.start)


def _spoilt_weights(data: bytes, errand: Errand, faults: FaultSettings, seed: int, round_: int) -> bytes:
    honest = load_adapter(data, errand.start.size)
    update = spoil_numbers(faults, difference(honest, errand.start), seed, round_, errand.device)
    return dump_adapter(errand.start + update, {})


def _spoilt_trajectory(data: bytes, errand: Errand, faults: FaultSettings, seed: int, round_: int) -> bytes:
    honest = _parsed(data)
    numbers = spoil_numbers(faults, np.array(honest.coefficients, np.float32), seed, round_, errand.device)
    ledger = Ledger(honest.header)
    for step, coefficients in enumerate(numbers):
        ledger.append_step(coefficients, honest.pulls[step] if honest.pulls else None)
    return bytes(ledger.data)


def receive(sent: Sent, cohort: CohortSettings, algorithm: Algorithm) -> Update:
    """The update that counts. Raises InvalidUpload saying why it does not."""
    if not algorithm.server.accepts(sent.staleness):
        raise InvalidUpload("it began from an older version")
    after = _replayed(sent) if cohort.upload == "trajectory" else load_adapter(sent.data, sent.start.size)
    update = Update(member(sent.device), algorithm.device.update(after, sent.start), sent.examples, sent.staleness)
    if not np.isfinite(update.flat).all():
        raise InvalidUpload("it has values that are not finite")
    if cohort.norm_limit is not None and update.norm > cohort.norm_limit:
        raise InvalidUpload("its norm is over the cohort's limit")
    return update


def _replayed(sent: Sent) -> F32:
    return replay(_parsed(sent.data), sent.start)


def _parsed(data: bytes) -> Trajectory:
    trajectory, _ = parse_trajectory(data)
    if trajectory is None:
        raise InvalidUpload("the trajectory is damaged")
    return trajectory
