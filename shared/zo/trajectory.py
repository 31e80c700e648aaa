"""The trajectory of a run: an append-only ledger of its steps, and exact replay.

File: b"MOBIZO-TRAJECTORY 1\n", then frames. A frame is kind (1 byte), step (uint32), payload length (uint32), payload,
CRC-32 of all that (uint32). Integers are little-endian. Kinds: `H` header (JSON, first, once), `S` one step's
coefficients (q float32, in a run with a proximal term also its factor, see `shared.zo.proximal`), `E` one evaluation
(JSON), `L` limits that an older agent applied from the next step on (JSON; no longer written). An incomplete last
frame, left by a crash, is cut off.

The coefficient of query i is c_i = lr projected_gradient_i / q, where
projected_gradient_i = (loss_plus_i - loss_minus_i) / (2 eps) (see `shared.zo.encoding`), or <g, z_i> with the exact
gradient g in a run with estimator `directional`. A step is B -= c_i z_i.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat

from shared.durable import sync
from shared.errors import Conflict
from shared.recipe import MAX_SEED, Noise, Sha256
from shared.strict_model import StrictModel
from shared.zo.noise import direction, query_seeds
from shared.zo.proximal import proximal_step

F32 = NDArray[np.float32]

MAGIC = b"MOBIZO-TRAJECTORY 1\n"
_FRAME = struct.Struct("<cII")
_CRC = struct.Struct("<I")


class TrajectoryHeader(StrictModel):
    """The parameters, besides the coefficients, that determine a run."""

    job_id: str
    job_seed: int = Field(ge=0, le=MAX_SEED)
    recipe_id: Sha256
    noise: Noise
    queries: int = Field(ge=1)
    size: int = Field(ge=1, description="D")
    start_sha256: Sha256 | None = Field(None, description="adapter file the run starts from; null: B = 0")
    # Omitted when null, so that trajectories of runs without a proximal term keep their bytes.
    proximal: FiniteFloat | None = Field(
        None,
        gt=0,
        exclude_if=lambda value: value is None,
        description="mu of the proximal step towards the start after each step; null: none",
    )

    # Absent where false, for the same reason.
    exact: bool = Field(
        False,
        exclude_if=lambda value: not value,
        description="a run with exact gradients: a step's number is its loss, and the trajectory cannot reproduce B",
    )

    @property
    def numbers(self) -> int:
        """Number of float32 values in a step's frame: the coefficients, and the proximal factor if there is one."""
        return self.queries + (self.proximal is not None)


class Evaluation(StrictModel):
    """One evaluation on a split of the device's own data, or on reference texts, after `step` steps."""

    step: int = Field(ge=0)
    split: Literal["validation", "test", "earlier", "reference"] = Field(
        description="earlier: held-out records of the earlier runs that a job with rehearsal continues; reference: "
        "public texts, of which every piece counts as correct"
    )
    correct: int = Field(ge=0)
    total: int = Field(ge=1)
    loss: FiniteFloat = Field(
        description="mean over examples of -log P(correct answer | prompt), nats (shared.zo.encoding)",
    )
    adapter: Literal["current", "best"] = "current"
    # Omitted when null, so that trajectories of other tasks keep their bytes.
    margin: FiniteFloat | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="of a task of kind preference: mean of how much more the log-probability of the preferred answer "
        "has risen than the other one's since the start, nats",
    )

    @property
    def accuracy(self) -> float:
        """Share of examples whose correct answer has the highest score, or of preferences with a positive margin."""
        return self.correct / self.total


class Limits(StrictModel):
    """Limits that an older agent applied to its training from step `step` on. Replay does not depend on them."""

    step: int = Field(0, ge=0)
    rest: float = Field(0, ge=0, le=100, description="seconds of pause for each second of a step")
    max_length: int | None = Field(None, ge=1, description="tokens; longer examples lose the front of their prompt")


@dataclass
class Trajectory:
    """A ledger in memory.

    coefficients: for each step, float32 (q,). proximal_factors: for each step its factor,
    in a run with a proximal term.
    """

    header: TrajectoryHeader
    coefficients: list[F32] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    limits: list[Limits] = field(default_factory=list)
    proximal_factors: list[np.float32] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of steps in the ledger."""
        return len(self.coefficients)

    def replay(self, start: F32, steps: int | None = None) -> F32:
        """Returns B after `steps` steps (default: all) from `start` (D,): B -= c_i z_i, for i in order, in float32.

        In a run with a proximal term, B moves towards the start after each step.

        The result is exact on every machine for estimators `replay` and `directional` with Rademacher noise, since
        z = +-1 makes each product exact. Otherwise it is approximate: Gaussian z depend on the machine's logarithm and
        cosine, and `stored` recovers eps z from two rounded copies of B. The program's own `replay` is exact on the
        machine that trained. The header does not name the estimator, which follows from the recipe id. Raises Conflict
        for noise `randn`, which cannot be reproduced, and for estimator `gradient`, whose updates are not recorded.
        """
        if self.header.exact:
            raise Conflict(
                "the trajectory of a run with estimator gradient cannot reproduce B; use the run's adapter, or train "
                "with estimator directional or replay"
            )
        flat = start.astype(np.float32, copy=True)
        header = self.header
        for step, coefficients in enumerate(self.coefficients[:steps]):
            for seed, coefficient in zip(query_seeds(header.job_seed, step, header.queries), coefficients, strict=True):
                flat -= np.float32(coefficient) * direction(header.noise, (int(seed[0]), int(seed[1])), header.size)
            if self.proximal_factors:
                flat = proximal_step(flat, start, self.proximal_factors[step])
        return flat

    def append_numbers(self, numbers: F32) -> None:
        """Appends a step's frame, float32 (header.numbers,)."""
        self.coefficients.append(numbers[: self.header.queries])
        if self.header.proximal is not None:
            self.proximal_factors.append(numbers[-1])


