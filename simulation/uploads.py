"""A device's upload in each form, and the server's validation of it.

Both are the product's own: LoRA-B files are validated as on the server, and trajectories are replayed by
`shared.zo.replay`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidUpload
from shared.federation.algorithms import Algorithm
from shared.federation.cohort import CohortSettings
from shared.federation.update import Update, difference
from shared.zo.lora import dump_adapter, load_adapter
from shared.zo.replay import replay
from shared.zo.trajectory import Ledger, Trajectory, parse_trajectory
from simulation.arrivals import Arrival
from simulation.attacks import ON_DATA, claimed, spoil_numbers
from simulation.settings import FaultSettings
from simulation.worker import LocalTask

F32 = NDArray[np.float32]


def member(device: int) -> str:
    """Returns a device's name. Names sort as the numbers do."""
    return f"device-{device:06}"


@dataclass(frozen=True)
class Sent:
    """A device's upload. data: a LoRA-B file or a trajectory."""

    device: int
    data: bytes
    examples: int  # number of examples reported by the device
    staleness: int
    start: F32  # B (D,) that the device started from


def send(arrival: Arrival, form: str, seed: int, round_: int) -> Sent:
    """Returns a device's upload, changed by its attack if it is poisoned."""
    local_task, work = arrival.local_task, arrival.work
    examples, data = len(local_task.shard.train), work.ledger if form == "trajectory" else work.adapter
    if local_task.faults is not None:
        examples = claimed(local_task.faults, examples)
        if local_task.faults.attack not in ON_DATA:
            spoil = _spoilt_trajectory if form == "trajectory" else _spoilt_weights
            data = spoil(data, local_task, local_task.faults, seed, round_)
    return Sent(local_task.device, data, examples, arrival.staleness, local_task.start)


def _spoilt_weights(data: bytes, local_task: LocalTask, faults: FaultSettings, seed: int, round_: int) -> bytes:
    honest = load_adapter(data, local_task.start.size)
    update = spoil_numbers(faults, difference(honest, local_task.start), seed, round_, local_task.device)
    return dump_adapter(local_task.start + update, {})


def _spoilt_trajectory(data: bytes, local_task: LocalTask, faults: FaultSettings, seed: int, round_: int) -> bytes:
    honest = _parsed(data)
    numbers = spoil_numbers(faults, np.array(honest.coefficients, np.float32), seed, round_, local_task.device)
    ledger = Ledger(honest.header)
    for step, coefficients in enumerate(numbers):
        ledger.append_step(coefficients, honest.pulls[step] if honest.pulls else None)
    return bytes(ledger.data)


def receive(sent: Sent, cohort: CohortSettings, algorithm: Algorithm) -> Update:
    """Returns the update of an upload. Raises InvalidUpload if it is rejected."""
    if not algorithm.server.accepts(sent.staleness):
        raise InvalidUpload("the update started from an older version")
    after = _replayed(sent) if cohort.upload == "trajectory" else load_adapter(sent.data, sent.start.size)
    update = Update(member(sent.device), algorithm.device.update(after, sent.start), sent.examples, sent.staleness)
    if not np.isfinite(update.flat).all():
        raise InvalidUpload("the update has non-finite values")
    if cohort.norm_limit is not None and update.norm > cohort.norm_limit:
        raise InvalidUpload("the update's norm exceeds the cohort's limit")
    return update


def _replayed(sent: Sent) -> F32:
    return replay(_parsed(sent.data), sent.start)


def _parsed(data: bytes) -> Trajectory:
    trajectory, _ = parse_trajectory(data)
    if trajectory is None:
        raise InvalidUpload("the trajectory is damaged")
    return trajectory
