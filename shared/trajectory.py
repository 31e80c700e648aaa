"""The trajectory: the ledger of a run, append-only, and its exact replay.

File: b"MOBIZO-TRAJECTORY 1\n", then frames. A frame is kind (1 byte), step (uint32), payload length (uint32),
payload, CRC-32 of all that (uint32); integers little-endian. Kinds: `H` header (JSON, first, once), `S` one step's
coefficients (q float32, and in a run with a proximal pull its factor, see `shared.proximal`), `E` one evaluation
(JSON), `L` limits that hold from the next step on (JSON). A torn last frame is what a kill leaves; it is cut off.
Knows no runtime.
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
from pydantic import BaseModel, ConfigDict, Field

from shared.errors import Conflict
from shared.noise import direction, query_seeds
from shared.proximal import pull
from shared.recipe import MAX_SEED, Noise, Sha256

F32 = NDArray[np.float32]

MAGIC = b"MOBIZO-TRAJECTORY 1\n"
_FRAME = struct.Struct("<cII")
_CRC = struct.Struct("<I")


class TrajectoryHeader(BaseModel):
    """What a replay must know besides the coefficients."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job_id: str
    job_seed: int = Field(ge=0, le=MAX_SEED)
    recipe_id: Sha256
    noise: Noise
    queries: int = Field(ge=1)
    size: int = Field(ge=1, description="D")
    start_sha256: Sha256 | None = Field(None, description="adapter file the run starts from; null: B = 0")
    # Absent where null, so that the ledgers of runs without a pull begin with the bytes that they always began with.
    proximal: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        exclude_if=lambda value: value is None,
        description="mu of the pull towards the start after each step; null: none",
    )

    @property
    def numbers(self) -> int:
        """float32 in a step's frame: the coefficients, and the pull's factor where there is one."""
        return self.queries + (self.proximal is not None)


class Evaluation(BaseModel):
    """One measurement on a split of the device's own data, after `step` steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0)
    split: Literal["validation", "test"]
    correct: int = Field(ge=0)
    total: int = Field(ge=1)
    loss: float = Field(allow_inf_nan=False, description="mean negative log-probability of the right answer, nats")
    adapter: Literal["current", "best"] = "current"

    @property
    def accuracy(self) -> float:
        """Share of examples whose right answer scored highest."""
        return self.correct / self.total


class Limits(BaseModel):
    """How a device holds itself back, from step `step` on. Replay needs none of it; whoever repeats the steps does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(0, ge=0)
    rest: float = Field(0, ge=0, le=100, description="seconds of pause for each second of a step")
    max_length: int | None = Field(None, ge=1, description="tokens; longer examples lose the front of their prompt")

    def same(self, other: Limits) -> bool:
        """Whether both hold back alike, whenever they began."""
        return (self.rest, self.max_length) == (other.rest, other.max_length)


@dataclass
class Trajectory:
    """A ledger in memory: coefficients[t] are step t's, float32 (q,); pulls[t] its factor, in a run with pulls."""

    header: TrajectoryHeader
    coefficients: list[F32] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    limits: list[Limits] = field(default_factory=list)
    pulls: list[np.float32] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self.coefficients)

    def replay(self, start: F32, steps: int | None = None) -> F32:
        """B after `steps` steps (all by default) from `start` (D,): B -= c_i z_i, for i in order, in float32.

        In a run with pulls, B is pulled towards the start after each step.

        Exact for estimator `replay` with Rademacher noise, on every machine, since z = +-1 makes each product exact.
        Else close: Gaussian z come from this machine's logarithm and cosine, and `stored` recovers eps z from two
        rounded copies of B. The program's own `replay` is exact on the machine that trained. The header names no
        estimator, as the recipe id pins it. Raises Conflict for noise `randn`, which nobody can draw again.
        """
        flat = start.astype(np.float32, copy=True)
        header = self.header
        for step, coefficients in enumerate(self.coefficients[:steps]):
            for seed, coefficient in zip(query_seeds(header.job_seed, step, header.queries), coefficients, strict=True):
                flat -= np.float32(coefficient) * direction(header.noise, (int(seed[0]), int(seed[1])), header.size)
            if self.pulls:
                flat = pull(flat, start, self.pulls[step])
        return flat

    def take(self, numbers: F32) -> None:
        """Adds a step's frame, float32 (header.numbers,)."""
        self.coefficients.append(numbers[: self.header.queries])
        if self.header.proximal is not None:
            self.pulls.append(numbers[-1])


