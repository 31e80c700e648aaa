"""The settings of a simulation (population, data, faults and cohort) from a TOML file and flags.

    seed = 0
    devices = 200
    rounds = 5
    [data]
    partition = "dirichlet"
    [cohort]
    weights = "examples"
    [cohort.training]
    steps = 10

All tables and fields are optional. `[cohort]` has the fields of `POST /v1/cohorts`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, FiniteFloat, ValidationError, model_validator

from shared.errors import BadRequest
from shared.federation.cohort import CohortSettings
from shared.invalid_fields import first_invalid
from shared.recipe import MAX_SEED
from shared.strict_model import StrictModel

Partition = Literal["iid", "dirichlet", "source"]
Attack = Literal["sign_flip", "huge", "random", "collusion", "labels", "not_finite", "claims"]
BUILT_IN = "tiny"

# A random model of a few thousand weights, which learns the built-in task within a few rounds.
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


class DataSettings(StrictModel):
    """The data and its partition among the devices."""

    sources: tuple[str, ...] = Field(
        (),
        description="directories with train.jsonl and optionally test.jsonl; empty: the built-in task",
    )
    partition: Partition = Field(
        "dirichlet", description="iid; dirichlet: label proportions differ by device; source: one source per device"
    )
    alpha: FiniteFloat = Field(
        0.5,
        gt=0,
        le=1e6,
        description="dirichlet: concentration; small values: few labels per device",
    )
    skew: FiniteFloat = Field(0.0, ge=0, le=3, description="sigma of the lognormal distribution of data sizes")
    per_device: int = Field(20, ge=4, le=100_000, description="maximum mean number of training examples per device")
    held_out: int = Field(8, ge=1, le=10_000, description="maximum number of evaluation examples per device")
    test: int = Field(200, ge=1, le=100_000, description="maximum number of test examples")


class FaultSettings(StrictModel):
    """Drop-outs and attacks."""

    dropout: float = Field(0.0, ge=0, le=1, description="probability that a selected device does not answer")
    poisoned: float = Field(0.0, ge=0, le=1, description="share of devices that attack in every round")
    attack: Attack = "sign_flip"
    strength: FiniteFloat = Field(10.0, gt=0, le=1e6, description="scale of the attacks on numbers")


class SimulationSettings(StrictModel):
    """The settings of a simulation. Equal settings give equal reports."""

    seed: int = Field(0, ge=0, le=MAX_SEED, description="seed of all random choices")
    devices: int = Field(200, ge=1, le=100_000)
    rounds: int = Field(5, ge=1, le=10_000, description="number of rounds; with fedbuff, number of full buffers")
    participation: float = Field(1.0, gt=0, le=1, description="share of devices selected per round")
    measured: int = Field(
        200, ge=1, description="maximum number of devices whose accuracy is measured after each round"
    )
    base: str = Field(BUILT_IN, description=f"base model as for `mobizo-server compile --base`; {BUILT_IN}: built in")
    data: DataSettings = Field(default_factory=DataSettings)
    faults: FaultSettings = Field(default_factory=FaultSettings)
    cohort: CohortSettings

    @model_validator(mode="after")
    def _check_combination(self) -> SimulationSettings:
        if self.base == BUILT_IN and self.data.sources:
            raise ValueError("the built-in base supports only the built-in task; set --base to use your own data")
        if self.base != BUILT_IN and not self.data.sources:
            raise ValueError("a base other than the built-in one requires data.sources")
        if self.devices_per_round < self.cohort.quorum:
            raise ValueError(
                f"{self.devices_per_round} devices are selected per round, fewer than the "
                f"cohort's quorum of {self.cohort.quorum}"
            )
        return self

    @property
    def devices_per_round(self) -> int:
        """Number of devices selected in a round; with fedbuff, the number that train at a time."""
        return max(1, round(self.participation * self.devices))


def read_settings(file: Path | None, flags: Mapping[str, Any]) -> SimulationSettings:
    """Returns the settings of a TOML file, overridden by flags (nested by table).

    Raises BadRequest naming the field.
    """
    try:
        document = {} if file is None else tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadRequest(f"{file} cannot be read as TOML ({error})") from error
    document = merged(document, flags)
    defaults = merged(COHORT, TINY_COHORT) if document.get("base", BUILT_IN) == BUILT_IN else COHORT
    try:
        return SimulationSettings.model_validate(merged({"cohort": defaults}, document))
    except ValidationError as error:
        raise BadRequest(str(first_invalid(error))) from error


def merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` overridden by `overrides`, table by table."""
    result = dict(base)
    for name, value in overrides.items():
        nested = result.get(name)
        result[name] = merged(nested, value) if isinstance(nested, Mapping) and isinstance(value, Mapping) else value
    return result
