"""What a simulation tells of each round, and where it keeps what it needs to go on after a kill.

    settings.json                      what it is; another simulation does not go on in its directory
    base/ data/ program/               the built-in base and task, and the compiled program
    rounds/0003/adapter.safetensors    B after round 3
    rounds/0003/optimizer.safetensors  the server optimizer's state
    rounds/0003/round.json             what is told of it; written last: a round without it did not happen
    report.json report.md report.html and plots

Knows neither devices nor how a round goes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from device_agent.durable import write_durably
from shared.canonical import canonical_json, sha256_hex
from shared.errors import Conflict
from shared.lora import dump_adapter, load_adapter
from simulation.settings import SimulationSettings

F32 = NDArray[np.float32]


class Flight(BaseModel):
    """Of an asynchronous cohort: a device that was training when the version was made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    device: int
    version: int  # that it began from
    lands: float  # by the simulation's clock


class Bytes(BaseModel):
    """What a device sends in a round, in each form; the mean over the devices that answered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: float = 0
    trajectory: float = 0
    masked: float = 0


class Round(BaseModel):
    """What is told of a round; number 0 is before the first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    published: bool = Field(description="whether a version was made")
    why: str = Field("", description="why not")
    asked: int = 0
    trained: tuple[int, ...] = Field((), description="devices that did a round's work, in order")
    dropped: int = Field(0, description="that did not answer")
    refused: dict[str, int] = Field(default_factory=dict, description="why, and how often")
    counted: int = 0
    poisoned: int = Field(0, description="of those that counted")
    clipped: int = 0
    stale: float = Field(0, description="mean number of versions that counted updates were behind")
    update_norm: float = 0
    accuracy: float = Field(description="of the new version on examples that no device has")
    loss: float
    devices: dict[int, float] = Field(description="accuracy of the new version on each device's own held-out examples")
    start_accuracy: float | None = Field(None, description="on their own data, of those that answered, before training")
    tuned_accuracy: float | None = Field(None, description="and after it, each with its own B")
    bytes: Bytes = Bytes()
    epsilon: dict[str, float] = Field(default_factory=dict, description="spent by then, of examples and of members")
    flights: tuple[Flight, ...] = ()
    flown: int = Field(0, description="flights that had begun")
    clock: float = 0
    b_sha256: str
    seconds: float = Field(0, description="of this machine; not part of the digest")


class Store:
    """A simulation's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, settings: SimulationSettings) -> None:
        """Makes the directory, or goes on in it. Raises Conflict if it is another simulation's."""
        self.path.mkdir(parents=True, exist_ok=True)
        file, said = self.path / "settings.json", canonical_json(settings.model_dump(mode="json"))
        if file.exists() and file.read_bytes() != said:
            raise Conflict(f"{self.path} holds another simulation, with other settings; give another directory")
        write_durably(file, said)

    def rounds(self) -> list[Round]:
        """Those that are done, in order. Raises Conflict for one that cannot be read."""
        found: list[Round] = []
        while (file := self._place(len(found)) / "round.json").exists():
            try:
                found.append(Round.model_validate_json(file.read_bytes()))
            except ValidationError as error:
                raise Conflict(f"{file} is damaged; remove it to go on from the round before") from error
        return found

    def keep(self, told: Round, flat: F32, optimizer: bytes) -> None:
        """Keeps a round, whole or not at all."""
        place = self._place(told.number)
        place.mkdir(parents=True, exist_ok=True)
        write_durably(place / "adapter.safetensors", dump_adapter(flat, {}))
        write_durably(place / "optimizer.safetensors", optimizer)
        write_durably(place / "round.json", told.model_dump_json(indent=1).encode())

    def adapter(self, number: int, size: int) -> F32:
        """B (D,) after a round."""
        return load_adapter((self._place(number) / "adapter.safetensors").read_bytes(), size)

    def optimizer(self, number: int) -> bytes:
        """The server optimizer's state after a round."""
        return (self._place(number) / "optimizer.safetensors").read_bytes()

    def _place(self, number: int) -> Path:
        return self.path / "rounds" / f"{number:04}"


def digest(settings: SimulationSettings, rounds: list[Round]) -> str:
    """sha256 of all that a simulation told but how long it took: equal settings make an equal one."""
    told = [each.model_dump(mode="json", exclude={"seconds"}) for each in rounds]
    return sha256_hex(canonical_json({"settings": settings.model_dump(mode="json"), "rounds": told}))