def frame(kind: bytes, step: int, payload: bytes) -> bytes:
    """One frame's bytes."""
    body = _FRAME.pack(kind, step, len(payload)) + payload
    return body + _CRC.pack(zlib.crc32(body))


def _opening(header: TrajectoryHeader) -> bytes:
    """What every ledger begins with."""
    return MAGIC + frame(b"H", 0, header.model_dump_json().encode())


def parse_trajectory(data: bytes) -> tuple[Trajectory | None, int]:
    """The ledger in `data` and the length of its whole frames; None if not even the header is whole.

    Raises Conflict if a step is out of order, which no crash can cause.
    """
    if not data.startswith(MAGIC):
        return None, 0
    at = len(MAGIC)
    trajectory: Trajectory | None = None
    while at + _FRAME.size <= len(data):
        kind, step, length = _FRAME.unpack_from(data, at)
        end = at + _FRAME.size + length
        if end + _CRC.size > len(data) or _CRC.unpack_from(data, end)[0] != zlib.crc32(data[at:end]):
            break
        payload = data[at + _FRAME.size : end]
        if kind == b"H" and trajectory is None:
            trajectory = Trajectory(TrajectoryHeader.model_validate_json(payload))
        elif trajectory is None:
            raise Conflict("the trajectory does not begin with its header; remove the file to start the run anew")
        elif kind == b"S":
            if step != trajectory.steps or length != 4 * trajectory.header.numbers:
                raise Conflict(f"the trajectory has step {step} where step {trajectory.steps} belongs")
            trajectory.take(np.frombuffer(payload, "<f4").astype(np.float32))
        elif kind == b"E":
            trajectory.evaluations.append(Evaluation.model_validate_json(payload))
        elif kind == b"L":
            trajectory.limits.append(Limits.model_validate_json(payload))
        at = end + _CRC.size
    return trajectory, at if trajectory is not None else 0


class Ledger:
    """A ledger that grows, in memory alone: `data` is what its file would hold."""

    def __init__(self, header: TrajectoryHeader) -> None:
        """Begins the ledger of a run."""
        self.trajectory = Trajectory(header)
        self.data = bytearray()
        self._write(_opening(header))

    def _write(self, data: bytes) -> None:
        """Keeps whole frames, all of them or none."""
        self.data += data

    def append_step(self, coefficients: F32, factor: np.float32 | None = None) -> None:
        """Adds the next step's coefficients, float32 (q,), and its pull's factor in a run that has pulls."""
        header = self.trajectory.header
        payload = np.ascontiguousarray(coefficients, "<f4")
        if payload.shape != (header.queries,):
            raise ValueError(f"{payload.shape} coefficients for {header.queries} queries")
        if (factor is None) != (header.proximal is None):
            raise ValueError("a step has a pull's factor exactly where the run has pulls")
        if factor is not None:
            payload = np.append(payload, factor).astype("<f4")
        self._write(frame(b"S", self.trajectory.steps, payload.tobytes()))
        self.trajectory.take(payload.astype(np.float32))

    def append_evaluation(self, evaluation: Evaluation) -> None:
        """Adds an evaluation of B as it is after the steps so far (or of the best, as it says)."""
        payload = json.dumps(evaluation.model_dump(mode="json")).encode()
        self._write(frame(b"E", self.trajectory.steps, payload))
        self.trajectory.evaluations.append(evaluation)

    def append_limits(self, limits: Limits) -> None:
        """Adds the limits that hold from the next step on."""
        payload = json.dumps(limits.model_dump(mode="json")).encode()
        self._write(frame(b"L", self.trajectory.steps, payload))
        self.trajectory.limits.append(limits)

    def close(self) -> None:
        """Lets go of what the ledger is written to; it stays readable in memory."""


class TrajectoryFile(Ledger):
    """A ledger on disk. Every append is on the disk (fsync) before it returns."""

    def __init__(self, path: Path, header: TrajectoryHeader) -> None:
        """Opens the ledger at `path`, cutting off a torn tail, or begins one.

        Raises Conflict if the file is another run's.
        """
        data = path.read_bytes() if path.exists() else b""
        found, whole = parse_trajectory(data)
        if found is not None and found.header != header:
            raise Conflict(f"{path} is the trajectory of another run; move it away to start this one")
        self.trajectory = found or Trajectory(header)
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(whole)
        self._file.seek(whole)
        if found is None:
            self._write(_opening(header))
            directory = os.open(path.parent, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)

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
        """Closes the file; the ledger stays readable in memory."""
        self._file.close()
