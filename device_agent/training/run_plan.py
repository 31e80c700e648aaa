"""The plan of a run: what it trains, from which files, and with which settings."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np
from pydantic import Field

from shared.canonical import sha256_hex
from shared.errors import Untrusted
from shared.federation.algorithms import DeviceAlgorithm, algorithm_of
from shared.federation.cohort import RoundTask
from shared.privacy import ExamplePrivacy
from shared.program import ProgramManifest
from shared.recipe import Sha256
from shared.strict_model import StrictModel
from shared.task import Task
from shared.training_settings import TrainingSettings
from shared.zo.lora import F32, load_adapter
from shared.zo.trajectory import TrajectoryHeader


def own_texts() -> tuple[str, ...]:
    """Returns the agent's reference texts, which are measured if the lease has none."""
    lines = Path(__file__).with_name("reference_texts.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


class RunPlan(StrictModel):
    """What a run trains: job, task, settings, program files and data."""

    job_id: str
    job_created_at: datetime | None = Field(
        None, description="the time that chat templates write, the same for the whole run; null: the present time"
    )
    task: Task
    training: TrainingSettings
    manifest: ProgramManifest
    dataset: Path
    program: Path
    weights: Path
    tokenizer: Path
    noise_key: Sha256 = Field(description="of the noise on counts of records (`CountNoise`); stays on the device")
    start: Path | None = None
    start_sha256: Sha256 | None = None
    round: RoundTask | None = Field(None, description="of a cohort; null: the run is its user's own")

    privacy: ExamplePrivacy | None = None
    earlier: dict[str, int] = Field(
        {}, description="records at the beginning of each split that earlier runs had (`rehearsal`)"
    )
    reference_texts: tuple[str, ...] = Field(
        (), description="public texts whose loss is measured at the start and at the end; none: it is not measured"
    )
    measurements: Path | None = Field(None, description="directory of `StartMeasurements`; null: nothing is kept")
    blank: bool = Field(False, description="no training record fits the task; steps leave B as it is")

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of a 0-based step. A blank run's is 0."""
        return 0.0 if self.blank else self.training.lr_at(step)

    @property
    def dynamic_length(self) -> bool:
        """Whether batches are padded only to their longest example. Private runs use the full length, so that one
        example cannot change the rounding of another.
        """
        return self.manifest.dynamic_length and self.privacy is None

    @property
    def device_algorithm(self) -> DeviceAlgorithm:
        """What the device does in the federated algorithm: the round's, or one with the job's own proximal term."""
        if self.round is None:
            return DeviceAlgorithm(self.training.proximal)
        return algorithm_of(self.round.algorithm).device

    @property
    def uploads_last(self) -> bool:
        """Whether B after the last step is uploaded instead of the best validated one.

        Federated averaging (McMahan et al., AISTATS 2017, Algorithm 1) uses the last one: selection on a few local
        examples would add noise. The test split is then not read. A private run may not select by its data either, and
        measures nothing.
        """
        return self.round is not None or self.privacy is not None

    @property
    def header(self) -> TrajectoryHeader:
        """The trajectory's header; a different header means a different run."""
        return TrajectoryHeader(
            job_id=self.job_id,
            job_seed=self.training.seed,
            recipe_id=self.manifest.recipe_id,
            noise=self.manifest.recipe.noise,
            queries=self.manifest.recipe.queries,
            size=self.manifest.size,
            start_sha256=self.start_sha256,
            proximal=self.device_algorithm.mu if self.device_algorithm.has_proximal_term else None,
            exact=self.manifest.recipe.estimator == "gradient",
        )

    def begin_b(self) -> F32:
        """Returns B (D,) before the first step. Raises Untrusted if the start file's hash differs from the plan's."""
        if self.start is None:
            return np.zeros(self.manifest.size, np.float32)
        data = self.start.read_bytes() if self.start.is_file() else b""
        if sha256_hex(data) != self.start_sha256:
            raise Untrusted(f"{self.start} is not the adapter that the run starts from; remove it to download it again")
        return load_adapter(data, self.manifest.size)
