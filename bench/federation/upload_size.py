"""Bytes that one device sends in one round, in each form: the files themselves, before HTTP.

The files are created, not estimated. The keys and shares of a masked round grow with the number of devices; only
`bench.federation.secure_aggregation` includes them.
"""

import numpy as np

from bench.result import Measured, Row
from shared.federation.secure_aggregation.fixed_point import vector_bytes
from shared.federation.secure_aggregation.settings import Bits, SecureAggregationParameters
from shared.zo.lora import adapter_file
from shared.zo.trajectory import MAGIC, Evaluation, TrajectoryHeader, frame

SIZE = 368_640  # D of SmolLM2-135M at rank 16 on q_proj and v_proj
STEPS, QUERIES, INTERVAL = 150, 4, 25  # a job's defaults


def measure(quick: bool) -> Measured:
    """Returns a row for each form. quick: has no effect."""
    shape = {"size_d": SIZE, "steps": STEPS, "queries": QUERIES}
    weights, trajectory = weights_bytes(SIZE), trajectory_bytes(SIZE, STEPS, QUERIES, INTERVAL)
    rows: list[Row] = [
        {"what": "upload", "form": "weights", **shape, "bytes": weights},
        {"what": "upload", "form": "trajectory", **shape, "bytes": trajectory},
        *(
            {"what": "upload", "form": "masked", "bits": bits, **shape, "bytes": masked_bytes(bits)}
            for bits in (32, 64)
        ),
    ]
    return rows, {"weights_vs_trajectory_bytes": weights / trajectory}


def weights_bytes(size: int) -> int:
    """Returns the bytes of a LoRA-B file of D = `size`."""
    return len(adapter_file(np.zeros(size, np.float32), job_id="j" * 32, recipe_id="0" * 64, a_sha256="0" * 64, step=1))


def trajectory_bytes(size: int, steps: int, queries: int, interval: int) -> int:
    """Returns the bytes of the trajectory of a run that validates every `interval` steps."""
    header = TrajectoryHeader(
        job_id="j" * 32, job_seed=2**53 - 1, recipe_id="0" * 64, noise="rademacher", queries=queries, size=size
    )
    step = frame(b"S", 0, bytes(4 * queries))
    evaluation = Evaluation(step=steps, split="validation", correct=100, total=200, loss=2 / 3)
    notes = (steps // interval + 1) * len(frame(b"E", 0, evaluation.model_dump_json().encode()))
    return len(MAGIC) + len(frame(b"H", 0, header.model_dump_json().encode())) + steps * len(step) + notes


def masked_bytes(bits: Bits) -> int:
    """Returns the bytes of a masked vector, in a round of at most 256 devices of equal weight."""
    return vector_bytes(secure_aggregation_parameters(256, bits))


def secure_aggregation_parameters(members: int, bits: Bits) -> SecureAggregationParameters:
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
