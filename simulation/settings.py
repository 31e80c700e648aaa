"""What a simulation is: its population, its data and the cohort, from a TOML file and flags. Knows no program.

    seed = 0
    devices = 200
    rounds = 5
    [data]
    partition = "dirichlet"
    [cohort]
    weights = "examples"
    [cohort.training]
    steps = 10

Every table and field may be left out; `[cohort]` takes what `POST /v1/cohorts` takes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shared.cohort import CohortSettings
from shared.errors import BadRequest
from shared.recipe import MAX_SEED

Partition = Literal["iid", "dirichlet", "source"]
Attack = Literal["sign_flip", "huge", "random", "collusion", "labels", "not_finite", "claims"]
BUILT_IN = "tiny"

# A first try: a random model of a few thousand weights, which learns the built-in task within a few rounds.
TINY_COHORT: dict[str, Any] = {
    "recipe": {
        "rank": 4,
        "alpha": 8,
        "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "queries": 4,
        "effective_batch": 8,
        "sequence_length": 16,
        "loss": "candidates",
    },
    "training": {"steps": 10, "lr": 0.5, "evaluation_interval": 1000},
}
COHORT: dict[str, Any] = {"name": "simulated", "base": "simulated", "task": "sst2", "dataset": "shards"}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataSettings(_Part):
    """Whose data is whose."""

    sources: tuple[str, ...] = Field(
        (),
        description="directories with train.jsonl, and test.jsonl if there is one; none: the built-in task",
    )
    partition: Partition = Field(
        "dirichlet", description="iid; dirichlet: each device's labels in its own proportions; source: one source each"
    )
    alpha: float = Field(
        0.5, gt=0, le=1e6, allow_inf_nan=False, description="dirichlet: concentration; small: one label"
    )
    skew: float = Field(
        0.0, ge=0, le=3, allow_inf_nan=False, description="sigma of a lognormal: how unlike the amounts are"
    )
    per_device: int = Field(20, ge=4, le=100_000, description="examples that a device trains on, on average, at most")
    held_out: int = Field(8, ge=1, le=10_000, description="examples that a device measures on, at most")
    test: int = Field(200, ge=1, le=100_000, description="examples nobody trains on, at most")


class FaultSettings(_Part):
    """What goes wrong."""

    dropout: float = Field(0.0, ge=0, le=1, description="chance that a device which was asked does not answer")
    poisoned: float = Field(0.0, ge=0, le=1, description="share of the devices that attack whenever they are asked")
    attack: Attack = "sign_flip"
    strength: float = Field(10.0, gt=0, le=1e6, allow_inf_nan=False, description="what a sign_flip or huge scales by")


class SimulationSettings(_Part):
    """A whole simulation; with equal settings it makes equal reports."""

    seed: int = Field(0, ge=0, le=MAX_SEED, description="of everything that is drawn")
    devices: int = Field(200, ge=1, le=100_000)
    rounds: int = Field(5, ge=1, le=10_000, description="versions to make; of fedbuff, full buffers")
    participation: float = Field(1.0, gt=0, le=1, description="share of the devices that is asked in a round")
    measured: int = Field(200, ge=1, description="devices whose own accuracy is measured after each round, at most")
    base: str = Field(BUILT_IN, description=f"what `mobizo-server compile --base` takes; {BUILT_IN}: the built-in one")
    data: DataSettings = Field(default_factory=DataSettings)
    faults: FaultSettings = Field(default_factory=FaultSettings)
    cohort: CohortSettings

    @model_validator(mode="after")
    def _fits(self) -> SimulationSettings:
        if self.base == BUILT_IN and self.data.sources:
            raise ValueError("the built-in base knows the built-in task's few words; give --base with data of your own")
        if self.base != BUILT_IN and not self.data.sources:
            raise ValueError("a base of your own needs data.sources to learn from")
        if self.asked < self.cohort.quorum:
            raise ValueError(f"{self.asked} devices are asked in a round; the cohort's quorum is {self.cohort.quorum}")
        return self

    @property
    def asked(self) -> int:
        """How many devices a round asks; of fedbuff, how many train at a time."""
        return max(1, round(self.participation * self.devices))


def read_settings(file: Path | None, given: Mapping[str, Any]) -> SimulationSettings:
    """The settings of a TOML file with what flags give in its place; nested by table.

    Raises BadRequest naming the field.
    """
    try:
        document = {} if file is None else tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadRequest(f"{file} cannot be read as TOML ({error})") from error
    document = merged(document, given)
    defaults = merged(COHORT, TINY_COHORT) if document.get("base", BUILT_IN) == BUILT_IN else COHORT
    try:
        return SimulationSettings.model_validate(merged({"cohort": defaults}, document))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{where}: {first['msg']}".removeprefix(": ")) from error


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`under` with everything of `over` in its place, table by table."""
    result = dict(under)
    for name, value in over.items():
        below = result.get(name)
        result[name] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result
