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
from simulation.attacks import DATA_ATTACKS, claimed_examples, poison_numbers
from simulation.settings import FaultSettings
from simulation.worker import LocalTask

F32 = NDArray[np.float32]


def member(device: int) -> str:
    """Returns a device's name. Names sort as the numbers do."""
    return f"device-{device:06}"


@dataclass(frozen=True)
class Upload:
    """A device's upload. data: a LoRA-B file or a trajectory."""

    device: int
    data: bytes
    examples: int  # number of examples reported by the device
    staleness: int
    start: F32  # B (D,) that the device started from


def send(arrival: Arrival, form: str, seed: int, round_: int) -> Upload:
    """Returns a device's upload, changed by its attack if it is poisoned."""
    local_task, output = arrival.local_task, arrival.output
    examples, data = len(local_task.shard.train), output.ledger if form == "trajectory" else output.adapter
    if local_task.faults is not None:
        examples = claimed_examples(local_task.faults, examples)
        if local_task.faults.attack not in DATA_ATTACKS:
            poison = _poison_trajectory if form == "trajectory" else _poison_weights
            data = poison(data, local_task, local_task.faults, seed, round_)
    return Upload(local_task.device, data, examples, arrival.staleness, local_task.start)


def _poison_weights(data: bytes, local_task: LocalTask, faults: FaultSettings, seed: int, round_: int) -> bytes:
    flat = load_adapter(data, local_task.start.size)
    update = poison_numbers(faults, difference(flat, local_task.start), seed, round_, local_task.device)
    return dump_adapter(local_task.start + update, {})


def _poison_trajectory(data: bytes, local_task: LocalTask, faults: FaultSettings, seed: int, round_: int) -> bytes:
    trajectory = _parse(data)
    numbers = poison_numbers(faults, np.array(trajectory.coefficients, np.float32), seed, round_, local_task.device)
    ledger = Ledger(trajectory.header)
    for step, coefficients in enumerate(numbers):
        ledger.append_step(coefficients, trajectory.proximal_factors[step] if trajectory.proximal_factors else None)
    return bytes(ledger.data)


def receive(upload: Upload, cohort: CohortSettings, algorithm: Algorithm) -> Update:
    """Returns the update of an upload. Raises InvalidUpload if it is rejected."""
    if not algorithm.server.accepts(upload.staleness):
        raise InvalidUpload("the update started from an older version")
    after = _replay(upload) if cohort.upload == "trajectory" else load_adapter(upload.data, upload.start.size)
    update = Update(
        member(upload.device), algorithm.device.update(after, upload.start), upload.examples, upload.staleness
    )
    if not np.isfinite(update.flat).all():
        raise InvalidUpload("the update has non-finite values")
    if cohort.norm_limit is not None and update.norm > cohort.norm_limit:
        raise InvalidUpload("the update's norm exceeds the cohort's limit")
    return update


def _replay(upload: Upload) -> F32:
    return replay(_parse(upload.data), upload.start)


def _parse(data: bytes) -> Trajectory:
    trajectory, _ = parse_trajectory(data)
    if trajectory is None:
        raise InvalidUpload("the trajectory is damaged")
    return trajectory
