"""The record of each round, and the directory from which an interrupted simulation is resumed.

settings.json                      the settings; another simulation cannot use the directory
base/ data/ program/               the built-in base and task, and the compiled program
rounds/0003/adapter.safetensors    B after round 3
rounds/0003/optimizer.safetensors  the server optimizer's state
rounds/0003/round.json             the round's record; written last, so a round without it is repeated
report.json report.md
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from shared.canonical import canonical_json, sha256_hex
from shared.durable import write_durably
from shared.errors import Conflict
from shared.strict_model import StrictModel
from shared.zo.lora import dump_adapter, load_adapter
from simulation.settings import SimulationSettings

F32 = NDArray[np.float32]


class RunningTraining(StrictModel):
    """In an asynchronous cohort: a training that was in progress when the version was published."""

    number: int
    device: int
    version: int  # version that the device started from
    finishes_at: float  # end of the training on the simulated clock


class UploadBytes(StrictModel):
    """Mean bytes that a device sends in a round, by form of upload, over the devices that answered."""

    weights: float = 0
    trajectory: float = 0
    masked: float = 0


class RoundRecord(StrictModel):
    """The record of a round. Number 0 is the state before the first round."""

    number: int
    published: bool = Field(description="whether a version was published")
    why: str = Field("", description="why no version was published")
    selected: int = 0
    trained: tuple[int, ...] = Field((), description="devices that trained, in order")
    dropped: int = Field(0, description="devices that did not answer")
    refused: dict[str, int] = Field(default_factory=dict, description="number of rejected updates by reason")
    counted: int = 0
    poisoned: int = Field(0, description="number of accepted updates from poisoned devices")
    clipped: int = 0
    mean_staleness: float = Field(0, description="mean staleness of accepted updates, in versions")
    update_norm: float = 0
    accuracy: float = Field(description="accuracy of the new version on the test examples, which no device has")
    loss: float
    devices: dict[int, float] = Field(description="accuracy of the new version on each device's own held-out examples")
    start_accuracy: float | None = Field(
        None, description="mean accuracy of the starting version on the devices' own data"
    )
    tuned_accuracy: float | None = Field(None, description="mean accuracy of the devices' own B after training")
    bytes: UploadBytes = UploadBytes()
    epsilon: dict[str, float] = Field(default_factory=dict, description="epsilon spent so far, by examples and members")
    in_progress: tuple[RunningTraining, ...] = ()
    started_count: int = Field(0, description="number of trainings started so far, in an asynchronous cohort")
    clock: float = 0
    b_sha256: str
    seconds: float = Field(0, description="duration on this machine; not part of the digest")


class Store:
    """The directory of a simulation."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, settings: SimulationSettings) -> None:
        """Creates the directory, or resumes the simulation in it. Raises Conflict if its settings differ."""
        self.path.mkdir(parents=True, exist_ok=True)
        file, document = self.path / "settings.json", canonical_json(settings.model_dump(mode="json"))
        if file.exists() and file.read_bytes() != document:
            raise Conflict(f"{self.path} contains a simulation with other settings; choose another directory")
        write_durably(file, document)

    def rounds(self) -> list[RoundRecord]:
        """Returns the records of finished rounds in order. Raises Conflict for one that cannot be read."""
        finished: list[RoundRecord] = []
        while (file := self._round_directory(len(finished)) / "round.json").exists():
            try:
                finished.append(RoundRecord.model_validate_json(file.read_bytes()))
            except ValidationError as error:
                raise Conflict(f"{file} is damaged; remove it to resume from the previous round") from error
        return finished

    def save(self, record: RoundRecord, flat: F32, optimizer: bytes) -> None:
        """Stores a round atomically."""
        directory = self._round_directory(record.number)
        directory.mkdir(parents=True, exist_ok=True)
        write_durably(directory / "adapter.safetensors", dump_adapter(flat, {}))
        write_durably(directory / "optimizer.safetensors", optimizer)
        write_durably(directory / "round.json", record.model_dump_json(indent=1).encode())

    def adapter(self, number: int, size: int) -> F32:
        """Returns B (D,) after a round."""
        return load_adapter((self._round_directory(number) / "adapter.safetensors").read_bytes(), size)

    def optimizer(self, number: int) -> bytes:
        """Returns the server optimizer's state after a round."""
        return (self._round_directory(number) / "optimizer.safetensors").read_bytes()

    def _round_directory(self, number: int) -> Path:
        return self.path / "rounds" / f"{number:04}"


def digest(settings: SimulationSettings, rounds: list[RoundRecord]) -> str:
    """Returns the sha256 of settings and records without the times. Equal settings give equal digests."""
    records = [each.model_dump(mode="json", exclude={"seconds"}) for each in rounds]
    return sha256_hex(canonical_json({"settings": settings.model_dump(mode="json"), "rounds": records}))