def frame(kind: bytes, step: int, payload: bytes) -> bytes:
    """Returns the bytes of one frame."""
    body = _FRAME.pack(kind, step, len(payload)) + payload
    return body + _CRC.pack(zlib.crc32(body))


def _first_bytes(header: TrajectoryHeader) -> bytes:
    """Returns the first bytes of a ledger: the magic and the header frame."""
    return MAGIC + frame(b"H", 0, header.model_dump_json().encode())


def parse_trajectory(data: bytes) -> tuple[Trajectory | None, int]:
    """Returns the ledger in `data` and the length of its complete frames, or (None, 0) if the header is incomplete.

    Raises Conflict for what a crash cannot cause: other first bytes, or a step out of order.
    """
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            return None, 0
        raise Conflict("the file does not begin as a trajectory does; move it away to restart the run")
    offset = len(MAGIC)
    trajectory: Trajectory | None = None
    while offset + _FRAME.size <= len(data):
        kind, step, length = _FRAME.unpack_from(data, offset)
        end = offset + _FRAME.size + length
        if end + _CRC.size > len(data) or _CRC.unpack_from(data, end)[0] != zlib.crc32(data[offset:end]):
            break
        payload = data[offset + _FRAME.size : end]
        if kind == b"H" and trajectory is None:
            trajectory = Trajectory(TrajectoryHeader.model_validate_json(payload))
        elif trajectory is None:
            raise Conflict("the trajectory does not start with its header; remove the file to restart the run")
        elif kind == b"S":
            if step != trajectory.steps or length != 4 * trajectory.header.numbers:
                raise Conflict(f"the trajectory has step {step} instead of step {trajectory.steps}")
            trajectory.append_numbers(np.frombuffer(payload, "<f4").astype(np.float32))
        elif kind == b"E":
            trajectory.evaluations.append(Evaluation.model_validate_json(payload))
        elif kind == b"L":
            trajectory.limits.append(Limits.model_validate_json(payload))
        offset = end + _CRC.size
    return trajectory, offset if trajectory is not None else 0


class Ledger:
    """An append-only ledger in memory. `data` holds the bytes of the file."""

    def __init__(self, header: TrajectoryHeader) -> None:
        """Starts the ledger of a run."""
        self.trajectory = Trajectory(header)
        self.data = bytearray()
        self._write(_first_bytes(header))

    def _write(self, data: bytes) -> None:
        """Appends complete frames, either all of them or none."""
        self.data += data

    def append_step(self, coefficients: F32, factor: np.float32 | None = None) -> None:
        """Appends the next step's coefficients, float32 (q,), and the factor of its proximal step if the run has one.

        Raises ValueError for another number of coefficients, or for a factor that is missing or unexpected.
        """
        header = self.trajectory.header
        payload = np.ascontiguousarray(coefficients, "<f4")
        if payload.shape != (header.queries,):
            raise ValueError(f"{payload.shape} coefficients for {header.queries} queries")
        if (factor is None) != (header.proximal is None):
            raise ValueError("a step must have a proximal factor if and only if the run has a proximal term")
        if factor is not None:
            payload = np.append(payload, factor).astype("<f4")
        self._write(frame(b"S", self.trajectory.steps, payload.tobytes()))
        self.trajectory.append_numbers(payload.astype(np.float32))

    def append_evaluation(self, evaluation: Evaluation) -> None:
        """Appends an evaluation of the current B, or of the best B if it says so."""
        payload = json.dumps(evaluation.model_dump(mode="json")).encode()
        self._write(frame(b"E", self.trajectory.steps, payload))
        self.trajectory.evaluations.append(evaluation)

    def close(self) -> None:
        """Releases the underlying file, if any. The ledger stays readable in memory."""


class TrajectoryFile(Ledger):
    """A ledger on disk. Every append is synced to disk (fsync) before it returns."""

    def __init__(self, path: Path, header: TrajectoryHeader) -> None:
        """Opens the ledger at `path` and cuts off an incomplete last frame, or creates a new ledger.

        Raises Conflict if the file belongs to another run.
        """
        data = path.read_bytes() if path.exists() else b""
        try:
            trajectory, length = parse_trajectory(data)
        except Conflict as error:
            raise Conflict(f"{path}: {error.detail}") from error
        if trajectory is None and len(data) > len(_first_bytes(header)):
            raise Conflict(f"{path} has a damaged header; move it away to restart the run")
        if trajectory is not None and trajectory.header != header:
            raise Conflict(f"{path} is the trajectory of another run; move it away to start this one")
        self.trajectory = trajectory or Trajectory(header)
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(length)
        self._file.seek(length)
        if trajectory is None:
            self._write(_first_bytes(header))
            sync(path.parent)

    def _write(self, data: bytes) -> None:
        end = self._file.tell()
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            os.fsync(self._file.fileno())
        except OSError:
            # A full disk must not leave half a frame in the middle of the ledger.
            os.ftruncate(self._file.fileno(), end)
            os.lseek(self._file.fileno(), end, os.SEEK_SET)
            raise

    def close(self) -> None:
        """Closes the file. The ledger stays readable in memory."""
        self._file.close()
